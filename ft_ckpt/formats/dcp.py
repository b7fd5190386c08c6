"""Reads checkpoints of torch.distributed.checkpoint: a folder with `.metadata` and `.distcp` files.

Source: the classes of `torch.distributed.checkpoint.metadata`. `.metadata` is a pickle, decoded without running code.
It lists the stored boxes of every tensor and their locations; each box is a small torch archive inside a file.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.errors import CorruptError, LoadError, damaged_input, listing
from ft_ckpt.formats.layout import ITEM_BYTES, Spec, checked_sizes
from ft_ckpt.formats.pickles import Passive
from ft_ckpt.formats.tensor_file import RawFile
from ft_ckpt.formats.torch_file import TensorPlace, kind_of_leaf, load_torch_pickle, load_torch_zip, row_major
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.scratch import check_files_inside
from ft_ckpt.storage.store import Store, is_inside

METADATA = ".metadata"
Places = tuple[int, ...]


@dataclass(frozen=True)
class _StoredBox:
    """A stored part of a tensor: its offsets in the tensor, its shape, and its location on disk."""

    offsets: Places
    sizes: Places
    path: str
    start: int
    size_bytes: int


class DcpFile:
    """The tensors of a distributed checkpoint, assembled from their boxes, a slice at a time."""

    def __init__(self, store: Store, specs: Mapping[str, Spec], boxes: Mapping[str, Sequence[_StoredBox]]) -> None:
        self.specs, self.boxes = specs, boxes
        self.skipped: tuple[str, ...] = ()
        self.ties: dict[str, str] = {}  # the format stores one tensor under each of its names
        self.files = {
            path: RawFile(store.open(path)) for path in sorted({b.path for many in boxes.values() for b in many})
        }
        self.known: dict[_StoredBox, TensorPlace] = {}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of tensor `name` in row-major order: 1-D, on the CPU.

        Raises CorruptError when a file has changed or does not match the metadata.
        """
        with damaged_input(name):
            return self._read_slice(name, start, stop)

    def _read_slice(self, name: str, start: int, stop: int | None) -> Tensor:
        spec = self.specs[name]
        stop = spec.numel if stop is None else stop
        for box in self.boxes[name]:  # check before allocating memory by the size in the metadata
            self.known[box] = self.known.get(box) or self._open_box(box, spec)
        data = torch.empty(stop - start, dtype=getattr(torch, spec.dtype), device="cpu")
        filled = 0
        for origin, extent in _cut_range(start, stop, spec.shape) if stop > start else ():
            target = data[filled : filled + math.prod(extent)].view(extent)
            filled += math.prod(extent)
            for box in self.boxes[name]:
                self._copy_from_box(target, origin, box, spec)
        return data

    def close(self) -> None:
        for file in self.files.values():
            file.close()

    def _copy_from_box(self, target: Tensor, origin: Places, box: _StoredBox, spec: Spec) -> None:
        """Copy the intersection of `box` and `target`, which is the part of the tensor at `origin`."""
        low = [max(a, b) for a, b in zip(origin, box.offsets, strict=True)]
        ends = zip(origin, target.shape, box.offsets, box.sizes, strict=True)
        high = [min(a + size, b + length) for a, size, b, length in ends]
        shape = [b - a for a, b in zip(low, high, strict=True)]
        if any(size <= 0 for size in shape):
            return
        # A part from `_cut_range` is contiguous in every box: single indices, then a range, then whole dimensions.
        first = 0
        for size, a, b in zip(box.sizes, low, box.offsets, strict=True):
            first = first * size + a - b
        part = self._box_elements(box, spec, first, math.prod(shape)).view(shape)
        place = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
        target[place].copy_(part)

    def _box_elements(self, box: _StoredBox, spec: Spec, first: int, count: int) -> Tensor:
        stored = self.known[box]
        if not stored.is_row_major:
            return row_major(stored)[first : first + count]
        return stored.span.read(first, count, getattr(torch, spec.dtype))

    def _open_box(self, box: _StoredBox, spec: Spec) -> TensorPlace:
        found = load_torch_zip(self.files[box.path], box.start, box.size_bytes)
        if not isinstance(found, TensorPlace) or (found.shape, found.dtype) != (box.sizes, spec.dtype):
            raise CorruptError(
                f"{spec.name}: {box.path} holds something else at byte {box.start}, expected {spec.dtype} {box.sizes}; "
                "the checkpoint is damaged, use another"
            )
        found.file.promise(found.repeated_bytes, spec.name)
        return found


