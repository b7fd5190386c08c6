"""Digests of files: of one that was written from front to back, and of one that several ranks wrote their parts of.

The parts of each rank, in file order, have one digest; how the file was cut is told by a `Cut` for each run of chunks,
and what no cut covers is rank 0's. So a file has as many digests as writers, and is checked in one pass.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from ft_ckpt.manifest import Cut, FileRecord

_BLOCK_BYTES = 4 << 20
_WHOLE, _CUT = "xxh3-128:", "xxh3-128-of-ranks:"


def digest_of(file: Path) -> str:
    """The digest of the whole file as a FileRecord has it: "xxh3-128:" and 32 hex digits. Raises OSError."""
    state, buffer = xxhash.xxh3_128(), memoryview(bytearray(_BLOCK_BYTES))
    with file.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            state.update(buffer[:count])
    return _WHOLE + state.hexdigest()


def digest_like(file: Path, record: FileRecord) -> str:
    """The digest of `file`, taken the way the one in `record` was. Raises OSError."""
    if record.ranks == 1:
        return digest_of(file)
    size, states = file.stat().st_size, [xxhash.xxh3_128() for _ in range(record.ranks)]
    with file.open("rb", buffering=0) as stream:
        buffer = memoryview(bytearray(_BLOCK_BYTES))
        for start, stop, owner in parts(record.cuts, size):
            _read_into(states[owner], stream, stop - start, buffer)
    return together(state.hexdigest() for state in states)


def together(digests: Iterable[str]) -> str:
    """The digest of a file from those of its ranks' parts, hexadecimal, in rank order."""
    return _CUT + xxhash.xxh3_128_hexdigest("".join(digests).encode())


def parts(cuts: Sequence[Cut], size_bytes: int) -> Iterator[tuple[int, int, int]]:
    """The file in order, as (start, stop, rank that wrote it); neighbours of one rank may come as one or more."""
    at = 0
    for cut in cuts:
        if at < cut.start:
            yield at, cut.start, 0
        yield from chunks(cut)
        at = cut.stop
    if at < size_bytes:
        yield at, size_bytes, 0


def chunks(cut: Cut) -> Iterator[tuple[int, int, int]]:
    """The chunks of one cut, as (start, stop, rank)."""
    start, stop, owner = cut.start, min(cut.start + cut.lead, cut.stop), cut.owner
    while start < cut.stop:
        yield start, stop, owner
        start, stop, owner = stop, min(stop + cut.chunk, cut.stop), owner + 1


def _read_into(state: Any, stream: Any, count: int, buffer: memoryview) -> None:
    while count:
        got = stream.readinto(buffer[: min(count, len(buffer))])
        if not got:
            return  # cut short: the digest will differ, and the size has been told
        state.update(buffer[:got])
        count -= got
