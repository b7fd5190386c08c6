"""HDF5 files by other hands, through the HDF5 library: found, checked, and read without leaving the file.

Soft links that lead in circles, external links and storage, virtual datasets, sizes that the file cannot hold and
filters that are not installed are refused by name. A dataset without chunks is mapped like ours.
"""

import importlib
import io
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import h5py
import numpy as np
import torch

from ft_ckpt.errors import CorruptError
from ft_ckpt.formats import cerebras
from ft_ckpt.formats.cerebras_read import Reader, Stored
from ft_ckpt.formats.hdf5 import HDF5File, Index, moved_index
from ft_ckpt.formats.hdf5_bytes import TYPES
from ft_ckpt.formats.hdf5_probe import probe
from ft_ckpt.formats.lz4_chunks import LZ4, read_lz4
from ft_ckpt.formats.raw import RawFile
from ft_ckpt.tree import MOST_LEVELS, Node

MOST_EXPANSION = 4096  # elements may take this many times the bytes of the file, and 64 MiB; beyond is no compression
_NATIVE = {(2, 15, 7, 8, 0, 7): "bfloat16", (1, 7, 2, 5, 0, 2): "float8_e5m2"}  # HDF5's own float types


def walk(raw: RawFile, verify: bool = False) -> HDF5File:
    """The file with the places of its tensors found by the HDF5 library. Raises CorruptError for what is refused."""
    raw.check()
    trouble = probe(raw.descriptor)
    if trouble is not None:
        raise CorruptError(f"{raw.path.name}: {trouble}; use another copy of the file")
    try:
        file = h5py.File(_Bytes(raw), "r")
        stale = _stale(raw, file, verify)
        if stale is not None:
            return stale
        if "__version__" in file.attrs:
            return _cerebras(raw, file)
        return _plain(raw, file)
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, CorruptError):
            raise CorruptError(f"{raw.path.name}: {str(error).removeprefix(raw.path.name + ': ')}") from error
        raise CorruptError(f"{raw.path.name}: the HDF5 library cannot read it ({error}); use another copy") from error


class _Bytes(io.RawIOBase):
    """The open file for the HDF5 library, which given a path would open whatever has that name by now, or share what
    it remembers of a file that has been overwritten since."""

    def __init__(self, raw: RawFile) -> None:
        super().__init__()
        self.raw, self.at = raw, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to `offset` from the start, from here, or from the end."""
        self.at = offset + (0, self.at, self.raw.size_bytes)[whence]
        return self.at

    def tell(self) -> int:
        """Where this is."""
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from here. Raises CorruptError when the file has changed."""
        wanted = min(len(buffer), max(0, self.raw.size_bytes - self.at))
        buffer[:wanted] = self.raw.bytes(self.at, wanted)
        self.at += wanted
        return wanted


