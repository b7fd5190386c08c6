"""Reads and writes torch files (.pt, .bin, .pth): zip and legacy, without running their pickles.

Source: the layout of `torch.save` archives. One zip file without compression: `archive/data.pkl` names the tensors
and the record of each storage, `archive/data/N` are the storages, each at a multiple of 64 bytes, followed by its
checksum. To write, torch makes such a file without the bytes of the storages, which are then inserted.
"""

import ctypes
import io
import math
import struct
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    ExcessError,
    LoadError,
    SelectionError,
    TargetError,
    damaged_input,
    explained,
    listing,
    shown,
    system_error,
)
from ft_ckpt.formats.layout import ITEM_BYTES, Layout, Spec, checked_sizes
from ft_ckpt.formats.pickles import PLAIN_GLOBALS, PLAIN_VALUES, Call, Find, Passive, interpret_pickle
from ft_ckpt.formats.pytree import MOST_LEVELS, PLAIN, SCALARS, quoted_key
from ft_ckpt.formats.tensor_file import ZIP_MAGIC, FileStream, RawFile, Span, SpanFile, ZipRecord, ZipRecords
from ft_ckpt.storage.local_file import LocalFile, open_local_file
from ft_ckpt.storage.local_store import temporary_store
from ft_ckpt.storage.read_ahead import ByteRun
from ft_ckpt.storage.store import is_utf8

