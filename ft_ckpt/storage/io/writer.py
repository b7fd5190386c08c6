"""Writes memory regions into new objects: one thread copies, several write, two digest.

Up to 32 MiB on a local disk are written by the calling thread, because starting others takes
longer.

Bytes are copied into aligned blocks, which a local store writes with direct I/O (O_DIRECT,
bypassing the page cache) if the file system supports it: on most disks, that has several times the
rate of buffered writing followed by fsync. Because of the copy, the memory may be reused as soon as
`put_region` returns. The regions of a whole file are contiguous from byte 0 on; of a file that
several ranks write, each rank puts its own regions.
"""

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, TypeVar

import xxhash

from ft_ckpt.storage.io.blocks import ALIGNMENT, BLOCK_BYTES, Block, address_of, new_block
from ft_ckpt.storage.store import Stored, Writable

T = TypeVar("T")
# Up to this size the calling thread writes, in small blocks: touching new memory takes longer.
_MAX_BYTES_IN_CALLER = 32 << 20
_SMALL_BLOCK_BYTES = 2 << 20
_FIRST_BLOCK_BYTES = 1 << 20  # of a local file: the disk is busy while longer blocks are filled


@dataclass(frozen=True)
class WriteTuning:
    """One way to write: `threads` writers of blocks of `block_bytes`."""

    threads: int = 4
    block_bytes: int = BLOCK_BYTES
    # files of at least this size are written with direct I/O; None: no file is
    direct_bytes: int | None = BLOCK_BYTES
    sha256: bool = False  # also compute the SHA-256 of each file


def tuning_for(
    threads: int | None = None,
    direct: str = "auto",
    block_bytes: int = BLOCK_BYTES,
    sha256: bool = False,
) -> WriteTuning:
    """Return the tuning for these settings, where None and "auto" are the defaults.

    "on" uses direct I/O for small files, too.
    """
    default = WriteTuning()
    direct_bytes = {"auto": default.direct_bytes, "on": 0, "off": None}[direct]
    return WriteTuning(threads or default.threads, block_bytes, direct_bytes, sha256)


@dataclass(frozen=True)
class Region:
    """The next bytes of a file: `address` on the host, valid until the next region is requested."""

    start: int  # in the file, ascending
    address: int
    size_bytes: int
    keeper: Any = None  # the owner of the memory


def region_of(start: int, data: bytes) -> Region:
    """Make the region of `data` from byte `start` on."""
    buffer = ctypes.create_string_buffer(data, max(len(data), 1))
    return Region(start, ctypes.addressof(buffer), len(data), buffer)


def digest_regions(regions: Iterable[Region]) -> str:
    """Compute the hexadecimal digest of the file that writing `regions` would create."""
    digest = xxhash.xxh3_128()
    for region in regions:
        digest.update((ctypes.c_char * region.size_bytes).from_address(region.address))
    return str(digest.hexdigest())


