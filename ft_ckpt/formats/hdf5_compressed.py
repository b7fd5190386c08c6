"""Compressed HDF5 datasets: chunks, filters of hdf5plugin, parallel compression and decompression.

    superblock and metadata | chunks, and small tensors as they are | trees of the chunks | index

The filters are called as the HDF5 library would call them, but without that library: its lock would let one chunk
pass at a time, and its way of writing ends the process when the disk is full. Compressed sizes are known only
afterwards, so chunks go to a temporary file without a name first. Source of the bytes: HDF5 File Format Specification,
version 3.0 (version 1 B-trees, layout message 3, pipeline message 2), as every library from 1.8 reads them.
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
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash

from ft_ckpt.errors import ConfigError, CorruptError, damaged_input
from ft_ckpt.formats import cerebras, hdf5_layout, hdf5_metadata, tensor_file
from ft_ckpt.formats.layout import ITEM_BYTES, Layout, Spec
from ft_ckpt.formats.pytree import Node
from ft_ckpt.formats.tensor_file import RawFile, tensor_digest

METHODS, SHUFFLES = ("zstd", "lz4", "blosc2", "gzip"), ("bit", "byte", None)
INSTALL = "pip install 'ft_ckpt[compression]'"
_SHUFFLE, _DEFLATE = 2, 1  # of HDF5 itself: every reader has them
PLUGINS = {32004: "lz4", 32008: "bshuf", 32015: "zstd", 32026: "blosc2"}
_LEVEL = 1  # of Zstandard: on weights, higher ones take twice the time and more room
_GZIP_LEVEL = 4  # of zlib
_ZSTD = 5  # its number in Blosc2
_BLOCK_BYTES = 1 << 18  # what bitshuffle works on at a time; with its own 8 KB, Zstandard sees too little
_MOST_BLOCK_BYTES = 1 << 26  # that bitshuffle may want to work on at a time
_REVERSE = 0x100  # the flag that makes a filter undo its work
_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_libc.free.argtypes = [ctypes.c_void_p]

Filters = Sequence[tuple[int, Sequence[int]]]  # number and settings, in the order of compressing


@dataclass(frozen=True)
class Codec:
    """A compression, and the shuffle before it. Raises ConfigError for unknown ones, and without hdf5plugin."""

    method: str
    shuffle: str | None = "bit"

    def __post_init__(self) -> None:
        for name, value, known in (("compression", self.method, METHODS), ("shuffle", self.shuffle, SHUFFLES)):
            if value not in known:
                raise ConfigError(f"{name} {value!r}: one of {', '.join(map(repr, known))} is expected")
        if self.method == "gzip":
            return  # Python has it
        try:
            _plugin_function(next(number for number, _ in reversed(self.filter_chain(2, 2))))
        except ImportError as error:
            raise ConfigError(f"compression {self.method!r}: hdf5plugin is not installed; {INSTALL}") from error

    def filter_chain(self, item_bytes: int, chunk_bytes: int) -> Filters:
        """The HDF5 filters for elements and chunks of these sizes."""
        if self.method == "gzip":  # of bytes shuffled: bits are shuffled by a plugin, and this is for readers without
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
    """The function of a filter, which leaves Python's lock to others. Raises ImportError without hdf5plugin."""
    plugin = importlib.import_module("hdf5plugin")
    name = PLUGINS[number]
    if name not in plugin.get_config().registered_filters:  # another program's plugin came first
        plugin.register(name, force=True)
    library = ctypes.CDLL(plugin.get_config().registered_filters[name])
    library.H5PLget_plugin_info.restype = ctypes.POINTER(_FilterClass)
    found: Callable[..., int] = library.H5PLget_plugin_info().contents.filter
    return found


def _apply_filter(number: int, settings: Sequence[int], data: bytes, flags: int, most: int) -> bytes | None:
    """`data` passed through a filter; None when it gives up, or the result is more than `most` bytes."""
    if number == _SHUFFLE:
        rows = np.frombuffer(data, np.uint8).reshape((settings[0], -1) if flags else (-1, settings[0]))
        shuffled: bytes = rows.T.tobytes()
        return shuffled
    if number == _DEFLATE:
        return _zlib_decompress(data, most) if flags else zlib.compress(data, settings[0])
    held, room = ctypes.c_void_p(_libc.malloc(len(data))), ctypes.c_size_t(len(data))
    values = (ctypes.c_uint * len(settings))(*settings)
    try:
        ctypes.memmove(held, data, len(data))
        size = _plugin_function(number)(flags, len(values), values, len(data), ctypes.byref(room), ctypes.byref(held))
        return ctypes.string_at(held, size) if 0 < size <= min(room.value, most) else None
    finally:
        _libc.free(held)  # a filter frees what it was given when it puts its own in place


def _zlib_decompress(data: bytes, most: int) -> bytes | None:
    """`data` decompressed; None when it is damaged, or more than `most` bytes."""
    stream = zlib.decompressobj()
    try:
        whole = stream.decompress(data, most)
    except zlib.error:
        return None
    return whole if stream.eof else None


# The filters believe what stands at the head of a chunk; so it is compared with what it should be, and with what is
# there, before they are called. Sources: the descriptions of filters 32004 and 32008, RFC 8878 for Zstandard.


