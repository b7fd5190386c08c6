"""Converts Python objects to a tree of nodes and a list of tensors, and back.

Restored exactly: dict, OrderedDict (with the attributes torch gives a state dict), Counter,
defaultdict, list, tuple, named tuple, set, frozenset, deque, torch.Size, None, bool, int, float,
complex, str, bytes, bytearray, numpy arrays and scalars, torch dtypes, devices and dense tensors.
Everything else is refused with its path in the object. References to one tensor (same object, or
same storage, offset, shape and strides) share one leaf. Autograd properties (`requires_grad`, being
a Parameter) are not kept.
"""

import collections
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ft_ckpt.errors import SelectionError, damaged_input, listing
from ft_ckpt.formats.dtypes import dtype_name
from ft_ckpt.formats.trees.numpy_arrays import (
    Array,
    describe_dtype,
    is_describable,
    restored_array,
    stored_array,
)

# Bytes objects of at least this size are stored as a leaf, not in the tree.
_MIN_BLOB_BYTES = 4096
# Nesting is limited, because json, pickle and torch's own trees all recurse.
MAX_LEVELS = 150
_WITH_MEMORY = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
# tensor classes without further state; lazy tensors, which have no memory yet, are added
PLAIN: set[type] = set(_WITH_MEMORY)
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
SCALARS = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)
_FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)
}
_KINDS: dict[Any, str] = {kind: name for name, kind in (*MAPPINGS.items(), *SEQUENCES.items())}


@dataclass(frozen=True)
class Node:
    """One value of the object. Mappings have a key for each child.

    The meaning of `value` depends on `kind`:

        "value"        the value itself
        "tensor"       index of its leaf
        "array"        (index of its leaf, numpy descr, shape); the descr is None if the leaf is the
                       array itself
        "blob"         (index of its leaf, "bytes" or "bytearray"), for many bytes
        "defaultdict"  name of the factory, or None
        "deque"        its maximum length, or None
        "odict"        a node of its attributes, or None
        "namedtuple"   (module, qualified name, field names)
        others         None
    """

    kind: str
    value: Any = None
    keys: tuple["Node", ...] = ()
    children: tuple["Node", ...] = ()


@dataclass(frozen=True)
class Leaf:
    """A tensor or an array of the object.

    `shape` and `dtype` (torch's name) are those of its stored bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    data: Any  # torch.Tensor, or numpy.ndarray of exactly `shape` and `dtype`
    is_array: bool = False


def flatten(
    obj: Any, dtypes: Iterable[str], root: str = "state", classes: Collection[type] = PLAIN
) -> tuple[Node, list[Leaf]]:
    """Convert `obj` to a tree of nodes and its leaves.

    `dtypes` are the supported ones, `root` is the name of `obj` in errors, `classes` are those of
    tensors that can be leaves. Raises SelectionError listing the paths of values that cannot be
    stored. Shared lists and dicts are restored as separate copies.
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
    """Convert `obj` as `flatten` does, but return the paths of values that cannot be stored."""
    flattener = _Flattener(frozenset(dtypes), classes)
    node = flattener.make_node(obj, root)
    return node, flattener.leaves, flattener.refused


def unflatten(node: Node, tensor: Callable[[int], Any], array: Callable[[int], Array]) -> Any:
    """Rebuild the object of `node`; `tensor` and `array` return the leaf with an index.

    Raises CorruptError for an invalid tree. Named tuples get their original class if this process
    has imported it, else a new class of the same name and fields. No constructor runs and nothing
    is imported.
    """
    with damaged_input("the tree of the object"):
        return _ObjectBuilder(tensor, array).build_object(node)


def leaf_numbers(node: Node) -> Iterator[int]:
    """Yield the indices of all leaves of a tree, with repetitions."""
    if node.kind == "tensor":
        yield node.value
    elif node.kind in ("array", "blob"):
        yield node.value[0]
    detail = (node.value,) if isinstance(node.value, Node) else ()
    for child in (*detail, *node.keys, *node.children):
        yield from leaf_numbers(child)


