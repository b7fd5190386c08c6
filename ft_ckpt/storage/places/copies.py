"""Copies objects between stores, and files between stores and libraries that need local paths."""

import io
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from ft_ckpt.errors import explained
from ft_ckpt.messages import printable, printable_lines
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.io import ByteRun, LocalFile, allocate_space, open_local_file, read_ahead
from ft_ckpt.storage.local import DRAFTS, LocalStore, locked_folder, temporary_store
from ft_ckpt.storage.places.place import Place
from ft_ckpt.storage.store import Readable, Store, Stored, read_range

SMALL_COPY_BYTES = 8 << 20  # objects up to this size are written in one call


def copy_object(
    file: Readable, store: Store, name: str, watch: Callable[[memoryview], object] = lambda _: None
) -> Stored | None:
    """Copy an open object into `store`, durably, under `name`.

    Returns a description of the copy, or None for a small object. `watch` gets all bytes in order,
    before they are written. If the object is a local file, a local copy has at most its
    permissions. Raises what reading and writing raise.
    """
    if isinstance(file, LocalFile):
        store = store.limited(file.mode)
    if file.size_bytes <= SMALL_COPY_BYTES:
        content = read_range(file, 0, file.size_bytes)
        watch(memoryview(content))
        store.write(name, content)
        return None

    writing = store.create(name, file.size_bytes)
    offset = 0
    try:
        for part in read_ahead([ByteRun(name, file, 0, file.size_bytes)]):
            watch(part.content)
            writing.write(offset, part.content)
            offset += part.size_bytes
        return writing.finish()
    except BaseException:
        writing.abandon()
        raise


def local_version(file: Readable) -> LocalFile:
    """Return a local file with the bytes of an open object.

    A local file is returned as it is. A remote object is copied, and the copy is deleted when
    nothing refers to it any more.
    """
    if isinstance(file, LocalFile):
        return file
    name = PurePosixPath(file.name).name
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_store())
        copy_object(file, folder, name)
        copy = open_local_file(folder.path(name), name)
        weakref.finalize(copy, stack.pop_all().close)
    return copy


@contextmanager
def local_folder(
    place: Place, is_needed: Callable[[str], bool] = lambda _name: True
) -> Iterator[Path]:
    """Yield a local path of the folder `place`.

    A folder in a bucket is copied to a temporary folder first. The copy has the objects whose names
    are needed. Errors that leave the `with` block name the place and not the copy.
    """
    store = place.folder
    if store.local_folder is not None:
        yield store.local_folder
        return

    with temporary_store() as parent:
        copy = parent.within(place.basename)
        for stored in store.list():
            if is_needed(stored.name):
                with closing(store.open(stored.name)) as file:
                    copy_object(file, copy, stored.name)
        try:
            yield copy.folder
        except Exception as error:
            texts = [_replace_path(text, copy.url, str(place)) for text in error.args]
            error.args = tuple(texts)
            raise


def _replace_path(argument: object, copy: str, place: str) -> object:
    """Replace the path of the copy by that of the place in an argument of an error."""
    if not isinstance(argument, str):
        return argument
    return printable_lines(argument).replace(printable(copy), printable(place))


# The name of a hidden folder has at most so many bytes of the target's name, because a name has at
# most 255.
_NAME_BYTES = 150


@contextmanager
def replaced_object(target: Place, max_mode: int = 0o777) -> Iterator[Place]:
    """Yield a place for a new object, which then replaces `target` durably and atomically.

    On a disk, the place is in a hidden folder next to `target`. The parent folder of `target` is
    created if it is missing. The file gets the permissions of the file that it replaces, limited by
    `max_mode`.

    In a bucket, the place is `target` itself, because objects appear as a whole there. If the
    `with` block raises after it has written the object, the object is deleted.

    Raises OSError or TargetError.
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
    """Yield a path for a file that a library writes, which then becomes `target`.

    It replaces `target` as in `replaced_object`.
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
    """Yield a folder for a library to fill.

    For a local store it is the folder of the store. For a bucket it is a temporary folder, whose
    files are copied into the bucket after the `with` block.
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
    """Open an unnamed, unbuffered file, which is deleted when it is closed.

    It is on the disk of `folder`, or in the system's temporary folder if `folder` is None.
    """
    return cast("BinaryIO", tempfile.TemporaryFile(dir=folder, buffering=0))


class LibraryFile(io.FileIO):
    """New file that a library writes from C code, which must not see the error of a write.

    Space for `max_bytes` is allocated first. After a write has failed, later writes are skipped.
    `check` raises the error.
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
        """Write `data`. Return its size in bytes, even if the write failed."""
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


_MEMORY_DISK = "/dev/shm"  # noqa: S108 - used for a new folder in it
_PLENTY_BYTES = 1 << 30


def files_made_by(make: Callable[[Path], object]) -> dict[str, bytes]:
    """Return the small files that `make` writes into an empty folder, by relative path.

    Raises TargetError or NoSpaceError when they cannot be written.
    """
    parent = tempfile.gettempdir()
    # The folder is in memory if there is plenty, because training waits.
    with suppress(OSError):
        is_writable = os.access(_MEMORY_DISK, os.W_OK)
        if is_writable and shutil.disk_usage(_MEMORY_DISK).free > _PLENTY_BYTES:
            parent = _MEMORY_DISK
    with explained(Path(parent)), temporary_store(folder=Path(parent)) as store:
        make(store.folder)
        return files_below(store.folder)


def files_below(folder: Path) -> dict[str, bytes]:
    """Read all files in a folder and below it, by relative path."""
    store = LocalStore(folder)
    return {stored.name: store.read(stored.name) for stored in store.list()}
