"""Reads checkpoints of torch.distributed.checkpoint: a folder with `.metadata` and `.distcp` files.

Source: the classes of `torch.distributed.checkpoint.metadata`. `.metadata` is a pickle, which is
decoded without running code. It lists the stored boxes of every tensor. A box is a part of a
tensor, given by its offsets and its shape, and it is stored as a small torch archive in a file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.errors import CorruptError, LoadError, damaged_input, listing
from ft_ckpt.extensions.foreign.torch_files import load_torch_part
from ft_ckpt.formats import ITEM_BYTES, Spec, checked_sizes, dtype_name, dtype_of
from ft_ckpt.formats.files import PLAIN_VALUES, RawFile, StandIn, TensorFile, stand_in, unpickle
from ft_ckpt.storage import Store, is_inside
from ft_ckpt.storage.local import check_files_inside
from ft_ckpt.storage.places import Place

METADATA = ".metadata"


def _stand_ins(module: str, *names: str) -> dict[str, type[StandIn]]:
    full_names = [f"{module}.{name}" for name in names]
    return {full_name: stand_in(full_name) for full_name in full_names}


_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
# the globals that a `.metadata` may name
_GLOBALS = {
    **PLAIN_VALUES,
    **_stand_ins(
        "torch.distributed.checkpoint.metadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    **_stand_ins("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    **_stand_ins("torch.serialization", "_get_layout"),
    **_stand_ins("pathlib", *_PATHS),
    **_stand_ins("pathlib._local", *_PATHS),  # of Python 3.13
}
Offsets = tuple[int, ...]
# what is stored for a tensor, by its name and the offsets of the box
_Infos = dict[tuple[str, Offsets | None], Any]
_NOTHING: tuple[str | None, Tensor] = (None, torch.empty(0, device="cpu"))


@dataclass(frozen=True)
class _StoredBox:
    """A stored part of a tensor: its offsets in the tensor, its shape, and its location on disk."""

    offsets: Offsets
    sizes: tuple[int, ...]
    path: str
    start: int
    size_bytes: int


class DcpFile(TensorFile):
    """The tensors of a distributed checkpoint.

    Each tensor is assembled from its boxes as a whole, one at a time.
    """

    def __init__(
        self,
        store: Store,
        specs: Mapping[str, Spec],
        boxes: Mapping[str, Sequence[_StoredBox]],
        skipped: Sequence[str],
    ) -> None:
        self.specs, self.boxes, self.skipped = specs, boxes, tuple(skipped)
        paths = sorted(_paths_of(boxes))
        self.files = {path: RawFile(store.open(path)) for path in paths}
        self._assembled = _NOTHING

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the flat elements [start, stop) of tensor `name`: 1-D, row-major, on the CPU.

        Raises CorruptError when a file has changed, is damaged or does not match the metadata.
        """
        if self._assembled[0] != name:
            self._assembled = _NOTHING  # frees the last tensor before the next one is read
            with damaged_input(name):
                self._assembled = (name, self._assemble(name))
        return self._assembled[1][start:stop]

    def _assemble(self, name: str) -> Tensor:
        spec, boxes = self.specs[name], self.boxes[name]
        if len(boxes) == 1:  # the box is the whole tensor
            return self._read_box(boxes[0], spec).contiguous().view(-1)
        whole: Tensor | None = None
        for box in boxes:
            part = self._read_box(box, spec)
            # A box is read first, because a damaged file must not cause a large allocation.
            if whole is None:
                whole = torch.empty(spec.shape, dtype=part.dtype, device="cpu")
            pairs = zip(box.offsets, box.sizes, strict=True)
            whole[tuple(slice(low, low + size) for low, size in pairs)].copy_(part)

        if whole is None:  # a tensor without elements has no boxes
            return torch.empty(0, dtype=dtype_of(spec.dtype), device="cpu")
        return whole.view(-1)

    def _read_box(self, box: _StoredBox, spec: Spec) -> Tensor:
        file = self.files[box.path]
        part = load_torch_part(file, box.start, box.size_bytes)
        is_box = isinstance(part, Tensor) and tuple(part.shape) == box.sizes
        if not is_box or dtype_name(part.dtype) != spec.dtype:
            raise CorruptError(
                f"{spec.name}: {box.path} holds something else at byte {box.start}, expected "
                f"{spec.dtype} {box.sizes}; the checkpoint is damaged, use another"
            )
        file.reserve_virtual_bytes(max(0, part.nbytes - part.untyped_storage().nbytes()), spec.name)
        box_tensor: Tensor = part.detach()
        return box_tensor

    def close(self) -> None:
        self._assembled = _NOTHING
        for file in self.files.values():
            file.close()


def _paths_of(boxes: Mapping[str, Sequence[_StoredBox]]) -> set[str]:
    paths: set[str] = set()
    for boxes_of_tensor in boxes.values():
        paths.update(box.path for box in boxes_of_tensor)
    return paths


