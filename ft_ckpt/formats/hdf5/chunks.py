"""Compresses tensors in HDF5 files, and reads them: chunks that pass the filters of hdf5plugin, several at a time.

    superblock and metadata | chunks, and small tensors as they are | trees of the chunks | index

The filters are called as the HDF5 library would call them, but without that library: its lock would let one chunk
pass at a time, and its way of writing ends the process when the disk is full. Compressed sizes are known only
afterwards, so chunks go to a temporary file without a name first. Source of the bytes: HDF5 File Format Specification,
version 3.0 (version 1 B-trees, layout message 3, pipeline message 2), as every library from 1.8 reads them.
"""

import ctypes
import math
import os
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash

from ft_ckpt.errors import CorruptError, damaged_input
from ft_ckpt.formats import tensor_index
from ft_ckpt.formats.hdf5 import cerebras_write, hdf5_layout, metadata
from ft_ckpt.formats.hdf5.filters import PLUGINS, Codec, Filters, decode_chunk, encode_chunk
from ft_ckpt.formats.layout import ITEM_BYTES, Layout, Spec
from ft_ckpt.formats.pytree import Node
from ft_ckpt.formats.raw_file import RawFile
from ft_ckpt.formats.tensor_file import tensor_digest

CHUNK_BYTES = 1 << 20  # at most; also what HDF5 libraries keep in memory of a dataset by default
SMALLEST_BYTES = 4096  # below, a tree of chunks is larger than what compression could save
_MOST_CHUNK_BYTES = 1 << 26  # that is read; HDF5 libraries write larger ones, we do not
_NODE_CHUNKS = 64  # children of a tree's node: twice the K that holds where a file names none


