"""Reads ranges of open objects ahead of their use into aligned blocks of memory.

On most disks, reading past the page cache (O_DIRECT) has twice the rate of reading through it, and
needs a tenth of the CPU time. Bytes in the page cache are taken from there.
"""

import ctypes
import errno
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeAlias, TypeVar

from ft_ckpt.errors import CorruptError
from ft_ckpt.storage.libc import cached_bytes
from ft_ckpt.storage.local_file import LocalFile, MappedBytes
from ft_ckpt.storage.progress import note_read
from ft_ckpt.storage.store import Readable

BLOCK_BYTES = 8 << 20
ALIGNMENT = 4096  # of addresses, offsets and lengths for O_DIRECT, on any common disk

Block: TypeAlias = mmap.mmap
Memory: TypeAlias = mmap.mmap | memoryview
OwnBlock = TypeVar("OwnBlock", bound=mmap.mmap)
_GROUPS, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_SECOND = ("memory.max", "memory.current", "inactive_file")  # limit, usage, reclaimable cache
# in version 1 of control groups
_FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class BlockKeeper:
    """Allocates the blocks that are read into, and tracks their use; here they are free once they
    were passed on.
    """

    def make_block(self, size_bytes: int) -> Memory:
        """New memory, preferably page-aligned."""
        return new_block(size_bytes)

    def leave_block(self, block: Memory) -> None:
        """Its bytes have been passed on, and may still be copied from it."""

    def await_block(self, block: Memory) -> None:
        """Wait until all copies from it are done; it is filled again, or freed. In any thread."""


def new_block(size_bytes: int = BLOCK_BYTES) -> Block:
    """New memory, aligned to a page."""
    return new_block_of(mmap.mmap, size_bytes)


