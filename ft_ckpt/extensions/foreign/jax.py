"""Reads checkpoints of JAX libraries: orbax folders (zarr arrays, OCDBT stores) and flax msgpack
files.

The tree of orbax is in its metadata; tensorstore reads its arrays, a few rows at a time, and only
from files below the folder. Names of arrays are keys, joined with dots as by orbax, with slashes
for flax. Nothing is executed.
"""

import json
import math
import operator
import re
import struct
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ft_ckpt.errors import ConfigError, CorruptError, damaged_input, listing, shown
from ft_ckpt.formats import (
    FREE_BYTES,
    ITEM_BYTES,
    MOST_LEVELS,
    IndexedFile,
    Node,
    RawFile,
    Span,
    SpanFile,
    Spec,
    TensorIndex,
    begins_with_header,
    checked_sizes,
)
from ft_ckpt.messages import install_extra
from ft_ckpt.storage import Place, check_files_inside, is_inside, local_folder, read_text

_METADATA, _STORE = "_METADATA", "manifest.ocdbt"
_ARRAYS = ("jax.Array", "np.ndarray")  # types of values that are stored as arrays


def load_tensorstore() -> Any:
    """The tensorstore package. Raises ConfigError where it is not installed."""
    try:
        import tensorstore  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"orbax checkpoints need tensorstore ({error}); {install_extra('orbax')}"
        ) from error
    return tensorstore


