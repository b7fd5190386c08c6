"""Reads the description of a Cerebras checkpoint: its object's tree, and how to read each leaf. Formats 0.5 and 0.4.

Nothing in the file is run: the pickled tree of 0.4 and its objects go through `pickled_objects`, and what that does not
know stays opaque. Links to other files, unfinished files and unknown kinds of leaves are refused.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np

from ft_ckpt.errors import CorruptError
from ft_ckpt.formats.layout import ITEM_BYTES
from ft_ckpt.formats.pickled_objects import OpaqueObject, unpickle_plain
from ft_ckpt.formats.pytree import MOST_LEVELS, Node
from ft_ckpt.formats.safe_pickle import Sealed
from ft_ckpt.messages import printable

MOST_FILL_BYTES = 1 << 40  # of a constant tensor that has no bytes in the file
_KINDS = {
    "dict": "dict", "OrderedDict": "odict", "list": "list", "tuple": "tuple", "set": "set", "deque": "deque",
    "defaultdict": "defaultdict",
}  # fmt: skip


class FoundDataset(Protocol):
    """A dataset as the walk through the file finds it."""

    path: str
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any]
    attributes: Mapping[str, Any]

    def read_value(self) -> Any:
        """All of it, as numpy has it."""


@dataclass(frozen=True)
class StoredLeaf:
    """A leaf: the dataset it is in, or the number it is full of; `dtype` is torch's name, None for numpy arrays."""

    name: str
    dtype: str | None
    dataset: FoundDataset | None = None
    shape: tuple[int, ...] = ()
    fill: float | bool | None = None


