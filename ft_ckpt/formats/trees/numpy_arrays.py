"""numpy's arrays and dtypes in files: dtypes as JSON, arrays as tensors or bytes."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ft_ckpt.errors import CorruptError

Array = np.ndarray[Any, Any]
# dtypes of arrays that every format stores as they are
_NUMBERS = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)


def describe_dtype(dtype: np.dtype[Any]) -> Any:
    """Describe a numpy type as JSON, without pickling."""
    described = np.lib.format.dtype_to_descr(dtype)
    return described if isinstance(described, str) else _tuples_to_lists(described)


def _tuples_to_lists(described: Any) -> Any:
    if not isinstance(described, (list, tuple)):
        return described
    return [_tuples_to_lists(item) for item in described]


def described_dtype(described: Any) -> np.dtype[Any]:
    """Return the numpy type that `describe_dtype` has described."""
    fields: Any = described if isinstance(described, str) else _field_tuples(described)
    dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(fields)
    return dtype


def _field_tuples(described: Sequence[Any]) -> Any:
    """Convert fields to numpy's form: a list of (name, type) or (name, type, shape)."""
    fields = []
    for name, kind, *shape in described:
        title = tuple(name) if isinstance(name, list) else name
        inner = kind if isinstance(kind, str) else _field_tuples(kind)
        fields.append((title, inner, *map(tuple, shape)))
    return fields


def is_describable(dtype: np.dtype[Any]) -> bool:
    """Check whether the type can be restored from its JSON form.

    Types with Python objects or metadata cannot.
    """
    if dtype.hasobject or dtype.metadata:
        return False
    try:
        return described_dtype(describe_dtype(dtype)) == dtype
    except (TypeError, ValueError):
        return False


def stored_array(array: Array) -> Array:
    """Return `array` in row-major order, in a dtype that every format has.

    Other dtypes become bytes, with one more dimension.
    """
    dtype = array.dtype
    if dtype.isbuiltin and dtype.kind in "biufc" and dtype.name in _NUMBERS:
        numbers: Array = np.ascontiguousarray(array).reshape(array.shape)
        return numbers
    data: Array = np.frombuffer(array.tobytes(), np.uint8)
    return data.reshape((*array.shape, dtype.itemsize))


def restored_array(stored: Array, described: Any, shape: tuple[int, ...]) -> Array:
    """Restore the array of `stored_array`. Raises CorruptError for a wrong number of bytes."""
    dtype = described_dtype(described)
    if dtype.hasobject or stored.nbytes != math.prod(shape) * dtype.itemsize:
        raise CorruptError(f"{stored.nbytes} bytes for an array of {shape} {dtype}")
    if not stored.nbytes:
        empty: Array = np.ndarray(shape, dtype)  # np.empty makes strings of no length longer
        return empty
    return stored.reshape(-1).view(np.uint8).view(dtype).reshape(shape)
