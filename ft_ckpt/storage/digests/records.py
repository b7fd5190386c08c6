"""Records the size of a file, its digest, and which rank wrote which of its bytes.

A part is a range of bytes that one rank wrote. Ranks write a file in turns: for example, each of
four ranks writes its quarter of a sharded tensor, and then its quarter of the next tensor. A `Cut`
describes the parts of one such range, and rank 0 wrote all bytes outside of cuts:

    file    | header | rank 0 | rank 1 | rank 2 | rank 3 | rank 0 | rank 1 | rank 2 | rank 3 |
            | rank 0 |<------------- first cut --------->|<------------ second cut --------->|

All parts of one rank, in file order, have one digest. So a file has as many digests as writers, and
can be checked in one pass.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ft_ckpt.errors import CorruptError, MissingError, Problem, UnreadableError, reason_of
from ft_ckpt.schema import Count, Positive

# Bytes [start, stop) of a file, and the rank that wrote them.
Part: TypeAlias = tuple[int, int, int]


class Cut(NamedTuple):
    """Bytes [start, stop) of a file that consecutive ranks wrote, one chunk each.

    The rank `owner` wrote the first chunk, the rank `owner` + 1 the next one, and so on. For
    example, a cut with start 100, stop 190, lead 20, chunk 30 and owner 1 is

        rank 1    [100, 120)    the first chunk has `lead` bytes
        rank 2    [120, 150)    the others have `chunk` bytes
        rank 3    [150, 180)
        rank 4    [180, 190)    the last chunk ends at `stop`
    """

    start: Count
    stop: Count
    chunk: Positive
    lead: Count
    owner: Count


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        path: relative to the folder of the checkpoint, with forward slashes.
        size_bytes: size of the file.
        digest: 32 hex digits after "xxh3-128:", or after "xxh3-128-of-ranks:" if several ranks
            wrote the file (see `joined_digest`).
        cuts: which ranks wrote which bytes, in file order. Rank 0 wrote all bytes outside of cuts.
        ranks: number of ranks that wrote the file.
        linked: True if it is a link to the file of an earlier checkpoint, whose tensors had not
            changed since.
        etag: version of the object in a bucket. If the object has another version now, it is
            compared with the digest before it is used.
        sha256: 64 hex digits, if the save was asked for them (SaverConfig.digest).
    """

    path: str
    size_bytes: Count
    digest: str
    cuts: tuple[Cut, ...] = ()
    ranks: Positive = 1
    linked: bool = False
    etag: str | None = None
    sha256: str | None = None


def size_problem(size_bytes: int, listed_bytes: int) -> str:
    """Return the text of an error for a file whose size differs from that in its manifest."""
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
    """Yield all parts of a file, in order."""
    offset = 0
    for cut in cuts:
        if offset < cut.start:
            yield offset, cut.start, 0
        yield from cut_chunks(cut)
        offset = cut.stop
    if offset < size_bytes:
        yield offset, size_bytes, 0


def owned_parts(cuts: Sequence[Cut], size_bytes: int, owners: range) -> Iterator[Part]:
    """Yield the parts of a file that the ranks `owners` wrote, in order.

    Takes time for these parts only, not for those of all ranks.
    """
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
    """Return the bytes [start, stop) of the chunk of `rank` in a cut, or None if it has none."""
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
    start = cut.start
    stop = min(cut.start + cut.lead, cut.stop)
    rank = cut.owner
    while start < cut.stop:
        yield start, stop, rank
        start, stop = stop, min(stop + cut.chunk, cut.stop)
        rank += 1
