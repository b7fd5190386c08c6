"""HDF5 files that can be mapped: all metadata first, then the tensors, then an index with their digests.

    superblock and metadata | to a page | large tensors, each on a page | small ones, each on 64 bytes | index

The file is at the same time a Cerebras checkpoint of format 0.5, and any HDF5 tool lists it. The index is a dataset of
bytes that ends the file: JSON (metadata, tree of the object, and of each tensor type, shape, place and xxh3-128
digest) and a footer of 64 bytes. Our reader asks the HDF5 library only when there is no index, or when the footer
says that another program has moved things since.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from ft_ckpt.errors import CorruptError, SelectionError, damaged_input, listing
from ft_ckpt.formats.hdf5 import cerebras_write
from ft_ckpt.formats.hdf5 import metadata as hdf5_bytes
from ft_ckpt.formats.hdf5.index import (
    FOOTER_BYTES,
    Row,
    TensorIndex,
    flat_tree,
    index_footer,
    index_text,
    is_flat,
    read_index,
    with_digests,
)
from ft_ckpt.formats.layout import Layout, Spec
from ft_ckpt.formats.mapped_file import MAP_BYTES, RawFile
from ft_ckpt.formats.pytree import Node
from ft_ckpt.storage.buffers import ByteRun

SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SMALL_STEP = 64


def lay_out_hdf5(specs: Sequence[Spec], metadata: Mapping[str, str], native_floats: bool = False) -> Layout:
    """The layout of a file that holds `specs` as one flat dict.

    `native_floats` gives bfloat16 and float8_e5m2 HDF5's own types, so every reader shows their values. Raises
    SelectionError naming dtypes the format cannot keep.
    """
    foreign = [f"{spec.name}: {spec.dtype}" for spec in specs if spec.dtype not in cerebras_write.DTYPES]
    if foreign:
        raise SelectionError(f"{listing(foreign, ', ')}: HDF5 files keep no such type here; convert it")
    root = flat_tree(specs)
    content = cerebras_write.describe_checkpoint(root, specs, native_floats=native_floats)
    return _hdf5_layout(specs, content, None, dict(metadata))


def lay_out_hdf5_tree(
    root: Node, leaves: Sequence[Spec], arrays: Sequence[int], native_floats: bool = False
) -> tuple[Layout, Sequence[str]]:
    """The layout of a file that holds the object `root`, and the name of each leaf in it."""
    content = cerebras_write.describe_checkpoint(root, leaves, arrays, native_floats)
    specs = [Spec(name, leaf.shape, leaf.dtype) for name, leaf in zip(content.names, leaves, strict=True)]
    return _hdf5_layout(specs, content, None if is_flat(root, content.names) else root, {}), content.names


def lay_out_hdf5_tied(specs: Sequence[Spec], ties: Mapping[str, str], metadata: Mapping[str, str]) -> Layout:
    """The layout of a flat dict in which a tied tensor stands under each of its names; `ties`: alias to kept name."""
    if not ties:
        return lay_out_hdf5(specs, metadata)
    places = {spec.name: place for place, spec in enumerate(specs)}
    places |= {name: places[kept] for name, kept in ties.items()}
    keys = tuple(Node("value", name) for name in places)
    root = Node("dict", None, keys, tuple(Node("tensor", place) for place in places.values()))
    return lay_out_hdf5_tree(root, specs, ())[0]


def index_rows(specs: Sequence[Spec], order: Sequence[int], starts: Sequence[int], digest: str) -> dict[str, Row]:
    """The rows of `specs`, in file order, all with one `tensor_digest`."""
    return {
        specs[leaf].name: [specs[leaf].dtype, specs[leaf].shape, start, digest, leaf]
        for leaf, start in zip(order, starts, strict=True)
    }


def place_tensors(specs: Sequence[Spec], start: int = 0) -> tuple[list[int], list[int], int]:
    """The order of `specs` in the file as indexes, their starts in that order, and the end of the last."""
    large = [index for index, spec in enumerate(specs) if spec.size_bytes >= MAP_BYTES]
    small = [index for index, spec in enumerate(specs) if spec.size_bytes < MAP_BYTES]
    starts, at = [], start
    for step, group in ((hdf5_bytes.PAGE_BYTES, large), (_SMALL_STEP, small)):
        for index in group:
            at += -at % step
            starts.append(at)
            at += specs[index].size_bytes
    return large + small, starts, at


def _hdf5_layout(
    specs: Sequence[Spec], content: cerebras_write.Content, root: Node | None, metadata: Mapping[str, str]
) -> Layout:
    order, starts, end = place_tensors(specs)
    index = TensorIndex(index_rows(specs, order, starts, "0" * 32), root, metadata)
    index_start = end + -end % _SMALL_STEP
    index_bytes = len(index_text(index)) + FOOTER_BYTES
    datasets = placed_datasets(content.datasets, dict(zip(order, starts, strict=True)))
    datasets.append(index_dataset(index_bytes, index_start))
    header = hdf5_bytes.hdf5_header(datasets, content.attributes, index_start + index_bytes)
    data_start, size_bytes = len(header), len(header) + index_start + index_bytes

    def make_trailer(digests: Mapping[str, bytes]) -> bytes:
        text = index_text(with_digests(index, digests))
        return text + index_footer(text, data_start, data_start + index_start, size_bytes)

    ordered = tuple(specs[leaf] for leaf in order)
    return Layout(header, ordered, tuple(data_start + start for start in starts), size_bytes,
                  data_start + index_start, make_trailer)  # fmt: skip


def tensor_digest(data: Any) -> str:
    """The digest of a tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(data)