class CallingThread(Executor):
    """Runs each call at once, in the calling thread."""

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        done: Future[T] = Future()
        try:
            done.set_result(call(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised by `result`
            done.set_exception(error)
        return done


class WriterPool:
    """Writer threads and the aligned blocks they share; one for all files of a save.

    `local_bytes`: the total to be written, if it is known and all of it goes to a local disk.
    `advance` is called with the number of bytes of each write, in the thread that has written them.
    """

    def __init__(
        self,
        tuning: WriteTuning | None = None,
        local_bytes: int | None = None,
        advance: Callable[[int], None] = lambda _size_bytes: None,
    ) -> None:
        self.tuning, self.advance = tuning or WriteTuning(), advance
        self.pool: Executor
        self.file_hasher: Executor
        self.tensor_hasher: Executor
        if local_bytes is not None and local_bytes <= _MAX_BYTES_IN_CALLER:
            block_bytes = min(self.tuning.block_bytes, _SMALL_BLOCK_BYTES)
            self.tuning = replace(self.tuning, block_bytes=block_bytes)
            self.pool = self.file_hasher = self.tensor_hasher = CallingThread()
        else:
            self.pool = ThreadPoolExecutor(self.tuning.threads, "ft_ckpt-write")
            # One thread for each kind of digest, since a digest takes its bytes in order.
            self.file_hasher = ThreadPoolExecutor(1, "ft_ckpt-hash")
            self.tensor_hasher = ThreadPoolExecutor(1, "ft_ckpt-hash-tensors")
        self.first_block_bytes = self.tuning.block_bytes
        if local_bytes is not None:
            self.first_block_bytes = min(self.tuning.block_bytes, _FIRST_BLOCK_BYTES)
        self.free_blocks: SimpleQueue[Block] = SimpleQueue()
        self.blocks: list[Block] = []
        # one is being filled, one is queued, the others are being written
        self.max_blocks = self.tuning.threads + 2

    def __enter__(self) -> "WriterPool":
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self.pool, self.file_hasher, self.tensor_hasher):
            pool.shutdown(wait=True)
        for block in self.blocks:
            with suppress(BufferError):  # an exception's traceback still has a view; freed with it
                block.close()

    def take_block(self) -> Block:
        """Take an aligned block: a new one while there are few, else wait until one is free."""
        if self.free_blocks.empty() and len(self.blocks) < self.max_blocks:
            self.blocks.append(new_block(self.tuning.block_bytes))
            return self.blocks[-1]
        return self.free_blocks.get()  # back-pressure

    @contextmanager
    def fill(self, goal: Writable) -> Iterator["DurableFile"]:
        """Yield `goal` to be filled by regions and finished.

        The object is abandoned when the block raises.
        """
        file = DurableFile(self, goal, sha256=hashlib.sha256() if self.tuning.sha256 else None)
        try:
            yield file
        except BaseException:
            file.abandon()
            raise


@dataclass
class DurableFile:
    """A new object that regions fill in the order of the file; it is durable after `finish`."""

    writer: WriterPool
    goal: Writable
    digest: Any = field(default_factory=xxhash.xxh3_128)
    # its state, if the tuning asks for it; the file's when all of it is written here
    sha256: Any = None
    jobs: list[Future[None]] = field(default_factory=list)
    block: Block | None = None  # being filled
    block_start: int = 0  # in the file, aligned
    capacity: int = 0  # bytes that are collected in the block
    # the filled bytes [filled_start, filled_stop) of the block
    filled_start: int = 0
    filled_stop: int = 0
    # of tensors in the block: digest, start, end
    parts: list[tuple[Any, int, int]] = field(default_factory=list)
    stored: Stored | None = None  # once it is finished

    def put_region(self, region: Region, tensor: Any = None) -> None:
        """Copy a region, which may change as soon as this returns.

        `tensor` is another digest to update with it.
        """
        done = 0
        while done < region.size_bytes:
            block = self._block_at(region.start + done)
            count = min(region.size_bytes - done, self.capacity - self.filled_stop)
            ctypes.memmove(address_of(block) + self.filled_stop, region.address + done, count)
            if tensor is not None:
                self.parts.append((tensor, self.filled_stop, self.filled_stop + count))
            self.filled_stop += count
            done += count

    def put_zeros(self, start: int, stop: int) -> None:
        if start < stop:
            self.put_region(region_of(start, bytes(stop - start)))

    def await_digests(self) -> None:
        """Wait until the digests of all tensors so far are complete."""
        if self.block is not None:
            self.writer.tensor_hasher.submit(update_digests, self.block, self.parts)
            self.parts = []
        self.writer.tensor_hasher.submit(int).result()  # one thread: all earlier jobs are done

    def finish(self) -> str:
        """Write the remaining bytes and make the object durable.

        Returns the digest of all regions, hexadecimal.

        Raises what any write raised, and what `Writable.finish` raises.
        """
        self._dispatch_block()
        for job in self.jobs:
            job.result()
        self.stored = self.goal.finish()
        return str(self.digest.hexdigest())

    def abandon(self) -> None:
        """Discard the object after an error; raises nothing."""
        wait(self.jobs)
        if self.block is not None:
            self.writer.free_blocks.put(self.block)
        self.goal.abandon()

    def _block_at(self, start: int) -> Block:
        """Return the block that has space for byte `start`."""
        if start != self.block_start + self.filled_stop or self.filled_stop == self.capacity:
            self._dispatch_block()
        if self.block is None:
            self.block = self.writer.take_block()
            self.block_start = start - start % ALIGNMENT
            self.capacity = self.writer.tuning.block_bytes
            if self.block_start == 0:
                self.capacity = self.writer.first_block_bytes
            self.filled_start = self.filled_stop = start - self.block_start
        return self.block

    def _dispatch_block(self) -> None:
        if self.block is None:
            return
        block, writer = self.block, self.writer
        start, stop = self.filled_start, self.filled_stop
        hash_jobs = [writer.file_hasher.submit(update_digests, block, [(self.digest, start, stop)])]
        other_parts = self.parts
        if self.sha256 is not None:
            other_parts = [*other_parts, (self.sha256, start, stop)]
        if other_parts:
            hash_jobs.append(writer.tensor_hasher.submit(update_digests, block, other_parts))
        self.block, self.parts = None, []
        self._drop_done_jobs()
        flush_job = writer.pool.submit(
            self._flush_block, block, self.block_start, start, stop, hash_jobs
        )
        self.jobs.append(flush_job)

    def _drop_done_jobs(self) -> None:
        """Drop writes that are done. Raises the error of one that failed."""
        open_jobs = []
        for job in self.jobs:
            if job.done():
                job.result()
            else:
                open_jobs.append(job)
        self.jobs = open_jobs

    def _flush_block(
        self, block: Block, block_start: int, start: int, stop: int, hash_jobs: list[Future[None]]
    ) -> None:
        """Write the bytes [start, stop) of a block, which is at `block_start` in the file."""
        try:
            with memoryview(block) as view, view[start:stop] as filled:
                self.goal.write(block_start + start, filled)
            self.writer.advance(stop - start)
        finally:
            wait(hash_jobs)  # all are done with the block before it is filled again
            self.writer.free_blocks.put(block)


def update_digests(block: Block, parts: Iterable[tuple[Any, int, int]]) -> None:
    """Update digests with bytes of `block`; `parts` are (digest, start, end)."""
    with memoryview(block) as view:
        for digest, start, end in parts:
            digest.update(view[start:end])
