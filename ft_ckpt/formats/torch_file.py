"""Reads torch's own files (.pt, .bin, .pth) without running them, and writes them without holding them.

Source: the layout of `torch.save` archives. One zip file without compression: `archive/data.pkl` names the tensors
and the record of each storage, `archive/data/N` are the storages, each at a multiple of 64 bytes, followed by its
checksum. A file written here has the same records at the same places as one that torch writes.
"""

import ctypes
import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.errors import ConfigError, CorruptError, LoadError, SelectionError, TargetError, damaged_input, listing
from ft_ckpt.formats.layout import ITEM_BYTES, Layout, Spec
from ft_ckpt.formats.raw_file import RawFile
from ft_ckpt.formats.span_file import SpanFile
from ft_ckpt.formats.torch_pickle import (
    TensorPlace,
    UnreadableTensor,
    check_records,
    holds_tensors,
    kind_of_leaf,
    load_torch_legacy,
    load_torch_zip,
    named_leaves,
)
from ft_ckpt.formats.zip_records import ZIP_MAGIC, ZipRecords
from ft_ckpt.storage.read_ahead import ByteRun

_ALIGNMENT = 64
_LARGE = 0xFFFFFFFF  # sizes and offsets from here on need the 64-bit fields of zip
_SIZES_AHEAD, _UTF8 = 0x8, 0x800  # flags: sizes and checksum follow the data; the name is UTF-8
_LEGACY, _BARE = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", (b"\x80\x02}", b"\x80\x02c")  # how files begin


class TorchFile(SpanFile):
    """A SpanFile some of whose tensors do not lie in row-major order; each of those is made so, one at a time."""

    def __init__(self, specs: Mapping[str, Spec], stored: Mapping[str, TensorPlace], **more: Any) -> None:
        spans = {name: [one.span] for name, one in stored.items()}
        super().__init__(specs, spans, **more)
        self.odd = {name: one for name, one in stored.items() if not one.is_row_major}
        self.made: tuple[str | None, Tensor] = (None, torch.empty(0))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) in row-major order: 1-D, on the CPU."""
        if name not in self.odd:
            return super().read(name, start, stop)
        if self.made[0] != name:
            self.made = (None, torch.empty(0))  # one at a time: the last is freed before the next is read
            self.made = (name, row_major(self.odd[name]))
        return self.made[1][start:stop]

    def runs(self, name: str) -> list[ByteRun] | None:
        """The byte ranges of tensor `name` in its file; None when they are not in row-major order."""
        return None if name in self.odd else super().runs(name)

    def close(self) -> None:
        """Drop the tensor that was made last."""
        self.made = (None, torch.empty(0))


def open_torch_file(file: RawFile) -> TorchFile:
    """The tensors of a file written by `torch.save`, nested dicts and lists as dotted names; nothing in it is run.

    What is no tensor is named in `skipped`, further names of one tensor in `ties`. Raises LoadError naming what cannot
    be read as tensors or plain data, and names that are not unique; CorruptError when the file is damaged.
    """
    return join_places(file, *split_tensors(_torch_contents(file), file.name))


def join_places(file: RawFile, tensors: Mapping[str, TensorPlace], skipped: Sequence[str]) -> TorchFile:
    """The tensors of an open file by name; further names of one are ties. Raises CorruptError where it is too small."""
    specs, kept, ties = {}, {}, {}
    seen: dict[TensorPlace, str] = {}
    for name, one in tensors.items():
        first = seen.setdefault(one, name) if 0 not in one.shape else name
        file.promise(one.repeated_bytes if first == name else 0, name)
        if first == name:
            specs[name], kept[name] = Spec(name, one.shape, one.dtype), one
        else:
            ties[name] = first
    return TorchFile(specs, kept, ties=ties, skipped=skipped)


def split_tensors(value: Any, source: str) -> tuple[dict[str, TensorPlace], list[str]]:
    """The tensors of nested dicts and lists by dotted name, and descriptions of all other values.

    Raises LoadError when two of them get one name, and for tensors that are more than bytes in a file, or are held by
    an object of another class.
    """
    tensors: dict[str, TensorPlace] = {}
    twice, odd, skipped = [], [], []
    for found, leaf in named_leaves(value):
        name = found or "tensor"  # the file is one tensor, without a name
        if isinstance(leaf, TensorPlace):
            twice += [name] if name in tensors else []
            tensors[name] = leaf
        elif isinstance(leaf, UnreadableTensor):
            odd.append(f"{name} ({leaf.kind})")
        elif holds_tensors(leaf):
            odd.append(f"{name} (tensors in an object of {kind_of_leaf(leaf)})")
        else:
            skipped.append(f"{name}: {kind_of_leaf(leaf)}")
    if twice:
        raise LoadError(f"{source}: {listing(twice, ', ')}: names of several tensors once nesting is written as dots")
    if odd:
        raise LoadError(
            f"{source}: {listing(odd, ', ')}: expected plain dense tensors; save them so, or leave them out"
        )
    return tensors, skipped


def is_torch_file(file: RawFile) -> bool:
    """True when the file begins as those of torch do: a zip archive, or a pickle."""
    head = bytes(file.bytes(0, min(16, file.size_bytes)))
    return head.startswith(ZIP_MAGIC) or (head[:1] == b"\x80" and head[8:9] != b"{")  # a length can begin so too


def check_torch_file(file: RawFile) -> None:
    """Raise CorruptError where torch's own reader would be kept busy for ever, or ask for memory without end."""
    with suppress(LoadError):  # what it refers to is for torch to judge
        _torch_contents(file)


