"""Reads and maps local files, and raises an error when a file changes while it is open.

A file that is deleted or replaced by rename stays readable through its descriptor. Truncation and
writes in place are detected before bytes are handed out, because each read and mapping compares the
size and the modification time with those of the opened file. On a network file system only the size
is compared. There the cache of a client can show an old time first, and the current one later,
although the file did not change.

Bytes that were copied are not affected by later changes of the file. Bytes that were mapped are
pages of the file. If it is truncated later, the next access to them raises SIGBUS, as in every
program that maps files.
"""

import ctypes
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

from ft_ckpt.errors import CorruptError, UnreadableError
from ft_ckpt.storage import libc
from ft_ckpt.storage.look_ups import file_version, regular_descriptor
from ft_ckpt.storage.mounts import keeps_exact_times

_PAGE = mmap.ALLOCATIONGRANULARITY
# One call reads at most this much, because Linux reads less than 2 GB at once.
_MAX_CALL_BYTES = 1 << 30


class LocalFile:
    """File that is open for reading, until `close` or until this object is garbage-collected."""

    can_map = True

    def __init__(self, name: str, path: Path, descriptor: int) -> None:
        self.name = name
        self.path = path  # only for messages, because the path can lead to another file by now
        self.descriptor = descriptor
        self._closer = weakref.finalize(self, os.close, descriptor)
        self._closed = False
        status = os.fstat(descriptor)
        self.size_bytes = status.st_size
        self.version = file_version(status)
        self.mode = stat.S_IMODE(status.st_mode) | stat.S_IRUSR
        self._opened_mtime_ns = status.st_mtime_ns

    @property
    def where(self) -> str:
        return str(self.path)

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        done = 0
        size_bytes = len(memory)
        while done < size_bytes:
            target = memory[done : done + _MAX_CALL_BYTES]
            try:
                count = os.preadv(self.descriptor, [target], start + done)
            except OSError as error:
                self._refuse_closed()
                raise self.refused(f"at byte {start + done}", error) from error
            if not count:
                break
            done += count

        # The check comes after the read, so that a concurrent write is detected.
        self.check()
        if done < size_bytes:
            raise CorruptError(
                f"{self.path.name}: ends at byte {start + done}, bytes up to {start + size_bytes} "
                "asked for; it is truncated, or its index is damaged"
            )

    def map(self, *, in_large_pages: bool = True) -> "MappedBytes | None":
        """Map the file into memory. Return None for an empty file, or if the system refuses.

        With `in_large_pages` the mapping is faster to touch, but slower to read from the disk.
        """
        self.check()
        if not self.size_bytes:
            return None
        return MappedBytes.create(self.descriptor, self.size_bytes, in_large_pages=in_large_pages)

    def check(self) -> None:
        """Raise CorruptError when the file is closed, or has changed since it was opened."""
        self._refuse_closed()
        try:
            status = os.fstat(self.descriptor)
        except OSError as error:
            raise self.refused("any more", error) from error
        is_resized = status.st_size != self.size_bytes
        is_rewritten = status.st_mtime_ns != self._opened_mtime_ns
        if is_resized or (is_rewritten and keeps_exact_times(self.descriptor)):
            raise CorruptError(
                f"{self.path.name}: changed while it was open, {self.size_bytes} "
                f"bytes then and {status.st_size} now; load it again, and replace "
                "checkpoints by renaming, never in place"
            )

    def close(self) -> None:
        """Close the file. Its mappings stay valid."""
        self._closed = True
        self._closer()

    def refused(self, where: str, error: OSError) -> UnreadableError:
        """Make the error for a read that the system refused."""
        text = f"{self.path.name}: cannot be read {where} ({error}); load it again"
        unreadable = UnreadableError(text)
        unreadable.errno = error.errno
        return unreadable

    def _refuse_closed(self) -> None:
        if self._closed:
            raise CorruptError(f"{self.path.name}: closed; load it again")


def open_local_file(path: Path, name: str = "") -> LocalFile:
    """Open a regular file. Raises OSError, or CorruptError for anything else."""
    return LocalFile(name or path.name, path, regular_descriptor(path))


