"""Copies objects between stores, and makes local copies for libraries that need a path."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path, PurePosixPath

from ft_ckpt.messages import printable, printable_lines
from ft_ckpt.storage.local_file import LocalFile, open_local_file
from ft_ckpt.storage.local_store import temporary_store
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.prefetch import ByteRun, read_ahead
from ft_ckpt.storage.store import Readable, Store, Stored, read_range

SMALL_COPY_BYTES = 8 << 20  # objects up to it are written in one call


def copy_object(
    file: Readable, store: Store, name: str, watch: Callable[[memoryview], object] = lambda _: None
) -> Stored | None:
    """Write all of an open object into `store`, durably, as `name`.

    Returns the stored object, None for a small one. `watch` is called with all bytes in order,
    before they are written. Between local folders the copy is no more open than the file. Raises
    what reading and writing do.
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
    """An open object as a local file: itself, or a copy that is deleted when nothing refers to it
    any more.
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
def local_folder(place: Place, wanted: Callable[[str], bool] = lambda _: True) -> Iterator[Path]:
    """A local path of a folder while the block runs: its own, or a copy of the `wanted` objects in
    it.

    Errors of the block name the place, not the copy.
    """
    store = place.folder
    if store.local_folder is not None:
        yield store.local_folder
        return
    with temporary_store() as parent:
        copy = parent.within(place.basename)
        names = [stored.name for stored in store.list() if wanted(stored.name)]
        for name in names:
            with closing(store.open(name)) as file:
                copy_object(file, copy, name)
        try:
            yield copy.folder
        except Exception as error:
            error.args = tuple(_renamed(text, copy.url, str(place)) for text in error.args)
            raise


def _renamed(argument: object, copy: str, place: str) -> object:
    """An argument of an error that names the place instead of its copy."""
    if not isinstance(argument, str):
        return argument
    return printable_lines(argument).replace(printable(copy), printable(place))
