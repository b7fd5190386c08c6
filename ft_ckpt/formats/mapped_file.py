"""Bytes of an open file as tensors: mapped or copied, and never those of a file that has changed since.

A file that is deleted or replaced by rename stays whole here, since it is held by its descriptor. One that is cut
short or written to in place is noticed before its bytes are handed out: size and time of change are compared each
time. What was copied is safe for good. What was mapped and handed out lies in the file itself: cutting the file short
after that takes the ground from under it (SIGBUS), for us as for every program that maps files.
"""

import ctypes
import io
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ft_ckpt.errors import CorruptError, LoadError, UnreadableError, damaged_input
from ft_ckpt.storage.buffers import ALIGNMENT
from ft_ckpt.storage.read_ahead import cached_bytes, read_into

MAP_BYTES = 1 << 16  # smaller tensors are copied: that is no slower, and safe whatever happens to the file
_PAGE = mmap.ALLOCATIONGRANULARITY
_NORESERVE = 0x4000  # linux: a private mapping of a large file must not count as memory promised
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value
_DONTNEED, _HUGEPAGE = 4, 14  # linux: MADV_DONTNEED, MADV_HUGEPAGE
_READ_BYTES = 32 << 20  # read at a time: each time, a thread waits for its turn, for 5 ms where Python code is running
_SAMPLES, _SAMPLE_BYTES = 64, 256 << 10  # places of a file asked for in the page cache: all of 2.5 GB takes 20 ms
MOST_PROMISED, FREE_BYTES = 16, 64 << 20  # of values not stored: so many times the file, and so many bytes besides
_LEAST_READ_BYTES = 16 << 20  # smaller files are mapped, wherever they are


class FileStream(io.RawIOBase):
    """Bytes [start, start + size_bytes) of an open file as a file of its own.

    By its descriptor: what has that path by now may be another file, and a library given a path may share what it
    remembers of a file that has been overwritten since.
    """

    def __init__(self, raw: "RawFile", start: int = 0, size_bytes: int | None = None) -> None:
        super().__init__()
        self.raw, self.start, self.at = raw, start, 0
        self.size_bytes = raw.size_bytes - start if size_bytes is None else size_bytes

    def seekable(self) -> bool:
        """Yes."""
        return True

    def readable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to `offset` from the start, from here, or from the end."""
        self.at = max(0, offset + (0, self.at, self.size_bytes)[whence])
        return self.at

    def tell(self) -> int:
        """The position, in bytes from the start."""
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from here. Raises CorruptError when the file has changed."""
        wanted = min(len(buffer), max(0, self.size_bytes - self.at))
        buffer[:wanted] = self.raw.bytes(self.start + self.at, wanted)
        self.at += wanted
        return wanted


