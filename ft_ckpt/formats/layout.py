"""Types of all tensor formats: the layout of a file, the description of a tensor, an open file.

A format returns a `Layout` before the first tensor byte is available; the writer is the same for
all formats.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ft_ckpt.errors import CorruptError
from ft_ckpt.schema import Count

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {  # torch's name of a dtype: bytes per element
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}


class Spec(NamedTuple):
    """A tensor as a file describes it: name, shape and type."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch."

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Layout:
    """A file before it is written: its header, the tensors in file order with their offsets, and
    its trailer.

    Bytes between tensors are zero. The trailer is made from the digests of the tensors (16 bytes of
    xxh3-128 by name); its size is known in advance.
    """

    header: bytes
    specs: tuple[Spec, ...]
    starts: tuple[int, ...]  # absolute, inclusive, ascending
    size_bytes: int  # of the whole file
    trailer_start: int | None = None
    trailer: Callable[[Mapping[str, bytes]], bytes] | None = None


def checked_sizes(given: Any) -> tuple[int, ...]:
    """A shape, or other sizes and offsets, read from a file.

    Raises CorruptError unless all are integers from 0 on.
    """
    found = tuple(given)
    if any(type(one) is not int or not 0 <= one < 1 << 62 for one in found):
        raise CorruptError("invalid sizes or offsets")
    return found


class TensorFile(Protocol):
    """An open file of tensors, of any format. Tensors are read on request."""

    @property
    def specs(self) -> Mapping[str, Spec]:
        """The tensors by name, in file order, without reading them."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> "torch.Tensor":
        """Flat elements [start, stop) of the tensor in row-major order: 1-D, on the CPU; only their
        bytes are read.

        Writes to the result never reach the file.
        """
        ...

    def close(self) -> None:
        """Close the file."""
        ...


@dataclass(frozen=True)
class TensorRecord:
    """One stored tensor: its location in a file, shape and dtype."""

    name: str  # as stored in the file
    shape: tuple[Count, ...]
    dtype: str  # torch's name without "torch.", e.g. "bfloat16"
    file: str  # path of a FileRecord
    # first byte in the file, inclusive; `start` and `end` are 0 for a compressed tensor
    start: Count
    end: Count  # end of its bytes in the file, exclusive
