"""Readers of tensor files: raw bytes, an index of tensors, spans, renamed tensors, files in memory."""

import io
import json
import math
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import PurePosixPath
from threading import Lock
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ft_ckpt.errors import CorruptError, damaged_input, listing
from ft_ckpt.formats.dtypes import dtype_name
from ft_ckpt.formats.layout import ITEM_BYTES, Spec, TensorFile
from ft_ckpt.formats.pytree import Node, decode_node, encode_node
from ft_ckpt.storage.frozen_view import CachedObject
from ft_ckpt.storage.kept_store import KeptFile
from ft_ckpt.storage.local_file import MappedBytes
from ft_ckpt.storage.proofs import FileProof
from ft_ckpt.storage.read_ahead import ByteRun, is_cold, read_whole
from ft_ckpt.storage.store import Readable

MAP_BYTES = 1 << 16  # smaller tensors are copied: that is no slower, and safe whatever happens to the file
MOST_PROMISED, FREE_BYTES = 16, 64 << 20  # of values not stored: so many times the file, and so many bytes besides


class FileStream(io.RawIOBase):
    """Bytes [start, start + size_bytes) of an open file as a file of its own.

    Not by its path: what has that by now may be another file, and a library given a path may share what it
    remembers of a file that has been overwritten since.
    """

    def __init__(self, raw: "RawFile", start: int = 0, size_bytes: int | None = None) -> None:
        super().__init__()
        self.raw, self.start, self.at = raw, start, 0
        self.size_bytes = raw.size_bytes - start if size_bytes is None else size_bytes

    def seekable(self) -> bool:
        """Yes."""
        return True

    def readable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to `offset` from the start, from here, or from the end."""
        self.at = max(0, offset + (0, self.at, self.size_bytes)[whence])
        return self.at

    def tell(self) -> int:
        """The position, in bytes from the start."""
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from here. Raises CorruptError when the file has changed."""
        wanted = min(len(buffer), max(0, self.size_bytes - self.at))
        buffer[:wanted] = self.raw.bytes(self.start + self.at, wanted)
        self.at += wanted
        return wanted


