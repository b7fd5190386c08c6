"""Decodes pickles of other programs with an allow-list of classes and a cost limit; runs no code.

The interpreter is Python's own without the opcodes that checkpoints do not need. Each global is looked up in a table of
the reader, which contains plain containers, functions that make values, and stand-ins that record their arguments.
Nothing is imported. Copying and hashing are charged to an allowance that grows with the size of the pickle, because a
few hundred bytes can describe 2**40 elements. `torch_file` has the table of torch's files.
"""

import io
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch

from ft_ckpt.errors import CorruptError, ExcessError, listing, shown
from ft_ckpt.formats.pytree import MOST_LEVELS

MOST_BYTES = 64 << 20  # of one object
_FORBIDDEN = frozenset(b"io\x82\x83\x84\x96\x97\x98")  # INST, OBJ, EXT1, 2 and 4, BYTEARRAY8, buffers: in no such file
_ALLOWED, _ALLOWED_PER_BYTE = 1 << 20, 64  # elements that a pickle may copy, hash or describe
_CONTAINERS, _SIZED = (dict, list, tuple), frozenset((dict, list, tuple, OrderedDict, defaultdict, set, frozenset))
_ALIASES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # of Python 2, which old protocols write

Find = Callable[[str], Any]  # the stand-in for a full name; None if the table does not have it


class Sealed(type):
    """Metaclass of classes that no pickle can modify."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise CorruptError(f"a pickle may not change {cls.__name__}.{name}")


class Passive(metaclass=Sealed):
    """Stand-in for an object of a class that is not imported: records its arguments and state."""

    kind = "object"  # full name of its class
    args: tuple[Any, ...]
    items: list[Any]
    state: Any

    def __new__(cls, *args: Any, **named: Any) -> "Passive":
        made = object.__new__(cls)
        made.args, made.items, made.state = (*args, *named.values()), [], None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items += [key, value]

    def append(self, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: Any) -> None:
        self.items.extend(values)


class Call:
    """A function that pickles may call and cannot modify: it has no attributes, and refuses a state."""

    __slots__ = ("_run",)

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def __setstate__(self, state: Any) -> None:
        raise CorruptError("a pickle may not change a function")


def interpret_pickle(
    stream: BinaryIO, find: Find, passive: frozenset[str] = frozenset(), persistent: Callable[[Any], Any] | None = None
) -> tuple[Any, list[str]]:
    """The value pickled in `stream`, and the names that `find` does not know.

    Afterwards the stream is positioned at the end of the pickle. Unknown names become `Passive`; those of the packages
    `passive` are not returned. `persistent` resolves persistent ids. Raises ExcessError for more elements than the size
    of the pickle allows. Raises CorruptError for opcodes that are not allowed and a value that contains itself, and any
    error that Python raises for a damaged pickle; with unknown names to return, the value is None or invalid instead.
    """
    reader = _SafeUnpickler(_WholeStream(stream), find, passive, persistent)
    value = None
    try:
        value = reader.load()
        _check_places(value, reader.allowed)
    except Exception as error:  # a damaged pickle can raise any error
        if not reader.foreign or isinstance(error, ExcessError):
            raise
        value = None  # it may contain itself
    return value, sorted(reader.foreign)


def _check_places(value: Any, most: int) -> None:
    """Raise CorruptError when containers contain themselves, are nested too deep, or have over `most` elements in all.

    Each container is visited once; its elements count once for each reference to it.
    """
    counts: dict[int, int] = {}
    open_: set[int] = set()
    stack: list[tuple[Any, bool]] = [(value, False)]
    while stack:
        one, is_done = stack.pop()
        if not isinstance(one, _CONTAINERS) or id(one) in counts:
            continue
        parts = one.values() if isinstance(one, dict) else one
        if is_done:
            open_.remove(id(one))
            counts[id(one)] = 1 + sum(counts.get(id(part), 1) for part in parts)  # an empty one is visited too
            if counts[id(one)] > most:
                raise ExcessError(f"containers in containers, with more than {most:,} places")
            continue
        if id(one) in open_ or len(open_) > MOST_LEVELS:
            raise CorruptError(
                "a container that contains itself" if id(one) in open_ else f"over {MOST_LEVELS} levels deep"
            )
        open_.add(id(one))
        stack.append((one, True))
        stack += [(part, False) for part in parts if isinstance(part, _CONTAINERS)]


class _WholeStream:
    """A stream whose `read` returns exactly the requested size, and never allocates more than the size of the file."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.readline = stream, stream.readline
        begin = stream.tell()
        self.size_bytes = stream.seek(0, io.SEEK_END) - begin
        stream.seek(begin)

    def read(self, size: int) -> bytes:
        found = self.stream.read(min(size, self.size_bytes))
        if len(found) < size:
            raise CorruptError(f"a pickle that was cut short: {size} bytes wanted, {len(found)} left")
        return found


