"""Files that are compared with their digests while they are first read, so that each is read once.

Bytes that go to their places before all of them are compared are good only if the comparison ends well: whoever reads
so asks for the problems at the end, and throws away what was made of a damaged file.
"""

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from os import cpu_count

from ft_ckpt.errors import CorruptError
from ft_ckpt.storage.digests import FileRecord, RunningDigest, digest_problem


@dataclass(eq=False)
class FileProof:
    """The comparison of one file with the digest in its record; due until it was made. Of one thread."""

    record: FileRecord
    read_digest: Callable[[], str]  # reads the file for it; of one that cannot be read, words that no digest equals
    is_due: bool = True
    problem: str | None = None

    def settle(self) -> None:
        """Compare now, if that is still due. Raises CorruptError when the file is not the one that was committed."""
        self.find_problem()
        if self.problem is not None:
            raise CorruptError(self.problem)

    def find_problem(self) -> str | None:
        """What is wrong with the file; it is read for that if the comparison is still due."""
        if self.is_due:
            self.conclude(self.read_digest())
        return self.problem

    def conclude(self, digest: str) -> None:
        """End the comparison with the digest that was found."""
        self.is_due, self.problem = False, digest_problem(self.record, digest)


@dataclass(eq=False)
class PassingDigest:
    """The digest of a file that is read from front to back; what comes a second time is passed over."""

    proof: FileProof
    running: RunningDigest = field(init=False)
    at: int = 0  # the next byte

    def __post_init__(self) -> None:
        record = self.proof.record
        self.running = RunningDigest(record.size_bytes, record.cuts, record.ranks)

    def take(self, start: int, content: memoryview) -> None:
        """The bytes of the file from `start` on, which is not behind the end of those before."""
        fresh = content[max(self.at - start, 0) :]
        if fresh:
            self.running.update(fresh)
            self.at = start + len(content)

    def conclude(self) -> None:
        """All bytes have come by."""
        self.proof.conclude(self.running.text())


def find_late_problems(proofs: Collection[FileProof]) -> list[str]:
    """What is wrong with files, a line each; those whose comparison is still due are read for it, several at once."""
    with ThreadPoolExecutor(min(8, cpu_count() or 1)) as pool:  # hashing and reading both let other threads run
        found = list(pool.map(FileProof.find_problem, proofs))
    return [problem for problem in found if problem is not None]
