"""Turns any Python object into a tree of nodes and a list of tensors, and back. No file format is known here.

What is kept exactly: dict, OrderedDict (with the attributes torch gives a state dict), Counter, defaultdict, list,
tuple, named tuple, set, frozenset, deque, torch.Size, None, bool, int, float, complex, str, bytes, bytearray, numpy
arrays and scalars, torch dtypes, devices and dense tensors. Everything else is refused, with its place in the object.
Equal tensors that are one tensor (same object, or same storage, offset, shape and strides) are one leaf. What belongs
to autograd (`requires_grad`, being a Parameter) is not data and is not kept.
"""

import collections
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ft_ckpt.errors import SelectionError, damaged_input, listing
from ft_ckpt.formats.dtypes import dtype_name
from ft_ckpt.formats.numpy_arrays import Array, describe_dtype, is_describable, restored_array, stored_array

BLOB_BYTES = 4096  # from here on bytes are a leaf and not a part of the tree
MOST_LEVELS = 150  # of nesting; json, pickle and torch's own trees all recurse
PLAIN: set[type] = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}  # tensors that are nothing but their values
MAPPINGS: dict[str, type] = {"dict": dict, "odict": OrderedDict, "counter": Counter, "defaultdict": defaultdict}
SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "size": torch.Size
}  # fmt: skip
FACTORIES: dict[str, Any] = {kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)}
SCALARS = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)
_KINDS: dict[Any, str] = {
    dict: "dict", OrderedDict: "odict", Counter: "counter", defaultdict: "defaultdict", list: "list", tuple: "tuple",
    set: "set", frozenset: "frozenset", deque: "deque", torch.Size: "size",
}  # fmt: skip


@dataclass(frozen=True)
class Node:
    """One value of the object. `kind` says what `value` is.

    "value": the value itself; "tensor": the index of its leaf; "array": (index of its leaf, numpy descr, shape), the
    descr None where the leaf is the array; "blob": (index of its leaf, "bytes" or "bytearray"), for many bytes;
    "defaultdict": the factory's name or None; "deque": its maximum length or None; "odict": a node of its attributes
    or None; "namedtuple": (module, qualified name, field names). Mappings have a key for each child.
    """

    kind: str
    value: Any = None
    keys: tuple["Node", ...] = ()
    children: tuple["Node", ...] = ()


@dataclass(frozen=True)
class Leaf:
    """A tensor or an array of the object; `shape` and `dtype` (torch's name) are those of its stored bytes."""

    shape: tuple[int, ...]
    dtype: str
    data: Any  # torch.Tensor, or numpy.ndarray of exactly `shape` and `dtype`
    is_array: bool = False


def flatten(
    obj: Any, dtypes: Iterable[str], root: str = "state", classes: Collection[type] = PLAIN
) -> tuple[Node, list[Leaf]]:
    """`obj` as nodes and leaves; `dtypes` are the tensor types that can be stored, `root` names `obj` in errors.

    `classes` are those of tensors that may be leaves.

    Raises SelectionError listing the places of what cannot be kept. Shared lists and dicts come back as equal copies.
    """
    flattener = _Flattener(frozenset(dtypes), classes)
    node = flattener.make_node(obj, root)
    if flattener.refused:
        raise SelectionError(
            f"{listing(flattener.refused)}. Nothing was written; convert these, or leave them out. Kept exactly are "
            "plain containers, numbers, strings, bytes, numpy arrays and scalars, torch dtypes, devices and tensors"
        )
    return node, flattener.leaves


