"""The settings of a saver and the rules that check them when it is made."""

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from ft_ckpt.errors import ConfigError, listing
from ft_ckpt.formats.registry import DEFAULT_FORMAT, tensor_formats
from ft_ckpt.retention import Keep
from ft_ckpt.schedule import Every
from ft_ckpt.storage.open_store import is_url

_DTYPES = ("as_is", "config", "float64", "float32", "bfloat16", "float16")
_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


@dataclass(frozen=True, kw_only=True)
class SaverConfig:
    """Settings of a `CheckpointSaver`; every field may also be given to it as a keyword.

    Raises ConfigError, with every problem at once, when a value cannot work.
    """

    dtype: str = "as_is"
    """Floating-point type in the file: "as_is", "config" (what the model's config says), a torch type or its name."""
    format: str = DEFAULT_FORMAT
    """Of weight files: "safetensors", "h5" (HDF5), or "dual" (one file that is valid as both)."""
    compression: str | None = None
    """Of HDF5 files: "zstd", "lz4", "blosc2" (by hdf5plugin) or "gzip" (any reader); None writes them to be mapped."""
    max_shard_size: int | str = "50GB"
    """Largest weight file, in bytes or as "5GB" (decimal units, as in transformers) or "5GiB"."""
    attribute: str | None = None
    """Submodule whose weights the folder holds, such as "policy"; a run keeps the rest with its state. None: all."""
    chat_template_name: str | None = None
    """Names containing "olmo" end generation at <|im_end|> and <|endoftext|>; None keeps the model's own settings."""
    base_id: str | None = None
    """Name on the Hub of an adapter's base that was loaded from a folder; adapter configs and cards then say it."""
    bucket_bytes: int = 256 << 20
    """Memory rank 0 may use for tensors on their way from other ranks to the disk, in bytes."""
    nonfinite: str = "save"
    """NaN and infinities in weights: "save" writes them as they are, "raise" refuses the checkpoint."""
    name_template: str = "checkpoint-{step}"
    """Folder in the directory: {step}, {epoch} (passes done); without {step}, saves of one epoch replace each other."""
    enter_timeout_seconds: float = 600.0
    """How long ranks wait for each other to call `save` before the missing ones are named in an error."""
    io_threads: int | None = None
    """Writer threads on each rank that writes; None: 4. Up to 32 MB on a local disk are written without any."""
    io_block_bytes: int = 8 << 20
    """Memory written at once, in bytes, a multiple of 4096; two more blocks are held than there are threads."""
    direct_io: str = "auto"
    """Unbuffered writes (O_DIRECT): "auto" for files from 8 MiB on where the file system takes them, "on", "off"."""
    io_priority: str = "normal"
    """Of what a save in the background writes, where the disk's scheduler looks at it: "normal" or "low"."""
    each_rank_writes: str = "auto"
    """Several ranks write, in one file system each what it holds, in a bucket each some of the files: "auto" where it
    pays, "on", or "off" (rank 0 alone)."""
    reuse_frozen: str = "auto"
    """Frozen tensors in files of their own that later checkpoints link to: "auto" where it pays, "on", or "off"."""
    background: bool = False
    """`save` and `save_state` return at once; the checkpoint is written while training goes on."""
    snapshot_bytes: int | str | None = None
    """Largest host copy of a save in the background, on each rank, in bytes or as "5GB"; larger saves are not."""
    every: Every | None = None
    """When `step` saves a checkpoint to resume from; a number is of steps. None: only when it is told to."""
    keep: Keep | None = None
    """Which checkpoints of the run stay after such a save; a number is of the newest. None: all."""
    on_failure: str = "raise"
    """A save by `step` that fails: "raise", or "warn" and go on training."""
    when_full: str = "raise"
    """A disk without room for a checkpoint: "raise"; "prune" as `keep` says first; "wait" until there is room."""
    on_difference: str = "warn"
    """A run resumed with other settings than it was saved with, or a tensor that all ranks should hold alike and do not
    when it is saved (rank 0's is taken, a run keeps each rank's own): "warn", "raise" or "ignore"."""
    fan_out: str = "auto"
    """Who reads a checkpoint: each rank its part ("read"), or ("broadcast") rank 0 what all hold alike. "auto" is
    "read", but for small ranges in a bucket, which rank 0 reads for all."""
    store_options: Mapping[str, Any] | None = None
    """Of the client of an object store that a URL leads to, as `ft_ckpt.open_place` takes them."""
    staging: str | os.PathLike[str] | None = None
    """A folder of this machine, of the run alone: checkpoints for a bucket are committed there, and uploaded while
    training goes on; a run resumes from the newest of both."""
    overwrite: bool = False
    """In a bucket a save may take the place of a checkpoint of its name, which is gone before the new one is whole;
    `save` and `save_state` take it, too, for one save."""
    verify_resume: bool = True
    """Compare the digests of all files of a checkpoint that a run is resumed from, most of them while they are read."""

    def __post_init__(self) -> None:
        for name, meant in (("dtype", canonical_dtype), ("every", every_of), ("keep", keep_of)):
            object.__setattr__(self, name, meant(getattr(self, name)))
        problems = [problem for rule in _RULES for problem in rule(self)]
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def max_shard_bytes(self) -> int:
        """`max_shard_size` in bytes."""
        return parse_size(self.max_shard_size)

    @property
    def client_options(self) -> dict[str, Any]:
        """`store_options`, none where they were not given."""
        return dict(self.store_options or {})

    @property
    def rankings(self) -> dict[str, str]:
        """The metrics that checkpoints of the run are ranked by, each with "min" or "max"."""
        keep, every = self.keep or Keep(), self.every or Every()
        ranked = [(name, mode) for name, mode, _ in (*keep.rankings, *(keep.state or Keep()).rankings)]
        return dict(ranked if every.best is None else [*ranked, every.best])


