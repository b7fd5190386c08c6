"""Reads the pickles in torch's files without running any of them.

The table of torch's files for the interpreter in `safe_pickle`. No tensor byte is read: tensors come out as
`TensorPlace`, the place of their bytes. Names that are in no table are refused, all of them at once.

`torch.load(weights_only=True)` under `FakeTensorMode` gives the places of storages too, but not those in files from
before torch 1.6; refuses a file for one argparse.Namespace, path or numpy value beside its tensors, where this names
it and goes on; takes a storage that is shorter than its tensor; makes whatever memory a pickle asks for; and needs six
times as long for 20,000 tensors.

Source: the layout of `torch.save` archives (a zip file, uncompressed, `data.pkl` and one record for each storage).
"""

import io
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ft_ckpt.errors import CorruptError, ExcessError, LoadError, damaged_input, listing
from ft_ckpt.formats.layout import ITEM_BYTES, checked_sizes
from ft_ckpt.formats.pickled_objects import PLAIN
from ft_ckpt.formats.raw_file import FileStream, RawFile
from ft_ckpt.formats.safe_pickle import Call, Find, Passive, interpret_pickle
from ft_ckpt.formats.span_file import Span
from ft_ckpt.formats.zip_records import ZipRecord, ZipRecords

_STORAGES = {
    "BoolStorage": "bool", "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16",
    "IntStorage": "int32", "LongStorage": "int64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "FloatStorage": "float32", "DoubleStorage": "float64", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip
# Classes of these become stand-ins: common in training checkpoints, and of no interest beside the tensors.
_PASSIVE = frozenset(
    ("argparse", "deepspeed", "enum", "numpy", "omegaconf", "pathlib", "peft", "torch", "transformers")
)


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in a file: where its first element is, and how the others lie."""

    file: RawFile
    start: int  # byte of the first element
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    record: ZipRecord | None = field(default=None, compare=False)  # that it lies in

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
        """The bytes that it takes in row-major order beyond those stored of it."""
        return max(0, math.prod(self.shape) - self.span.numel) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class UnreadableTensor:
    """A tensor of a kind that is more than bytes in a file (quantised, sparse, sharded...)."""

    kind: str


@dataclass(frozen=True)
class _StoragePlace:
    file: RawFile
    start: int
    end: int
    dtype: str
    record: ZipRecord | None = None


_FindStorage = Callable[[str, str, int], _StoragePlace]  # of a dtype, with a key, of so many elements


@dataclass(frozen=True)
class PickleRules:
    """What the pickle of a kind of file may name, and whether a value stands in spite of names that are not known."""

    find: Find
    admits: Callable[[Any, frozenset[str]], bool] = lambda _value, _unknown: False


class _TorchRecords(ZipRecords):
    """The records of a torch zip file, by their names without the folder that all are in."""

    def __init__(self, file: RawFile, start: int, size_bytes: int) -> None:
        super().__init__(file, start, size_bytes)
        found = [name for name in self.records if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(found) != 1 or any(entry.compress_type for entry in self.records.values()):
            raise CorruptError("a zip file, but not one that torch.save wrote")
        prefix = found[0][: -len("data.pkl")]
        self.records = {name.removeprefix(prefix): entry for name, entry in self.records.items()}


def check_records(file: RawFile) -> None:
    """Raise CorruptError unless all records of the torch zip file lie within it."""
    with damaged_input(file.name):
        archive = _TorchRecords(file, 0, file.size_bytes)
        for name in archive.records:
            archive.record(name)


def load_torch_zip(
    file: RawFile, start: int = 0, size_bytes: int | None = None, rules: PickleRules | None = None
) -> Any:
    """The value in the torch zip file at [start, start + size_bytes) of `file`, its tensors as `TensorPlace`.

    Raises CorruptError when it is no such file, LoadError naming everything it refers to that is neither a tensor nor
    plain data.
    """
    with damaged_input(f"{file.name}: saved by torch"):
        return _load_zip(file, start, file.size_bytes - start if size_bytes is None else size_bytes, rules or _RULES)


def _load_zip(file: RawFile, start: int, size_bytes: int, rules: PickleRules) -> Any:
    name, archive = file.name, _TorchRecords(file, start, size_bytes)
    order = archive.record("byteorder").read() if "byteorder" in archive.records else b"little"
    if order != b"little":
        raise LoadError(f"{name}: written on a big-endian machine; load it there, or with torch.load, and save it anew")
    if "constants.pkl" in archive.records:
        raise LoadError(f"{name}: a TorchScript program, expected saved tensors; save its state_dict() instead")
    for record in archive.records:
        if not record.startswith("data/"):  # torch makes room for all of these, whatever size they tell
            archive.record(record)
    storages: dict[str, ZipRecord] = {}

    def find_storage(dtype: str, key: str, _numel: int) -> _StoragePlace:
        if key not in storages:
            storages[key] = archive.record(f"data/{key}")
        return _StoragePlace(file, storages[key].start, storages[key].end, dtype, storages[key])

    return load_torch_pickle(archive.record("data.pkl").read(), name, find_storage, rules)


def load_torch_legacy(file: RawFile) -> Any:
    """The value in a file of torch before 1.6, as `load_torch_zip` gives it.

    After three pickles of no interest there is one of the object, one of the keys of its storages, and then these, each
    after its number of elements. So the object is read twice: to come to the storages, and with their places.
    """
    with damaged_input(f"{file.name}: saved by torch before 1.6"):
        stream, sizes = io.BufferedReader(FileStream(file)), dict[str, int]()

        def note_storage(dtype: str, key: str, count: int) -> _StoragePlace:
            if count * ITEM_BYTES[dtype] > file.size_bytes:  # torch makes room for it before it looks
                raise ExcessError(f"storage {key} of {count:,} elements, in a file of {file.size_bytes:,} bytes")
            sizes[key] = max(ITEM_BYTES[dtype], sizes.get(key, 0))
            return _StoragePlace(file, 0, count * ITEM_BYTES[dtype], dtype)

        for _ in range(3):
            _read_pickle(stream, file.name, None)
        begin = stream.tell()
        _read_pickle(stream, file.name, note_storage)
        keys = _read_pickle(stream, file.name, None)
        places, at = {}, stream.tell()
        for key in keys:
            size = int.from_bytes(file.bytes(at, 8), "little") * sizes[key]
            places[key] = (at + 8, at + 8 + size)
            at += 8 + size
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
    """The value of the pickle in `stream`, which is left at the end of it."""

    def load_reference(reference: Any) -> _StoragePlace:
        if storage is None or not isinstance(reference, tuple) or len(reference) not in (5, 6):
            raise CorruptError("a reference to no storage")
        kind, dtype, key, _location, count, *view = reference
        if kind != "storage" or type(dtype) is not str or type(key) is not str or type(count) is not int or any(view):
            raise CorruptError("a reference to no storage")
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
    storage: _StoragePlace,
    offset: int,
    shape: Any,
    stride: Any,
    _grad: Any = None,
    _hooks: Any = None,
    flags: Any = None,
) -> TensorPlace | UnreadableTensor:
    return _place_tensor(storage, offset, shape, stride, storage.dtype, flags)


def _rebuild_v3(
    storage: _StoragePlace, offset: int, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, flags: Any = None
) -> TensorPlace | UnreadableTensor:
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype  # as its table has it
    return _place_tensor(storage, offset, shape, stride, name, flags)


def _place_tensor(
    storage: _StoragePlace, offset: int, shape: Any, stride: Any, dtype: str, flags: Any
) -> TensorPlace | UnreadableTensor:
    if flags:  # values that stand for their conjugates or negatives
        return UnreadableTensor(f"lazily {' and '.join(flags)}")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        return UnreadableTensor(dtype if isinstance(dtype, str) else type(dtype).__name__)
    shape, stride, (offset,) = checked_sizes(shape), checked_sizes(stride), checked_sizes((offset,))
    item, count = ITEM_BYTES[dtype], math.prod(shape)
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    first = storage.start + offset * item if count else storage.start  # an empty one may begin anywhere
    if count and first + (last + 1) * item > storage.end:
        raise CorruptError(f"a tensor of shape {tuple(shape)} that leads out of its storage")
    return TensorPlace(storage.file, first, dtype, shape, stride, storage.record)


def _rebuild_type(function: Any, _type: Any, args: Any, _state: Any) -> Any:
    if not isinstance(function, Call):
        raise CorruptError("a tensor made by no function of torch's")
    return function(*args)


_GLOBALS: dict[str, Any] = {
    **PLAIN,
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
    """What stands for a name in torch's files; None where the table does not have it."""
    module, _, name = full.rpartition(".")
    if name in _STORAGES and module.partition(".")[0] == "torch":  # in several modules, as versions went
        return _STORAGES[name]
    if full not in _GLOBALS and full.startswith("torch._utils._rebuild"):
        return Call(lambda *_args: UnreadableTensor(name))
    return _GLOBALS.get(full)


_RULES = PickleRules(find_torch_name)


def kind_of_leaf(leaf: Any) -> str:
    """The type of a value in a torch file, also of one that only stands for an object, a class or a function."""
    if isinstance(leaf, Passive) or (isinstance(leaf, type) and issubclass(leaf, Passive)):
        return leaf.kind
    return "function" if isinstance(leaf, Call) else type(leaf).__name__


def holds_tensors(leaf: Any) -> bool:
    """Whether an object of an unknown class was given tensors, or storages of such, by the pickle."""
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
