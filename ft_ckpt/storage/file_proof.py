"""Files that are compared with their digests while they are read, each part of them once, by ranks together.

A file has a digest of what each rank wrote of it, and one of these. So whoever reads takes the digests of some writers'
parts, best of those that it reads anyway, and these are compared when all are in. Bytes have gone to their places by
then: whoever reads so asks for the outcome, and throws away what was made of a damaged file.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from os import cpu_count

from ft_ckpt.errors import CorruptError, MissingError, UnreadableError, reason_of
from ft_ckpt.storage.digests import FileRecord, digest_problem, joined_digest, new_digest, owned_parts, whole_digest
from ft_ckpt.storage.read_ahead import ByteRun, read_ahead
from ft_ckpt.storage.store import Readable, read_range

_AHEAD_BYTES = 16 << 20  # smaller files are read in one go
_NO_PART = sys.maxsize, sys.maxsize, -1


@dataclass(frozen=True)
class PartDigests:
    """The digests, hexadecimal, of what the ranks `first`, `first` + 1, ... wrote of the file `path`."""

    path: str
    first: int
    digests: tuple[str, ...]


@dataclass(eq=False)
class FileProof:
    """The digests of what the ranks `owners` wrote of a file; due until they were taken. Of one thread."""

    record: FileRecord
    open_file: Callable[[], Readable]
    owners: range
    found: PartDigests | None = None
    failure: str | None = None  # why the file cannot be read

    @property
    def is_due(self) -> bool:
        """Whether nobody has taken the digests yet."""
        return self.found is None and self.failure is None

    @property
    def parts(self) -> Iterator[tuple[int, int, int]]:
        """What is to be read for it, in the order of the file: first byte, the one behind the last, who wrote it."""
        return owned_parts(self.record.cuts, self.record.size_bytes, self.owners)

    def read_now(self) -> None:
        """Read what is to be read, if the digests are still due."""
        if not self.is_due:
            return
        digest = PassingDigest(self)
        try:
            with closing(self.open_file()) as file:
                if self.record.size_bytes < _AHEAD_BYTES:
                    digest.take(0, memoryview(read_range(file, 0, file.size_bytes)))
                else:
                    for part in read_ahead(ByteRun("", file, low, high - low) for low, high, _ in self.parts):
                        digest.take(part.start, part.content)
        except (MissingError, UnreadableError) as error:
            self.failure = f"{self.record.path}: unreadable ({reason_of(error)})"
        except CorruptError as error:
            self.failure = f"{self.record.path}: unreadable ({error})"
        else:
            digest.conclude()


class PassingDigest:
    """Takes the digests of a proof from bytes that come by in the order of the file."""

    def __init__(self, proof: FileProof) -> None:
        self.proof, self.parts = proof, proof.parts
        self.states = {owner: new_digest() for owner in proof.owners}
        self.at, self.stop, self.owner = next(self.parts, _NO_PART)

    def take(self, start: int, content: memoryview) -> None:
        """Bytes of the file from `start` on; those that come again, or that others compare, are passed over."""
        end = start + len(content)
        while self.at < end:
            high = min(end, self.stop)
            self.states[self.owner].update(content[self.at - start : high - start])
            self.at = high
            if high == self.stop:
                self.at, self.stop, self.owner = next(self.parts, _NO_PART)

    def conclude(self) -> None:
        """All bytes have come by."""
        proof = self.proof
        proof.found = PartDigests(
            proof.record.path, proof.owners.start, tuple(state.hexdigest() for state in self.states.values())
        )


def share_proofs(proofs: Collection[FileProof], number: int, count: int) -> list[FileProof]:
    """Those of whole files that the `number`th of `count` ranks makes, cut down to the parts that it makes.

    Of a file that at least as many ranks wrote, each has the parts of neighbours: on the same ranks, its own. Others
    are dealt out, the largest first.
    """
    mine, dealt = [], 0
    for proof in sorted(proofs, key=lambda one: (-one.record.size_bytes, one.record.path)):
        writers = proof.record.ranks
        owners = range(number * writers // count, (number + 1) * writers // count)
        if writers < count:
            place = (number - dealt) % count
            owners, dealt = range(place, place + 1) if place < writers else range(0), dealt + writers
        if owners:
            mine.append(FileProof(proof.record, proof.open_file, owners))
    return mine


def read_late(proofs: Collection[FileProof]) -> tuple[tuple[PartDigests, ...], tuple[str, ...]]:
    """The digests of all proofs, and why files cannot be read; those still due are read for it, several at once."""
    with ThreadPoolExecutor(min(8, cpu_count() or 1)) as pool:  # hashing and reading both let other threads run
        list(pool.map(FileProof.read_now, proofs))
    found = tuple(proof.found for proof in proofs if proof.found is not None)
    return found, tuple(proof.failure for proof in proofs if proof.failure is not None)


def compare_digests(
    records: Collection[FileRecord], found: Sequence[PartDigests], failures: Sequence[str]
) -> list[str]:
    """What is wrong with files, a line each: the `failures` to read some, and digests that are not their records'."""
    digests: dict[str, dict[int, str]] = {}
    for part in found:
        digests.setdefault(part.path, {}).update(enumerate(part.digests, part.first))
    problems = [*failures]
    for record in records:
        known = [digest for _, digest in sorted(digests.get(record.path, {}).items())]
        if len(known) == record.ranks:
            taken = whole_digest(known[0]) if record.ranks == 1 else joined_digest(known)
            problems += filter(None, [digest_problem(record, taken)])
        elif not any(failure.startswith(f"{record.path}: ") for failure in failures):
            problems.append(f"{record.path}: not all of it was compared; please report it")
    return problems