def make_config(config: SaverConfig | None, settings: dict[str, Any]) -> SaverConfig:
    """The configuration given as an object or as keywords, not both; ConfigError names unknown keywords."""
    if config is not None and settings:
        raise ConfigError(f"config= and {', '.join(sorted(settings))}= were both given; use one of the two ways")
    known = [field.name for field in fields(SaverConfig)]
    unknown = sorted(set(settings) - set(known))
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: not a setting; settings are {', '.join(known)}")
    return config or SaverConfig(**settings)


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics as floats: of this moment, whatever numbers or tensors of one element they were.

    Raises ConfigError naming all that are no real number.
    """
    found = {name: _number_of(value) for name, value in metrics.items()}
    problems = [f"{name} is {_value_kind(metrics[name])}" for name, value in found.items() if value is None]
    problems += [f"the name {name!r} is no text" for name in found if not isinstance(name, str)]
    if problems:
        raise ConfigError(f"metrics: {listing(problems)}; expected a name and one real number for each")
    return {name: value for name, value in found.items() if value is not None}


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
    """Bytes in `size`: an int, or a string such as "500MB" (decimal units) or "500MiB" (binary ones).

    Raises ConfigError when it is neither.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*", str(size).upper())
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"{size!r} is not a size; write bytes as a number, or a string such as '5GB' or '5GiB'")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))


