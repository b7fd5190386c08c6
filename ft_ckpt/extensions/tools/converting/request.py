"""The checked arguments of a conversion: where it goes, in which format, with which names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import ConfigError, TargetError
from ft_ckpt.extensions.tools.converting.shard_rules import ShardRule, read_shard_rules
from ft_ckpt.formats import (
    DEFAULT_FORMAT,
    TensorFormat,
    format_by_suffix,
    format_named,
    tensor_formats,
    written_formats,
)
from ft_ckpt.messages import expected_one_of
from ft_ckpt.storage.places import Place
from ft_ckpt.values import canonical_dtype, is_size, parse_size

_DEFAULT_SHARD_SIZE = "50GB"


@dataclass(frozen=True)
class ConvertOptions:
    """The checked arguments of a conversion."""

    path: Path | str  # as the caller wrote it
    target: Place  # with symbolic links resolved
    format: TensorFormat
    to_folder: bool
    dtype: str | None  # of floating-point tensors; None: unchanged
    names: Mapping[str, str]  # new name by old
    max_shard_bytes: int
    verify: bool
    progress: bool
    note: str  # for the manifest: the source of the weights
    shards: Sequence[ShardRule] = ()  # rules that divide the tensors between several checkpoints
    made_from: tuple[str, ...] = ()  # names of the checkpoints that the weights were computed from
    max_mode: int = 0o777  # see LocalStore; the permissions common to all sources
    # delete a checkpoint of this name in a bucket before the new one is complete
    overwrite: bool = False
    # sidecar files with other contents than the source's
    replaced: Mapping[str, bytes] = field(default_factory=dict)


def convert_options(
    place: Place,
    *,
    format: str | None,  # noqa: A002
    dtype: str | None,
    max_shard_size: int | str | None,
    verify: bool,
    progress: bool,
    note: str,
    names: Mapping[str, str] | None = None,
    shards: str | Path | None = None,
    made_from: tuple[str, ...] = (),
    to_folder: bool = False,
    overwrite: bool = False,
) -> ConvertOptions:
    """Check the arguments of `convert`. Raises ConfigError or TargetError."""
    target = place.resolved
    named_format = _writable_format(format)
    names_folder = place.is_folder or not PurePath(target.basename).suffix
    if named_format is not None and named_format.folder_writer is not None:
        names_folder = True
    to_folder = to_folder or names_folder
    target_format = named_format
    if target_format is None and to_folder:
        target_format = format_named(DEFAULT_FORMAT)
    elif target_format is None:
        target_format = format_by_suffix(str(target))
    if place.is_object and to_folder:
        raise TargetError(
            f"{target}: a file, expected a folder for {target_format.name}; choose another path"
        )
    _check_shard_size(max_shard_size, target, to_folder)
    if shards is not None and target_format.folder_writer is None:
        raise ConfigError(
            f"shards={str(shards)!r}: format {target_format.name!r} has no shards by name; leave "
            "it out"
        )
    return ConvertOptions(
        place.location,
        target,
        target_format,
        to_folder,
        canonical_dtype(dtype),
        names or {},
        parse_size(max_shard_size or _DEFAULT_SHARD_SIZE),
        verify,
        progress,
        note,
        read_shard_rules(shards),
        made_from,
        overwrite=overwrite,
    )


def _writable_format(name: str | None) -> TensorFormat | None:
    if name is None:
        return None
    writable = [tensor_format.name for tensor_format in written_formats(name)]
    if name not in writable:
        reasons = {entry.name: entry.why_read_only for entry in tensor_formats()}
        reason = reasons.get(name) or expected_one_of(name, writable)
        raise ConfigError(f"format={name!r}: {reason}")
    return format_named(name)


def _check_shard_size(max_shard_size: int | str | None, target: Place, to_folder: bool) -> None:
    if max_shard_size is None:
        return
    if not to_folder:
        raise ConfigError(
            f"max_shard_size={max_shard_size!r}: {target.basename} is one file; give a folder to "
            "have several"
        )
    if not is_size(max_shard_size):
        raise ConfigError(
            f"max_shard_size={max_shard_size!r}: expected bytes, or a size such as '5GB', above 0"
        )


def check_apart(sources: Sequence[Place], options: ConvertOptions) -> None:
    """Raise ConfigError if the target folder lies in a source folder or contains a source.

    A target that contains a source is refused only if it is a checkpoint.
    """
    if not options.to_folder:
        return
    target = options.target
    target_path = PurePosixPath(target.folder.identity)
    is_checkpoint = target.folder.stat(MANIFEST_NAME) is not None
    for source in sources:
        source_path = PurePosixPath(source.folder.identity)
        if source.is_folder and target_path.is_relative_to(source_path):
            raise ConfigError(
                f"{target}: in the folder that is to be read; choose a path outside of it"
            )
        if is_checkpoint and source_path.is_relative_to(target_path):
            raise ConfigError(
                f"{target}: the checkpoint that {source.basename} is read from; choose a path "
                "outside of it"
            )