class Dataset:
    """One dataset, checked to lie inside the file."""

    def __init__(self, raw: RawFile, handle: Any, path: str) -> None:
        self.raw, self.handle, self.path = raw, handle, path
        self.shape: tuple[int, ...] | None = handle.shape
        self.dtype: np.dtype[Any] = handle.dtype
        self.attributes: Mapping[str, Any] = handle.attrs
        self.start: int | None = handle.id.get_offset()
        if set(handle._filters) - {str(LZ4)}:  # h5py's only way to see filters it has no name for
            with suppress(ImportError):
                importlib.import_module("hdf5plugin")  # which tells the HDF5 library of its filters
        _check(self)

    @property
    def elements(self) -> int:
        """How many there are."""
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

    def value(self) -> np.ndarray[Any, Any]:
        """All of it."""
        try:
            filters = self.handle._filters
            if str(LZ4) in filters and not h5py.h5z.filter_avail(LZ4):
                return read_lz4(self.handle)
            return np.asarray(self.handle[()])
        except (OSError, RuntimeError, ValueError) as error:
            raise CorruptError(
                f"{self.raw.path.name}: {self.path} cannot be read ({error}); it is damaged, or compressed with a "
                f"filter that is not installed here (it uses {list(self.handle._filters) or 'none'}; pip install "
                "hdf5plugin)"
            ) from error

    def rows(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Elements [start, stop) of the flat values, from as few rows as hold them."""
        shape = self.shape or ()
        row = math.prod(shape[1:])
        if not shape or not row or str(LZ4) in self.handle._filters:
            return self.value().reshape(-1)[start:stop]
        first, last = start // row, -(-stop // row)
        try:
            part = np.asarray(self.handle[first:last])
        except (OSError, RuntimeError, ValueError):
            return self.value().reshape(-1)[start:stop]  # for its words about filters
        return part.reshape(-1)[start - first * row : stop - first * row]


def torch_types() -> frozenset[str]:
    """The numpy types that torch has too, by their common name."""
    return frozenset(name for name in cerebras.DTYPES if name not in cerebras.STORED)


def _check(dataset: Dataset) -> None:
    handle, size = dataset.handle, dataset.raw.size_bytes
    if handle.external or handle.is_virtual:
        raise CorruptError(f"{dataset.path}: its values are in other files, which are not followed")
    wanted = dataset.elements * handle.id.get_type().get_size()
    if wanted > MOST_EXPANSION * size + (64 << 20):
        raise CorruptError(f"{dataset.path}: {dataset.shape} of {dataset.dtype} in a file of only {size} bytes")
    if dataset.start is not None and dataset.start + wanted > size:
        raise CorruptError(
            f"{dataset.path}: bytes {dataset.start} to {dataset.start + wanted}, the file has {size}; it was cut short"
        )


def _find(raw: RawFile, file: Any, path: str) -> Dataset:
    """The dataset at `path`, reached by hard links alone."""
    place = file
    for part in path.split("/"):
        link = place.get(part, getlink=True) if isinstance(place, h5py.Group) else None
        if not isinstance(link, h5py.HardLink):
            what = "is not there" if link is None else f"is a {type(link).__name__}, which is not followed"
            raise CorruptError(f"{path[:200]}: {part[:200]} {what}")
        place = place[part]
    if not isinstance(place, h5py.Dataset):
        raise CorruptError(f"{path[:200]}: a group where a dataset should be")
    return Dataset(raw, place, path)


def _stale(raw: RawFile, file: Any, verify: bool) -> HDF5File | None:
    """Our own index where another program has moved the data: what it says is kept, the places are looked up.

    None where there is none, or where that program has changed more than places. Raises CorruptError for a damaged one.
    """
    if file.get(cerebras.INDEX, getlink=True) is None:
        return None
    index = moved_index(_find(raw, file, cerebras.INDEX).value().tobytes(), raw.path.name)
    rows, readers = {}, {}
    for name, spec in index.specs.items():
        try:
            dataset = _find(raw, file, "/".join(cerebras.dataset_path(name)))
        except CorruptError:
            return None
        size = TYPES[cerebras.stored_type(spec.dtype)][0]
        same = dataset.shape == spec.shape and dataset.handle.id.get_type().get_size() == size
        if not same:
            return None
        if dataset.start is None and spec.size_bytes:
            readers[name] = _converter(spec.dtype, dataset)
        rows[name] = [*index.rows[name][:2], dataset.start or 0, *index.rows[name][3:5]]
    result = HDF5File(raw, Index(rows, index.root, index.metadata), verify)
    result.readers, result.library = readers, file
    return result


def _cerebras(raw: RawFile, file: Any) -> HDF5File:
    reader = Reader(_Attributes(file.attrs), lambda path: _find(raw, file, path))
    root = reader.read()
    return _assemble(raw, root, reader.leaves, file)


class _Attributes(Mapping[str, Any]):
    """The root's attributes, each read when it is asked for."""

    def __init__(self, attributes: Any) -> None:
        self.attributes = attributes

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.attributes)

    def __len__(self) -> int:
        return len(self.attributes)


def _assemble(raw: RawFile, root: Node, leaves: list[Stored], file: Any) -> HDF5File:
    rows: dict[str, Any] = {}
    readers: dict[str, Any] = {}
    for leaf in leaves:
        dataset: Any = leaf.dataset
        shape = leaf.shape if dataset is None else dataset.shape
        if shape is None:
            raise CorruptError(f"{leaf.name}: a tensor without a shape")
        start = None if dataset is None else dataset.start
        rows[leaf.name] = [leaf.dtype or dataset.dtype.name, shape, start or 0, "", len(rows)]
        reader = _reader(leaf, dataset)
        if reader is not None:
            readers[leaf.name] = reader
    result = HDF5File(raw, Index(rows, root, {}))
    result.readers, result.library = readers, file
    return result