def open_dcp(place: Place) -> DcpFile:
    """Open the tensors of the checkpoint folder `place`, without running anything in it.

    Other values are listed in `skipped`. Raises LoadError naming globals in the metadata that are
    neither tensors nor plain data; CorruptError when boxes are missing or do not fill their tensor.
    """
    store, source = place.folder, place.basename
    check_files_inside(store, [METADATA])
    with damaged_input(f"{source}/{METADATA}: torch.distributed.checkpoint's"):
        document = unpickle(store.read(METADATA), f"{source}/{METADATA}", _GLOBALS)
        metadata = _state_of(document, "Metadata")
        infos: _Infos = {}
        for index, info in metadata["storage_data"].items():
            infos[_box_key(_state_of(index, "MetadataIndex"))] = _state_of(info, "_StorageInfo")
        specs: dict[str, Spec] = {}
        boxes: dict[str, list[_StoredBox]] = {}
        skipped: list[str] = []
        for name, entry in metadata["state_dict_metadata"].items():
            if _kind_of(entry) == "BytesStorageMetadata":
                skipped.append(f"{name}: an object")
                continue
            state = _state_of(entry, "TensorStorageMetadata")
            specs[name] = _tensor_spec(name, state)
            boxes[name] = _stored_boxes(name, state["chunks"], infos)

        _check_boxes(place, specs, boxes)

    return DcpFile(store, specs, boxes, skipped)


def _kind_of(value: Any) -> str:
    return value.kind.rpartition(".")[2] if isinstance(value, StandIn) else type(value).__name__


def _state_of(value: Any, kind: str) -> Any:
    """Return the fields of an object of class `kind`. Raises CorruptError for any other value."""
    if not isinstance(value, StandIn) or _kind_of(value) != kind:
        raise CorruptError(f"a {_kind_of(value)}, expected a {kind}")
    return value.state


def _tensor_spec(name: str, state: Mapping[str, Any]) -> Spec:
    properties = _state_of(state["properties"], "TensorProperties")
    dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
    if not isinstance(dtype, torch.dtype) or type(name) is not str:
        raise CorruptError("a tensor without a name or a type")
    return Spec(name, checked_sizes(state["size"]), dtype_name(dtype))


def _box_key(index: Mapping[str, Any]) -> tuple[str, Offsets | None]:
    if not index.keys() <= {"fqn", "offset", "index"}:
        raise CorruptError(
            f"an index of {', '.join(map(str, index))}, expected fqn, offset and index"
        )
    offset = index.get("offset")
    return str(index["fqn"]), None if offset is None else checked_sizes(offset)


def _stored_boxes(name: str, chunks: Sequence[Any], infos: _Infos) -> list[_StoredBox]:
    boxes = []
    for chunk in chunks:
        place = _state_of(chunk, "ChunkStorageMetadata")
        offsets, sizes = checked_sizes(place["offsets"]), checked_sizes(place["sizes"])
        info = infos[name, offsets] if (name, offsets) in infos else infos[name, None]
        if info.get("transform_descriptors"):
            raise LoadError(
                f"{name}: stored through {info['transform_descriptors']}; load it with torch and "
                "save it again"
            )
        start, length = checked_sizes((info["offset"], info["length"]))
        boxes.append(_StoredBox(offsets, sizes, str(info["relative_path"]), start, length))
    return boxes


def _check_boxes(
    place: Place, specs: Mapping[str, Spec], boxes: Mapping[str, Sequence[_StoredBox]]
) -> None:
    """Raise CorruptError naming every tensor whose boxes are absent or do not fill it."""
    store = place.folder
    wrong: list[str] = []
    paths = {path for path in _paths_of(boxes) if is_inside(path)}
    check_files_inside(store, paths)
    existing = {path for path in paths if store.stat(path) is not None}
    owners: dict[tuple[str, int], str] = {}
    for name, spec in specs.items():
        if spec.dtype not in ITEM_BYTES:
            raise LoadError(
                f"{name}: {spec.dtype}, which is no plain dtype; convert it before saving"
            )
        for box in boxes[name]:
            location = (box.path, box.start)
            if location in owners:
                wrong.append(f"{owners[location]}, {name}: stored at the same location")
            owners[location] = name
            if box.path not in existing:
                wrong.append(f"{name}: {box.path} is missing")
        if not _fill_tensor(boxes[name], spec):
            wrong.append(f"{name}: its stored parts do not fill {list(spec.shape)}")

    if wrong:
        raise CorruptError(
            f"{place.basename}: {listing(wrong)}; every rank must have saved to this folder"
        )


def _fill_tensor(boxes: Sequence[_StoredBox], spec: Spec) -> bool:
    """Check whether the boxes have each element of the tensor once."""
    for box in boxes:
        if not len(box.sizes) == len(box.offsets) == len(spec.shape):
            return False
    count = sum(math.prod(box.sizes) for box in boxes)
    return count == spec.numel and not _boxes_overlap(boxes)


def _boxes_overlap(boxes: Sequence[_StoredBox]) -> bool:
    """Check whether two boxes share an element.

    The boxes then leave a gap, although the number of elements is right.
    """
    ordered = sorted((box for box in boxes if 0 not in box.sizes), key=lambda box: box.offsets)
    for number, box in enumerate(ordered):
        for later in ordered[number + 1 :]:
            if box.offsets and later.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break
            if _share_element(box, later):
                return True
    return False


def _share_element(box: _StoredBox, other: _StoredBox) -> bool:
    dims = zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
    for start, size, other_start, other_size in dims:
        if start >= other_start + other_size or other_start >= start + size:
            return False
    return True
