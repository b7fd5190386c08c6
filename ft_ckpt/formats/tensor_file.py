"""Readers of tensor files: raw bytes, records of zip files, an index of tensors, renamed tensors,
files in memory.
"""

import io
import json
import math
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ft_ckpt.errors import CorruptError, damaged_input, listing
from ft_ckpt.formats.dtypes import dtype_name
from ft_ckpt.formats.layout import ITEM_BYTES, Spec, TensorFile
from ft_ckpt.formats.pytree import Node, decode_node, encode_node
from ft_ckpt.storage import ByteRun, CachedObject, MappedBytes, Readable, is_cold, read_whole

# smaller tensors are copied: that is no slower, and safe from changes of the file
MAP_BYTES = 1 << 16
# limit for values that are not stored: 16 file sizes plus 64 MiB
MOST_PROMISED, FREE_BYTES = 16, 64 << 20


class FileStream(io.RawIOBase):
    """Bytes [start, start + size_bytes) of an open file as a file object.

    It does not use the path, which may belong to another file by now. Libraries may also cache
    state by path.
    """

    def __init__(self, raw: "RawFile", start: int = 0, size_bytes: int | None = None) -> None:
        super().__init__()
        self.raw, self.start, self.at = raw, start, 0
        self.size_bytes = raw.size_bytes - start if size_bytes is None else size_bytes

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = max(0, offset + (0, self.at, self.size_bytes)[whence])
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from here. Raises CorruptError when the file has changed."""
        count = min(len(buffer), max(0, self.size_bytes - self.at))
        self.raw.read_into(memoryview(buffer)[:count], self.start + self.at)
        self.at += count
        return count


class RawFile:
    """An open object, called `name` in messages; `mapped=False` copies everything that is read."""

    def __init__(self, file: Readable, mapped: bool = True) -> None:
        self.file = file if file.can_map or isinstance(file, CachedObject) else CachedObject(file)
        self.mapped = mapped and file.can_map
        self.name, self.size_bytes = PurePosixPath(file.name).name, file.size_bytes
        self._promised, self._closed = 0, False
        self._whole: MappedBytes | None = None

    @property
    def can_map(self) -> bool:
        return self.file.can_map

    def close(self) -> None:
        self._closed = True
        self.file.close()

    def check(self) -> None:
        """Raise CorruptError if the file is closed, or can be mapped and was changed since it was
        opened.

        Other files are always read in the version that was opened.
        """
        if self._closed:
            raise CorruptError(f"{self.name}: closed; load it again")
        if self.file.can_map:
            self.file.check()

    def promise(self, size_bytes: int, name: str) -> None:
        """Count bytes of tensor `name` that are not stored, because it is constant or its elements
        repeat.

        Raises CorruptError when the total is implausible for a file of this size.
        """
        self._promised += size_bytes
        if size_bytes < 0 or self._promised > MOST_PROMISED * self.size_bytes + FREE_BYTES:
            raise CorruptError(
                f"{self.name}: {name} takes {size_bytes:,} bytes that are not stored, in a file of "
                f"{self.size_bytes:,} bytes; it is damaged, use another copy"
            )

    def read_in(self, threads: int = 4, direct: str = "auto") -> bool:
        """Read the whole file into private memory at the disk's rate; "mapped" tensors then use
        this memory.

        Returns False if the file is mapped already, or memory is short. Raises CorruptError when it
        changes meanwhile.
        """
        if self._whole is not None:
            return False
        self.check()
        self._whole = read_whole(self.file, threads, direct)
        self.mapped |= self._whole is not None
        return self._whole is not None

    def is_cold(self) -> bool:
        """True when `read_in` is faster than touching the mapped file, see `read_ahead.is_cold`."""
        return is_cold(self.file)

    def bytes(self, start: int, size_bytes: int) -> bytearray:
        """A copy of the bytes from `start`.

        Raises CorruptError when the file is shorter or has changed.
        """
        data = bytearray(size_bytes)
        self.read_into(memoryview(data), start)
        return data

    def read_into(self, memory: memoryview, start: int) -> None:
        """Fill `memory` with the bytes from `start`. Raises CorruptError as `bytes` does."""
        self._check_range(start, len(memory))
        if self._whole is not None and self._whole.is_own and not self._whole.given_back:
            memory[:] = self._whole.memory[start : start + len(memory)]
        else:
            self.file.read_into(memory, start)

    def tensor(
        self, start: int, count: int, dtype: torch.dtype, mapped: bool | None = None
    ) -> torch.Tensor:
        """`count` elements from byte `start`, 1-D; writes to it do not reach the file."""
        if not count:
            return torch.empty(0, dtype=dtype, device="cpu")
        size_bytes = count * dtype.itemsize
        wanted = self.mapped if mapped is None else mapped
        if wanted and size_bytes >= MAP_BYTES and start % dtype.itemsize == 0:
            self._check_range(start, size_bytes)
            self._whole = self._whole or self.file.map()
            if self._whole is not None:
                part = self._whole.lend(start, size_bytes, self.file.read_into)
                return torch.frombuffer(part, dtype=dtype, count=count)
        return torch.frombuffer(self.bytes(start, size_bytes), dtype=dtype, count=count)

    def _check_range(self, start: int, size_bytes: int) -> None:
        self.check()
        if start < 0 or size_bytes < 0 or start + size_bytes > self.size_bytes:
            raise CorruptError(
                f"{self.name}: bytes {start} to {start + size_bytes} asked for, the file has "
                f"{self.size_bytes}; it is truncated, or its index is damaged"
            )


_MAGIC = b"ft_ckpt1"
# magic, data start, index start, file size, digest of the JSON; then the digest of all these
_FOOTER = "<8sQQQ16s8x"
FOOTER_BYTES = 64
# key of an object's tree in the metadata of safetensors; here it is the `root`
TREE = "ft_ckpt_tree"
_MOST = 1 << 62  # above any size or offset

NO_DIGEST = "0" * 32  # in the place of a digest that is not known yet

# of the index: torch's dtype, shape, start (from the data start), digest in hexadecimal, leaf;
Row = Sequence[Any]
# ft_ckpt 0.1 to 0.3 added the chunks of a compressed tensor, which only the HDF5 library reads


@dataclass(frozen=True)
class TensorIndex:
    """A row for each tensor, in file order; the tree of the object (None: a flat dict); the
    metadata.
    """

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
        return {name: Spec(name, tuple(row[1]), row[0]) for name, row in self.rows.items()}

    @property
    def tree(self) -> Node:
        return (
            flat_tree([self.specs[name] for name in self.names]) if self.root is None else self.root
        )

    def start(self, name: str) -> int:
        """Offset of the tensor's first byte in the file."""
        return int(self.rows[name][2]) + self.data_start