class RawFile:
    """A file held open for reading; `mapped=False` copies everything that is read."""

    def __init__(self, path: Path, mapped: bool = True) -> None:
        self.path, self.mapped = path, mapped
        with damaged_input(path):
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
        self._closer, self._closed = weakref.finalize(self, os.close, self.descriptor), False
        found = os.fstat(self.descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise LoadError(f"{path}: {'a folder' if stat.S_ISDIR(found.st_mode) else 'no regular file'}; name a file")
        self.size_bytes, self._promised = found.st_size, 0
        self._whole: _Mapping | None = None
        self._known = (found.st_size, found.st_mtime_ns)

    def close(self) -> None:
        """Close the file. Tensors that were mapped from it stay valid."""
        self._closed = True
        self._closer()

    def check(self) -> None:
        """Raise CorruptError if the file was written to or cut short since it was opened."""
        if self._closed:
            raise CorruptError(f"{self.path.name}: closed; load it again")
        try:
            found = os.fstat(self.descriptor)
        except OSError as error:
            raise UnreadableError(f"{self.path.name}: cannot be read any more ({error}); load it again") from error
        if (found.st_size, found.st_mtime_ns) != self._known:
            raise CorruptError(
                f"{self.path.name}: changed while it was open, {self._known[0]} bytes then and {found.st_size} now; "
                "load it again, and replace checkpoints by renaming, never in place"
            )

    def promise(self, size_bytes: int, name: str) -> None:
        """Count the bytes of tensor `name` that are not stored: those of constants, or of elements that repeat.

        Raises CorruptError when all of these are more than a file of this size has any use for.
        """
        self._promised += size_bytes
        if size_bytes < 0 or self._promised > MOST_PROMISED * self.size_bytes + FREE_BYTES:
            raise CorruptError(
                f"{self.path.name}: {name} takes {size_bytes:,} bytes that are not stored, in a file of "
                f"{self.size_bytes:,} bytes; it is damaged, use another copy"
            )

    def read_in(self, threads: int = 4, direct: str = "auto") -> bool:
        """Read all of the file into memory of our own, at the disk's rate: "mapped" tensors lie there from now on.

        False when the file is mapped already, or there is no memory. Raises CorruptError when it changes meanwhile.
        """
        if self._whole is not None or not self.size_bytes:
            return False
        self.check()
        own = _Mapping.create(-1, self.size_bytes + -self.size_bytes % ALIGNMENT)
        if own is None:
            return False
        read_into(own.memory, self, self.size_bytes, threads, direct, _READ_BYTES)
        self._whole = own
        return True

    def is_cold(self) -> bool:
        """True when `read_in` is faster than touching the mapped file: large, and less than half of it in memory.

        False too where the system cannot tell, or has not twice the memory for it.
        """
        if self.size_bytes < _LEAST_READ_BYTES or 2 * self.size_bytes > _available_bytes():
            return False
        starts = range(0, self.size_bytes, -(-self.size_bytes // _SAMPLES))
        found = [cached_bytes(self.descriptor, start, _SAMPLE_BYTES) for start in starts]
        known = [count for count in found if count is not None]
        return len(known) == len(starts) and 2 * sum(known) < len(starts) * _SAMPLE_BYTES

    def bytes(self, start: int, size_bytes: int) -> bytearray:
        """A copy of the bytes from `start`. Raises CorruptError where the file has not so many, or has changed."""
        self._check_range(start, size_bytes)
        if self._whole is not None and self._whole.is_own and not self._whole.given_back:
            return bytearray(self._whole.memory[start : start + size_bytes])
        data = bytearray(size_bytes)
        view, at = memoryview(data), start
        while view:
            try:
                count = os.preadv(self.descriptor, [view[: 1 << 30]], at)
            except OSError as error:
                raise UnreadableError(f"{self.path.name}: cannot be read at byte {at} ({error})") from error
            if not count:
                break
            view, at = view[count:], at + count
        self.check()  # after reading, so that bytes written meanwhile are not taken for the file's
        return data

    def tensor(self, start: int, count: int, dtype: torch.dtype, mapped: bool | None = None) -> torch.Tensor:
        """`count` elements from byte `start`, one dimension; writable, and no write reaches the file."""
        if not count:
            return torch.empty(0, dtype=dtype)
        size_bytes = count * dtype.itemsize
        wanted = self.mapped if mapped is None else mapped
        if wanted and size_bytes >= MAP_BYTES and start % dtype.itemsize == 0:
            held = self._map_range(start, size_bytes)
            if held is not None:
                return torch.frombuffer(held, dtype=dtype, count=count)
        return torch.frombuffer(self.bytes(start, size_bytes), dtype=dtype, count=count)

    def _check_range(self, start: int, size_bytes: int) -> None:
        self.check()
        if start < 0 or size_bytes < 0 or start + size_bytes > self.size_bytes:
            raise CorruptError(
                f"{self.path.name}: bytes {start} to {start + size_bytes} asked for, the file has {self.size_bytes}; "
                "it was cut short or its table is damaged"
            )

    def _map_range(self, start: int, size_bytes: int) -> Any:
        """A part of the file's mapping as a buffer; None when the system gives no mapping."""
        self._check_range(start, size_bytes)
        self._whole = self._whole or _Mapping.create(self.descriptor, self.size_bytes)
        if self._whole is None:
            return None
        held = self._whole.part_in_use(start, size_bytes)
        if held is None:
            held = self._whole.lend_part(start, size_bytes)
            if (start, size_bytes) in self._whole.given_back:
                end = start + size_bytes
                for first, last in [(start, end)] if self._whole.is_own else _shared_edges(start, end):
                    self._whole.memory[first:last] = self.bytes(first, last - first)
        return held


def _shared_edges(start: int, end: int) -> list[tuple[int, int]]:
    """The ends of [start, end) that share pages with their neighbours, and are therefore not given back."""
    first, last = start + -start % _PAGE, end // _PAGE * _PAGE
    return [(start, min(first, end)), (max(last, start), end)] if first < last else [(start, end)]


def _available_bytes() -> int:
    """Memory that can be had without paging anything out; 0 where that is not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0


class _Mapping:
    """All of a file as private memory: read where it is touched, and what is written to it stays here.

    With `is_own` it is plain memory that the file was read into. One mapping for all tensors, since many are slower to
    touch; their memory is given back one by one. Python's mmap is as fast, but before 3.13 (`trackfd`) it keeps the
    file open for as long as any tensor of it is in use: one descriptor for each shard of every model that is loaded.
    """

    def __init__(self, address: int, size_bytes: int, is_own: bool) -> None:
        self.address, self.is_own = address, is_own
        self.given_back: set[tuple[int, int]] = set()  # runs whose edges may still have what was written there
        self.memory = memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")
        self.parts: dict[tuple[int, int], _Part] = {}
        weakref.finalize(self, _libc.munmap, address, size_bytes).atexit = False  # tensors may outlive the exit

    @staticmethod
    def create(descriptor: int, size_bytes: int) -> "_Mapping | None":
        """The mapping of an open file (-1: of no file, all zero), or None."""
        is_own = descriptor < 0
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE
        flags |= mmap.MAP_ANONYMOUS if is_own else _NORESERVE
        address = _libc.mmap(None, size_bytes, protection, flags, descriptor, 0)
        if address in (None, _FAILED):
            return None
        # Large pages: fewer faults. A file gets them in the page cache, where its file system can, as it is read here.
        _libc.madvise(address, size_bytes, _HUGEPAGE)
        return _Mapping(address, size_bytes, is_own)

    def lend_part(self, start: int, size_bytes: int) -> memoryview:
        """A part of the memory, which is given back when nothing uses it any more."""
        held = self.memory[start : start + size_bytes]
        part = self.parts[start, size_bytes] = _Part(held, _Part.end_use)
        part.mapping, part.start, part.size_bytes = self, start, size_bytes
        _lent[id(part)] = part
        return held

    def part_in_use(self, start: int, size_bytes: int) -> memoryview | None:
        """The memory that `lend_part` gave, if it is still in use."""
        part = self.parts.get((start, size_bytes))
        return None if part is None else part()

    def give_back(self, start: int, size_bytes: int) -> None:
        """Drop the pages that are of this part alone."""
        self.given_back.add((start, size_bytes))
        first, last = start + -start % _PAGE, (start + size_bytes) // _PAGE * _PAGE
        if first < last:
            _libc.madvise(self.address + first, last - first, _DONTNEED)


class _Part(weakref.ref[memoryview]):
    """A weak reference to a part in use, which keeps the mapping. Small, since one is made at a tensor's first use."""

    __slots__ = ("mapping", "size_bytes", "start")
    mapping: _Mapping
    start: int
    size_bytes: int

    def end_use(self, is_over: Callable[[], bool] = sys.is_finalizing) -> None:  # bound: names go first at exit
        """Give back the memory of a part that nothing uses any more."""
        if is_over():
            return
        del _lent[id(self)]
        key = self.start, self.size_bytes
        if self.mapping.parts.get(key) is self:  # and not of another thread, which asked at the same moment
            del self.mapping.parts[key]
            self.mapping.give_back(*key)


_lent: dict[int, _Part] = {}  # those in use: a reference that is itself forgotten would not be called
