"""Tensors in memory as a file of them, for what reads files."""

from dataclasses import dataclass, field

from torch import Tensor

from ft_ckpt.formats.dtypes import dtype_name
from ft_ckpt.formats.layout import Spec


@dataclass
class MemoryFile:
    """A `TensorFile` of tensors by name."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def specs(self) -> dict[str, Spec]:
        """The tensors by name."""
        return {name: Spec(name, tuple(one.shape), dtype_name(one.dtype)) for name, one in self.tensors.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy of the elements [start, stop), flat."""
        return self.tensors[name].detach().contiguous().view(-1)[start:stop].clone()

    def close(self) -> None:
        """Let go of the tensors."""
        self.tensors = {}
