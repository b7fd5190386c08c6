"""Aligned blocks of memory."""

import ctypes
import mmap
from contextlib import suppress
from typing import Protocol, TypeAlias, TypeVar

BLOCK_BYTES = 8 << 20
ALIGNMENT = 4096  # what O_DIRECT asks of addresses, offsets and lengths on any disk in use

Block: TypeAlias = mmap.mmap
Memory: TypeAlias = mmap.mmap | memoryview
OwnBlock = TypeVar("OwnBlock", bound=mmap.mmap)


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
