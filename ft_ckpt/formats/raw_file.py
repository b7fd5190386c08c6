"""Bytes of an open object as tensors: mapped where its store can map, else copied, range by range.

They are those of the moment it was opened at, or an error; see `storage.local_file` for what that takes on a disk.
"""

import io
from pathlib import PurePosixPath
from typing import Any

import torch

from ft_ckpt.errors import CorruptError
from ft_ckpt.storage.cached_object import CachedObject
from ft_ckpt.storage.kept_store import KeptFile
from ft_ckpt.storage.local_file import MappedBytes
from ft_ckpt.storage.read_ahead import is_cold, read_whole
from ft_ckpt.storage.store import Readable

MAP_BYTES = 1 << 16  # smaller tensors are copied: that is no slower, and safe whatever happens to the file
MOST_PROMISED, FREE_BYTES = 16, 64 << 20  # of values not stored: so many times the file, and so many bytes besides


class FileStream(io.RawIOBase):
    """Bytes [start, start + size_bytes) of an open file as a file of its own.

    Not by its path: what has that by now may be another file, and a library given a path may share what it
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
    """An object that is open for reading, called `name` in messages; `mapped=False` copies everything that is read."""

    def __init__(self, file: Readable, mapped: bool = True) -> None:
        self.file = file if file.can_map or isinstance(file, CachedObject) else CachedObject(file)
        self.mapped = mapped and file.can_map
        self.name, self.size_bytes = PurePosixPath(file.name).name, file.size_bytes
        self._promised, self._closed = 0, False
        self._whole: MappedBytes | None = None

    @property
    def can_map(self) -> bool:
        """Whether its bytes can be mapped."""
        return self.file.can_map

    def close(self) -> None:
        """Close the file. Tensors that were mapped from it stay valid."""
        self._closed = True
        self.file.close()

    def check(self) -> None:
        """Raise CorruptError if the file was written to or cut short since it was opened, and can be mapped.

        Where it cannot, every range is read from what was opened, or not at all, and nothing else has to be asked.
        """
        if self._closed:
            raise CorruptError(f"{self.name}: closed; load it again")
        if self.file.can_map:
            self.file.check()

    def promise(self, size_bytes: int, name: str) -> None:
        """Count the bytes of tensor `name` that are not stored: those of constants, or of elements that repeat.

        Raises CorruptError when all of these are more than a file of this size has any use for.
        """
        self._promised += size_bytes
        if size_bytes < 0 or self._promised > MOST_PROMISED * self.size_bytes + FREE_BYTES:
            raise CorruptError(
                f"{self.name}: {name} takes {size_bytes:,} bytes that are not stored, in a file of "
                f"{self.size_bytes:,} bytes; it is damaged, use another copy"
            )

    def read_in(self, threads: int = 4, direct: str = "auto") -> bool:
        """Read all of the file into memory of our own, at the disk's rate: "mapped" tensors lie there from now on.

        False when the file is mapped already, or there is no memory. Raises CorruptError when it changes meanwhile.
        """
        if self._whole is not None:
            return False
        self.check()
        kept = self.file.kept.give() if isinstance(self.file, KeptFile) else None
        self._whole = kept or read_whole(self.file, threads, direct)
        self.mapped |= self._whole is not None
        return self._whole is not None

    def is_cold(self) -> bool:
        """True when `read_in` is faster than touching the mapped file, see `read_ahead.is_cold`."""
        return (isinstance(self.file, KeptFile) and self.file.is_own) or is_cold(self.file)

    def bytes(self, start: int, size_bytes: int) -> bytearray:
        """A copy of the bytes from `start`. Raises CorruptError where the file has not so many, or has changed."""
        self._check_range(start, size_bytes)
        if self._whole is not None and self._whole.is_own and not self._whole.given_back:
            return bytearray(self._whole.memory[start : start + size_bytes])
        data = bytearray(size_bytes)
        self.file.read_into(memoryview(data), start)
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
                f"{self.name}: bytes {start} to {start + size_bytes} asked for, the file has {self.size_bytes}; "
                "it was cut short or its table is damaged"
            )

    def _map_range(self, start: int, size_bytes: int) -> Any:
        """A part of the file's mapping as a buffer; None when the system gives no mapping."""
        self._check_range(start, size_bytes)
        self._whole = self._whole or self.file.map()
        return None if self._whole is None else self._whole.lend(start, size_bytes, self.file.read_into)
