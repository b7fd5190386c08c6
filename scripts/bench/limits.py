"""The limits of the machine: a copy of the tensors in memory, reads and writes past the cache."""

import mmap
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

BLOCK_BYTES = 4 << 20
THREADS = 4  # these two give a disk's best rate, or nearly
WRITE, READ, COPY = "limit: O_DIRECT write", "limit: O_DIRECT read", "limit: memory copy"
READ_AND_KEEP = "limit: O_DIRECT read, kept"


def write(path: Path, size_bytes: int) -> None:
    """Write a new file of about `size_bytes` and sync it."""
    file = os.open(path, os.O_DIRECT | os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.posix_fallocate(file, 0, size_bytes)
    _each_block(size_bytes, lambda block, offset: os.pwrite(file, block, offset))
    os.fsync(file)
    os.close(file)


def read(path: Path) -> None:
    """Read a file into blocks that are used again."""
    file = os.open(path, os.O_DIRECT | os.O_RDONLY)
    _each_block(path.stat().st_size, lambda block, offset: os.preadv(file, [block], offset))
    os.close(file)


def read_and_keep(path: Path) -> mmap.mmap:
    """Read a file into new memory, as a load must; the system maps its pages meanwhile."""
    size_bytes = path.stat().st_size
    memory = _new_block(size_bytes + -size_bytes % BLOCK_BYTES)
    file = os.open(path, os.O_DIRECT | os.O_RDONLY)

    def read_block(offset: int) -> None:
        with memoryview(memory)[offset : offset + BLOCK_BYTES] as part:
            os.preadv(file, [part], offset)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(read_block, range(0, size_bytes, BLOCK_BYTES)))
    os.close(file)
    return memory


def make_copy(state: Mapping[str, Tensor]) -> Callable[[], None]:
    """Return a function that copies all tensors into existing host memory, pinned for a GPU."""
    pinned = any(not tensor.is_cpu for tensor in state.values())
    copies = {}
    for name, tensor in state.items():
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        copies[name] = memory.fill_(0)

    def copy() -> None:
        for name, tensor in state.items():
            copies[name].copy_(tensor.detach(), non_blocking=pinned)

    return copy


def _each_block(size_bytes: int, move: Callable[[mmap.mmap, int], int]) -> None:
    """Call `move` with a block of memory for each offset of a file, in threads."""
    blocks = _blocks()

    def move_block(offset: int) -> None:
        block = blocks.get()
        move(block, offset)
        blocks.put(block)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(move_block, range(0, size_bytes, BLOCK_BYTES)))


@lru_cache
def _blocks() -> "SimpleQueue[mmap.mmap]":
    """Return one block for each thread, of large pages that are mapped already.

    With small pages a transfer takes twice as long.
    """
    blocks: SimpleQueue[mmap.mmap] = SimpleQueue()
    for _ in range(THREADS):
        block = _new_block(BLOCK_BYTES)
        block.write(b"\1" * BLOCK_BYTES)
        blocks.put(block)
    return blocks


def _new_block(size_bytes: int) -> mmap.mmap:
    block = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
