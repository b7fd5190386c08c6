"""Defines the settings of a saver. `config_rules` has the rules that check them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeGuard

from typing_extensions import Unpack

from ft_ckpt.config_rules import rules_of
from ft_ckpt.errors import ConfigError, check_settings, listing
from ft_ckpt.formats import DEFAULT_FORMAT
from ft_ckpt.messages import did_you_mean
from ft_ckpt.retention import Keep
from ft_ckpt.schedule import Every
from ft_ckpt.storage.places import absolute_location, open_place
from ft_ckpt.values import canonical_dtype, parse_size

if TYPE_CHECKING:
    import torch


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
    """Each rank writes its own bytes (in a bucket, and on network disks where files must have one
    writer: some of the files): "on", "off" (rank 0 writes everything), or "auto" (where it is
    faster).
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
        object.__setattr__(self, "dtype", canonical_dtype(self.dtype))
        object.__setattr__(self, "every", every_of(self.every))
        object.__setattr__(self, "keep", keep_of(self.keep))
        check_settings(self, rules_of(self))
        if self.staging is not None:
            object.__setattr__(self, "staging", absolute_location(self.staging))
        object.__setattr__(self, "publish", _absolute_publish(self.publish))

    @property
    def max_shard_bytes(self) -> int:
        return parse_size(self.max_shard_size)

    @property
    def client_options(self) -> dict[str, Any]:
        return dict(self.store_options or {})

    @property
    def rankings(self) -> dict[str, str]:
        """The metrics that checkpoints of the run are ranked by, each with "min" or "max"."""
        rankings: dict[str, str] = {}
        if self.keep is not None:
            rules = [*self.keep.rankings]
            if self.keep.state is not None:
                rules += self.keep.state.rankings
            rankings = {metric: mode for metric, mode, _ in rules}
        if self.every is not None and self.every.best is not None:
            metric, mode = self.every.best
            rankings[metric] = mode
        return rankings


class SaveSettings(TypedDict, total=False):
    """The settings that a Trainer's user may give too, for type checkers and editors.

    These are the fields of `SaverConfig` without `background`, `every` and `keep`. Functions have
    an argument `background` of their own, where it decides what saves return.
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
    """The settings of a `CheckpointSaver`, with those that a Trainer has arguments for."""

    every: Every | int | None
    keep: Keep | int | None


def make_config(config: SaverConfig | None, settings: Mapping[str, object]) -> SaverConfig:
    """Return `config`, or a new configuration from the keywords `settings`.

    Raises ConfigError if both are given, and for unknown keywords.
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

    if config is not None:
        return config
    values: dict[str, Any] = dict(settings)
    return SaverConfig(**values)


# Names that users know from transformers' TrainingArguments and other libraries, and what to use
# instead.
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
    """Return what to write instead of a setting that does not exist."""
    if name in FAMILIAR_NAMES:
        return f"use {FAMILIAR_NAMES[name]}"
    return did_you_mean([name], names) or f"settings are {', '.join(names)}"


def every_of(every: Any) -> Any:
    """Replace a number n by `Every(steps=n)`; return anything else unchanged."""
    return Every(steps=every) if isinstance(every, int) and not isinstance(every, bool) else every


def keep_of(keep: Any) -> Any:
    """Replace a number n by `Keep(last=n)`; return anything else unchanged."""
    return Keep(last=keep) if isinstance(keep, int) and not isinstance(keep, bool) else keep


def _absolute_publish(setting: Any) -> Any:
    """Return the setting `publish` with absolute paths, as the working directory may change."""
    if not isinstance(setting, Mapping):
        return setting
    absolute = dict(setting)
    for name in ("stage", "base"):
        path = absolute.get(name)
        is_hub_id = name == "base" and isinstance(path, str) and not open_place(path).is_folder
        if _is_path(path) and not is_hub_id:
            absolute[name] = absolute_location(path)

    if isinstance(setting.get("visible_at"), Mapping):
        # our folders, and the paths at which the servers see them
        server_paths: dict[Any, Any] = {}
        for path, server_path in setting["visible_at"].items():
            own_path = absolute_location(path) if _is_path(path) else path
            server_paths[own_path] = server_path
        absolute["visible_at"] = server_paths

    if setting.get("delta") is True and isinstance(setting.get("url"), (str, os.PathLike)):
        absolute["url"] = absolute_location(setting["url"])
    return absolute


def _is_path(value: Any) -> TypeGuard[str | os.PathLike[str]]:
    """Check whether a value may be a path; `ServerOptions` refuses other values."""
    return isinstance(value, (str, os.PathLike)) and os.fspath(value) not in ("", b"")
