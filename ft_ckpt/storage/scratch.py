"""Files that libraries write: scratch files and folders, and the atomic replacement of a file."""

import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from ft_ckpt.errors import explained
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.copying import copy_object
from ft_ckpt.storage.direct_io import allocate_space
from ft_ckpt.storage.local_store import LocalStore, temporary_store
from ft_ckpt.storage.locks import DRAFTS, locked_folder
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.store import Store

_MEMORY_DISK, _PLENTY_BYTES = "/dev/shm", 1 << 30  # noqa: S108 - used for a new folder in it
_NAME_BYTES = 150  # of the target's name in the hidden folder's; 255 are allowed


@contextmanager
def replaced_object(target: Place, max_mode: int = 0o777) -> Iterator[Place]:
    """Yield a place at which the block makes an object, which then replaces `target` durably and
    atomically.

    On a disk the parent folder is created if it is missing; the file gets the permissions of the
    one that it replaces, limited by `max_mode`. In a bucket the place is `target` itself, because
    objects appear as a whole there; if the block raises afterwards, the object is deleted. Raises
    OSError or TargetError.
    """
    if target.is_local:
        path = Path(str(target))
        local_disk.make_folder(path.parent)
        start = os.fsencode(path.name)[:_NAME_BYTES].decode("utf-8", "ignore")
        with locked_folder(path.parent, f".{start}{DRAFTS}") as folder:
            yield Place(LocalStore(folder, syncs=False, max_mode=max_mode), path.name)
            with suppress(FileNotFoundError):
                local_disk.take_mode(folder / path.name, path.stat(), max_mode)
            local_disk.sync_path(folder / path.name)
            local_disk.move(folder / path.name, path)
            local_disk.sync_path(path.parent)
        return
    store = target.store
    before = store.stat(target.name)
    try:
        yield target
    except BaseException:
        after = store.stat(target.name)
        if after is not None and (before is None or before.version != after.version):
            store.delete([target.name])
        raise


@contextmanager
def scratch_file(target: Place) -> Iterator[Path]:
    """Yield a path at which a library makes a file, which then becomes `target`, see
    `replaced_object`.
    """
    with replaced_object(target) as stage:
        if stage.store.local_folder is not None:
            yield stage.store.local_folder / stage.name
            return
        with temporary_store() as folder:
            yield folder.path(stage.basename)
            with closing(folder.open(stage.basename)) as opened:
                copy_object(opened, stage.store, stage.name)


@contextmanager
def scratch_folder(store: Store) -> Iterator[Path]:
    """Yield a folder for a library to fill: the local store's own, or a temporary one that is
    copied into the store.
    """
    if store.local_folder is not None:
        yield store.local_folder
        return
    with temporary_store() as folder:
        yield folder.folder
        for stored in folder.list():
            with closing(folder.open(stored.name)) as opened:
                copy_object(opened, store, stored.name)


def spool_file(folder: Path | None = None) -> BinaryIO:
    """An unnamed, unbuffered file, on the disk of `folder` if given; deleted when it is closed."""
    return cast("BinaryIO", tempfile.TemporaryFile(dir=folder, buffering=0))


class LibraryFile(io.FileIO):
    """A new file that a library writes in C code, which the error of a write must not reach.

    Space for `max_bytes` is allocated first. The error of a write is kept and later writes are
    skipped; `check` raises it.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__(path, "w+b")
        self.error: OSError | None = None
        try:
            allocate_space(self.fileno(), max_bytes, keeps_size=True)
        except OSError:
            self.close()
            raise

    def write(self, data: Any) -> int:
        """Write `data`; returns its size in bytes, whether or not that failed."""
        memory = memoryview(data)
        try:
            done = 0
            while self.error is None and done < len(memory):
                done += super().write(memory[done:])
        except OSError as error:
            self.error = error
        return len(memory)

    def truncate(self, size: int | None = None) -> int:
        """Cut the file, unless a write has failed."""
        try:
            return super().truncate(size) if self.error is None else 0
        except OSError as error:
            self.error = error
            return 0

    def check(self) -> None:
        """Raise the error of the first write that failed, if any."""
        if self.error is not None:
            raise self.error


def files_made_by(make: Callable[[Path], object]) -> dict[str, bytes]:
    """The small files that `make` writes into an empty folder, by relative path.

    Raises TargetError or NoSpaceError when they cannot be written.
    """
    parent = tempfile.gettempdir()
    with suppress(OSError):  # in memory if there is plenty, because training waits
        is_writable = os.access(_MEMORY_DISK, os.W_OK)
        if is_writable and shutil.disk_usage(_MEMORY_DISK).free > _PLENTY_BYTES:
            parent = _MEMORY_DISK
    with explained(Path(parent)), temporary_store(folder=Path(parent)) as store:
        make(store.folder)
        return files_below(store.folder)


def files_below(folder: Path) -> dict[str, bytes]:
    """All files in a folder and below it, by relative path."""
    store = LocalStore(folder)
    return {stored.name: store.read(stored.name) for stored in store.list()}