def _reader(leaf: Stored, dataset: Any) -> Any:
    """How to read what cannot be mapped; None for what can."""
    if dataset is None:
        return _filler(leaf)
    if leaf.dtype is None:
        return lambda _start, _stop: dataset.value()
    return None if _same_bytes(leaf.dtype, dataset) else _converter(leaf.dtype, dataset)


def _same_bytes(dtype: str, dataset: Dataset) -> bool:
    """True when the file's own bytes are those of torch's `dtype`, and lie in one run."""
    if dataset.start is None and dataset.elements:
        return False
    kind = dataset.torch_type
    return kind == dtype or (dtype in cerebras.STORED and kind in _bit_types(dtype))


def _bit_types(dtype: str) -> tuple[str, ...]:
    size = TYPES[cerebras.STORED[dtype][0]][0]
    return {1: ("uint8", "int8"), 2: ("int16", "uint16"), 4: ("uint32", "int32")}[size]


def _converter(dtype: str, dataset: Dataset) -> Any:
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise CorruptError(f"{dataset.path}: labelled {dtype!r}, which is no type of torch")

    def convert(start: int, stop: int) -> torch.Tensor:
        values = np.ascontiguousarray(dataset.rows(start, stop))
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
        tensor = torch.from_numpy(values)
        if dtype in cerebras.STORED and dataset.torch_type in _bit_types(dtype):
            return tensor.view(wanted)
        return tensor.to(wanted)

    return convert


def _filler(leaf: Stored) -> Any:
    dtype = getattr(torch, leaf.dtype or "")
    return lambda start, stop: torch.full((stop - start,), leaf.fill or 0, dtype=dtype)


def _plain(raw: RawFile, file: Any) -> HDF5File:
    """A file that says nothing of objects: groups are dicts, datasets are tensors or arrays, strings are strings."""
    leaves: list[Stored] = []
    root = _group(raw, file, "", (), leaves)
    return _assemble(raw, root, leaves, file)


def _group(raw: RawFile, group: Any, path: str, above: tuple[Any, ...], leaves: list[Stored]) -> Node:
    here = h5py.h5o.get_info(group.id).addr
    if here in above or len(above) > MOST_LEVELS:
        raise CorruptError(f"{path}: links that lead in circles")
    keys, children = [], []
    for name in group:
        place, link = f"{path}/{name}".lstrip("/"), group.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise CorruptError(f"{place}: a link to {link.filename}, another file, which is not followed")
        item = group.get(name)
        if item is None:
            raise CorruptError(f"{place}: a link that leads nowhere or in circles")
        keys.append(Node("value", name))
        is_group = isinstance(item, h5py.Group)
        children.append(
            _group(raw, item, place, (*above, here), leaves) if is_group else _plain_leaf(raw, item, place, leaves)
        )
    return Node("dict", None, tuple(keys), tuple(children))


def _plain_leaf(raw: RawFile, item: Any, path: str, leaves: list[Stored]) -> Node:
    if not isinstance(item, h5py.Dataset):
        raise CorruptError(f"{path}: neither a group nor a dataset")
    dataset = Dataset(raw, item, path)
    if dataset.shape is None:
        return Node("value", None)
    if h5py.check_string_dtype(dataset.dtype) is not None:
        text = np.asarray(item.asstr(errors="surrogateescape")[()])
        return Node("value", text.item()) if not dataset.shape else _texts(text.tolist())
    if dataset.dtype.hasobject:
        raise CorruptError(f"{path}: values of HDF5 type {dataset.dtype}, which cannot be kept")
    leaves.append(Stored(path, dataset.torch_type, dataset))
    index = len(leaves) - 1
    return Node("tensor", index) if dataset.torch_type else Node("array", (index, None, ()))


def _texts(value: Any) -> Node:
    return Node("list", None, (), tuple(map(_texts, value))) if isinstance(value, list) else Node("value", value)
