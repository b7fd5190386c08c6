"""Files of libraries that know nothing but paths: made, or changed, in a folder of this machine, for any store."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path, PurePath

from ft_ckpt.errors import explained
from ft_ckpt.storage.local_copy import copy_object
from ft_ckpt.storage.local_store import LocalStore, temporary_store
from ft_ckpt.storage.store import Store

_MEMORY, _PLENTY_BYTES = "/dev/shm", 1 << 30  # noqa: S108 - a folder of its own is made in it


def files_made_by(make: Callable[[Path], object]) -> dict[str, bytes]:
    """The files that `make` leaves in an empty folder, by their paths in it; they are small.

    Raises TargetError or NoSpaceError when they cannot be written.
    """
    place = _scratch_folder()
    with explained(Path(place)), temporary_store(folder=Path(place)) as room:
        make(room.folder)
        return files_below(room.folder)


def files_below(folder: Path) -> dict[str, bytes]:
    """All files in a folder and below it, by their paths in it."""
    store = LocalStore(folder)
    return {each.name: store.read(each.name) for each in store.list()}


@contextmanager
def edited_object(store: Store, name: str) -> Iterator[Path]:
    """The path of an object that the block changes: its own in a local folder, else that of a copy that is put back."""
    with made_object(store, name) as file:
        if not isinstance(store, LocalStore):
            with closing(store.open(name)) as opened:
                copy_object(opened, LocalStore(file.parent), file.name)
        yield file


@contextmanager
def made_object(store: Store, name: str) -> Iterator[Path]:
    """The path of a file that the block makes: its own in a local folder, else of one that becomes the object."""
    if isinstance(store, LocalStore):
        yield store.path(name)
        return
    with temporary_store() as room:
        file = PurePath(name).name
        yield room.path(file)
        with closing(room.open(file)) as opened:
            copy_object(opened, store, name)


@contextmanager
def made_folder(store: Store) -> Iterator[Path]:
    """The path of a folder that the block fills: the store's own, else one whose files become objects of the store."""
    if isinstance(store, LocalStore):
        yield store.folder
        return
    with temporary_store() as room:
        yield room.folder
        for each in room.list():
            with closing(room.open(each.name)) as opened:
                copy_object(opened, store, each.name)


def _scratch_folder() -> str:
    """Where files are made that are read back at once: in memory where there is plenty, since training waits."""
    with suppress(OSError):
        if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > _PLENTY_BYTES:
            return _MEMORY
    return tempfile.gettempdir()
