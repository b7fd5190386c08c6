"""How a store is written fastest: past the page cache or through it, by how many threads, in blocks of which size.

A save that is large enough for it to matter first writes a little in each way; the answer is remembered for the store
(the file system) as long as the process lives.
"""

import os
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from ft_ckpt.storage.buffers import BLOCK_BYTES, new_block
from ft_ckpt.storage.direct_io import create_file, write_all

LEAST_BYTES = 4_000_000_000  # of a save that is worth the trial
_TRIAL_BYTES = 64 << 20  # written in each way
_WORTH = 1.2  # times as fast as the usual way: less is noise


@dataclass(frozen=True)
class Pace:
    """One way to write: `threads` writers of blocks of `block_bytes`, past the page cache if `direct`."""

    direct: bool = True
    threads: int = 4
    block_bytes: int = BLOCK_BYTES
    least_direct_bytes: int = BLOCK_BYTES  # smaller files go through the page cache all the same


USUAL = Pace()
_WAYS = (USUAL, Pace(threads=2), Pace(threads=8), Pace(direct=False))
_known: dict[tuple[int, tuple[Pace, ...]], Pace] = {}
_lock = threading.Lock()


def pace_of(
    folder: Path, size_bytes: int, threads: int | None = None, direct: str = "auto", block_bytes: int = BLOCK_BYTES
) -> Pace:
    """How to write `size_bytes` into `folder`, which exists; what is None, or "auto", is measured where that pays."""
    ways = tuple(dict.fromkeys(_settled(way, threads, direct, block_bytes) for way in _WAYS))
    with _lock:  # who comes meanwhile waits, rather than disturb
        place = (folder.stat().st_dev, ways)
        if place not in _known and (len(ways) == 1 or size_bytes < LEAST_BYTES):
            return ways[0]
        if place not in _known:
            _known[place] = _fastest(folder, ways)
        return _known[place]


def _settled(way: Pace, threads: int | None, direct: str, block_bytes: int) -> Pace:
    """`way` with what the caller has decided."""
    return replace(
        way,
        threads=threads or way.threads,
        direct=way.direct if direct == "auto" else direct == "on",
        block_bytes=block_bytes,
        least_direct_bytes=0 if direct == "on" else way.least_direct_bytes,
    )


def _fastest(folder: Path, ways: tuple[Pace, ...]) -> Pace:
    try:
        seconds = {way: _trial(folder, way) for way in ways}
    except OSError:
        return ways[0]  # the save itself will say what is wrong
    best = min(ways, key=lambda way: seconds[way])
    return best if seconds[best] * _WORTH < seconds[ways[0]] else ways[0]


def _trial(folder: Path, way: Pace) -> float:
    """Seconds that a little file takes this way, synced; nothing of it stays."""
    block, content = new_block(way.block_bytes), os.urandom(1 << 20)  # which no file system makes smaller
    block.write((content * -(-way.block_bytes // len(content)))[: way.block_bytes])
    with tempfile.TemporaryDirectory(prefix=".ft_ckpt-trial-", dir=folder) as room:
        path = Path(room) / "trial"
        begun = time.perf_counter()
        descriptor = create_file(path, _TRIAL_BYTES, way.direct)
        try:
            with ThreadPoolExecutor(way.threads) as pool:
                offsets = range(0, _TRIAL_BYTES, way.block_bytes)
                list(pool.map(lambda at: write_all(path, descriptor, block, (0, way.block_bytes), at), offsets))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return time.perf_counter() - begun
