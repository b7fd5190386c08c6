"""The arguments of `publish`: all are checked where they are given, and none is sent before."""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from ft_ckpt.engines.client import Client
from ft_ckpt.errors import ConfigError, Rule, check_settings, is_number, listing
from ft_ckpt.storage.place import Place, is_url

_KINDS = ("auto", "adapter", "weights")
_IN_FLIGHT = ("wait", "keep", "abort")
_CHECKS = ("all", "listed")
_MIN_TIMEOUT_SECONDS = 0.001
_MAX_TIMEOUT_SECONDS = 30 * 24 * 3600.0  # timers take no more than some centuries
_OF_CHAINS = ("delta", "anchor_every")


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """The arguments of `publish` beside checkpoint and URLs. Raises ConfigError naming all invalid ones."""

    name: str | None = None
    version: str | None = None
    kind: str = "auto"
    part: str | None = None
    visible_at: Mapping[str, str] = field(default_factory=dict)
    stage: Path | None = None
    keep: int = 2
    in_flight: str = "wait"
    check: str = "all"
    base: Any = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_seconds: float = 300.0
    delta: bool = False
    anchor_every: int = 10

    def __post_init__(self) -> None:
        check_settings(self, _RULES)
        if not _is_header_map(self.headers):
            raise ConfigError("headers: expected names with values, all text")  # without them: they may be tokens
        object.__setattr__(self, "timeout_seconds", float(self.timeout_seconds))
        self._check_chain()

    def _check_chain(self) -> None:
        """Raise ConfigError for arguments of servers that come with `delta`, and of chains that come without it."""
        plain = {each.name: each.default for each in fields(self) if each.default is not MISSING}
        changed = {name for name, default in plain.items() if getattr(self, name) != default}
        if self.delta:
            wrong, reason = sorted(changed - {*_OF_CHAINS}), "of servers; a chain (delta=True) has no such"
        else:
            wrong, reason = sorted(changed & {"anchor_every"}), "of chains; give delta=True"
        if wrong:
            raise ConfigError(f"{listing(wrong, ', ')}: {reason}")

    def check_urls(self, urls: Sequence[str]) -> None:
        """Raise ConfigError for invalid or repeated URLs, a chain without `delta`, a server or two chains with it."""
        if not urls or len({url.rstrip("/") for url in urls}) < len(urls):
            raise ConfigError(f"{', '.join(urls) or 'no URL'}: expected one or more servers, each once")
        for url in urls:
            is_server = url.partition("://")[0].lower() in ("http", "https")
            if self.delta and is_server:
                raise ConfigError(
                    f"{url}: delta=True appends to a chain, expected a folder or a bucket; a server gets an entry of "
                    "the chain by another publish, with stage="
                )
            if not self.delta:
                Client(url, self.headers, self.timeout_seconds)
        if self.delta and len(urls) > 1:
            raise ConfigError(f"{', '.join(urls)}: expected one chain")


def urls_in(url: str | Iterable[str]) -> list[str]:
    """The URLs in an argument: one, or several. Raises ConfigError for anything but text."""
    is_group = isinstance(url, Iterable) and not isinstance(url, (str, bytes, Mapping))
    urls: list[Any] = list(url) if is_group else [url]
    if wrong := [text for text in urls if not _is_text(text)]:
        raise ConfigError(f"url={wrong[0]!r}: expected the address of a server or a chain as text, or several")
    return urls


def stage_folder(stage: str | os.PathLike[str] | None) -> Path | None:
    """The folder in the argument `stage`. Raises ConfigError for anything but a local folder or None."""
    if stage is None:
        return None
    text = os.fspath(stage) if isinstance(stage, (str, os.PathLike)) else stage
    if not _is_path(text):
        raise ConfigError(f"stage={stage!r}: expected a folder of this machine, or None")
    return Path(text)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_name(value: Any) -> bool:
    return value is None or (isinstance(value, str) and re.fullmatch(r"[\w.-]+", value) is not None)


def _is_path(text: Any) -> bool:
    return _is_text(text) and bool(text) and not is_url(text)


def _is_map_of_folders(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_path, [*value, *value.values()]))


def _is_base(value: Any) -> bool:
    is_model = callable(getattr(value, "named_modules", None))
    return value is None or is_model or isinstance(value, Place) or _is_text(os.fspath(value))


def _is_header_map(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(text, str) for text in [*value, *value.values()])


def _one_of(name: str, choices: Sequence[str]) -> Rule:
    return name, lambda value: isinstance(value, str) and value in choices, f"one of {', '.join(choices)}"


_NAME = "letters, digits, dots, dashes and underscores"
_RULES: list[Rule] = [
    ("name", _is_name, _NAME),
    ("version", _is_name, _NAME),
    _one_of("kind", _KINDS),
    ("part", lambda part: part is None or isinstance(part, str), "the name of a part, or None"),
    ("visible_at", _is_map_of_folders, "folders of this machine with their paths on the servers"),
    ("stage", lambda stage: stage is None or isinstance(stage, Path), "a Path, or None"),
    ("keep", lambda keep: is_number(keep, 0, whole=True), "a number of older versions, at least 0"),
    _one_of("in_flight", _IN_FLIGHT),
    _one_of("check", _CHECKS),
    ("base", _is_base, "a model, the path or the name of one, or None"),
    (
        "timeout_seconds",
        lambda seconds: is_number(seconds, _MIN_TIMEOUT_SECONDS, _MAX_TIMEOUT_SECONDS) and math.isfinite(seconds),
        f"a number of seconds from {_MIN_TIMEOUT_SECONDS:g} to {_MAX_TIMEOUT_SECONDS:,.0f}",
    ),
    ("delta", lambda delta: isinstance(delta, bool), "True or False"),
    ("anchor_every", lambda count: is_number(count, 1, whole=True), "a number of entries, at least 1"),
]
