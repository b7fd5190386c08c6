"""A file of tensors as a manifest lists them, opened by the first that reads of it."""

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
    """A file of tensors that a rank opens when it reads of it; a `TensorFile`."""

    where: str
    specs: Mapping[str, Spec]
    make: Callable[[], TensorFile]
    proof: FileProof | None = None  # what this rank is to compare of it

    @cached_property
    def file(self) -> TensorFile:
        """The file itself. Raises CorruptError when its tensors are not those listed."""
        opened = self.make()
        odd = [name for name, spec in self.specs.items() if opened.specs.get(name) != spec]
        if odd:
            opened.close()
            raise CorruptError(f"{self.where}: {listing(odd, ', ')}: not as the manifest says; use another checkpoint")
        return opened

    @property
    def verify(self) -> bool:
        """Whether reading compares digests of its own."""
        return bool(getattr(self.file, "verify", False))

    def runs(self, name: str) -> list[ByteRun] | None:
        """The byte ranges of a tensor, in order; None where they are not those of its elements."""
        ask = getattr(self.file, "runs", None)
        return None if ask is None else ask(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of the tensor."""
        return self.file.read(name, start, stop)

    def close(self) -> None:
        """Close the file, if it was opened."""
        if "file" in vars(self):
            self.file.close()


def due_proof(file: TensorFile) -> FileProof | None:
    """What this rank has still to compare of the file."""
    proof = file.proof if isinstance(file, ListedFile) else None
    return proof if proof is not None and proof.is_due else None
