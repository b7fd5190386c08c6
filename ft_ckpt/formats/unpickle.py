"""Pickles in foreign files: values are read, code is never run.

One interpreter for all of them. Whatever name a pickle refers to is looked up in a table of its reader, and what stands
there is ours: plain containers, functions that make values, stand-ins that note what they were given. Nothing is
imported. The table here is that of single objects in a file, such as the leaves of a Cerebras checkpoint; what it does
not know stays an `OpaqueObject`, which its owner may open on purpose. `torch_pickle` has the one of torch's files.
"""

import io
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ft_ckpt.errors import CorruptError, listing

_MOST_BYTES = 64 << 20  # of one object
_FORBIDDEN = {"INST", "OBJ", "EXT1", "EXT2", "EXT4", "BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"}  # in no such file
_ALIASES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # of Python 2, which old protocols write

Find = Callable[[str], Any]  # what stands for a name in full; None where the table does not have it


@dataclass(frozen=True)
class OpaqueObject:
    """A pickled object that was not opened, because opening it could run code. `name` is its place in the file."""

    name: str
    data: bytes = field(repr=False)

    def unpickle(self, *, trust: bool = False) -> Any:
        """The object. Runs whatever the pickle says, so `trust` must be True. Raises CorruptError otherwise."""
        if not trust:
            raise CorruptError(f"{self.name}: a pickle can run any code; pass trust=True if you know who wrote it")
        return pickle.loads(self.data)  # noqa: S301 - asked for, in so many words


class Sealed(type):
    """The kind of classes that no pickle can change."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise CorruptError(f"a pickle may not change {cls.__name__}.{name}")


class Passive(metaclass=Sealed):
    """Stand-in for an object of a class that is not imported: keeps what the pickle gives it, does nothing."""

    kind = "object"  # its class, with the module
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **_named: Any) -> "Passive":
        """Note the arguments."""
        made = object.__new__(cls)
        made.args, made.state = args, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """What list subclasses are filled by."""

    def extend(self, values: Any) -> None:
        """What list subclasses are filled by."""


class Call:
    """A function of a table. No pickle can change it: it has no attributes, and refuses a state."""

    __slots__ = ("_run",)

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any) -> Any:
        """What the function makes of `args`."""
        return self._run(*args)

    def __setstate__(self, state: Any) -> None:
        raise CorruptError("a pickle may not change a function")


def interpret(
    data: bytes,
    find: Find,
    passive: frozenset[str] = frozenset(),
    persistent: Callable[[Any], Any] | None = None,
) -> tuple[Any, list[str]]:
    """The value pickled in `data`, and every name that `find` does not know; with any of these, the value is no good.

    What comes from the packages `passive` may be unknown: it becomes `Passive`. `persistent` gives what the pickle
    refers to outside of it. Raises whatever a damaged pickle makes Python raise, CorruptError for what none has.
    """
    reader = _Reader(io.BytesIO(data), find, passive, persistent)
    value = None
    try:
        _inspect(data)
        value = reader.load()
    except Exception:  # a mutated pickle can make the machine fail in any way
        if not reader.foreign:
            raise
    return value, sorted(reader.foreign)


def loads(data: bytes, extra: Mapping[str, Any] | None = None) -> Any:
    """The value pickled in `data`. Raises CorruptError when it holds anything beyond plain values and `extra`."""
    if len(data) > _MOST_BYTES:
        raise CorruptError(f"a pickle of {len(data)} bytes")
    try:
        value, foreign = interpret(data, {**_VALUES, **(extra or {})}.get)
    except CorruptError:
        raise
    except Exception as error:
        raise CorruptError(f"a damaged pickle ({error!r})") from error
    if foreign:
        raise CorruptError(f"the pickle names {listing(foreign, ', ')}")
    return value


def _inspect(data: bytes) -> None:
    """Raise before anything is built, if an instruction is unknown, cut short, or would ask for absurd memory."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _FORBIDDEN or ("PUT" in opcode.name and int(argument or 0) > len(data)):
            raise CorruptError(f"the pickle instruction {opcode.name} {argument}")


class _Reader(pickle.Unpickler):
    def __init__(
        self, stream: io.BytesIO, find: Find, passive: frozenset[str], persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(stream)
        self.find, self.passive, self.persistent = find, passive, persistent
        self.foreign: set[str] = set()
        self.classes: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        """What stands for a global: nothing is imported, and a name outside the table is noted as foreign."""
        full = f"{_ALIASES.get(module, module)}.{name}"
        found = self.find(full)
        if found is not None:
            return found
        if full.partition(".")[0] not in self.passive:
            self.foreign.add(f"{module}.{name}")
        return self.classes.setdefault(full, Sealed(name, (Passive,), {"kind": full}))

    def persistent_load(self, reference: Any) -> Any:
        """What a pickle refers to outside of it."""
        if self.persistent is None:
            raise CorruptError(f"a reference to {reference!r:.60}")
        return self.persistent(reference)


class _Dtype:
    """Stands for numpy.dtype: only its letter and size are looked at."""

    def __init__(self, kind: str, *_: Any) -> None:
        self.kind = kind
        self.order: Any = "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if state[1] in "<>" else "="

    def real(self) -> np.dtype[Any]:
        """The type itself, of numbers only."""
        dtype: np.dtype[Any] = np.dtype(self.kind).newbyteorder(self.order)
        if dtype.kind not in "biufcSU" or dtype.itemsize > _MOST_BYTES:
            raise CorruptError(f"a numpy scalar of {dtype}")
        return dtype


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    return np.frombuffer(data, dtype.real())[0]


def _bytes(data: Any = b"", encoding: str = "latin1") -> bytes:
    return _encode(data, encoding) if isinstance(data, str) else bytes(memoryview(data))  # never bytes(10**12)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise CorruptError(f"text in {encoding}")
    return text.encode("latin1")


def _collect(make: Callable[[Any], Any]) -> Call:
    return Call(lambda *items: make(*(list(item) for item in items)))


PLAIN: Mapping[str, Any] = {
    "builtins.complex": Call(lambda real=0.0, imaginary=0.0: complex(float(real), float(imaginary))),
    "builtins.set": _collect(set),
    "builtins.frozenset": _collect(frozenset),
    "builtins.bytes": Call(_bytes),
    "builtins.bytearray": Call(lambda *given: bytearray(_bytes(*given))),
    "_codecs.encode": Call(_encode),
    "collections.OrderedDict": OrderedDict,
}  # what any table has
_VALUES: Mapping[str, Any] = {
    **PLAIN,
    **{f"torch.{name}": one for name, one in vars(torch).items() if isinstance(one, torch.dtype)},
    "torch.device": Call(lambda *place: torch.device(*place)),
    "torch.Size": _collect(torch.Size),
    "numpy.dtype": Call(_Dtype),
    "numpy.core.multiarray.scalar": Call(_scalar),
    "numpy._core.multiarray.scalar": Call(_scalar),
}
