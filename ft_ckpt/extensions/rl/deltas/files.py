"""Writes and reads the changed elements of a safetensors file, in pieces of limited size.

A piece is one file of a delta: deltas/PATH/00001.safetensors and so on; see `chains`. It has the
changes in one range of bytes of the file PATH. The head of a safetensors file is its JSON header
with the 8 bytes of its length before it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ft_ckpt.errors import CorruptError
from ft_ckpt.formats import ITEM_BYTES, Spec
from ft_ckpt.formats.safetensors import (
    HeaderEntry,
    SafetensorsHeader,
    lay_out_safetensors,
    parse_header,
)
from ft_ckpt.storage import Readable, read_range
from ft_ckpt.storage.digests import FileRecord, RunningDigest

_SLICE_BYTES = 4 << 20  # how much is compared at a time
_PIECE_BYTES = 8 << 20  # a piece ends as soon as its changes have this size
_INT32_ELEMENTS = 1 << 31


class DigestedFile:
    """An open safetensors file that is read once, in order, while its digest is computed."""

    def __init__(self, file: Readable, record: FileRecord) -> None:
        """Read the header. Raises CorruptError if the size is not that of the record."""
        self.file = file
        self.record = record
        self.running = RunningDigest(record.size_bytes, record.cuts, record.ranks)
        self.head = b""
        if file.size_bytes != record.size_bytes:
            refuse_other_bytes(file, record, self.running)
        self.header = parse_header(self._read_head, file.size_bytes)

    def read(self, start: int, size_bytes: int) -> bytes:
        """Read bytes. Each call must start where the last one ended."""
        content = read_range(self.file, start, size_bytes)
        self.running.update(memoryview(content))
        return content

    def check(self) -> None:
        """Raise CorruptError if the bytes are not those of the record."""
        refuse_other_bytes(self.file, self.record, self.running)

    def _read_head(self, start: int, size_bytes: int) -> bytes:
        content = self.read(start, size_bytes)
        self.head += content
        return content


def refuse_other_bytes(file: Readable, record: FileRecord, running: RunningDigest) -> None:
    """Raise CorruptError unless the file has the size and digest of its record."""
    if file.size_bytes != record.size_bytes or running.text() != record.digest:
        raise CorruptError(
            f"{file.where}: its bytes are not those that its manifest lists; use another checkpoint"
        )


def _in_file_order(header: SafetensorsHeader) -> list[tuple[str, HeaderEntry]]:
    return sorted(header.tensors.items(), key=lambda item: (item[1].start, item[1].end))


def is_alike(new: SafetensorsHeader, old: SafetensorsHeader) -> bool:
    """Check whether two files have tensors of the same names, shapes and dtypes, in one order.

    Returns False also for dtypes that are not supported.
    """
    new_tensors = [(name, *entry[:2]) for name, entry in _in_file_order(new)]
    old_tensors = [(name, *entry[:2]) for name, entry in _in_file_order(old)]
    are_supported = all(entry.dtype in ITEM_BYTES for entry in new.tensors.values())
    return new_tensors == old_tensors and are_supported


def changed_pieces(path: str, new: DigestedFile, old: DigestedFile) -> Iterator[bytes]:
    """Yield the contents of the pieces with the changes between two files; see `is_alike`.

    The pieces divide the bytes of the new file after its head. Only the heads may differ in size.
    """
    changes: dict[str, list[_Change]] = {}
    changed_bytes = 0
    piece_start = len(new.head)
    shift = len(new.head) - len(old.head)
    for name, entry in _in_file_order(new.header):
        width = ITEM_BYTES[entry.dtype]
        numel = Spec(name, entry.shape, entry.dtype).numel
        word = np.dtype(f"<u{width}")
        index = np.dtype("<i8" if numel >= _INT32_ELEMENTS else "<i4")
        for start in range(entry.start, entry.end, _SLICE_BYTES):
            size = min(_SLICE_BYTES, entry.end - start)
            new_words = np.frombuffer(new.read(start, size), word)
            old_words = np.frombuffer(old.read(start - shift, size), word)
            positions = np.flatnonzero(new_words != old_words)
            if positions.size:
                first = (start - entry.start) // width
                indices = (positions + first).astype(index)
                change = _Change(indices, new_words[positions], entry.dtype)
                changes.setdefault(name, []).append(change)
                changed_bytes += positions.size * (width + index.itemsize)

            if changed_bytes >= _PIECE_BYTES:
                yield _piece(path, changes, piece_start, start + size)
                changes = {}
                changed_bytes = 0
                piece_start = start + size

    if changes:
        yield _piece(path, changes, piece_start, new.file.size_bytes)


@dataclass(frozen=True)
class _Change:
    """Changed elements of a tensor.

    `indices` are their flat positions in ascending order. `words` are the new elements as unsigned
    integers of the same size.
    """

    indices: Any
    words: Any
    dtype: str


def _piece(path: str, changes: Mapping[str, list[_Change]], start: int, stop: int) -> bytes:
    """Return the content of the piece for bytes [start, stop) of the file `path`."""
    arrays: dict[str, Any] = {}
    specs = []
    for name, slices in changes.items():
        indices = np.concatenate([change.indices for change in slices])
        words = np.concatenate([change.words for change in slices])
        arrays[f"{name}.indices"] = indices
        arrays[f"{name}.values"] = words
        specs.append(Spec(f"{name}.indices", indices.shape, indices.dtype.name))
        specs.append(Spec(f"{name}.values", indices.shape, slices[0].dtype))
    metadata = {"format": "pt", "file": path, "start": str(start), "stop": str(stop)}
    layout = lay_out_safetensors(specs, metadata)
    contents = [arrays[spec.name].tobytes() for spec in layout.specs]
    return b"".join([layout.header, *contents])


@dataclass(frozen=True)
class Changes:
    """The changed elements of a tensor, which starts at byte `start` of the rebuilt file.

    `positions` are flat and ascending, `rows` the bytes of each element. Both are views of the
    content of one file of the delta.
    """

    start: int
    positions: Any
    rows: Any


@dataclass(eq=False)
class DeltaPiece:
    """An open piece, with the changes in bytes [start, stop) of the rebuilt file."""

    file: Readable
    header: SafetensorsHeader
    start: int
    stop: int

    @classmethod
    def of(cls, file: Readable) -> "DeltaPiece":
        """Read the header of a piece. Raises CorruptError if the file is no piece."""
        header = parse_header(lambda start, size: read_range(file, start, size), file.size_bytes)
        try:
            return cls(file, header, int(header.metadata["start"]), int(header.metadata["stop"]))
        except (KeyError, ValueError):
            raise CorruptError(f"{file.where}: not a file of a delta") from None

    def load(self, tensors: Mapping[str, HeaderEntry]) -> list[Changes]:
        """Read the changes of each tensor in the piece.

        `tensors` are those of the rebuilt file. Raises CorruptError for other tensors, and for
        positions outside of the tensor.
        """
        content = memoryview(read_range(self.file, 0, self.file.size_bytes))
        endings = [name for name in self.header.tensors if name.endswith(".indices")]
        names = sorted(name.removesuffix(".indices") for name in endings)
        return [self._changes_of(name, tensors.get(name), content) for name in names]

    def _changes_of(self, name: str, entry: HeaderEntry | None, content: memoryview) -> Changes:
        indices = self.header.tensors[f"{name}.indices"]
        values = self.header.tensors.get(f"{name}.values")
        are_positions = indices.dtype in ("int32", "int64") and len(indices.shape) == 1
        if entry is None or values is None or not are_positions:
            raise self._unknown_tensor(name)
        if values[:2] != (entry.dtype, indices.shape):
            raise self._unknown_tensor(name)
        width = ITEM_BYTES[entry.dtype]
        index = "<i4" if indices.dtype == "int32" else "<i8"
        positions = np.frombuffer(content[indices.start : indices.end], index)
        numel = (entry.end - entry.start) // width
        is_inside = not positions.size or (positions[0] >= 0 and positions[-1] < numel)
        if not is_inside or bool((positions[1:] <= positions[:-1]).any()):
            raise CorruptError(
                f"{self.file.where}: {name}: positions that are not ascending, or outside of it"
            )

        rows = np.frombuffer(content[values.start : values.end], np.uint8).reshape(-1, width)
        return Changes(entry.start, positions, rows)

    def _unknown_tensor(self, name: str) -> CorruptError:
        return CorruptError(
            f"{self.file.where}: {name}: changes of no such tensor; use an older checkpoint"
        )
