"""The JSON form of a tree of nodes, and text of an object with its tensors."""

import base64
import json
import math
import struct
import sys
from collections.abc import Callable, Sequence
from enum import Enum, EnumMeta
from typing import Any

import numpy as np
import torch

from ft_ckpt.errors import CorruptError, LoadError, SelectionError, damaged_input, shown
from ft_ckpt.formats.dtypes import dtype_name, dtype_of
from ft_ckpt.formats.trees.numpy_arrays import describe_dtype, described_dtype
from ft_ckpt.formats.trees.pytree import (
    MAPPINGS,
    MAX_LEVELS,
    SEQUENCES,
    Leaf,
    Node,
    flatten,
    unflatten,
    vars_of,
)
from ft_ckpt.storage import is_utf8

_MAX_WORD = 1 << 63  # larger integers are written in hexadecimal, which has no limit on digits


# An object with its tensors


def dump_object(obj: Any, name: str) -> str:
    """Encode `obj` and its tensors as text.

    Raises SelectionError naming the paths, below `name`, of unsupported values.
    """
    all_dtypes = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    node, leaves = flatten(obj, [str(dtype).removeprefix("torch.") for dtype in all_dtypes], name)
    stored = [[list(leaf.shape), leaf.dtype, _base64_text(_leaf_bytes(leaf))] for leaf in leaves]
    return json.dumps({"tree": encode_node(node), "leaves": stored}, separators=(",", ":"))


def load_object(text: str) -> Any:
    """Rebuild the object from the text of `dump_object`. Raises CorruptError for any other text."""
    try:
        document = json.loads(text)
        leaves = [_leaf_tensor(*stored) for stored in document["leaves"]]
        tree = document["tree"]
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
        raise CorruptError(
            f"the text of the object is damaged ({shown(error)}); use another copy of the file"
        ) from error
    return unflatten(decode_node(tree), leaves.__getitem__, lambda number: leaves[number].numpy())


def _leaf_bytes(leaf: Leaf) -> bytes:
    if leaf.is_array:
        return bytes(leaf.data.tobytes())
    flat = leaf.data.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def _leaf_tensor(shape: list[int], dtype: str, text: str) -> torch.Tensor:
    data = bytearray(_base64_bytes(text))
    if data:
        flat = torch.frombuffer(data, dtype=torch.uint8)
    else:
        flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    return flat.view(_torch_dtype(dtype)).reshape(shape)


# The tree


def encode_node(node: Node) -> Any:
    """Encode a node as lists, dicts and plain values, for `json.dumps`."""
    kind = node.kind
    if kind == "tensor":
        return ["tensor", node.value]
    if kind == "value":
        return _encode_scalar(node.value)
    if kind in ("array", "blob"):
        return [kind, *node.value]
    children = [encode_node(child) for child in node.children]
    if kind == "dict" and _has_plain_keys(node):
        return {key.value: child for key, child in zip(node.keys, children, strict=True)}
    if kind in MAPPINGS:
        detail = encode_node(node.value) if isinstance(node.value, Node) else node.value
        keys = [encode_node(key) for key in node.keys]
        return [kind, detail, list(map(list, zip(keys, children, strict=True)))]

    if kind in ("deque", "namedtuple"):
        return [kind, node.value, *children]
    return [kind, *children]


def _has_plain_keys(node: Node) -> bool:
    return all(type(key.value) is str and is_utf8(key.value) for key in node.keys)


def decode_node(document: Any) -> Node:
    """Rebuild the node of `encode_node`. Raises CorruptError for anything else."""
    with damaged_input("the tree of the object"):
        return _decode_json(document, MAX_LEVELS + 2)


def _decode_json(document: Any, max_levels: int) -> Node:
    if max_levels == 0:
        raise CorruptError("too deep")
    below = max_levels - 1
    if type(document) is dict:
        keys = tuple(Node("value", key) for key in document)
        children = tuple(_decode_json(child, below) for child in document.values())
        return Node("dict", None, keys, children)

    if type(document) is not list:
        return Node("value", document)
    kind, *rest = document
    if kind == "tensor":
        return Node("tensor", _check_number(rest[0]))
    if kind == "array":
        number, described, shape = rest
        return Node("array", (_check_number(number), described, tuple(map(_check_number, shape))))

    if kind == "blob":
        return Node("blob", (_check_number(rest[0]), str(rest[1])))
    if kind in MAPPINGS:
        detail, pairs = rest
        if kind == "odict" and detail is not None:
            detail = _decode_json(detail, below)
        keys = tuple(_decode_json(key, below) for key, _ in pairs)
        children = tuple(_decode_json(child, below) for _, child in pairs)
        return Node(kind, detail, keys, children)

    if kind in ("deque", "namedtuple"):
        return Node(kind, rest[0], (), tuple(_decode_json(child, below) for child in rest[1:]))
    if kind in SEQUENCES:
        return Node(kind, None, (), tuple(_decode_json(child, below) for child in rest))
    return Node("value", _SCALAR_DECODERS[kind](*rest))


def _check_number(number: Any) -> int:
    if type(number) is not int or not 0 <= number < _MAX_WORD:
        raise CorruptError(f"{number!r:.40}, expected the index of a leaf or a size")
    return number


# Scalars


def _encode_scalar(value: Any) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -_MAX_WORD <= value < _MAX_WORD else ["int", hex(value)]
    if kind is float:
        return value if math.isfinite(value) else ["float", _float_bits(value)]
    if kind is str:
        return value if is_utf8(value) else ["str", value.encode("utf-8", "surrogatepass").hex()]
    if kind is complex:
        return ["complex", _float_bits(value.real), _float_bits(value.imag)]
    if isinstance(value, np.generic):
        return ["scalar", describe_dtype(value.dtype), _base64_text(value.tobytes())]
    if isinstance(value, (bytes, bytearray)):
        return [kind.__name__, _base64_text(value)]
    return [kind.__name__, str(value).removeprefix("torch.")]  # a torch dtype or device


def _float_bits(value: float) -> str:
    return struct.pack(">d", value).hex()  # keeps the bits of every NaN


def _parse_float(bits: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    return float(value)


def _base64_text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _base64_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise CorruptError(f"no torch type {name!r}")
    return dtype


def _parse_scalar(described: Any, text: str) -> Any:
    dtype = described_dtype(described)
    if dtype.hasobject:
        raise CorruptError("an object of numpy")
    if not dtype.itemsize:
        return np.ndarray((), dtype)[()]
    return np.frombuffer(_base64_bytes(text), np.uint8).view(dtype)[0]


_SCALAR_DECODERS: dict[str, Callable[..., Any]] = {
    "int": lambda text: int(text, 16),
    "float": _parse_float,
    "str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "complex": lambda real, imag: complex(_parse_float(real), _parse_float(imag)),
    "bytes": _base64_bytes,
    "bytearray": lambda text: bytearray(_base64_bytes(text)),
    "scalar": _parse_scalar,
    "dtype": _torch_dtype,
    "device": torch.device,
}


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
    """Encode a simple value as JSON. Raises SelectionError for any other value."""
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
    """Rebuild the value of `encode_value`.

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
    """Return a member of an enum class of an imported module, or None if there is none."""
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
