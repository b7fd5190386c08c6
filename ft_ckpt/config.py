"""The settings of a saver and the rules that check them when it is made."""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeGuard

from typing_extensions import Unpack

from ft_ckpt.errors import ConfigError, Rule, check_settings, is_number, listing
from ft_ckpt.formats import DEFAULT_FORMAT, tensor_formats
from ft_ckpt.messages import did_you_mean, expected_one_of, without_secrets
from ft_ckpt.retention import Keep
from ft_ckpt.schedule import Every
from ft_ckpt.storage.places import absolute_location, is_url, open_place

if TYPE_CHECKING:
    import torch

_DTYPES = ("as_is", "config", "float64", "float32", "bfloat16", "float16")
_SHORT = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}


@dataclass(frozen=True, kw_only=True)
class SaverConfig:
    """Settings of a `CheckpointSaver`; every field may also be given to it as a keyword.

    Raises ConfigError, with every problem at once, when a value cannot work.
    """

    dtype: str = "as_is"
    """Floating-point type in the file: "as_is", "config" (that of the model's config), a torch type
    or its name.
    """
    format: str = DEFAULT_FORMAT
    """Format of weight files: "safetensors", "h5" (HDF5), or "dual" (one file that is valid as
    both).
    """
    compression: str | None = None
    """HDF5 compression: "gzip", which every reader of HDF5 has; None: uncompressed, mappable."""
    max_shard_size: int | str = "50GB"
    """Largest weight file, in bytes or as "5GB" (decimal units, as in transformers) or "5GiB"."""
    attribute: str | None = None
    """Submodule whose weights the folder holds, such as "policy"; a run stores the rest with its
    state. None: all.
    """
    chat_template_name: str | None = None
    """Names containing "olmo" end generation at <|im_end|> and <|endoftext|>; None keeps the
    model's own settings.
    """
    base_id: str | None = None
    """Name on the Hub of an adapter's base that was loaded from a folder, for adapter configs and
    model cards.
    """
    nonfinite: Literal["save", "raise"] = "save"
    """NaN and infinities in weights: "save" writes them, "raise" refuses the checkpoint."""
    name_template: str = "checkpoint-{step}"
    """Folder in the directory: {step}, {epoch} (finished); without {step}, saves of one epoch
    replace each other.
    """
    enter_timeout_seconds: float = 600.0
    """Time that ranks wait for each other to call `save`, in seconds; then an error names the
    missing ranks.
    """
    io_threads: int | None = None
    """Writer threads on each rank that writes; None: 4.

    Up to 32 MiB on a local disk are written without threads.
    """
    direct_io: Literal["auto", "on", "off"] = "auto"
    """Unbuffered writes (O_DIRECT): "auto" for files from 8 MiB on if the file system supports
    them, "on", "off".
    """
    digest: Literal["xxh3", "sha256"] = "xxh3"
    """Digests of weight files: "xxh3", or "sha256" to store SHA-256 too, so that `sign` need not
    read the files again. A file that several ranks write gets no SHA-256.
    """
    each_rank_writes: Literal["auto", "on", "off"] = "auto"
    """Each rank writes its own bytes (in a bucket: some of the files): "on", "off" (rank 0 writes
    everything), or "auto" (where it is faster).
    """
    reuse_frozen: Literal["auto", "on", "off"] = "auto"
    """Write frozen tensors as separate files, which later checkpoints hard-link: "on", "off", or
    "auto" (if large).
    """
    background: bool = False
    """`save` and `save_state` return at once; the checkpoint is written while training continues.
    """
    snapshot_bytes: int | str | None = None
    """Limit of the host copy of a background save on each rank, in bytes or as "5GB"; larger saves
    block.
    """
    every: Every | None = None
    """When `step` saves a checkpoint to resume from; a number means steps.

    None: only on request.
    """
    keep: Keep | None = None
    """Which checkpoints of the run stay after each save of its state; a number means the newest n.

    None: all.
    """
    on_failure: Literal["raise", "warn"] = "raise"
    """After a failed save by `step`: "raise", or "warn" and continue."""
    when_full: Literal["raise", "prune", "wait"] = "raise"
    """On a disk without room for a checkpoint: "raise"; "prune" by `keep` first; "wait" until there
    is room.
    """
    on_difference: Literal["warn", "raise", "ignore"] = "warn"
    """If a resumed run has other settings than the saved one, or replicas differ at a save: "warn",
    "raise" or "ignore".
    """
    fan_out: Literal["auto", "read", "broadcast"] = "auto"
    """Who reads a checkpoint: "read" (each rank its part), "broadcast" (rank 0 reads replicated
    tensors for all), or "auto" ("read", but "broadcast" for small ranges in a bucket).
    """
    # may have secret keys
    store_options: Mapping[str, Any] | None = field(default=None, repr=False)
    """Options of the client of a URL's object store, as for `ft_ckpt.open_place`."""
    lease: bool = True
    """Allow one training process for the directory; a second one gets an error that names the
    first. False: allow several, which may overwrite each other's checkpoints.
    """
    staging: str | os.PathLike[str] | None = None
    """A local folder for this run alone.

    Checkpoints for a bucket are committed there, then uploaded during training. A resume takes the
    newest checkpoint of both places.
    """
    overwrite: bool = False
    """Replace a checkpoint of the same name in a bucket.

    The old one is deleted before the new one is complete. Also an argument of `save` and
    `save_state`.
    """
    # may have secret headers
    publish: str | Sequence[str] | Mapping[str, Any] | None = field(default=None, repr=False)
    """Inference servers to update after each save: a URL, a list, or a dict of fields of
    `ServerOptions`. See docs/publish.md.
    """
    verify_resume: bool = True
    """Compare the digests of all files on a resume, before anything is overwritten."""

    # the constructor accepts more than the fields hold: a number for `every`, a torch type
    if TYPE_CHECKING:

        def __init__(
            self, *, background: bool = False, **settings: Unpack["SaverSettings"]
        ) -> None: ...

    def __post_init__(self) -> None:
        for name, meant in (("dtype", canonical_dtype), ("every", every_of), ("keep", keep_of)):
            object.__setattr__(self, name, meant(getattr(self, name)))
        check_settings(self, _rules_of(self))
        if self.staging is not None:
            object.__setattr__(self, "staging", absolute_location(self.staging))
        object.__setattr__(self, "publish", _absolute_goal(self.publish))

    @property
    def max_shard_bytes(self) -> int:
        return parse_size(self.max_shard_size)

    @property
    def client_options(self) -> dict[str, Any]:
        return dict(self.store_options or {})

    @property
    def rankings(self) -> dict[str, str]:
        """The metrics that checkpoints of the run are ranked by, each with "min" or "max"."""
        keep, every = self.keep or Keep(), self.every or Every()
        ranked = [
            (name, mode) for name, mode, _ in (*keep.rankings, *(keep.state or Keep()).rankings)
        ]
        return dict(ranked if every.best is None else [*ranked, every.best])