def flat_tree(specs: Sequence[Spec]) -> Node:
    """The tree of a flat dict of tensors."""
    keys = tuple(Node("value", spec.name) for spec in specs)
    return Node("dict", None, keys, tuple(Node("tensor", index) for index in range(len(specs))))


def is_flat(root: Node, names: Sequence[str]) -> bool:
    """True for a dict of tensors, each under its own name, which needs no tree in a file."""
    keys = [key.value for key in root.keys]
    children = [(child.kind, child.value) for child in root.children]
    return (
        root.kind == "dict"
        and keys == list(names)
        and children == [("tensor", i) for i in range(len(names))]
    )


def with_digests(index: TensorIndex, digests: Mapping[str, bytes]) -> TensorIndex:
    """`index` with the digests of the written tensors."""
    final = {name: [*row[:3], digests[name].hex(), row[4]] for name, row in index.rows.items()}
    return TensorIndex(final, index.root, index.metadata)


def index_text(index: TensorIndex) -> bytes:
    """The index as JSON; its length does not depend on the digests."""
    whole = {"ft_index": 1, "metadata": index.metadata, "tensors": index.rows}
    if index.root is not None:
        whole["tree"] = encode_node(index.root)
    return json.dumps(whole, separators=(",", ":")).encode()


def index_footer(text: bytes, data_start: int, index_start: int, file_bytes: int) -> bytes:
    """The footer after the JSON: offsets, file size and digest, by which a reader sees that nothing
    has moved.
    """
    known = struct.pack(
        _FOOTER, _MAGIC, data_start, index_start, file_bytes, xxhash.xxh3_128_digest(text)
    )
    return known + xxhash.xxh3_64_digest(known)