_STORAGES = {
    "BoolStorage": "bool", "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16",
    "IntStorage": "int32", "LongStorage": "int64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32", "DoubleStorage": "float64", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip
# Objects of these packages become stand-ins: they are common in training checkpoints and not needed for the tensors.
_PASSIVE = frozenset(
    ("argparse", "deepspeed", "enum", "numpy", "omegaconf", "pathlib", "peft", "torch", "transformers")
)


@dataclass(frozen=True)
class TensorPlace:
    """The location of a tensor in a file: offset, dtype, shape and strides."""

    file: RawFile
    start: int  # byte of the first element
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    record: ZipRecord | None = field(default=None, compare=False)  # the record of the zip file that contains it

    @property
    def span(self) -> Span:
        """All elements from its first to its last in the file."""
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)) + 1
        return Span(self.file, self.start, 0 if 0 in self.shape else reach, self.record)

    @property
    def is_row_major(self) -> bool:
        """True when its elements follow one another in row-major order."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return 0 in self.shape
            step *= size
        return True

    @property
    def repeated_bytes(self) -> int:
        """Bytes that row-major order needs beyond the stored ones."""
        return max(0, math.prod(self.shape) - self.span.numel) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class UnreadableTensor:
    """A tensor that is not stored as plain dense elements (quantised, sparse, sharded...)."""

    kind: str


@dataclass(frozen=True)
class _StoragePlace:
    file: RawFile
    start: int
    end: int
    dtype: str
    record: ZipRecord | None = None


_FindStorage = Callable[[str, str, int], _StoragePlace]  # from (dtype, key, number of elements)


@dataclass(frozen=True)
class PickleRules:
    """The globals that the pickle of a kind of file may name, and whether a value with unknown names is accepted."""

    find: Find
    admits: Callable[[Any, frozenset[str]], bool] = lambda _value, _unknown: False


class _TorchRecords(ZipRecords):
    """The records of a torch zip file, by name without their common folder."""

    def __init__(self, file: RawFile, start: int, size_bytes: int) -> None:
        super().__init__(file, start, size_bytes)
        found = [name for name in self.records if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(found) != 1 or any(entry.compress_type for entry in self.records.values()):
            raise CorruptError("a zip file, but not one that torch.save wrote")
        prefix = found[0][: -len("data.pkl")]
        self.records = {name.removeprefix(prefix): entry for name, entry in self.records.items()}


def load_torch_zip(
    file: RawFile, start: int = 0, size_bytes: int | None = None, rules: PickleRules | None = None
) -> Any:
    """The value in the torch zip file at [start, start + size_bytes) of `file`, its tensors as `TensorPlace`.

    Raises CorruptError for any other file, LoadError naming every global that is neither a tensor nor plain data.
    """
    with damaged_input(f"{file.name}: saved by torch"):
        return _load_zip(file, start, file.size_bytes - start if size_bytes is None else size_bytes, rules or _RULES)


def _load_zip(file: RawFile, start: int, size_bytes: int, rules: PickleRules) -> Any:
    name, archive = file.name, _TorchRecords(file, start, size_bytes)
    order = archive.record("byteorder").read() if "byteorder" in archive.records else b"little"
    if order != b"little":
        raise LoadError(f"{name}: written on a big-endian machine; load it with torch.load and save it again")
    if "constants.pkl" in archive.records:
        raise LoadError(f"{name}: a TorchScript program, expected saved tensors; save its state_dict() instead")
    for record in archive.records:
        if not record.startswith("data/"):  # torch allocates memory for these by their recorded size
            archive.record(record)
    storages: dict[str, ZipRecord] = {}

    def find_storage(dtype: str, key: str, _numel: int) -> _StoragePlace:
        if key not in storages:
            storages[key] = archive.record(f"data/{key}")
        return _StoragePlace(file, storages[key].start, storages[key].end, dtype, storages[key])

    return load_torch_pickle(archive.record("data.pkl").read(), name, find_storage, rules)


def load_torch_legacy(file: RawFile) -> Any:
    """The value in a file of torch before 1.6, as `load_torch_zip` gives it.

    Such a file has three pickles that are not needed, one of the object, one of the keys of its storages, and then the
    storages, each after its number of elements. The object is read twice: to find the storages, and with their offsets.
    """
    with damaged_input(f"{file.name}: saved by torch before 1.6"):
        stream, known = io.BufferedReader(FileStream(file)), dict[str, tuple[int, int]]()

        def note_storage(dtype: str, key: str, count: int) -> _StoragePlace:
            if count * ITEM_BYTES[dtype] > file.size_bytes:  # torch would allocate it before reading
                raise ExcessError(f"storage {key} of {count:,} elements, in a file of {file.size_bytes:,} bytes")
            expected = known.setdefault(key, (count, ITEM_BYTES[dtype]))
            if expected != (count, ITEM_BYTES[dtype]):
                raise CorruptError(
                    f"storage {key}: {count:,} elements of {dtype} for one tensor, {expected[0]:,} elements of "
                    f"{expected[1]} bytes for another"
                )
            return _StoragePlace(file, 0, count * ITEM_BYTES[dtype], dtype)

        for _ in range(3):
            _read_pickle(stream, file.name, None)
        begin = stream.tell()
        _read_pickle(stream, file.name, note_storage)
        keys = _read_pickle(stream, file.name, None)
        places, at = {}, stream.tell()
        for key in keys:
            found, (count, item_bytes) = int.from_bytes(file.bytes(at, 8), "little"), known[key]
            if found != count:
                raise CorruptError(f"storage {key}: {found:,} elements, its tensors expect {count:,}")
            places[key] = (at + 8, at + 8 + count * item_bytes)
            at += 8 + count * item_bytes
        if at != file.size_bytes:
            what = f"{file.size_bytes - at:,} bytes after its last storage" if at < file.size_bytes else "cut short"
            raise CorruptError(f"{what}: its storages end at byte {at:,}, the file at {file.size_bytes:,}")
        stream.seek(begin)
        return _read_pickle(stream, file.name, lambda dtype, key, _count: _StoragePlace(file, *places[key], dtype))


def load_torch_pickle(
    data: bytes, source: str, storage: _FindStorage | None = None, rules: PickleRules | None = None
) -> Any:
    """The value of the pickle `data`; `source` names it in errors. Raises as `load_torch_zip` does."""
    with damaged_input(f"{source}: saved by torch"):
        return _read_pickle(io.BytesIO(data), source, storage, rules or _RULES)


def _read_pickle(stream: Any, source: str, storage: _FindStorage | None, rules: PickleRules | None = None) -> Any:
    """The value of the pickle in `stream`, which is then positioned at its end."""

    def load_reference(reference: Any) -> _StoragePlace:
        if storage is None or not isinstance(reference, tuple) or len(reference) not in (5, 6):
            raise CorruptError("an invalid reference to a storage")
        kind, dtype, key, _location, count, *view = reference
        if isinstance(dtype, type) and issubclass(dtype, Passive):
            raise LoadError(
                f"{source}: has tensors with a {dtype.kind.rpartition('.')[2]}, which is not plain dense data; "
                "convert these in torch (`tensor.dequantize()` for quantized ones), or leave them out"
            )
        if kind != "storage" or type(dtype) is not str or type(key) is not str or type(count) is not int or any(view):
            raise CorruptError("an invalid reference to a storage")
        return storage(dtype, key, count)

    rules = rules or _RULES
    value, foreign = interpret_pickle(stream, rules.find, _PASSIVE, load_reference)
    if foreign and not rules.admits(value, frozenset(foreign)):
        raise LoadError(
            f"{source}: refers to {listing(foreign, ', ')}; expected tensors and plain data. "
            "Nothing of it was run; save a state dict alone, or load it yourself if you trust it"
        )
    return value


def _rebuild_v2(
    storage: _StoragePlace, offset: int, shape: Any, stride: Any, _grad: Any = None, _hooks: Any = None, flags: Any = ()
) -> TensorPlace | UnreadableTensor:
    return _rebuild_v3(storage, offset, shape, stride, None, None, storage.dtype, flags)


def _rebuild_v3(
    storage: _StoragePlace, offset: int, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, flags: Any = None
) -> TensorPlace | UnreadableTensor:
    if flags:  # lazy conjugates or negatives
        return UnreadableTensor(f"lazily {' and '.join(flags)}")
    dtype = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        return UnreadableTensor(dtype if isinstance(dtype, str) else type(dtype).__name__)
    shape, stride, (offset,) = checked_sizes(shape), checked_sizes(stride), checked_sizes((offset,))
    item, count = ITEM_BYTES[dtype], math.prod(shape)
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    first = storage.start + offset * item if count else storage.start  # the offset of an empty tensor is arbitrary
    if count and first + (last + 1) * item > storage.end:
        raise CorruptError(f"a tensor of shape {tuple(shape)} that reaches beyond its storage")
    return TensorPlace(storage.file, first, dtype, shape, stride, storage.record)


def _rebuild_type(function: Any, _type: Any, args: Any, _state: Any) -> Any:
    if not isinstance(function, Call):
        raise CorruptError("a tensor that is made by an unknown function")
    return function(*args)


_GLOBALS: dict[str, Any] = {
    **PLAIN_GLOBALS,
    **{f"builtins.{kind.__name__}": kind for kind in (int, float, str, dict, list, tuple)},
    **{f"torch.{dtype}": dtype for dtype in ITEM_BYTES},
    "torch._utils._rebuild_tensor": Call(_rebuild_v2),
    "torch._utils._rebuild_tensor_v2": Call(_rebuild_v2),
    "torch._utils._rebuild_tensor_v3": Call(_rebuild_v3),
    "torch._utils._rebuild_parameter": Call(lambda data, *_rest: data),
    "torch._utils._rebuild_parameter_with_state": Call(lambda data, *_rest: data),
    "torch._tensor._rebuild_from_type_v2": Call(_rebuild_type),
    "torch.Size": tuple,
    "collections.defaultdict": Call(lambda *_factory: defaultdict()),
    "copyreg._reconstructor": Call(lambda kind, *_rest: kind()),
}


def find_torch_name(full: str) -> Any:
    """The stand-in for a global of torch's files; None if the table does not have it."""
    module, _, name = full.rpartition(".")
    if name in _STORAGES and module.partition(".")[0] == "torch":  # the module differs between versions of torch
        return _STORAGES[name]
    if full not in _GLOBALS and full.startswith("torch._utils._rebuild"):
        return Call(lambda *_args: UnreadableTensor(name))
    return _GLOBALS.get(full)