@dataclass
class _Flattener:
    dtypes: frozenset[str]
    classes: Collection[type]
    leaves: list[Leaf] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    known: dict[Hashable, Node] = field(default_factory=dict)  # tensors and arrays by identity and by memory
    above: list[int] = field(default_factory=list)  # containers around the one at hand
    alive: list[Any] = field(default_factory=list)  # an id stays one object's only while the object lives

    def make_node(self, obj: Any, path: str) -> Node:
        """The node of `obj`; what cannot be kept goes to `refused`."""
        if type(obj) in (bytes, bytearray) and len(obj) >= BLOB_BYTES:
            return self._blob_node(obj)
        if type(obj) in SCALARS:
            return Node("value", obj)
        if isinstance(obj, torch.Tensor):
            return self._tensor_node(obj, path)
        if isinstance(obj, np.generic):
            return (
                Node("value", obj) if is_describable(obj.dtype) else self._refuse_value(path, f"numpy type {obj.dtype}")
            )
        if type(obj) is np.ndarray:
            return self._array_node(obj, path)
        return self._container_node(obj, path)

    def _refuse_value(self, path: str, what: str) -> Node:
        self.refused.append(f"{path}: {what}")
        return Node("value")

    def _container_node(self, obj: Any, path: str) -> Node:
        kind = _KINDS.get(type(obj)) or ("namedtuple" if _is_named(obj) else None)
        if kind is None:
            return self._refuse_value(path, f"{type(obj).__module__}.{type(obj).__qualname__}")
        if id(obj) in self.above or len(self.above) >= MOST_LEVELS:
            return self._refuse_value(
                path, "contains itself" if id(obj) in self.above else f"over {MOST_LEVELS} levels deep"
            )
        self.above.append(id(obj))
        try:
            return self._mapping_node(kind, obj, path) if kind in MAPPINGS else self._sequence_node(kind, obj, path)
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
        children = tuple(self.make_node(item, f"{path}[{index}]") for index, item in enumerate(items))
        detail: Any = obj.maxlen if kind == "deque" else None
        if kind == "namedtuple":
            detail = (type(obj).__module__, type(obj).__qualname__, tuple(obj._fields))
        return Node(kind, detail, (), children)

    def _key_node(self, key: Any, path: str) -> Node:
        if type(key) in SCALARS or isinstance(key, np.generic):
            return self.make_node(key, path)
        if type(key) in (tuple, frozenset):
            items = sorted(key, key=_set_order) if type(key) is frozenset else key
            return Node(_KINDS[type(key)], children=tuple(self._key_node(item, path) for item in items))
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

    def _blob_node(self, data: bytes | bytearray) -> Node:
        stored = np.frombuffer(data, np.uint8)
        return Node("blob", (self._add_leaf(Leaf(stored.shape, "uint8", stored, True)).value, type(data).__name__))

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
    """The object of `node`; `tensor` and `array` give the leaf of an index.

    Raises CorruptError for a tree that no object could have been. Named tuples come back as their own class if this
    process has imported it, else as a class of the same name and fields; no constructor runs and nothing is imported.
    """
    with damaged_input("the tree of the object"):
        return _ObjectBuilder(tensor, array).build_object(node)


def leaf_numbers(node: Node) -> Iterator[int]:
    """The indices of all leaves of a tree, each as often as it is there."""
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
            return {"bytes": bytes, "bytearray": bytearray}[node.value[1]](self.array(node.value[0]).tobytes())
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
            result[key.value if key.kind == "value" else self.build_object(key)] = self.build_object(child)
        if node.kind == "odict" and node.value is not None:
            vars(result).update(self.build_object(node.value))
        return result


def _tensor_problem(tensor: torch.Tensor, dtypes: frozenset[str], classes: Collection[type]) -> str | None:
    if type(tensor) not in classes:
        return f"{type(tensor).__module__}.{type(tensor).__qualname__}, a tensor with a meaning of its own"
    if tensor.layout is not torch.strided or tensor.is_nested:
        return f"a tensor of layout {tensor.layout}"
    if tensor.is_meta:
        return "a tensor on the meta device has no values"
    if tensor.is_quantized or dtype_name(tensor.dtype) not in dtypes:
        return f"a tensor of {tensor.dtype}, which this format cannot keep"
    return None


def _memory_identity(tensor: torch.Tensor) -> Hashable:
    """A key that is equal for tensors of the same memory; None for those without memory of their own."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.numel() == 0:
        return None
    flags = (tensor.is_conj(), tensor.is_neg())
    place = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (place, tuple(tensor.shape), tensor.stride(), tensor.dtype, flags)


def _is_named(obj: Any) -> bool:
    fields = getattr(type(obj), "_fields", None)
    return isinstance(obj, tuple) and isinstance(fields, tuple) and len(fields) == len(obj) and not vars_of(obj)


def quoted_key(key: Any) -> str:
    """A key of a mapping as places in an object show it."""
    return '"' + key.replace('"', '\\"') + '"' if isinstance(key, str) else repr(key)


def vars_of(obj: Any) -> dict[str, Any]:
    """The instance attributes of `obj`, none where it has no room for any."""
    return getattr(obj, "__dict__", {})


def _named_class(module: str, qualname: str, fields: Iterable[str]) -> type:
    import sys

    names = tuple(fields)
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = vars(found).get(part) if isinstance(found, type) or type(found) is type(sys) else None
    if isinstance(found, type) and issubclass(found, tuple) and found.__dict__.get("_fields") == names:
        return found
    return collections.namedtuple(qualname.split(".")[-1], names)


def _set_order(item: Any) -> tuple[str, str]:
    return type(item).__qualname__, repr(item)  # the order of a set differs between processes; files must not
