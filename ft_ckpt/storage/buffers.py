"""Aligned blocks of memory."""

import ctypes
import mmap
from contextlib import suppress
from typing import TypeAlias

BLOCK_BYTES = 8 << 20
ALIGNMENT = 4096  # what O_DIRECT asks of addresses, offsets and lengths on any disk in use

Block: TypeAlias = mmap.mmap


def new_block(size_bytes: int = BLOCK_BYTES) -> Block:
    """New memory, aligned to a page."""
    block = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # first touch costs a fifth with large pages, where there are any
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def address_of(block: Block | memoryview) -> int:
    """The address of the first byte of `block`, which must not be read-only."""
    return ctypes.addressof(ctypes.c_char.from_buffer(block))
