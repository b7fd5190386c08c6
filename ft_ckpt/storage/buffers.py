"""Aligned blocks of memory, and how much memory there is: of the machine, and of the control groups of a container."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

BLOCK_BYTES = 8 << 20
ALIGNMENT = 4096  # what O_DIRECT asks of addresses, offsets and lengths on any disk in use

Block: TypeAlias = mmap.mmap
Memory: TypeAlias = mmap.mmap | memoryview
OwnBlock = TypeVar("OwnBlock", bound=mmap.mmap)
_GROUPS, _MOUNTED = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_SECOND = ("memory.max", "memory.current", "inactive_file")  # limit, what is taken, of that what is cached and can go
_FIRST = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")  # in version 1 of control groups


class BlockKeeper(Protocol):
    """Makes the blocks that are read into, and knows how long their bytes are needed."""

    def make_block(self, size_bytes: int) -> Memory:
        """New memory, best aligned to a page."""
        ...

    def leave_block(self, block: Memory) -> None:
        """Its bytes have been handed on, and may still be copied from it."""
        ...

    def await_block(self, block: Memory) -> None:
        """Wait until nobody copies from it; it is filled anew, or given back. In any thread."""
        ...


class PlainBlocks:
    """Blocks whose bytes are used at once."""

    def make_block(self, size_bytes: int) -> Memory:
        """New memory."""
        return new_block(size_bytes)

    def leave_block(self, block: Memory) -> None:
        """Nothing is left to do with them."""

    def await_block(self, block: Memory) -> None:
        """Nobody copies from it."""


def new_block(size_bytes: int = BLOCK_BYTES) -> Block:
    """New memory, aligned to a page."""
    return new_block_of(mmap.mmap, size_bytes)


def new_block_of(kind: type[OwnBlock], size_bytes: int) -> OwnBlock:
    """The same, as an object of that `kind`."""
    block = kind(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # large pages, where there are any: first touch costs a fifth with them
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def address_of(block: Memory) -> int:
    """The address of the first byte of `block`, which must not be read-only."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


# How much there is


def available_bytes() -> int:
    """Memory that can be had without paging anything out, or being ended for it; 0 where that is not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        known = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
    return max(0, min([known, *group_bytes(_GROUPS, _MOUNTED)]))


def group_bytes(groups: Path, mounted: Path) -> Iterator[int]:
    """What each control group has left that sets a limit: those that `groups` lists, and those that they are in.

    `groups` is a file as /proc/self/cgroup, `mounted` a folder as /sys/fs/cgroup. What cannot be read sets none.
    """
    for folder, names in _memory_groups(groups, mounted):
        with suppress(OSError, ValueError):  # in a container the path may be one outside of it
            yield _left_in(folder, *names)


def _memory_groups(groups: Path, mounted: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The folders of control groups that count memory, and the names of what is in them, the inner ones first."""
    lines: list[str] = []
    with suppress(OSError):
        lines = groups.read_text(encoding="utf-8").splitlines()
    for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not kinds or "memory" in kinds.split(","):
            root, names = (mounted / "memory", _FIRST) if kinds else (mounted, _SECOND)
            inner = root / path.strip("/")
            yield from ((folder, names) for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def _left_in(folder: Path, limit: str, taken: str, cached: str) -> int:
    """What a control group has left. Raises ValueError where it sets no limit, OSError where there is none."""
    most, used = (int((folder / name).read_text(encoding="ascii")) for name in (limit, taken))
    about = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
    return most - used + int(about.get(cached, 0))
