"""Reads checkpoints of torch.distributed.checkpoint: a folder with `.metadata` and `.distcp` files.

Source: the classes of `torch.distributed.checkpoint.metadata`. `.metadata` is a pickle, decoded
without running code. It lists the stored boxes of every tensor and their locations; each box is a
small torch archive inside a file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.errors import CorruptError, LoadError, damaged_input, listing
from ft_ckpt.extensions.foreign.torch_file import load_torch_part
from ft_ckpt.formats import (
    ITEM_BYTES,
    PLAIN_VALUES,
    RawFile,
    Spec,
    StandIn,
    checked_sizes,
    dtype_name,
    stand_in,
    unpickle,
)
from ft_ckpt.storage import Place, Store, check_files_inside, is_inside

METADATA = ".metadata"
_CLASSES = {  # that a `.metadata` names, by module
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    # of Python 3.13
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
}
_NAMES = [f"{module}.{name}" for module, names in _CLASSES.items() for name in names]
_GLOBALS = {**PLAIN_VALUES, **{full_name: stand_in(full_name) for full_name in _NAMES}}
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
    """The tensors of a distributed checkpoint.

    Each is assembled from its boxes as a whole, one at a time.
    """

    def __init__(
        self, store: Store, specs: Mapping[str, Spec], boxes: Mapping[str, Sequence[_StoredBox]]
    ) -> None:
        self.specs, self.boxes = specs, boxes
        self.skipped: tuple[str, ...] = ()
        self.ties: dict[str, str] = {}  # the format stores one tensor under each of its names
        paths = {box.path for parts in boxes.values() for box in parts}
        self.files = {path: RawFile(store.open(path)) for path in sorted(paths)}
        self._assembled: tuple[str | None, Tensor] = (None, torch.empty(0, device="cpu"))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of tensor `name` in row-major order: 1-D, on the CPU.

        Raises CorruptError when a file has changed, is damaged or does not match the metadata.
        """
        if self._assembled[0] != name:
            # frees the last one before the next is read
            self._assembled = (None, torch.empty(0, device="cpu"))
            with damaged_input(name):
                self._assembled = (name, self._assemble(name))
        return self._assembled[1][start:stop]

    def _assemble(self, name: str) -> Tensor:
        spec = self.specs[name]
        boxes = self.boxes[name]
        if len(boxes) == 1:  # it is the tensor
            return self._read_box(boxes[0], spec).reshape(-1)
        whole: Tensor | None = None
        for box in boxes:
            part = self._read_box(box, spec)
            if whole is None:  # memory by the size in the metadata, after a look at the file
                whole = torch.empty(spec.shape, dtype=part.dtype, device="cpu")
            place = tuple(
                slice(low, low + size) for low, size in zip(box.offsets, box.sizes, strict=True)
            )
            whole[place].copy_(part)
        if whole is None:  # without elements
            return torch.empty(0, dtype=getattr(torch, spec.dtype), device="cpu")
        return whole.view(-1)

    def _read_box(self, box: _StoredBox, spec: Spec) -> Tensor:
        file = self.files[box.path]
        part = load_torch_part(file, box.start, box.size_bytes)
        if not isinstance(part, Tensor) or (tuple(part.shape), dtype_name(part.dtype)) != (
            box.sizes,
            spec.dtype,
        ):
            raise CorruptError(
                f"{spec.name}: {box.path} holds something else at byte {box.start}, expected "
                f"{spec.dtype} {box.sizes}; the checkpoint is damaged, use another"
            )
        file.promise(max(0, part.nbytes - part.untyped_storage().nbytes()), spec.name)
        return part.detach()

    def close(self) -> None:
        self._assembled = (None, torch.empty(0, device="cpu"))
        for file in self.files.values():
            file.close()


def open_dcp(place: Place) -> DcpFile:
    """The tensors of the checkpoint folder `place`; nothing in it is run.

    Other values are listed in `skipped`. Raises LoadError naming globals in the metadata that are
    neither tensors nor plain data; CorruptError when boxes are missing or do not fill their tensor.
    """
    store, source = place.folder, place.basename
    check_files_inside(store, [METADATA])
    with damaged_input(f"{source}/{METADATA}: torch.distributed.checkpoint's"):
        metadata = _state_of(
            unpickle(store.read(METADATA), f"{source}/{METADATA}", _GLOBALS), "Metadata"
        )
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
        boxes = {
            name: _stored_boxes(name, state["chunks"], stored) for name, state in tensors.items()
        }
        _check_boxes(place, specs, boxes)
    opened = DcpFile(store, specs, boxes)
    opened.skipped = tuple(f"{name}: an object" for name in entries if name not in tensors)
    return opened


def _kind_of(value: Any) -> str:
    return value.kind.rpartition(".")[2] if isinstance(value, StandIn) else type(value).__name__


def _state_of(value: Any, kind: str) -> Any:
    """The fields of an object of class `kind`. Raises CorruptError for any other value."""
    if not isinstance(value, StandIn) or _kind_of(value) != kind:
        raise CorruptError(f"a {_kind_of(value)}, expected a {kind}")
    return value.state


def _tensor_spec(name: str, state: Mapping[str, Any]) -> Spec:
    properties = _state_of(state["properties"], "TensorProperties")
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, torch.dtype) or type(name) is not str:
        raise CorruptError("a tensor without a name or a type")
    return Spec(name, checked_sizes(state["size"]), dtype_name(dtype))


def _box_key(index: Mapping[str, Any]) -> tuple[str, Places | None]:
    if not index.keys() <= {"fqn", "offset", "index"}:
        raise CorruptError(
            f"an index of {', '.join(map(str, index))}, expected fqn, offset and index"
        )
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
                f"{name}: stored through {info['transform_descriptors']}; load it with torch and "
                "save it again"
            )
        start, length = checked_sizes((info["offset"], info["length"]))
        found.append(_StoredBox(offsets, extent, str(info["relative_path"]), start, length))
    return found


def _check_boxes(
    place: Place, specs: Mapping[str, Spec], boxes: Mapping[str, Sequence[_StoredBox]]
) -> None:
    """Raise CorruptError naming every tensor whose boxes are not in the folder or do not fill
    it.
    """
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
            raise LoadError(
                f"{name}: {spec.dtype}, which is no plain dtype; convert it before saving"
            )
        misfit = any(
            len(spec.shape) != len(box.sizes) or len(spec.shape) != len(box.offsets)
            for box in boxes[name]
        )
        if (
            misfit
            or sum(math.prod(b.sizes) for b in boxes[name]) != spec.numel
            or _boxes_overlap(boxes[name])
        ):
            wrong.append(f"{name}: its stored parts do not fill {list(spec.shape)}")
        wrong += [f"{name}: {box.path} is missing" for box in boxes[name] if box.path not in there]
    if wrong:
        raise CorruptError(
            f"{place.basename}: {listing(wrong)}; every rank must have saved to this folder"
        )


def _boxes_overlap(boxes: Sequence[_StoredBox]) -> bool:
    """Whether two boxes share an element: the boxes then leave a gap, although the number of
    elements is right.
    """
    ordered = sorted((box for box in boxes if 0 not in box.sizes), key=lambda box: box.offsets)
    for index, one in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if one.offsets and other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break
            ends = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
            if all(a < d + e and d < a + b for a, b, d, e in ends):
                return True
    return False
