"""What is recorded of a file: its size, its digests, and which rank wrote which bytes.

The parts of each rank, in file order, have one digest. A `Cut` describes each run of chunks; bytes
outside of all cuts are rank 0's. So a file has as many digests as writers, and is checked in one
pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ft_ckpt.errors import CorruptError, MissingError, Problem, UnreadableError, reason_of
from ft_ckpt.schema import Count, Positive

Part: TypeAlias = tuple[int, int, int]  # bytes [start, stop) of a file, the rank that wrote them


class Cut(NamedTuple):
    """Bytes [start, stop) of a file in chunks of consecutive ranks.

    The first chunk belongs to the rank `owner`, the next one to `owner` + 1, and so on.
    """

    start: Count
    stop: Count
    chunk: Positive  # bytes of each chunk but the first and the last
    lead: Count  # bytes of the first
    owner: Count


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


def size_problem(size_bytes: int, listed_bytes: int) -> str:
    """Describe a file of another size than its manifest lists."""
    kind = "truncated" if size_bytes < listed_bytes else "overwritten"
    return f"{kind}: {size_bytes:,} bytes, but the manifest lists {listed_bytes:,}"


def digest_problem(record: FileRecord, digest: str) -> Problem | None:
    """Return the problem of a file whose `digest` differs from its record, else None."""
    if digest == record.digest:
        return None
    change = f"digest {digest}, expected {record.digest}: its bytes have changed"
    return Problem(f"{record.path}: {change}")


def unread_problem(path: str, error: CorruptError) -> Problem:
    """Return the problem of a file whose reading ended in `error`."""
    if isinstance(error, UnreadableError):
        return Problem(f"{path}: cannot be read ({reason_of(error)})", is_transient=True)
    reason = reason_of(error) if isinstance(error, MissingError) else error
    return Problem(f"{path}: unreadable ({reason})")


def rank_parts(cuts: Sequence[Cut], size_bytes: int) -> Iterator[Part]:
    """Yield all parts of a file in order; neighbours of one rank may be joined."""
    offset = 0
    for cut in cuts:
        if offset < cut.start:
            yield offset, cut.start, 0
        yield from cut_chunks(cut)
        offset = cut.stop
    if offset < size_bytes:
        yield offset, size_bytes, 0


def owned_parts(cuts: Sequence[Cut], size_bytes: int, owners: range) -> Iterator[Part]:
    """Yield the parts of a file that `owners` wrote, in order."""
    offset = 0
    for cut in cuts:
        if offset < cut.start and 0 in owners:
            yield offset, cut.start, 0
        for owner in range(max(owners.start, cut.owner), owners.stop):
            chunk = chunk_of_rank(cut, owner)
            if chunk is None:
                break
            yield *chunk, owner
        offset = cut.stop
    if offset < size_bytes and 0 in owners:
        yield offset, size_bytes, 0


def chunk_of_rank(cut: Cut, rank: int) -> tuple[int, int] | None:
    """Return the bytes [start, stop) of a cut that `rank` wrote, or None if it wrote none."""
    number = rank - cut.owner
    if number < 0:
        return None
    stop = min(cut.start + cut.lead + number * cut.chunk, cut.stop)
    start = cut.start
    if number > 0:
        start += cut.lead + (number - 1) * cut.chunk
    return (start, stop) if start < stop else None


def cut_chunks(cut: Cut) -> Iterator[Part]:
    """Yield the chunks of one cut, in order."""
    start, stop = cut.start, min(cut.start + cut.lead, cut.stop)
    rank = cut.owner
    while start < cut.stop:
        yield start, stop, rank
        start, stop = stop, min(stop + cut.chunk, cut.stop)
        rank += 1
