"""Digests of files written by one rank or several.

The parts of each rank, in file order, have one digest. A `Cut` describes each run of chunks; bytes
outside of all cuts are rank 0's. So a file has as many digests as writers, and is checked in one
pass.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import xxhash

from ft_ckpt.errors import CorruptError, MissingError, Problem, UnreadableError, reason_of
from ft_ckpt.progress_bars import note_read
from ft_ckpt.schema import Count, Positive
from ft_ckpt.storage.io import LocalFile
from ft_ckpt.storage.store import Readable, Store, read_range

# files below it are hashed whenever a checkpoint is opened: configs, tokenizers, indexes
SMALL_BYTES = 1 << 20
_MAP_BYTES = 1 << 20  # smaller files are read
_STEP_BYTES = 32 << 20  # hashed in one call
_WHOLE, _CUT = "xxh3-128:", "xxh3-128-of-ranks:"


class Cut(NamedTuple):
    """Bytes [start, stop) of a file in chunks of consecutive ranks.

    The first chunk is of the rank `owner`, the next of `owner` + 1, and so on.
    """

    start: Count
    stop: Count
    chunk: Positive  # bytes of each chunk but the first and the last
    lead: Count  # bytes of the first
    owner: Count


def size_problem(size_bytes: int, listed_bytes: int) -> str:
    """The problem of a file of another size than its manifest lists."""
    kind = "truncated" if size_bytes < listed_bytes else "overwritten"
    return f"{kind}: {size_bytes:,} bytes, but the manifest lists {listed_bytes:,}"


@dataclass(frozen=True)
class FileRecord:
    """One file of the checkpoint, `path` relative to its folder with forward slashes."""

    path: str
    size_bytes: Count
    # "xxh3-128:" and 32 hex digits of the whole file, or "xxh3-128-of-ranks:", see `joined_digest`
    digest: str
    # in file order, if several ranks wrote it; bytes between cuts are rank 0's
    cuts: tuple[Cut, ...] = ()
    ranks: Positive = 1  # that wrote it
    # to the file of an earlier checkpoint, whose tensors had not changed since
    linked: bool = False
    # of the object in a bucket; one of another version is compared before it is used
    etag: str | None = None
    sha256: str | None = None  # 64 hex digits, if the save was asked for them (SaverConfig.digest)


def record_of(path: str, content: bytes) -> FileRecord:
    """The record of a small file from its bytes."""
    return FileRecord(path, len(content), digest_of_bytes(content))


def read_record(store: Store, path: str) -> FileRecord:
    """The record of an object; reads it. Raises as reading does."""
    with closing(store.open(path)) as opened:
        record = FileRecord(path, opened.size_bytes, "")
        return replace(record, digest=digest_of_open(opened, record))


def digest_of_open(file: Readable, record: FileRecord) -> str:
    """The digest of an open object, computed as for `record`.

    Raises CorruptError as `part_digests` does.
    """
    return file_digest(part_digests(file, record, range(record.ranks)))


def part_digests(file: Readable, record: FileRecord, owners: range) -> tuple[str, ...]:
    """The digests, hexadecimal, of the parts of an open object that the ranks `owners` wrote.

    A local file is read through the page cache, from which it is used afterwards. Raises
    CorruptError for an object of another size than the record's, and as reading does.
    """
    if file.size_bytes != record.size_bytes:
        raise CorruptError(size_problem(file.size_bytes, record.size_bytes))
    states = {owner: new_digest() for owner in owners}
    parts = owned_parts(record.cuts, record.size_bytes, owners)
    contents = _mapped_contents if file.can_map else _remote_contents
    for owner, content in contents(file, parts):
        states[owner].update(content)
    return tuple(state.hexdigest() for state in states.values())


_Parts = Iterator[tuple[int, int, int]]  # (start, stop, rank that wrote it)
_Contents = Iterator[tuple[int, memoryview]]  # (rank that wrote them, the next bytes)


def _mapped_contents(file: Readable, parts: _Parts) -> _Contents:
    """The bytes of a local file in its mapping, in steps between which signals are handled.

    Each step is first read into the page cache: if the disk fails there, it is an error and not the
    end of the process.
    """
    mapped = None
    if isinstance(file, LocalFile) and file.size_bytes >= _MAP_BYTES:
        mapped = file.map(in_large_pages=False)
    for part_start, part_stop, owner in parts:
        for start in range(part_start, part_stop, _STEP_BYTES):
            stop = min(start + _STEP_BYTES, part_stop)
            if mapped is not None and mapped.read_in(start, stop):
                yield owner, mapped.memory[start:stop]
            else:
                yield owner, memoryview(read_range(file, start, stop - start))
            note_read(stop - start)
    file.check()


def _remote_contents(file: Readable, parts: _Parts) -> _Contents:
    from ft_ckpt.storage.io import ByteRun, read_ahead

    runs = (ByteRun(str(owner), file, start, stop - start) for start, stop, owner in parts)
    for part in read_ahead(runs):
        yield int(part.run.name), part.content


def new_digest() -> xxhash.xxh3_128:
    """The state of a digest, without bytes."""
    return xxhash.xxh3_128()


def digest_problem(record: FileRecord, digest: str) -> Problem | None:
    """The problem of a file whose `digest` differs from its record; None if it is equal."""
    if digest == record.digest:
        return None
    change = f"digest {digest}, expected {record.digest}: its bytes have changed"
    return Problem(f"{record.path}: {change}")


def unread_problem(path: str, error: CorruptError) -> Problem:
    """The problem of a file whose reading ended in `error`."""
    if isinstance(error, UnreadableError):
        return Problem(f"{path}: cannot be read ({reason_of(error)})", is_transient=True)
    reason = reason_of(error) if isinstance(error, MissingError) else error
    return Problem(f"{path}: unreadable ({reason})")


class RunningDigest:
    """The digest of a file whose bytes arrive in file order, computed as for its record."""

    def __init__(self, size_bytes: int, cuts: Sequence[Cut] = (), ranks: int = 1) -> None:
        self.states = [new_digest() for _ in range(ranks)]
        self.parts = rank_parts(cuts, size_bytes)
        self.at, self.stop, self.owner = 0, 0, 0  # the next byte; end and rank of its part

    def update(self, content: memoryview) -> None:
        """Take the next bytes of the file."""
        done = 0
        while done < len(content):
            while self.at == self.stop:
                _, self.stop, self.owner = next(self.parts)
            count = min(len(content) - done, self.stop - self.at)
            self.states[self.owner].update(content[done : done + count])
            done, self.at = done + count, self.at + count

    def text(self) -> str:
        return file_digest([state.hexdigest() for state in self.states])


def digest_of_bytes(content: bytes) -> str:
    """The digest that a file with this content would have."""
    return whole_digest(xxhash.xxh3_128_hexdigest(content))


def whole_digest(digest: str) -> str:
    """The digest of a file that one rank wrote, from the hexadecimal digest of its bytes."""
    return _WHOLE + digest


def file_digest(digests: Sequence[str]) -> str:
    """The digest of a file from the hexadecimal digests of its ranks' parts, in rank order.

    `whole_digest` of one.
    """
    return whole_digest(digests[0]) if len(digests) == 1 else joined_digest(digests)


def joined_digest(digests: Iterable[str]) -> str:
    """The digest of a file from the hexadecimal digests of its ranks' parts, in rank order."""
    return _CUT + xxhash.xxh3_128_hexdigest("".join(digests).encode())