def check_torch_written(file: RawFile, size_bytes: int) -> None:
    """Raise TargetError unless the file that torch just wrote has `size_bytes` and all its records lie within it."""
    where = file.file.where
    if file.size_bytes != size_bytes:
        raise TargetError(
            f"{where}: {file.size_bytes:,} bytes, torch wrote {size_bytes:,}; nothing is kept. Is the disk sound?"
        )
    try:
        check_records(file)
    except CorruptError as error:
        raise TargetError(f"{where}: what torch wrote is not whole ({error}); nothing is kept") from error


def check_sums(file: RawFile) -> None:
    """Compare the records of a torch file with their checksums.

    Raises CorruptError where one differs, ConfigError for a file without checksums.
    """
    if not compare_sums(file):
        raise ConfigError(f"verify=True: {file.name} has no checksums, as those of torch before 1.6; leave it out")


def compare_sums(file: RawFile) -> bool:
    """Compare the records of a torch file with their checksums; False if it has none. Raises CorruptError."""
    with damaged_input(file.name):
        if bytes(file.bytes(0, min(4, file.size_bytes))) != ZIP_MAGIC:
            return False
        archive = ZipRecords(file)
        for name in archive.records:
            archive.record(name).compare()
        return archive.has_sums


def _torch_contents(file: RawFile) -> Any:
    head = bytes(file.bytes(0, min(16, file.size_bytes)))
    if head.startswith(_BARE):
        raise LoadError(f"{file.name}: a pickle, but none that torch.save wrote; save its tensors with torch.save")
    return (load_torch_legacy if head.startswith(_LEGACY) else load_torch_zip)(file)


def row_major(one: TensorPlace) -> Tensor:
    """All elements of a tensor in row-major order, 1-D, whatever order they are stored in."""
    data = one.span.read(0, one.span.numel, getattr(torch, one.dtype))
    return torch.as_strided(data, one.shape, one.stride).clone(memory_format=torch.contiguous_format).view(-1)


def strided_tensor(one: TensorPlace) -> Tensor:
    """A tensor as it is stored; writable, and no write reaches the file."""
    data = one.file.tensor(one.start, one.span.numel, getattr(torch, one.dtype))
    return torch.as_strided(data, one.shape, one.stride)


# Writing


class _StorageStand:
    """A storage, as the pickler sees it."""

    def __init__(self, key: int, spec: Spec) -> None:
        self.key, self.spec = key, spec

    def storage_reference(self) -> tuple[object, ...]:
        """The reference that torch's pickles have in place of a storage."""
        kind = _STORAGE_KINDS.get(self.spec.dtype)
        count = self.spec.size_bytes if kind is None else self.spec.numel
        return ("storage", torch.UntypedStorage if kind is None else getattr(torch, kind), str(self.key), "cpu", count)


class _TensorStand:
    """A tensor, as the pickler sees it."""

    def __init__(self, storage: _StorageStand) -> None:
        self.storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        spec = self.storage.spec
        steps, step = [], 1
        for size in reversed(spec.shape):
            steps.append(step)
            step *= max(1, size)
        place: tuple[Any, ...] = (self.storage, 0, spec.shape, tuple(reversed(steps)), False, OrderedDict())
        if spec.dtype in _STORAGE_KINDS:
            return torch._utils._rebuild_tensor_v2, place
        return torch._utils._rebuild_tensor_v3, (*place, getattr(torch, spec.dtype))


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: object) -> Any:
        """Storages are written as references."""
        return value.storage_reference() if isinstance(value, _StorageStand) else None