class RawFile:
    """An object that is open for reading, called `name` in messages; `mapped=False` copies everything that is read."""

    def __init__(self, file: Readable, mapped: bool = True) -> None:
        self.file = file if file.can_map or isinstance(file, CachedObject) else CachedObject(file)
        self.mapped = mapped and file.can_map
        self.name, self.size_bytes = PurePosixPath(file.name).name, file.size_bytes
        self._promised, self._closed = 0, False
        self._whole: MappedBytes | None = None

    @property
    def can_map(self) -> bool:
        """Whether its bytes can be mapped."""
        return self.file.can_map

    def close(self) -> None:
        """Close the file. Tensors that were mapped from it stay valid."""
        self._closed = True
        self.file.close()

    def check(self) -> None:
        """Raise CorruptError if the file was written to or cut short since it was opened, and can be mapped.

        Where it cannot, every range is read from what was opened, or not at all, and nothing else has to be asked.
        """
        if self._closed:
            raise CorruptError(f"{self.name}: closed; load it again")
        if self.file.can_map:
            self.file.check()

    def promise(self, size_bytes: int, name: str) -> None:
        """Count the bytes of tensor `name` that are not stored: those of constants, or of elements that repeat.

        Raises CorruptError when all of these are more than a file of this size has any use for.
        """
        self._promised += size_bytes
        if size_bytes < 0 or self._promised > MOST_PROMISED * self.size_bytes + FREE_BYTES:
            raise CorruptError(
                f"{self.name}: {name} takes {size_bytes:,} bytes that are not stored, in a file of "
                f"{self.size_bytes:,} bytes; it is damaged, use another copy"
            )

    def read_in(self, threads: int = 4, direct: str = "auto") -> bool:
        """Read all of the file into memory of our own, at the disk's rate: "mapped" tensors lie there from now on.

        False when the file is mapped already, or there is no memory. Raises CorruptError when it changes meanwhile.
        """
        if self._whole is not None:
            return False
        self.check()
        kept = self.file.kept.give() if isinstance(self.file, KeptFile) else None
        self._whole = kept or read_whole(self.file, threads, direct)
        self.mapped |= self._whole is not None
        return self._whole is not None

    def is_cold(self) -> bool:
        """True when `read_in` is faster than touching the mapped file, see `read_ahead.is_cold`."""
        return (isinstance(self.file, KeptFile) and self.file.is_own) or is_cold(self.file)

    def bytes(self, start: int, size_bytes: int) -> bytearray:
        """A copy of the bytes from `start`. Raises CorruptError where the file has not so many, or has changed."""
        self._check_range(start, size_bytes)
        if self._whole is not None and self._whole.is_own and not self._whole.given_back:
            return bytearray(self._whole.memory[start : start + size_bytes])
        data = bytearray(size_bytes)
        self.file.read_into(memoryview(data), start)
        return data

    def tensor(self, start: int, count: int, dtype: torch.dtype, mapped: bool | None = None) -> torch.Tensor:
        """`count` elements from byte `start`, one dimension; writable, and no write reaches the file."""
        if not count:
            return torch.empty(0, dtype=dtype)
        size_bytes = count * dtype.itemsize
        wanted = self.mapped if mapped is None else mapped
        if wanted and size_bytes >= MAP_BYTES and start % dtype.itemsize == 0:
            held = self._map_range(start, size_bytes)
            if held is not None:
                return torch.frombuffer(held, dtype=dtype, count=count)
        return torch.frombuffer(self.bytes(start, size_bytes), dtype=dtype, count=count)

    def _check_range(self, start: int, size_bytes: int) -> None:
        self.check()
        if start < 0 or size_bytes < 0 or start + size_bytes > self.size_bytes:
            raise CorruptError(
                f"{self.name}: bytes {start} to {start + size_bytes} asked for, the file has {self.size_bytes}; "
                "it was cut short or its table is damaged"
            )

    def _map_range(self, start: int, size_bytes: int) -> Any:
        """A part of the file's mapping as a buffer; None when the system gives no mapping."""
        self._check_range(start, size_bytes)
        self._whole = self._whole or self.file.map()
        return None if self._whole is None else self._whole.lend(start, size_bytes, self.file.read_into)


_MAGIC = b"ft_ckpt1"
_FOOTER = "<8sQQQ16s8x"  # magic, data start, index start, file size, digest of the JSON; then the digest of these
FOOTER_BYTES = 64
TREE = "ft_ckpt_tree"  # key that the metadata of safetensors has the tree of an object under; here it is the `root`
_MOST = 1 << 62  # any size or place

Row = Sequence[Any]  # of the index: torch's dtype, shape, start (from the data start), digest in hexadecimal, leaf;
# and where it is compressed, what `hdf5_chunks` needs to read it


@dataclass(frozen=True)
class TensorIndex:
    """An index: a row for each tensor, in file order; the tree of the object (None: a flat dict); the metadata."""

    rows: Mapping[str, Row]
    root: Node | None
    metadata: Mapping[str, str]
    data_start: int = 0

    @cached_property
    def names(self) -> list[str]:
        """The names of the leaves in the order of the tree."""
        names = [""] * len(self.rows)
        for name, row in self.rows.items():
            names[row[4]] = name
        return names

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """The tensors by name, in file order."""
        return {name: Spec(name, tuple(row[1]), row[0]) for name, row in self.rows.items()}

    @property
    def tree(self) -> Node:
        """The tree of the object."""
        return flat_tree([self.specs[name] for name in self.names]) if self.root is None else self.root

    def start(self, name: str) -> int:
        """The tensor's first byte in the file."""
        return int(self.rows[name][2]) + self.data_start


def flat_tree(specs: Sequence[Spec]) -> Node:
    """The tree of a flat dict of tensors."""
    keys = tuple(Node("value", spec.name) for spec in specs)
    return Node("dict", None, keys, tuple(Node("tensor", index) for index in range(len(specs))))


