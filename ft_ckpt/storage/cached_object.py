"""An open object whose small ranges are read in whole blocks, which are kept for a while: each asks its store once."""

from dataclasses import dataclass, field
from threading import Lock

from ft_ckpt.storage.local_file import Watch
from ft_ckpt.storage.store import Readable, read_range

_BLOCK_BYTES, _MOST_BLOCKS = 256 << 10, 16  # a request to a bucket takes as long as a megabyte


@dataclass(eq=False)
class CachedObject:
    """The open object `inner`; larger ranges than a block are read as they are asked for."""

    inner: Readable
    can_map = False
    _blocks: dict[int, bytes] = field(default_factory=dict)  # by number, those used last at the end
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.name, self.size_bytes, self.version = self.inner.name, self.inner.size_bytes, self.inner.version

    @property
    def where(self) -> str:
        """As people write it."""
        return self.inner.where

    @property
    def watch(self) -> Watch | None:
        """What is told of the bytes that are read."""
        watch: Watch | None = getattr(self.inner, "watch", None)
        return watch

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        """Fill `memory` from `start` on, see `Readable.read_into`."""
        end = start + len(memory)
        if len(memory) > _BLOCK_BYTES or end > self.size_bytes:
            self.inner.read_into(memory, start)
            return
        for number in range(start // _BLOCK_BYTES, -(-end // _BLOCK_BYTES)):
            first = number * _BLOCK_BYTES
            low, high = max(start, first), min(end, first + _BLOCK_BYTES)
            memory[low - start : high - start] = self._block(number)[low - first : high - first]

    def map(self) -> None:
        """None: what is kept are pieces."""
        return

    def check(self) -> None:
        """Raise CorruptError when the object has changed."""
        self.inner.check()

    def close(self) -> None:
        """Release the object."""
        self._blocks.clear()
        self.inner.close()

    def _block(self, number: int) -> bytes:
        with self._lock:
            found = self._blocks.pop(number, None)
        if found is None:
            found = read_range(self.inner, number * _BLOCK_BYTES, _BLOCK_BYTES)
        with self._lock:
            self._blocks[number] = found
            if len(self._blocks) > _MOST_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        return found
