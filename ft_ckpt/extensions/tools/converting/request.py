"""Checks the arguments of a conversion: its target, format and names."""

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
    """The checked arguments of a conversion.

    Attributes:
        path: The target as the caller wrote it.
        target: The target with symbolic links resolved.
        format: The format of the target.
        to_folder: Whether the target is a folder, and not a file.
        dtype: The new dtype of floating-point tensors. None leaves dtypes unchanged.
        names: The rules that rename tensors; see `rename_rules`.
        max_shard_bytes: The maximum size of a weight file in a folder.
        verify: Whether the result is compared bit for bit with the source.
        progress: Whether a terminal shows a progress bar.
        note: The source of the weights in words, for the manifest.
        shards: The rules that divide the tensors between several TensorFlow checkpoints.
        made_from: The names of the checkpoints from which the weights were computed.
        max_mode: The permissions that all sources have in common; see `LocalStore`.
        overwrite: Whether a checkpoint with the name of the target in a bucket is deleted before
            the new one is complete.
        replaced: Sidecar files with other contents than the source has.
    """

    path: Path | str
    target: Place
    format: TensorFormat
    to_folder: bool
    dtype: str | None
    names: Mapping[str, str]
    max_shard_bytes: int
    verify: bool
    progress: bool
    note: str
    shards: Sequence[ShardRule] = ()
    made_from: tuple[str, ...] = ()
    max_mode: int = 0o777
    overwrite: bool = False
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
    if place.is_folder or not PurePath(target.basename).suffix:
        to_folder = True
    if named_format is not None and named_format.folder_writer is not None:
        to_folder = True
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
    """Raise ConfigError if the target folder lies in a source folder.

    Raises it also if the target is a checkpoint, which would be replaced, and a source lies in it.
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
