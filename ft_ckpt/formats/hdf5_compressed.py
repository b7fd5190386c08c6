"""Compressed HDF5 datasets: chunks, filters of hdf5plugin, parallel compression and decompression.

    superblock and metadata | chunks, and small uncompressed tensors | chunk B-trees | index

The filters are called as the HDF5 library calls them, but without that library: its lock admits one chunk at a time,
and a full disk makes it crash the process when it writes chunks. Chunks go to an unnamed temporary file first, because
their sizes must be known for the layout. Source of the bytes: HDF5 File Format Specification, version 3.0 (version 1
B-trees, layout message 3, pipeline message 2), as every library from 1.8 reads them.
"""

import ctypes
import importlib
import math
import os
import struct
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash

from ft_ckpt.errors import ConfigError, CorruptError, damaged_input
from ft_ckpt.formats import cerebras, hdf5_layout, tensor_file
from ft_ckpt.formats.hdf5_metadata import UNDEFINED, hdf5_header
from ft_ckpt.formats.layout import ITEM_BYTES, Layout, Spec
from ft_ckpt.formats.pytree import Node
from ft_ckpt.formats.tensor_file import RawFile, tensor_digest
from ft_ckpt.messages import install_extra

METHODS, SHUFFLES = ("zstd", "lz4", "blosc2", "gzip"), ("bit", "byte", None)
INSTALL = install_extra("compression")
_SHUFFLE, _DEFLATE = 2, 1  # filters of HDF5 itself, which every reader has
_PLUGINS = {32004: "lz4", 32008: "bshuf", 32015: "zstd", 32026: "blosc2"}
_LEVEL = 1  # of Zstandard: on weights, higher levels take twice the time and give larger files
_GZIP_LEVEL = 4
_ZSTD = 5  # the number of Zstandard in Blosc2
_BLOCK_BYTES = 1 << 18  # block size of bitshuffle; its default of 8 KB is too little for Zstandard
_MOST_BLOCK_BYTES = 1 << 26  # block size of bitshuffle that is accepted when reading
_REVERSE = 0x100  # flag: decompress
_THREADS = min(16, os.cpu_count() or 1)  # chunks (de)compressed at a time
_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]

Filters = Sequence[tuple[int, Sequence[int]]]  # number and settings, in the order of compression


@dataclass(frozen=True)
class Codec:
    """A compression method and the shuffle before it. Raises ConfigError if unknown, or if hdf5plugin is missing."""

    method: str
    shuffle: str | None = "bit"

    def __post_init__(self) -> None:
        for name, value, known in (("compression", self.method, METHODS), ("shuffle", self.shuffle, SHUFFLES)):
            if value not in known:
                raise ConfigError(f"{name} {value!r}: expected one of {', '.join(map(repr, known))}")
        if self.method == "gzip":
            return
        try:
            _plugin_function(next(number for number, _ in reversed(self.filter_chain(2, 2))))
        except ImportError as error:
            raise ConfigError(f"compression {self.method!r}: hdf5plugin is not installed; {INSTALL}") from error

    def filter_chain(self, item_bytes: int, chunk_bytes: int) -> Filters:
        """The HDF5 filters for elements and chunks of these sizes."""
        if self.method == "gzip":  # for readers without plugins; only a plugin shuffles bits, so bytes are shuffled
            shuffled = [(_SHUFFLE, (item_bytes,))] if self.shuffle and item_bytes > 1 else []
            return [*shuffled, (_DEFLATE, (_GZIP_LEVEL,))]
        if self.method == "blosc2":
            return [(32026, (1, 0, item_bytes, chunk_bytes, _LEVEL, SHUFFLES[::-1].index(self.shuffle), _ZSTD))]
        if self.shuffle == "bit":
            block = _BLOCK_BYTES // item_bytes
            return [(32008, (0, 4, item_bytes, block, *((3, _LEVEL) if self.method == "zstd" else (2,))))]
        last = (32015, (_LEVEL,)) if self.method == "zstd" else (32004, (0,))
        return [(_SHUFFLE, (item_bytes,)), last] if self.shuffle and item_bytes > 1 else [last]


