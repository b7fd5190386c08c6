"""Opens HDF5 files.

Files of ft_ckpt are read by their index. Compressed files and files of other programs are read by
h5py.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import h5py
import torch

from ft_ckpt.errors import CorruptError, damaged_input
from ft_ckpt.extensions.hdf5.cerebras_reader import CerebrasReader, StoredLeaf
from ft_ckpt.extensions.hdf5.cerebras_types import EMULATED_TYPES, INDEX, dataset_path, stored_type
from ft_ckpt.extensions.hdf5.hdf5_datasets import (
    ForeignDataset,
    ForeignFile,
    find_dataset,
    follow_link,
)
from ft_ckpt.extensions.hdf5.hdf5_skeleton import hdf5_type
from ft_ckpt.formats import ITEM_BYTES
from ft_ckpt.formats.files import FileStream, RawFile
from ft_ckpt.formats.index import IndexedFile, TensorIndex, as_tensor, moved_index, read_index
from ft_ckpt.formats.trees import MAX_LEVELS, Node
from ft_ckpt.storage.places import local_version

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_USER_BLOCK_SIZES = [1 << power for power in range(9, 31)]
# (start, stop) -> flat elements [start, stop) of one tensor
ReadElements = Callable[[int, int], Any]


def is_hdf5(file: RawFile) -> bool:
    """Check whether the signature of HDF5 is at the file's start, or after a user block.

    The user block of a dual file does not count.
    """
    if _is_signature_at(file, 0):
        return True
    return file.size_bytes > 8 and file.bytes(8, 1) != b"{" and has_user_block(file)


def has_user_block(file: RawFile) -> bool:
    """Check whether the signature follows a user block of 512 * 2**n bytes."""
    return any(_is_signature_at(file, size) for size in _USER_BLOCK_SIZES)


def _is_signature_at(file: RawFile, start: int) -> bool:
    size = len(SIGNATURE)
    return start + size <= file.size_bytes and file.bytes(start, size) == SIGNATURE


def open_hdf5(raw: RawFile, verify: bool = False) -> IndexedFile:
    """Open the tensors of an HDF5 file of ft_ckpt, of Cerebras, or of other groups and datasets.

    Raises CorruptError when it is damaged or incomplete, or refers to other files.
    """
    index = read_index(raw)
    is_compressed = index is not None and any(len(row) > 5 for row in index.rows.values())
    if index is None or is_compressed:
        return open_foreign(raw, verify)
    return IndexedFile(raw, index, verify)


def open_foreign(
    raw: RawFile, verify: bool = False, part: tuple[int, int] | None = None
) -> IndexedFile:
    """Open the file, or its `part` (first byte, size), as the HDF5 library reads it.

    Raises CorruptError.
    """
    raw.check()
    start, size_bytes = part or (0, raw.size_bytes)
    with damaged_input(f"{raw.name}: an HDF5 file"):
        local = local_version(raw.file)  # h5py reads in many small steps
        if local is not raw.file:
            raw = RawFile(local)
        library = h5py.File(FileStream(raw, start, size_bytes), "r")
        source = ForeignFile(raw, library, start, size_bytes)
        moved = _open_moved(source, verify)
        if moved is not None:
            return moved
        if "__version__" in library.attrs:
            return _open_cerebras(source)
        return _open_plain(source)


def _indexed_file(
    source: ForeignFile,
    index: TensorIndex,
    readers: Mapping[str, ReadElements],
    verify: bool = False,
) -> IndexedFile:
    file = IndexedFile(source.raw, replace(index, data_start=source.start), verify)
    file.readers, file.library = dict(readers), source.file
    return file


# Files of ft_ckpt in which another program has moved the data


def _open_moved(source: ForeignFile, verify: bool) -> IndexedFile | None:
    """Open a file of ft_ckpt by its index, with offsets that the HDF5 library gives.

    Returns None if there is no index, or if the program that moved the data has changed more than
    offsets. Raises CorruptError if the file is damaged.
    """
    raw = source.raw
    if source.file.get(INDEX, getlink=True) is None:
        return None
    index = moved_index(find_dataset(source, INDEX).read_value().tobytes(), raw.name)
    rows: dict[str, Any] = {}
    readers: dict[str, ReadElements] = {}
    for name, spec in index.specs.items():
        try:
            dataset = find_dataset(source, "/".join(dataset_path(name)))
        except CorruptError:
            return None
        item_bytes = hdf5_type(stored_type(spec.dtype)).get_size()
        if dataset.shape != spec.shape or dataset.handle.id.get_type().get_size() != item_bytes:
            return None
        if dataset.start is None and spec.size_bytes:
            readers[name] = _converting_reader(spec.dtype, dataset)
        dtype, shape, _, digest, number = index.rows[name][:5]
        rows[name] = [dtype, shape, dataset.start or 0, digest, number]

    return _indexed_file(source, TensorIndex(rows, index.root, index.metadata), readers, verify)


# Cerebras checkpoints


def _open_cerebras(source: ForeignFile) -> IndexedFile:
    reader = CerebrasReader(source.file.attrs, lambda path: find_dataset(source, path))
    return _assemble_file(source, reader.read_tree(), reader.leaves)


def _assemble_file(source: ForeignFile, root: Node, leaves: list[StoredLeaf]) -> IndexedFile:
    rows: dict[str, Any] = {}
    readers: dict[str, ReadElements] = {}
    for leaf in leaves:
        dataset: Any = leaf.dataset
        shape = leaf.shape if dataset is None else dataset.shape
        if shape is None:
            raise CorruptError(f"{leaf.name}: a tensor without a shape")
        start = 0
        if dataset is None:
            source.raw.reserve_virtual_bytes(
                math.prod(shape) * ITEM_BYTES[leaf.dtype or ""], leaf.name
            )
        else:
            start = dataset.start or 0

        rows[leaf.name] = [leaf.dtype or dataset.dtype.name, shape, start, "", len(rows)]
        reader = _leaf_reader(leaf)
        if reader is not None:
            readers[leaf.name] = reader

    return _indexed_file(source, TensorIndex(rows, root, {}), readers)


def _leaf_reader(leaf: StoredLeaf) -> ReadElements | None:
    """Return the function that reads elements of a leaf that cannot be mapped, else None."""
    dataset: Any = leaf.dataset
    if dataset is None:
        return _constant_reader(leaf)
    if leaf.dtype is None:
        read_elements: ReadElements = dataset.read_elements
        return read_elements
    return None if _same_bytes(leaf.dtype, dataset) else _converting_reader(leaf.dtype, dataset)


def _constant_reader(leaf: StoredLeaf) -> ReadElements:
    dtype = getattr(torch, leaf.dtype or "")

    def fill_elements(start: int, stop: int) -> torch.Tensor:
        return torch.full((stop - start,), leaf.fill or 0, dtype=dtype, device="cpu")

    return fill_elements


def _same_bytes(dtype: str, dataset: ForeignDataset) -> bool:
    """Check whether the dataset is contiguous and stores the bytes of torch's `dtype`."""
    if dataset.start is None and dataset.element_count:
        return False
    kind = dataset.torch_type
    return kind == dtype or (dtype in EMULATED_TYPES and kind in _bit_types(dtype))