def rank_parts(cuts: Sequence[Cut], size_bytes: int) -> Iterator[tuple[int, int, int]]:
    """The ranges of the file in order, as (start, stop, rank that wrote it).

    Neighbours of one rank may be joined.
    """
    at = 0
    for cut in cuts:
        if at < cut.start:
            yield at, cut.start, 0
        yield from cut_chunks(cut)
        at = cut.stop
    if at < size_bytes:
        yield at, size_bytes, 0


def owned_parts(
    cuts: Sequence[Cut], size_bytes: int, owners: range
) -> Iterator[tuple[int, int, int]]:
    """The ranges of the file that `owners` wrote, in order, as `rank_parts`."""
    at = 0
    for cut in cuts:
        if at < cut.start and 0 in owners:
            yield at, cut.start, 0
        for owner in range(max(owners.start, cut.owner), owners.stop):
            chunk = chunk_of_rank(cut, owner)
            if chunk is None:
                break
            yield *chunk, owner
        at = cut.stop
    if at < size_bytes and 0 in owners:
        yield at, size_bytes, 0


def chunk_of_rank(cut: Cut, rank: int) -> tuple[int, int] | None:
    """The bytes [start, stop) of a cut that `rank` wrote; None if it wrote none."""
    number = rank - cut.owner
    start = cut.start if not number else cut.start + cut.lead + (number - 1) * cut.chunk
    stop = min(cut.start + cut.lead + number * cut.chunk, cut.stop)
    return (start, stop) if number >= 0 and start < stop else None


def cut_chunks(cut: Cut) -> Iterator[tuple[int, int, int]]:
    """The chunks of one cut, as (start, stop, rank)."""
    start, stop = cut.start, min(cut.start + cut.lead, cut.stop)
    rank = cut.owner
    while start < cut.stop:
        yield start, stop, rank
        start, stop = stop, min(stop + cut.chunk, cut.stop)
        rank += 1
