"""Blocks of memory that files are read into, aligned to pages for direct I/O."""

import ctypes
import mmap
from contextlib import suppress
from typing import TypeAlias, TypeVar

BLOCK_BYTES = 8 << 20
ALIGNMENT = 4096  # of addresses, offsets and lengths for O_DIRECT, on any common disk

Block: TypeAlias = mmap.mmap
Memory: TypeAlias = mmap.mmap | memoryview
OwnBlock = TypeVar("OwnBlock", bound=mmap.mmap)


class BlockKeeper:
    """Allocates the blocks that are read into, and tracks their use.

    This class reuses a block as soon as it was passed on.
    """

    def make_block(self, size_bytes: int) -> Memory:
        """Allocate memory, preferably page-aligned."""
        return new_block(size_bytes)

    def leave_block(self, block: Memory) -> None:
        """Note that the bytes of a block were passed on, and may still be copied from it."""

    def await_block(self, block: Memory) -> None:
        """Wait until all copies from it are done; it is filled again, or freed. In any thread."""


def new_block(size_bytes: int = BLOCK_BYTES) -> Block:
    """Allocate memory that is aligned to a page."""
    return new_block_of(mmap.mmap, size_bytes)


def new_block_of(kind: type[OwnBlock], size_bytes: int) -> OwnBlock:
    """Allocate a block as `new_block` does, as an object of class `kind`."""
    block = kind(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # huge pages, if available, reduce the cost of the first touch to a fifth
    with suppress(OSError, AttributeError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def address_of(block: Memory) -> int:
    """Return the address of the first byte of `block`, which must not be read-only."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Return the writable memory at an address."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def aligned_size(size_bytes: int) -> int:
    """Round `size_bytes` up to a multiple of ALIGNMENT."""
    return size_bytes + -size_bytes % ALIGNMENT
