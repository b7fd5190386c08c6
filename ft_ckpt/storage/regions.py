"""Writes this rank's parts of a file that several ranks write in place, without gathering.

The file is there at its full size before. Whole disk blocks go past the page cache; the ends of a part share a block
with another rank's part and go through it, where the kernel puts the two together.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from ft_ckpt.errors import explained
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.buffers import ALIGNMENT, address_of
from ft_ckpt.storage.direct_io import open_for_writing, write_all
from ft_ckpt.storage.writer import Writer, update_digests


@dataclass(frozen=True)
class Region:
    """The next bytes of this rank in a file: `address` on the host, alive until the region after it is asked for."""

    start: int  # in the file, ascending
    address: int
    size_bytes: int
    keeper: Any = None  # whatever owns the memory


def write_regions(path: Path, regions: Iterable[Region], writer: Writer) -> str:
    """Write `regions` into the existing file `path` and sync it; returns their digest in file order, hexadecimal.

    Raises NoSpaceError when the disk is full, TargetError when it cannot be written.
    """
    with explained(path):
        file = _Regions(writer, path)
        try:
            for region in regions:
                file.put_region(region)
            digest = file.finish()
        except BaseException:
            with suppress(OSError):
                file.close()
            raise
        file.close()
        return digest


def digest_regions(regions: Iterable[Region]) -> str:
    """The digest that writing `regions` would give."""
    digest = xxhash.xxh3_128()
    for region in regions:
        digest.update((ctypes.c_char * region.size_bytes).from_address(region.address))
    return str(digest.hexdigest())


@dataclass
class _Regions:
    """One file that is written in places; the block being filled covers consecutive bytes of it."""

    writer: Writer
    path: Path
    direct: int = -1
    plain: int = -1
    block: mmap.mmap | None = None
    base: int = 0  # where in the file the block begins, aligned
    low: int = 0  # the block's first and last filled byte
    high: int = 0
    digest: Any = field(default_factory=xxhash.xxh3_128)
    jobs: list[Future[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.plain = open_for_writing(self.path, os.O_WRONLY, False)
        try:
            self.direct = open_for_writing(self.path, os.O_WRONLY, self.writer.tuning.direct)
        except OSError:
            os.close(self.plain)
            raise

    def put_region(self, region: Region) -> None:
        start, address, left = region.start, region.address, region.size_bytes
        while left:
            if self.block is None or start != self.base + self.high or self.high == self.writer.tuning.block_bytes:
                self._begin_block(start)
            count = min(left, self.writer.tuning.block_bytes - self.high)
            ctypes.memmove(address_of(self._filling_block()) + self.high, address, count)
            self.high += count
            start, address, left = start + count, address + count, left - count

    def finish(self) -> str:
        self._dispatch_block()
        for job in self.jobs:
            job.result()
        local_disk.sync_open(self.direct)
        local_disk.sync_open(self.plain)
        return str(self.digest.hexdigest())

    def close(self) -> None:
        wait(self.jobs)
        if self.block is not None:
            self.writer.free.put(self.block)
        try:
            os.close(self.direct)
        finally:
            os.close(self.plain)

    def _filling_block(self) -> mmap.mmap:
        if self.block is None:
            self.block = self.writer.take_block()
        return self.block

    def _begin_block(self, start: int) -> None:
        self._dispatch_block()
        self.base = start - start % ALIGNMENT
        self.low = self.high = start - self.base

    def _dispatch_block(self) -> None:
        if self.block is None:
            return
        block, base, low, high = self.block, self.base, self.low, self.high
        self.block = None
        hashed = self.writer.file_hasher.submit(update_digests, block, [(self.digest, low, high)])
        self.jobs = [job for job in self.jobs if not job.done() or job.result() is not None]  # raises a writer's error
        self.jobs.append(self.writer.pool.submit(self._flush_block, block, base, low, high, hashed))

    def _flush_block(self, block: mmap.mmap, base: int, low: int, high: int, hashed: Future[None]) -> None:
        first, last = low + -low % ALIGNMENT, high - high % ALIGNMENT
        pieces = [(self.plain, low, min(first, high)), (self.direct, first, last), (self.plain, max(last, first), high)]
        try:
            for descriptor, begin, end in pieces:
                if begin < end:
                    write_all(self.path, descriptor, block, (begin, end), base + begin)
        finally:
            wait([hashed])
            self.writer.free.put(block)