def new_block_of(kind: type[OwnBlock], size_bytes: int) -> OwnBlock:
    """Like `new_block`, as an object of class `kind`."""
    block = kind(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # huge pages, if available, reduce the cost of the first touch to a fifth
    with suppress(OSError, AttributeError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def address_of(block: Memory) -> int:
    """The address of the first byte of `block`, which must not be read-only."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


# Available memory


def available_bytes() -> int:
    """Memory that can be allocated without swapping or exceeding a limit, in bytes; 0 if
    unknown.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        known = next(
            int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
    return max(0, min([known, *group_bytes(_GROUPS, _MOUNTED)]))


def group_bytes(groups: Path, mounted: Path) -> Iterator[int]:
    """Free bytes of each control group that has a memory limit: those in `groups` and their
    parents.

    `groups` is a file like /proc/self/cgroup, `mounted` a folder like /sys/fs/cgroup. Groups that
    cannot be read are left out.
    """
    for folder, names in _memory_groups(groups, mounted):
        limit, taken, cached = names
        # no limit; or no such group: in a container the path may be the host's
        with suppress(OSError, ValueError):
            most, used = (
                int((folder / name).read_text(encoding="ascii")) for name in (limit, taken)
            )
            lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            yield most - used + int(dict(line.split(maxsplit=1) for line in lines).get(cached, 0))


def _memory_groups(groups: Path, mounted: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The folders of control groups that count memory, inner ones first, and the names of their
    files.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = groups.read_text(encoding="utf-8").splitlines()
    for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not kinds or "memory" in kinds.split(","):
            root, names = (mounted / "memory", _FIRST) if kinds else (mounted, _SECOND)
            inner = root / path.strip("/")
            yield from (
                (folder, names) for folder in (inner, *inner.parents) if folder.is_relative_to(root)
            )


_LEAST_DIRECT_BYTES = 256 << 10  # smaller reads profit more from the kernel's read-ahead
_GAP_BYTES = 64 << 10  # smaller gaps between two ranges are read too, to save a request
_WHOLE_STEP_BYTES = 32 << 20  # for each step a thread may wait 5 ms for the GIL
LEAST_WHOLE_BYTES = 16 << 20  # smaller files are always mapped
# of a file, looked up in the page cache: a lookup of 2.5 GB takes 20 ms
_SAMPLES, _SAMPLE_BYTES = 64, 256 << 10
_FAR_BLOCK_BYTES = 16 << 20  # for remote objects: requests are billed
_FAR_READS = 6  # parallel requests for remote objects: most of each is latency


@dataclass(frozen=True, eq=False)
class ByteRun:
    """Bytes [start, start + size_bytes) of an open object; `name` is the caller's."""

    name: str
    file: Readable
    start: int
    size_bytes: int


@dataclass(frozen=True, eq=False)
class ReadPart:
    """The next bytes of a run; in memory until the next part is requested."""

    run: ByteRun
    start: int  # in the file
    address: int
    size_bytes: int
    block: Memory

    @property
    def content(self) -> memoryview:
        """The bytes, in writable memory."""
        return memoryview((ctypes.c_char * self.size_bytes).from_address(self.address)).cast("B")


@dataclass(eq=False)
class _BlockRead:
    """One read into a block: bytes [start, end) of a file, and the runs in it, each with its start
    and end.
    """

    file: Readable
    start: int  # aligned
    end: int
    runs: list[tuple[ByteRun, int, int]] = field(default_factory=list)

    def can_take(self, run: ByteRun, at: int, block_bytes: int) -> bool:
        """Whether byte `at` of the run's file is best read together with this block."""
        limit = min(self.end + _GAP_BYTES + 1, self.start + block_bytes)
        return run.file is self.file and self.end <= at < limit


def read_ahead(
    runs: Iterable[ByteRun],
    threads: int = 2,
    direct: str = "auto",
    block_bytes: int | None = None,
    keeper: BlockKeeper | None = None,
) -> Iterator[ReadPart]:
    """Yield the bytes of all `runs`, in order; while one part is in use, `threads` threads read the
    following ones.

    If the first run is remote, there are at least six threads. At most `threads` + 2 blocks of
    `block_bytes` (a multiple of ALIGNMENT; None: 8 MiB, 16 for remote objects) are in use.
    `direct`: "auto" reads past the page cache unless a read is small or cached, "on" always, "off"
    never; file systems that do not support it use the page cache. `keeper` allocates the blocks,
    and keeps them while their bytes are copied. Raises CorruptError when a file is too short,
    cannot be read, or has changed since it was opened.
    """
    keeper = keeper or BlockKeeper()
    runs = iter(runs)
    begin = next(runs, None)
    if begin is None:
        return
    threads, block_bytes = (
        _reads_at_once(begin.file, threads),
        block_bytes or _block_size(begin.file),
    )
    jobs, coming = (
        _block_reads(chain([begin], runs), block_bytes),
        deque[tuple[_BlockRead, Memory, Future[None]]](),
    )
    free = deque(keeper.make_block(block_bytes) for _ in range(threads + 2))
    doors: dict[int, int | None] = {}
    with ExitStack() as stack, ThreadPoolExecutor(threads, "ft_ckpt-read") as pool:
        for block in free:
            stack.callback(keeper.await_block, block)
        while True:
            while free and (job := next(jobs, None)) is not None:
                if id(job.file) not in doors:
                    doors[id(job.file)] = None if direct == "off" else _open_direct(job.file, stack)
                door = doors[id(job.file)]
                if direct == "auto" and door is not None and not _is_worth(job):
                    door = None
                block = free.popleft()  # the one that was released first
                coming.append((job, block, pool.submit(_fill_block, keeper, job, block, door)))
            if not coming:
                return
            job, block, reading = coming.popleft()
            reading.result()
            note_read(job.end - job.start)
            for run, start, end in job.runs:
                yield ReadPart(
                    run, start, address_of(block) + start - job.start, end - start, block
                )
            keeper.leave_block(block)
            free.append(block)


def is_in_page_cache(run: ByteRun) -> bool:
    """Whether a large run of a local file is in the page cache as a whole: `read_in_place` is then
    faster than `read_ahead`, which copies twice.
    """
    if not isinstance(run.file, LocalFile) or run.size_bytes < _LEAST_DIRECT_BYTES:
        return False
    return is_cached(run.file.descriptor, run.start, run.size_bytes)


def read_in_place(targets: Mapping[ByteRun, int], threads: int = 4) -> None:
    """Read each run through the page cache to its address in memory, in `threads` threads.

    Raises CorruptError when a file is too short, cannot be read, or has changed since it was
    opened.
    """
    with ThreadPoolExecutor(threads, "ft_ckpt-read") as pool:
        reads: dict[Future[None], int] = {}
        for run, address in targets.items():
            memory = memoryview((ctypes.c_char * run.size_bytes).from_address(address)).cast("B")
            for offset in range(0, run.size_bytes, BLOCK_BYTES):
                step = memory[offset : offset + BLOCK_BYTES]
                start = run.start + offset
                job = _BlockRead(run.file, start, start + len(step))
                reads[pool.submit(_read_block, job, step, None)] = len(step)
        try:
            for read, size_bytes in reads.items():
                read.result()
                note_read(size_bytes)
        finally:
            for read in reads:
                read.cancel()  # the first error is enough


def read_into(
    memory: memoryview,
    file: Readable,
    size_bytes: int,
    threads: int = 4,
    direct: str = "auto",
    step: int = BLOCK_BYTES,
) -> None:
    """Read the first `size_bytes` of a file into `memory`, which is aligned, with its size rounded
    up to ALIGNMENT.

    `direct` and errors as for `read_ahead`.
    """
    with ExitStack() as stack:
        door = None if direct == "off" else _open_direct(file, stack)
        pool = stack.enter_context(
            ThreadPoolExecutor(_reads_at_once(file, threads), "ft_ckpt-read")
        )
        reads = []
        for start in range(0, size_bytes, step):
            job = _BlockRead(file, start, min(start + step, size_bytes))
            past = door if direct == "on" or _is_worth(job) else None
            reads.append(pool.submit(_read_block, job, memory[start : start + step], past))
        stack.callback(lambda: [read.cancel() for read in reads])  # the first error is enough
        for start, read in zip(range(0, size_bytes, step), reads, strict=True):
            read.result()
            note_read(min(step, size_bytes - start))


def _block_size(file: Readable) -> int:
    return BLOCK_BYTES if file.can_map else _FAR_BLOCK_BYTES


def _reads_at_once(file: Readable, threads: int) -> int:
    return threads if file.can_map else max(threads, _FAR_READS)


def is_cached(descriptor: int, start: int, size_bytes: int) -> bool:
    """True when this whole range of a file is in the page cache; False also if unknown."""
    page = mmap.PAGESIZE
    found = cached_bytes(descriptor, start, size_bytes)
    return (
        found is not None and found // page >= (start + size_bytes - 1) // page - start // page + 1
    )


def _block_reads(runs: Iterable[ByteRun], block_bytes: int) -> Iterator[_BlockRead]:
    """Split the runs into reads that fit into a block; neighbours share one."""
    job = None
    for run in runs:
        at, end = run.start, run.start + run.size_bytes
        while at < end:
            if job is None or not job.can_take(run, at, block_bytes):
                if job is not None:
                    yield job
                job = _BlockRead(run.file, at - at % ALIGNMENT, at)
            job.end = min(end, job.start + block_bytes)
            job.runs.append((run, at, job.end))
            at = job.end
    if job is not None:
        yield job


def _is_worth(job: _BlockRead) -> bool:
    size_bytes, file = job.end - job.start, job.file
    if not isinstance(file, LocalFile) or size_bytes < _LEAST_DIRECT_BYTES:
        return False
    return not is_cached(file.descriptor, job.start, size_bytes)


def _open_direct(file: Readable, stack: ExitStack) -> int | None:
    """A second descriptor of the open file, with O_DIRECT; None if that is refused, or the file is
    not local.
    """
    if not isinstance(file, LocalFile):
        return None
    # by its descriptor: its path may be another file by now
    with suppress(OSError, AttributeError):
        door = os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        stack.callback(os.close, door)
        return door
    return None


def _fill_block(keeper: BlockKeeper, job: _BlockRead, block: Memory, door: int | None) -> None:
    keeper.await_block(block)
    _read_block(job, block, door)


def _read_block(job: _BlockRead, block: Memory, door: int | None) -> None:
    with memoryview(block) as view:
        if isinstance(job.file, LocalFile):
            _read_local(job.file, job, view, door)
            return
        with view[: job.end - job.start] as wanted:
            job.file.read_into(wanted, job.start)


def _read_local(file: LocalFile, job: _BlockRead, view: memoryview, door: int | None) -> None:
    wanted, done = job.end - job.start, 0
    while done < wanted:
        try:
            end = wanted if door is None else wanted + -wanted % ALIGNMENT
            with view[done:end] as rest:
                count = os.preadv(
                    file.descriptor if door is None else door, [rest], job.start + done
                )
        except OSError as error:
            if error.errno != errno.EINVAL or door is None:
                raise file.refused(f"at byte {job.start + done}", error) from error
            door = None  # some file systems refuse only here, all of them after an unaligned count
            continue
        if not count:
            break
        done += count
    file.check()  # after reading, so that a concurrent write is detected
    if done < wanted:
        raise CorruptError(
            f"{file.path.name}: ends at byte {job.start + done}, bytes up to {job.end} asked for; "
            "it is truncated, or its index is damaged"
        )


# Whole files


def read_whole(file: Readable, threads: int = 4, direct: str = "auto") -> MappedBytes | None:
    """All of an open object in private memory, at the rate of the disk or network; None without
    enough memory.

    Raises CorruptError when the object changes meanwhile.
    """
    own = (
        MappedBytes.create(-1, file.size_bytes + -file.size_bytes % ALIGNMENT)
        if file.size_bytes
        else None
    )
    if own is not None:
        step = _WHOLE_STEP_BYTES if file.can_map else _FAR_BLOCK_BYTES
        read_into(own.memory, file, file.size_bytes, threads, direct, step)
    return own


def is_cold(file: Readable) -> bool:
    """True when `read_whole` is faster than touching the mapped file: large, and less than half of
    it in memory.

    False also if unknown, or without twice the memory for it.
    """
    if not isinstance(file, LocalFile) or file.size_bytes < LEAST_WHOLE_BYTES:
        return False
    if 2 * file.size_bytes > available_bytes():
        return False
    starts = range(0, file.size_bytes, -(-file.size_bytes // _SAMPLES))
    found = [cached_bytes(file.descriptor, start, _SAMPLE_BYTES) for start in starts]
    known = [count for count in found if count is not None]
    return len(known) == len(starts) and 2 * sum(known) < len(starts) * _SAMPLE_BYTES