_RULES = PickleRules(find_torch_name)


def kind_of_leaf(leaf: Any) -> str:
    """The type of a value in a torch file, also for stand-ins of objects, classes and functions."""
    if isinstance(leaf, Passive) or (isinstance(leaf, type) and issubclass(leaf, Passive)):
        return leaf.kind
    return "function" if isinstance(leaf, Call) else type(leaf).__name__


def holds_tensors(leaf: Any) -> bool:
    """Whether the pickle passed tensors or storages to an object of an unknown class."""
    stack, seen = [leaf], set()
    while stack:
        value = stack.pop()
        if isinstance(value, (TensorPlace, UnreadableTensor, _StoragePlace)):
            return True
        if isinstance(value, Passive) and id(value) not in seen:
            seen.add(id(value))
            stack += [value.args, value.items, value.state]
        elif isinstance(value, (dict, list, tuple, set, frozenset)) and id(value) not in seen:
            seen.add(id(value))
            stack += [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return False


def named_leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """(dotted name, leaf) of nested dicts, lists and tuples, in order."""
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:
        name, one = stack.pop()
        if not isinstance(one, (dict, list, tuple)):
            yield name, one
            continue
        items = list(one.items()) if isinstance(one, dict) else list(enumerate(one))
        stack += [(f"{name}.{key}" if name else str(key), part) for key, part in reversed(items)]


_ARCHIVE = "archive"  # the folder of all records in files that we write
_ENTRY_MAGIC, _SUM_MAGIC = b"PK\1\2", b"PK\7\10"  # signatures of an entry of the directory, and of a checksum
_SUM = struct.Struct("<4sI")  # begins the bytes after a record, if it is not empty
_LEGACY, _BARE = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", (b"\x80\x02}", b"\x80\x02c")  # how files begin


