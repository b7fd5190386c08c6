"""Objects that take their places whole, on a disk or in a bucket; files of libraries that know nothing but paths."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

from ft_ckpt.errors import ConfigError, TargetError, explained
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.access import FREE, Access
from ft_ckpt.storage.local_copy import copy_object
from ft_ckpt.storage.local_store import LocalStore, temporary_store
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.placing import DRAFTS, locked_folder
from ft_ckpt.storage.source_proof import prove_sources
from ft_ckpt.storage.store import Store

_MEMORY, _PLENTY_BYTES = "/dev/shm", 1 << 30  # noqa: S108 - a folder of its own is made in it
_NAME_BYTES = 150  # of a target's name in that of a hidden folder; 255 are allowed


def object_target(path: str | os.PathLike[str] | Place) -> Place:
    """The place of an object to write; a link to a file leads to it.

    Raises TargetError for a folder on this machine, and where there is no folder to write in; ConfigError for a bucket.
    """
    place = open_place(path)
    if not isinstance(place.store, LocalStore):
        if not place.name:
            raise ConfigError(f"{place}: a whole bucket; name an object in it")
        return place
    target = Path(os.path.realpath(str(place)))
    if target.is_dir() or not target.parent.is_dir():
        raise TargetError(f"{place}: {'a folder' if target.is_dir() else 'its folder does not exist'}; name a file")
    return Place(LocalStore(target.parent), target.name)


@contextmanager
def replaced_object(target: Place, access: Access = FREE) -> Iterator[Place]:
    """Yield a place at which the block makes an object, which then becomes `target`, durably, or nothing does.

    On a disk, where the folder of `target` is made if it is missing, it gets the group and permissions of the file that
    it replaces, and is open to nobody beyond `access`. In a bucket it is `target` itself, since objects appear whole
    there; if the block raises after that, the object is deleted. Raises OSError, TargetError, and CorruptError where it
    was made of damaged checkpoints.
    """
    store = target.store
    if isinstance(store, LocalStore):
        path = Path(store.where(target.name))
        local_disk.make_folder(path.parent)
        with _draft_folder(path) as folder:
            yield Place(LocalStore(folder, syncs=False, access=access), path.name)
            prove_sources()
            with suppress(FileNotFoundError):
                local_disk.take_access(folder / path.name, path.stat(), access)
            local_disk.sync_path(folder / path.name)
            local_disk.move(folder / path.name, path)
            local_disk.sync_path(path.parent)
        return
    before = store.stat(target.name)
    try:
        yield target
        prove_sources()
    except BaseException:
        after = store.stat(target.name)
        if after is not None and (before is None or before.version != after.version):
            store.delete([target.name])
        raise


@contextmanager
def scratch_file(target: Place) -> Iterator[Path]:
    """Yield a path at which a library makes a file, which then becomes `target`, as `replaced_object` says."""
    with replaced_object(target) as stage:
        if isinstance(stage.store, LocalStore):
            yield stage.store.path(stage.name)
            return
        with temporary_store() as room:
            yield room.path(stage.last_step)
            with closing(room.open(stage.last_step)) as opened:
                copy_object(opened, stage.store, stage.name)


@contextmanager
def scratch_folder(store: Store) -> Iterator[Path]:
    """The path of a folder that a library fills: the store's own, else one whose files become objects of the store."""
    if isinstance(store, LocalStore):
        yield store.folder
        return
    with temporary_store() as room:
        yield room.folder
        for each in room.list():
            with closing(room.open(each.name)) as opened:
                copy_object(opened, store, each.name)


def spool_file(folder: Path | None = None) -> BinaryIO:
    """A file without a name and without a buffer, on the disk of `folder`, if given; gone when it is closed."""
    return cast("BinaryIO", tempfile.TemporaryFile(dir=folder, buffering=0))


def files_made_by(make: Callable[[Path], object]) -> dict[str, bytes]:
    """The files that `make` leaves in an empty folder, by their paths in it; they are small.

    Raises TargetError or NoSpaceError when they cannot be written.
    """
    place = _place_for_few()
    with explained(Path(place)), temporary_store(folder=Path(place)) as room:
        make(room.folder)
        return files_below(room.folder)


def files_below(folder: Path) -> dict[str, bytes]:
    """All files in a folder and below it, by their paths in it."""
    store = LocalStore(folder)
    return {each.name: store.read(each.name) for each in store.list()}


def _place_for_few() -> str:
    """Where files are made that are read back at once: in memory where there is plenty, since training waits."""
    with suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _PLENTY_BYTES:
            return _MEMORY
    return tempfile.gettempdir()


def _draft_folder(target: Path) -> AbstractContextManager[Path]:
    """A hidden folder beside `target`, see `locked_folder`."""
    start = os.fsencode(target.name)[:_NAME_BYTES].decode("utf-8", "ignore")
    return locked_folder(target.parent, f".{start}{DRAFTS}", 0o700)