class OrbaxFile:
    """The arrays of a checkpoint, read by tensorstore in ranges of rows."""

    def __init__(self, source: str, arrays: Mapping[str, Any], skipped: list[str]) -> None:
        self.source, self.skipped, self.room = source, skipped, ExitStack()
        self.arrays: dict[str, Any] = {}
        self.specs: dict[str, Spec] = {}
        for name, array in arrays.items():
            spec = Spec(name, tuple(array.shape), array.dtype.name)
            if spec.dtype not in ITEM_BYTES:
                self.skipped.append(f"{name}: {spec.dtype}, which torch has not")
                continue
            chunk_bytes = (
                math.prod(array.chunk_layout.read_chunk.shape or ()) * ITEM_BYTES[spec.dtype]
            )
            if chunk_bytes > spec.size_bytes + FREE_BYTES:
                raise CorruptError(
                    f"{name}: chunks of {chunk_bytes:,} bytes in a tensor of {spec.size_bytes:,}"
                )
            self.specs[name], self.arrays[name] = spec, array

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of tensor `name`: 1-D, on the CPU.

        Raises CorruptError for a damaged array.
        """
        spec = self.specs[name]
        stop, dtype = spec.numel if stop is None else stop, getattr(torch, spec.dtype)
        if stop <= start:
            return torch.empty(0, dtype=dtype, device="cpu")
        row = math.prod(spec.shape[1:])
        first = start // row
        part = self.arrays[name][first : -(-stop // row)] if spec.shape else self.arrays[name]
        try:
            found = np.ascontiguousarray(part.read().result()).reshape(-1)
        except ValueError as error:
            raise CorruptError(
                f"{self.source}: {name} cannot be read ({shown(error)}); use another copy"
            ) from error
        return torch.from_numpy(found.view(np.uint8).copy()).view(dtype)[
            start - first * row : stop - first * row
        ]

    def close(self) -> None:
        self.arrays = {}
        self.room.close()


def orbax_folder(place: Place) -> Place | None:
    """The folder with the tree: `place`, or the only one in it (a step with one item); None if
    there is none.
    """
    inner = [Place(place.folder, each.name) for each in place.folder.list_folder().folders]
    found = [one for one in (place, *inner) if one.folder.stat(_METADATA) is not None]
    return found[0] if found[:1] == [place] or len(found) == 1 else None


def open_orbax(place: Place) -> OrbaxFile:
    """The arrays of the checkpoint folder `place`; other values are listed in `skipped`.

    Raises ConfigError where tensorstore is not installed, CorruptError when the checkpoint is
    damaged.
    """
    tensorstore, store = load_tensorstore(), place.folder
    with damaged_input(f"{place.basename}: a checkpoint of orbax"), ExitStack() as opening:
        document = json.loads(read_text(store, _METADATA))
        values, skipped = _tree_values(document)
        check_files_inside(store)
        folder = opening.enter_context(local_folder(place))  # tensorstore needs a path
        driver, in_store = (
            "zarr3" if document.get("use_zarr3") else "zarr",
            store.stat(_STORE) is not None,
        )
        # else chunks of zeros are not stored
        has_all = bool(document.get("store_array_data_equal_to_fill_value"))
        common = {"driver": driver, "fill_missing_data_reads": not has_all}
        coming = {
            name: tensorstore.open(
                {**common, "kvstore": _array_place(folder, name, in_store)}, read=True
            )
            for name in values
        }
        arrays = {name: future.result() for name, future in coming.items()}
        skipped += _check_chunks(arrays, values, has_all)
        found = OrbaxFile(place.basename, arrays, skipped)
        found.room = opening.pop_all()
    return found


def _tree_values(document: Any) -> tuple[dict[str, Any], list[str]]:
    """The names of all arrays in the tree, each with the shape that one process wrote or None, and
    all other values.
    """
    arrays, skipped = dict[str, Any](), []
    for entry in document["tree_metadata"].values():
        name = ".".join(str(key["key"]) for key in entry["key_metadata"])
        kind = str(entry["value_metadata"]["value_type"])
        if kind not in _ARRAYS:
            skipped.append(f"{name}: {kind}")
        elif not is_inside(name):
            raise CorruptError(f"{name!r:.200}: an array outside of the folder")
        else:
            arrays[name] = entry["value_metadata"].get("write_shape")
    return arrays, skipped


def _check_chunks(
    arrays: Mapping[str, Any], written: Mapping[str, Any], has_all: bool
) -> list[str]:
    """A line for each array with missing chunks, which are read as zeros.

    Raises CorruptError listing arrays whose chunks do not match their shape; with `has_all`, also
    for missing chunks.
    """
    listed = {name: array.kvstore.list() for name, array in arrays.items()}
    wrong, left_out = [], []
    for name, array in arrays.items():
        shape, steps, part = array.shape, array.chunk_layout.write_chunk.shape or (), written[name]
        grid = tuple(-(-size // step) for size, step in zip(shape, steps, strict=True))
        count, keys = math.prod(grid), listed[name].result()
        others = [
            key for key in keys if not key.rpartition(b"/")[2].startswith((b".z", b"zarr.json"))
        ]
        stored = len({place for key in others if (place := _chunk_place(key, grid)) is not None})
        if stored < len(others):
            wrong.append(
                f"{name}: {len(others) - stored} files that are none of its {count} chunks"
            )
        if stored > count or (has_all and stored < count):
            wrong.append(
                f"{name}: {stored} chunks are stored, expected {count} of shape {list(shape)}"
            )
        elif stored < count:
            left_out.append(
                f"{name}: {count - stored} of {count} chunks not stored, as if "
                "zeros, which are read"
            )
        pairs = zip(shape, part or shape, strict=False)
        if part is not None and (
            len(part) != len(shape) or any(size % max(1, step) for size, step in pairs)
        ):
            wrong.append(f"{name}: of shape {list(shape)}, written in parts of {part}")
    if wrong:
        raise CorruptError(f"{listing(wrong)}; use another copy")
    return left_out


def _chunk_place(key: bytes, grid: tuple[int, ...]) -> tuple[int, ...] | None:
    """The grid index of the chunk stored under `key` ("0.1", "0/1", "c/0/1"); None for other
    keys.
    """
    text = key.decode("utf-8", "replace").removeprefix("c").lstrip("./")
    numbers = re.split(r"[./]", text) if text else []
    if not all(number.isdecimal() and (number == "0" or number[0] != "0") for number in numbers):
        return None
    place = tuple(map(int, numbers)) if grid else ()  # zarr 2 stores a scalar as "0"
    fits = len(place) == len(grid) and all(map(operator.lt, place, grid))
    return place if fits else None


def _array_place(folder: Path, name: str, in_store: bool) -> dict[str, Any]:
    where = f"{folder.absolute()}/"
    if in_store:
        return {"driver": "ocdbt", "base": {"driver": "file", "path": where}, "path": f"{name}/"}
    return {"driver": "file", "path": f"{where}{name}/"}


_AHEAD_BYTES = 64 << 10
_MOST_TEXT_BYTES = 1 << 20  # of a key or another value that is not an array
_MOST_VALUES = 1 << 20  # in a file, arrays included
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
_PIECES = "__msgpack_chunked_array__"
_NUMBERS = {  # by the first byte, big-endian
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
_SIZED = {  # by the first byte: kind of the value, and the number of bytes of its size
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
_FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}  # by the first byte: size of an extension


def is_flax(file: RawFile) -> bool:
    """True when an open file begins with a MessagePack map whose first key is a string."""
    head = bytes(file.bytes(0, min(16, file.size_bytes)))
    skip = {0xDE: 3, 0xDF: 5}.get(head[0], 1) if head else 0
    is_dict = bool(head) and (0x81 <= head[0] <= 0x8F or head[0] in (0xDE, 0xDF))
    is_text = len(head) > skip and (0xA0 <= head[skip] <= 0xBF or 0xD9 <= head[skip] <= 0xDB)
    return is_dict and is_text and not begins_with_header(head)


def open_flax(raw: RawFile, verify: bool = False) -> IndexedFile:
    """The arrays of a file, named by their keys joined with slashes, and their tree.

    Raises CorruptError when the file is damaged, or contains anything but arrays and plain values.
    """
    with damaged_input(f"{raw.name}: MessagePack of flax"):
        walk = _ArrayWalk(raw)
        root = walk.read_node("", 0)
        if walk.at != raw.size_bytes:
            raise CorruptError(f"{raw.size_bytes - walk.at} bytes after its end")
        file = IndexedFile(raw, TensorIndex(walk.rows, root, {}), verify)
        file.readers = walk.readers
    return file


class _ArrayWalk:
    """Parses a file: its tree, and the offsets of its arrays, whose bytes are skipped."""

    def __init__(self, raw: RawFile) -> None:
        self.raw, self.at, self.count = raw, 0, 0
        self.rows: dict[str, Any] = {}
        self.readers: dict[str, Callable[[int, int], Any]] = {}
        self.ahead, self.begin = b"", 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes. Raises CorruptError at the end of the file."""
        if self.at < self.begin or self.at + count > self.begin + len(self.ahead):
            left = max(0, self.raw.size_bytes - self.at)
            self.begin, self.ahead = (
                self.at,
                bytes(self.raw.bytes(self.at, min(left, max(count, _AHEAD_BYTES)))),
            )
        found = self.ahead[self.at - self.begin :][:count]
        if len(found) < count:
            raise CorruptError(
                f"ends at byte {self.raw.size_bytes}, {count} bytes expected at {self.at}"
            )
        self.at += count
        return found

    def read_node(self, name: str, depth: int) -> Node:
        """The next value, with everything in it."""
        self.count += 1
        if depth > MOST_LEVELS or self.count > _MOST_VALUES:
            raise CorruptError(f"over {MOST_LEVELS} levels deep, or over {_MOST_VALUES:,} values")
        kind, size = self._read_head()
        if kind == "dict":
            return self._read_dict(name, size, depth)
        if kind == "list":
            children = [
                self.read_node(f"{name}/{place}".lstrip("/"), depth + 1) for place in range(size)
            ]
            return Node("list", None, (), tuple(children))
        return (
            self._read_extension(name, size)
            if kind == "extension"
            else Node("value", self._read_plain(kind, size))
        )

    def _read_head(self) -> tuple[str, Any]:
        """The kind of the next value and its size; for numbers, booleans and None its value
        instead.
        """
        (first,) = self.take(1)
        for low, high, kind in ((0x80, 0x8F, "dict"), (0x90, 0x9F, "list"), (0xA0, 0xBF, "text")):
            if low <= first <= high:
                return kind, first - low
        if first < 0x80 or first >= 0xE0:
            return "value", first if first < 0x80 else first - 256
        if first in _PLAIN:
            return "value", _PLAIN[first]
        if first in _NUMBERS:
            return "value", struct.unpack(
                _NUMBERS[first], self.take(struct.calcsize(_NUMBERS[first]))
            )[0]
        if first in _FIXED:
            return "extension", _FIXED[first]
        if first not in _SIZED:
            raise CorruptError(f"byte {first:#x} at {self.at - 1}, which begins no value")
        kind, width = _SIZED[first]
        size = int.from_bytes(self.take(width), "big")
        if size > self.raw.size_bytes - self.at:  # each element takes at least one byte
            raise CorruptError(
                f"a {kind} of {size:,} at byte {self.at}, the file has {self.raw.size_bytes:,}"
            )
        return kind, size

    def _read_plain(self, kind: str, size: Any) -> Any:
        if kind not in ("text", "bytes"):
            return size
        if size > _MOST_TEXT_BYTES:
            raise CorruptError(f"{kind} of {size:,} bytes at byte {self.at}")
        found = self.take(size)
        return found.decode("utf-8") if kind == "text" else found

    def _expect(self, *wanted: str) -> Any:
        """The size of a value of the `wanted` kinds, or the value.

        Raises CorruptError for another kind.
        """
        kind, size = self._read_head()
        if kind not in wanted:
            raise CorruptError(f"a {kind} at byte {self.at}, expected {' or '.join(wanted)}")
        return self._read_plain(kind, size) if "text" in wanted else size

    def _read_dict(self, name: str, size: int, depth: int) -> Node:
        keys, children, seen = [], [], set()
        before = len(self.rows)
        for _ in range(size):
            key = self._expect("text", "value")
            if type(key) not in (str, int) or key in seen:
                raise CorruptError(
                    f"{name or 'the file'}: key {key!r:.80}, expected texts and numbers, each once"
                )
            seen.add(key)
            keys.append(Node("value", key))
            children.append(self.read_node(f"{name}/{key}".lstrip("/"), depth + 1))
        whole = {key.value: child for key, child in zip(keys, children, strict=True)}
        if _PIECES in whole:
            return self._join_pieces(name, whole, list(self.rows)[before:])
        return Node("dict", None, tuple(keys), tuple(children))

    def _read_extension(self, name: str, size: int) -> Node:
        (kind,) = self.take(1)
        end = self.at + size
        if kind == _COMPLEX:
            if self._expect("list") != 2:
                raise CorruptError(f"{name}: a complex number of other than two parts")
            node = Node(
                "value", complex(float(self._expect("value")), float(self._expect("value")))
            )
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
        self._add_row(name, dtype, shape, self.at)
        self.at += size
        return Node("tensor", len(self.rows) - 1)

    def _add_row(self, name: str, dtype: str, shape: tuple[int, ...], start: int) -> None:
        if (name or "array") in self.rows:
            raise CorruptError(f"{name}: several arrays of this name")
        self.rows[name or "array"] = [dtype, shape, start, "", len(self.rows)]

    def _join_pieces(self, name: str, whole: Mapping[Any, Node], parts: list[str]) -> Node:
        """The array whose pieces were just read."""
        sizes = {int(key.value): child.value for key, child in _items(whole["shape"])}
        shape = checked_sizes([sizes[place] for place in range(len(sizes))])
        order = {int(key.value): child for key, child in _items(whole["chunks"])}
        rows = [self.rows.pop(part) for part in parts]
        dtypes, counts = {row[0] for row in rows}, [math.prod(row[1]) for row in rows]
        if (
            sorted(order) != list(range(len(rows)))
            or len(dtypes) != 1
            or sum(counts) != math.prod(shape)
        ):
            raise CorruptError(f"{name}: its pieces do not fill {list(shape)}")
        by_leaf = {
            row[4]: Span(self.raw, row[2], count) for row, count in zip(rows, counts, strict=True)
        }
        spans = [by_leaf[order[place].value] for place in range(len(rows))]
        self._add_row(name, dtypes.pop(), shape, 0)
        spec = Spec(name, shape, self.rows[name][0])
        self.readers[name] = partial(SpanFile({name: spec}, {name: spans}).read, name)
        return Node("tensor", len(self.rows) - 1)


def _items(node: Node) -> list[tuple[Node, Node]]:
    if node.kind != "dict":
        raise CorruptError("an invalid list of pieces")
    return list(zip(node.keys, node.children, strict=True))
