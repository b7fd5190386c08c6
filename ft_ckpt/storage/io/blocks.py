"""Allocates the blocks of memory that files are read into and written from, aligned to pages."""

import ctypes
import mmap
from contextlib import suppress
from typing import TypeAlias, TypeVar

BLOCK_BYTES = 8 << 20
# On any common disk, O_DIRECT needs addresses, offsets and lengths that are multiples of this.
ALIGNMENT = 4096

Block: TypeAlias = mmap.mmap
Memory: TypeAlias = mmap.mmap | memoryview
OwnBlock = TypeVar("OwnBlock", bound=mmap.mmap)


class BlockAllocator:
    """Allocates the blocks of `read_ahead`, and says when a block may be filled again.

    With this class a block may be filled again as soon as its bytes were handed to the caller. A
    subclass can wait until copies from the block to a device are done.
    """

    def make_block(self, size_bytes: int) -> Memory:
        """Allocate memory, preferably page-aligned."""
        return new_block(size_bytes)

    def record_copies(self, block: Memory) -> None:
        """Record the copies that the caller has started from a block, and that may still run."""

    def await_copies(self, block: Memory) -> None:
        """Wait until all copies from a block are done.

        Called in any thread, before the block is filled again or freed.
        """


def new_block(size_bytes: int = BLOCK_BYTES) -> Block:
    """Allocate memory that is aligned to a page."""
    return new_block_of(mmap.mmap, size_bytes)


def new_block_of(kind: type[OwnBlock], size_bytes: int) -> OwnBlock:
    """Allocate a block as `new_block` does, as an object of class `kind`."""
    block = kind(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Huge pages, if available, reduce the cost of the first touch to a fifth.
    with suppress(OSError, AttributeError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def address_of(block: Memory) -> int:
    """Return the address of the first byte of `block`, which must not be read-only."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block))


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Return a writable view of memory from `address` on. The view does not keep it alive."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def aligned_size(size_bytes: int) -> int:
    """Round `size_bytes` up to a multiple of ALIGNMENT."""
    return size_bytes + -size_bytes % ALIGNMENT