def is_flat(root: Node, names: Sequence[str]) -> bool:
    """True for a dict of tensors, each under its own name: safetensors needs no tree to say that."""
    keys = [key.value for key in root.keys]
    children = [(child.kind, child.value) for child in root.children]
    return root.kind == "dict" and keys == list(names) and children == [("tensor", i) for i in range(len(names))]


def with_digests(index: TensorIndex, digests: Mapping[str, bytes]) -> TensorIndex:
    """`index` with the digests of what was written; what is compressed has its own already."""
    final = {name: row if len(row) > 5 else [*row[:3], digests[name].hex(), row[4]] for name, row in index.rows.items()}
    return TensorIndex(final, index.root, index.metadata)


def index_text(index: TensorIndex) -> bytes:
    """The index as JSON, of the same length whatever the digests are."""
    whole = {"ft_index": 1, "metadata": index.metadata, "tensors": index.rows}
    if index.root is not None:
        whole["tree"] = encode_node(index.root)
    return json.dumps(whole, separators=(",", ":")).encode()


def index_footer(text: bytes, data_start: int, index_start: int, file_bytes: int) -> bytes:
    """The footer, which follows the JSON and proves that nothing has moved."""
    known = struct.pack(_FOOTER, _MAGIC, data_start, index_start, file_bytes, xxhash.xxh3_128_digest(text))
    return known + xxhash.xxh3_64_digest(known)


def read_index(raw: RawFile, end: int | None = None) -> TensorIndex | None:
    """The index whose footer ends at byte `end` (default: of the file). None when there is none to be trusted.

    Raises CorruptError when it is where it should be but damaged.
    """
    end = raw.size_bytes if end is None else end
    if end < FOOTER_BYTES:
        return None
    known = _parse_footer(bytes(raw.bytes(end - FOOTER_BYTES, FOOTER_BYTES)))
    if known is None:
        return None
    data_start, start, file_bytes, digest = known
    if file_bytes != raw.size_bytes or start > end - FOOTER_BYTES:
        return None
    return parse_index(bytes(raw.bytes(start, end - FOOTER_BYTES - start)), digest, data_start, raw.name)


def moved_index(data: bytes, source: str) -> TensorIndex:
    """The index in the bytes of its dataset, wherever that is now; its places are worthless.

    Raises CorruptError when it is damaged: then the file is, and what it says without an index is no better.
    """
    known = _parse_footer(data[-FOOTER_BYTES:])
    if known is None:
        raise CorruptError(f"{source}: its index is damaged; use another copy of the file")
    return parse_index(data[:-FOOTER_BYTES], known[3], 0, source)


def _parse_footer(tail: bytes) -> tuple[int, int, int, bytes] | None:
    if len(tail) != FOOTER_BYTES or xxhash.xxh3_64_digest(tail[:-8]) != tail[-8:]:
        return None
    magic, *known = struct.unpack(_FOOTER, tail[:-8])
    return tuple(known) if magic == _MAGIC else None


def parse_index(text: bytes, digest: bytes, data_start: int, source: str) -> TensorIndex:
    """The index in `text`, places counted from the start of the file. Raises CorruptError, naming `source`."""
    if xxhash.xxh3_128_digest(text) != digest:
        raise CorruptError(f"{source}: its index is damaged (digest differs); use another copy of the file")
    with damaged_input(f"{source}: its index"):
        whole = json.loads(text)
        if whole["ft_index"] != 1:
            raise CorruptError(f"{source}: an index of version {whole['ft_index']!r:.20}; upgrade ft_ckpt")
        root = decode_node(whole["tree"]) if "tree" in whole else None
        metadata = {str(key): str(value) for key, value in whole["metadata"].items() if key != TREE}
        index = TensorIndex(whole["tensors"], root, metadata, data_start)
        check_index(index, source)
    return index


def check_index(index: TensorIndex, source: str) -> None:
    """Raise CorruptError where the rows of an index are no tensors, or its tree asks for others than it has."""
    count = len(index.rows)
    if sorted([row[4] for row in index.rows.values()]) != list(range(count)):
        raise CorruptError(f"{source}: its index does not name each of {count} tensors once; use another copy")
    wrong = [name for name, row in index.rows.items() if not _is_sound(row)]
    if wrong or (index.root is not None and _most_leaf(index.root) >= count):
        where = listing(wrong, ", ") or "the tree"
        raise CorruptError(f"{source}: {where}: malformed in its index; use another copy of the file")


