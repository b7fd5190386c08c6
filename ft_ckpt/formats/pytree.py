"""Converts Python objects to a tree of nodes and a list of tensors, and back; the JSON form of the
tree.

Restored exactly: dict, OrderedDict (with the attributes torch gives a state dict), Counter,
defaultdict, list, tuple, named tuple, set, frozenset, deque, torch.Size, None, bool, int, float,
complex, str, bytes, bytearray, numpy arrays and scalars, torch dtypes, devices and dense tensors.
Everything else is refused with its path in the object. References to one tensor (same object, or
same storage, offset, shape and strides) share one leaf. Autograd properties (`requires_grad`, being
a Parameter) are not kept.
"""

import base64
import collections
import json
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, EnumMeta
from typing import Any

import numpy as np
import torch

from ft_ckpt.errors import CorruptError, LoadError, SelectionError, damaged_input, listing, shown
from ft_ckpt.formats.dtypes import dtype_name, dtype_of
from ft_ckpt.storage import is_utf8

Array = np.ndarray[Any, Any]
_NUMBERS = {
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
}


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
    """`array` in row-major order; a dtype that not every format has becomes bytes, with one more
    dimension.
    """
    if array.dtype.isbuiltin and array.dtype.kind in "biufc" and array.dtype.name in _NUMBERS:
        numbers: Array = np.ascontiguousarray(array).reshape(array.shape)
        return numbers
    data: Array = np.frombuffer(array.tobytes(), np.uint8).reshape(
        (*array.shape, array.dtype.itemsize)
    )
    return data


def restored_array(stored: Array, described: Any, shape: tuple[int, ...]) -> Array:
    """The inverse of `stored_array`. Raises CorruptError when the number of bytes is wrong."""
    dtype = described_dtype(described)
    if dtype.hasobject or stored.nbytes != math.prod(shape) * dtype.itemsize:
        raise CorruptError(f"{stored.nbytes} bytes for an array of {shape} {dtype}")
    empty: Array = np.ndarray(shape, dtype)  # not np.empty, which makes strings of no length longer
    return stored.reshape(-1).view(np.uint8).view(dtype).reshape(shape) if stored.nbytes else empty


def is_describable(dtype: np.dtype[Any]) -> bool:
    """Whether the type can be restored from its JSON form; False with Python objects or
    metadata.
    """
    if dtype.hasobject or dtype.metadata:
        return False
    try:
        return described_dtype(describe_dtype(dtype)) == dtype
    except (TypeError, ValueError):
        return False


def _tuples_to_lists(described: Any) -> Any:
    return (
        [_tuples_to_lists(item) for item in described]
        if isinstance(described, (list, tuple))
        else described
    )


def _field_tuples(described: Sequence[Any]) -> Any:
    """Fields in numpy's form: a list of (name, type) or (name, type, shape)."""
    fields = []
    for name, kind, *shape in described:
        title = tuple(name) if isinstance(name, list) else name
        fields.append(
            (
                title,
                kind if isinstance(kind, str) else _field_tuples(kind),
                *(tuple(part) for part in shape),
            )
        )
    return fields


BLOB_BYTES = 4096  # bytes of at least this size are stored as a leaf, not in the tree
MOST_LEVELS = 150  # of nesting; json, pickle and torch's own trees all recurse
# tensor classes without further state
PLAIN: set[type] = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
MAPPINGS: dict[str, type] = {
    "dict": dict,
    "odict": OrderedDict,
    "counter": Counter,
    "defaultdict": defaultdict,
}
SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
    "size": torch.Size,
}
FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)
}
SCALARS = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)
_KINDS: dict[Any, str] = {
    dict: "dict",
    OrderedDict: "odict",
    Counter: "counter",
    defaultdict: "defaultdict",
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    deque: "deque",
    torch.Size: "size",
}