def _fits_any(_data: bytes, _settings: Sequence[int], _size_bytes: int) -> bool:
    return True


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
    left = total % (8 * item)  # stored as they are, at the end
    return _adds_up(data, total // block + (rest >= 8 * item), len(data) - left)


def _adds_up(data: bytes, blocks: int, end: int) -> bool:
    """True when `blocks` blocks, each with a length prefix, fill the bytes from 12 to `end` exactly."""
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
    """The bytes of a chunk in the file, and a bit for each filter that gave up and is left out."""
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
            fits = _HEADS.get(number, _fits_any)(data, settings, size_bytes)
            done = _apply_filter(number, settings, data, _REVERSE, size_bytes) if fits else None
        except ImportError as error:
            raise CorruptError(f"{name}: compressed, and hdf5plugin is not installed; {INSTALL}") from error
        if done is None:
            raise CorruptError(f"{name}: a chunk that filter {number} cannot read; use another copy of the file")
        data = done
    if len(data) != size_bytes:
        raise CorruptError(f"{name}: a chunk of {len(data)} bytes, {size_bytes} expected; use another copy of the file")
    return data


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
        return math.prod(self.chunk)

    @property
    def line_chunks(self) -> int:
        return -(-self.shape[self.cut_dim] // self.chunk[self.cut_dim])

    @property
    def chunk_count(self) -> int:
        return math.prod(self.shape[: self.cut_dim]) * self.line_chunks

    def chunk_at(self, element: int) -> int:
        """The chunk of an element; both are row-major numbers."""
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
    content = cerebras.describe_checkpoint(root, leaves, arrays, native_floats)
    names = content.names
    specs = [Spec(name, spec.shape, spec.dtype) for name, spec in zip(names, leaves, strict=True)]
    stored = [
        Spec(spec.name, (packed[leaf].size_bytes,), "uint8") if leaf in packed else spec
        for leaf, spec in enumerate(specs)
    ]
    order, starts, end = hdf5_layout.place_tensors(stored)
    places = dict(zip(order, starts, strict=True))
    index = tensor_file.TensorIndex(
        _compressed_rows(specs, order, starts, packed), None if tensor_file.is_flat(root, names) else root, {}
    )
    first = end + -end % 8
    _, roots, index_start = _chunk_trees(packed, places, first)
    index_bytes = len(tensor_file.index_text(index)) + tensor_file.FOOTER_BYTES
    datasets = hdf5_layout.placed_datasets(content.datasets, places)
    for leaf, item in packed.items():
        pipeline = _pipeline_message(item.filters)
        datasets[leaf] = replace(datasets[leaf], start=roots[leaf], chunk=tuple(item.grid.chunk), filters=pipeline)
    datasets.append(hdf5_layout.index_dataset(index_bytes, index_start))
    header = hdf5_metadata.hdf5_header(datasets, content.attributes, index_start + index_bytes)
    base, size_bytes = len(header), len(header) + index_start + index_bytes

    def make_trailer(digests: Mapping[str, bytes]) -> bytes:
        trees = _chunk_trees(packed, places, first, base)[0]
        text = tensor_file.index_text(tensor_file.with_digests(index, digests))
        return trees + text + tensor_file.index_footer(text, base, base + index_start, size_bytes)

    return Layout(header, tuple(stored[leaf] for leaf in order), tuple(base + start for start in starts), size_bytes,
                  base + first, make_trailer), names  # fmt: skip


def _compressed_rows(
    specs: Sequence[Spec], order: Sequence[int], starts: Sequence[int], packed: Mapping[int, PackedTensor]
) -> dict[str, tensor_file.Row]:
    rows = hdf5_layout.index_rows(specs, order, starts, "0" * 32)
    for leaf, item in packed.items():
        name = specs[leaf].name
        rows[name] = [*rows[name][:3], item.digest, leaf, [item.grid.chunk, item.filters, item.chunks]]
    return rows


def _pipeline_message(filters: Filters) -> bytes:
    """The filter pipeline message; all filters are optional."""
    message = struct.pack("<BB", 2, len(filters))
    for number, settings in filters:
        name = PLUGINS[number].encode() + b"\0" if number >= 256 else b""  # HDF5's own have no name
        message += struct.pack("<HH", number, len(name)) if name else struct.pack("<H", number)
        message += struct.pack("<HH", 1, len(settings)) + name + struct.pack(f"<{len(settings)}I", *settings)
    return message


def _chunk_trees(
    packed: Mapping[int, PackedTensor], places: Mapping[int, int], start: int, base: int = 0
) -> tuple[bytes, dict[int, int], int]:
    """All chunk B-trees, placed from `start` after the end of a header of `base` bytes; their roots; their end."""
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
        left = struct.pack("<Q", place - node_bytes) if first else hdf5_metadata.UNDEFINED
        right = struct.pack("<Q", place + node_bytes) if last < len(keys) else hdf5_metadata.UNDEFINED
        node = b"TREE" + struct.pack("<BBH", 1, level, last - first) + left + right
        node += b"".join(bounds[i] + places[i].to_bytes(8, "little") for i in range(first, last)) + bounds[last]
        nodes.append(node + bytes(node_bytes - len(node)))
    return nodes


def chunk_readers(raw: RawFile, index: tensor_file.TensorIndex) -> dict[str, Callable[[int, int], torch.Tensor]]:
    """A function that reads elements, for each compressed tensor. Raises CorruptError when the index is malformed."""
    with damaged_input(f"{raw.name}: its index"):
        return {
            name: _ChunkReader(raw, name, row, index.start(name)) for name, row in index.rows.items() if len(row) > 5
        }


class _ChunkReader:
    """Elements of one compressed tensor, from the chunks that hold them. Each chunk is compared with its checksum."""

    def __init__(self, raw: RawFile, name: str, row: tensor_file.Row, start: int) -> None:
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
