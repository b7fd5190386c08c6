"""Reads the bytes of an open tensor file by copies or by a map, and notices when it changes."""

import io
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from threading import Lock
from typing import Any

import torch

from ft_ckpt.errors import CorruptError
from ft_ckpt.formats.layout import ceil_div
from ft_ckpt.storage import Readable, read_range
from ft_ckpt.storage.io import MappedBytes, is_cold, read_whole

# Smaller tensors are copied, which is no slower, and safe from changes of the file.
MAP_BYTES = 1 << 16
# A file may declare values that it does not store, up to 16 times its size plus 64 MiB.
_MAX_VIRTUAL_RATIO = 16
FREE_BYTES = 64 << 20


class FileStream(io.RawIOBase):
    """A file object for bytes [start, start + size_bytes) of an open file.

    Libraries get it instead of the path, which may belong to another file by now, and by which they
    may cache state.
    """

    def __init__(self, raw: "RawFile", start: int = 0, size_bytes: int | None = None) -> None:
        super().__init__()
        self.raw, self.start, self.at = raw, start, 0
        self.size_bytes = raw.size_bytes - start if size_bytes is None else size_bytes

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + (0, self.at, self.size_bytes)[whence])
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Read into `buffer` from the current position.

        Returns the number of bytes. Raises CorruptError when the file has changed.
        """
        remaining = max(0, self.size_bytes - self.at)
        count = min(len(buffer), remaining)
        self.raw.read_into(memoryview(buffer)[:count], self.start + self.at)
        self.at += count
        return count


class RawFile:
    """An open tensor file on a disk or in a bucket; `mapped=False` copies everything that is read.

    `name` is the name of the file in messages.
    """

    def __init__(self, file: Readable, mapped: bool = True) -> None:
        self.file = file if file.can_map or isinstance(file, CachedObject) else CachedObject(file)
        self.mapped = mapped and file.can_map
        self.name, self.size_bytes = PurePosixPath(file.name).name, file.size_bytes
        self._virtual_bytes = 0
        self._closed = False
        self._whole: MappedBytes | None = None

    @property
    def can_map(self) -> bool:
        return self.file.can_map

    def close(self) -> None:
        self._closed = True
        self.file.close()

    def check(self) -> None:
        """Raise CorruptError if the file is closed, or if it can be mapped and has changed.

        Files that are not mapped are always read in the version that was opened.
        """
        if self._closed:
            raise CorruptError(f"{self.name}: closed; load it again")
        if self.file.can_map:
            self.file.check()

    def reserve_virtual_bytes(self, size_bytes: int, name: str) -> None:
        """Count bytes of tensor `name` that the file does not store, as its elements repeat.

        Raises CorruptError when the total of all tensors is implausible for a file of this size.
        """
        self._virtual_bytes += size_bytes
        max_bytes = _MAX_VIRTUAL_RATIO * self.size_bytes + FREE_BYTES
        if size_bytes < 0 or self._virtual_bytes > max_bytes:
            raise CorruptError(
                f"{self.name}: {name} takes {size_bytes:,} bytes that are not stored, in a file of "
                f"{self.size_bytes:,} bytes; it is damaged, use another copy"
            )

    def read_in(self, threads: int = 4, direct: str = "auto") -> bool:
        """Read the whole file into private memory at the disk's rate, for its mapped tensors.

        Returns False if the file is mapped already, or if memory is short. Raises CorruptError when
        the file changes meanwhile.
        """
        if self._whole is not None:
            return False
        self.check()
        self._whole = read_whole(self.file, threads, direct)
        self.mapped |= self._whole is not None
        return self._whole is not None

    def is_cold(self) -> bool:
        """Check whether `read_in` is faster than touching the mapped file, see `io.is_cold`."""
        return is_cold(self.file)

    def bytes(self, start: int, size_bytes: int) -> bytearray:
        """Copy the bytes from `start`.

        Raises CorruptError when the file is shorter or has changed.
        """
        data = bytearray(size_bytes)
        self.read_into(memoryview(data), start)
        return data

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill `memory` with the bytes from `start`. Raises CorruptError as `bytes` does."""
        self._check_range(start, len(memory))
        whole = self._whole
        if whole is not None and whole.is_anonymous and not whole.released:
            memory[:] = whole.memory[start : start + len(memory)]
        else:
            self.file.read_into(memory, start)

    def tensor(self, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` elements from byte `start` as a 1-D tensor, on the CPU.

        Writes to the tensor do not reach the file. Raises CorruptError as `bytes` does.
        """
        if not count:
            return torch.empty(0, dtype=dtype, device="cpu")
        size_bytes = count * dtype.itemsize
        is_aligned = start % dtype.itemsize == 0
        if self.mapped and is_aligned and size_bytes >= MAP_BYTES:
            self._check_range(start, size_bytes)
            self._whole = self._whole or self.file.map()
            if self._whole is not None:
                part = self._whole.view_of(start, size_bytes, self.file.read_into)
                return torch.frombuffer(part, dtype=dtype, count=count)
        return torch.frombuffer(self.bytes(start, size_bytes), dtype=dtype, count=count)

    def _check_range(self, start: int, size_bytes: int) -> None:
        self.check()
        stop = start + size_bytes
        if start < 0 or size_bytes < 0 or stop > self.size_bytes:
            raise CorruptError(
                f"{self.name}: bytes {start} to {stop} asked for, the file has "
                f"{self.size_bytes}; it is truncated, or its index is damaged"
            )


# A request to a bucket takes as long as the transfer of about 1 MB.
_BLOCK_BYTES = 256 << 10
_MAX_BLOCKS = 16


@dataclass(eq=False)
class CachedObject:
    """An open object of a bucket, `inner`, with an LRU cache of blocks for small ranges."""

    inner: Readable
    can_map = False
    _blocks: dict[int, bytes] = field(default_factory=dict)  # by number, least recently used first
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.name = self.inner.name
        self.size_bytes = self.inner.size_bytes
        self.version = self.inner.version

    @property
    def where(self) -> str:
        return self.inner.where

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        end = start + len(memory)
        if len(memory) > _BLOCK_BYTES or end > self.size_bytes:
            self.inner.read_into(memory, start)
            return
        for number in range(start // _BLOCK_BYTES, ceil_div(end, _BLOCK_BYTES)):
            block_start = number * _BLOCK_BYTES
            low, high = max(start, block_start), min(end, block_start + _BLOCK_BYTES)
            block = self._block(number)
            memory[low - start : high - start] = block[low - block_start : high - block_start]

    def map(self) -> None:
        return

    def check(self) -> None:
        self.inner.check()

    def close(self) -> None:
        self._blocks.clear()
        self.inner.close()

    def _block(self, number: int) -> bytes:
        with self._lock:
            block = self._blocks.pop(number, None)
        if block is None:
            block = read_range(self.inner, number * _BLOCK_BYTES, _BLOCK_BYTES)
        with self._lock:
            self._blocks[number] = block
            if len(self._blocks) > _MAX_BLOCKS:
                least_recent = next(iter(self._blocks))
                del self._blocks[least_recent]
        return block
