"""Open local files: ranges and mappings, with an error when the file changes while it is open.

A file that is deleted or replaced by rename stays readable through its descriptor. Truncation and
writes in place are detected before bytes are handed out: size and modification time are compared at
each read and mapping. On a network file system the size alone is compared: a client's cache may
show an older time for a while, and then the current one of an unchanged file. Later changes do not
affect copied bytes. Mapped bytes are pages of the file: truncating it after they were handed out
raises SIGBUS at the next access, as in every program that maps files.
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
_MAX_CALL_BYTES = 1 << 30  # read in one call; Linux takes less than 2 GB


class LocalFile:
    """A file that is open for reading, until `close` or until this object is garbage-collected."""

    can_map = True

    def __init__(self, name: str, path: Path, descriptor: int) -> None:
        self.name, self.path, self.descriptor = name, path, descriptor  # `path`: for messages
        self._closer = weakref.finalize(self, os.close, descriptor)
        self._closed = False
        facts = os.fstat(descriptor)
        self.size_bytes, self.version = facts.st_size, file_version(facts)
        self.mode = stat.S_IMODE(facts.st_mode) | stat.S_IRUSR
        self._opened_mtime_ns = facts.st_mtime_ns

    @property
    def where(self) -> str:
        return str(self.path)

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        done, size_bytes = 0, len(memory)
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
        self.check()  # after reading, so that a concurrent write is detected
        if done < size_bytes:
            raise CorruptError(
                f"{self.path.name}: ends at byte {start + done}, bytes up to {start + size_bytes} "
                "asked for; it is truncated, or its index is damaged"
            )

    def map(self, *, in_large_pages: bool = True) -> "MappedBytes | None":
        """Map the file into memory.

        `in_large_pages` makes the mapping faster to touch, but slower to read from the disk.
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
    """A whole file as a private mapping.

    Pages are read at first access, and writes do not reach the file.

    With `is_own` it is anonymous memory that the file was read into. One mapping serves all
    tensors, because many mappings are slower to touch; the memory of each tensor is released
    separately. Python's mmap is as fast, but before 3.13 (`trackfd`) it keeps a descriptor open for
    each shard while any tensor of it is in use.
    """

    def __init__(self, address: int, size_bytes: int, is_own: bool) -> None:
        self.address, self.is_own = address, is_own
        # released parts: their edges may still contain writes
        self.released: set[tuple[int, int]] = set()
        self.memory = memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
        self.parts: dict[tuple[int, int], _FileRange] = {}
        # tensors may outlive the exit
        weakref.finalize(self, libc.munmap, address, size_bytes).atexit = False

    @staticmethod
    def create(
        descriptor: int, size_bytes: int, *, in_large_pages: bool = True
    ) -> "MappedBytes | None":
        """Map an open file (-1: zeroed private memory); return None if the system refuses it."""
        address = libc.map_private(descriptor, size_bytes)
        if address is None:
            return None
        # Large pages: fewer faults. Those of a file are in the page cache, if its file system
        # supports them.
        if in_large_pages:
            libc.madvise(address, size_bytes, libc.HUGEPAGE)
        return MappedBytes(address, size_bytes, is_own=descriptor < 0)

    def read_in(self, start: int, stop: int) -> bool:
        """Read these bytes of the file into the page cache.

        Returns False if that fails; touching the bytes would then end the process.
        """
        first = start // _PAGE * _PAGE
        return bool(libc.madvise(self.address + first, stop - first, libc.POPULATE_READ) == 0)

    def view_of(
        self, start: int, size_bytes: int, read_into: Callable[[memoryview, int], None]
    ) -> memoryview:
        """Return a view of a part of the memory, which is released when nothing refers to the view.

        While a part is in use, all callers get the same view. Bytes of a part that was released
        before, and may differ from the file, are read again by `read_into`.
        """
        part = self.parts.get((start, size_bytes))
        view = None if part is None else part()
        if view is not None:
            return view
        view = self._new_part(start, size_bytes)
        if (start, size_bytes) in self.released:
            end = start + size_bytes
            ranges = [(start, end)] if self.is_own else _shared_edges(start, end)
            for first, last in ranges:
                read_into(self.memory[first:last], first)
        return view

    def _new_part(self, start: int, size_bytes: int) -> memoryview:
        view = self.memory[start : start + size_bytes]
        part = self.parts[start, size_bytes] = _FileRange(view, _FileRange.end_use)
        part.mapping, part.start, part.size_bytes = self, start, size_bytes
        _parts_in_use[id(part)] = part
        return view

    def release(self, start: int, size_bytes: int) -> None:
        """Release the pages that lie entirely in this part."""
        self.released.add((start, size_bytes))
        first, last = start + -start % _PAGE, (start + size_bytes) // _PAGE * _PAGE
        if first < last:
            libc.madvise(self.address + first, last - first, libc.DONTNEED)


class _FileRange(weakref.ref[memoryview]):
    """A weak reference to a part in use, which keeps the mapping alive.

    The object is small, because there is one for each tensor.
    """

    __slots__ = ("mapping", "size_bytes", "start")
    mapping: MappedBytes
    start: int
    size_bytes: int

    # bound: exit clears globals first
    def end_use(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:
        """Release the memory of a part that nothing refers to any more."""
        if is_over():
            return
        del _parts_in_use[id(self)]
        key = self.start, self.size_bytes
        if self.mapping.parts.get(key) is self:  # not replaced by another thread at the same moment
            del self.mapping.parts[key]
            self.mapping.release(*key)


# kept alive, because the callback of a weak reference runs only if the reference is
_parts_in_use: dict[int, _FileRange] = {}


def _shared_edges(start: int, end: int) -> list[tuple[int, int]]:
    """Return the ends of [start, end) that share pages with neighbours, and are not released."""
    first, last = start + -start % _PAGE, end // _PAGE * _PAGE
    return [(start, min(first, end)), (max(last, start), end)] if first < last else [(start, end)]