def open_dcp(place: Place) -> DcpFile:
    """The tensors of the checkpoint folder `place`; nothing in it is run.

    Other values are listed in `skipped`. Raises LoadError naming globals in the metadata that are neither tensors nor
    plain data; CorruptError when boxes are missing or do not fill their tensor.
    """
    store, source = place.folder, place.basename
    check_files_inside(store, [METADATA])
    with damaged_input(f"{source}/{METADATA}: torch.distributed.checkpoint's"):
        metadata = _state_of(load_torch_pickle(store.read(METADATA), f"{source}/{METADATA}"), "Metadata")
        entries = metadata["state_dict_metadata"]
        stored = {
            _box_key(_state_of(index, "MetadataIndex")): _state_of(info, "_StorageInfo")
            for index, info in metadata["storage_data"].items()
        }
        tensors = {
            name: _state_of(one, "TensorStorageMetadata")
            for name, one in entries.items()
            if _kind_of(one) != "BytesStorageMetadata"
        }
        specs = {name: _tensor_spec(name, state) for name, state in tensors.items()}
        boxes = {name: _stored_boxes(name, state["chunks"], stored) for name, state in tensors.items()}
        _check_boxes(place, specs, boxes)
    opened = DcpFile(store, specs, boxes)
    opened.skipped = tuple(f"{name}: an object" for name in entries if name not in tensors)
    return opened


def _kind_of(value: Any) -> str:
    return kind_of_leaf(value).rpartition(".")[2]


def _state_of(value: Any, kind: str) -> Any:
    """The fields of an object of class `kind`. Raises CorruptError for any other value."""
    if not isinstance(value, Passive) or _kind_of(value) != kind:
        raise CorruptError(f"a {kind_of_leaf(value)}, expected a {kind}")
    return value.state


def _tensor_spec(name: str, state: Mapping[str, Any]) -> Spec:
    properties = _state_of(state["properties"], "TensorProperties")
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if type(dtype) is not str or type(name) is not str:
        raise CorruptError("a tensor without a name or a type")
    return Spec(name, checked_sizes(state["size"]), dtype)


def _box_key(index: Mapping[str, Any]) -> tuple[str, Places | None]:
    if not index.keys() <= {"fqn", "offset", "index"}:
        raise CorruptError(f"an index of {', '.join(map(str, index))}, expected fqn, offset and index")
    offset = index.get("offset")
    return str(index["fqn"]), None if offset is None else checked_sizes(offset)


def _stored_boxes(
    name: str, chunks: Sequence[Any], stored: Mapping[tuple[str, Places | None], Any]
) -> list[_StoredBox]:
    found = []
    for chunk in chunks:
        place = _state_of(chunk, "ChunkStorageMetadata")
        offsets, extent = checked_sizes(place["offsets"]), checked_sizes(place["sizes"])
        info = stored[name, offsets] if (name, offsets) in stored else stored[name, None]
        if info.get("transform_descriptors"):
            raise LoadError(
                f"{name}: stored through {info['transform_descriptors']}; load it with torch and save it again"
            )
        start, length = checked_sizes((info["offset"], info["length"]))
        found.append(_StoredBox(offsets, extent, str(info["relative_path"]), start, length))
    return found


def _check_boxes(place: Place, specs: Mapping[str, Spec], boxes: Mapping[str, Sequence[_StoredBox]]) -> None:
    """Raise CorruptError naming every tensor whose boxes are not in the folder or do not fill it."""
    wrong, store = [], place.folder
    paths = {box.path for many in boxes.values() for box in many}
    check_files_inside(store, filter(is_inside, paths))
    there = {path for path in paths if is_inside(path) and store.stat(path) is not None}
    owners: dict[tuple[str, int], str] = {}
    for name, spec in specs.items():
        for box in boxes[name]:
            if (box.path, box.start) in owners:
                wrong.append(f"{owners[box.path, box.start]}, {name}: stored at the same location")
            owners[box.path, box.start] = name
        if spec.dtype not in ITEM_BYTES:
            raise LoadError(f"{name}: {spec.dtype}, which is no plain dtype; convert it before saving")
        misfit = any(len(spec.shape) != len(box.sizes) or len(spec.shape) != len(box.offsets) for box in boxes[name])
        if misfit or sum(math.prod(b.sizes) for b in boxes[name]) != spec.numel or _boxes_overlap(boxes[name]):
            wrong.append(f"{name}: its stored parts do not fill {list(spec.shape)}")
        wrong += [f"{name}: {box.path} is missing" for box in boxes[name] if box.path not in there]
    if wrong:
        raise CorruptError(f"{place.basename}: {listing(wrong)}; every rank must have saved to this folder")


def _boxes_overlap(boxes: Sequence[_StoredBox]) -> bool:
    """Whether two boxes share an element: the boxes then leave a gap, although the number of elements is right."""
    ordered = sorted((box for box in boxes if 0 not in box.sizes), key=lambda box: box.offsets)
    for index, one in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if one.offsets and other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break
            ends = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
            if all(a < d + e and d < a + b for a, b, d, e in ends):
                return True
    return False


def _cut_range(start: int, stop: int, shape: Places) -> Iterator[tuple[Places, Places]]:
    """Flat elements [start, stop) of `shape` as a few boxes (origin, extent), in order, each contiguous."""
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _cut_within_row(last, start - last * row, stop - last * row, shape)
        return
    if start < first * row:
        yield from _cut_within_row(first - 1, start - (first - 1) * row, row, shape)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if last * row < stop:
        yield from _cut_within_row(last, 0, stop - last * row, shape)


def _cut_within_row(index: int, start: int, stop: int, shape: Places) -> Iterator[tuple[Places, Places]]:
    for origin, extent in _cut_range(start, stop, shape[1:]):
        yield (index, *origin), (1, *extent)