class TorchFile(SpanFile):
    """A SpanFile with tensors in any order of strides; those are converted to row-major order, one at a time."""

    def __init__(self, specs: Mapping[str, Spec], stored: Mapping[str, TensorPlace], **more: Any) -> None:
        spans = {name: [one.span] for name, one in stored.items()}
        super().__init__(specs, spans, **more)
        self.strided = {name: one for name, one in stored.items() if not one.is_row_major}
        self.made: tuple[str | None, Tensor] = (None, torch.empty(0, device="cpu"))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Flat elements [start, stop) in row-major order: 1-D, on the CPU."""
        if name not in self.strided:
            return super().read(name, start, stop)
        if self.made[0] != name:
            self.made = (None, torch.empty(0, device="cpu"))  # one at a time: the last is freed before the next is read
            self.made = (name, row_major(self.strided[name]))
        return self.made[1][start:stop]

    def runs(self, name: str) -> list[ByteRun] | None:
        return None if name in self.strided else super().runs(name)

    def close(self) -> None:
        self.made = (None, torch.empty(0, device="cpu"))


def open_torch_file(file: RawFile) -> TorchFile:
    """The tensors of a file written by `torch.save`, nested dicts and lists as dotted names; nothing in it is run.

    Other values are listed in `skipped`, further names of a tensor in `ties`. Raises LoadError naming values that are
    neither tensors nor plain data, and names that are not unique; CorruptError when the file is damaged.
    """
    return join_places(file, *split_tensors(_torch_contents(file), file.name))


def join_places(file: RawFile, tensors: Mapping[str, TensorPlace], skipped: Sequence[str]) -> TorchFile:
    """The tensors of an open file by name; further names of a tensor are ties.

    Raises CorruptError if elements repeat more often than is plausible for the size of the file.
    """
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

    Raises LoadError when two of them get one name, for tensor types that are not plain dense data, and for tensors
    inside objects of unknown classes.
    """
    tensors: dict[str, TensorPlace] = {}
    repeated, unreadable, skipped = [], [], []
    for path, leaf in named_leaves(value):
        name = "tensor" if leaf is value else path
        if isinstance(leaf, TensorPlace):
            repeated += [name] if name in tensors else []
            tensors[name] = leaf
        elif isinstance(leaf, UnreadableTensor):
            unreadable.append(f"{name} ({leaf.kind})")
        elif holds_tensors(leaf):
            unreadable.append(f"{name} (tensors in an object of {kind_of_leaf(leaf)})")
        else:
            skipped.append(f"{name}: {kind_of_leaf(leaf)}")
    if repeated:
        raise LoadError(
            f"{source}: {listing(repeated, ', ')}: names of several tensors once nesting is written as dots"
        )
    if unreadable:
        raise LoadError(
            f"{source}: {listing(unreadable, ', ')}: expected plain dense tensors; save them so, or leave them out"
        )
    return tensors, skipped


