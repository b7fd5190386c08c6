"""Compares files with their recorded digests before their first use.

A file has one digest for the bytes of each rank that wrote it, and a digest of these. Processes
that see the same files each compute the digests of some writers' parts; the digests of all together
are compared with the records.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from os import cpu_count

from ft_ckpt.errors import CorruptError, Problem
from ft_ckpt.storage.digests.digests import file_digest, part_digests
from ft_ckpt.storage.digests.records import FileRecord, digest_problem, unread_problem
from ft_ckpt.storage.store import Store

_MAX_THREADS = 8
_MIN_POOL_BYTES = 8 << 20  # in all, for more than one thread


@dataclass(frozen=True)
class FileShare:
    """The parts of a file whose digests one process computes: those that `owners` wrote."""

    record: FileRecord
    owners: range


@dataclass(frozen=True)
class PartDigests:
    """The hexadecimal digests of consecutive parts of a file.

    The parts are those of the ranks `first`, `first` + 1, ... that wrote the file `path`. If
    digests could not be computed, `problem` says why.
    """

    path: str
    first: int = 0
    digests: tuple[str, ...] = ()
    problem: Problem | None = None


def digest_problems(store: Store, records: Collection[FileRecord]) -> list[Problem]:
    """Compare files in `store` with their records, and return the problems."""
    shares = [FileShare(record, range(record.ranks)) for record in records]
    return compare_digests(records, digest_shares(store, shares))


def share_files(records: Iterable[FileRecord], number: int, count: int) -> list[FileShare]:
    """Choose the parts that process `number` of `count` compares.

    Each process gets consecutive parts of a file that at least `count` ranks wrote: on as many
    ranks as saved, each gets its own. The parts of other files are dealt in turn, largest file
    first, so that some processes get none of a file.
    """
    shares = []
    dealt_parts = 0  # of files with fewer writers than processes
    for record in sorted(records, key=lambda record: (-record.size_bytes, record.path)):
        writers = record.ranks
        if writers >= count:
            owners = range(number * writers // count, (number + 1) * writers // count)
        else:
            writer = (number - dealt_parts) % count
            owners = range(writer, writer + 1) if writer < writers else range(0)
            dealt_parts += writers
        if owners:
            shares.append(FileShare(record, owners))
    return shares


def digest_shares(store: Store, shares: Sequence[FileShare]) -> list[PartDigests]:
    """Compute the digests of shares of files in `store`; large ones are read in parallel."""
    total_bytes = sum(share.record.size_bytes for share in shares)
    if len(shares) < 2 or total_bytes < _MIN_POOL_BYTES:
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
    """Return the problems in `parts`, and those of digests that differ from the records."""
    problems: list[Problem] = []
    unread_paths = set()
    digests_of_path: dict[str, dict[int, str]] = {}  # by the rank that wrote the part
    for part in parts:
        if part.problem is not None:
            problems.append(part.problem)
            unread_paths.add(part.path)
        digests_of_path.setdefault(part.path, {}).update(enumerate(part.digests, part.first))
    for record in records:
        if record.path in unread_paths:
            continue
        problem = _digest_problem(record, digests_of_path.get(record.path, {}))
        if problem is not None:
            problems.append(problem)
    return list(dict.fromkeys(problems))  # without duplicates from several processes


def _digest_problem(record: FileRecord, digests: Mapping[int, str]) -> Problem | None:
    if len(digests) < record.ranks:
        return Problem(f"{record.path}: not all of it was compared; please report it")
    in_rank_order = [digests[rank] for rank in sorted(digests)]
    return digest_problem(record, file_digest(in_rank_order))
