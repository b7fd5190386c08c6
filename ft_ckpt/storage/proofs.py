"""Digests that are compared while files are read, and before each commit of anything made of them.

A file has one digest for the bytes of each rank that wrote it, and a digest of these. Each reader computes the digests
of some writers' parts, preferably of bytes it reads anyway; they are compared when all are computed. A reader of most
of a file also compares the whole file and reports only damage, because the page cache of one machine may be damaged
where that of another is not. By then the bytes are in use, so a reader must check the outcome and discard everything
made of a damaged file.
"""

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from os import cpu_count

from ft_ckpt.errors import CheckpointError, CorruptError, UnreadableError, damaged_input, listing
from ft_ckpt.storage.digests import (
    SMALL_BYTES,
    FileRecord,
    PassingProblem,
    digest_problem,
    file_digest,
    new_digest,
    owned_parts,
    size_problem,
    unread_problem,
)
from ft_ckpt.storage.local_file import LocalFile, Watch
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.read_ahead import ByteRun, read_ahead
from ft_ckpt.storage.store import Readable, Store, read_range

_AHEAD_BYTES = 16 << 20  # smaller files are read in one go
_GAP_BYTES = 64 << 10  # padding between tensors: read here, to avoid reading the rest again
_NO_PART = sys.maxsize, sys.maxsize, -1


@dataclass(frozen=True)
class PartDigests:
    """The digests, hexadecimal, of the parts of the file `path` that the ranks `first`, `first` + 1, ... wrote."""

    path: str
    first: int
    digests: tuple[str, ...]


@dataclass(eq=False)
class FileProof:
    """The digests of the parts of a file that the ranks `owners` wrote; due until they are computed."""

    record: FileRecord
    open_file: Callable[[], Readable]
    owners: range
    found: PartDigests | None = None
    failure: str | None = None  # damage of the file that was found here
    is_wide: bool = False  # the whole file is compared here, independently of other ranks

    @property
    def is_due(self) -> bool:
        """Whether the digests are still missing."""
        return self.found is None and self.failure is None

    @property
    def taken(self) -> range:
        """The ranks whose parts are digested here."""
        return range(self.record.ranks) if self.is_wide else self.owners

    def widen_for(self, wanted_bytes: int) -> None:
        """Compare the whole file if `wanted_bytes` of it are read here anyway and the rest costs little."""
        self.is_wide = self.is_wide or wanted_bytes * 4 > self.record.size_bytes * 3

    @property
    def parts(self) -> Iterator[tuple[int, int, int]]:
        """The ranges to digest, in file order: (start, end, rank that wrote it)."""
        return owned_parts(self.record.cuts, self.record.size_bytes, self.taken)

    @cached_property
    def passing(self) -> "PassingDigest":
        """Takes the digests from bytes that are read for other purposes."""
        return PassingDigest(self)

    def read_now(self) -> None:
        """Read the bytes that were not seen yet, if the digests are still missing."""
        if not (self.is_due and self.taken):
            return
        try:
            self.take_rest()
        except CorruptError as error:
            self.failure = unread_problem(self.record.path, error)

    def take_rest(self) -> None:
        """Read the bytes that were not seen yet. Raises CorruptError for another size, and as reading does."""
        with closing(self.open_file()) as file:
            self.passing.take_from(file)
        self.passing.conclude()


class PassingDigest:
    """Computes the digests of a proof from bytes that arrive in file order, from any thread."""

    def __init__(self, proof: FileProof) -> None:
        self.proof, self.parts = proof, proof.parts
        self.states = {owner: new_digest() for owner in proof.taken}
        self.at, self.stop, self.owner = next(self.parts, _NO_PART)
        self._lock = threading.RLock()  # reading a gap brings its bytes here

    def take(self, start: int, content: memoryview, file: Readable | None = None) -> None:
        """Take the bytes of the file from `start` on; repeated bytes, and those of other ranks, are skipped.

        Bytes behind a gap are skipped too, except that a small gap is read from `file`, if given.
        """
        with self._lock:
            if file is not None and self.at < start <= self.at + _GAP_BYTES:
                self._take(self.at, memoryview(read_range(file, self.at, start - self.at)))
            if start <= self.at:
                self._take(start, content)

    def _take(self, start: int, content: memoryview) -> None:
        end = start + len(content)
        while self.at < end:
            high = min(end, self.stop)
            self.states[self.owner].update(content[self.at - start : high - start])
            self.at = high
            if high == self.stop:
                self.at, self.stop, self.owner = next(self.parts, _NO_PART)

    def take_from(self, file: Readable) -> None:
        """Read all bytes that have not arrived. Raises CorruptError for a file of another size, and as reading does."""
        proof, size_bytes = self.proof, self.proof.record.size_bytes
        if file.size_bytes != size_bytes:
            raise CorruptError(size_problem(file.size_bytes, size_bytes))
        if size_bytes < _AHEAD_BYTES:
            at = min(self.at, size_bytes)
            self.take(at, memoryview(read_range(file, at, size_bytes - at)))
            return
        rest = [(max(low, self.at), high) for low, high, _ in proof.parts if high > self.at]
        for part in read_ahead(ByteRun("", file, low, high - low) for low, high in rest):
            self.take(part.start, part.content)

    def conclude(self) -> None:
        """Finish the digests: all bytes have arrived."""
        proof, record = self.proof, self.proof.record
        digests = {owner: state.hexdigest() for owner, state in self.states.items()}
        proof.found = PartDigests(record.path, proof.owners.start, tuple(digests[owner] for owner in proof.owners))
        if proof.is_wide:
            proof.failure = digest_problem(record, file_digest([*digests.values()]))