class SaveSettings(TypedDict, total=False):
    """The fields of `SaverConfig` as type checkers and editors see them in keywords, but for those
    of `SaverSettings`.

    `background` is an argument of its own where it decides what saves return.
    """

    dtype: "str | torch.dtype"
    format: str
    compression: str | None
    max_shard_size: int | str
    attribute: str | None
    chat_template_name: str | None
    base_id: str | None
    nonfinite: Literal["save", "raise"]
    name_template: str
    enter_timeout_seconds: float
    io_threads: int | None
    direct_io: Literal["auto", "on", "off"]
    digest: Literal["xxh3", "sha256"]
    each_rank_writes: Literal["auto", "on", "off"]
    reuse_frozen: Literal["auto", "on", "off"]
    snapshot_bytes: int | str | None
    on_failure: Literal["raise", "warn"]
    when_full: Literal["raise", "prune", "wait"]
    on_difference: Literal["warn", "raise", "ignore"]
    fan_out: Literal["auto", "read", "broadcast"]
    store_options: Mapping[str, Any] | None
    staging: str | os.PathLike[str] | None
    overwrite: bool
    publish: str | Sequence[str] | Mapping[str, Any] | None
    verify_resume: bool
    lease: bool


class SaverSettings(SaveSettings, total=False):
    """The settings of a `CheckpointSaver`; those that a Trainer has arguments of its own for are
    here.
    """

    every: Every | int | None
    keep: Keep | int | None


def make_config(config: SaverConfig | None, settings: Mapping[str, object]) -> SaverConfig:
    """The configuration given as an object or as keywords, not both; ConfigError names unknown
    keywords.
    """
    if config is not None and settings:
        raise ConfigError(
            f"config= and {', '.join(sorted(settings))}= were both given; use one of the two ways"
        )
    if not isinstance(config, SaverConfig | None):
        raise ConfigError(
            f"config: a {type(config).__name__}, expected SaverConfig(...); or "
            "give settings as keywords"
        )
    names = [field.name for field in fields(SaverConfig)]
    unknown = sorted(set(settings) - set(names))
    if unknown:
        advice = [f"{name}: not a setting; {_instead_of(name, names)}" for name in unknown]
        raise ConfigError(listing(advice))
    values: dict[str, Any] = dict(settings)
    return config or SaverConfig(**values)


