"""Types that all tensor formats share: the description of a tensor, and the layout of a file.

A format returns a `Layout` before the first tensor byte is available, so that one writer writes the
files of all formats.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ft_ckpt.errors import CorruptError
from ft_ckpt.schema import Count

if TYPE_CHECKING:
    from ft_ckpt.storage.io import Region

# torch's name of a dtype -> bytes per element
ITEM_BYTES = {
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

    Bytes between tensors are zero, unless the format sets `weave`.

        header | tensor 0 | zeros | tensor 1 | zeros | ... | trailer
    """

    header: bytes
    # the tensors in file order, and the offset of the first byte of each in the file
    specs: tuple[Spec, ...]
    starts: tuple[int, ...]
    # size of the whole file
    size_bytes: int
    trailer_start: int | None = None
    # Makes the trailer from the xxh3-128 digests of the tensors by name. Its size is known before.
    trailer: Callable[[Mapping[str, bytes]], bytes] | None = None
    # Adds the bytes between tensors if they depend on the tensors, such as checksums: takes the
    # regions of the tensors, and yields all regions of the file.
    weave: "Callable[[Iterable[Region]], Iterator[Region]] | None" = None


@dataclass(frozen=True)
class TensorRecord:
    """One stored tensor: its location in a file, shape and dtype."""

    # the name in the file
    name: str
    shape: tuple[Count, ...]
    # torch's name without "torch.", such as "bfloat16"
    dtype: str
    # path of a FileRecord
    file: str
    # The tensor has bytes [start, end) of the file. Both are 0 for a compressed tensor.
    start: Count
    end: Count


def ceil_div(number: int, divisor: int) -> int:
    """Return `number` / `divisor`, rounded up; for example, 9 bytes need 3 blocks of 4 bytes."""
    return -(-number // divisor)


def checked_sizes(values: Iterable[Any]) -> tuple[int, ...]:
    """Return a shape, or other sizes and offsets, that were read from a file.

    Raises CorruptError unless all are non-negative integers.
    """
    sizes = tuple(values)
    for size in sizes:
        if type(size) is not int or not 0 <= size < 1 << 62:
            raise CorruptError("invalid sizes or offsets")
    return sizes