_Python: Any = vars(pickle)["_Unpickler"]  # in the C implementation, opcodes cannot be replaced


class _SafeUnpickler(_Python):  # type: ignore[misc]
    dispatch: ClassVar = {code: run for code, run in _Python.dispatch.items() if code not in _FORBIDDEN}
    stack: list[Any]

    def __init__(
        self, pickled: _WholeStream, find: Find, passive: frozenset[str], persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(pickled)
        self.find, self.passive, self.persistent = find, passive, persistent
        self.foreign: set[str] = set()
        self.classes: dict[str, type] = {}
        self.allowed = self.left = _ALLOWED + _ALLOWED_PER_BYTE * min(pickled.size_bytes, MOST_BYTES)
        self.weights: dict[int, tuple[int, int, Any]] = {}  # of nested tuples: (elements that hashing visits, levels)

    def pay_for(self, values: Iterable[Any]) -> None:
        """Subtract what copying or hashing `values` costs from the allowance. Raises ExcessError when it is used up."""
        if self.weights:
            self.left -= sum(self.weights[id(one)][0] if id(one) in self.weights else _hash_cost(one) for one in values)
        else:
            self.left -= sum(map(_hash_cost, values))
        if self.left < 0:
            raise ExcessError("the pickle does more than its size warrants")

    def _weigh_tuple(self) -> None:
        """Record the cost of hashing the tuple just made, if it contains other tuples."""
        made = self.stack[-1]
        if any(type(part) is tuple for part in made):
            weight = 1 + sum(self.weights[id(p)][0] if id(p) in self.weights else _hash_cost(p) for p in made)
            levels = 1 + max(self.weights[id(p)][1] if id(p) in self.weights else 1 for p in made)
            self.weights[id(made)] = weight, levels, made
            self.left -= len(made)
            if levels > MOST_LEVELS:  # hashing recurses in C: a stack overflow would end the process
                raise ExcessError(f"tuples over {MOST_LEVELS} levels deep")
            if weight > self.left:
                raise ExcessError("tuples in tuples, of more places than the size of the pickle warrants")

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a global. Nothing is imported; unknown names outside `passive` are recorded."""
        full = f"{_ALIASES.get(module, module)}.{name}"
        found = self.find(full)
        if found is not None:
            return found
        if full.partition(".")[0] not in self.passive:
            self.foreign.add(full)
        return self.classes.setdefault(full, Sealed(name, (Passive,), {"kind": full}))

    def persistent_load(self, reference: Any) -> Any:
        """The object of a persistent id."""
        if self.persistent is None:
            raise CorruptError("a reference to an object outside of the pickle")
        return self.persistent(reference)


def _hash_cost(value: Any) -> int:
    kind = type(value)
    if kind in _SIZED:
        return len(value)
    return 1 + len(value) // 64 if kind in (str, bytes, bytearray) else 1


def _then_weigh(name: str) -> Callable[[_SafeUnpickler], None]:
    """The opcode handler of Python's unpickler with this name, followed by charging the tuple it made."""
    run = getattr(_Python, name)

    def run_weighed(reader: _SafeUnpickler) -> None:
        run(reader)
        reader._weigh_tuple()

    return run_weighed


def _pay_before(name: str, hashed: Callable[[_SafeUnpickler], Iterable[Any]]) -> Callable[[_SafeUnpickler], None]:
    """The opcode handler of Python's unpickler with this name, preceded by charging the values that it hashes."""
    run = getattr(_Python, name)

    def run_paid(reader: _SafeUnpickler) -> None:
        reader.pay_for(hashed(reader))
        run(reader)

    return run_paid


def _pay_call(name: str) -> Callable[[_SafeUnpickler], None]:
    """The opcode handler of Python's unpickler with this name, preceded by charging the arguments of the call."""
    run = getattr(_Python, name)

    def run_paid(reader: _SafeUnpickler) -> None:
        given = reader.stack[-1]
        reader.pay_for(given)
        if reader.weights:
            for one in given:
                if isinstance(one, (list, tuple)):  # the call may make a set or mapping of it
                    reader.pay_for(one)
        run(reader)

    return run_paid


_SafeUnpickler.dispatch |= {
    **{code: _then_weigh(name) for code, name in ((0x74, "load_tuple"), (0x85, "load_tuple1"), (0x86, "load_tuple2"),
                                             (0x87, "load_tuple3"))},
    0x64: _pay_before("load_dict", lambda reader: reader.stack[::2]),
    0x73: _pay_before("load_setitem", lambda reader: reader.stack[-2:-1]),
    0x75: _pay_before("load_setitems", lambda reader: reader.stack[::2]),
    0x90: _pay_before("load_additems", lambda reader: reader.stack),
    0x91: _pay_before("load_frozenset", lambda reader: reader.stack),
    0x62: _pay_before("load_build", lambda reader: reader.stack[-1:]),
    0x52: _pay_call("load_reduce"),
    0x81: _pay_call("load_newobj"),
    0x92: _pay_before("load_newobj_ex", lambda reader: reader.stack[-2:]),
}  # fmt: skip


@dataclass(frozen=True)
class OpaqueObject:
    """A pickled object that was not loaded, because that could run code. `name`: its path in the file."""

    name: str
    data: bytes = field(repr=False)

    def unpickle(self, *, trust: bool = False) -> Any:
        """Load the object, which can run any code; raises CorruptError unless `trust` is True."""
        if not trust:
            raise CorruptError(f"{self.name}: a pickle can run any code; pass trust=True if you know who wrote it")
        return pickle.loads(self.data)  # noqa: S301 - the caller trusts it


def unpickle_plain(data: bytes, extra: Mapping[str, Any] | None = None) -> Any:
    """The value pickled in `data`. Raises CorruptError for anything but plain values and the globals `extra`."""
    if len(data) > MOST_BYTES:
        raise CorruptError(f"a pickle of {len(data)} bytes")
    try:
        value, foreign = interpret_pickle(io.BytesIO(data), {**PLAIN_VALUES, **(extra or {})}.get)
    except CorruptError:
        raise
    except Exception as error:
        raise CorruptError(f"a damaged pickle ({shown(error)})") from error
    if foreign:
        raise CorruptError(f"the pickle names {listing(foreign, ', ')}")
    return value


class _NumpyDtype:
    """Stand-in for numpy.dtype: reads its letter, size and byte order."""

    def __init__(self, kind: str, *_: Any) -> None:
        self.kind = kind
        self.order: Any = "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if state[1] in "<>" else "="

    def real_dtype(self) -> np.dtype[Any]:
        """The dtype; only numbers and strings of limited size."""
        dtype: np.dtype[Any] = np.dtype(self.kind).newbyteorder(self.order)
        if dtype.kind not in "biufcSU" or dtype.itemsize > MOST_BYTES:
            raise CorruptError(f"a numpy scalar of {dtype}")
        return dtype


def _numpy_scalar(dtype: _NumpyDtype, data: bytes) -> Any:
    return np.frombuffer(data, dtype.real_dtype())[0]


def _make_bytes(data: Any = b"", encoding: str = "latin1") -> bytes:
    return _encode_latin1(data, encoding) if isinstance(data, str) else bytes(memoryview(data))  # never bytes(10**12)


def _encode_latin1(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise CorruptError(f"text in {encoding}")
    return text.encode("latin1")


def _collection_call(make: Callable[[Any], Any]) -> Call:
    return Call(lambda *items: make(*(list(item) for item in items)))


PLAIN_GLOBALS: Mapping[str, Any] = {
    "builtins.complex": Call(lambda real=0.0, imaginary=0.0: complex(float(real), float(imaginary))),
    "builtins.set": _collection_call(set),
    "builtins.frozenset": _collection_call(frozenset),
    "builtins.bytes": Call(_make_bytes),
    "builtins.bytearray": Call(lambda *given: bytearray(_make_bytes(*given))),
    "_codecs.encode": Call(_encode_latin1),
    "collections.OrderedDict": OrderedDict,
}  # in every table
PLAIN_VALUES: Mapping[str, Any] = {
    **PLAIN_GLOBALS,
    **{f"torch.{name}": one for name, one in vars(torch).items() if isinstance(one, torch.dtype)},
    "torch.device": Call(lambda *place: torch.device(*place)),
    "torch.Size": _collection_call(torch.Size),
    "numpy.dtype": Call(_NumpyDtype),
    "numpy.core.multiarray.scalar": Call(_numpy_scalar),
    "numpy._core.multiarray.scalar": Call(_numpy_scalar),
}
