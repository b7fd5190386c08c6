"""JSON for the settings and counters of optimizers: numbers, texts, dtypes, enums and containers.

Unlike the tree of an object (`pytree_json`) it has no tensors, and a plain value is its own JSON.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from enum import Enum, EnumMeta
from typing import Any

import torch

from ft_ckpt.errors import LoadError, SelectionError
from ft_ckpt.formats.dtypes import dtype_name, dtype_of
from ft_ckpt.formats.pytree import vars_of

_MAX_DEPTH = 32  # also stops at a list that contains itself
_DECODERS: dict[str, Callable[[Any], Any]] = {  # each takes the decoded content of its kind
    "float": float,
    "dtype": dtype_of,
    "tuple": tuple,
    "size": torch.Size,
    "set": set,
    "frozenset": frozenset,
}


def encode_value(value: Any, depth: int = 0) -> Any:
    """JSON for a simple value. Raises SelectionError for any other."""
    if depth > _MAX_DEPTH:
        raise SelectionError("nested too deeply")
    kind = type(value)  # exact: a subclass (an enum, a path) could not be restored
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is torch.dtype:
        return {"dtype": dtype_name(value)}
    if kind is dict:
        pairs = []
        for key, item in value.items():
            pairs.append([encode_value(key, depth + 1), encode_value(item, depth + 1)])
        return {"dict": pairs}
    if kind in (list, tuple, torch.Size, set, frozenset):
        items = [encode_value(item, depth + 1) for item in value]
        if kind is list:
            return items
        if kind in (set, frozenset):
            items.sort(key=json.dumps)
        return {"size" if kind is torch.Size else kind.__name__: items}
    if issubclass(kind, Enum):
        path = (kind.__module__, kind.__qualname__, value.name)
        if _enum_member(*path) is value:
            return {"enum": list(path)}
    raise SelectionError(f"{kind.__name__} is no simple value")


def decode_value(value: Any) -> Any:
    """The value from the result of `encode_value`.

    Raises LoadError for an unknown dtype or enum class.
    """
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {decode_value(key): decode_value(item) for key, item in content}
    if kind == "enum":
        return _decode_enum(content)
    return _DECODERS[kind](decode_value(content))


def _enum_member(module_name: str, qualname: str, name: str) -> Any:
    """A member of an enum class of an imported module; None if there is no such class or member."""
    kind: Any = sys.modules.get(module_name)
    for part in qualname.split("."):
        kind = vars_of(kind).get(part)
    return kind.__members__.get(name) if isinstance(kind, EnumMeta) else None


def _decode_enum(content: Sequence[str]) -> Any:
    module_name, qualname, name = content
    member = _enum_member(module_name, qualname, name)
    if member is None:
        raise LoadError(
            f"{module_name}.{qualname}.{name}: no such member of an enum in this process; import "
            "its module first"
        )
    return member