def quoted_key(key: Any) -> str:
    """Quote a key of a mapping for a path."""
    return '"' + key.replace('"', '\\"') + '"' if isinstance(key, str) else repr(key)


def vars_of(obj: Any) -> dict[str, Any]:
    """Return the instance attributes of `obj`, or {} if it has no __dict__."""
    return getattr(obj, "__dict__", {})


# From an object to nodes


@dataclass
class _Flattener:
    dtypes: frozenset[str]
    classes: Collection[type]
    leaves: list[Leaf] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    # tensors and arrays by identity and by memory
    nodes: dict[Hashable, Node] = field(default_factory=dict)
    enclosing: list[int] = field(default_factory=list)  # ids of the enclosing containers
    # keeps objects alive, so that their ids stay unique
    alive: list[Any] = field(default_factory=list)

    def make_node(self, obj: Any, path: str) -> Node:
        """Make the node of `obj`, and add values that cannot be stored to `refused`."""
        if type(obj) in (bytes, bytearray) and len(obj) >= _MIN_BLOB_BYTES:
            data = np.frombuffer(obj, np.uint8)
            number = self._add_leaf(Leaf(data.shape, "uint8", data, True))
            return Node("blob", (number, type(obj).__name__))

        if type(obj) in SCALARS:
            return Node("value", obj)
        if isinstance(obj, torch.Tensor):
            return self._tensor_node(obj, path)
        if isinstance(obj, np.generic):
            if not is_describable(obj.dtype):
                return self._refuse_value(path, f"numpy type {obj.dtype}")
            return Node("value", obj)

        if type(obj) is np.ndarray:
            return self._array_node(obj, path)
        return self._container_node(obj, path)

    def _refuse_value(self, path: str, what: str) -> Node:
        self.refused.append(f"{path}: {what}")
        return Node("value")

    def _container_node(self, obj: Any, path: str) -> Node:
        kind = _KINDS.get(type(obj))
        if kind is None and _is_named_tuple(obj):
            kind = "namedtuple"
        if kind is None:
            return self._refuse_value(path, f"{type(obj).__module__}.{type(obj).__qualname__}")
        if id(obj) in self.enclosing:
            return self._refuse_value(path, "contains itself")
        if len(self.enclosing) >= MAX_LEVELS:
            return self._refuse_value(path, f"over {MAX_LEVELS} levels deep")
        self.enclosing.append(id(obj))
        try:
            if kind in MAPPINGS:
                return self._mapping_node(kind, obj, path)
            return self._sequence_node(kind, obj, path)
        finally:
            self.enclosing.pop()

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
            if _FACTORIES.get(detail) is not obj.default_factory:
                return self._refuse_value(path, f"defaultdict of {obj.default_factory!r}")
        return Node(kind, detail, tuple(keys), tuple(children))

    def _sequence_node(self, kind: str, obj: Any, path: str) -> Node:
        items = sorted(obj, key=_set_order) if kind in ("set", "frozenset") else obj
        children = [self.make_node(item, f"{path}[{number}]") for number, item in enumerate(items)]
        detail: Any = obj.maxlen if kind == "deque" else None
        if kind == "namedtuple":
            detail = (type(obj).__module__, type(obj).__qualname__, tuple(obj._fields))
        return Node(kind, detail, (), tuple(children))

    def _key_node(self, key: Any, path: str) -> Node:
        if type(key) in SCALARS or isinstance(key, np.generic):
            return self.make_node(key, path)
        if type(key) not in (tuple, frozenset):
            return self._refuse_value(path, f"a key of type {type(key).__qualname__}")
        items = sorted(key, key=_set_order) if type(key) is frozenset else key
        children = tuple(self._key_node(item, path) for item in items)
        return Node(_KINDS[type(key)], children=children)

    def _tensor_node(self, tensor: torch.Tensor, path: str) -> Node:
        if id(tensor) in self.nodes:
            return self.nodes[id(tensor)]
        problem = _tensor_problem(tensor, self.dtypes, self.classes)
        if problem is not None:
            return self._refuse_value(path, problem)
        memory = _memory_identity(tensor)
        node = self.nodes.get(memory) if memory is not None else None
        if node is None:
            leaf = Leaf(tuple(tensor.shape), dtype_name(tensor.dtype), tensor)
            node = Node("tensor", self._add_leaf(leaf))
        if memory is not None:
            self.nodes[memory] = node
        return self._remember_node(tensor, node)

    def _array_node(self, array: Array, path: str) -> Node:
        if id(array) in self.nodes:
            return self.nodes[id(array)]
        if not is_describable(array.dtype):
            return self._refuse_value(path, f"numpy array of {array.dtype}")
        data = stored_array(array)
        number = self._add_leaf(Leaf(data.shape, data.dtype.name, data, True))
        node = Node("array", (number, describe_dtype(array.dtype), array.shape))
        return self._remember_node(array, node)

    def _add_leaf(self, leaf: Leaf) -> int:
        """Add a leaf and return its number."""
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def _remember_node(self, obj: Any, node: Node) -> Node:
        self.alive.append(obj)
        self.nodes[id(obj)] = node
        return node


