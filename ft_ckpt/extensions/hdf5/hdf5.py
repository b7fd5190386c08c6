"""Opens HDF5 files: our own by their index, compressed ones and those of other programs by h5py.

h5py follows no link out of the file: names are resolved one by one, by hard links, and datasets
whose values are in other files are refused. A hostile file can still make the HDF5 library take
time or memory, or end the process.
"""

import importlib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import h5py
import numpy as np
import torch

from ft_ckpt.errors import CorruptError, LoadError, damaged_input
from ft_ckpt.extensions.hdf5 import cerebras
from ft_ckpt.extensions.hdf5.cerebras import CerebrasReader, StoredLeaf
from ft_ckpt.extensions.hdf5.hdf5_skeleton import hdf5_type
from ft_ckpt.formats import (
    FREE_BYTES,
    ITEM_BYTES,
    MOST_LEVELS,
    FileStream,
    IndexedFile,
    Node,
    RawFile,
    TensorIndex,
    as_tensor,
    moved_index,
    read_index,
)
from ft_ckpt.messages import install_extra, printable
from ft_ckpt.storage import local_version

SIGNATURE = b"\x89HDF\r\n\x1a\n"


def is_hdf5(file: RawFile) -> bool:
    """True if the signature of HDF5 is at the start of the file, or after a user block that is not
    a dual file's.
    """
    return _is_signature_at(file, 0) or (
        file.size_bytes > 8 and file.bytes(8, 1) != b"{" and has_user_block(file)
    )


def has_user_block(file: RawFile) -> bool:
    """True if the signature follows a user block of 512 * 2**n bytes."""
    sizes = [1 << n for n in range(9, 31)]
    return any(_is_signature_at(file, size) for size in sizes if size < file.size_bytes)


def _is_signature_at(file: RawFile, start: int) -> bool:
    size = len(SIGNATURE)
    return start + size <= file.size_bytes and file.bytes(start, size) == SIGNATURE


def open_hdf5(raw: RawFile, verify: bool = False) -> IndexedFile:
    """The tensors of an HDF5 file: ours, a Cerebras checkpoint, or any other of groups and
    datasets.

    Raises CorruptError when it is damaged or incomplete, or refers to other files.
    """
    index = read_index(raw)
    is_compressed = index is not None and any(len(row) > 5 for row in index.rows.values())
    if index is None or is_compressed:
        return open_foreign(raw, verify)
    return IndexedFile(raw, index, verify)


# bytes of values per byte of the file, beyond FREE_BYTES; no compression gives more
_MOST_EXPANSION = 4096
_LEAST_LINK_BYTES = 16  # size of a link in a file
_MOST_HOPS = 16  # soft links followed for one name
_PART_BYTES = 32 << 20  # read at a time
# HDF5's own float types
_NATIVE = {(2, 15, 7, 8, 0, 7): "bfloat16", (1, 7, 2, 5, 0, 2): "float8_e5m2"}


@dataclass
class _ForeignFile:
    """An open file: its bytes, and h5py's file."""

    raw: RawFile
    file: Any
    part: tuple[int, int]  # first byte in `raw` and size of the HDF5 file
    visits: int = 0  # of links; several may lead to the same object

    def count_visit(self) -> None:
        """Count the visit of a link.

        Raises CorruptError if there were more than the file can contain links.
        """
        self.visits += 1
        if self.visits > 1000 + self.raw.size_bytes // _LEAST_LINK_BYTES:
            raise CorruptError("groups in groups, with more links than the file has room for")


def open_foreign(
    raw: RawFile, verify: bool = False, part: tuple[int, int] | None = None
) -> IndexedFile:
    """The file, or its `part` (first byte, size), as the HDF5 library reads it.

    Raises CorruptError.
    """
    raw.check()
    part = part or (0, raw.size_bytes)
    with damaged_input(f"{raw.name}: an HDF5 file"):
        local = local_version(raw.file)  # h5py reads in many small steps
        raw = raw if local is raw.file else RawFile(local)
        source = _ForeignFile(raw, h5py.File(FileStream(raw, *part), "r"), part)
        open_whole = _open_cerebras if "__version__" in source.file.attrs else _open_plain
        return _open_moved(source, verify) or open_whole(source)