def is_torch_file(file: RawFile) -> bool:
    """True when the file begins as torch's do: with a zip record or a pickle."""
    head = bytes(file.bytes(0, min(16, file.size_bytes)))
    return head.startswith(ZIP_MAGIC) or (head[:1] == b"\x80" and head[8:9] != b"{")  # as safetensors can begin


def check_torch_written(file: RawFile, size_bytes: int) -> None:
    """Raise TargetError unless the file that torch wrote has `size_bytes` and contains all its records."""
    where = file.file.where
    if file.size_bytes != size_bytes:
        raise TargetError(
            f"{where}: {file.size_bytes:,} bytes, torch wrote {size_bytes:,}; nothing is kept, check the disk"
        )
    try:
        with damaged_input(file.name):
            archive = _TorchRecords(file, 0, file.size_bytes)
            for name in archive.records:
                archive.record(name)
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
    """All elements of a tensor, copied to row-major order, 1-D."""
    data = one.span.read(0, one.span.numel, getattr(torch, one.dtype))
    return torch.as_strided(data, one.shape, one.stride).clone(memory_format=torch.contiguous_format).view(-1)


def strided_tensor(one: TensorPlace) -> Tensor:
    """A tensor with its stored strides; writes to it do not reach the file."""
    data = one.file.tensor(one.start, one.span.numel, getattr(torch, one.dtype))
    return torch.as_strided(data, one.shape, one.stride)


# Writing


@dataclass(frozen=True)
class TorchArchive:
    """A torch file before it is written: one run of bytes in `layout`, which `weave_bytes` yields."""

    specs: tuple[Spec, ...]
    starts: tuple[int, ...]
    layout: Layout
    between: tuple[bytes, ...]  # the bytes before each tensor, and those between the last one and the directory
    directory: bytes  # of the zip file; the checksums of tensors are missing

    def weave_bytes(self, chunks: Iterable[tuple[int, int]]) -> Iterator[bytes | tuple[int, int]]:
        """The file's bytes in order; `chunks` are (address, bytes) of the tensors' bytes in order of `specs`."""
        feed, checksums = iter(chunks), list[int]()
        yield self.between[0]
        for spec, after in zip(self.specs, self.between[1:], strict=True):
            checksum, missing = 0, spec.size_bytes
            while missing:
                address, size = next(feed)
                checksum = zlib.crc32((ctypes.c_char * size).from_address(address), checksum)
                yield address, size
                missing -= size
            checksums.append(checksum)
            yield _SUM.pack(_SUM_MAGIC, checksum) + after[_SUM.size :] if spec.size_bytes else after
        yield self._summed_directory(checksums)

    def _summed_directory(self, checksums: Sequence[int]) -> bytes:
        """The directory with the checksums of the tensors."""
        names = {f"{_ARCHIVE}/data/{index}".encode(): checksum for index, checksum in enumerate(checksums)}
        found, at = bytearray(self.directory), 0
        while found.startswith(_ENTRY_MAGIC, at):
            lengths = struct.unpack_from("<HHH", found, at + 28)  # of name, extra field and comment
            name = bytes(found[at + 46 : at + 46 + lengths[0]])
            if name in names:
                struct.pack_into("<I", found, at + 16, names[name])
            at += 46 + sum(lengths)
        return bytes(found)