def _is_named_tuple(obj: Any) -> bool:
    fields = getattr(type(obj), "_fields", None)
    if not isinstance(obj, tuple) or not isinstance(fields, tuple):
        return False
    return len(fields) == len(obj) and not vars_of(obj)


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
    """Return a key that is equal for tensors with the same memory and layout.

    Tensors of other classes and empty ones have none.
    """
    if type(tensor) not in _WITH_MEMORY or tensor.numel() == 0:
        return None
    flags = (tensor.is_conj(), tensor.is_neg())
    place = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (place, tuple(tensor.shape), tensor.stride(), tensor.dtype, flags)


def _set_order(item: Any) -> tuple[str, str]:
    # the order of sets differs between processes, files are deterministic
    return type(item).__qualname__, repr(item)


# From nodes to an object


@dataclass(frozen=True)
class _ObjectBuilder:
    tensor: Callable[[int], Any]
    array: Callable[[int], Array]

    def build_object(self, node: Node) -> Any:
        kind = node.kind
        if kind == "tensor":
            return self.tensor(node.value)
        if kind == "value":
            return node.value
        if kind == "array":
            number, described, shape = node.value
            stored = self.array(number)
            return stored if described is None else restored_array(stored, described, tuple(shape))

        if kind == "blob":
            number, type_name = node.value
            data = self.array(number).tobytes()
            return {"bytes": bytes, "bytearray": bytearray}[type_name](data)

        if kind in MAPPINGS:
            return self._build_mapping(node)
        items = map(self.build_object, node.children)
        if kind == "namedtuple":
            return tuple.__new__(_named_class(*node.value), tuple(items))
        if kind == "deque":
            return deque(items, node.value)
        return SEQUENCES[kind](items)

    def _build_mapping(self, node: Node) -> Any:
        result: Any = MAPPINGS[node.kind]()
        if node.kind == "defaultdict" and node.value is not None:
            result.default_factory = _FACTORIES[node.value]
        for key_node, child in zip(node.keys, node.children, strict=True):
            key = key_node.value if key_node.kind == "value" else self.build_object(key_node)
            result[key] = self.build_object(child)
        if node.kind == "odict" and node.value is not None:
            vars(result).update(self.build_object(node.value))
        return result


def _named_class(module: str, qualname: str, fields: Iterable[str]) -> type:
    """Return the class of a named tuple if this process has imported it, else a new one."""
    names = tuple(fields)
    value: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if not isinstance(value, type) and type(value) is not type(sys):
            value = None
            break
        value = vars(value).get(part)
    if isinstance(value, type) and issubclass(value, tuple) and vars(value).get("_fields") == names:
        return value
    return collections.namedtuple(qualname.split(".")[-1], names)
