"""Datasets of HDF5 files, as h5py reads them.

h5py follows no link out of the file: names are resolved one by one, and datasets whose values are
in other files are refused. A hostile file can still make the HDF5 library take time or memory, or
end the process.
"""

import importlib
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from ft_ckpt.errors import CorruptError, LoadError
from ft_ckpt.extensions.hdf5.cerebras_types import EMULATED_TYPES, STORABLE_DTYPES
from ft_ckpt.formats import ceil_div
from ft_ckpt.formats.files import FREE_BYTES, RawFile
from ft_ckpt.messages import install_hint, printable

# bytes of values per byte of the file, beyond FREE_BYTES; no compression gives more
_MAX_EXPANSION = 4096
_MIN_LINK_BYTES = 16  # size of a link in a file
_MAX_HOPS = 16  # soft links followed for one name
_PART_BYTES = 32 << 20  # read at a time
# HDF5's own float types
_NATIVE = {(2, 15, 7, 8, 0, 7): "bfloat16", (1, 7, 2, 5, 0, 2): "float8_e5m2"}


@dataclass
class ForeignFile:
    """An open file: its bytes, and h5py's file."""

    raw: RawFile
    file: Any
    start: int  # first byte of the HDF5 file in `raw`
    size_bytes: int
    visits: int = 0  # of links; several may lead to the same object

    def count_visit(self) -> None:
        """Count the visit of a link.

        Raises CorruptError if there were more than the file can contain links.
        """
        self.visits += 1
        if self.visits > 1000 + self.raw.size_bytes // _MIN_LINK_BYTES:
            raise CorruptError("groups in groups, with more links than the file has room for")


class ForeignDataset:
    """One dataset. Raises CorruptError unless its values can lie inside the file."""

    def __init__(self, source: ForeignFile, handle: Any, path: str) -> None:
        """Describe the dataset that `handle`, of h5py, stands for."""
        self.source, self.handle, self.path = source, handle, path
        if handle.external or handle.is_virtual:
            raise CorruptError(
                f"{path}: its values are stored in other files (external storage), which ft_ckpt "
                "does not open"
            )
        self.shape: tuple[int, ...] | None = handle.shape
        self.dtype: np.dtype[Any] = handle.dtype
        self.attributes: Mapping[str, Any] = handle.attrs
        self.start: int | None = handle.id.get_offset()  # None: not in one piece, or without bytes
        self._check_size()

    def _check_size(self) -> None:
        handle, raw = self.handle, self.source.raw
        item_bytes = handle.id.get_type().get_size()
        size_bytes = self.element_count * item_bytes
        chunk_bytes = math.prod(handle.chunks or ()) * item_bytes
        if max(size_bytes, chunk_bytes) > _MAX_EXPANSION * raw.size_bytes + FREE_BYTES:
            raise CorruptError(
                f"{self.path}: {self.shape} of {self.dtype}, {handle.chunks or 'all'} at a "
                f"time, in a file of only {raw.size_bytes} bytes"
            )

        if self.start is None:
            # elements never written have the fill value
            raw.reserve_virtual_bytes(max(0, size_bytes - self._written_bytes()), self.path)
        elif self.start + size_bytes > self.source.size_bytes:
            raise CorruptError(
                f"{self.path}: bytes {self.start} to {self.start + size_bytes}, the file has "
                f"{self.source.size_bytes}; truncated, use another copy"
            )

    def _written_bytes(self) -> int:
        handle = self.handle
        if handle.chunks is None:
            return int(handle.id.get_storage_size())
        return int(handle.id.get_num_chunks() * math.prod(handle.chunks) * self.dtype.itemsize)

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
        name = self.dtype.name
        is_little_endian = self.dtype.byteorder in ("=", "|", "<")
        return (
            name
            if is_little_endian and name in STORABLE_DTYPES and name not in EMULATED_TYPES
            else None
        )

    def read_value(self) -> np.ndarray[Any, Any]:
        return self.read_elements(0, self.element_count).reshape(self.shape or ())

    def read_elements(self, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Read flat elements [start, stop); only the rows that contain them are read."""
        shape = self.shape or ()
        row = math.prod(shape[1:])
        if not shape or not row:
            return self._read_rows(None, None, self.element_count)[start:stop]
        first = start // row
        last = ceil_div(stop, row)
        step = max(1, _PART_BYTES // max(1, row * self.dtype.itemsize))
        if self.handle.chunks is not None:
            step += -step % self.handle.chunks[0]  # chunks are decompressed as a whole
        parts = [
            self._read_rows(low, min(low + step, last), row) for low in range(first, last, step)
        ]
        values = np.concatenate(parts) if len(parts) != 1 else parts[0]
        return values[start - first * row : stop - first * row]

    def read_strings(self) -> Any:
        """Read a string, or nested lists of strings."""
        self._load_filters()
        text = self.handle.asstr(errors="surrogateescape")[()]
        return text.tolist() if self.shape else text

    def _read_rows(self, first: int | None, last: int | None, row: int) -> np.ndarray[Any, Any]:
        """Read rows [first, last) of `row` elements each, flat; for None all, as one row."""
        self._load_filters()
        try:
            values = self.handle[()] if first is None else self.handle[first:last]
        except OSError as error:
            raise CorruptError(
                f"{self.source.raw.name}: {self.path} cannot be read ({error}); use another copy"
            ) from error

        values = np.asarray(values).reshape(-1)
        row_count = 1 if first is None or last is None else last - first
        if len(values) != row * row_count:
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
                f"installed (HDF5 filter {missing[0]}); {install_hint('compression')}"
            )


def find_dataset(source: ForeignFile, path: str) -> ForeignDataset:
    """Find the dataset at `path`, reached by hard links only. Raises CorruptError."""
    item = source.file
    steps = [step for step in path.split("/") if step not in ("", ".")]  # as HDF5 reads paths
    for step in steps or [path]:
        link = item.get(step, getlink=True) if isinstance(item, h5py.Group) else None
        if link is None:
            raise CorruptError(f"{printable(path)[:200]}: {printable(step)[:200]} is missing")
        if not isinstance(link, h5py.HardLink):
            raise CorruptError(
                f"{printable(path)[:200]}: {printable(step)[:200]} is a {type(link).__name__}, "
                "which is not followed"
            )
        item = item[step]

    if not isinstance(item, h5py.Dataset):
        raise CorruptError(f"{printable(path)[:200]}: a group, expected a dataset")
    return ForeignDataset(source, item, "/".join(steps))


def follow_link(
    source: ForeignFile, group: Any, path: str, name: str, hops: int = 0
) -> tuple[Any, str]:
    """Resolve the link `name` in `group` (at `path`) to an object and its path by hard links.

    Soft links are followed part by part, because any part may be a link to another file. Raises
    CorruptError for a link that leads out of the file or to nothing.
    """
    link_path = f"{path}/{name}".lstrip("/")
    link = group.get(name, getlink=True) if isinstance(group, h5py.Group) else None
    if isinstance(link, h5py.HardLink):
        return group[name], link_path
    if isinstance(link, h5py.ExternalLink):
        raise CorruptError(
            f"{link_path}: a link to another file, {link.filename}, which is not followed"
        )

    if not isinstance(link, h5py.SoftLink) or hops > _MAX_HOPS:
        raise CorruptError(f"{link_path}: a link to nothing, or to itself, which is not followed")
    item, item_path = (source.file, "") if link.path.startswith("/") else (group, path)
    for step in link.path.split("/"):
        if step not in ("", "."):
            source.count_visit()
            item, item_path = follow_link(source, item, item_path, step, hops + 1)

    return item, item_path
