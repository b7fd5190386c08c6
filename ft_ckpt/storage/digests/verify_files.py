"""Compares files with their recorded digests before their first use.

Processes that see the same files share the work. Each process computes the digests of the bytes
that some of the writers wrote (`share_files`, `digest_shares`). Then the digests of all processes
are compared with the records (`compare_digests`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from os import cpu_count

from ft_ckpt.errors import CorruptError, Problem
from ft_ckpt.storage.digests.digests import file_digest, rank_digests
from ft_ckpt.storage.digests.records import FileRecord, digest_problem, unread_problem
from ft_ckpt.storage.store import Store

_MAX_THREADS = 8
# If all files together are smaller, one thread reads them.
_MIN_POOL_BYTES = 8 << 20


@dataclass(frozen=True)
class FileShare:
    """One process's share of a file: it digests the bytes that the ranks `owners` wrote."""

    record: FileRecord
    owners: range


@dataclass(frozen=True)
class ShareDigests:
    """Hexadecimal digests of what consecutive ranks wrote into the file `path`.

    The digests are those of the ranks `first`, `first` + 1, and so on. If they could not be
    computed, there are none, and `problem` says why.
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
    """Choose the shares of process `number` of `count`.

    If at least `count` ranks wrote a file, each process gets the bytes of consecutive writers. With
    as many processes as writers, each gets the bytes of one writer. If fewer ranks wrote a file,
    its writers are dealt to the processes in turn, largest file first. Some processes then get
    nothing of that file.
    """
    shares = []
    dealt_writers = 0  # the number of writers that were dealt in turn so far
    for record in sorted(records, key=lambda record: (-record.size_bytes, record.path)):
        writers = record.ranks
        if writers >= count:
            owners = range(number * writers // count, (number + 1) * writers // count)
        else:
            writer = (number - dealt_writers) % count
            owners = range(writer, writer + 1) if writer < writers else range(0)
            dealt_writers += writers
        if owners:
            shares.append(FileShare(record, owners))
    return shares


def digest_shares(store: Store, shares: Sequence[FileShare]) -> list[ShareDigests]:
    """Compute the digests of shares of files in `store`, in several threads if they are large."""
    total_bytes = sum(share.record.size_bytes for share in shares)
    if len(shares) < 2 or total_bytes < _MIN_POOL_BYTES:
        return [_digest_share(store, share) for share in shares]
    from concurrent.futures import ThreadPoolExecutor  # lazily: listing does not need it

    threads = min(_MAX_THREADS, cpu_count() or 1, len(shares))
    # hashing and reading release the GIL
    with ThreadPoolExecutor(threads, "ft_ckpt-digest") as pool:
        return list(pool.map(lambda share: _digest_share(store, share), shares))


def _digest_share(store: Store, share: FileShare) -> ShareDigests:
    path = share.record.path
    try:
        with closing(store.open(path)) as file:
            digests = rank_digests(file, share.record, share.owners)
    except CorruptError as error:
        return ShareDigests(path, problem=unread_problem(path, error))
    return ShareDigests(path, share.owners.start, digests)


def compare_digests(records: Iterable[FileRecord], parts: Iterable[ShareDigests]) -> list[Problem]:
    """Compare the digests of all processes with the records, and return the problems.

    `parts` are the results of all processes. Their own problems are returned, too.
    """
    problems: list[Problem] = []
    unread_paths = set()

    # For each path, the digests by the rank that wrote the bytes.
    digests_of_path: dict[str, dict[int, str]] = {}
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
