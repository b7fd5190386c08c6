"""Reads single pickled objects, such as leaves of a Cerebras checkpoint: plain values, and nothing that runs.

Their table of names is here. What it does not know stays an `OpaqueObject`, which its owner may open on purpose.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ft_ckpt.errors import CorruptError, listing, shown
from ft_ckpt.formats.safe_pickle import MOST_BYTES, Call, interpret_pickle


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


def unpickle_plain(data: bytes, extra: Mapping[str, Any] | None = None) -> Any:
    """The value pickled in `data`. Raises CorruptError when it holds anything beyond plain values and `extra`."""
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
    """Stands for numpy.dtype: only its letter and size are looked at."""

    def __init__(self, kind: str, *_: Any) -> None:
        self.kind = kind
        self.order: Any = "="

    def __setstate__(self, state: Any) -> None:
        self.order = state[1] if state[1] in "<>" else "="

    def real_dtype(self) -> np.dtype[Any]:
        """The type itself, of numbers only."""
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


PLAIN: Mapping[str, Any] = {
    "builtins.complex": Call(lambda real=0.0, imaginary=0.0: complex(float(real), float(imaginary))),
    "builtins.set": _collection_call(set),
    "builtins.frozenset": _collection_call(frozenset),
    "builtins.bytes": Call(_make_bytes),
    "builtins.bytearray": Call(lambda *given: bytearray(_make_bytes(*given))),
    "_codecs.encode": Call(_encode_latin1),
    "collections.OrderedDict": OrderedDict,
}  # what any table has
PLAIN_VALUES: Mapping[str, Any] = {
    **PLAIN,
    **{f"torch.{name}": one for name, one in vars(torch).items() if isinstance(one, torch.dtype)},
    "torch.device": Call(lambda *place: torch.device(*place)),
    "torch.Size": _collection_call(torch.Size),
    "numpy.dtype": Call(_NumpyDtype),
    "numpy.core.multiarray.scalar": Call(_numpy_scalar),
    "numpy._core.multiarray.scalar": Call(_numpy_scalar),
}