class ForeignDataset:
    """One dataset. Raises CorruptError unless its values can lie inside the file."""

    def __init__(self, source: _ForeignFile, handle: Any, path: str) -> None:
        self.source, self.handle, self.path = source, handle, path
        if handle.external or handle.is_virtual:
            raise CorruptError(
                f"{path}: its values are stored in other files (external storage), which ft_ckpt "
                "does not open"
            )
        self.shape: tuple[int, ...] | None = handle.shape
        self.dtype: np.dtype[Any] = handle.dtype
        self.attributes: Mapping[str, Any] = handle.attrs
        self.start: int | None = handle.id.get_offset()
        _check_dataset(self)

    @property
    def element_count(self) -> int:
        return math.prod(self.shape) if self.shape is not None else 0

    @property
    def torch_type(self) -> str | None:
        """torch's name of the type, None when torch has no such type."""
        kind = self.handle.id.get_type()
        if isinstance(kind, h5py.h5t.TypeFloatID):
            native = _NATIVE.get((kind.get_size(), *kind.get_fields()))
            if native is not None:
                return native
        name, is_little = self.dtype.name, self.dtype.byteorder in ("=", "|", "<")
        return (
            name if is_little and name in cerebras.DTYPES and name not in cerebras.STORED else None
        )

    def read_value(self) -> np.ndarray[Any, Any]:
        return self.read_elements(0, self.element_count).reshape(self.shape or ())

    def read_elements(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Elements [start, stop) of the flat values; only the rows that contain them are read."""
        shape = self.shape or ()
        row = math.prod(shape[1:])
        if not shape or not row:
            return self._read_rows(None, None, self.element_count)[start:stop]
        first, last = start // row, -(-stop // row)
        step = max(1, _PART_BYTES // max(1, row * self.dtype.itemsize))
        if self.handle.chunks is not None:
            step += -step % self.handle.chunks[0]  # chunks are decompressed as a whole
        parts = [self._read_rows(at, min(at + step, last), row) for at in range(first, last, step)]
        values = np.concatenate(parts) if len(parts) != 1 else parts[0]
        return values[start - first * row : stop - first * row]

    def read_strings(self) -> Any:
        """A string, or nested lists of strings."""
        self._load_filters()
        text = self.handle.asstr(errors="surrogateescape")[()]
        return text.tolist() if self.shape else text

    def _read_rows(self, first: int | None, last: int | None, row: int) -> np.ndarray[Any, Any]:
        """Rows [first, last) of `row` elements each, flat; None: all."""
        self._load_filters()
        try:
            values = self.handle[()] if first is None else self.handle[first:last]
        except OSError as error:
            raise CorruptError(
                f"{self.source.raw.name}: {self.path} cannot be read ({error}); use another copy"
            ) from error
        values = np.asarray(values).reshape(-1)
        if len(values) != row * (1 if first is None or last is None else last - first):
            raise CorruptError(
                f"{self.source.raw.name}: {self.path} has {len(values)} values, "
                f"not {row} in each row"
            )
        return values

    def _load_filters(self) -> None:
        """Load the filters of hdf5plugin if the dataset needs them.

        Raises LoadError when a filter is in neither library.
        """
        options = self.handle.id.get_create_plist()
        filters = [options.get_filter(number)[0] for number in range(options.get_nfilters())]
        if not all(map(h5py.h5z.filter_avail, filters)):
            with suppress(ImportError):
                importlib.import_module("hdf5plugin")  # registers its filters with the HDF5 library
        missing = [code for code in filters if not h5py.h5z.filter_avail(code)]
        if missing:
            raise LoadError(
                f"{self.source.raw.name}: {self.path} is compressed by a filter that is not "
                f"installed (HDF5 filter {missing[0]}); {install_extra('compression')}"
            )


def _most_bytes(raw: RawFile) -> int:
    """Upper limit for the size of one dataset's values."""
    return _MOST_EXPANSION * raw.size_bytes + FREE_BYTES


def _check_dataset(dataset: ForeignDataset) -> None:
    handle, raw = dataset.handle, dataset.source.raw
    item_bytes = handle.id.get_type().get_size()
    wanted, chunk = dataset.element_count * item_bytes, math.prod(handle.chunks or ()) * item_bytes
    if max(wanted, chunk) > _most_bytes(raw):
        raise CorruptError(
            f"{dataset.path}: {dataset.shape} of {dataset.dtype}, {handle.chunks or 'all'} at a "
            f"time, in a file of only {raw.size_bytes} bytes"
        )
    size_bytes = dataset.source.part[1]
    if dataset.start is not None and dataset.start + wanted > size_bytes:
        raise CorruptError(
            f"{dataset.path}: bytes {dataset.start} to {dataset.start + wanted}, the file has "
            f"{size_bytes}; truncated, use another copy"
        )
    if dataset.start is None:
        written = handle.id.get_storage_size()
        if handle.chunks is not None:
            written = handle.id.get_num_chunks() * math.prod(handle.chunks) * dataset.dtype.itemsize
        # elements never written have the fill value
        raw.promise(max(0, wanted - written), dataset.path)


def _find_dataset(source: _ForeignFile, path: str) -> ForeignDataset:
    """The dataset at `path`, reached by hard links only."""
    # as HDF5 reads paths
    item, parts = source.file, [part for part in path.split("/") if part not in ("", ".")]
    for part in parts or [path]:
        link = item.get(part, getlink=True) if isinstance(item, h5py.Group) else None
        if not isinstance(link, h5py.HardLink):
            found = (
                "is missing"
                if link is None
                else f"is a {type(link).__name__}, which is not followed"
            )
            raise CorruptError(f"{printable(path)[:200]}: {printable(part)[:200]} {found}")
        item = item[part]
    if not isinstance(item, h5py.Dataset):
        raise CorruptError(f"{printable(path)[:200]}: a group, expected a dataset")
    return ForeignDataset(source, item, "/".join(parts))


def _open_moved(source: _ForeignFile, verify: bool) -> IndexedFile | None:
    """A file of ours in which another program has moved the data: its index, with offsets from the
    HDF5 library.

    None if there is no index, or if that program has changed more than offsets. Raises CorruptError
    if it is damaged.
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
        size = hdf5_type(cerebras.stored_type(spec.dtype)).get_size()
        if dataset.shape != spec.shape or dataset.handle.id.get_type().get_size() != size:
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
    return result


def _open_cerebras(source: _ForeignFile) -> IndexedFile:
    reader = CerebrasReader(source.file.attrs, lambda path: _find_dataset(source, path))
    return _assemble_file(source, reader.read_tree(), reader.leaves)


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
        dtype = getattr(torch, leaf.dtype or "")
        return lambda start, stop: torch.full(
            (stop - start,), leaf.fill or 0, dtype=dtype, device="cpu"
        )
    if leaf.dtype is None:
        return dataset.read_elements
    return None if _same_bytes(leaf.dtype, dataset) else _converting_reader(leaf.dtype, dataset)


def _same_bytes(dtype: str, dataset: ForeignDataset) -> bool:
    """True if the dataset is contiguous and stores the bytes of torch's `dtype`."""
    if dataset.start is None and dataset.element_count:
        return False
    kind = dataset.torch_type
    return kind == dtype or (dtype in cerebras.STORED and kind in _bit_types(dtype))


def _bit_types(dtype: str) -> tuple[str, ...]:
    size = hdf5_type(cerebras.STORED[dtype][0]).get_size()
    return {1: ("uint8", "int8"), 2: ("int16", "uint16"), 4: ("uint32", "int32")}[size]


def _converting_reader(dtype: str, dataset: ForeignDataset) -> Any:
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise CorruptError(f"{dataset.path}: labelled {dtype!r}, which is not a dtype of torch")

    def convert_elements(start: int, stop: int) -> torch.Tensor:
        tensor = as_tensor(dataset.read_elements(start, stop))
        if dtype in cerebras.STORED and dataset.torch_type in _bit_types(dtype):
            return tensor.view(wanted)
        return tensor.to(wanted)

    return convert_elements


def _open_plain(source: _ForeignFile) -> IndexedFile:
    """A file without a description of an object: groups become dicts, datasets tensors, arrays or
    strings.
    """
    leaves: list[StoredLeaf] = []
    root = _group_node(source, source.file, "", (), leaves)
    return _assemble_file(source, root, leaves)


def _group_node(
    source: _ForeignFile, group: Any, path: str, above: tuple[Any, ...], leaves: list[StoredLeaf]
) -> Node:
    """The node of a group; its datasets are added to `leaves`.

    `above`: addresses of the groups that contain it.
    """
    address = h5py.h5o.get_info(group.id).addr
    if address in above or len(above) > MOST_LEVELS:
        raise CorruptError(f"{path}: links in a cycle")
    keys, children = [], []
    for name in group:
        source.count_visit()
        place = f"{path}/{name}".lstrip("/")
        item, real = _follow_link(source, group, path, name)
        keys.append(Node("value", name))
        if isinstance(item, h5py.Group):
            children.append(_group_node(source, item, place, (*above, address), leaves))
        else:
            children.append(_plain_leaf(source, item, real, place, leaves))
    return Node("dict", None, tuple(keys), tuple(children))


def _follow_link(
    source: _ForeignFile, group: Any, path: str, name: str, hops: int = 0
) -> tuple[Any, str]:
    """The object that the link `name` in `group` (at `path`) resolves to, and its path by hard
    links.

    Soft links are followed part by part, because any part may be a link to another file.
    """
    place = f"{path}/{name}".lstrip("/")
    link = group.get(name, getlink=True) if isinstance(group, h5py.Group) else None
    if isinstance(link, h5py.HardLink):
        return group[name], place
    if not isinstance(link, h5py.SoftLink) or hops > _MOST_HOPS:
        target = (
            f"another file, {link.filename}"
            if isinstance(link, h5py.ExternalLink)
            else "nothing, or to itself"
        )
        raise CorruptError(f"{place}: a link to {target}, which is not followed")
    item, at = (source.file, "") if link.path.startswith("/") else (group, path)
    for part in link.path.split("/"):
        if part not in ("", "."):
            source.count_visit()
            item, at = _follow_link(source, item, at, part, hops + 1)
    return item, at


def _plain_leaf(
    source: _ForeignFile, item: Any, real: str, path: str, leaves: list[StoredLeaf]
) -> Node:
    if not isinstance(item, h5py.Dataset):
        raise CorruptError(f"{path}: neither a group nor a dataset")
    dataset = ForeignDataset(source, item, real)
    if dataset.shape is None:
        return Node("value", None)
    if h5py.check_string_dtype(dataset.dtype) is not None:
        text = dataset.read_strings()
        return _text_node(text) if dataset.shape else Node("value", text)
    if dataset.dtype.hasobject:
        raise CorruptError(f"{path}: values of HDF5 type {dataset.dtype}, which cannot be loaded")
    leaves.append(StoredLeaf(path, dataset.torch_type, dataset))
    index = len(leaves) - 1
    return Node("tensor", index) if dataset.torch_type else Node("array", (index, None, ()))


def _text_node(value: Any) -> Node:
    return (
        Node("list", None, (), tuple(map(_text_node, value)))
        if isinstance(value, list)
        else Node("value", value)
    )