def read_index(raw: RawFile, end: int | None = None) -> TensorIndex | None:
    """The index whose footer ends at byte `end` (default: the end of the file); None if there is no
    valid footer.

    Raises CorruptError when the index itself is damaged.
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
    return parse_index(
        bytes(raw.bytes(start, end - FOOTER_BYTES - start)), digest, data_start, raw.name
    )


def moved_index(data: bytes, source: str) -> TensorIndex:
    """The index from the bytes of its dataset, which another program has moved; its offsets are
    invalid.

    Raises CorruptError when it is damaged: the file is then damaged as well.
    """
    known = _parse_footer(data[-FOOTER_BYTES:])
    if known is None:
        raise CorruptError(f"{source}: its index is damaged; use another copy of the file")
    return parse_index(data[:-FOOTER_BYTES], known[3], 0, source)


def _parse_footer(tail: bytes) -> tuple[int, int, int, bytes] | None:
    if len(tail) != FOOTER_BYTES or xxhash.xxh3_64_digest(tail[:-8]) != tail[-8:]:
        return None
    magic, data_start, index_start, file_bytes, digest = struct.unpack(_FOOTER, tail[:-8])
    return (data_start, index_start, file_bytes, digest) if magic == _MAGIC else None


def parse_index(text: bytes, digest: bytes, data_start: int, source: str) -> TensorIndex:
    """The index in `text`, whose offsets count from `data_start`.

    Raises CorruptError, naming `source`.
    """
    if xxhash.xxh3_128_digest(text) != digest:
        raise CorruptError(
            f"{source}: its index is damaged (digest differs); use another copy of the file"
        )
    with damaged_input(f"{source}: its index"):
        whole = json.loads(text)
        if whole["ft_index"] != 1:
            raise CorruptError(
                f"{source}: an index of version {whole['ft_index']!r:.20}; upgrade ft_ckpt"
            )
        root = decode_node(whole["tree"]) if "tree" in whole else None
        metadata = {str(key): str(value) for key, value in whole["metadata"].items() if key != TREE}
        index = TensorIndex(whole["tensors"], root, metadata, data_start)
        check_index(index, source)
    return index


def check_index(index: TensorIndex, source: str) -> None:
    """Raise CorruptError if a row of the index is invalid, or its tree refers to tensors that it
    lacks.
    """
    count = len(index.rows)
    if sorted([row[4] for row in index.rows.values()]) != list(range(count)):
        raise CorruptError(
            f"{source}: its index does not name each of {count} tensors once; use another copy"
        )
    wrong = [name for name, row in index.rows.items() if not _is_sound(row)]
    if wrong or (index.root is not None and _most_leaf(index.root) >= count):
        where = listing(wrong, ", ") or "the tree"
        raise CorruptError(
            f"{source}: {where}: malformed in its index; use another copy of the file"
        )


def _is_sound(row: Row) -> bool:
    dtype, shape, start, digest, *_ = row
    numbers = [start, *shape]
    whole = (
        dtype in ITEM_BYTES
        and type(digest) is str
        and all(type(number) is int for number in numbers)
    )
    return whole and min(numbers) >= 0 and max(numbers) < _MOST


def _most_leaf(root: Node) -> int:
    most, stack = -1, [root]
    while stack:
        node = stack.pop()
        if node.kind in ("tensor", "array", "blob"):
            most = max(most, node.value if node.kind == "tensor" else node.value[0])
        stack += node.children
        stack += [node.value] if isinstance(node.value, Node) else []
    return most


def tensor_digest(data: Any) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class IndexedFile:
    """An open file: `specs` by name, and its `index` with the tree of the object and the names of
    its leaves.
    """

    def __init__(self, raw: RawFile, index: TensorIndex, verify: bool = False) -> None:
        self.raw, self.index, self.verify = raw, index, verify
        self.readers: dict[str, Callable[[int, int], Any]] = {}  # of tensors that cannot be mapped
        self.library: Any = None  # h5py's file, if needed
        self.skipped: tuple[str, ...] = ()  # "name: kind" of items that are not in the index

    @property
    def specs(self) -> dict[str, Spec]:
        """In file order; for a foreign file, in the order of its tree."""
        return self.index.specs

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flat tensor `name`; only their bytes are read or mapped.

        Raises CorruptError when the file has changed or is too short; with `verify`, when a whole
        tensor has another digest.
        """
        with damaged_input(f"{self.raw.name}: {name}"):
            return self._read_elements(name, start, stop)

    def _read_elements(self, name: str, start: int, stop: int | None) -> torch.Tensor:
        kind, shape, *_ = self.index.rows[name]
        dtype = getattr(torch, kind, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptError(
                f"{self.raw.name}: {name} has dtype {kind!r}, which this torch does not know"
            )
        whole, stop = start == 0 and stop is None, math.prod(shape) if stop is None else stop
        if name in self.readers:
            self.raw.check()
            tensor = as_tensor(self.readers[name](start, stop)).reshape(-1)
        else:
            tensor = self.raw.tensor(
                self.index.start(name) + start * dtype.itemsize, stop - start, dtype
            )
        if whole and (self.verify or name in self.readers) and tensor.numel():
            self._verify_digest(name, tensor.view(torch.uint8).numpy())
        return tensor

    @property
    def has_digests(self) -> bool:
        """Whether every tensor can be verified."""
        return all(row[3] for row in self.index.rows.values())

    def runs(self, name: str) -> list[ByteRun] | None:
        """The byte range of tensor `name` in the file; None when it is not stored in one piece."""
        run = ByteRun(name, self.raw.file, self.index.start(name), self.specs[name].size_bytes)
        return None if name in self.readers else [run]

    def maps(self, name: str) -> bool:
        """True when the whole tensor costs no more to read than a part: it can be mapped, or is
        small.
        """
        return name not in self.readers and (
            self.raw.mapped or self.specs[name].size_bytes < MAP_BYTES
        )

    def check(self) -> None:
        self.raw.check()

    def read_array(self, number: int) -> np.ndarray[Any, Any]:
        """The leaf `number` as a numpy array with its own memory."""
        name = self.index.names[number]
        with damaged_input(f"{self.raw.name}: {name}"):
            return self._stored_array(name)

    def _stored_array(self, name: str) -> np.ndarray[Any, Any]:
        if name in self.readers:
            self.raw.check()
            shape = self.index.rows[name][1]
            values = np.asarray(self.readers[name](0, math.prod(shape)))
            self._verify_digest(name, values)
            return np.reshape(values, shape)
        spec = self.specs[name]
        data = self.raw.bytes(self.index.start(name), spec.size_bytes)
        if self.verify:
            self._verify_digest(name, np.frombuffer(data, np.uint8))
        return np.frombuffer(data, np.dtype(spec.dtype)).reshape(spec.shape)

    def close(self) -> None:
        self.raw.close()

    def _verify_digest(self, name: str, values: np.ndarray[Any, Any]) -> None:
        expected = self.index.rows[name][3]
        if expected and xxhash.xxh3_128_hexdigest(values.data) != expected:
            raise CorruptError(
                f"{self.raw.name}: {name} is damaged (its digest differs); use "
                "another copy of the file"
            )


def as_tensor(values: Any) -> torch.Tensor:
    """Values as a tensor with its own memory, in native byte order."""
    if isinstance(values, torch.Tensor):
        return values
    return torch.from_numpy(np.asarray(values).astype(values.dtype.newbyteorder("=")))


ZIP_MAGIC = b"PK\3\4"
# of a record: signature, lengths of its name and of the extra field
_HEAD = struct.Struct("<4s22xHH")
_STEP_BYTES = 16 << 20


def record_span(file: RawFile, entry: zipfile.ZipInfo) -> tuple[int, int]:
    """The bytes [start, stop) of a record that is stored without compression in an open zip file.

    Raises CorruptError when it is compressed, or not where the directory of the file says.
    """
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CorruptError(
            f"{entry.filename} is compressed, expected one that is stored; zip "
            "the files again with -0"
        )
    signature, *lengths = _HEAD.unpack(file.bytes(entry.header_offset, _HEAD.size))
    start = entry.header_offset + _HEAD.size + sum(lengths)
    if signature != ZIP_MAGIC or start + entry.file_size > file.size_bytes:
        raise CorruptError(
            f"{entry.filename}: its offset leads out of the file, or to "
            "something else; is the file whole?"
        )
    return start, start + entry.file_size


@dataclass(frozen=True, eq=False)
class Span:
    """Consecutive elements of a tensor, in one file."""

    file: RawFile
    start: int  # byte of the first
    numel: int

    def read(self, first: int, count: int, dtype: torch.dtype) -> Tensor:
        """Elements [first, first + count). Raises CorruptError when the file has changed."""
        return self.file.tensor(self.start + first * dtype.itemsize, count, dtype)

    def run(self, name: str, item_bytes: int) -> ByteRun:
        return ByteRun(name, self.file.file, self.start, self.numel * item_bytes)


class SpanFile:
    """Tensors that each consist of consecutive spans."""

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
        self.ties = dict(ties or {})  # alias of a tensor -> its stored name
        self.skipped = tuple(skipped)  # "name: kind" of items that are not tensors
        self.metadata = dict(metadata or {})

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) of tensor `name`: 1-D, on the CPU, a copy or mapped from the
        file.

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
            return torch.empty(0, dtype=dtype, device="cpu")
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def runs(self, name: str) -> list[ByteRun] | None:
        return [span.run(name, ITEM_BYTES[self.specs[name].dtype]) for span in self.spans[name]]

    def close(self) -> None:
        """Close the files. Tensors that were read stay valid."""
        for spans in self.spans.values():
            for span in spans:
                span.file.close()