def _unset_tensor(spec: Spec) -> Tensor:
    """A tensor whose memory is reserved and never touched, not even by deterministic algorithms, which fill it."""
    like = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
    empty = torch.empty(0, dtype=like.dtype, device="cpu")
    return empty.set_(torch.UntypedStorage(spec.size_bytes), 0, spec.shape, like.stride())  # type: ignore[no-untyped-call]


def lay_out_torch(
    specs: Sequence[Spec], metadata: Mapping[str, str], ties: Mapping[str, str] | None = None
) -> TorchArchive:
    """A file that `torch.load` reads as a dict of tensors; `ties` are further names of a tensor.

    torch itself writes all but the tensors' bytes and their checksums, to a sparse temporary file. `metadata` is not
    stored. Raises SelectionError naming dtypes that torch cannot save.
    """
    foreign = [f"{spec.name}: {spec.dtype}" for spec in specs if spec.dtype not in ITEM_BYTES]
    if foreign:
        raise SelectionError(f"{listing(foreign, ', ')}: torch has no such type; convert it first")
    stands = {spec.name: _unset_tensor(spec) for spec in specs}
    stands |= {name: stands[kept] for name, kept in (ties or {}).items()}
    with temporary_store() as room:
        path = room.path(f"{_ARCHIVE}.pt")
        with explained(path), path.open("xb") as sparse:  # torch does not report that a file is too large
            sparse.truncate(sum(spec.size_bytes for spec in specs))
        try:
            with torch.serialization.skip_data():
                torch.save(stands, path)
        except RuntimeError as error:
            raise TargetError(
                f"{path}: torch does not write it ({shown(error)}); set TMPDIR to another folder"
            ) from error
        with closing(RawFile(open_local_file(path), mapped=False)) as file:
            archive = _TorchRecords(file, 0, file.size_bytes)
            records = [archive.record(f"data/{index}") for index in range(len(specs))]
            edges = [0, *(edge for record in records for edge in (record.start, record.end)), archive.directory_start]
            between = tuple(
                bytes(file.bytes(low, high - low)) for low, high in zip(edges[::2], edges[1::2], strict=True)
            )
            directory = bytes(file.bytes(edges[-1], file.size_bytes - edges[-1]))
            body = Spec("archive", (file.size_bytes,), "uint8")
    starts = tuple(record.start for record in records)
    return TorchArchive(tuple(specs), starts, Layout(b"", (body,), (0,), body.size_bytes), between, directory)


_STREAM_BYTES = 8 << 20  # read at a time from afar
_MOST_AT_ONCE = 1 << 30  # bytes written in one call; Linux takes less than 2 GB


class _CountingStream:
    """A file that torch writes into: writes everything, or keeps the first error and raises it again.

    torch's own writer checks neither how many bytes a call has written (Linux writes at most 2 GB) nor why it failed.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.size_bytes = stream, 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of `data`. Raises OSError."""
        view = memoryview(data).cast("B")
        try:
            if self.failure is not None:
                raise self.failure
            left = view
            while left:
                left = left[self.stream.write(left[:_MOST_AT_ONCE]) or 0 :]
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.size_bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


def save_torch_object(obj: Any, stage: Path) -> None:
    """Write `obj` into the new file `stage`.

    Raises TargetError, OSError, and SelectionError for tensors that share memory as several types.
    """
    with stage.open("xb", buffering=0) as stream:
        file: Any = _CountingStream(stream)
        try:
            torch.save(obj, file)
        except RuntimeError as error:
            refused = SelectionError(f"{stage.name}: torch does not write it ({error}); save it as HDF5")
            raise file.failure or system_error(error) or refused from error
        if file.failure is not None:
            raise file.failure
    with closing(RawFile(open_local_file(stage))) as written:
        check_torch_written(written, file.size_bytes)