# Names that users of transformers' TrainingArguments and of other savers know, and what does it
# here.
FAMILIAR_NAMES = {
    "hub_model_id": "push_to_hub= of save",
    "load_best_model_at_end": "ft_ckpt.load_model(ft_ckpt.best(directory, metric))",
    "metric_for_best_model": 'keep=Keep(best=("eval_loss", "min"))',
    "output_dir": "directory, the second argument",
    "overwrite_output_dir": (
        "saver.resume('never') to begin afresh, overwrite= to replace a checkpoint in a bucket"
    ),
    "push_to_hub": "push_to_hub= of save",
    "resume_from_checkpoint": "saver.resume(checkpoint)",
    "safe_serialization": 'format="safetensors", the default',
    "save_dir": "directory, the second argument",
    "save_only_model": "saver.save(model), without save_state",
    "save_safetensors": 'format="safetensors", the default',
    "save_steps": "every=, as every=500",
    "save_strategy": "every=Every(steps=...) or Every(epochs=...)",
    "save_total_limit": "keep=, as keep=3",
    "torch_dtype": "dtype=",
}


def _instead_of(name: str, names: Sequence[str]) -> str:
    """What to write instead of a setting that does not exist."""
    if name in FAMILIAR_NAMES:
        return f"use {FAMILIAR_NAMES[name]}"
    return did_you_mean([name], names) or f"settings are {', '.join(names)}"


def numbers_of(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """The current values of `metrics` as floats, from numbers and from tensors or arrays of one
    element; {} for None.

    Raises ConfigError naming all that are not one real number, and for anything but a mapping.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics={metrics!r:.80}: expected a name and a number for each, "
            f"such as {{'loss': 0.5}}"
        )
    numbers = {name: _number_of(value) for name, value in metrics.items()}
    problems = [
        f"{name} is {_value_kind(metrics[name])}"
        for name, value in numbers.items()
        if value is None
    ]
    problems += [f"the name {name!r} is no text" for name in numbers if not isinstance(name, str)]
    if problems:
        raise ConfigError(
            f"metrics: {listing(problems)}; expected a name and one real number for each"
        )
    return {name: value for name, value in numbers.items() if value is not None}


def step_of(step: Any) -> int | None:
    """`step` as an int, None for None. Raises ConfigError unless it is a whole number from 0 on."""
    return None if step is None else whole_step(step)


def whole_step(step: Any) -> int:
    """`step` as an int. Raises ConfigError unless it is a whole number from 0 on."""
    if not is_number(step, 0, whole=True):
        raise ConfigError(f"step={step!r:.80}: expected a whole number from 0 on")
    return int(step)


def names_of(names: Any, what: str) -> tuple[str, ...]:
    """The names in the argument `what`: an iterable of them, or one.

    Raises ConfigError for anything else.
    """
    if isinstance(names, str):
        return (names,)
    items = tuple(names) if isinstance(names, Iterable) else (names,)
    if not all(isinstance(name, str) for name in items):
        raise ConfigError(f"{what}: {names!r:.80}: expected names in a list")
    return items


def _number_of(value: Any) -> float | None:
    """`value` as a float; None when it is not one real number."""
    shape = getattr(value, "shape", ())
    if isinstance(value, (str, bytes, bytearray)) or math.prod(shape) != 1:
        return None
    try:
        return float(value.item() if shape else value)
    except (TypeError, ValueError, OverflowError):
        return None


def _value_kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {list(shape)}" if shape else "")


def parse_size(size: int | str) -> int:
    """Bytes in `size`: an int, or a string such as "500MB" (decimal units) or "500MiB" (binary
    ones).

    Raises ConfigError when it is neither.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", str(size).upper())
    if match is None or (match[3] and not match[2]):
        raise ConfigError(
            f"{size!r} is not a size; write bytes as a number, or a string such as '5GB' or '5GiB'"
        )
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))


def is_size(value: Any) -> bool:
    """Whether `parse_size` gives at least one byte for the value."""
    with suppress(ConfigError):
        return parse_size(value) > 0
    return False


