"""Pickles in foreign files: values are read, code is never run.

Only a list of harmless types is rebuilt, by functions of this module and not by what the pickle names. Anything else
stays an `OpaqueObject`, which its owner may open on purpose.
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

from ft_ckpt.errors import CorruptError

_MOST_BYTES = 64 << 20
_FORBIDDEN = {"INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "BYTEARRAY8", "NEXT_BUFFER"}


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


def loads(data: bytes, extra: Mapping[tuple[str, str], Any] | None = None) -> Any:
    """The value pickled in `data`. Raises CorruptError when it holds anything beyond plain values and `extra`."""
    try:
        _inspect(data)
        return _Reader(data, extra or {}).load()
    except CorruptError:
        raise
    except Exception as error:
        raise CorruptError(f"a damaged pickle ({error!r})") from error


def _inspect(data: bytes) -> None:
    """Raise before anything is built, if an instruction is unknown, cut short, or would ask for absurd memory."""
    if len(data) > _MOST_BYTES:
        raise CorruptError(f"a pickle of {len(data)} bytes")
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _FORBIDDEN or ("PUT" in opcode.name and int(argument or 0) > len(data)):
            raise CorruptError(f"the pickle instruction {opcode.name} {argument}")


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, extra: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.extra = extra

    def find_class(self, module: str, name: str) -> Any:
        """What stands for the global `name` of `module`."""
        module = "builtins" if module == "__builtin__" else module  # protocols of Python 2
        if (module, name) in self.extra:
            return self.extra[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _HARMLESS:
            return _HARMLESS[module, name]
        raise CorruptError(f"the pickle names {module}.{name}")


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


class _Make:
    """A function that a pickle can call but not change."""

    __slots__ = ("make",)
    make: Callable[..., Any]

    def __init__(self, make: Callable[..., Any]) -> None:
        object.__setattr__(self, "make", make)

    def __call__(self, *arguments: Any) -> Any:
        return self.make(*arguments)

    def __setattr__(self, name: str, _: Any) -> None:
        raise CorruptError(f"the pickle sets {name}")

    def __setstate__(self, state: Any) -> None:
        raise CorruptError(f"the pickle sets {state!r:.60}")


def _scalar(dtype: _Dtype, data: bytes) -> Any:
    return np.frombuffer(data, dtype.real())[0]


def _bytearray(data: Any = b"", encoding: str = "latin1") -> bytearray:
    return bytearray(_encode(data, encoding) if isinstance(data, str) else memoryview(data))  # never bytearray(10**12)


def _encode(text: str, encoding: str = "latin1") -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise CorruptError(f"text in {encoding}")
    return text.encode("latin1")


def _collect(make: Callable[[Any], Any]) -> _Make:
    return _Make(lambda *items: make(*(list(item) for item in items)))


_HARMLESS: dict[tuple[str, str], Any] = {
    ("builtins", "complex"): _Make(lambda real=0.0, imaginary=0.0: complex(float(real), float(imaginary))),
    ("builtins", "set"): _collect(set),
    ("builtins", "frozenset"): _collect(frozenset),
    ("builtins", "bytearray"): _Make(_bytearray),
    ("_codecs", "encode"): _Make(_encode),
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "device"): _Make(lambda *place: torch.device(*place)),
    ("torch", "Size"): _collect(torch.Size),
    ("numpy", "dtype"): _Make(_Dtype),
    ("numpy.core.multiarray", "scalar"): _Make(_scalar),
    ("numpy._core.multiarray", "scalar"): _Make(_scalar),
}