def load_torch_object(raw: RawFile, map_location: Any, mapped: bool, verify: bool) -> Any:
    """The object in an open file, its tensors on `map_location`; if that is None and `mapped`, mapped from the file.

    `verify` compares checksums. Raises CorruptError where the file is damaged or would run code.
    """
    if verify:
        check_sums(raw)
    with suppress(LoadError):  # torch.load decides about unknown globals
        _torch_contents(raw)  # refuses files on which torch's reader would never end or take unlimited memory
    source: Any = io.BufferedReader(FileStream(raw), _STREAM_BYTES)
    if isinstance(raw.file, LocalFile) and is_utf8(str(raw.file.path)):
        source = raw.file.path  # torch can map a path, if it is UTF-8
    mapped = mapped and map_location is None and isinstance(source, Path)
    with damaged_input(raw.name):
        try:
            return torch.load(source, map_location=map_location, weights_only=True, mmap=mapped)
        except UnpicklingError as error:
            reason = shown(error)
            raise CorruptError(f"{raw.name}: torch cannot read it without running code ({reason})") from error
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            return torch.load(source, map_location=map_location, weights_only=True)  # older than torch 1.6


_VALUES: tuple[type, ...] = (*SCALARS, torch.Size)
_MAPPINGS, _SEQUENCES = (dict, OrderedDict, Counter), (list, tuple, set)


def check_torch_object(obj: Any, root: str = "state", classes: Collection[type] = PLAIN) -> None:
    """Raise SelectionError naming the paths in `obj` of values that torch does not read back without running code.

    `classes` are the allowed tensor classes. Limits that types do not show, such as the length of integers, are tested
    by saving and loading the object in memory without its tensors.
    """
    outline = _Outline(frozenset(classes))
    bare = outline.bare_value(obj, root)
    if outline.refused:
        raise SelectionError(
            f"{listing(outline.refused)}. Nothing was written; convert these, leave them out, or save as HDF5. torch "
            "reads back plain containers, numbers, strings, bytes and tensors, and anything else by running code"
        )
    trial = io.BytesIO()
    torch.save(bare, trial)
    trial.seek(0)
    try:
        torch.load(trial, weights_only=True)
    except UnpicklingError as error:
        raise SelectionError(
            f"{root}: has a value that torch would not read back, such as empty bytes or an integer of over 255 "
            "bytes. Nothing was written; save it as HDF5"
        ) from error


@dataclass
class _Outline:
    """Copies an object without its tensors, and lists the values that are refused."""

    classes: frozenset[type]
    refused: list[str] = field(default_factory=list)
    known: dict[int, Any] = field(default_factory=dict)  # containers by identity: shared ones are visited once
    above: list[int] = field(default_factory=list)

    def bare_value(self, value: Any, place: str) -> Any:
        """`value` with None, or its extra attributes, for each tensor."""
        if type(value) in _VALUES:
            return value
        if isinstance(value, torch.Tensor):
            return self._bare_tensor(value, place)
        if type(value) not in (*_MAPPINGS, *_SEQUENCES):
            return self._refuse_place(place, f"{type(value).__module__}.{type(value).__qualname__}")
        if id(value) in self.above or len(self.above) >= MOST_LEVELS:
            what = "contains itself" if id(value) in self.above else f"over {MOST_LEVELS} levels deep"
            return self._refuse_place(place, what)
        if id(value) not in self.known:
            self.above.append(id(value))
            self.known[id(value)] = self._bare_container(value, place)
            self.above.pop()
        return self.known[id(value)]

    def _bare_container(self, value: Any, place: str) -> Any:
        if type(value) in _SEQUENCES:
            return type(value)(self.bare_value(each, f"{place}[{at}]") for at, each in enumerate(value))
        made = dict(self._bare_items(value, place))
        attributes = getattr(value, "__dict__", None)  # of an OrderedDict: torch gives a state dict some
        return [made, self.bare_value(dict(attributes), f"{place}.__dict__")] if attributes else made

    def _bare_items(self, value: Any, place: str) -> Iterator[tuple[Any, Any]]:
        for key, each in value.items():
            where = f"{place}[{quoted_key(key)}]"
            if type(key) in (*_VALUES, tuple):
                yield key, self.bare_value(each, where)
            else:
                self._refuse_place(where, f"a key of type {type(key).__qualname__}")

    def _bare_tensor(self, tensor: torch.Tensor, place: str) -> Any:
        if type(tensor) not in self.classes:
            kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
            return self._refuse_place(place, f"{kind}, a tensor with a meaning of its own")
        if tensor.is_quantized:
            return self._refuse_place(place, f"a tensor of {tensor.dtype}")
        own = vars(tensor) if type(tensor) in (torch.Tensor, torch.nn.Parameter) else {}
        return self.bare_value(dict(own), f"{place}.__dict__") if own else None

    def _refuse_place(self, place: str, what: str) -> None:
        self.refused.append(f"{place}: {what}")


