"""Numpy arrays and their types as bytes and JSON, exactly and without pickling."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ft_ckpt.errors import CorruptError

Array = np.ndarray[Any, Any]
_NUMBERS = {
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """A JSON form of a numpy type, without pickling."""
    described = np.lib.format.dtype_to_descr(dtype)
    return described if isinstance(described, str) else _tuples_to_lists(described)


def described_dtype(described: Any) -> np.dtype[Any]:
    """The numpy type of `describe_dtype`."""
    fields: Any = described if isinstance(described, str) else _field_tuples(described)
    dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(fields)
    return dtype


def stored_array(array: Array) -> Array:
    """`array`, row by row, as numbers that every format has; other types as their bytes, one dimension more."""
    if array.dtype.isbuiltin and array.dtype.kind in "biufc" and array.dtype.name in _NUMBERS:
        numbers: Array = np.ascontiguousarray(array).reshape(array.shape)
        return numbers
    data: Array = np.frombuffer(array.tobytes(), np.uint8).reshape((*array.shape, array.dtype.itemsize))
    return data


def restored_array(stored: Array, described: Any, shape: tuple[int, ...]) -> Array:
    """The array that `stored_array` was given. Raises CorruptError when the bytes are not as many as it had."""
    dtype = described_dtype(described)
    if dtype.hasobject or stored.nbytes != math.prod(shape) * dtype.itemsize:
        raise CorruptError(f"{stored.nbytes} bytes for an array of {shape} {dtype}")
    empty: Array = np.ndarray(shape, dtype)  # not np.empty, which makes strings of no length longer
    return stored.reshape(-1).view(np.uint8).view(dtype).reshape(shape) if stored.nbytes else empty


def is_describable(dtype: np.dtype[Any]) -> bool:
    """True when the type, its extension and metadata included, can be written down and read again."""
    if dtype.hasobject or dtype.metadata:
        return False
    try:
        return described_dtype(describe_dtype(dtype)) == dtype
    except (TypeError, ValueError):
        return False


def _tuples_to_lists(described: Any) -> Any:
    return [_tuples_to_lists(item) for item in described] if isinstance(described, (list, tuple)) else described


def _field_tuples(described: Sequence[Any]) -> Any:
    """Fields as numpy wants them: a list of (name, type) or (name, type, shape)."""
    fields = []
    for name, kind, *shape in described:
        title = tuple(name) if isinstance(name, list) else name
        fields.append((title, kind if isinstance(kind, str) else _field_tuples(kind), *(tuple(part) for part in shape)))
    return fields
