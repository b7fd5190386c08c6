"""Reads byte ranges of open files and objects in threads, before the caller needs them.

A run is a byte range that the caller asks for. Runs that are close together are read into one
aligned block of memory, by one read.

Large ranges of local files that are not in the page cache are read with direct I/O (O_DIRECT,
bypassing the page cache). On most disks, that has twice the rate of reading through the page cache,
and needs a tenth of the CPU time.
"""

import errno
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import chain

from ft_ckpt.errors import CorruptError
from ft_ckpt.progress_bars import note_read
from ft_ckpt.storage.io.blocks import (
    ALIGNMENT,
    BLOCK_BYTES,
    BlockAllocator,
    Memory,
    address_of,
    aligned_size,
    memory_at,
)
from ft_ckpt.storage.io.local_file import LocalFile
from ft_ckpt.storage.libc import cached_bytes
from ft_ckpt.storage.store import Readable

# Smaller reads profit more from the kernel's read-ahead.
_MIN_DIRECT_BYTES = 256 << 10
# If the gap between two runs is at most this long, it is read, too, which saves a request.
_GAP_BYTES = 64 << 10
# Requests to a bucket are billed, so they are large.
_REMOTE_BLOCK_BYTES = 16 << 20
# Most of the time of a request is latency, so several run in parallel.
_MIN_REMOTE_READS = 6


@dataclass(frozen=True, eq=False)
class ByteRun:
    """Bytes [start, start + size_bytes) of an open object; the caller chooses `name`."""

    name: str
    file: Readable
    start: int
    size_bytes: int


@dataclass(frozen=True, eq=False)
class ReadPart:
    """Next bytes of a run, which stay in memory until the next part is requested.

    Attributes:
        run: the run that the bytes belong to.
        start: offset in the file of the first byte.
        address: address of the first byte in memory.
        size_bytes: number of bytes.
        block: the memory that the bytes are in.
    """

    run: ByteRun
    start: int
    address: int
    size_bytes: int
    block: Memory

    @property
    def content(self) -> memoryview:
        """Bytes as writable memory."""
        return memory_at(self.address, self.size_bytes)


@dataclass(eq=False)
class BlockRead:
    """One read of bytes [start, end) of a file into a block.

    `start` is aligned for direct I/O. `runs` are the runs that have bytes in this range, each with
    the bytes [start, end) of the file that are its own.
    """

    file: Readable
    start: int
    end: int
    runs: list[tuple[ByteRun, int, int]] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return self.end - self.start

    def can_take(self, run: ByteRun, position: int, block_bytes: int) -> bool:
        """Check whether the read can be extended to the byte at `position` of the run's file.

        The byte must lie in the same block, and close to the end of the read.
        """
        limit = min(self.end + _GAP_BYTES + 1, self.start + block_bytes)
        return run.file is self.file and self.end <= position < limit

    def parts_in(self, block: Memory) -> Iterator[ReadPart]:
        """Yield the bytes of each run, after `block` was read."""
        address = address_of(block)
        for run, start, end in self.runs:
            yield ReadPart(run, start, address + start - self.start, end - start, block)


