"""Some tensors of an open file, under other names."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ft_ckpt.formats.layout import Spec, TensorFile
from ft_ckpt.storage.read_ahead import ByteRun


class RenamedFile:
    """The tensors of `file` that `names` lists, old names by new ones; `skipped` says what else is in it."""

    def __init__(self, file: TensorFile, names: Mapping[str, str], skipped: Sequence[str] = ()) -> None:
        self.file, self.names, self.skipped = file, names, tuple(skipped)
        self.specs: dict[str, Spec] = {new: file.specs[old]._replace(name=new) for new, old in names.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of tensor `name`: 1-D, on the CPU."""
        return self.file.read(self.names[name], start, stop)

    def runs(self, name: str) -> list[ByteRun] | None:
        """The byte ranges of tensor `name`; None when they do not lie in a file as they are."""
        ask = getattr(self.file, "runs", None)
        return None if ask is None else ask(self.names[name])

    def close(self) -> None:
        """Close the file."""
        self.file.close()