def _is_sound(row: Row) -> bool:
    dtype, shape, start, digest, *_ = row
    numbers = [start, *shape]
    whole = dtype in ITEM_BYTES and type(digest) is str and all(type(one) is int for one in numbers)
    return whole and min(numbers) >= 0 and max(numbers) < _MOST


def _most_leaf(root: Node) -> int:
    """The highest number of a leaf in the tree."""
    most, stack = -1, [root]
    while stack:
        node = stack.pop()
        if node.kind in ("tensor", "array", "blob"):
            most = max(most, node.value if node.kind == "tensor" else node.value[0])
        stack += node.children
        stack += [node.value] if isinstance(node.value, Node) else []
    return most


def tensor_digest(data: Any) -> str:
    """The digest of a tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(data)


class IndexedFile:
    """An open file: `specs` by name, and its `index` with the tree of the object and the names of its leaves."""

    def __init__(self, raw: RawFile, index: TensorIndex, verify: bool = False) -> None:
        self.raw, self.index, self.verify = raw, index, verify
        self.readers: dict[str, Callable[[int, int], Any]] = {}  # of those that cannot be mapped
        self.library: Any = None  # h5py's file, where its calls are needed
        self.skipped: tuple[str, ...] = ()  # "name: what it is" of what is in the file and not in the index

    @property
    def specs(self) -> dict[str, Spec]:
        """The tensors by name, in file order; for a foreign file, in the order of its tree."""
        return self.index.specs

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flat tensor `name`; only their bytes are read or mapped.

        Raises CorruptError when the file has changed, is too short or, with `verify`, has another digest.
        """
        with damaged_input(f"{self.raw.name}: {name}"):
            return self._read_elements(name, start, stop)

    def _read_elements(self, name: str, start: int, stop: int | None) -> torch.Tensor:
        kind, shape, *_ = self.index.rows[name]
        dtype = getattr(torch, kind, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptError(f"{self.raw.name}: {name} is of type {kind!r}, which this torch has not")
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
        """True when every tensor can be verified."""
        return all(row[3] for row in self.index.rows.values())

    def runs(self, name: str) -> list[ByteRun] | None:
        """The byte range of tensor `name` in the file; None when it is not stored in one piece."""
        run = ByteRun(name, self.raw.file, self.index.start(name), self.specs[name].size_bytes)
        return None if name in self.readers else [run]

    def maps(self, name: str) -> bool:
        """True when reading a part of the tensor costs as much as all of it."""
        return name not in self.readers and (self.raw.mapped or self.specs[name].size_bytes < MAP_BYTES)

    def check(self) -> None:
        """Raise CorruptError when the file was cut short or written to since it was opened."""
        self.raw.check()

    def read_array(self, number: int) -> np.ndarray[Any, Any]:
        """The leaf `number` as a numpy array of its own memory."""
        name = self.index.names[number]
        with damaged_input(f"{self.raw.name}: {name}"):
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
        """Close the file."""
        self.raw.close()

    def _verify_digest(self, name: str, tensor: torch.Tensor) -> None:
        known = self.index.rows[name][3]
        data: Any = tensor.view(torch.uint8).numpy() if tensor.numel() else b""
        if known and xxhash.xxh3_128_hexdigest(data) != known:
            raise CorruptError(f"{self.raw.name}: {name} is damaged (its digest differs); use another copy of the file")


def as_tensor(values: Any) -> torch.Tensor:
    """Values that were read, as a tensor of its own memory in the byte order of this machine."""
    if isinstance(values, torch.Tensor):
        return values
    return torch.from_numpy(np.asarray(values).astype(values.dtype.newbyteorder("=")))


ZIP_MAGIC = b"PK\3\4"
_HEAD = struct.Struct("<4s22xHH")  # of a record: signature, then the lengths of its name and of what follows that
_STEP_BYTES = 8 << 20


@dataclass(eq=False)
class ZipRecord:
    """A stored record, bytes [start, end) of an open file, and the CRC-32 of the bytes that were read so far.

    Bytes are compared as they are read in order. Where a reader leaves the order, and where a tensor ends before the
    record does, the rest of the record is read here.
    """

    file: RawFile
    name: str
    start: int
    end: int
    expected: int | None  # None: the file has no checksums
    _at: int = field(init=False)
    _found: int = 0
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self._at = self.start

    def read(self) -> bytes:
        """All bytes. Raises CorruptError when their checksum differs."""
        data = bytes(self.file.bytes(self.start, self.end - self.start))
        self.take(self.end, self.start, data)
        return data

    def compare(self) -> None:
        """Read what was not read yet. Raises CorruptError when the checksum differs."""
        with self._lock:
            self._compare_rest()

    def take(self, stop: int, start: int, data: Any) -> None:
        """Count the bytes `data`, which were read at byte `start` of the file, of a tensor that ends at byte `stop`.

        Raises CorruptError when the record is read to its end and its checksum differs.
        """
        with self._lock:
            if start == self._at < self.end:
                self._found, self._at = zlib.crc32(data, self._found), start + len(data)
                if self._at < min(stop, self.end):
                    return
            self._compare_rest()

    def _compare_rest(self) -> None:
        if self.expected is None:
            return
        while self._at < self.end:
            data = self.file.bytes(self._at, min(_STEP_BYTES, self.end - self._at))
            self._found, self._at = zlib.crc32(data, self._found), self._at + len(data)
        if self._found != self.expected:
            raise CorruptError(
                f"{self.file.name}: {self.name} is damaged (its checksum differs); use another copy of the file"
            )


class ZipRecords:
    """The records of the zip file at [start, start + size_bytes) of an open file.

    Raises CorruptError when two have one name.
    """

    def __init__(self, file: RawFile, start: int = 0, size_bytes: int | None = None) -> None:
        self.file, self.start = file, start
        with zipfile.ZipFile(FileStream(file, start, size_bytes)) as names:
            entries = names.infolist()
        self.records = {entry.filename: entry for entry in entries}
        twice = [name for name, count in Counter(entry.filename for entry in entries).items() if count > 1]
        if twice:
            raise CorruptError(f"several records of one name: {listing(twice, ', ')}")
        self.has_sums = any(entry.CRC for entry in entries)  # torch can leave out all of them

    def record(self, name: str) -> ZipRecord:
        """A record. Raises CorruptError when it is not there as it is."""
        entry = self.records.get(name)
        if entry is None:
            raise CorruptError(f"{name} is missing")
        if entry.compress_type:
            raise CorruptError(f"{name} is compressed, expected one that is stored; zip the files again with -0")
        head = self.start + entry.header_offset
        signature, *lengths = _HEAD.unpack(self.file.bytes(head, _HEAD.size))
        begin = head + _HEAD.size + sum(lengths)
        if signature != ZIP_MAGIC or begin + entry.file_size > self.file.size_bytes:
            raise CorruptError(f"{name} leads out of the file")
        return ZipRecord(self.file, name, begin, begin + entry.file_size, entry.CRC if self.has_sums else None)


@dataclass(frozen=True, eq=False)
class Span:
    """The next elements of a tensor, in one file."""

    file: RawFile
    start: int  # byte of the first
    numel: int
    record: ZipRecord | None = None  # of a zip file, whose checksum is compared as they are read

    def read(self, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """Elements [first, first + count). Raises CorruptError when the file has changed, or its checksum differs."""
        start = self.start + first * dtype.itemsize
        data = self.file.tensor(start, count, dtype)
        if self.record is not None and count:
            self.record.take(self.start + self.numel * dtype.itemsize, start, data.view(torch.uint8).numpy())
        return data

    def run(self, name: str, item_bytes: int) -> ByteRun:
        """Its bytes."""
        stop = self.start + self.numel * item_bytes
        watch = None if self.record is None else partial(self.record.take, stop)
        return ByteRun(name, self.file.file, self.start, stop - self.start, watch)


class SpanFile:
    """Tensors each made of spans that follow one another."""

    def __init__(
        self,
        specs: Mapping[str, Spec],
        spans: Mapping[str, Sequence[Span]],
        *,
        ties: Mapping[str, str] | None = None,
        skipped: Sequence[str] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.specs, self.spans = specs, spans
        self.ties = dict(ties or {})  # further name of a tensor: the one it is kept under
        self.skipped = tuple(skipped)  # "name: what it is" of what is no tensor
        self.metadata = dict(metadata or {})

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of tensor `name`: 1-D, on the CPU, of a copy or of the file's own pages.

        Raises CorruptError when a file has changed since it was opened.
        """
        spec = self.specs[name]
        dtype = getattr(torch, spec.dtype)
        stop, begin, parts = spec.numel if stop is None else stop, 0, []
        for span in self.spans[name]:
            low, high = max(start, begin), min(stop, begin + span.numel)
            if low < high:
                parts.append(span.read(low - begin, high - low, dtype))
            begin += span.numel
        if not parts:
            return torch.empty(0, dtype=dtype)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def runs(self, name: str) -> list[ByteRun] | None:
        """The byte ranges of tensor `name` in its files."""
        return [span.run(name, ITEM_BYTES[self.specs[name].dtype]) for span in self.spans[name]]

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        for spans in self.spans.values():
            for span in spans:
                span.file.close()


class RenamedFile:
    """The tensors of `file` that `names` lists, old names by new ones; `skipped` says what else is in it."""

    def __init__(self, file: TensorFile, names: Mapping[str, str], skipped: Sequence[str] = ()) -> None:
        self.file, self.names, self.skipped = file, names, tuple(skipped)
        self.specs: dict[str, Spec] = {new: file.specs[old]._replace(name=new) for new, old in names.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of tensor `name`: 1-D, on the CPU."""
        return self.file.read(self.names[name], start, stop)

    def runs(self, name: str) -> list[ByteRun] | None:
        """The byte ranges of tensor `name`; None when they do not lie in a file as they are."""
        ask = getattr(self.file, "runs", None)
        return None if ask is None else ask(self.names[name])

    def close(self) -> None:
        """Close the file."""
        self.file.close()


@dataclass
class MemoryFile:
    """A `TensorFile` of tensors by name."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def specs(self) -> dict[str, Spec]:
        """The tensors by name."""
        return {name: Spec(name, tuple(one.shape), dtype_name(one.dtype)) for name, one in self.tensors.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A copy of the elements [start, stop), flat."""
        return self.tensors[name].detach().contiguous().view(-1)[start:stop].clone()

    def close(self) -> None:
        """Let go of the tensors."""
        self.tensors = {}


@dataclass(eq=False)
class ListedFile:
    """A file of tensors that a rank opens when it reads of it; a `TensorFile`."""

    where: str
    specs: Mapping[str, Spec]
    make: Callable[[], TensorFile]
    proof: FileProof | None = None  # what this rank is to compare of it

    @cached_property
    def file(self) -> TensorFile:
        """The file itself. Raises CorruptError when its tensors are not those listed."""
        opened = self.make()
        odd = [name for name, spec in self.specs.items() if opened.specs.get(name) != spec]
        if odd:
            opened.close()
            raise CorruptError(f"{self.where}: {listing(odd, ', ')}: not as the manifest says; use another checkpoint")
        return opened

    @property
    def verify(self) -> bool:
        """Whether reading compares digests of its own."""
        return bool(getattr(self.file, "verify", False))

    def runs(self, name: str) -> list[ByteRun] | None:
        """The byte ranges of a tensor, in order; None where they are not those of its elements."""
        ask = getattr(self.file, "runs", None)
        return None if ask is None else ask(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of the tensor."""
        return self.file.read(name, start, stop)

    def close(self) -> None:
        """Close the file, if it was opened."""
        if "file" in vars(self):
            self.file.close()


def due_proof(file: TensorFile) -> FileProof | None:
    """What this rank has still to compare of the file."""
    proof = file.proof if isinstance(file, ListedFile) else None
    return proof if proof is not None and proof.is_due else None
