"""A file of tensors as a manifest lists them: opened, and compared with its digest, by the first that reads of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ft_ckpt.errors import CorruptError, listing
from ft_ckpt.formats.layout import Spec, TensorFile
from ft_ckpt.storage.file_proof import FileProof
from ft_ckpt.storage.read_ahead import ByteRun


@dataclass(eq=False)
class ListedFile:
    """A file of tensors, of which nothing is handed out before its digest is right; a `TensorFile`."""

    where: str
    specs: Mapping[str, Spec]
    make: Callable[[], TensorFile]
    proof: FileProof | None = None  # None: it was compared before

    @cached_property
    def unproved(self) -> TensorFile:
        """The file itself, for one who asks for the outcome of `proof` afterwards.

        Raises CorruptError when its tensors are not those listed.
        """
        opened = self.make()
        odd = [name for name, spec in self.specs.items() if opened.specs.get(name) != spec]
        if odd:
            opened.close()
            raise CorruptError(f"{self.where}: {listing(odd, ', ')}: not as the manifest says; use another checkpoint")
        return opened

    @property
    def verify(self) -> bool:
        """Whether reading compares digests of its own."""
        return bool(getattr(self.unproved, "verify", False))

    def runs(self, name: str) -> list[ByteRun] | None:
        """The byte ranges of a tensor, in order; None where they are not those of its elements."""
        self._settle_proof()
        ask = getattr(self.unproved, "runs", None)
        return None if ask is None else ask(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of the tensor. Raises CorruptError when the file is damaged."""
        self._settle_proof()
        return self.unproved.read(name, start, stop)

    def close(self) -> None:
        """Close the file, if it was opened."""
        if "unproved" in vars(self):
            self.unproved.close()

    def _settle_proof(self) -> None:
        if self.proof is not None:
            self.proof.settle()


def unproved_file(file: TensorFile) -> TensorFile:
    """The file itself where its digest may still be due, for one who asks for the outcome afterwards."""
    return file.unproved if isinstance(file, ListedFile) else file


def due_proof(file: TensorFile) -> FileProof | None:
    """The comparison of the file with its digest, if that is still due."""
    proof = file.proof if isinstance(file, ListedFile) else None
    return proof if proof is not None and proof.is_due else None
