"""Writes memory regions into new objects: one thread copies, several write, two digest.

Up to 32 MiB on a local disk are written by the calling thread, because starting others takes
longer.

Bytes are copied into aligned blocks, from which a local store writes past the page cache (O_DIRECT)
if the file system supports it: on most disks several times the rate of buffered writing followed by
fsync. Because of the copy, the memory may be reused as soon as `put_region` returns. The regions of
a whole file are contiguous from byte 0 on; of a file that several ranks write, each rank puts its
own regions.
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


@dataclass(frozen=True)
class WriteTuning:
    """One way to write: `threads` writers of blocks of `block_bytes`."""

    threads: int = 4
    block_bytes: int = BLOCK_BYTES
    # files from this size on go past the page cache; None: none does
    direct_bytes: int | None = BLOCK_BYTES
    sha256: bool = False  # also compute the SHA-256 of each file


def tuning_for(
    threads: int | None = None,
    direct: str = "auto",
    block_bytes: int = BLOCK_BYTES,
    sha256: bool = False,
) -> WriteTuning:
    """The tuning for these settings: None and "auto" are the defaults.

    "on" writes small files past the cache, too.
    """
    default = WriteTuning()
    least = {"auto": default.direct_bytes, "on": 0, "off": None}[direct]
    return WriteTuning(threads or default.threads, block_bytes, least, sha256)


T = TypeVar("T")
_FEW_BYTES, _SMALL_BLOCK_BYTES = 32 << 20, 2 << 20
_FIRST_BLOCK_BYTES = 1 << 20  # of a local file: the disk is busy while longer blocks are filled


@dataclass(frozen=True)
class Region:
    """The next bytes of a file: `address` on the host, valid until the next region is requested."""

    start: int  # in the file, ascending
    address: int
    size_bytes: int
    keeper: Any = None  # the owner of the memory


def region_of(start: int, data: bytes) -> Region:
    """The region of `data` from byte `start` on."""
    buffer = ctypes.create_string_buffer(data, max(len(data), 1))
    return Region(start, ctypes.addressof(buffer), len(data), buffer)


def digest_regions(regions: Iterable[Region]) -> str:
    """The digest, hexadecimal, of the file that writing `regions` would create."""
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


class Writer:
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
        if local_bytes is not None and local_bytes <= _FEW_BYTES:
            # small blocks, because touching new memory takes longer than writing it
            self.tuning = replace(
                self.tuning, block_bytes=min(self.tuning.block_bytes, _SMALL_BLOCK_BYTES)
            )
            self.pool = self.file_hasher = self.tensor_hasher = CallingThread()
        else:
            self.pool = ThreadPoolExecutor(self.tuning.threads, "ft_ckpt-write")
            # One thread for each kind of digest, since a digest takes its bytes in order.
            self.file_hasher = ThreadPoolExecutor(1, "ft_ckpt-hash")
            self.tensor_hasher = ThreadPoolExecutor(1, "ft_ckpt-hash-tensors")
        self.first_block_bytes = self.tuning.block_bytes
        if local_bytes is not None:
            self.first_block_bytes = min(self.tuning.block_bytes, _FIRST_BLOCK_BYTES)
        self.free: SimpleQueue[Block] = SimpleQueue()
        self.blocks: list[Block] = []
        # one is being filled, one is queued, the others are being written
        self.most_blocks = self.tuning.threads + 2

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self.pool, self.file_hasher, self.tensor_hasher):
            pool.shutdown(wait=True)
        for block in self.blocks:
            with suppress(BufferError):  # an exception's traceback still has a view; freed with it
                block.close()

    def take_block(self) -> Block:
        """An aligned block, new while there are few; waits until one is free."""
        if self.free.empty() and len(self.blocks) < self.most_blocks:
            self.blocks.append(new_block(self.tuning.block_bytes))
            return self.blocks[-1]
        return self.free.get()  # back-pressure

    @contextmanager
    def fill(self, goal: Writable) -> Iterator["DurableFile"]:
        """Yield `goal` to be filled by regions and finished.

        It is abandoned when the block raises.
        """
        file = DurableFile(self, goal, sha256=hashlib.sha256() if self.tuning.sha256 else None)
        try:
            yield file
        except BaseException:
            file.abandon()
            raise


@dataclass
class DurableFile:
    """A new object that regions fill in the order of the file, durable after `finish`."""

    writer: Writer
    goal: Writable
    digest: Any = field(default_factory=xxhash.xxh3_128)
    # its state, if the tuning asks for it; the file's when all of it is written here
    sha256: Any = None
    jobs: list[Future[None]] = field(default_factory=list)
    block: Block | None = None  # being filled
    limit: int = 0  # bytes that are collected in it
    base: int = 0  # where in the file it begins, aligned
    low: int = 0  # its first and last filled byte
    high: int = 0
    # of tensors in it: digest, start, end
    parts: list[tuple[Any, int, int]] = field(default_factory=list)
    stored: Stored | None = None  # once it is finished

    def put_region(self, region: Region, tensor: Any = None) -> None:
        """Copy a region, which may change as soon as this returns.

        `tensor` is another digest to update with it.
        """
        done = 0
        while done < region.size_bytes:
            block = self._block_at(region.start + done)
            count = min(region.size_bytes - done, self.limit - self.high)
            ctypes.memmove(address_of(block) + self.high, region.address + done, count)
            if tensor is not None:
                self.parts.append((tensor, self.high, self.high + count))
            self.high += count
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
        """Abandon the object after an error; raises nothing."""
        wait(self.jobs)
        if self.block is not None:
            self.writer.free.put(self.block)
        self.goal.abandon()

    def _block_at(self, start: int) -> Block:
        """The block with room for byte `start`."""
        if start != self.base + self.high or self.high == self.limit:
            self._dispatch_block()
        if self.block is None:
            self.block = self.writer.take_block()
            self.base = start - start % ALIGNMENT
            self.limit = self.writer.tuning.block_bytes
            if self.base == 0:
                self.limit = self.writer.first_block_bytes
            self.low = self.high = start - self.base
        return self.block

    def _dispatch_block(self) -> None:
        if self.block is None:
            return
        block, writer = self.block, self.writer
        file_part = (self.digest, self.low, self.high)
        hashed = [writer.file_hasher.submit(update_digests, block, [file_part])]
        other_parts = self.parts
        if self.sha256 is not None:
            other_parts = [*other_parts, (self.sha256, self.low, self.high)]
        if other_parts:
            hashed.append(writer.tensor_hasher.submit(update_digests, block, other_parts))
        self.block, self.parts = None, []
        # raises a writer's error
        self.jobs = [job for job in self.jobs if not job.done() or job.result() is not None]
        flush = writer.pool.submit(self._flush_block, block, self.base, self.low, self.high, hashed)
        self.jobs.append(flush)

    def _flush_block(
        self, block: Block, base: int, low: int, high: int, hashed: list[Future[None]]
    ) -> None:
        try:
            with memoryview(block) as view, view[low:high] as filled:
                self.goal.write(base + low, filled)
            self.writer.advance(high - low)
        finally:
            wait(hashed)  # all are done with the block before it is filled again
            self.writer.free.put(block)


def update_digests(block: Block, parts: Iterable[tuple[Any, int, int]]) -> None:
    """Update digests with bytes of `block`; `parts` are (digest, start, end)."""
    with memoryview(block) as view:
        for digest, start, end in parts:
            digest.update(view[start:end])