def read_ahead(
    runs: Iterable[ByteRun],
    threads: int = 2,
    direct: str = "auto",
    block_bytes: int | None = None,
    allocator: BlockAllocator | None = None,
) -> Iterator[ReadPart]:
    """Yield the bytes of all `runs`, in order.

    While the caller uses one part, `threads` threads read the following ones. If the first run is
    remote, there are at least six threads. At most `threads` + 2 blocks are in memory.

    Args:
        runs: the byte ranges to read.
        threads: number of threads that read.
        direct: "auto" uses direct I/O for large reads that are not in the page cache, "on" for all
            reads, "off" for none. If the file system does not support it, the page cache is used.
        block_bytes: size of a block, a multiple of ALIGNMENT. None is 8 MiB, or 16 MiB if the first
            run is remote.
        allocator: allocates the blocks, and is waited for before a block is filled again.

    Raises CorruptError when a file is too short, cannot be read, or has changed since it was
    opened.
    """
    if allocator is None:
        allocator = BlockAllocator()
    runs = iter(runs)
    first_run = next(runs, None)
    if first_run is None:
        return
    threads = parallel_reads(first_run.file, threads)
    if block_bytes is None:
        block_bytes = block_size(first_run.file)
    reads = _block_reads(chain([first_run], runs), block_bytes)
    in_flight = deque[tuple[BlockRead, Memory, Future[None]]]()
    free_blocks = deque(allocator.make_block(block_bytes) for _ in range(threads + 2))
    with ExitStack() as stack, ThreadPoolExecutor(threads, "ft_ckpt-read") as pool:
        descriptors = _DirectDescriptors(direct, stack)
        for block in free_blocks:
            stack.callback(allocator.await_copies, block)
        while True:
            while free_blocks:
                read = next(reads, None)
                if read is None:
                    break
                block = free_blocks.popleft()  # its copies are the oldest ones
                future = pool.submit(
                    _fill_block, allocator, read, block, descriptors.for_read(read)
                )
                in_flight.append((read, block, future))

            if not in_flight:
                return
            read, block, future = in_flight.popleft()
            future.result()
            note_read(read.size_bytes)
            yield from read.parts_in(block)
            allocator.record_copies(block)
            free_blocks.append(block)


def is_in_page_cache(run: ByteRun) -> bool:
    """Check whether all bytes of a large run of a local file are in the page cache.

    If so, `read_in_place` is faster than `read_ahead`, after which the caller copies once more.
    Returns False for a small run.
    """
    if not isinstance(run.file, LocalFile) or run.size_bytes < _MIN_DIRECT_BYTES:
        return False
    return is_cached(run.file.descriptor, run.start, run.size_bytes)


def read_in_place(targets: Mapping[ByteRun, int], threads: int = 4) -> None:
    """Read each run to its address in memory, through the page cache, in `threads` threads.

    Raises CorruptError when a file is too short, cannot be read, or has changed since it was
    opened.
    """
    with ThreadPoolExecutor(threads, "ft_ckpt-read") as pool:
        reads: dict[Future[None], int] = {}
        for run, address in targets.items():
            memory = memory_at(address, run.size_bytes)
            for offset in range(0, run.size_bytes, BLOCK_BYTES):
                step = memory[offset : offset + BLOCK_BYTES]
                start = run.start + offset
                read = BlockRead(run.file, start, start + len(step))
                reads[pool.submit(_read_block, read, step, None)] = len(step)
        await_reads(reads)


def await_reads(reads: Mapping[Future[None], int]) -> None:
    """Wait for reads, each with its number of bytes, which progress bars show.

    After the first error the reads that have not begun are cancelled, and the error is raised.
    """
    try:
        for read, size_bytes in reads.items():
            read.result()
            note_read(size_bytes)
    finally:
        for read in reads:
            read.cancel()


def block_size(file: Readable) -> int:
    """Return the size in bytes of the blocks that `file` is read in."""
    return BLOCK_BYTES if file.can_map else _REMOTE_BLOCK_BYTES


def parallel_reads(file: Readable, threads: int) -> int:
    """Return how many reads of `file` run in parallel if the caller wants `threads`."""
    return threads if file.can_map else max(threads, _MIN_REMOTE_READS)


def is_cached(descriptor: int, start: int, size_bytes: int) -> bool:
    """Check whether this whole range of a file is known to be in the page cache."""
    cached = cached_bytes(descriptor, start, size_bytes)
    if cached is None:
        return False
    first_page = start // mmap.PAGESIZE
    last_page = (start + size_bytes - 1) // mmap.PAGESIZE
    return cached // mmap.PAGESIZE >= last_page - first_page + 1


def _block_reads(runs: Iterable[ByteRun], block_bytes: int) -> Iterator[BlockRead]:
    """Split and join the runs into reads that fit into a block each.

    For example, if blocks have 8 MiB, a run of 20 MiB becomes three reads. The last of them has
    4 MiB, and also reads the next run if that follows it in the file and fits.
    """
    read = None
    for run in runs:
        position = run.start
        end = run.start + run.size_bytes
        while position < end:
            if read is None or not read.can_take(run, position, block_bytes):
                if read is not None:
                    yield read
                read = BlockRead(run.file, position - position % ALIGNMENT, position)
            read.end = min(end, read.start + block_bytes)
            read.runs.append((run, position, read.end))
            position = read.end

    if read is not None:
        yield read


