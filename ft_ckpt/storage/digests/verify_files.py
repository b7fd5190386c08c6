"""Compares files with their recorded digests before their first use.

A file has one digest for the bytes of each rank that wrote it, and a digest of these. Processes
that see the same files each compute the digests of some writers' parts; the digests of all together
are compared with the records.
"""

from collections.abc import Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from os import cpu_count

from ft_ckpt.errors import CorruptError, Problem
from ft_ckpt.storage.digests.digests import (
    FileRecord,
    digest_problem,
    file_digest,
    part_digests,
    unread_problem,
)
from ft_ckpt.storage.store import Store

_MAX_THREADS = 8
_MIN_BYTES = 8 << 20  # in all, for more than one thread


@dataclass(frozen=True)
class FileShare:
    """The parts of a file whose digests one process computes: those that `owners` wrote."""

    record: FileRecord
    owners: range


@dataclass(frozen=True)
class PartDigests:
    """The digests of consecutive parts of a file, hexadecimal.

    They are of the ranks `first`, `first` + 1, ... that wrote the file `path`.

    In place of digests that could not be computed, `problem` says why.
    """

    path: str
    first: int = 0
    digests: tuple[str, ...] = ()
    problem: Problem | None = None


def digest_problems(store: Store, records: Collection[FileRecord]) -> list[Problem]:
    """The problems of files in `store`."""
    shares = [FileShare(record, range(record.ranks)) for record in records]
    return compare_digests(records, digest_shares(store, shares))


def share_files(records: Iterable[FileRecord], number: int, count: int) -> list[FileShare]:
    """The share of process `number` of `count` in the comparison of files.

    Of a file that at least `count` ranks wrote, each process gets consecutive parts (on as many
    ranks as saved, each gets its own). The parts of other files are distributed in turn, largest
    file first, so that some get none.
    """
    shares = []
    dealt = 0
    for record in sorted(records, key=lambda record: (-record.size_bytes, record.path)):
        writers = record.ranks
        owners = range(number * writers // count, (number + 1) * writers // count)
        if writers < count:
            place = (number - dealt) % count
            owners = range(place, place + 1) if place < writers else range(0)
            dealt += writers
        if owners:
            shares.append(FileShare(record, owners))
    return shares


def digest_shares(store: Store, shares: Sequence[FileShare]) -> list[PartDigests]:
    """The digests of the shares of files in `store`; large ones are read in parallel."""
    if len(shares) < 2 or sum(share.record.size_bytes for share in shares) < _MIN_BYTES:
        return [_digest_share(store, share) for share in shares]
    from concurrent.futures import ThreadPoolExecutor  # lazily: listing does not need it

    threads = min(_MAX_THREADS, cpu_count() or 1, len(shares))
    # hashing and reading release the GIL
    with ThreadPoolExecutor(threads, "ft_ckpt-digest") as pool:
        return list(pool.map(lambda share: _digest_share(store, share), shares))


def _digest_share(store: Store, share: FileShare) -> PartDigests:
    path = share.record.path
    try:
        with closing(store.open(path)) as file:
            digests = part_digests(file, share.record, share.owners)
    except CorruptError as error:
        return PartDigests(path, problem=unread_problem(path, error))
    return PartDigests(path, share.owners.start, digests)


def compare_digests(records: Iterable[FileRecord], parts: Iterable[PartDigests]) -> list[Problem]:
    """The problems of files: those in `parts`, and digests that differ from the records."""
    problems: list[Problem] = []
    unread = set()
    digests: dict[str, dict[int, str]] = {}
    for part in parts:
        if part.problem is not None:
            problems.append(part.problem)
            unread.add(part.path)
        digests.setdefault(part.path, {}).update(enumerate(part.digests, part.first))
    for record in records:
        if record.path in unread:
            continue
        in_rank_order = [digest for _, digest in sorted(digests.get(record.path, {}).items())]
        if len(in_rank_order) < record.ranks:
            incomplete = f"{record.path}: not all of it was compared; please report it"
            problems.append(Problem(incomplete))
            continue
        problem = digest_problem(record, file_digest(in_rank_order))
        if problem is not None:
            problems.append(problem)
    return list(dict.fromkeys(problems))  # without duplicates from several processes
