"""Opens HDF5 files: our own by their index, files of other programs through h5py after the probe."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import h5py
import numpy as np
import torch

from ft_ckpt.errors import CorruptError, damaged_input
from ft_ckpt.formats import cerebras
from ft_ckpt.formats.cerebras import CerebrasReader, StoredLeaf
from ft_ckpt.formats.hdf5_metadata import TYPES
from ft_ckpt.formats.hdf5_probe import Probe
from ft_ckpt.formats.layout import ITEM_BYTES
from ft_ckpt.formats.pytree import MOST_LEVELS, Node
from ft_ckpt.formats.tensor_file import (
    FREE_BYTES,
    FileStream,
    IndexedFile,
    RawFile,
    TensorIndex,
    as_tensor,
    moved_index,
    read_index,
)
from ft_ckpt.messages import printable
from ft_ckpt.storage.scratch import local_version

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_LEAST_USER_BLOCK, _MOST_USER_BLOCK = 512, 1 << 30


def is_hdf5(file: RawFile) -> bool:
    """True when the signature of HDF5 is at the start of the file, or after a user block other than a dual file's."""
    return _is_signature_at(file, 0) or (file.size_bytes > 8 and file.bytes(8, 1) != b"{" and has_user_block(file))


def has_user_block(file: RawFile) -> bool:
    """True when the signature comes after other bytes, which end at 512 * 2**n."""
    at = _LEAST_USER_BLOCK
    while at <= min(file.size_bytes, _MOST_USER_BLOCK):
        if _is_signature_at(file, at):
            return True
        at *= 2
    return False


def _is_signature_at(file: RawFile, start: int) -> bool:
    size = len(SIGNATURE)
    return start + size <= file.size_bytes and file.bytes(start, size) == SIGNATURE


def open_hdf5(raw: RawFile, verify: bool = False) -> IndexedFile:
    """The tensors of an HDF5 file: ours, a Cerebras checkpoint, or any other of plain datasets and groups.

    Raises CorruptError when it is damaged, incomplete, or leads outside itself.
    """
    index = read_index(raw)
    if index is not None:
        file = IndexedFile(raw, index, verify)
        if any(len(row) > 5 for row in index.rows.values()):
            from ft_ckpt.formats.hdf5_compressed import chunk_readers  # which needs the filters' package

            file.readers = chunk_readers(raw, index)
        return file
    # brings h5py, which a file of ours does not need

    return open_foreign(raw, verify)


MOST_EXPANSION = 4096  # elements may take this many times the bytes of the file, and 64 MiB; beyond is no compression
_LINK_BYTES, _MOST_HOPS = 16, 16  # what a link takes in a file, at least; soft links that are followed
_PART_BYTES = 32 << 20  # read at a time
_NATIVE = {(2, 15, 7, 8, 0, 7): "bfloat16", (1, 7, 2, 5, 0, 2): "float8_e5m2"}  # HDF5's own float types


@dataclass
class _ForeignFile:
    """An open file: its bytes, the library's view of it, and the process that reads values."""

    raw: RawFile
    probe: Probe
    file: Any
    part: tuple[int, int]  # first byte in `raw` and size of the HDF5 file
    places: int = 0  # visited; a name may lead to what has been visited already

    def count_visit(self) -> None:
        """Count a place. Raises CorruptError when there are more than the file has room to name."""
        self.places += 1
        if self.places > 1000 + self.raw.size_bytes // _LINK_BYTES:
            raise CorruptError("groups in groups, with more places than the file has room for")


def open_foreign(raw: RawFile, verify: bool = False, part: tuple[int, int] | None = None) -> IndexedFile:
    """The file, or its `part` (first byte, size), with places found by the HDF5 library. Raises CorruptError."""
    raw.check()
    part = part or (0, raw.size_bytes)
    with damaged_input(f"{raw.name}: an HDF5 file"):
        here = local_version(raw.file)  # the process that tries it takes it from no other place
        raw = raw if here is raw.file else RawFile(here)
        probe = Probe(here.descriptor, raw.name, _most_bytes(raw), part)
        source = _ForeignFile(raw, probe, h5py.File(FileStream(raw, *part), "r"), part)
        open_whole = _open_cerebras if "__version__" in source.file.attrs else _open_plain
        return _open_moved(source, verify) or open_whole(source)


