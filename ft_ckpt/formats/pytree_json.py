"""Writes a tree of nodes as JSON, exactly, and reads it: values that JSON lacks are lists that begin with their kind.

A small object can be one text with all its tensors in it.
"""

import base64
import json
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ft_ckpt.errors import CorruptError, damaged_input
from ft_ckpt.formats.numpy_arrays import describe_dtype, described_dtype
from ft_ckpt.formats.pytree import MAPPINGS, MOST_LEVELS, SEQUENCES, Leaf, Node, flatten, unflatten
from ft_ckpt.storage.paths import is_utf8

_WORD = 1 << 63  # integers from here on are written in hexadecimal, which has no limit on digits


def dump_object(obj: Any, name: str) -> str:
    """`obj` as one text, with its tensors. Raises SelectionError naming, below `name`, what cannot be kept."""
    dtypes = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    node, leaves = flatten(obj, dtypes, name)
    held = [[list(leaf.shape), leaf.dtype, _base64_text(_leaf_bytes(leaf))] for leaf in leaves]
    return json.dumps({"tree": encode_node(node), "leaves": held}, separators=(",", ":"))


def load_object(text: str) -> Any:
    """The object that `dump_object` was given. Raises CorruptError for any other text."""
    try:
        document = json.loads(text)
        leaves = [_leaf_tensor(*held) for held in document["leaves"]]
        tree = document["tree"]
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
        raise CorruptError(f"the text of the object is damaged ({error!r}); use another copy of the file") from error
    return unflatten(decode_node(tree), leaves.__getitem__, lambda index: leaves[index].numpy())


def encode_node(node: Node) -> Any:
    """`node` as lists, dicts and plain values, for `json.dumps`."""
    kind = node.kind
    if kind == "tensor":
        return ["tensor", node.value]
    if kind == "value":
        return _encode_scalar(node.value)
    if kind in ("array", "blob"):
        return [kind, *node.value]
    children = [encode_node(child) for child in node.children]
    if kind == "dict" and all(type(key.value) is str and is_utf8(key.value) for key in node.keys):
        return dict(zip((key.value for key in node.keys), children, strict=True))
    if kind in MAPPINGS:
        detail = encode_node(node.value) if isinstance(node.value, Node) else node.value
        keys = [encode_node(key) for key in node.keys]
        return [kind, detail, [list(pair) for pair in zip(keys, children, strict=True)]]
    if kind in ("deque", "namedtuple"):
        return [kind, node.value, *children]
    return [kind, *children]


def decode_node(document: Any, most: int = MOST_LEVELS + 2) -> Node:
    """The node that `encode_node` was given. Raises CorruptError for anything else."""
    with damaged_input("the tree of the object"):
        return _decode_json(document, most)


def _decode_json(document: Any, most: int) -> Node:
    if most == 0:
        raise CorruptError("too deep")
    if type(document) is dict:
        keys = tuple(Node("value", key) for key in document)
        return Node("dict", None, keys, tuple(_decode_json(child, most - 1) for child in document.values()))
    if type(document) is not list:
        return Node("value", document)
    kind, *rest = document
    if kind == "tensor":
        return Node("tensor", _check_number(rest[0]))
    if kind == "array":
        index, described, shape = rest
        return Node("array", (_check_number(index), described, tuple(map(_check_number, shape))))
    if kind == "blob":
        return Node("blob", (_check_number(rest[0]), str(rest[1])))
    if kind in MAPPINGS:
        return _decode_mapping(kind, rest, most)
    if kind in ("deque", "namedtuple"):
        return Node(kind, rest[0], (), tuple(_decode_json(child, most - 1) for child in rest[1:]))
    if kind in SEQUENCES:
        return Node(kind, None, (), tuple(_decode_json(child, most - 1) for child in rest))
    return Node("value", _VALUES[kind](*rest))


def _check_number(found: Any) -> int:
    if type(found) is not int or not 0 <= found < _WORD:
        raise CorruptError(f"{found!r:.40} where a number of a leaf or a size should be")
    return found


def _decode_mapping(kind: str, rest: list[Any], most: int) -> Node:
    detail, pairs = rest
    keys = tuple(_decode_json(key, most - 1) for key, _ in pairs)
    if kind == "odict" and detail is not None:
        detail = _decode_json(detail, most - 1)
    return Node(kind, detail, keys, tuple(_decode_json(child, most - 1) for _, child in pairs))


def _encode_scalar(value: Any) -> Any:
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is int:
        return value if -_WORD <= value < _WORD else ["int", hex(value)]
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
    return struct.pack(">d", value).hex()  # every NaN is kept as it is


def _parse_float(bits: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    return float(value)


def _base64_text(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _base64_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _leaf_bytes(leaf: Leaf) -> bytes:
    if leaf.is_array:
        return bytes(leaf.data.tobytes())
    flat = leaf.data.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def _leaf_tensor(shape: list[int], dtype: str, text: str) -> torch.Tensor:
    data = bytearray(_base64_bytes(text))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(_torch_dtype(dtype)).reshape(shape)


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise CorruptError(f"no torch type {name!r}")
    return dtype


def _parse_scalar(described: Any, text: str) -> Any:
    dtype = described_dtype(described)
    if dtype.hasobject:
        raise CorruptError("an object of numpy")
    return np.frombuffer(_base64_bytes(text), np.uint8).view(dtype)[0] if dtype.itemsize else np.ndarray((), dtype)[()]


_VALUES: dict[str, Callable[..., Any]] = {
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
