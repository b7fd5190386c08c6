"""What a conversion is asked for, made sense of before anything is read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath

from ft_ckpt.config import canonical_dtype, parse_size
from ft_ckpt.errors import ConfigError, TargetError
from ft_ckpt.files.shard_rules import ShardRule, read_shard_rules
from ft_ckpt.formats import detect
from ft_ckpt.formats.registry import DEFAULT_FORMAT, TensorFormat, format_named, written_formats
from ft_ckpt.storage.access import FREE, Access
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place, open_place


@dataclass(frozen=True)
class ConvertOptions:
    """What a conversion is asked for."""

    path: Path | str  # as it was given
    target: Place  # the same without links
    format: TensorFormat
    to_folder: bool
    dtype: str | None  # of floating-point tensors; None: as they are
    names: Mapping[str, str]  # new by old
    max_shard_bytes: int
    verify: bool
    progress: bool
    note: str  # of the manifest: where the weights are from
    shards: Sequence[ShardRule] = ()  # by which names are given to checkpoints of their own
    made_from: tuple[str, ...] = ()  # names of the checkpoints they were computed from, if they were
    access: Access = FREE  # who may read the result at most: who may read all that it is made of
    overwrite: bool = False  # delete a checkpoint that is in the way in a bucket, before the new one is whole


def convert_options(
    dst: str | Path | Place,
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
    """What is asked of a conversion, as `convert` takes it, made sense of. Raises ConfigError or TargetError."""
    place = open_place(dst)
    target = open_place(place.folder.identity) if isinstance(place.store, LocalStore) else place
    name = target.last_step
    given = None if format is None else _known_format(format)
    names_folder = to_folder or place.is_folder or str(dst).endswith("/") or not PurePath(name).suffix
    to_folder = names_folder or (given is not None and given.library is not None)
    known = given or (format_named(DEFAULT_FORMAT) if to_folder else detect.format_by_suffix(str(target)))
    if place.is_object and to_folder:
        raise TargetError(f"{target}: a file, expected a folder for {known.name}; choose another path")
    if not to_folder and max_shard_size is not None:
        raise ConfigError(f"max_shard_size={max_shard_size!r}: {name} is one file; give a folder to have several")
    if shards is not None and (known.library is None or known.library.write_shards is None):
        raise ConfigError(f"shards={str(shards)!r}: format {known.name!r} has no shards by name; leave it out")
    most = parse_size(max_shard_size or "50GB")
    return ConvertOptions(
        place.location,
        target,
        known,
        to_folder,
        canonical_dtype(dtype),
        names or {},
        most,
        verify,
        progress,
        note,
        read_shard_rules(shards),
        made_from,
        overwrite=overwrite,
    )


def check_apart(sources: Sequence[Place], options: ConvertOptions) -> None:
    """Raise ConfigError if the folder to be written lies in one that is read."""
    for source in sources:
        here = PurePosixPath(source.folder.identity)
        inside = PurePosixPath(options.target.folder.identity).is_relative_to(here)
        if options.to_folder and inside and source.is_folder:
            raise ConfigError(f"{options.target}: in the folder that is to be read; choose a path outside of it")


def _known_format(name: str) -> TensorFormat:
    names = [known.name for known in written_formats()]
    if name not in names:
        raise ConfigError(f"format={name!r}: expected one of {', '.join(names)}")
    return format_named(name)