def share_proofs(proofs: Collection[FileProof], number: int, count: int) -> list[FileProof]:
    """The share of rank `number` of `count` in the comparison of whole files.

    Of a file that at least `count` ranks wrote, each rank gets consecutive parts (with equal ranks, its own). The parts
    of other files are distributed in turn, largest file first, so that some ranks get none.
    """
    mine, dealt = [], 0
    for proof in sorted(proofs, key=lambda one: (-one.record.size_bytes, one.record.path)):
        writers = proof.record.ranks
        owners = range(number * writers // count, (number + 1) * writers // count)
        if writers < count:
            place = (number - dealt) % count
            owners, dealt = range(place, place + 1) if place < writers else range(0), dealt + writers
        mine.append(FileProof(proof.record, proof.open_file, owners))
    return mine


def read_late(proofs: Collection[FileProof]) -> tuple[tuple[PartDigests, ...], tuple[str, ...]]:
    """The digests of all proofs, and the failures found here; missing digests are read now, in parallel."""
    with ThreadPoolExecutor(min(8, cpu_count() or 1)) as pool:  # hashing and reading release the GIL
        list(pool.map(FileProof.read_now, proofs))
    found = tuple(proof.found for proof in proofs if proof.found is not None)
    return found, tuple(proof.failure for proof in proofs if proof.failure is not None)


def compare_digests(
    records: Collection[FileRecord], found: Sequence[PartDigests], failures: Sequence[str]
) -> list[str]:
    """The problems of files, a line each: the `failures` of ranks, and digests that differ from the records."""
    digests: dict[str, dict[int, str]] = {}
    for part in found:
        digests.setdefault(part.path, {}).update(enumerate(part.digests, part.first))
    problems = [*failures]
    for record in records:
        known = [digest for _, digest in sorted(digests.get(record.path, {}).items())]
        if len(known) == record.ranks:
            problems += filter(None, [digest_problem(record, file_digest(known))])
        elif not any(failure.startswith(f"{record.path}: ") for failure in failures):
            problems.append(f"{record.path}: not all of it was compared; please report it")
    return list(dict.fromkeys(problems))  # without duplicates from several ranks


_OPEN = threading.local()  # `proofs`: those of the checkpoints that this thread has open


class SourceProof:
    """The pending comparisons of the `files` of a checkpoint in `store`; each is due when its file is opened."""

    def __init__(self, store: Store, files: Iterable[FileRecord]) -> None:
        self.url = store.url
        self._files = {
            store.where(file.path): FileProof(file, partial(store.open, file.path), range(file.ranks), is_wide=True)
            for file in files
        }
        self._opened: dict[str, FileProof] = {}

    def watch_file(self, where: str) -> Watch | None:
        """The observer for bytes read of the file `where`; None if it is compared already.

        Raises CorruptError when a small file is damaged, and as reading does.
        """
        proof = self._files.get(where)
        if proof is None:
            return None
        if proof.is_due and proof.record.size_bytes < SMALL_BYTES:
            with damaged_input(where):
                proof.take_rest()
        self._opened[where] = proof
        if proof.failure is not None:
            raise _error_of([_at(where.removesuffix(proof.record.path), proof.failure)])
        return proof.passing.take if proof.is_due else None

    def problems(self) -> list[str]:
        """The damage of the opened files, a line each. Bytes that were not read yet are read now."""
        return [_at(f"{self.url}: ", failure) for failure in read_late([*self._opened.values()])[1]]


@dataclass(frozen=True)
class SourceFolder(LocalStore):
    """A folder of a checkpoint whose files are compared with their digests while they are read, if `proof` is given."""

    proof: SourceProof | None = None

    def open(self, name: str) -> Readable:
        """Raises CorruptError also when a small file is damaged."""
        file = super().open(name)
        if self.proof is not None and isinstance(file, LocalFile):
            file.watch = self.proof.watch_file(self.where(name))
        return file


@contextmanager
def proving(proof: SourceProof) -> Iterator[None]:
    """Compare the files of an open checkpoint with their digests at each commit of this thread and after the block.

    Raises CorruptError for damage, and in place of a library's error after reading damaged files.
    """
    found: list[SourceProof] = vars(_OPEN).setdefault("proofs", [])
    found.append(proof)
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        _refuse_damaged([proof], error)
        raise
    else:
        _refuse_damaged([proof])
    finally:
        found.remove(proof)


def prove_sources() -> None:
    """Compare everything that this thread has read of its open checkpoints. Raises CorruptError for damage."""
    _refuse_damaged(vars(_OPEN).get("proofs", ()))


def _refuse_damaged(proofs: Iterable[SourceProof], cause: Exception | None = None) -> None:
    if problems := [problem for proof in proofs for problem in proof.problems()]:
        raise _error_of(problems) from cause


def _at(where: str, failure: str) -> str:
    """The failure with its place before it; a PassingProblem stays one."""
    return type(failure)(f"{where}{failure}")


def _error_of(problems: list[str]) -> CorruptError:
    """The error of damaged files; UnreadableError if all of them may be whole."""
    if all(isinstance(problem, PassingProblem) for problem in problems):
        return UnreadableError(f"{listing(problems)}; try again")
    return CorruptError(f"{listing(problems)}; use another checkpoint")