class _FilterClass(ctypes.Structure):
    """The description that a filter's library exports (H5Z_class2_t)."""

    _fields_ = (
        ("version", ctypes.c_int), ("id", ctypes.c_int), ("encodes", ctypes.c_uint), ("decodes", ctypes.c_uint),
        ("name", ctypes.c_char_p), ("can_apply", ctypes.c_void_p), ("set_local", ctypes.c_void_p),
        ("filter", ctypes.CFUNCTYPE(
            ctypes.c_size_t, ctypes.c_uint, ctypes.c_size_t, ctypes.POINTER(ctypes.c_uint), ctypes.c_size_t,
            ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_void_p))),
    )  # fmt: skip


@cache
def _plugin_function(number: int) -> Callable[..., int]:
    """The function of a filter; it runs without the GIL. Raises ImportError without hdf5plugin."""
    plugin = importlib.import_module("hdf5plugin")
    name = _PLUGINS[number]
    if name not in plugin.get_config().registered_filters:  # another plugin with this number was registered first
        plugin.register(name, force=True)
    library = ctypes.CDLL(plugin.get_config().registered_filters[name])
    library.H5PLget_plugin_info.restype = ctypes.POINTER(_FilterClass)
    function: Callable[..., int] = library.H5PLget_plugin_info().contents.filter
    return function


def _apply_filter(number: int, settings: Sequence[int], data: bytes, flags: int, most: int) -> bytes | None:
    """`data` passed through a filter; None when the filter fails, or the result is more than `most` bytes."""
    if number == _SHUFFLE:
        rows = np.frombuffer(data, np.uint8).reshape((settings[0], -1) if flags else (-1, settings[0]))
        shuffled: bytes = rows.T.tobytes()
        return shuffled
    if number == _DEFLATE:
        return _zlib_decompress(data, most) if flags else zlib.compress(data, settings[0])
    buffer, room = ctypes.c_void_p(_libc.malloc(len(data))), ctypes.c_size_t(len(data))
    values = (ctypes.c_uint * len(settings))(*settings)
    try:
        ctypes.memmove(buffer, data, len(data))
        size = _plugin_function(number)(flags, len(values), values, len(data), ctypes.byref(room), ctypes.byref(buffer))
        return ctypes.string_at(buffer, size) if 0 < size <= min(room.value, most) else None
    finally:
        _libc.free(buffer)  # a filter that replaces the buffer has freed the old one


def _zlib_decompress(data: bytes, most: int) -> bytes | None:
    """`data` decompressed; None when it is damaged, or gives more than `most` bytes."""
    stream = zlib.decompressobj()
    try:
        whole = stream.decompress(data, most)
    except zlib.error:
        return None
    return whole if stream.eof else None


# Filters trust the sizes at the head of a chunk, so these are compared with the expected size and with the chunk before
# a filter is called. Sources: the specifications of filters 32004 and 32008, RFC 8878 for Zstandard.


def _fits_shuffle(data: bytes, settings: Sequence[int], size_bytes: int) -> bool:
    return len(data) == size_bytes and len(settings) > 0 and settings[0] > 0 and size_bytes % settings[0] == 0


