"""Reads MessagePack files of flax.

The values around the arrays are parsed. The bytes of arrays are skipped, and read from the file
when they are needed. Names are keys, joined with slashes. Nothing is executed.
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.errors import CorruptError, damaged_input
from ft_ckpt.formats import ITEM_BYTES, checked_sizes, dtype_of
from ft_ckpt.formats.files import RawFile
from ft_ckpt.formats.index import IndexedFile, TensorIndex
from ft_ckpt.formats.safetensors import begins_with_header
from ft_ckpt.formats.trees import MAX_LEVELS, Node

_AHEAD_BYTES = 64 << 10
_MAX_TEXT_BYTES = 1 << 20  # limit of a key, or of another value that is not an array
_MAX_VALUES = 1 << 20  # limit of the values in a file, with the arrays
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3  # extension types of flax
_PIECES = "__msgpack_chunked_array__"
_ROOT = "array"  # the name of an array that is the whole file
# Kinds of values by their first byte: ranges that contain the size, numbers (big-endian), plain
# values, sizes of a given width (in bytes), and extensions of a given size.
_RANGES = ((0x80, 0x8F, "dict"), (0x90, 0x9F, "list"), (0xA0, 0xBF, "text"))
_NUMBERS = {
    0xCA: ">f",
    0xCB: ">d",
    0xCC: ">B",
    0xCD: ">H",
    0xCE: ">I",
    0xCF: ">Q",
    0xD0: ">b",
    0xD1: ">h",
    0xD2: ">i",
    0xD3: ">q",
}
_PLAIN = {0xC0: None, 0xC2: False, 0xC3: True}
_SIZED = {
    0xC4: ("bytes", 1),
    0xC5: ("bytes", 2),
    0xC6: ("bytes", 4),
    0xD9: ("text", 1),
    0xDA: ("text", 2),
    0xDB: ("text", 4),
    0xDC: ("list", 2),
    0xDD: ("list", 4),
    0xDE: ("dict", 2),
    0xDF: ("dict", 4),
    0xC7: ("extension", 1),
    0xC8: ("extension", 2),
    0xC9: ("extension", 4),
}
_FIXED_EXTENSIONS = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def is_flax(file: RawFile) -> bool:
    """Check whether a file begins with a MessagePack map whose first key is a string."""
    head = bytes(file.bytes(0, min(16, file.size_bytes)))
    if not head or not (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF)):
        return False
    key_start = {0xDE: 3, 0xDF: 5}.get(head[0], 1)
    if len(head) <= key_start:
        return False
    is_text = 0xA0 <= head[key_start] <= 0xBF or 0xD9 <= head[key_start] <= 0xDB
    return is_text and not begins_with_header(head)


def open_flax(raw: RawFile, verify: bool = False) -> IndexedFile:
    """Open the arrays of a file, named by their keys joined with slashes, and their tree.

    Raises CorruptError when the file is damaged, or contains anything but arrays and plain values.
    """
    with damaged_input(f"{raw.name}: MessagePack of flax"):
        parser = _Parser(raw)
        root = parser.read_node("", 0)
        if parser.at != raw.size_bytes:
            raise CorruptError(f"{raw.size_bytes - parser.at} bytes after its end")
        file = IndexedFile(raw, TensorIndex(parser.rows, root, {}), verify)
        file.readers = parser.readers
    return file


class _Parser:
    """Parses a file: its tree, and the offsets of its arrays, whose bytes are skipped."""

    def __init__(self, raw: RawFile) -> None:
        self.raw = raw
        self.at = 0  # the next byte
        self.value_count = 0
        self.rows: dict[str, Any] = {}
        self.readers: dict[str, Callable[[int, int], Any]] = {}
        self._buffer, self._buffer_start = b"", 0

    def _take(self, count: int) -> bytes:
        """Return the next `count` bytes. Raises CorruptError at the end of the file."""
        buffer_end = self._buffer_start + len(self._buffer)
        if self.at < self._buffer_start or self.at + count > buffer_end:
            remaining = max(0, self.raw.size_bytes - self.at)
            self._buffer_start = self.at
            self._buffer = bytes(self.raw.bytes(self.at, min(remaining, max(count, _AHEAD_BYTES))))
        first = self.at - self._buffer_start
        data = self._buffer[first : first + count]
        if len(data) < count:
            raise CorruptError(
                f"ends at byte {self.raw.size_bytes}, {count} bytes expected at {self.at}"
            )
        self.at += count
        return data

    def read_node(self, name: str, depth: int) -> Node:
        """Read the next value, with everything in it."""
        self.value_count += 1
        if depth > MAX_LEVELS or self.value_count > _MAX_VALUES:
            raise CorruptError(f"over {MAX_LEVELS} levels deep, or over {_MAX_VALUES:,} values")
        kind, size = self._read_head()
        if kind == "dict":
            return self._read_dict(name, size, depth)
        if kind == "list":
            children = [self.read_node(_joined(name, number), depth + 1) for number in range(size)]
            return Node("list", None, (), tuple(children))
        if kind == "extension":
            return self._read_extension(name, size)
        return Node("value", self._read_plain(kind, size))

    def _read_head(self) -> tuple[str, Any]:
        """Read the kind of the next value and its size.

        For numbers, booleans and None, the second result is the value instead.
        """
        (first,) = self._take(1)
        for low, high, kind in _RANGES:
            if low <= first <= high:
                return kind, first - low

        if first < 0x80 or first >= 0xE0:
            return "value", first if first < 0x80 else first - 256
        if first in _PLAIN:
            return "value", _PLAIN[first]
        if first in _NUMBERS:
            layout = _NUMBERS[first]
            (number,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
            return "value", number

        if first in _FIXED_EXTENSIONS:
            return "extension", _FIXED_EXTENSIONS[first]
        if first not in _SIZED:
            raise CorruptError(f"byte {first:#x} at {self.at - 1}, which begins no value")
        kind, width = _SIZED[first]
        size = int.from_bytes(self._take(width), "big")
        if size > self.raw.size_bytes - self.at:  # each element takes at least one byte
            raise CorruptError(
                f"a {kind} of {size:,} at byte {self.at}, the file has {self.raw.size_bytes:,}"
            )

        return kind, size

    def _read_plain(self, kind: str, size: Any) -> Any:
        if kind not in ("text", "bytes"):
            return size
        if size > _MAX_TEXT_BYTES:
            raise CorruptError(f"{kind} of {size:,} bytes at byte {self.at}")
        data = self._take(size)
        return data.decode("utf-8") if kind == "text" else data

    def _expect(self, *kinds: str) -> Any:
        """Read the size of a value of these kinds, or the value.

        Raises CorruptError for another kind.
        """
        kind, size = self._read_head()
        if kind not in kinds:
            raise CorruptError(f"a {kind} at byte {self.at}, expected {' or '.join(kinds)}")
        return self._read_plain(kind, size) if "text" in kinds else size

    def _read_dict(self, name: str, size: int, depth: int) -> Node:
        children: dict[Any, Node] = {}
        rows_before = len(self.rows)
        for _ in range(size):
            key = self._expect("text", "value")
            if type(key) not in (str, int) or key in children:
                raise CorruptError(
                    f"{name or 'the file'}: key {key!r:.80}, expected texts and numbers, each once"
                )
            children[key] = self.read_node(_joined(name, key), depth + 1)
        if _PIECES in children:
            return self._join_pieces(name, children, list(self.rows)[rows_before:])
        keys = tuple(Node("value", key) for key in children)
        return Node("dict", None, keys, tuple(children.values()))

    def _read_extension(self, name: str, size: int) -> Node:
        (kind,) = self._take(1)
        end = self.at + size
        if kind == _COMPLEX:
            if self._expect("list") != 2:
                raise CorruptError(f"{name}: a complex number of other than two parts")
            real, imaginary = float(self._expect("value")), float(self._expect("value"))
            node = Node("value", complex(real, imaginary))
        elif kind in (_ARRAY, _SCALAR):
            node = self._read_array(name)
        else:
            raise CorruptError(f"{name}: extension type {kind}, which flax does not write")

        if self.at != end:
            raise CorruptError(f"{name}: ends at byte {self.at}, expected {end}")
        return node

    def _read_array(self, name: str) -> Node:
        if self._expect("list") != 3:
            raise CorruptError(f"{name}: an array of other than shape, type and bytes")
        shape = checked_sizes([self._expect("value") for _ in range(self._expect("list"))])
        label = self._expect("text", "bytes")
        dtype = label.decode() if isinstance(label, bytes) else label
        size = self._expect("bytes")
        if dtype not in ITEM_BYTES or size != math.prod(shape) * ITEM_BYTES[dtype]:
            raise CorruptError(
                f"{name}: {size:,} bytes for {dtype!r:.40} {shape}, expected a "
                "type of torch and its size"
            )

        if self.at + size > self.raw.size_bytes:
            raise CorruptError(
                f"{name}: bytes {self.at} to {self.at + size}, the file has {self.raw.size_bytes}"
            )

        node = self._add_row(name, dtype, shape, self.at)
        self.at += size
        return node

    def _add_row(self, name: str, dtype: str, shape: tuple[int, ...], start: int) -> Node:
        row_name = name or _ROOT
        if row_name in self.rows:
            raise CorruptError(f"{name}: several arrays of this name")
        number = len(self.rows)
        self.rows[row_name] = [dtype, shape, start, "", number]
        return Node("tensor", number)

    def _join_pieces(self, name: str, whole: Mapping[Any, Node], pieces: Sequence[str]) -> Node:
        """Return the node of an array that flax has split into pieces.

        `pieces` are the names of their rows. The rows are replaced by one row of the array.
        """
        sizes = {int(key.value): child.value for key, child in _items_of(whole["shape"])}
        shape = checked_sizes([sizes[dim] for dim in range(len(sizes))])
        order = {int(key.value): child for key, child in _items_of(whole["chunks"])}
        spans: dict[int, _Span] = {}
        dtypes: set[str] = set()
        for piece in pieces:
            dtype, piece_shape, start, _, number = self.rows.pop(piece)
            dtypes.add(dtype)
            spans[number] = _Span(start, math.prod(piece_shape))

        count = sum(span.count for span in spans.values())
        are_all = sorted(order) == list(range(len(spans)))
        if not are_all or len(dtypes) != 1 or count != math.prod(shape):
            raise CorruptError(f"{name}: its pieces do not fill {list(shape)}")
        dtype = dtypes.pop()
        ordered = [spans[order[number].value] for number in range(len(spans))]
        self.readers[name or _ROOT] = partial(_read_spans, self.raw, ordered, dtype_of(dtype))
        return self._add_row(name, dtype, shape, 0)


def _joined(name: str, key: object) -> str:
    return f"{name}/{key}".lstrip("/")


def _items_of(node: Node) -> list[tuple[Node, Node]]:
    if node.kind != "dict":
        raise CorruptError("an invalid list of pieces")
    return list(zip(node.keys, node.children, strict=True))


@dataclass(frozen=True)
class _Span:
    """Consecutive elements of an array."""

    start_byte: int
    count: int


def _read_spans(
    raw: RawFile, spans: Sequence[_Span], dtype: torch.dtype, start: int, stop: int
) -> Tensor:
    """Read elements [start, stop) of the array that the spans make up."""
    parts = []
    first = 0  # index of the span's first element in the array
    for span in spans:
        low = max(start, first) - first
        high = min(stop, first + span.count) - first
        if low < high:
            parts.append(raw.tensor(span.start_byte + low * dtype.itemsize, high - low, dtype))
        first += span.count
    if not parts:
        return torch.empty(0, dtype=dtype, device="cpu")
    return parts[0] if len(parts) == 1 else torch.cat(parts)