def _bit_types(dtype: str) -> tuple[str, ...]:
    """Return the integers that have as many bits as `dtype`, which HDF5 lacks."""
    size = hdf5_type(EMULATED_TYPES[dtype][0]).get_size()
    return {1: ("uint8", "int8"), 2: ("int16", "uint16"), 4: ("uint32", "int32")}[size]


def _converting_reader(dtype_name: str, dataset: ForeignDataset) -> ReadElements:
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptError(
            f"{dataset.path}: labelled {dtype_name!r}, which is not a dtype of torch"
        )
    is_bits = dtype_name in EMULATED_TYPES and dataset.torch_type in _bit_types(dtype_name)

    def convert_elements(start: int, stop: int) -> torch.Tensor:
        tensor = as_tensor(dataset.read_elements(start, stop))
        return tensor.view(dtype) if is_bits else tensor.to(dtype)

    return convert_elements


# Files of other programs


def _open_plain(source: ForeignFile) -> IndexedFile:
    """Open a file without a description of an object.

    Groups become dicts, datasets tensors, arrays or strings.
    """
    leaves: list[StoredLeaf] = []
    root = _group_node(source, source.file, "", (), leaves)
    return _assemble_file(source, root, leaves)


def _group_node(
    source: ForeignFile,
    group: Any,
    path: str,
    enclosing: tuple[Any, ...],
    leaves: list[StoredLeaf],
) -> Node:
    """Return the node of a group; its datasets are added to `leaves`.

    `enclosing` has the addresses of the groups that contain it.
    """
    address = h5py.h5o.get_info(group.id).addr
    if address in enclosing or len(enclosing) > MAX_LEVELS:
        raise CorruptError(f"{path}: links in a cycle")
    keys, children = [], []
    for name in group:
        source.count_visit()
        child_path = f"{path}/{name}".lstrip("/")
        item, real_path = follow_link(source, group, path, name)
        keys.append(Node("value", name))
        if isinstance(item, h5py.Group):
            child = _group_node(source, item, child_path, (*enclosing, address), leaves)
        else:
            child = _leaf_node(source, item, real_path, child_path, leaves)
        children.append(child)

    return Node("dict", None, tuple(keys), tuple(children))


def _leaf_node(
    source: ForeignFile, item: Any, real_path: str, path: str, leaves: list[StoredLeaf]
) -> Node:
    if not isinstance(item, h5py.Dataset):
        raise CorruptError(f"{path}: neither a group nor a dataset")
    dataset = ForeignDataset(source, item, real_path)
    if dataset.shape is None:
        return Node("value", None)
    if h5py.check_string_dtype(dataset.dtype) is not None:
        return _text_node(dataset.read_strings())
    if dataset.dtype.hasobject:
        raise CorruptError(f"{path}: values of HDF5 type {dataset.dtype}, which cannot be loaded")
    number = len(leaves)
    leaves.append(StoredLeaf(path, dataset.torch_type, dataset))
    return Node("tensor", number) if dataset.torch_type else Node("array", (number, None, ()))


def _text_node(value: Any) -> Node:
    if isinstance(value, list):
        return Node("list", None, (), tuple(map(_text_node, value)))
    return Node("value", value)