def _fits_lz4(data: bytes, _settings: Sequence[int], size_bytes: int) -> bool:
    total, block = struct.unpack_from(">QI", data)
    return total == size_bytes and block > 0 and _adds_up(data, -(-total // block), len(data))


def _fits_bitshuffle(data: bytes, settings: Sequence[int], size_bytes: int) -> bool:
    item = settings[2]
    if item <= 0 or size_bytes % item:
        return False
    if len(settings) < 5 or not settings[4]:  # shuffled only
        return len(data) == size_bytes
    total, block = struct.unpack_from(">QI", data)
    if total != size_bytes or block == 0 or block % (8 * item) or block > _MOST_BLOCK_BYTES:
        return False
    rest = total % block
    left = total % (8 * item)  # uncompressed bytes at the end
    return _adds_up(data, total // block + (rest >= 8 * item), len(data) - left)


def _adds_up(data: bytes, blocks: int, end: int) -> bool:
    """True when `blocks` blocks with length prefixes exactly fill the bytes from 12 to `end`."""
    at = 12
    for _ in range(blocks):
        if at + 4 > end:
            return False
        at += 4 + int.from_bytes(data[at : at + 4], "big")
    return at == end


def _fits_zstd(data: bytes, _settings: Sequence[int], size_bytes: int) -> bool:
    flags = data[4]
    is_single, width = flags >> 5 & 1, (flags >> 5 & 1, 2, 4, 8)[flags >> 6]
    at = 5 + (not is_single) + (0, 1, 2, 4)[flags & 3]
    known = int.from_bytes(data[at : at + width], "little") + (256 if width == 2 else 0)
    return data[:4] == b"\x28\xb5\x2f\xfd" and width > 0 and known == size_bytes


_HEADS = {_SHUFFLE: _fits_shuffle, 32004: _fits_lz4, 32008: _fits_bitshuffle, 32015: _fits_zstd}


def encode_chunk(filters: Filters, data: bytes) -> tuple[bytes, int]:
    """The bytes of a chunk in the file, and its filter mask: a bit for each filter that failed and was skipped."""
    mask = 0
    for place, (number, settings) in enumerate(filters):
        done = _apply_filter(number, settings, data, 0, 2 * len(data) + _BLOCK_BYTES)
        mask |= (done is None) << place
        data = data if done is None else done
    return data, mask


def decode_chunk(filters: Filters, data: bytes, mask: int, size_bytes: int, name: str) -> bytes:
    """The bytes of a chunk. Raises CorruptError, naming `name`."""
    for place, (number, settings) in reversed(list(enumerate(filters))):
        if mask >> place & 1:
            continue
        try:
            fits = number not in _HEADS or _HEADS[number](data, settings, size_bytes)
            done = _apply_filter(number, settings, data, _REVERSE, size_bytes) if fits else None
        except ImportError as error:
            raise CorruptError(f"{name}: compressed, and hdf5plugin is not installed; {INSTALL}") from error
        if done is None:
            raise CorruptError(f"{name}: filter {number} cannot read a chunk; use another copy of the file")
        data = done
    if len(data) != size_bytes:
        raise CorruptError(f"{name}: a chunk of {len(data)} bytes, {size_bytes} expected; use another copy of the file")
    return data


CHUNK_BYTES = 1 << 20  # limit; the default size of the HDF5 library's chunk cache
SMALLEST_BYTES = 4096  # smaller tensors stay uncompressed: a B-tree takes more than compression saves
_MOST_CHUNK_BYTES = 1 << 26  # limit when reading
_NODE_CHUNKS = 64  # children of a B-tree node: twice the default K


@dataclass(frozen=True)
class ChunkGrid:
    """The chunks of a tensor: one dimension is cut, those before it into single elements, those after it are whole.

    Elements and chunks are numbered in row-major order.
    """

    shape: Sequence[int]
    chunk: Sequence[int]

    @staticmethod
    def for_shape(shape: Sequence[int], item_bytes: int) -> "ChunkGrid":
        """The grid of a tensor that is not empty."""
        chunk = list(shape)
        for dim in range(len(shape)):
            row_bytes = math.prod(shape[dim + 1 :]) * item_bytes
            if shape[dim] * row_bytes <= CHUNK_BYTES:
                break
            chunk[dim] = max(1, CHUNK_BYTES // row_bytes)
        return ChunkGrid(shape, tuple(chunk))

    @cached_property
    def cut_dim(self) -> int:
        sizes = enumerate(zip(self.shape, self.chunk, strict=True))
        return max((dim for dim, (size, step) in sizes if step < size), default=0)

    @cached_property
    def line_elements(self) -> int:
        """Elements in the cut dimension and those after it; chunks start anew after them."""
        return math.prod(self.shape[self.cut_dim :])

    @cached_property
    def chunk_elements(self) -> int:
        return math.prod(self.chunk)

    @property
    def line_chunks(self) -> int:
        return -(-self.shape[self.cut_dim] // self.chunk[self.cut_dim])

    @property
    def chunk_count(self) -> int:
        return math.prod(self.shape[: self.cut_dim]) * self.line_chunks

    def chunk_at(self, element: int) -> int:
        return element // self.line_elements * self.line_chunks + element % self.line_elements // self.chunk_elements

    def chunk_range(self, number: int) -> tuple[int, int]:
        """The elements [start, stop) of a chunk, without those beyond the tensor's edge."""
        line, step = divmod(number, self.line_chunks)
        return line * self.line_elements + step * self.chunk_elements, line * self.line_elements + min(
            (step + 1) * self.chunk_elements, self.line_elements
        )

    def chunk_corner(self, number: int) -> tuple[int, ...]:
        """The coordinates of the chunk's first element."""
        line, step = divmod(number, self.line_chunks)
        above = np.unravel_index(line, tuple(self.shape[: self.cut_dim])) if self.cut_dim else ()
        return (*map(int, above), step * self.chunk[self.cut_dim], *[0] * (len(self.shape) - self.cut_dim - 1))


@dataclass(frozen=True)
class PackedTensor:
    """A compressed tensor: grid, filters, offset in the spool file; size, filter mask and checksum of each chunk."""

    grid: ChunkGrid
    filters: Filters
    start: int
    chunks: list[tuple[int, int, str]]
    digest: str  # of the uncompressed values

    @property
    def size_bytes(self) -> int:
        return sum(size for size, _, _ in self.chunks)


Memory = Callable[[int], tuple[int, Any]]  # address of a leaf's values, and the object that owns the memory


def compress_leaves(leaves: Sequence[Spec], memory: Memory, codec: Codec, spool: BinaryIO) -> dict[int, PackedTensor]:
    """Compress all leaves from SMALLEST_BYTES on into `spool`, an unbuffered file; the result is by leaf number."""
    packed: dict[int, PackedTensor] = {}
    end = 0

    def spool_chunk(leaf: int, job: Future[tuple[bytes, int]]) -> None:
        data, mask = job.result()
        packed[leaf].chunks.append((len(data), mask, xxhash.xxh3_64_hexdigest(data)))
        view = memoryview(data)
        while view:
            view = view[spool.write(view) :]

    with ThreadPoolExecutor(_THREADS, "ft_ckpt-compress") as pool:
        waiting: deque[tuple[int, Future[tuple[bytes, int]]]] = deque()
        for leaf, spec in enumerate(leaves):
            if spec.size_bytes < SMALLEST_BYTES:
                continue
            address, keeper = memory(leaf)
            item_bytes = ITEM_BYTES[spec.dtype]
            grid = ChunkGrid.for_shape(spec.shape, item_bytes)
            filters = codec.filter_chain(item_bytes, grid.chunk_elements * item_bytes)
            digest = tensor_digest((ctypes.c_char * spec.size_bytes).from_address(address))
            packed[leaf] = PackedTensor(grid, filters, 0, [], digest)
            for number in range(grid.chunk_count):
                if len(waiting) >= 4 * _THREADS:
                    spool_chunk(*waiting.popleft())
                job = pool.submit(_compress_chunk, packed[leaf], number, item_bytes, address, keeper)
                waiting.append((leaf, job))
        while waiting:
            spool_chunk(*waiting.popleft())
    for leaf, item in packed.items():
        packed[leaf], end = replace(item, start=end), end + item.size_bytes
    return packed


def _compress_chunk(
    packed: PackedTensor, number: int, item_bytes: int, address: int, _keeper: Any
) -> tuple[bytes, int]:
    start, stop = packed.grid.chunk_range(number)
    data = ctypes.string_at(address + start * item_bytes, (stop - start) * item_bytes)
    return encode_chunk(packed.filters, data.ljust(packed.grid.chunk_elements * item_bytes, b"\0"))


def lay_out_compressed(
    root: Node, leaves: Sequence[Spec], arrays: Sequence[int], native_floats: bool, packed: Mapping[int, PackedTensor]
) -> tuple[Layout, Sequence[str]]:
    """The layout of a file that contains the object `root`, and the names of its leaves, in order.

    In the layout, a compressed tensor is one of uint8 with the size of its chunks.
    """
    content = cerebras.describe_checkpoint(root, leaves, arrays, native_floats)
    names = content.names
    specs = [Spec(name, spec.shape, spec.dtype) for name, spec in zip(names, leaves, strict=True)]
    stored = [
        Spec(spec.name, (packed[leaf].size_bytes,), "uint8") if leaf in packed else spec
        for leaf, spec in enumerate(specs)
    ]
    order, starts, end = hdf5_layout.place_tensors(stored)
    by_leaf = dict(zip(order, starts, strict=True))
    rows = hdf5_layout.index_rows(specs, order, starts, "0" * 32)
    for leaf, item in packed.items():
        row = rows[names[leaf]]
        rows[names[leaf]] = [*row[:3], item.digest, leaf, [item.grid.chunk, item.filters, item.chunks]]
    index = tensor_file.TensorIndex(rows, None if tensor_file.is_flat(root, names) else root, {})
    index_bytes = len(tensor_file.index_text(index)) + tensor_file.FOOTER_BYTES
    trees_start = end + -end % 8
    trees, roots = _chunk_trees(packed, by_leaf, trees_start)
    index_start = trees_start + len(trees)
    datasets = hdf5_layout.placed_datasets(content.datasets, by_leaf)
    for leaf, item in packed.items():
        pipeline = _pipeline_message(item.filters)
        datasets[leaf] = replace(datasets[leaf], start=roots[leaf], chunk=tuple(item.grid.chunk), filters=pipeline)
    datasets.append(hdf5_layout.index_dataset(index_bytes, index_start))
    header = hdf5_header(datasets, content.attributes, index_start + index_bytes)
    base, size_bytes = len(header), len(header) + index_start + index_bytes

    def make_trailer(digests: Mapping[str, bytes]) -> bytes:
        trees, _ = _chunk_trees(packed, by_leaf, trees_start, base)
        text = tensor_file.index_text(tensor_file.with_digests(index, digests))
        return trees + text + tensor_file.index_footer(text, base, base + index_start, size_bytes)

    return Layout(header, tuple(stored[leaf] for leaf in order), tuple(base + start for start in starts), size_bytes,
                  base + trees_start, make_trailer), names  # fmt: skip


def _pipeline_message(filters: Filters) -> bytes:
    """The filter pipeline message, with all filters optional."""
    message = struct.pack("<BB", 2, len(filters))
    for number, settings in filters:
        name = _PLUGINS[number].encode() + b"\0" if number >= 256 else b""  # filters of HDF5 have no name
        message += struct.pack("<HH", number, len(name)) if name else struct.pack("<H", number)
        message += struct.pack("<HH", 1, len(settings)) + name + struct.pack(f"<{len(settings)}I", *settings)
    return message


def _chunk_trees(
    packed: Mapping[int, PackedTensor], starts: Mapping[int, int], start: int, base: int = 0
) -> tuple[bytes, dict[int, int]]:
    """All chunk B-trees, and the offsets of their roots by leaf. All offsets count from byte `base` of the file."""
    body, roots = bytearray(), {}
    for leaf, item in packed.items():
        tree, root = _chunk_tree(item, base + starts[leaf], base + start + len(body))
        roots[leaf] = root - base
        body += tree
    return bytes(body), roots


def _chunk_tree(packed: PackedTensor, data: int, at: int) -> tuple[bytes, int]:
    """The B-tree, from address `at`, of consecutive chunks from address `data`; and the address of its root."""
    grid = packed.grid
    keys, addresses = [], []
    for number, (size, mask, _) in enumerate(packed.chunks):
        keys.append(struct.pack(f"<II{len(grid.shape) + 1}Q", size, mask, *grid.chunk_corner(number), 0))
        addresses.append(data)
        data += size
    beyond = [index + step for index, step in zip(grid.chunk_corner(grid.chunk_count - 1), grid.chunk, strict=True)]
    end = struct.pack(f"<II{len(beyond) + 1}Q", 0, 0, *beyond, 0)
    body, level = b"", 0
    while True:
        nodes = _tree_level(keys, end, addresses, level, at + len(body))
        addresses = [at + len(body) + number * len(nodes[0]) for number in range(len(nodes))]
        keys = keys[::_NODE_CHUNKS]
        body, level = body + b"".join(nodes), level + 1
        if len(nodes) == 1:
            return body, addresses[0]


def _tree_level(keys: Sequence[bytes], end: bytes, addresses: Sequence[int], level: int, at: int) -> list[bytes]:
    """The nodes of one level, of equal size and one after another from address `at`."""
    node_bytes = 24 + _NODE_CHUNKS * 8 + (_NODE_CHUNKS + 1) * len(end)
    bounds, nodes = [*keys, end], []
    for number, first in enumerate(range(0, len(keys), _NODE_CHUNKS)):
        last = min(first + _NODE_CHUNKS, len(keys))
        address = at + number * node_bytes
        left = struct.pack("<Q", address - node_bytes) if first else UNDEFINED
        right = struct.pack("<Q", address + node_bytes) if last < len(keys) else UNDEFINED
        node = b"TREE" + struct.pack("<BBH", 1, level, last - first) + left + right
        node += b"".join(bounds[i] + addresses[i].to_bytes(8, "little") for i in range(first, last)) + bounds[last]
        nodes.append(node + bytes(node_bytes - len(node)))
    return nodes


def chunk_readers(raw: RawFile, index: tensor_file.TensorIndex) -> dict[str, Callable[[int, int], torch.Tensor]]:
    """A function that reads elements, for each compressed tensor by name. Raises CorruptError for a malformed index."""
    with damaged_input(f"{raw.name}: its index"):
        return {
            name: _ChunkReader(raw, name, row, index.start(name)) for name, row in index.rows.items() if len(row) > 5
        }


class _ChunkReader:
    """Reads elements of one compressed tensor from their chunks, and compares the checksum of each chunk."""

    def __init__(self, raw: RawFile, name: str, row: tensor_file.Row, start: int) -> None:
        self.raw, self.label = raw, f"{raw.name}: {name}"
        self.item_bytes = ITEM_BYTES[row[0]]
        self.dtype: torch.dtype = getattr(torch, row[0])
        chunk, self.filters, self.chunks = row[5]
        self.grid = ChunkGrid(row[1], chunk)
        sizes = [*chunk, *(size for size, *_ in self.chunks)]
        if (
            len(chunk) != len(row[1])
            or any(type(size) is not int or size < 1 for size in sizes)
            or self.grid.chunk_elements * self.item_bytes > _MOST_CHUNK_BYTES
            or sum(sizes) > raw.size_bytes + sum(chunk)
        ):
            raise CorruptError(
                f"{self.label}: chunks of shape {chunk} with invalid sizes; use another copy of the file"
            )
        if len(self.chunks) != self.grid.chunk_count:
            raise CorruptError(
                f"{self.label}: {len(self.chunks)} chunks, {self.grid.chunk_count} expected; use another copy of the "
                "file"
            )
        self.starts = list(accumulate((size for size, *_ in self.chunks), initial=start))

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop). Raises CorruptError for a damaged chunk."""
        values = torch.empty(max(0, stop - start) * self.item_bytes, dtype=torch.uint8, device="cpu")
        if stop > start:
            data = values.numpy()
            numbers = range(self.grid.chunk_at(start), self.grid.chunk_at(stop - 1) + 1)
            if len(numbers) == 1:
                self._copy_chunk(data, start, stop, numbers[0])
            else:
                with ThreadPoolExecutor(min(_THREADS, len(numbers)), "ft_ckpt-decompress") as pool:
                    list(pool.map(lambda number: self._copy_chunk(data, start, stop, number), numbers))
        return values.view(self.dtype)

    def _copy_chunk(self, data: Any, start: int, stop: int, number: int) -> None:
        """Copy the elements of chunk `number` into `data`, the bytes of elements [start, stop)."""
        size, mask, checksum = self.chunks[number]
        stored = bytes(self.raw.bytes(self.starts[number], size))
        if xxhash.xxh3_64_hexdigest(stored) != checksum:
            raise CorruptError(f"{self.label} is damaged (a chunk's checksum differs); use another copy of the file")
        item = self.item_bytes
        chunk = decode_chunk(self.filters, stored, mask, self.grid.chunk_elements * item, self.label)
        first, last = self.grid.chunk_range(number)
        low, high = max(first, start), min(last, stop)
        data[(low - start) * item : (high - start) * item] = np.frombuffer(chunk, np.uint8)[
            (low - first) * item : (high - first) * item
        ]
