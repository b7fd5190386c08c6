"""An open object with a cache, for readers that take many small ranges of it."""

from dataclasses import dataclass, field
from threading import Lock

from ft_ckpt.storage.store import Readable, read_range

# the latency of a request equals the transfer of about 1 MB
_BLOCK_BYTES, _MAX_BLOCKS = 256 << 10, 16


@dataclass(eq=False)
class CachedObject:
    """The open object `inner` with an LRU cache of blocks.

    Ranges larger than a block are not cached.
    """

    inner: Readable
    can_map = False
    _blocks: dict[int, bytes] = field(default_factory=dict)  # by number, least recently used first
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.name = self.inner.name
        self.size_bytes = self.inner.size_bytes
        self.version = self.inner.version

    @property
    def where(self) -> str:
        return self.inner.where

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        end = start + len(memory)
        if len(memory) > _BLOCK_BYTES or end > self.size_bytes:
            self.inner.read_into(memory, start)
            return
        for number in range(start // _BLOCK_BYTES, -(-end // _BLOCK_BYTES)):
            block_start = number * _BLOCK_BYTES
            low, high = max(start, block_start), min(end, block_start + _BLOCK_BYTES)
            block = self._block(number)
            memory[low - start : high - start] = block[low - block_start : high - block_start]

    def map(self) -> None:
        return

    def check(self) -> None:
        self.inner.check()

    def close(self) -> None:
        self._blocks.clear()
        self.inner.close()

    def _block(self, number: int) -> bytes:
        with self._lock:
            block = self._blocks.pop(number, None)
        if block is None:
            block = read_range(self.inner, number * _BLOCK_BYTES, _BLOCK_BYTES)
        with self._lock:
            self._blocks[number] = block
            if len(self._blocks) > _MAX_BLOCKS:
                least_recent = next(iter(self._blocks))
                del self._blocks[least_recent]
        return block