_STORAGE_KINDS = {
    "bool": "BoolStorage", "uint8": "ByteStorage", "int8": "CharStorage", "int16": "ShortStorage",
    "int32": "IntStorage", "int64": "LongStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage", "float64": "DoubleStorage", "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}  # fmt: skip


@dataclass(frozen=True)
class _ZipRecord:
    name: str
    size_bytes: int
    header_start: int
    data: bytes | None  # None: a tensor's, which come later

    @property
    def is_large(self) -> bool:
        """Whether its size or place needs more than 32 bits."""
        return self.size_bytes >= _LARGE or self.header_start >= _LARGE

    @property
    def header_bytes(self) -> bytes:
        """The record's header, padded so that its data are aligned."""
        name = self.name.encode()
        wide = b""
        if self.is_large:
            wide = struct.pack("<QQ", self.size_bytes, self.size_bytes) if self.size_bytes >= _LARGE else b""
            wide += struct.pack("<Q", self.header_start) if self.header_start >= _LARGE else b""
            wide = struct.pack("<HH", 1, len(wide)) + wide
        pad = -(self.header_start + 30 + len(name) + len(wide) + 4) % _ALIGNMENT
        extra = wide + struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        head = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, self.zip_flags, 0, 0, 0, 0, 0, 0, len(name), len(extra))
        return head + name + extra

    @property
    def zip_flags(self) -> int:
        """The flags of its headers."""
        return _UTF8 | (_SIZES_AHEAD if self.size_bytes else 0)

    def tail_bytes(self, checksum: int) -> bytes:
        """The bytes after the data: checksum and sizes."""
        if not self.size_bytes:
            return b""
        size = "Q" if self.is_large else "I"
        return struct.pack(f"<4sI{size}{size}", b"PK\7\10", checksum, self.size_bytes, self.size_bytes)

    @property
    def end_offset(self) -> int:
        """The first byte after it."""
        return self.header_start + len(self.header_bytes) + self.size_bytes + len(self.tail_bytes(0))

    def directory_entry(self, checksum: int) -> bytes:
        """The record in the directory at the end of the file."""
        name, size, start = self.name.encode(), self.size_bytes, self.header_start
        wide = struct.pack("<QQ", size, size) if size >= _LARGE else b""
        wide += struct.pack("<Q", start) if start >= _LARGE else b""
        extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
        facts = (0, 0, self.zip_flags, 0, 0, 0, checksum, min(size, _LARGE), min(size, _LARGE), len(name), len(extra))
        return struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", *facts, 0, 0, 0, 0, min(start, _LARGE)) + name + extra


@dataclass(frozen=True)
class TorchArchive:
    """A torch file before it is written: `layout` sees it as one run of bytes, which `weave_bytes` makes."""

    specs: tuple[Spec, ...]
    starts: tuple[int, ...]
    layout: Layout
    records: tuple[_ZipRecord, ...]

    def weave_bytes(self, chunks: Iterable[tuple[int, int]]) -> Iterator[bytes | tuple[int, int]]:
        """The file's bytes in order; `chunks` are (address, bytes) of the tensors' bytes in order of `specs`."""
        feed, checksums = iter(chunks), []
        for record in self.records:
            yield record.header_bytes
            checksum, missing = zlib.crc32(record.data or b""), record.size_bytes
            if record.data is not None:
                yield record.data
                missing = 0
            while missing:
                address, size = next(feed)
                checksum = zlib.crc32((ctypes.c_char * size).from_address(address), checksum)
                yield address, size
                missing -= size
            yield record.tail_bytes(checksum)
            checksums.append(checksum)
        yield _zip_directory(self.records, checksums)


def lay_out_torch(
    specs: Sequence[Spec], metadata: Mapping[str, str], ties: Mapping[str, str] | None = None
) -> TorchArchive:
    """A file that `torch.load` reads as a dict of tensors; `ties` are further names of a tensor.

    `metadata` has no place in such a file. Raises SelectionError naming dtypes that torch cannot save.
    """
    foreign = [f"{spec.name}: {spec.dtype}" for spec in specs if spec.dtype not in ITEM_BYTES]
    if foreign:
        raise SelectionError(f"{listing(foreign, ', ')}: torch has no such type; convert it first")
    stands = {spec.name: _TensorStand(_StorageStand(index, spec)) for index, spec in enumerate(specs)}
    stands |= {name: stands[kept] for name, kept in (ties or {}).items()}
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(stands)
    contents: list[tuple[str, int, bytes | None]] = [("data.pkl", 0, buffer.getvalue())]
    contents += [(".format_version", 0, b"1"), (".storage_alignment", 0, b"64"), ("byteorder", 0, b"little")]
    contents += [(f"data/{index}", spec.size_bytes, None) for index, spec in enumerate(specs)]
    contents += [("version", 0, b"3\n")]
    records: list[_ZipRecord] = []
    for name, size, data in contents:
        start = records[-1].end_offset if records else 0
        records.append(_ZipRecord(f"archive/{name}", size if data is None else len(data), start, data))
    starts = tuple(r.header_start + len(r.header_bytes) for r in records if r.data is None)
    size = records[-1].end_offset + len(_zip_directory(records, [0] * len(records)))
    body = Spec("archive", (size,), "uint8")
    return TorchArchive(tuple(specs), starts, Layout(b"", (body,), (0,), size), tuple(records))


def _zip_directory(records: Sequence[_ZipRecord], checksums: Sequence[int]) -> bytes:
    start = records[-1].end_offset
    entries = b"".join(record.directory_entry(checksum) for record, checksum in zip(records, checksums, strict=True))
    count, size = len(records), len(entries)
    ends = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 0, 45, 0, 0, count, count, size, start)
    ends += struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
    few, small, near = min(count, 0xFFFF), min(size, _LARGE), min(start, _LARGE)
    return entries + ends + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, few, few, small, near, 0)