@dataclass
class ForeignDataset:
    """One dataset, checked to lie inside the file."""

    source: _ForeignFile
    handle: Any
    path: str
    shape: tuple[int, ...] | None = field(init=False)
    dtype: np.dtype[Any] = field(init=False)
    attributes: Mapping[str, Any] = field(init=False)
    start: int | None = field(init=False)

    def __post_init__(self) -> None:
        self.shape, self.dtype, self.attributes = self.handle.shape, self.handle.dtype, self.handle.attrs
        self.start = self.handle.id.get_offset()
        _check_dataset(self)

    @property
    def element_count(self) -> int:
        return math.prod(self.shape) if self.shape is not None else 0

    @property
    def torch_type(self) -> str | None:
        """torch's name of what the bytes are, None when torch has no such type."""
        kind = self.handle.id.get_type()
        if isinstance(kind, h5py.h5t.TypeFloatID):
            native = _NATIVE.get((kind.get_size(), *kind.get_fields()))
            if native is not None:
                return native
        little = self.dtype.byteorder in ("=", "|", "<")
        return self.dtype.name if little and self.dtype.name in torch_types() else None

    def read_value(self) -> np.ndarray[Any, Any]:
        return self.read_elements(0, self.element_count).reshape(self.shape or ())

    def read_elements(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Elements [start, stop) of the flat values, from as few rows as hold them."""
        shape = self.shape or ()
        row = math.prod(shape[1:])
        if not shape or not row:
            return self._read_rows(None, None, self.element_count)[start:stop]
        first, last = start // row, -(-stop // row)
        step = max(1, _PART_BYTES // max(1, row * self.dtype.itemsize))
        if self.handle.chunks is not None:
            step += -step % self.handle.chunks[0]  # a chunk is decompressed whole
        parts = [self._read_rows(at, min(at + step, last), row) for at in range(first, last, step)]
        values = np.concatenate(parts) if len(parts) != 1 else parts[0]
        return values[start - first * row : stop - first * row]

    def read_strings(self) -> Any:
        """A string, or nested lists of strings."""
        return json.loads(self.source.probe.read(self.path))

    def _read_rows(self, first: int | None, last: int | None, row: int) -> np.ndarray[Any, Any]:
        """Rows [first, last) of `row` elements each, flat; None: all."""
        try:
            values = np.frombuffer(self.source.probe.read(self.path, first, last), self.dtype)
        except CorruptError as error:
            raise CorruptError(
                f"{error}; it is damaged, or compressed with a filter that is not installed here (it uses "
                f"{list(self.handle._filters) or 'none'}; pip install hdf5plugin)"
            ) from error
        if len(values) != row * (1 if first is None or last is None else last - first):
            raise CorruptError(f"{self.source.raw.name}: {self.path} has {len(values)} values, {row} expected a row")
        return values


def torch_types() -> frozenset[str]:
    """The numpy types that torch has too, by their common name."""
    return frozenset(name for name in cerebras.DTYPES if name not in cerebras.STORED)


def _most_bytes(raw: RawFile) -> int:
    """Upper limit for the bytes of the values of one dataset."""
    return MOST_EXPANSION * raw.size_bytes + FREE_BYTES


def _check_dataset(dataset: ForeignDataset) -> None:
    handle, raw = dataset.handle, dataset.source.raw
    if handle.external or handle.is_virtual:
        raise CorruptError(f"{dataset.path}: its values are in other files, which are not followed")
    item_bytes = handle.id.get_type().get_size()
    wanted, chunk = dataset.element_count * item_bytes, math.prod(handle.chunks or ()) * item_bytes
    if max(wanted, chunk) > _most_bytes(raw):
        raise CorruptError(
            f"{dataset.path}: {dataset.shape} of {dataset.dtype}, {handle.chunks or 'all'} at a time, in a file of "
            f"only {raw.size_bytes} bytes"
        )
    size_bytes = dataset.source.part[1]
    if dataset.start is not None and dataset.start + wanted > size_bytes:
        raise CorruptError(
            f"{dataset.path}: bytes {dataset.start} to {dataset.start + wanted}, the file has {size_bytes}; "
            "it was cut short"
        )
    if dataset.start is None:
        written = handle.id.get_storage_size()
        if handle.chunks is not None:
            written = handle.id.get_num_chunks() * math.prod(handle.chunks) * dataset.dtype.itemsize
        raw.promise(max(0, wanted - written), dataset.path)  # what was never written is one value, many times


def _find_dataset(source: _ForeignFile, path: str) -> ForeignDataset:
    """The dataset at `path`, reached by hard links alone."""
    place, parts = source.file, [part for part in path.split("/") if part not in ("", ".")]  # as HDF5 reads paths
    for part in parts or [path]:
        link = place.get(part, getlink=True) if isinstance(place, h5py.Group) else None
        if not isinstance(link, h5py.HardLink):
            what = "is not there" if link is None else f"is a {type(link).__name__}, which is not followed"
            raise CorruptError(f"{printable(path)[:200]}: {printable(part)[:200]} {what}")
        place = place[part]
    if not isinstance(place, h5py.Dataset):
        raise CorruptError(f"{printable(path)[:200]}: a group where a dataset should be")
    return ForeignDataset(source, place, "/".join(parts))


def _open_moved(source: _ForeignFile, verify: bool) -> IndexedFile | None:
    """Our own index where another program has moved the data: what it says is kept, the places are looked up.

    None where there is none, or where that program has changed more than places. Raises CorruptError for a damaged one.
    """
    raw = source.raw
    if source.file.get(cerebras.INDEX, getlink=True) is None:
        return None
    index = moved_index(_find_dataset(source, cerebras.INDEX).read_value().tobytes(), raw.name)
    rows, readers = {}, {}
    for name, spec in index.specs.items():
        try:
            dataset = _find_dataset(source, "/".join(cerebras.dataset_path(name)))
        except CorruptError:
            return None
        size = TYPES[cerebras.stored_type(spec.dtype)][0]
        same = dataset.shape == spec.shape and dataset.handle.id.get_type().get_size() == size
        if not same:
            return None
        if dataset.start is None and spec.size_bytes:
            readers[name] = _converting_reader(spec.dtype, dataset)
        rows[name] = [*index.rows[name][:2], dataset.start or 0, *index.rows[name][3:5]]
    return _indexed_file(source, TensorIndex(rows, index.root, index.metadata), readers, verify)


def _indexed_file(
    source: _ForeignFile, index: TensorIndex, readers: Mapping[str, Any], verify: bool = False
) -> IndexedFile:
    result = IndexedFile(source.raw, replace(index, data_start=source.part[0]), verify)
    result.readers, result.library = dict(readers), source.file
    if not readers:
        source.probe.close()
    return result


def _open_cerebras(source: _ForeignFile) -> IndexedFile:
    reader = CerebrasReader(source.file.attrs, lambda path: _find_dataset(source, path))
    root = reader.read_tree()
    return _assemble_file(source, root, reader.leaves)


def _assemble_file(source: _ForeignFile, root: Node, leaves: list[StoredLeaf]) -> IndexedFile:
    rows: dict[str, Any] = {}
    readers: dict[str, Any] = {}
    for leaf in leaves:
        dataset: Any = leaf.dataset
        shape = leaf.shape if dataset is None else dataset.shape
        if shape is None:
            raise CorruptError(f"{leaf.name}: a tensor without a shape")
        if dataset is None:
            source.raw.promise(math.prod(shape) * ITEM_BYTES[leaf.dtype or ""], leaf.name)
        start = None if dataset is None else dataset.start
        rows[leaf.name] = [leaf.dtype or dataset.dtype.name, shape, start or 0, "", len(rows)]
        reader = _leaf_reader(leaf, dataset)
        if reader is not None:
            readers[leaf.name] = reader
    return _indexed_file(source, TensorIndex(rows, root, {}), readers)


def _leaf_reader(leaf: StoredLeaf, dataset: Any) -> Any:
    """The function that reads elements of a leaf that cannot be mapped; None if it can."""
    if dataset is None:
        return _constant_reader(leaf)
    if leaf.dtype is None:
        return dataset.read_elements
    return None if _same_bytes(leaf.dtype, dataset) else _converting_reader(leaf.dtype, dataset)


def _same_bytes(dtype: str, dataset: ForeignDataset) -> bool:
    """True when the file has the bytes of torch's `dtype` in one contiguous range."""
    if dataset.start is None and dataset.element_count:
        return False
    kind = dataset.torch_type
    return kind == dtype or (dtype in cerebras.STORED and kind in _bit_types(dtype))


def _bit_types(dtype: str) -> tuple[str, ...]:
    size = TYPES[cerebras.STORED[dtype][0]][0]
    return {1: ("uint8", "int8"), 2: ("int16", "uint16"), 4: ("uint32", "int32")}[size]


def _converting_reader(dtype: str, dataset: ForeignDataset) -> Any:
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise CorruptError(f"{dataset.path}: labelled {dtype!r}, which is no type of torch")

    def convert_elements(start: int, stop: int) -> torch.Tensor:
        tensor = as_tensor(dataset.read_elements(start, stop))
        if dtype in cerebras.STORED and dataset.torch_type in _bit_types(dtype):
            return tensor.view(wanted)
        return tensor.to(wanted)

    return convert_elements


def _constant_reader(leaf: StoredLeaf) -> Any:
    dtype = getattr(torch, leaf.dtype or "")
    return lambda start, stop: torch.full((stop - start,), leaf.fill or 0, dtype=dtype)


def _open_plain(source: _ForeignFile) -> IndexedFile:
    """Open a file without a description of an object: groups are dicts, datasets are tensors or arrays, or strings."""
    leaves: list[StoredLeaf] = []
    root = _group_node(source, source.file, "", (), leaves)
    return _assemble_file(source, root, leaves)


def _group_node(source: _ForeignFile, group: Any, path: str, above: tuple[Any, ...], leaves: list[StoredLeaf]) -> Node:
    here = h5py.h5o.get_info(group.id).addr
    if here in above or len(above) > MOST_LEVELS:
        raise CorruptError(f"{path}: links that lead in circles")
    keys, children = [], []
    for name in group:
        source.count_visit()
        place = f"{path}/{name}".lstrip("/")
        item, real = _follow_link(source, group, path, name)
        keys.append(Node("value", name))
        is_group = isinstance(item, h5py.Group)
        children.append(
            _group_node(source, item, place, (*above, here), leaves)
            if is_group
            else _plain_leaf(source, item, real, place, leaves)
        )
    return Node("dict", None, tuple(keys), tuple(children))


def _follow_link(source: _ForeignFile, group: Any, path: str, name: str, hops: int = 0) -> tuple[Any, str]:
    """The object that `name` in `group`, which is at `path`, leads to, and its path by hard links.

    Soft links are walked part by part, since any part may be a link to another file.
    """
    place = f"{path}/{name}".lstrip("/")
    link = group.get(name, getlink=True) if isinstance(group, h5py.Group) else None
    if isinstance(link, h5py.HardLink):
        return group[name], place
    if not isinstance(link, h5py.SoftLink) or hops > _MOST_HOPS:
        what = (
            f"to {link.filename}, another file,"
            if isinstance(link, h5py.ExternalLink)
            else "that leads nowhere or in circles,"
        )
        raise CorruptError(f"{place}: a link {what} which is not followed")
    item, at = (source.file, "") if link.path.startswith("/") else (group, path)
    for part in link.path.split("/"):
        if part not in ("", "."):
            source.count_visit()
            item, at = _follow_link(source, item, at, part, hops + 1)
    return item, at


def _plain_leaf(source: _ForeignFile, item: Any, real: str, path: str, leaves: list[StoredLeaf]) -> Node:
    if not isinstance(item, h5py.Dataset):
        raise CorruptError(f"{path}: neither a group nor a dataset")
    dataset = ForeignDataset(source, item, real)
    if dataset.shape is None:
        return Node("value", None)
    if h5py.check_string_dtype(dataset.dtype) is not None:
        text = dataset.read_strings()
        return _text_node(text) if dataset.shape else Node("value", text)
    if dataset.dtype.hasobject:
        raise CorruptError(f"{path}: values of HDF5 type {dataset.dtype}, which cannot be kept")
    leaves.append(StoredLeaf(path, dataset.torch_type, dataset))
    index = len(leaves) - 1
    return Node("tensor", index) if dataset.torch_type else Node("array", (index, None, ()))


def _text_node(value: Any) -> Node:
    return Node("list", None, (), tuple(map(_text_node, value))) if isinstance(value, list) else Node("value", value)
