"""Reads pickles of other programs by a table of the globals that they may name.

`unpickle` calls classes and functions of its table only, with arguments from the pickle. It imports
no global, and refuses a pickle that names another. `OpaqueObject.unpickle(trust=True)` is the
exception: it runs what the pickle says.

`unpickle` reads bare pickles: the metadata of torch.distributed.checkpoint, leaves of Cerebras
files. Torch files are read by `torch.load`, which gets values and stand-ins of this module.
"""

import codecs
import io
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ft_ckpt.errors import CorruptError, LoadError, shown

MAX_BYTES = 64 << 20  # limit of one pickle
_MEMO_OPCODES = ("PUT", "BINPUT", "LONG_BINPUT")
# Old protocols write the names that modules had in Python 2.
_ALIASES = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class Sealed(type):
    """Metaclass of classes that no pickle can modify."""

    def __setattr__(cls, name: str, value: object) -> None:
        raise CorruptError(f"a pickle may not change {cls.__name__}.{name}")


class StandIn(metaclass=Sealed):
    """Takes the place of an object whose class is not imported: records its arguments and state."""

    kind = "object"  # full name of its class
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any, **named: Any) -> "StandIn":
        instance = object.__new__(cls)
        instance.args, instance.state = (*args, *named.values()), None
        return instance

    def __setstate__(self, state: Any) -> None:
        self.state = state


def stand_in(full_name: str) -> type[StandIn]:
    """Make a class that takes the place of the class or function of this name."""

    class Named(StandIn):
        kind = full_name

    return Named


_make_scalar = np.float32(0).__reduce__()[0]
# Globals that give plain values. All are classes and functions in C, which no pickle can modify.
PLAIN_VALUES: Mapping[str, Any] = {
    **{f"builtins.{kind.__name__}": kind for kind in (complex, set, frozenset, bytes, bytearray)},
    **{f"torch.{name}": dtype for name, dtype in vars(torch).items() if type(dtype) is torch.dtype},
    "_codecs.encode": codecs.encode,
    "collections.OrderedDict": OrderedDict,
    "torch.device": torch.device,
    "torch.Size": torch.Size,
    "numpy.dtype": np.dtype,
    "numpy.core.multiarray.scalar": _make_scalar,
    "numpy._core.multiarray.scalar": _make_scalar,
}


class _TableUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, source: str, table: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(data))
        self.source, self.table = source, table

    def find_class(self, module: str, name: str) -> Any:
        """Look a global up in the table. Nothing is imported."""
        full_name = f"{_ALIASES.get(module, module)}.{name}"
        if full_name not in self.table:
            raise LoadError(
                f"{self.source}: refers to {full_name}, expected plain data; nothing of it was run"
            )
        return self.table[full_name]


def unpickle(data: bytes, source: str, table: Mapping[str, Any] = PLAIN_VALUES) -> Any:
    """Load the value pickled in `data`, whose globals are looked up in `table`.

    `source` names the pickle in errors. Raises LoadError for a global that is not in the table,
    CorruptError for a damaged pickle and one above 64 MB.
    """
    if len(data) > MAX_BYTES:
        raise CorruptError(
            f"{source}: a pickle of {len(data):,} bytes, expected at most {MAX_BYTES:,}"
        )
    try:
        _check_memo(data)
        return _TableUnpickler(data, source, table).load()
    except LoadError:
        raise
    except Exception as error:  # a damaged pickle can raise any error
        raise CorruptError(f"{source}: a damaged pickle ({shown(error)})") from error


def _check_memo(data: bytes) -> None:
    """Raise CorruptError for an index in the memo that no pickle of this size reaches.

    A huge index would exhaust memory, because Python allocates all entries before it.
    """
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in _MEMO_OPCODES and (argument or 0) > len(data):
            raise CorruptError(f"place {argument:,} of the memo")


@dataclass(frozen=True)
class OpaqueObject:
    """A pickled object that was not loaded, because that could run code.

    `name` is its path in the file.
    """

    name: str
    data: bytes = field(repr=False)

    def unpickle(self, *, trust: bool = False) -> Any:
        """Load the object, which can run any code; raises CorruptError unless `trust` is True."""
        if not trust:
            raise CorruptError(
                f"{self.name}: a pickle can run any code; pass trust=True if you know who wrote it"
            )
        return pickle.loads(self.data)  # noqa: S301 - the caller trusts it