@dataclass
class CerebrasReader:
    """Reads one checkpoint; `attributes` are its root's and `find` gives a dataset by path, or raises CorruptError."""

    attributes: Mapping[str, Any]
    find: Callable[[str], FoundDataset]
    leaves: list[StoredLeaf] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)

    def read_tree(self) -> Node:
        """The tree; its leaves are in `leaves`. Raises CorruptError for what cannot be read safely or completely."""
        try:
            version = float(self.attributes["__version__"])
            if version >= 0.5:
                return self._read_current()
            if version == 0.4:
                return self._read_legacy()
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
            raise CorruptError(f"not a whole Cerebras checkpoint: {error!r}; use another copy of the file") from error
        raise CorruptError(f"a Cerebras checkpoint of format {version}; 0.4 and from 0.5 on can be read")

    def _read_current(self) -> Node:
        if not self.attributes.get("__SUCCESS__", False):
            raise CorruptError("the checkpoint was never finished (no __SUCCESS__); use an older one")
        return self._read_node(_tree_spec(json.loads(self.attributes["__spec__"])), (), self._read_leaf)

    def _read_node(self, spec: Any, path: tuple[str, ...], leaf: Callable[[str], Node]) -> Node:
        if len(path) > MOST_LEVELS:
            raise CorruptError(f"{printable('.'.join(path))[:60]}: over {MOST_LEVELS} levels deep")
        if spec["type"] is None:
            return leaf(".".join(path))
        kind = _KINDS.get(str(spec["type"]).rpartition(".")[2])
        if kind is None:
            raise CorruptError(f"{'.'.join(path) or 'the object'}: a container of type {spec['type']!r}")
        context, children = spec["context"], spec["children_spec"]
        detail: Any
        names: Any
        keys: Any
        context = json.loads(context) if isinstance(context, str) else context
        detail, names, keys = None, range(len(children)), []
        if kind == "defaultdict":
            detail, keys = context["default_factory_name"], context["dict_context"]
            if len(children) > 2:  # the format names children by factory and keys: there are two
                raise CorruptError(f"{'.'.join(path)}: a defaultdict of {len(children)}, which the format loses")
            names = (f"<class '{detail}'>", str(keys))[: len(children)]
        elif kind in ("dict", "odict"):
            names = keys = context
        nodes = tuple(
            self._read_node(child, (*path, str(name)), leaf)
            for name, child in zip(names, children, strict=True)
        )  # fmt: skip
        return Node(kind, detail, tuple(Node("value", _plain_key(key)) for key in keys), nodes)

    def _read_leaf(self, name: str) -> Node:
        if name not in self.nodes:
            outer = json.loads(self.attributes[f"{name}.__metadata__"])
            if outer["__objects__"] != [name]:
                raise CorruptError(f"{name}: a link to another checkpoint; load that one, or save this one whole")
            self.nodes[name] = self._leaf_node(name, outer[f"{name}.__metadata__"])
        return self.nodes[name]

    def _leaf_node(self, name: str, known: Mapping[str, Any]) -> Node:
        path = known.get("key", name)
        kind = known.get("__TYPE__") or self.find(path).attributes.get("__TYPE__")
        if kind == "TorchTensorSerializer" and known.get("__TORCH__", True):
            return self._tensor_leaf(name, known, self.find(path))
        if kind in ("TorchTensorSerializer", "NumpyArraySerializer"):
            return self._array_leaf(name, self.find(path), known.get("ft_array"))
        if kind == "ScalarSerializer":
            return Node("value", _check_type(known["scalar_value"], (bool, int, float)))
        if kind == "StringSerializer":
            return Node("value", _check_type(known["string_value"], (str,)))
        if kind == "NoneSerializer":
            return Node("value", None)
        if kind == "ObjectSerializer":
            return _unpickle_leaf(name, np.asarray(self.find(path).attributes["__BYTES__"]).tobytes())
        if kind == "LinkedObject":
            target = str(known["key"])
            if target == name or target not in self.nodes:
                raise CorruptError(f"{name}: linked to {target}, which does not come before it")
            return self.nodes[target]
        if kind == "DeferredFullTensor":
            return self._constant_leaf(name, known)
        raise CorruptError(f"{name}: a leaf of type {kind!r}, which leads outside the file or is unknown")

    def _tensor_leaf(self, name: str, known: Mapping[str, Any], dataset: FoundDataset) -> Node:
        label = str(next(iter(dataset.attributes.get("dtypes", known["dtypes"]))))
        dtype = str(dataset.attributes.get("ft_dtype", known.get("ft_dtype", label.removeprefix("torch."))))
        return self._add_leaf(StoredLeaf(name, dtype, dataset))

    def _array_leaf(self, name: str, dataset: FoundDataset, exact: str | None) -> Node:
        described, shape = json.loads(exact) if exact else (None, ())
        node = self._add_leaf(StoredLeaf(name, None, dataset))
        return Node("array", (node.value, described, tuple(shape)))

    def _constant_leaf(self, name: str, known: Mapping[str, Any]) -> Node:
        shape, dtype = tuple(int(size) for size in known["shape"]), str(known["dtype"]).removeprefix("torch.")
        if math.prod(shape) * ITEM_BYTES[dtype] > MOST_FILL_BYTES or min(shape, default=0) < 0:
            raise CorruptError(f"{name}: a constant tensor of {shape}")
        return self._add_leaf(StoredLeaf(name, dtype, None, shape, known.get("fill_value") or 0))

    def _add_leaf(self, leaf: StoredLeaf) -> Node:
        self.leaves.append(leaf)
        return Node("tensor", len(self.leaves) - 1)

    def _read_legacy(self) -> Node:
        spec = unpickle_plain(bytes.fromhex(self.attributes["__spec__"]), _LEGACY_TREE)
        if not isinstance(spec, _LegacySpec):
            raise CorruptError("the tree of the checkpoint is of no known type")
        return self._read_node(spec, (), self._legacy_leaf)

    def _legacy_leaf(self, name: str) -> Node:
        dataset = self.find(quote(name, safe=""))
        kind, known = str(dataset.attributes["__H5_TYPE__"]), dataset.attributes
        if kind == "TorchTensorH5Type":
            return self._add_leaf(
                StoredLeaf(name, "bfloat16" if known.get("is_bfloat16") else dataset.dtype.name, dataset)
            )
        if kind == "NumpyArrayH5Type":
            return self._array_leaf(name, dataset, None)
        if kind == "ScalarH5Type":
            return Node("value", np.asarray(dataset.read_value()).item())
        if kind == "StringH5Type":
            return Node("value", _check_type(known["string_value"], (str,)))
        if kind == "NoneH5Type":
            return Node("value", None)
        if kind == "ObjectH5Type":
            return _unpickle_leaf(name, bytes.fromhex(known["object_value"]))
        raise CorruptError(f"{name}: a leaf of type {kind!r}, which leads outside the file or is unknown")


class _LegacySpec(metaclass=Sealed):
    """Stands for torch's TreeSpec in the pickled tree of format 0.4."""

    type: Any = None
    context: Any = None
    children_specs: Any = ()

    def __getitem__(self, name: str) -> Any:
        if name == "context":
            return list(self.context) if isinstance(self.context, (list, tuple)) else self.context
        return list(self.children_specs) if name == "children_spec" else self.type


_LEGACY_TREE: dict[str, Any] = {
    "torch.utils._pytree.TreeSpec": _LegacySpec,
    "torch.utils._pytree.LeafSpec": _LegacySpec,
    "dill._dill._load_type": str,
    "collections.OrderedDict": "OrderedDict",
}


def _tree_spec(spec: Any) -> Any:
    """The second half of a `__spec__`: what torch itself writes for a tree."""
    protocol, node = json.loads(spec[1])
    if protocol != 1:
        raise CorruptError(f"a tree of protocol {protocol!r}; 1 is known")
    return node


def _plain_key(key: Any) -> Any:
    return _check_type(key, (str, int, bool, float, type(None)))


def _check_type(value: Any, types: tuple[type, ...]) -> Any:
    if type(value) not in types:
        raise CorruptError(f"{value!r} found where {' or '.join(kind.__name__ for kind in types)} should be")
    return value


def _unpickle_leaf(name: str, data: bytes) -> Node:
    try:
        return Node("value", unpickle_plain(data))
    except CorruptError:
        return Node("value", OpaqueObject(name, data))