class MappedBytes:
    """Bytes of a whole file in private memory. Writes to the memory do not reach the file.

    The memory is a mapping of the file, whose pages are read at their first access. If
    `is_anonymous`, it is anonymous memory that the file was read into.

    All tensors of a file share one mapping, because many mappings are slower to touch. Each tensor
    has a view of its bytes (`view_of`), whose pages are released when the tensor is.

    Python's mmap is as fast, but before 3.13 (`trackfd`) it keeps a descriptor of the file open
    while any of its tensors is in use.
    """

    def __init__(self, address: int, size_bytes: int, is_anonymous: bool) -> None:
        self.address = address
        self.is_anonymous = is_anonymous
        self.memory = memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
        # The views in use, by (start, size_bytes).
        self.views: dict[tuple[int, int], _ViewReference] = {}
        # The ranges (start, size_bytes) that had a view before. A caller may have written to them.
        self.released: set[tuple[int, int]] = set()
        # Not at the exit of the process, because tensors can still be in use then.
        weakref.finalize(self, libc.munmap, address, size_bytes).atexit = False

    @staticmethod
    def create(
        descriptor: int, size_bytes: int, *, in_large_pages: bool = True
    ) -> "MappedBytes | None":
        """Map an open file, or zeroed anonymous memory if `descriptor` is -1.

        Returns None if the system refuses it.
        """
        address = libc.map_private(descriptor, size_bytes)
        if address is None:
            return None
        # Large pages cause fewer page faults. For a file they are pages of the page cache, if its
        # file system supports that.
        if in_large_pages:
            libc.madvise(address, size_bytes, libc.HUGEPAGE)
        return MappedBytes(address, size_bytes, is_anonymous=descriptor < 0)

    def read_in(self, start: int, stop: int) -> bool:
        """Read the bytes [start, stop) of the file into the page cache.

        Returns False if that fails. Touching the bytes would then end the process.
        """
        first = start // _PAGE * _PAGE
        return bool(libc.madvise(self.address + first, stop - first, libc.POPULATE_READ) == 0)

    def view_of(
        self, start: int, size_bytes: int, read_into: Callable[[memoryview, int], None]
    ) -> memoryview:
        """Return a view of `size_bytes` of the memory, from byte `start` of the file on.

        All callers get the same view while anything refers to it. After that, its memory is
        released. If the view is asked for again, `read_into` reads the bytes again that can differ
        from the file.
        """
        reference = self.views.get((start, size_bytes))
        view = None if reference is None else reference()
        if view is not None:
            return view
        view = self._new_view(start, size_bytes)
        if (start, size_bytes) in self.released:
            end = start + size_bytes
            # Released pages of a mapped file have the bytes of the file again. Those of anonymous
            # memory are zero.
            stale_ranges = [(start, end)] if self.is_anonymous else _shared_edges(start, end)
            for first, last in stale_ranges:
                read_into(self.memory[first:last], first)
        return view

    def _new_view(self, start: int, size_bytes: int) -> memoryview:
        view = self.memory[start : start + size_bytes]
        reference = _ViewReference(view, _ViewReference.end_use)
        reference.mapping = self
        reference.start = start
        reference.size_bytes = size_bytes
        self.views[start, size_bytes] = reference
        _references_in_use[id(reference)] = reference
        return view

    def release(self, start: int, size_bytes: int) -> None:
        """Release the pages that lie entirely in this range."""
        self.released.add((start, size_bytes))
        first, last = _whole_pages(start, start + size_bytes)
        if first < last:
            libc.madvise(self.address + first, last - first, libc.DONTNEED)


class _ViewReference(weakref.ref[memoryview]):
    """Weak reference to a view in use. It keeps the mapping alive.

    The object is small, because there is one for each tensor.
    """

    __slots__ = ("mapping", "size_bytes", "start")
    mapping: MappedBytes
    start: int
    size_bytes: int

    # `is_over` is bound as a default, because the exit of the process clears globals first.
    def end_use(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        """Release the memory of a view that nothing refers to any more."""
        if is_over():
            return
        del _references_in_use[id(self)]
        key = self.start, self.size_bytes
        # Another thread can have made a new view of the same bytes at this moment.
        if self.mapping.views.get(key) is self:
            del self.mapping.views[key]
            self.mapping.release(*key)


# Keeps the weak references alive, because a reference that is gone does not run its callback.
_references_in_use: dict[int, _ViewReference] = {}


def _shared_edges(start: int, end: int) -> list[tuple[int, int]]:
    """Return the bytes of [start, end) that share a page with other bytes, so are not released.

    With pages of 4096 bytes, [5000, 20000) has the edges [5000, 8192) and [16384, 20000).
    """
    first, last = _whole_pages(start, end)
    if first < last:
        return [(start, first), (last, end)]
    return [(start, end)]


def _whole_pages(start: int, end: int) -> tuple[int, int]:
    """Return the bytes [first, last) of the pages that lie entirely in [start, end).

    If there are none, `first` is not below `last`.
    """
    return start + -start % _PAGE, end // _PAGE * _PAGE
