"""Writes tensors into durable files: one thread copies, several write behind it, and two hash.

A file is laid out before its first byte arrives, and filled from front to back. Bytes are copied into aligned blocks
and written from them past the page cache (O_DIRECT) where the file system takes that, which on most disks is several
times the rate of buffered writing followed by fsync; elsewhere the same blocks go through the page cache. The copy
also means that a chunk may be reused the moment `append` returns.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import xxhash

from ft_ckpt.errors import IncompleteError, explained
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.buffers import ALIGNMENT, address_of, new_block
from ft_ckpt.storage.direct_io import create_file, write_all
from ft_ckpt.storage.write_tuning import WriteTuning


class Writer:
    """Writer threads and the aligned blocks they share; one for all files of a save."""

    def __init__(self, tuning: WriteTuning | None = None) -> None:
        self.tuning = tuning or WriteTuning()
        self.pool = ThreadPoolExecutor(self.tuning.threads, "ft_ckpt-write")
        # One thread for each kind of digest, since a digest takes its bytes in order.
        self.file_hasher = ThreadPoolExecutor(1, "ft_ckpt-hash")
        self.tensor_hasher = ThreadPoolExecutor(1, "ft_ckpt-hash-tensors")
        self.free: SimpleQueue[mmap.mmap] = SimpleQueue()
        self.blocks: list[mmap.mmap] = []
        self.most_blocks = (
            self.tuning.threads + 2
        )  # one being filled, one on its way, the others under a writer's hands

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self.pool, self.file_hasher, self.tensor_hasher):
            pool.shutdown(wait=True)
        for block in self.blocks:
            with suppress(BufferError):  # a view that an exception's traceback still holds; freed with it
                block.close()

    def take_block(self) -> mmap.mmap:
        """An aligned block, new while there are few; waits while all are being written."""
        if self.free.empty() and len(self.blocks) < self.most_blocks:
            self.blocks.append(new_block(self.tuning.block_bytes))
            return self.blocks[-1]
        return self.free.get()  # that is the back-pressure

    def create(self, path: Path, size_bytes: int) -> "DurableFile":
        """A new file of exactly `size_bytes`, its space allocated. Raises TargetError, or NoSpaceError without room."""
        direct = self.tuning.direct and size_bytes >= self.tuning.least_direct_bytes
        return DurableFile(self, path, create_file(path, size_bytes, direct), size_bytes)


@dataclass
class DurableFile:
    """A file filled from front to back by `append`, durable once `finish` returns."""

    writer: Writer
    path: Path
    descriptor: int
    size_bytes: int
    written: int = 0
    digest: Any = field(default_factory=xxhash.xxh3_128)
    jobs: list[Future[None]] = field(default_factory=list)
    block: mmap.mmap | None = None
    filled: int = 0
    tensor: Any = None  # the digest that what is appended goes into as well
    parts: list[tuple[Any, int, int]] = field(default_factory=list)  # of the open block: digest, start, end

    def append(self, address: int, size_bytes: int) -> None:
        """Copy `size_bytes` from `address`; they may change as soon as this returns."""
        while size_bytes:
            block = self._open_block()
            count = min(size_bytes, self.writer.tuning.block_bytes - self.filled)
            ctypes.memmove(address_of(block) + self.filled, address, count)
            address, size_bytes = address + count, size_bytes - count
            if self.tensor is not None:
                self.parts.append((self.tensor, self.filled, self.filled + count))
            self.filled += count
            if self.filled == self.writer.tuning.block_bytes:
                self._dispatch_block()

    def append_bytes(self, data: bytes) -> None:
        """Append `data`."""
        held = ctypes.create_string_buffer(data, max(len(data), 1))
        self.append(ctypes.addressof(held), len(data))

    def skip_to(self, position: int) -> None:
        """Append zeros up to `position` in the file."""
        gap = position - self.written - self.filled
        if gap > 0:
            self.append_bytes(bytes(gap))

    def finish(self) -> tuple[int, str]:
        """Write what is left and sync; the file's size in bytes and its digest.

        Raises what any writer raised, TargetError or NoSpaceError when the file cannot be synced.
        """
        if self.filled:
            self._dispatch_block()
        for job in self.jobs:
            job.result()
        if self.written != self.size_bytes:
            raise IncompleteError(
                f"{self.path.name}: {self.written} of {self.size_bytes} bytes arrived; nothing is kept"
            )
        with explained(self.path):
            os.ftruncate(self.descriptor, self.size_bytes)  # O_DIRECT wrote whole sectors
            local_disk.sync_open(self.descriptor)
            self._close()
        return self.size_bytes, f"xxh3-128:{self.digest.hexdigest()}"

    def abandon(self) -> None:
        """Let go of the file after an error; nothing is raised."""
        for job in self.jobs:
            with suppress(Exception):
                job.result()
        with suppress(OSError):
            self._close()

    def _close(self) -> None:
        """Close the descriptor once: its number may be another file's at once, also after an error."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _open_block(self) -> mmap.mmap:
        if self.block is None:
            self.block = self.writer.take_block()
        return self.block

    def _dispatch_block(self) -> None:
        block, count, offset = self._open_block(), self.filled, self.written
        hashed = self._hash_block(block, count)
        self.block, self.filled, self.written, self.parts = None, 0, offset + count, []
        self.jobs = [job for job in self.jobs if not job.done() or job.result() is not None]  # raises a writer's error
        self.jobs.append(self.writer.pool.submit(self._flush_block, block, count, offset, hashed))

    def await_digests(self) -> None:
        """Wait until the digests of all tensors appended so far are complete."""
        if self.block is not None:
            self.writer.tensor_hasher.submit(update_digests, self.block, self.parts)
            self.parts = []
        self.writer.tensor_hasher.submit(int).result()  # what was asked of it before is done

    def _hash_block(self, block: mmap.mmap, count: int) -> list[Future[None]]:
        hashed = [self.writer.file_hasher.submit(update_digests, block, [(self.digest, 0, count)])]
        if self.parts:
            hashed.append(self.writer.tensor_hasher.submit(update_digests, block, self.parts))
        return hashed

    def _flush_block(self, block: mmap.mmap, count: int, offset: int, hashed: list[Future[None]]) -> None:
        try:
            write_all(self.path, self.descriptor, block, (0, count + -count % ALIGNMENT), offset)
        finally:
            wait(hashed)  # all are done with the block before it is filled again
            self.writer.free.put(block)


def update_digests(block: mmap.mmap, parts: Iterable[tuple[Any, int, int]]) -> None:
    """Update digests with bytes of `block`; `parts` are (digest, start, end)."""
    with memoryview(block) as view:
        for digest, start, end in parts:
            digest.update(view[start:end])
