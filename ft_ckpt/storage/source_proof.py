"""Compares the files of open checkpoints with their digests while they are read, and ahead of each commit.

Whoever holds a checkpoint open reads its files in a store that knows its `SourceProof`. A small file is compared when
it is opened. A larger one is digested while its bytes are read; those that were not read, or not in the order of the
file, are read for `prove_sources`. Each commit calls that first: nothing that was made of damaged files is committed.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ft_ckpt.errors import CheckpointError, CorruptError, damaged_input, listing
from ft_ckpt.storage.digests import SMALL_BYTES, FileRecord
from ft_ckpt.storage.file_proof import FileProof, read_late
from ft_ckpt.storage.local_file import LocalFile, Watch
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.store import Readable, Store

_OPEN = threading.local()  # its `proofs`: of the checkpoints that this thread holds open


class SourceProof:
    """The comparisons of the `files` of a checkpoint, which lie in `store`; due for each file that is opened."""

    def __init__(self, store: Store, files: Iterable[FileRecord]) -> None:
        self.url = store.url
        self._files = {
            store.where(file.path): FileProof(file, partial(store.open, file.path), range(file.ranks), is_wide=True)
            for file in files
        }
        self._opened: dict[str, FileProof] = {}

    def watch_file(self, where: str) -> Watch | None:
        """What is to be told of the bytes that are read of the file `where`; None for one that is compared already.

        Raises CorruptError when a small file is damaged, and as reading it does.
        """
        proof = self._files.get(where)
        if proof is None:
            return None
        if proof.is_due and proof.record.size_bytes < SMALL_BYTES:
            with damaged_input(where):
                proof.take_rest()
        self._opened[where] = proof
        if proof.failure is not None:
            raise CorruptError(f"{where.removesuffix(proof.record.path)}{proof.failure}; use another checkpoint")
        return proof.passing.take if proof.is_due else None

    def problems(self) -> list[str]:
        """What is wrong with the opened files, a line each; what was not read of them is read now."""
        return [f"{self.url}: {failure}" for failure in read_late([*self._opened.values()])[1]]


@dataclass(frozen=True)
class SourceFolder(LocalStore):
    """A folder of a checkpoint whose files are compared while they are read, where there is a `proof`."""

    proof: SourceProof | None = None

    def open(self, name: str) -> Readable:
        """Open a file, see `Store.open`. Raises CorruptError when a small one is damaged."""
        file = super().open(name)
        if self.proof is not None and isinstance(file, LocalFile):
            file.watch = self.proof.watch_file(self.where(name))
        return file


@contextmanager
def proving(proof: SourceProof) -> Iterator[None]:
    """Let commits of this thread compare the files of an open checkpoint while the block runs, and do so at its end.

    Raises CorruptError for damage, and in place of an error of a library that has read damaged files.
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
    """Compare what this thread has opened of the checkpoints that it holds open. Raises CorruptError for damage."""
    _refuse_damaged(vars(_OPEN).get("proofs", ()))


def _refuse_damaged(proofs: Iterable[SourceProof], cause: Exception | None = None) -> None:
    if problems := [problem for proof in proofs for problem in proof.problems()]:
        raise CorruptError(f"{listing(problems)}; use another checkpoint") from cause
