"""Copies between stores, and objects as files of this machine for libraries that take nothing but a path."""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath

from ft_ckpt.errors import CorruptError, listing
from ft_ckpt.messages import printable, printable_lines
from ft_ckpt.storage.kept_store import KeptFile
from ft_ckpt.storage.local_disk import list_entries
from ft_ckpt.storage.local_file import LocalFile, open_local_file
from ft_ckpt.storage.local_store import LocalStore, temporary_store
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.read_ahead import ByteRun, read_ahead
from ft_ckpt.storage.source_proof import SourceFolder
from ft_ckpt.storage.store import Readable, Store, Stored, read_range

SMALL_COPY_BYTES = 8 << 20  # objects up to it are written in one call


def _pass_over(_content: memoryview) -> None:
    pass


def copy_object(
    file: Readable, store: Store, name: str, watch: Callable[[memoryview], None] = _pass_over
) -> Stored | None:
    """Write all of an open object into `store`, durably, under `name`; what is there then, unless it is small.

    Raises what reading and writing do. `watch` sees all bytes in their order, before they are written. Between folders
    of this machine nobody may read the copy who may not read the file.
    """
    source = file.inner if isinstance(file, KeptFile) else file
    if isinstance(store, LocalStore) and isinstance(source, LocalFile):
        store = replace(store, access=store.access & source.access)
    if file.size_bytes <= SMALL_COPY_BYTES:
        content = read_range(file, 0, file.size_bytes)
        watch(memoryview(content))
        store.write(name, content)
        return None
    writing, at = store.create(name, file.size_bytes), 0
    try:
        for part in read_ahead([ByteRun(name, file, 0, file.size_bytes)]):
            watch(part.content)
            writing.write(at, part.content)
            at += part.size_bytes
        return writing.finish()
    except BaseException:
        writing.abandon()
        raise


def local_version(file: Readable) -> LocalFile:
    """An open object as a file of this machine: itself, or a copy that is deleted when nothing uses it any more."""
    file = file.inner if isinstance(file, KeptFile) else file
    if isinstance(file, LocalFile):
        return file
    name = PurePosixPath(file.name).name
    with ExitStack() as stack:
        room = stack.enter_context(temporary_store())
        copy_object(file, room, name)
        copy = open_local_file(room.path(name), name)
        weakref.finalize(copy, stack.pop_all().close)
    return copy


def leads_out(folder: Store, name: str) -> bool:
    """True if a link on the way to `name` leads out of `folder`, and not into the blobs of the Hub's cache."""
    here, real = PurePosixPath(folder.identity), PurePosixPath(folder.within(name).identity)
    roots = [here, here.parent.parent / "blobs"] if here.parent.name == "snapshots" else [here]
    return not any(real.is_relative_to(root) for root in roots)


def check_files_inside(folder: Store, names: Iterable[str] | None = None) -> None:
    """Raise CorruptError listing `names` (None: everything in `folder`) that are not regular files inside of it.

    Links inside of the folder are followed. Names that are not there are passed over.
    """
    if not isinstance(folder, LocalStore):
        return
    top, is_all = folder.folder, names is None
    if names is None:
        found = (Path(at, name) for at, folders, files in os.walk(top) for name in (*folders, *files))
        names = [path.relative_to(top).as_posix() for path in found if path.is_symlink() or not path.is_dir()]
    odd = [
        name
        for name in names
        if os.path.lexists(top / name)
        and (leads_out(folder, name) or not ((top / name).is_file() or (is_all and (top / name).is_dir())))
    ]
    if odd:
        raise CorruptError(f"{top}: {listing(odd, ', ')}: expected regular files inside of the folder")


def check_prefix_inside(folder: Store, prefix: str) -> None:
    """As `check_files_inside`, for the files whose names begin with `prefix`."""
    if isinstance(folder, LocalStore):
        above, _, begin = prefix.rpartition("/")
        names = (entry.name for entry in list_entries(folder.folder / above) if entry.name.startswith(begin))
        check_files_inside(folder, [f"{above}/{name}".lstrip("/") for name in names])


def _is_any(_name: str) -> bool:
    return True


@contextmanager
def local_folder(place: Place, wanted: Callable[[str], bool] = _is_any) -> Iterator[Path]:
    """The path of a folder on this machine while the block runs: its own, or of a copy of the `wanted` objects in it.

    The wanted files of a checkpoint count as read, see `source_proof`. What the block raises names the place and not
    the copy.
    """
    store = place.folder
    if isinstance(store, SourceFolder) and store.proof is not None:
        for each in store.list():
            if wanted(each.name):
                store.open(each.name).close()
    if isinstance(store, LocalStore):
        yield store.folder
        return
    with temporary_store() as room:
        copy = room.within(place.last_step)
        for each in store.list():
            if wanted(each.name):
                with closing(store.open(each.name)) as file:
                    copy_object(file, copy, each.name)
        try:
            yield copy.folder
        except Exception as error:
            error.args = tuple(_renamed(text, copy.url, str(place)) for text in error.args)
            raise


def _renamed(text: object, before: str, after: str) -> object:
    return printable_lines(text).replace(printable(before), printable(after)) if isinstance(text, str) else text