class _DirectDescriptors:
    """Opens a descriptor for direct I/O at the first read of each file. `stack` closes them."""

    def __init__(self, direct: str, stack: ExitStack) -> None:
        self._direct, self._stack = direct, stack
        self._by_file: dict[int, int | None] = {}

    def for_read(self, read: BlockRead) -> int | None:
        """Return the descriptor to read with, or None for a read through the page cache."""
        if self._direct == "off":
            return None
        key = id(read.file)
        if key not in self._by_file:
            self._by_file[key] = _open_direct(read.file, self._stack)
        descriptor = self._by_file[key]
        if self._direct == "auto" and descriptor is not None and not _pays_direct(read):
            return None
        return descriptor


def read_in_steps(
    file: Readable,
    memory: memoryview,
    size_bytes: int,
    *,
    threads: int = 4,
    direct: str = "auto",
    step: int = BLOCK_BYTES,
) -> None:
    """Read the first `size_bytes` of a file into `memory`, in parallel reads of `step` bytes.

    The memory must be aligned, and its size a multiple of ALIGNMENT. `direct` and the errors are
    those of `read_ahead`.
    """
    with ExitStack() as stack:
        descriptors = _DirectDescriptors(direct, stack)
        pool = stack.enter_context(
            ThreadPoolExecutor(parallel_reads(file, threads), "ft_ckpt-read")
        )
        reads: dict[Future[None], int] = {}
        for start in range(0, size_bytes, step):
            read = BlockRead(file, start, min(start + step, size_bytes))
            target = memory[start : start + step]
            future = pool.submit(_read_block, read, target, descriptors.for_read(read))
            reads[future] = read.size_bytes
        await_reads(reads)


def _pays_direct(read: BlockRead) -> bool:
    """Check whether direct I/O is faster than reading through the page cache.

    It is faster for a large read of a local file, unless all of its bytes are in the page cache.
    """
    file = read.file
    if not isinstance(file, LocalFile) or read.size_bytes < _MIN_DIRECT_BYTES:
        return False
    return not is_cached(file.descriptor, read.start, read.size_bytes)


def _open_direct(file: Readable, stack: ExitStack) -> int | None:
    """Open a local file again for direct I/O. Return None if that is impossible."""
    if not isinstance(file, LocalFile):
        return None
    # It is opened by its descriptor, because its path may lead to another file by now.
    path = f"/proc/self/fd/{file.descriptor}"
    with suppress(OSError, AttributeError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        stack.callback(os.close, descriptor)
        return descriptor
    return None


def _fill_block(
    allocator: BlockAllocator, read: BlockRead, block: Memory, direct: int | None
) -> None:
    allocator.await_copies(block)
    _read_block(read, block, direct)


def _read_block(read: BlockRead, block: Memory, direct: int | None) -> None:
    with memoryview(block) as view:
        if isinstance(read.file, LocalFile):
            _read_local(read.file, read, view, direct)
            return
        with view[: read.size_bytes] as target:
            read.file.read_into(target, read.start)


def _read_local(file: LocalFile, read: BlockRead, view: memoryview, direct: int | None) -> None:
    size_bytes = read.size_bytes
    done = 0
    while done < size_bytes:
        position = read.start + done
        try:
            if direct is None:
                with view[done:size_bytes] as target:
                    count = os.preadv(file.descriptor, [target], position)
            else:
                with view[done : aligned_size(size_bytes)] as target:
                    count = os.preadv(direct, [target], position)
        except OSError as error:
            if error.errno != errno.EINVAL or direct is None:
                raise file.refused(f"at byte {position}", error) from error
            # Some file systems refuse direct I/O only at a read. All of them refuse it after a read
            # that returned an unaligned number of bytes.
            direct = None
            continue

        if not count:
            break
        done += count

    # The check comes after the read, so that a concurrent write is detected.
    file.check()
    if done < size_bytes:
        raise CorruptError(
            f"{file.path.name}: ends at byte {read.start + done}, bytes up to {read.end} asked "
            "for; it is truncated, or its index is damaged"
        )