def human_size(size_bytes: float) -> str:
    """Bytes in decimal units."""
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    power = min(4, (len(str(int(size_bytes))) - 1) // 3)
    return f"{size_bytes / 1000**power:.1f} {'KMGT'[power - 1]}B"


def canonical_dtype(dtype: Any) -> Any:
    """A torch type, or one of its short names, by torch's name ("bfloat16"); anything else as it is."""
    name = str(dtype).removeprefix("torch.") if type(dtype).__name__ == "dtype" else dtype
    return _SHORT.get(name, name.removeprefix("torch.")) if isinstance(name, str) else name


def every_of(every: Any) -> Any:
    """An `Every`, where a number stands for one of so many steps; anything else as it is."""
    return Every(steps=every) if _is_count(every) else every


def keep_of(keep: Any) -> Any:
    """A `Keep`, where a number stands for the newest so many; anything else as it is."""
    return Keep(last=keep) if _is_count(keep) else keep


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dtype_rule(config: SaverConfig) -> list[str]:
    return [] if config.dtype in _DTYPES else [f"dtype={config.dtype!r}: expected one of {', '.join(_DTYPES)}"]


def _size_rule(config: SaverConfig) -> list[str]:
    problems = []
    for name in ("max_shard_size", "snapshot_bytes"):
        value = getattr(config, name)
        try:
            if value is not None and parse_size(value) <= 0:
                problems.append(f"{name}={value!r}: must be larger than 0")
        except ConfigError as error:
            problems.append(f"{name}: {error}")
    return problems


def _choice_rule(config: SaverConfig) -> list[str]:
    choices = {
        "format": tuple(known.name for known in tensor_formats() if known.serves_checkpoints),
        "nonfinite": ("save", "raise"),
        "direct_io": ("auto", "on", "off"),
        "io_priority": ("normal", "low"),
        "each_rank_writes": ("auto", "on", "off"),
        "reuse_frozen": ("auto", "on", "off"),
        "fan_out": ("auto", "read", "broadcast"),
        "on_failure": ("raise", "warn"),
        "when_full": ("raise", "prune", "wait"),
        "on_difference": ("warn", "raise", "ignore"),
    }
    return [
        f"{name}={getattr(config, name)!r}: expected one of {', '.join(allowed)}"
        for name, allowed in choices.items()
        if getattr(config, name) not in allowed
    ]


def _bounds_rule(config: SaverConfig) -> list[str]:
    least = {"bucket_bytes": 1 << 16, "enter_timeout_seconds": 0.1, "io_threads": 1, "io_block_bytes": 1 << 16}
    problems = [
        f"{name}={getattr(config, name)!r}: must be at least {bound}"
        for name, bound in least.items()
        if getattr(config, name) is not None and not getattr(config, name) >= bound
    ]
    if config.io_block_bytes % 4096:
        problems.append(f"io_block_bytes={config.io_block_bytes}: must be a multiple of 4096, as unbuffered writes are")
    return problems


def _template_rule(config: SaverConfig) -> list[str]:
    with suppress(ValueError, LookupError, AttributeError):  # what `format` makes of it
        names = {config.name_template.format(step=step, epoch=step) for step in (1, 2)}
        if len(names) == 2 and "/" not in config.name_template:
            return []
    return [f"name_template={config.name_template!r}: must contain {{step}} or {{epoch}}, no other field and no slash"]


def _compression_rule(config: SaverConfig) -> list[str]:
    methods = {method: known.name for known in tensor_formats() for method in known.compressions}
    if config.compression is None:
        return []
    if config.compression not in methods:
        return [f"compression={config.compression!r}: expected {', '.join(methods)} or None"]
    if config.format != methods[config.compression]:
        only = f"only format={methods[config.compression]!r} is compressed"
        return [f"compression={config.compression!r} and format={config.format!r}: {only}"]
    return []


def _class_rule(config: SaverConfig) -> list[str]:
    wanted = {"every": Every, "keep": Keep}
    return [
        f"{name}={getattr(config, name)!r}: expected {kind.__name__}(...), a number or None"
        for name, kind in wanted.items()
        if not isinstance(getattr(config, name), kind | None)
    ]


def _staging_rule(config: SaverConfig) -> list[str]:
    staging = config.staging
    if staging is None or (isinstance(staging, (str, os.PathLike)) and os.fspath(staging) and not is_url(staging)):
        return []
    return [f"staging={str(staging)!r}: expected a folder of this machine, or None"]


_RULES = (
    _class_rule,
    _compression_rule,
    _dtype_rule,
    _size_rule,
    _choice_rule,
    _bounds_rule,
    _template_rule,
    _staging_rule,
)