class _PickledArray:
    """The state of a pickled numpy array, converted after the whole pickle is read."""

    def __init__(self, *_made_as: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def real_array(self) -> np.ndarray[Any, Any]:
        """The array, of numbers or strings. Raises CorruptError when its bytes do not fit its shape."""
        with damaged_input("a pickled array of numpy"):
            _version, shape, dtype, is_fortran, data = self.state
            flat = np.frombuffer(data, dtype.real_dtype())
            native = np.dtype(flat.dtype.newbyteorder("=").str)  # as numpy itself would have made it
            made: np.ndarray[Any, Any] = flat.reshape(shape, order="F" if is_fortran else "C").astype(native)
        return made


_ARRAYS = dict.fromkeys(("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"))


def load_torch_values(
    file: RawFile, *, places: bool = False, objects: Mapping[str, Callable[[Passive], Any]] = MappingProxyType({})
) -> Any:
    """The object in an open file, its tensors mapped from it; with `places` they stay `TensorPlace`.

    `objects`: functions that give the values of stand-ins, by the full names of their classes. Raises LoadError naming
    other values that are neither tensors nor plain data, CorruptError when the file is damaged.
    """
    return _real_value(load_torch_zip(file, rules=PickleRules(_find_with_arrays)), file.name, places, objects)


def find_plain_value(full: str) -> Any:
    """The value for a name: a plain value (type, device, numpy scalar), or else the result of `find_torch_name`."""
    found = PLAIN_VALUES.get(full)
    return find_torch_name(full) if found is None else found


def _find_with_arrays(full: str) -> Any:
    return Call(_PickledArray) if full in _ARRAYS else find_plain_value(full)


def _real_value(value: Any, name: str, places: bool, objects: Mapping[str, Callable[[Passive], Any]]) -> Any:
    """The value that `value`, at the path `name`, describes."""
    if isinstance(value, TensorPlace):
        return value if places else strided_tensor(value)
    if isinstance(value, _PickledArray):
        return value.real_array()
    if isinstance(value, dict):
        kind = OrderedDict if isinstance(value, OrderedDict) else dict
        return kind((key, _real_value(one, f"{name}: {key}", places, objects)) for key, one in value.items())
    if type(value) in (list, tuple):
        return type(value)(_real_value(one, f"{name}: {place}", places, objects) for place, one in enumerate(value))
    if isinstance(value, Passive) and value.kind in objects:
        return objects[value.kind](value)
    if isinstance(value, (Passive, Call, UnreadableTensor, type)):
        kind_name = value.kind if isinstance(value, UnreadableTensor) else kind_of_leaf(value)
        raise LoadError(f"{name}: a {kind_name}, expected tensors and plain data; nothing of it was run")
    return value
