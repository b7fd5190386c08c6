"""Writes regions of memory into new files and objects, in aligned blocks.

The calling thread copies each region into a block, so the memory of the region may change as soon
as `FileWriter.put_region` returns. When a block is full, other threads write and digest it, while
the calling thread fills the next block. `WriteTuning.threads` threads write, and two digest.

A local store writes blocks with direct I/O (O_DIRECT, bypassing the page cache) if the file system
supports it. On most disks, that has several times the rate of buffered writing followed by fsync.

Up to 32 MiB on a local disk are written by the calling thread itself, because starting other
threads takes longer.
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
_MAX_BYTES_IN_CALLER = 32 << 20
# The calling thread writes small blocks, because the first touch of new memory is slow.
_SMALL_BLOCK_BYTES = 2 << 20
# The first block of a local file is small, so that the disk has work while longer ones are filled.
_FIRST_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class WriteTuning:
    """How files are written.

    Attributes:
        threads: number of threads that write.
        block_bytes: size of their blocks, a multiple of ALIGNMENT.
        direct_bytes: files of at least this size are written with direct I/O. None: no file is.
        sha256: True also computes the SHA-256 of each file.
    """

    threads: int = 4
    block_bytes: int = BLOCK_BYTES
    direct_bytes: int | None = BLOCK_BYTES
    sha256: bool = False


def tuning_for(
    threads: int | None = None,
    direct: str = "auto",
    block_bytes: int = BLOCK_BYTES,
    sha256: bool = False,
) -> WriteTuning:
    """Return the tuning for these settings.

    None for `threads` is the default number. `direct` is "auto" (direct I/O for large files), "on"
    (for small files, too) or "off".
    """
    default = WriteTuning()
    direct_bytes = {"auto": default.direct_bytes, "on": 0, "off": None}[direct]
    return WriteTuning(threads or default.threads, block_bytes, direct_bytes, sha256)


@dataclass(frozen=True)
class Region:
    """Next bytes of a file, which are in host memory until the next region is requested.

    Attributes:
        start: offset in the file of the first byte. It ascends from region to region.
        address: address of the first byte in host memory.
        size_bytes: number of bytes.
        memory_owner: the object that owns the memory. The region keeps it alive.
    """

    start: int
    address: int
    size_bytes: int
    memory_owner: Any = None


def region_of(start: int, data: bytes) -> Region:
    """Make the region of a copy of `data`, which begins at byte `start` of the file."""
    buffer = ctypes.create_string_buffer(data, max(len(data), 1))
    return Region(start, ctypes.addressof(buffer), len(data), buffer)


def digest_regions(regions: Iterable[Region]) -> str:
    """Compute the hexadecimal digest of the file that writing `regions` would create."""
    digest = xxhash.xxh3_128()
    for region in regions:
        digest.update((ctypes.c_char * region.size_bytes).from_address(region.address))
    return str(digest.hexdigest())


class WriterPool:
    """Threads and aligned blocks that all files of a save share.

    `local_bytes` is the total to be written, if it is known and all of it goes to a local disk.
    After each write, the thread that made it calls `advance` with the number of bytes.
    """

    def __init__(
        self,
        tuning: WriteTuning | None = None,
        local_bytes: int | None = None,
        advance: Callable[[int], None] = lambda _size_bytes: None,
    ) -> None:
        self.tuning = WriteTuning() if tuning is None else tuning
        self.advance = advance
        self.writers: Executor
        self.file_digester: Executor
        self.other_digester: Executor
        if local_bytes is not None and local_bytes <= _MAX_BYTES_IN_CALLER:
            block_bytes = min(self.tuning.block_bytes, _SMALL_BLOCK_BYTES)
            self.tuning = replace(self.tuning, block_bytes=block_bytes)
            self.writers = self.file_digester = self.other_digester = CallingThread()
        else:
            self.writers = ThreadPoolExecutor(self.tuning.threads, "ft_ckpt-write")
            # Each digester has one thread, because a digest takes its bytes in order.
            self.file_digester = ThreadPoolExecutor(1, "ft_ckpt-hash")
            self.other_digester = ThreadPoolExecutor(1, "ft_ckpt-hash-tensors")

        self.first_block_bytes = self.tuning.block_bytes
        if local_bytes is not None:
            self.first_block_bytes = min(self.tuning.block_bytes, _FIRST_BLOCK_BYTES)
        self.free_blocks: SimpleQueue[Block] = SimpleQueue()
        self.blocks: list[Block] = []

        # One block is being filled, one waits for a thread, and each thread writes one.
        self.max_blocks = self.tuning.threads + 2

    def __enter__(self) -> "WriterPool":
        return self

    def __exit__(self, *_: object) -> None:
        for executor in (self.writers, self.file_digester, self.other_digester):
            executor.shutdown(wait=True)
        for block in self.blocks:
            # The traceback of an error may still hold a view of the block. Both are freed together.
            with suppress(BufferError):
                block.close()

    @contextmanager
    def fill(self, target: Writable) -> Iterator["FileWriter"]:
        """Yield a writer for `target`. The caller puts all regions into it, and calls `finish`.

        If the `with` block raises, the object is abandoned.
        """
        sha256 = hashlib.sha256() if self.tuning.sha256 else None
        file = FileWriter(self, target, sha256=sha256)
        try:
            yield file
        except BaseException:
            file.abandon()
            raise

    def take_block(self) -> Block:
        """Take an aligned block.

        Allocates one while there are fewer than `max_blocks`. Then waits until a block has been
        written, so that memory is bounded when the disk is slower than the caller.
        """
        if self.free_blocks.empty() and len(self.blocks) < self.max_blocks:
            self.blocks.append(new_block(self.tuning.block_bytes))
            return self.blocks[-1]
        return self.free_blocks.get()


@dataclass
class FileWriter:
    """Writes one new object from its regions. The object is durable after `finish`.

    The regions come in ascending order. A rank that writes a whole file puts contiguous regions
    from byte 0 on. If several ranks write one file, each of them puts its own regions only.

    Attributes:
        pool: the threads and blocks.
        target: the object that is written.
        digest: running xxh3-128 of all regions.
        sha256: running SHA-256 of all regions, or None. It is the SHA-256 of the file if this rank
            writes the whole file.
        write_jobs: blocks that are queued or being written.
        filling: the block that the next bytes are copied into, or None.
        stored: description of the finished object, or None.
    """

    pool: WriterPool
    target: Writable
    digest: Any = field(default_factory=xxhash.xxh3_128)
    sha256: Any = None
    write_jobs: list[Future[None]] = field(default_factory=list)
    filling: "_FillingBlock | None" = None
    stored: Stored | None = None

    def put_region(self, region: Region, tensor_digest: Any = None) -> None:
        """Copy a region, whose memory may change as soon as this returns.

        `tensor_digest` is updated with the same bytes later, in another thread.
        """
        done = 0
        while done < region.size_bytes:
            filling = self._block_for(region.start + done)
            start = filling.filled_stop
            count = min(region.size_bytes - done, filling.capacity - start)
            ctypes.memmove(address_of(filling.block) + start, region.address + done, count)
            if tensor_digest is not None:
                filling.digest_ranges.append((tensor_digest, start, start + count))
            filling.filled_stop += count
            done += count

    def put_zeros(self, start: int, stop: int) -> None:
        """Write zeros to the bytes [start, stop) of the file."""
        if start < stop:
            self.put_region(region_of(start, bytes(stop - start)))

    def await_digests(self) -> None:
        """Wait until the tensor digests have all bytes that were put so far."""
        digester = self.pool.other_digester
        if self.filling is not None:
            digester.submit(update_digests, self.filling.block, self.filling.digest_ranges)
            self.filling.digest_ranges = []
        drain(digester)

    def finish(self) -> str:
        """Write the remaining bytes and make the object durable.

        Returns the hexadecimal digest of all regions. Raises the first error of a write, and what
        `Writable.finish` raises.
        """
        self._submit_block()
        for job in self.write_jobs:
            job.result()
        self.stored = self.target.finish()
        return str(self.digest.hexdigest())

    def abandon(self) -> None:
        """Discard the object after an error. Raises nothing."""
        wait(self.write_jobs)
        if self.filling is not None:
            self.pool.free_blocks.put(self.filling.block)
        self.target.abandon()

    def _block_for(self, position: int) -> "_FillingBlock":
        """Return the block that takes the byte at `position` of the file next.

        It is the present block, unless that is full or the byte does not follow its last one.
        """
        if self.filling is not None:
            next_position = self.filling.file_start + self.filling.filled_stop
            is_full = self.filling.filled_stop == self.filling.capacity
            if is_full or position != next_position:
                self._submit_block()

        if self.filling is None:
            file_start = position - position % ALIGNMENT
            capacity = self.pool.tuning.block_bytes
            if file_start == 0:
                capacity = self.pool.first_block_bytes
            offset = position - file_start
            self.filling = _FillingBlock(
                self.pool.take_block(), file_start, capacity, offset, offset
            )

        return self.filling

    def _submit_block(self) -> None:
        """Have the filled bytes of the present block digested and written by other threads.

        Raises the error of an earlier write that failed.
        """
        filling, pool = self.filling, self.pool
        if filling is None:
            return
        start, stop = filling.filled_start, filling.filled_stop
        file_range = [(self.digest, start, stop)]
        digest_jobs = [pool.file_digester.submit(update_digests, filling.block, file_range)]
        other_ranges = filling.digest_ranges
        if self.sha256 is not None:
            other_ranges = [*other_ranges, (self.sha256, start, stop)]
        if other_ranges:
            digest_jobs.append(
                pool.other_digester.submit(update_digests, filling.block, other_ranges)
            )

        self.filling = None
        self._drop_done_jobs()
        self.write_jobs.append(pool.writers.submit(self._write_block, filling, digest_jobs))

    def _drop_done_jobs(self) -> None:
        """Drop the writes that are done. Raises the error of one that failed."""
        open_jobs = []
        for job in self.write_jobs:
            if job.done():
                job.result()
            else:
                open_jobs.append(job)
        self.write_jobs = open_jobs

    def _write_block(self, filled: "_FillingBlock", digest_jobs: list[Future[None]]) -> None:
        """Write the filled bytes of a block, and free the block once they are digested, too."""
        start, stop = filled.filled_start, filled.filled_stop
        try:
            with memoryview(filled.block) as view, view[start:stop] as content:
                self.target.write(filled.file_start + start, content)
            self.pool.advance(stop - start)
        finally:
            # The digests read the block, so it must not be filled again before they are done.
            wait(digest_jobs)
            self.pool.free_blocks.put(filled.block)


@dataclass
class _FillingBlock:
    """Block of memory that is being filled with bytes of the file.

    A block begins at an aligned offset of the file. For example, regions from byte 5000 on go into
    a block of file_start 4096, whose filled bytes begin at 904:

        block   0        904                  filled_stop   capacity
                |--------|#####################|-------------|
        file    4096     5000

    Attributes:
        block: the memory.
        file_start: offset in the file of byte 0 of the block, a multiple of ALIGNMENT.
        capacity: number of bytes of the block that are used.
        filled_start, filled_stop: the filled bytes are [filled_start, filled_stop) of the block.
        digest_ranges: running digests of tensors, each with its bytes [start, stop) of the block.
    """

    block: Block
    file_start: int
    capacity: int
    filled_start: int
    filled_stop: int
    digest_ranges: list[tuple[Any, int, int]] = field(default_factory=list)


def update_digests(block: Block, ranges: Iterable[tuple[Any, int, int]]) -> None:
    """Update each digest of `ranges` with its bytes [start, stop) of `block`."""
    with memoryview(block) as view:
        for digest, start, stop in ranges:
            digest.update(view[start:stop])


def drain(executor: Executor) -> None:
    """Wait until all calls that were submitted to an executor of one thread are done."""
    executor.submit(int).result()  # The thread runs calls in order, so this one is the last.


class CallingThread(Executor):
    """Runs each call at once, in the calling thread."""

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        done: Future[T] = Future()
        try:
            done.set_result(call(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised by `result`
            done.set_exception(error)
        return done
