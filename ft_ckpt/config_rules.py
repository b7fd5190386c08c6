"""The rules that check the settings of a saver when it is made."""

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ft_ckpt.errors import Rule, is_number
from ft_ckpt.formats import tensor_formats
from ft_ckpt.messages import expected_one_of, without_secrets
from ft_ckpt.retention import Keep
from ft_ckpt.schedule import Every
from ft_ckpt.storage.places import is_url
from ft_ckpt.values import is_size

if TYPE_CHECKING:
    from ft_ckpt.config import SaverConfig

_DTYPES = ("as_is", "config", "float64", "float32", "bfloat16", "float16")
_CHOICES = {
    "nonfinite": ("save", "raise"),
    "direct_io": ("auto", "on", "off"),
    "digest": ("xxh3", "sha256"),
    "each_rank_writes": ("auto", "on", "off"),
    "reuse_frozen": ("auto", "on", "off"),
    "fan_out": ("auto", "read", "broadcast"),
    "on_failure": ("raise", "warn"),
    "when_full": ("raise", "prune", "wait"),
    "on_difference": ("warn", "raise", "ignore"),
}
_SIZE = "a size above 0, in bytes or such as '5GB' or '5GiB'"


def rules_of(config: "SaverConfig") -> list[Rule]:
    """Return the rules of the settings.

    A rule is the name of a field, a function that says whether a value is valid, and the expected
    value in words.
    """
    return [
        ("every", lambda every: isinstance(every, Every | None), "Every(...), a number or None"),
        ("keep", lambda keep: isinstance(keep, Keep | None), "Keep(...), a number or None"),
        *_rules_of_choices(config),
        _rule_of_compression(config),
        ("max_shard_size", is_size, _SIZE),
        ("snapshot_bytes", lambda limit: limit is None or is_size(limit), f"{_SIZE}, or None"),
        ("enter_timeout_seconds", lambda seconds: is_number(seconds, 0.1), "at least 0.1"),
        ("io_threads", lambda count: count is None or is_number(count, 1), "at least 1, or None"),
        (
            "name_template",
            _is_template,
            "{step} or {epoch}, no other field, no slash, no dot at the beginning",
        ),
        ("background", _is_bool, "True or False"),
        ("lease", _is_bool, "True or False"),
        ("overwrite", _is_bool, "True or False"),
        ("verify_resume", _is_bool, "True or False"),
        ("attribute", _is_text_or_none, "text or None"),
        ("chat_template_name", _is_text_or_none, "text or None"),
        ("base_id", _is_text_or_none, "text or None"),
        (
            "store_options",
            lambda options: isinstance(options, Mapping | None),
            "a mapping of the client's options",
        ),
        ("staging", _is_local_folder, "a folder of this machine, or None"),
        (
            "publish",
            _is_publish_target,
            "a server's URL, several, or a mapping of url=, after_resume= and publish's",
        ),
        ("base_id", _is_without_secrets, "a name without key, password or token"),
    ]


def _rules_of_choices(config: "SaverConfig") -> list[Rule]:
    """Return the rules of the settings that are one of several words."""
    formats = []
    for tensor_format in tensor_formats(str(config.format)):
        if tensor_format.serves_checkpoints:
            formats.append(tensor_format.name)
    choices: dict[str, Sequence[str]] = {"dtype": _DTYPES, "format": formats, **_CHOICES}
    rules: list[Rule] = []
    for name, allowed in choices.items():
        expected = expected_one_of(str(getattr(config, name)), allowed)
        rules.append((name, allowed.__contains__, expected.removeprefix("expected ")))
    return rules


def _rule_of_compression(config: "SaverConfig") -> Rule:
    """Return the rule of the setting `compression`, which depends on `format`."""
    format_by_method: dict[str, str] = {}
    for tensor_format in tensor_formats(str(config.format)):
        for method in tensor_format.compressions:
            format_by_method[method] = tensor_format.name
    methods = [f"{method!r} with format={name!r}" for method, name in format_by_method.items()]
    return (
        "compression",
        lambda method: method is None or format_by_method.get(method) == config.format,
        f"{', '.join(methods)}, which is written with no other filter, or None",
    )


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text_or_none(value: Any) -> bool:
    return isinstance(value, str | None)


def _is_without_secrets(value: Any) -> bool:
    return not isinstance(value, str) or without_secrets(value) == value


def _is_template(template: str) -> bool:
    """Check whether a template gives two steps or epochs different names of visible folders."""
    names = {template.format(step=step, epoch=step) for step in (1, 2)}
    # A name with a dot at the beginning is hidden, and such folders are never listed.
    return len(names) == 2 and "/" not in template and not template.startswith(".")


def _is_local_folder(staging: Any) -> bool:
    is_path = isinstance(staging, (str, os.PathLike)) and bool(os.fspath(staging))
    return staging is None or (is_path and not is_url(staging))


def _is_publish_target(setting: Any) -> bool:
    """Check whether the setting `publish` has URLs of servers, or the folder of a chain of deltas.

    `ServerOptions` checks the rest.
    """
    if setting is None:
        return True
    options: Mapping[Any, Any] = setting if isinstance(setting, Mapping) else {"url": setting}
    if not all(isinstance(name, str) for name in options):
        return False
    if options.get("after_resume", "resumed") not in ("resumed", "published"):
        return False
    urls = options.get("url")
    if isinstance(urls, str):
        urls = [urls]
    if not isinstance(urls, Sequence) or not urls:
        return False
    to_servers = options.get("delta") is not True
    return all(str(url).startswith(("http://", "https://")) == to_servers for url in urls)