def chunk_checksum(data: Any) -> str:
    """The digest of a part of a tensor."""
    return xxhash.xxh3_64_hexdigest(data)


def placed_datasets(datasets: Sequence[hdf5_bytes.Dataset], starts: Mapping[int, int]) -> list[hdf5_bytes.Dataset]:
    """`datasets` with the places of their bytes; those without bytes have none."""
    return [
        hdf5_bytes.Dataset(item.path, item.type, item.shape, item.attributes, starts[number])
        if number in starts and item.size_bytes
        else item
        for number, item in enumerate(datasets)
    ]


def index_dataset(size_bytes: int, start: int) -> hdf5_bytes.Dataset:
    """The dataset that holds the index."""
    return hdf5_bytes.Dataset((cerebras_write.INDEX,), "u1", (size_bytes,), {}, start)


class IndexedFile:
    """An open HDF5 file: `specs` by name, and its `index` with the tree of the object and the names of its leaves."""

    def __init__(self, raw: RawFile, index: TensorIndex, verify: bool = False) -> None:
        self.raw, self.index, self.verify = raw, index, verify
        self.readers: dict[str, Callable[[int, int], Any]] = {}  # of those that cannot be mapped
        self.library: Any = None  # h5py's file, where its calls are needed

    @property
    def specs(self) -> dict[str, Spec]:
        """What there is, in file order; for a foreign file, in the order of its tree."""
        return self.index.specs

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flat tensor `name`; only their bytes are read or mapped.

        Raises CorruptError when the file has changed, is too short or, with `verify`, has another digest.
        """
        with damaged_input(f"{self.raw.path.name}: {name}"):
            return self._read_elements(name, start, stop)

    def _read_elements(self, name: str, start: int, stop: int | None) -> torch.Tensor:
        kind, shape, *_ = self.index.rows[name]
        dtype = getattr(torch, kind, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptError(f"{self.raw.path.name}: {name} is of type {kind!r}, which this torch has not")
        whole, stop = start == 0 and stop is None, math.prod(shape) if stop is None else stop
        if name in self.readers:
            self.raw.check()
            tensor = as_tensor(self.readers[name](start, stop)).reshape(-1)
            if whole and self.verify:
                self._verify_digest(name, tensor)
            return tensor
        tensor = self.raw.tensor(self.index.start(name) + start * dtype.itemsize, stop - start, dtype)
        if whole and self.verify:
            self._verify_digest(name, tensor)
        return tensor

    @property
    def has_digests(self) -> bool:
        """Whether every tensor can be verified."""
        return all(row[3] for row in self.index.rows.values())

    def runs(self, name: str) -> list[ByteRun] | None:
        """Where the bytes of tensor `name` lie; None when it is not stored in one piece."""
        run = ByteRun(name, self.raw, self.index.start(name), self.specs[name].size_bytes)
        return None if name in self.readers else [run]

    def maps(self, name: str) -> bool:
        """True when a part of the tensor is as dear as all of it."""
        return name not in self.readers and (self.raw.mapped or self.specs[name].size_bytes < MAP_BYTES)

    def check(self) -> None:
        """Raise CorruptError when the file was cut short or written to since it was opened."""
        self.raw.check()

    def read_array(self, number: int) -> np.ndarray[Any, Any]:
        """The leaf `number` as a numpy array of its own memory."""
        name = self.index.names[number]
        with damaged_input(f"{self.raw.path.name}: {name}"):
            return self._stored_array(name)

    def _stored_array(self, name: str) -> np.ndarray[Any, Any]:
        if name in self.readers:
            self.raw.check()
            shape = self.index.rows[name][1]
            return np.asarray(np.reshape(self.readers[name](0, math.prod(shape)), shape))
        spec = self.specs[name]
        data = self.raw.bytes(self.index.start(name), spec.size_bytes)
        if self.verify:
            self._verify_digest(name, torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0))
        return np.frombuffer(data, np.dtype(spec.dtype)).reshape(spec.shape)

    def close(self) -> None:
        """Let go of the file."""
        self.raw.close()

    def _verify_digest(self, name: str, tensor: torch.Tensor) -> None:
        known = self.index.rows[name][3]
        data: Any = tensor.view(torch.uint8).numpy() if tensor.numel() else b""
        if known and xxhash.xxh3_128_hexdigest(data) != known:
            raise CorruptError(
                f"{self.raw.path.name}: {name} is damaged (its digest differs); use another copy of the file"
            )


def as_tensor(values: Any) -> torch.Tensor:
    """What a reader gives as a tensor of its own memory, in the byte order of this machine."""
    if isinstance(values, torch.Tensor):
        return values
    return torch.from_numpy(np.asarray(values).astype(values.dtype.newbyteorder("=")))


def open_hdf5(path: Path, mapped: bool = True, verify: bool = False) -> IndexedFile:
    """Open an HDF5 file: ours, a Cerebras checkpoint, or any other of plain datasets and groups.

    Raises CorruptError when it is damaged, incomplete, or leads outside itself.
    """
    raw = RawFile(path, mapped)
    index = read_index(raw)
    if index is not None:
        file = IndexedFile(raw, index, verify)
        if any(len(row) > 5 for row in index.rows.values()):
            from ft_ckpt.formats.hdf5.chunks import chunk_readers  # which needs the filters' package

            file.readers = chunk_readers(raw, index)
        return file
    from ft_ckpt.formats.hdf5.foreign import open_foreign  # brings h5py, which a file of ours does not need

    return open_foreign(raw, verify)
