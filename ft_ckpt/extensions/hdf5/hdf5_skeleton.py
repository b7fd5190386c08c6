"""Makes the metadata of an HDF5 file by h5py: in front of the data, or in a file that h5py writes.

For the metadata in front of the data, h5py writes into a file in memory. First it creates all
groups, datasets and attributes, whose metadata is then in one piece. Then one element of each
dataset is written, by which the HDF5 library allocates the dataset's bytes behind the metadata;
these bytes are not stored. What precedes the first dataset is the header of the file.
"""

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import groupby
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5fd, h5g, h5o, h5p, h5s, h5t

from ft_ckpt.errors import ConfigError
from ft_ckpt.extensions.hdf5.hdf5_metadata import Attribute, Dataset

GZIP_LEVEL = 4
_MAX_CACHED_SPACES = 256  # describing a shape takes as long as writing an attribute
_ZERO = np.zeros(16, np.uint8)  # the bytes of a zero of any type
_TEXT = h5py.string_dtype()
_TEXT_TYPE = h5t.py_create(_TEXT, logical=True)
_TEXT_IN_MEMORY = h5t.py_create(_TEXT)
_NATIVE = {  # size, position of the sign, position and size of exponent and mantissa; bias
    "bf16": (2, (15, 7, 8, 0, 7), 127),
    "e5m2": (1, (7, 2, 5, 0, 2), 15),
}


def hdf5_header(
    datasets: Sequence[Dataset],
    attributes: Mapping[str, Attribute],
    user_block_bytes: int = 0,
) -> bytes:
    """Return the superblock and all metadata of a file, up to the first byte of its data.

    `attributes` are the root group's. `user_block_bytes` (0, or a power of two from 512) lie in
    front of the superblock and are not part of the result. Raises ConfigError if this version of
    h5py does not place the datasets as laid out.
    """
    placed = [dataset for dataset in datasets if dataset.start is not None]
    placed.sort(key=lambda dataset: dataset.start or 0)
    memory = _MetadataFile()
    with created_file(memory, user_block_bytes) as file:
        create_objects(file, datasets, attributes)
    memory.metadata_end = memory.size_bytes
    offsets: list[int] = []
    for alignment, group in groupby(placed, key=lambda dataset: dataset.alignment):
        with _opened_file(memory, alignment) as file:
            offsets += [_allocate_bytes(file, dataset) for dataset in group]

    start = offsets[0]
    expected = [start + (dataset.start or 0) for dataset in placed]
    end = expected[-1] + dataset_bytes(placed[-1])
    if offsets != expected or memory.size_bytes != end or start < memory.metadata_end:
        raise ConfigError(
            f"HDF5 file: h5py {h5py.__version__} places tensors otherwise than ft_ckpt lays them "
            "out; use h5py 3.11 to 3.16, or another format"
        )

    memory.seek(user_block_bytes)
    return memory.read(start - user_block_bytes)


class _MetadataFile(io.RawIOBase):
    """A file in memory. Behind `metadata_end` nothing is stored: it reads as zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.metadata_end: int | None = None
        self.size_bytes = 0
        self._stored = bytearray()
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.size_bytes)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        stored = self._stored[self._at : self._at + len(buffer)]
        buffer[:] = stored.ljust(len(buffer), b"\0")
        self._at += len(buffer)
        return len(buffer)

    def write(self, data: Any) -> int:
        end = self._at + len(data)
        if self.metadata_end is None or self._at < self.metadata_end:
            self._stored.extend(bytes(max(0, end - len(self._stored))))
            self._stored[self._at : end] = data
        self._at = end
        self.size_bytes = max(self.size_bytes, end)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        self.size_bytes = self._at if size is None else size
        return self.size_bytes


@contextmanager
def created_file(file: io.RawIOBase, user_block_bytes: int = 0) -> Iterator[Any]:
    """Open h5py's low-level file in the empty `file`; every library from HDF5 1.8 on reads it."""
    options = h5p.create(h5p.FILE_CREATE)
    options.set_userblock(user_block_bytes)
    options.set_obj_track_times(False)  # equal objects give equal bytes
    library = h5f.create(b"file", h5f.ACC_TRUNC, fcpl=options, fapl=_access(file, 1))
    try:
        yield library
    finally:
        library.close()


@contextmanager
def _opened_file(file: io.RawIOBase, alignment: int) -> Iterator[Any]:
    library = h5f.open(b"file", h5f.ACC_RDWR, fapl=_access(file, alignment))
    try:
        yield library
    finally:
        library.close()