class RenamedFile:
    """The tensors of `file` in `names` (old to new names); `skipped` describes the others."""

    def __init__(
        self, file: TensorFile, names: Mapping[str, str], skipped: Sequence[str] = ()
    ) -> None:
        self.file, self.names, self.skipped = file, names, tuple(skipped)
        self.specs: dict[str, Spec] = {
            new: file.specs[old]._replace(name=new) for new, old in names.items()
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self.file.read(self.names[name], start, stop)

    def runs(self, name: str) -> list[ByteRun] | None:
        ask = getattr(self.file, "runs", None)
        return None if ask is None else ask(self.names[name])

    def close(self) -> None:
        self.file.close()


@dataclass
class MemoryFile:
    """Tensors in memory as a `TensorFile`."""

    tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def specs(self) -> dict[str, Spec]:
        return {
            name: Spec(name, tuple(tensor.shape), dtype_name(tensor.dtype))
            for name, tensor in self.tensors.items()
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """A flat copy of the elements [start, stop)."""
        return self.tensors[name].detach().contiguous().view(-1)[start:stop].clone()

    def close(self) -> None:
        self.tensors = {}


def read_in_steps(
    read: Callable[[str, int, int], Tensor], name: str, start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    """Flat elements [start, stop) of tensor `name` in new memory, read by `read` in steps of 16
    MiB.
    """
    data, step = torch.empty(stop - start, dtype=dtype, device="cpu"), _STEP_BYTES // dtype.itemsize
    for low in range(start, stop, step):
        high = min(low + step, stop)
        data[low - start : high - start] = read(name, low, high)
    return data


@dataclass(eq=False)
class ListedFile:
    """A file of tensors that is opened at its first read; a `TensorFile`."""

    where: str
    specs: Mapping[str, Spec]
    make: Callable[[], TensorFile]

    @cached_property
    def file(self) -> TensorFile:
        """The open file. Raises CorruptError when its tensors differ from the manifest's."""
        opened = self.make()
        wrong = [name for name, spec in self.specs.items() if opened.specs.get(name) != spec]
        if wrong:
            opened.close()
            raise CorruptError(
                f"{self.where}: {listing(wrong, ', ')}: not as the manifest "
                "says; use another checkpoint"
            )
        return opened

    @property
    def verify(self) -> bool:
        return bool(getattr(self.file, "verify", False))

    def runs(self, name: str) -> list[ByteRun] | None:
        ask = getattr(self.file, "runs", None)
        return None if ask is None else ask(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self.file.read(name, start, stop)

    def close(self) -> None:
        if "file" in vars(self):
            self.file.close()