@dataclass(frozen=True)
class Node:
    """One value of the object. The meaning of `value` depends on `kind`:

    "value": the value itself; "tensor": the index of its leaf; "array": (index of its leaf, numpy
    descr, shape), the descr None where the leaf is the array; "blob": (index of its leaf, "bytes"
    or "bytearray"), for many bytes; "defaultdict": the factory's name or None; "deque": its maximum
    length or None; "odict": a node of its attributes or None; "namedtuple": (module, qualified
    name, field names). Mappings have a key for each child.
    """

    kind: str
    value: Any = None
    keys: tuple["Node", ...] = ()
    children: tuple["Node", ...] = ()


@dataclass(frozen=True)
class Leaf:
    """A tensor or an array of the object; `shape` and `dtype` (torch's name) are those of its
    stored bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    data: Any  # torch.Tensor, or numpy.ndarray of exactly `shape` and `dtype`
    is_array: bool = False


def flatten(
    obj: Any, dtypes: Iterable[str], root: str = "state", classes: Collection[type] = PLAIN
) -> tuple[Node, list[Leaf]]:
    """`obj` as nodes and leaves.

    `dtypes`: the supported ones; `root`: name of `obj` in errors; `classes`: of tensors that can be
    leaves.

    Raises SelectionError listing the paths of values that cannot be stored. Shared lists and dicts
    are restored as separate copies.
    """
    node, leaves, refused = try_flatten(obj, dtypes, root, classes)
    if refused:
        raise SelectionError(
            f"{listing(refused)}. Nothing was written; convert these, or leave them out. Kept "
            "exactly are plain containers, numbers, strings, bytes, numpy arrays and scalars, "
            "torch dtypes, devices and tensors"
        )
    return node, leaves


def try_flatten(
    obj: Any, dtypes: Iterable[str], root: str = "state", classes: Collection[type] = PLAIN
) -> tuple[Node, list[Leaf], list[str]]:
    """As `flatten`, with the paths of values that cannot be stored in place of the error."""
    flattener = _Flattener(frozenset(dtypes), classes)
    node = flattener.make_node(obj, root)
    return node, flattener.leaves, flattener.refused


@dataclass
class _Flattener:
    dtypes: frozenset[str]
    classes: Collection[type]
    leaves: list[Leaf] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    # tensors and arrays by identity and by memory
    known: dict[Hashable, Node] = field(default_factory=dict)
    above: list[int] = field(default_factory=list)  # ids of the enclosing containers
    # keeps objects alive, so that their ids stay unique
    alive: list[Any] = field(default_factory=list)

    def make_node(self, obj: Any, path: str) -> Node:
        """The node of `obj`; values that cannot be stored are added to `refused`."""
        if type(obj) in (bytes, bytearray) and len(obj) >= BLOB_BYTES:
            stored = np.frombuffer(obj, np.uint8)
            return Node(
                "blob",
                (
                    self._add_leaf(Leaf(stored.shape, "uint8", stored, True)).value,
                    type(obj).__name__,
                ),
            )
        if type(obj) in SCALARS:
            return Node("value", obj)
        if isinstance(obj, torch.Tensor):
            return self._tensor_node(obj, path)
        if isinstance(obj, np.generic):
            return (
                Node("value", obj)
                if is_describable(obj.dtype)
                else self._refuse_value(path, f"numpy type {obj.dtype}")
            )
        if type(obj) is np.ndarray:
            return self._array_node(obj, path)
        return self._container_node(obj, path)

    def _refuse_value(self, path: str, what: str) -> Node:
        self.refused.append(f"{path}: {what}")
        return Node("value")

    def _container_node(self, obj: Any, path: str) -> Node:
        kind = _KINDS.get(type(obj))
        fields = getattr(type(obj), "_fields", None)
        if (
            isinstance(obj, tuple)
            and isinstance(fields, tuple)
            and len(fields) == len(obj)
            and not vars_of(obj)
        ):
            kind = kind or "namedtuple"
        if kind is None:
            return self._refuse_value(path, f"{type(obj).__module__}.{type(obj).__qualname__}")
        if id(obj) in self.above or len(self.above) >= MOST_LEVELS:
            return self._refuse_value(
                path,
                "contains itself" if id(obj) in self.above else f"over {MOST_LEVELS} levels deep",
            )
        self.above.append(id(obj))
        try:
            return (
                self._mapping_node(kind, obj, path)
                if kind in MAPPINGS
                else self._sequence_node(kind, obj, path)
            )
        finally:
            self.above.pop()

    def _mapping_node(self, kind: str, obj: Any, path: str) -> Node:
        keys, children = [], []
        for key, value in obj.items():
            place = f"{path}[{quoted_key(key)}]"
            keys.append(self._key_node(key, place))
            children.append(self.make_node(value, place))
        detail: Any = None
        if kind == "odict" and vars(obj):
            detail = self.make_node(dict(vars(obj)), f"{path}.__dict__")
        elif kind == "defaultdict" and obj.default_factory is not None:
            detail = getattr(obj.default_factory, "__name__", None)
            if FACTORIES.get(detail) is not obj.default_factory:
                return self._refuse_value(path, f"defaultdict of {obj.default_factory!r}")
        return Node(kind, detail, tuple(keys), tuple(children))

    def _sequence_node(self, kind: str, obj: Any, path: str) -> Node:
        items = sorted(obj, key=_set_order) if kind in ("set", "frozenset") else obj
        children = tuple(
            self.make_node(item, f"{path}[{index}]") for index, item in enumerate(items)
        )
        detail: Any = obj.maxlen if kind == "deque" else None
        if kind == "namedtuple":
            detail = (type(obj).__module__, type(obj).__qualname__, tuple(obj._fields))
        return Node(kind, detail, (), children)

    def _key_node(self, key: Any, path: str) -> Node:
        if type(key) in SCALARS or isinstance(key, np.generic):
            return self.make_node(key, path)
        if type(key) in (tuple, frozenset):
            items = sorted(key, key=_set_order) if type(key) is frozenset else key
            return Node(
                _KINDS[type(key)], children=tuple(self._key_node(item, path) for item in items)
            )
        return self._refuse_value(path, f"a key of type {type(key).__qualname__}")

    def _tensor_node(self, tensor: torch.Tensor, path: str) -> Node:
        if id(tensor) in self.known:
            return self.known[id(tensor)]
        problem = _tensor_problem(tensor, self.dtypes, self.classes)
        if problem:
            return self._refuse_value(path, problem)
        memory = _memory_identity(tensor)
        node = self.known.get(memory) if memory is not None else None
        if node is None:
            node = self._add_leaf(Leaf(tuple(tensor.shape), dtype_name(tensor.dtype), tensor))
        return self._remember_node(tensor, memory, node)

    def _array_node(self, array: Array, path: str) -> Node:
        if id(array) in self.known:
            return self.known[id(array)]
        if not is_describable(array.dtype):
            return self._refuse_value(path, f"numpy array of {array.dtype}")
        data = stored_array(array)
        tag = self._add_leaf(Leaf(data.shape, data.dtype.name, data, True))
        node = Node("array", (tag.value, describe_dtype(array.dtype), array.shape))
        return self._remember_node(array, None, node)

    def _add_leaf(self, leaf: Leaf) -> Node:
        self.leaves.append(leaf)
        return Node("tensor", len(self.leaves) - 1)

    def _remember_node(self, obj: Any, memory: Hashable, node: Node) -> Node:
        self.alive.append(obj)
        self.known[id(obj)] = node
        if memory is not None:
            self.known[memory] = node
        return node


def unflatten(node: Node, tensor: Callable[[int], Any], array: Callable[[int], Array]) -> Any:
    """The object of `node`; `tensor` and `array` return the leaf with an index.

    Raises CorruptError for an invalid tree. Named tuples get their original class if this process
    has imported it, else a new class of the same name and fields; no constructor runs and nothing
    is imported.
    """
    with damaged_input("the tree of the object"):
        return _ObjectBuilder(tensor, array).build_object(node)


def leaf_numbers(node: Node) -> Iterator[int]:
    """The indices of all leaves of a tree, with repetitions."""
    if node.kind == "tensor":
        yield node.value
    elif node.kind in ("array", "blob"):
        yield node.value[0]
    detail = (node.value,) if isinstance(node.value, Node) else ()
    for below in (*detail, *node.keys, *node.children):
        yield from leaf_numbers(below)


@dataclass(frozen=True)
class _ObjectBuilder:
    tensor: Callable[[int], Any]
    array: Callable[[int], Array]

    def build_object(self, node: Node) -> Any:
        """The object of `node`."""
        kind = node.kind
        if kind == "tensor":
            return self.tensor(node.value)
        if kind == "value":
            return node.value
        if kind == "array":
            index, described, shape = node.value
            stored = self.array(index)
            return stored if described is None else restored_array(stored, described, tuple(shape))
        if kind == "blob":
            return {"bytes": bytes, "bytearray": bytearray}[node.value[1]](
                self.array(node.value[0]).tobytes()
            )
        if kind in MAPPINGS:
            return self._build_mapping(node)
        items = map(self.build_object, node.children)
        if kind == "namedtuple":
            return tuple.__new__(_named_class(*node.value), tuple(items))
        if kind == "deque":
            return deque(items, node.value)
        return SEQUENCES[kind](items)

    def _build_mapping(self, node: Node) -> Any:
        result: Any = defaultdict(None) if node.kind == "defaultdict" else MAPPINGS[node.kind]()
        if node.kind == "defaultdict" and node.value is not None:
            result.default_factory = FACTORIES[node.value]
        for key, child in zip(node.keys, node.children, strict=True):
            result[key.value if key.kind == "value" else self.build_object(key)] = (
                self.build_object(child)
            )
        if node.kind == "odict" and node.value is not None:
            vars(result).update(self.build_object(node.value))
        return result


def _tensor_problem(
    tensor: torch.Tensor, dtypes: frozenset[str], classes: Collection[type]
) -> str | None:
    if type(tensor) not in classes:
        return (
            f"{type(tensor).__module__}.{type(tensor).__qualname__}, a tensor with a meaning "
            "of its own"
        )
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_meta:
        return "a tensor on the meta device has no values"
    if tensor.is_quantized or dtype_name(tensor.dtype) not in dtypes:
        return f"a tensor of {tensor.dtype}, which this format cannot keep"
    return None


def _memory_identity(tensor: torch.Tensor) -> Hashable:
    """A key that is equal for tensors with the same memory and layout; None for other classes and
    empty tensors.
    """
    if (
        type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        or tensor.numel() == 0
    ):
        return None
    flags = (tensor.is_conj(), tensor.is_neg())
    place = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (place, tuple(tensor.shape), tensor.stride(), tensor.dtype, flags)


def quoted_key(key: Any) -> str:
    """A key of a mapping as shown in paths."""
    return '"' + key.replace('"', '\\"') + '"' if isinstance(key, str) else repr(key)


def vars_of(obj: Any) -> dict[str, Any]:
    """The instance attributes of `obj`; {} if it has no __dict__."""
    return getattr(obj, "__dict__", {})


def _named_class(module: str, qualname: str, fields: Iterable[str]) -> type:
    names = tuple(fields)
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = (
            vars(found).get(part) if isinstance(found, type) or type(found) is type(sys) else None
        )
    if (
        isinstance(found, type)
        and issubclass(found, tuple)
        and found.__dict__.get("_fields") == names
    ):
        return found
    return collections.namedtuple(qualname.split(".")[-1], names)


def _set_order(item: Any) -> tuple[str, str]:
    # the order of sets differs between processes, files are deterministic
    return type(item).__qualname__, repr(item)


_WORD = 1 << 63  # larger integers are written in hexadecimal, which has no limit on digits


def dump_object(obj: Any, name: str) -> str:
    """`obj` and its tensors as text.

    Raises SelectionError naming the paths, below `name`, of unsupported values.
    """
    dtypes = {
        str(dtype).removeprefix("torch.")
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
    }
    node, leaves = flatten(obj, dtypes, name)
    held = [[list(leaf.shape), leaf.dtype, _base64_text(_leaf_bytes(leaf))] for leaf in leaves]
    return json.dumps({"tree": encode_node(node), "leaves": held}, separators=(",", ":"))


def load_object(text: str) -> Any:
    """The object from the result of `dump_object`. Raises CorruptError for any other text."""
    try:
        document = json.loads(text)
        leaves = [_leaf_tensor(*held) for held in document["leaves"]]
        tree = document["tree"]
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
        raise CorruptError(
            f"the text of the object is damaged ({shown(error)}); use another copy of the file"
        ) from error
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


def decode_node(document: Any) -> Node:
    """The node from the result of `encode_node`. Raises CorruptError for anything else."""
    with damaged_input("the tree of the object"):
        return _decode_json(document, MOST_LEVELS + 2)


def _decode_json(document: Any, most: int) -> Node:
    if most == 0:
        raise CorruptError("too deep")
    if type(document) is dict:
        keys = tuple(Node("value", key) for key in document)
        return Node(
            "dict", None, keys, tuple(_decode_json(child, most - 1) for child in document.values())
        )
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
        detail, pairs = rest
        if kind == "odict" and detail is not None:
            detail = _decode_json(detail, most - 1)
        keys = tuple(_decode_json(key, most - 1) for key, _ in pairs)
        return Node(kind, detail, keys, tuple(_decode_json(child, most - 1) for _, child in pairs))
    if kind in ("deque", "namedtuple"):
        return Node(kind, rest[0], (), tuple(_decode_json(child, most - 1) for child in rest[1:]))
    if kind in SEQUENCES:
        return Node(kind, None, (), tuple(_decode_json(child, most - 1) for child in rest))
    return Node("value", _VALUES[kind](*rest))


def _check_number(found: Any) -> int:
    if type(found) is not int or not 0 <= found < _WORD:
        raise CorruptError(f"{found!r:.40}, expected the index of a leaf or a size")
    return found


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
    return struct.pack(">d", value).hex()  # keeps the bits of every NaN


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
    flat = (
        torch.frombuffer(data, dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
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
    return (
        np.frombuffer(_base64_bytes(text), np.uint8).view(dtype)[0]
        if dtype.itemsize
        else np.ndarray((), dtype)[()]
    )


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


_MAX_DEPTH = 32  # of simple values; also stops at a list that contains itself


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
        return {
            "dict": [
                [encode_value(key, depth + 1), encode_value(item, depth + 1)]
                for key, item in value.items()
            ]
        }
    if kind is list:
        return [encode_value(item, depth + 1) for item in value]
    if kind in (tuple, torch.Size, set, frozenset):
        items = [encode_value(item, depth + 1) for item in value]
        ordered = items if kind in (tuple, torch.Size) else sorted(items, key=json.dumps)
        return {"size" if kind is torch.Size else kind.__name__: ordered}
    if (
        issubclass(kind, Enum)
        and _enum_member(kind.__module__, kind.__qualname__, value.name) is value
    ):
        return {"enum": [kind.__module__, kind.__qualname__, value.name]}
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
    decoders = {
        "float": float,
        "dtype": dtype_of,
        "tuple": tuple,
        "size": torch.Size,
        "set": set,
        "frozenset": frozenset,
    }
    return decoders[kind](decode_value(content))  # type: ignore[operator]  # each takes the encoded form of its kind


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