def human_size(size_bytes: float) -> str:
    """Bytes in decimal units."""
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    power = min(4, (len(str(int(size_bytes))) - 1) // 3)
    return f"{size_bytes / 1000**power:.1f} {'KMGT'[power - 1]}B"


def canonical_dtype(dtype: Any) -> Any:
    """torch's name ("bfloat16") of a torch type, given as such or by a short name; anything else
    unchanged.
    """
    name = str(dtype).removeprefix("torch.") if type(dtype).__name__ == "dtype" else dtype
    return _SHORT.get(name, name.removeprefix("torch.")) if isinstance(name, str) else name


def every_of(every: Any) -> Any:
    """`every`, with a number n replaced by `Every(steps=n)`; anything else unchanged."""
    return Every(steps=every) if isinstance(every, int) and not isinstance(every, bool) else every


def keep_of(keep: Any) -> Any:
    """`keep`, with a number n replaced by `Keep(last=n)`; anything else unchanged."""
    return Keep(last=keep) if isinstance(keep, int) and not isinstance(keep, bool) else keep


def _rules_of(config: SaverConfig) -> list[Rule]:
    formats = tensor_formats(str(config.format))
    methods: dict[str, str] = {}
    for tensor_format in formats:
        for method in tensor_format.compressions:
            methods[method] = tensor_format.name
    choices = {
        "dtype": _DTYPES,
        "format": tuple(entry.name for entry in formats if entry.serves_checkpoints),
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
    compressions = ", ".join(f"{method!r} with format={name!r}" for method, name in methods.items())
    size = "a size above 0, in bytes or such as '5GB' or '5GiB'"
    return [
        ("every", lambda every: isinstance(every, Every | None), "Every(...), a number or None"),
        ("keep", lambda keep: isinstance(keep, Keep | None), "Keep(...), a number or None"),
        *(
            (field, allowed.__contains__, _one_of(getattr(config, field), allowed))
            for field, allowed in choices.items()
        ),
        (
            "compression",
            lambda method: method is None or methods.get(method) == config.format,
            f"{compressions}, which is written with no other filter, or None",
        ),
        ("max_shard_size", is_size, size),
        ("snapshot_bytes", lambda limit: limit is None or is_size(limit), f"{size}, or None"),
        ("enter_timeout_seconds", lambda seconds: is_number(seconds, 0.1), "at least 0.1"),
        ("io_threads", lambda count: count is None or is_number(count, 1), "at least 1, or None"),
        (
            "name_template",
            _is_template,
            "{step} or {epoch}, no other field, no slash, no dot at the beginning",
        ),
        *(
            (switch, _is_bool, "True or False")
            for switch in ("background", "lease", "overwrite", "verify_resume")
        ),
        *(
            (name, _is_text_or_none, "text or None")
            for name in ("attribute", "chat_template_name", "base_id")
        ),
        (
            "store_options",
            lambda options: isinstance(options, Mapping | None),
            "a mapping of the client's options",
        ),
        ("staging", _is_local_folder, "a folder of this machine, or None"),
        (
            "publish",
            _is_publish_goal,
            "a server's URL, several, or a mapping of url=, after_resume= and publish's",
        ),
        (
            "base_id",
            _is_without_secrets,
            "a name without key, password or token",
        ),
    ]


def _one_of(value: Any, allowed: Sequence[str]) -> str:
    return expected_one_of(str(value), allowed).removeprefix("expected ")


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text_or_none(value: Any) -> bool:
    return isinstance(value, str | None)


def _is_without_secrets(value: Any) -> bool:
    return not isinstance(value, str) or without_secrets(value) == value


def _is_template(template: str) -> bool:
    names = {template.format(step=step, epoch=step) for step in (1, 2)}
    # hidden: never listed
    return len(names) == 2 and "/" not in template and not template.startswith(".")


def _is_publish_goal(goal: Any) -> bool:
    if isinstance(goal, Mapping) and not all(isinstance(name, str) for name in goal):
        return False
    urls = goal.get("url") if isinstance(goal, Mapping) else goal
    many: Any = [urls] if isinstance(urls, str) else urls if isinstance(urls, Sequence) else ()
    # `ServerOptions` checks its URL
    to_chain = isinstance(goal, Mapping) and goal.get("delta") is True
    to_servers = not to_chain
    are_urls = (str(url).startswith(("http://", "https://")) == to_servers for url in many)
    is_known = not isinstance(goal, Mapping) or goal.get("after_resume", "resumed") in (
        "resumed",
        "published",
    )
    return goal is None or (bool(many) and all(are_urls) and is_known)


def _absolute_goal(goal: Any) -> Any:
    """The setting `publish` with absolute paths: it is used long after, perhaps in another working
    directory.
    """
    if not isinstance(goal, Mapping):
        return goal
    absolute = dict(goal)
    for name in ("stage", "base"):
        path = absolute.get(name)
        is_hub_id = name == "base" and isinstance(path, str) and not open_place(path).is_folder
        if _is_path(path) and not is_hub_id:
            absolute[name] = absolute_location(path)
    if isinstance(goal.get("visible_at"), Mapping):
        folders = goal["visible_at"].items()
        absolute["visible_at"] = {
            absolute_location(path) if _is_path(path) else path: seen for path, seen in folders
        }
    if goal.get("delta") is True and isinstance(goal.get("url"), (str, os.PathLike)):
        absolute["url"] = absolute_location(goal["url"])
    return absolute


def _is_path(value: Any) -> TypeGuard[str | os.PathLike[str]]:
    """Whether it may be a path; `ServerOptions` refuses other values."""
    return isinstance(value, (str, os.PathLike)) and os.fspath(value) not in ("", b"")


def _is_local_folder(staging: Any) -> bool:
    is_path = isinstance(staging, (str, os.PathLike)) and bool(os.fspath(staging))
    return staging is None or (is_path and not is_url(staging))