def _access(file: io.RawIOBase, alignment: int) -> Any:
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_V18, h5f.LIBVER_V110)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_fileobj_driver(h5fd.fileobj_driver, file)
    access.set_alignment(1, alignment)
    return access


def create_objects(
    file: Any,
    datasets: Sequence[Dataset],
    attributes: Mapping[str, Attribute],
) -> None:
    """Create all groups, datasets and attributes; no bytes of datasets are allocated.

    A dataset that shares its attributes with an earlier one, and equals it but for its path, is
    copied from it: a fifth of the time.
    """
    names = h5p.create(h5p.LINK_CREATE)
    names.set_char_encoding(h5t.CSET_UTF8)
    group_options = h5p.create(h5p.GROUP_CREATE)
    group_options.set_obj_track_times(False)
    for group in dict.fromkeys(dataset.path[:-1] for dataset in datasets):
        if group:
            h5g.create(file, encoded_path(group), names, group_options)

    first_paths: dict[tuple[Any, ...], bytes] = {}
    for dataset in datasets:
        path = encoded_path(dataset.path)
        description = (dataset.type, dataset.shape, dataset.chunk, id(dataset.attributes))
        first = first_paths.setdefault(description, path)
        if first != path:
            h5o.copy(file, first, file, path, lcpl=names)
        else:
            _create_dataset(file, path, dataset, names)

    root = h5g.open(file, b"/")
    for name, value in attributes.items():
        _create_attribute(root, name, value)


def encoded_path(path: tuple[str, ...]) -> bytes:
    """Return the path of a group or dataset as HDF5 takes it."""
    return "/".join(path).encode()


def _create_dataset(file: Any, path: bytes, dataset: Dataset, names: Any) -> None:
    options = h5p.create(h5p.DATASET_CREATE)
    options.set_obj_track_times(False)
    options.set_fill_time(h5d.FILL_TIME_NEVER)
    if dataset.chunk:
        options.set_chunk(dataset.chunk)
        options.set_shuffle()
        options.set_deflate(GZIP_LEVEL)
    else:
        options.set_layout(h5d.CONTIGUOUS)
        options.set_alloc_time(h5d.ALLOC_TIME_LATE)
    handle = h5d.create(file, path, hdf5_type(dataset.type), _space(dataset.shape), options, names)
    for name, value in dataset.attributes.items():
        _create_attribute(handle, name, value)


@lru_cache(_MAX_CACHED_SPACES)
def _space(shape: tuple[int, ...] | None) -> Any:
    if shape is None:
        return h5s.create(h5s.NULL)
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


@cache
def hdf5_type(name: str) -> Any:
    """Return the HDF5 type of that name, see `Dataset.type`."""
    if name in _NATIVE:
        size, fields, bias = _NATIVE[name]
        kind = h5t.IEEE_F32LE.copy()
        kind.set_fields(*fields)
        kind.set_offset(0)
        kind.set_precision(8 * size)
        kind.set_size(size)
        kind.set_ebias(bias)
        return kind
    return h5t.py_create(np.dtype(name), logical=True)


def dataset_bytes(dataset: Dataset) -> int:
    """Return the size of the dataset's values in bytes."""
    if dataset.shape is None:
        return 0
    return math.prod(dataset.shape) * _item_bytes(dataset.type)


@cache
def _item_bytes(name: str) -> int:
    return int(hdf5_type(name).get_size())


def _create_attribute(owner: Any, name: str, value: Attribute) -> None:
    if isinstance(value, (str, tuple)):
        array, kind, memory_kind = np.array(value, dtype=_TEXT), _TEXT_TYPE, _TEXT_IN_MEMORY
    else:
        array = np.frombuffer(value, "V1") if isinstance(value, bytes) else np.asarray(value)
        kind = memory_kind = h5t.py_create(array.dtype, logical=True)
    attribute = h5a.create(owner, name.encode("utf-8", "replace"), kind, _space(array.shape))
    attribute.write(array, memory_kind)


def _allocate_bytes(file: Any, dataset: Dataset) -> int:
    """Write one zero element, which allocates the bytes of the dataset.

    Returns the offset of the first one in the file.
    """
    handle = h5d.open(file, encoded_path(dataset.path))
    kind = hdf5_type(dataset.type)
    handle.write(_space((1,)), _first_element(dataset.shape or ()), _ZERO, kind)
    return int(handle.get_offset())


@lru_cache(_MAX_CACHED_SPACES)
def _first_element(shape: tuple[int, ...]) -> Any:
    """Return the space of a dataset of this shape, with its first element selected."""
    space = _space(shape).copy()
    if shape:
        space.select_elements(np.zeros((1, len(shape)), np.uint64))
    return space