@dataclass(frozen=True)
class ChunkGrid:
    """The chunks of a tensor: one dimension is cut, those before it into single elements, those after it not at all."""

    shape: Sequence[int]
    chunk: Sequence[int]

    @staticmethod
    def for_shape(shape: Sequence[int], item_bytes: int) -> "ChunkGrid":
        """The grid of a tensor that has elements."""
        chunk = list(shape)
        for dim in range(len(shape)):
            row_bytes = math.prod(shape[dim + 1 :]) * item_bytes
            if shape[dim] * row_bytes <= CHUNK_BYTES:
                break
            chunk[dim] = max(1, CHUNK_BYTES // row_bytes)
        return ChunkGrid(shape, tuple(chunk))

    @cached_property
    def cut_dim(self) -> int:
        """The dimension that is cut."""
        sizes = enumerate(zip(self.shape, self.chunk, strict=True))
        return max((dim for dim, (size, step) in sizes if step < size), default=0)

    @cached_property
    def line_elements(self) -> int:
        """Elements up to where the dimension begins anew, and chunks with it."""
        return math.prod(self.shape[self.cut_dim :])

    @cached_property
    def chunk_elements(self) -> int:
        """Elements of a chunk."""
        return math.prod(self.chunk)

    @property
    def line_chunks(self) -> int:
        """Chunks of a line."""
        return -(-self.shape[self.cut_dim] // self.chunk[self.cut_dim])

    @property
    def chunk_count(self) -> int:
        """The number of chunks."""
        return math.prod(self.shape[: self.cut_dim]) * self.line_chunks

    def chunk_at(self, element: int) -> int:
        """The chunk that holds an element, both counted in row-major order."""
        return element // self.line_elements * self.line_chunks + element % self.line_elements // self.chunk_elements

    def chunk_range(self, number: int) -> tuple[int, int]:
        """The first element of a chunk and the one after its last; those beyond the tensor's edge are not counted."""
        line, step = divmod(number, self.line_chunks)
        return line * self.line_elements + step * self.chunk_elements, line * self.line_elements + min(
            (step + 1) * self.chunk_elements, self.line_elements
        )

    def chunk_corner(self, number: int) -> tuple[int, ...]:
        """The indexes of the chunk's first element in the tensor."""
        line, step = divmod(number, self.line_chunks)
        above = np.unravel_index(line, tuple(self.shape[: self.cut_dim])) if self.cut_dim else ()
        return (*map(int, above), step * self.chunk[self.cut_dim], *[0] * (len(self.shape) - self.cut_dim - 1))


@dataclass(frozen=True)
class PackedTensor:
    """One compressed tensor: its grid and filters, its place in the spool, and each chunk's size, mask, checksum."""

    grid: ChunkGrid
    filters: Filters
    start: int
    chunks: list[tuple[int, int, str]]
    digest: str  # of the values

    @property
    def size_bytes(self) -> int:
        """Bytes of all its chunks."""
        return sum(size for size, _, _ in self.chunks)


Memory = Callable[[int], tuple[int, Any]]  # where the values of a leaf are, and what keeps them there


def compress_leaves(leaves: Sequence[Spec], memory: Memory, codec: Codec, spool: BinaryIO) -> dict[int, PackedTensor]:
    """Compress all leaves that are worth it into `spool`, an unbuffered file; the first of them by index."""
    packed: dict[int, PackedTensor] = {}
    with ThreadPoolExecutor(chunk_threads(), "ft_ckpt-compress") as pool:
        waiting: deque[tuple[PackedTensor, Future[tuple[bytes, int]]]] = deque()
        for leaf, spec in enumerate(leaves):
            if spec.size_bytes < SMALLEST_BYTES:
                continue
            address, keeper = memory(leaf)
            packed[leaf] = _start_packing(spec, codec, address)
            for number in range(packed[leaf].grid.chunk_count):
                if len(waiting) >= 4 * chunk_threads():
                    _spool_chunk(*waiting.popleft(), spool)
                waiting.append(
                    (packed[leaf], pool.submit(_compress_chunk, packed[leaf], number, spec, address, keeper))
                )
        while waiting:
            _spool_chunk(*waiting.popleft(), spool)
    starts = np.cumsum([0, *(item.size_bytes for item in packed.values())]).tolist()
    return {leaf: replace(item, start=start) for (leaf, item), start in zip(packed.items(), starts, strict=False)}


def chunk_threads() -> int:
    """The number of chunks that are worked on at a time."""
    return min(16, os.cpu_count() or 1)


def _start_packing(spec: Spec, codec: Codec, address: int) -> PackedTensor:
    item = ITEM_BYTES[spec.dtype]
    grid = ChunkGrid.for_shape(spec.shape, item)
    digest = tensor_digest((ctypes.c_char * spec.size_bytes).from_address(address))
    return PackedTensor(grid, codec.filter_chain(item, grid.chunk_elements * item), 0, [], digest)


def _compress_chunk(packed: PackedTensor, number: int, spec: Spec, address: int, _keeper: Any) -> tuple[bytes, int]:
    item = ITEM_BYTES[spec.dtype]
    start, stop = packed.grid.chunk_range(number)
    data = ctypes.string_at(address + start * item, (stop - start) * item)
    return encode_chunk(packed.filters, data + bytes((packed.grid.chunk_elements - stop + start) * item))


def _spool_chunk(packed: PackedTensor, job: Future[tuple[bytes, int]], spool: BinaryIO) -> None:
    data, mask = job.result()
    packed.chunks.append((len(data), mask, _chunk_checksum(data)))
    view = memoryview(data)
    while view:
        view = view[spool.write(view) :]


def _chunk_checksum(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def lay_out_compressed(
    root: Node, leaves: Sequence[Spec], arrays: Sequence[int], native_floats: bool, packed: Mapping[int, PackedTensor]
) -> tuple[Layout, Sequence[str]]:
    """The layout of a file that holds the object `root`, and the name of each leaf in it.

    What is `packed` stands in the layout as so many bytes.
    """
    content = cerebras_write.describe_checkpoint(root, leaves, arrays, native_floats)
    names = content.names
    specs = [Spec(name, spec.shape, spec.dtype) for name, spec in zip(names, leaves, strict=True)]
    stored = [
        Spec(spec.name, (packed[leaf].size_bytes,), "uint8") if leaf in packed else spec
        for leaf, spec in enumerate(specs)
    ]
    order, starts, end = hdf5_layout.place_tensors(stored)
    places = dict(zip(order, starts, strict=True))
    index = tensor_index.TensorIndex(
        _compressed_rows(specs, order, starts, packed), None if tensor_index.is_flat(root, names) else root, {}
    )
    first = end + -end % 8
    _, roots, index_start = _chunk_trees(packed, places, first)
    index_bytes = len(tensor_index.index_text(index)) + tensor_index.FOOTER_BYTES
    datasets = hdf5_layout.placed_datasets(content.datasets, places)
    for leaf, item in packed.items():
        pipeline = _pipeline_message(item.filters)
        datasets[leaf] = replace(datasets[leaf], start=roots[leaf], chunk=tuple(item.grid.chunk), filters=pipeline)
    datasets.append(hdf5_layout.index_dataset(index_bytes, index_start))
    header = metadata.hdf5_header(datasets, content.attributes, index_start + index_bytes)
    base, size_bytes = len(header), len(header) + index_start + index_bytes

    def make_trailer(digests: Mapping[str, bytes]) -> bytes:
        trees = _chunk_trees(packed, places, first, base)[0]
        text = tensor_index.index_text(tensor_index.with_digests(index, digests))
        return trees + text + tensor_index.index_footer(text, base, base + index_start, size_bytes)

    return Layout(header, tuple(stored[leaf] for leaf in order), tuple(base + start for start in starts), size_bytes,
                  base + first, make_trailer), names  # fmt: skip


def _compressed_rows(
    specs: Sequence[Spec], order: Sequence[int], starts: Sequence[int], packed: Mapping[int, PackedTensor]
) -> dict[str, tensor_index.Row]:
    rows = hdf5_layout.index_rows(specs, order, starts, "0" * 32)
    for leaf, item in packed.items():
        name = specs[leaf].name
        rows[name] = [*rows[name][:3], item.digest, leaf, [item.grid.chunk, item.filters, item.chunks]]
    return rows


def _pipeline_message(filters: Filters) -> bytes:
    """The pipeline message: filters may be left out where they give up."""
    message = struct.pack("<BB", 2, len(filters))
    for number, settings in filters:
        name = PLUGINS[number].encode() + b"\0" if number >= 256 else b""  # HDF5's own have no name
        message += struct.pack("<HH", number, len(name)) if name else struct.pack("<H", number)
        message += struct.pack("<HH", 1, len(settings)) + name + struct.pack(f"<{len(settings)}I", *settings)
    return message


def _chunk_trees(
    packed: Mapping[int, PackedTensor], places: Mapping[int, int], start: int, base: int = 0
) -> tuple[bytes, dict[int, int], int]:
    """All trees, where they start at `start` from the end of a header of `base` bytes; their roots; their end."""
    body, roots = bytearray(), {}
    for leaf, item in packed.items():
        tree, root = _chunk_tree(item, base + places[leaf], base + start + len(body))
        roots[leaf] = root - base
        body += tree
    return bytes(body), roots, start + len(body)


def _chunk_tree(packed: PackedTensor, data: int, at: int) -> tuple[bytes, int]:
    """The tree, from address `at`, of chunks that lie one after the other from address `data`; and its root."""
    grid = packed.grid
    keys, places = [], []
    for number, (size, mask, _) in enumerate(packed.chunks):
        keys.append(struct.pack(f"<II{len(grid.shape) + 1}Q", size, mask, *grid.chunk_corner(number), 0))
        places.append(data)
        data += size
    beyond = [place + step for place, step in zip(grid.chunk_corner(grid.chunk_count - 1), grid.chunk, strict=True)]
    end = struct.pack(f"<II{len(beyond) + 1}Q", 0, 0, *beyond, 0)
    body, level = b"", 0
    while True:
        nodes = _tree_level(keys, end, places, level, at + len(body))
        places = [at + len(body) + number * len(nodes[0]) for number in range(len(nodes))]
        keys = keys[::_NODE_CHUNKS]
        body, level = body + b"".join(nodes), level + 1
        if len(nodes) == 1:
            return body, places[0]


def _tree_level(keys: Sequence[bytes], end: bytes, places: Sequence[int], level: int, at: int) -> list[bytes]:
    """The nodes of one level, which all have the same size and lie one after the other from address `at`."""
    node_bytes = 24 + _NODE_CHUNKS * 8 + (_NODE_CHUNKS + 1) * len(end)
    firsts = range(0, len(keys), _NODE_CHUNKS)
    bounds, nodes = [*keys, end], []
    for number, first in enumerate(firsts):
        last = min(first + _NODE_CHUNKS, len(keys))
        place = at + number * node_bytes
        left = struct.pack("<Q", place - node_bytes) if first else metadata.UNDEFINED
        right = struct.pack("<Q", place + node_bytes) if last < len(keys) else metadata.UNDEFINED
        node = b"TREE" + struct.pack("<BBH", 1, level, last - first) + left + right
        node += b"".join(bounds[i] + places[i].to_bytes(8, "little") for i in range(first, last)) + bounds[last]
        nodes.append(node + bytes(node_bytes - len(node)))
    return nodes


def chunk_readers(raw: RawFile, index: tensor_index.TensorIndex) -> dict[str, Callable[[int, int], torch.Tensor]]:
    """A function that reads elements, for each compressed tensor. Raises CorruptError when the index is malformed."""
    with damaged_input(f"{raw.name}: its index"):
        return {
            name: _ChunkReader(raw, name, row, index.start(name)) for name, row in index.rows.items() if len(row) > 5
        }


class _ChunkReader:
    """Elements of one compressed tensor, from the chunks that hold them. Each chunk is compared with its checksum."""

    def __init__(self, raw: RawFile, name: str, row: tensor_index.Row, start: int) -> None:
        self.raw, self.label = raw, f"{raw.name}: {name}"
        self.item_bytes = ITEM_BYTES[row[0]]
        self.dtype: torch.dtype = getattr(torch, row[0])
        chunk, self.filters, self.chunks = row[5]
        self.grid = ChunkGrid(row[1], chunk)
        sizes = [*chunk, *(size for size, *_ in self.chunks)]
        wrong = len(chunk) != len(row[1]) or any(type(size) is not int or size < 1 for size in sizes)
        if (
            wrong
            or self.grid.chunk_elements * self.item_bytes > _MOST_CHUNK_BYTES
            or sum(sizes) > raw.size_bytes + sum(chunk)
        ):
            raise CorruptError(
                f"{self.label}: chunks of {chunk} that take what they cannot; use another copy of the file"
            )
        if len(self.chunks) != self.grid.chunk_count:
            raise CorruptError(
                f"{self.label}: {len(self.chunks)} chunks, {self.grid.chunk_count} expected; use another copy of the "
                "file"
            )
        self.starts = [start]
        for size, *_ in self.chunks:
            self.starts.append(self.starts[-1] + size)

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop). Raises CorruptError for a damaged chunk."""
        room = torch.empty(max(0, stop - start) * self.item_bytes, dtype=torch.uint8)
        if stop > start:
            numbers = range(self.grid.chunk_at(start), self.grid.chunk_at(stop - 1) + 1)
            data = room.numpy()
            if len(numbers) == 1:
                self._copy_chunk(data, start, stop, numbers[0])
            else:
                with ThreadPoolExecutor(min(chunk_threads(), len(numbers)), "ft_ckpt-decompress") as pool:
                    list(pool.map(lambda number: self._copy_chunk(data, start, stop, number), numbers))
        return room.view(self.dtype)

    def _copy_chunk(self, data: Any, start: int, stop: int, number: int) -> None:
        """Put into `data`, which is [start, stop), what chunk `number` has of it."""
        size, mask, checksum = self.chunks[number]
        stored = bytes(self.raw.bytes(self.starts[number], size))
        if _chunk_checksum(stored) != checksum:
            raise CorruptError(f"{self.label} is damaged (a chunk's checksum differs); use another copy of the file")
        item = self.item_bytes
        chunk = decode_chunk(self.filters, stored, mask, self.grid.chunk_elements * item, self.label)
        first, last = self.grid.chunk_range(number)
        low, high = max(first, start), min(last, stop)
        data[(low - start) * item : (high - start) * item] = np.frombuffer(chunk, np.uint8)[
            (low - first) * item : (high - first) * item
        ]
