"""Types of all tensor formats: the description of a tensor, the layout of a file.

A format returns a `Layout` before the first tensor byte is available; the writer is the same for
all formats.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ft_ckpt.errors import CorruptError
from ft_ckpt.schema import Count

if TYPE_CHECKING:
    from ft_ckpt.storage.io import Region

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
    """A file before it is written: header, tensors in file order with their offsets, trailer.

    Bytes between tensors are zero, unless the format weaves others in.
    """

    header: bytes
    specs: tuple[Spec, ...]
    starts: tuple[int, ...]  # absolute, inclusive, ascending
    size_bytes: int  # of the whole file
    trailer_start: int | None = None
    # made from the xxh3-128 digests of the tensors by name; its size is known in advance
    trailer: Callable[[Mapping[str, bytes]], bytes] | None = None
    # all regions of the file from those of its tensors; for bytes between them that depend on them
    weave: "Callable[[Iterable[Region]], Iterator[Region]] | None" = None


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


def checked_sizes(values: Iterable[Any]) -> tuple[int, ...]:
    """Return a shape, or other sizes and offsets, that were read from a file.

    Raises CorruptError unless all are non-negative integers.
    """
    sizes = tuple(values)
    for size in sizes:
        if type(size) is not int or not 0 <= size < 1 << 62:
            raise CorruptError("invalid sizes or offsets")
    return sizes
