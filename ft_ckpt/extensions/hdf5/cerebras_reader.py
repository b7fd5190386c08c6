"""Reads the object tree and the leaves of Cerebras checkpoints (HDF5).

The format 0.4 and all formats from 0.5 on are read. Nothing in the file is run, because `unpickle`
decodes the pickled tree of 0.4 and pickled objects, and unknown objects stay opaque. Links to other
files, unfinished files and unknown kinds of leaves are refused.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np

from ft_ckpt.errors import CorruptError, LoadError, shown
from ft_ckpt.formats import ITEM_BYTES
from ft_ckpt.formats.files import PLAIN_VALUES, OpaqueObject, Sealed, unpickle
from ft_ckpt.formats.trees import MAX_LEVELS, Node
from ft_ckpt.messages import printable

_MAX_FILL_BYTES = 1 << 40  # limit of a constant tensor, which has no bytes in the file
_TREE_PROTOCOL = 1  # version of torch's tree specifications
# last name of a container's type -> kind of its node
_KINDS = {
    "dict": "dict",
    "OrderedDict": "odict",
    "list": "list",
    "tuple": "tuple",
    "set": "set",
    "deque": "deque",
    "defaultdict": "defaultdict",
}
_KEYS = (str, int, bool, float, type(None))


class FoundDataset(Protocol):
    """A dataset of an open HDF5 file."""

    path: str
    shape: tuple[int, ...] | None
    dtype: np.dtype[Any]
    attributes: Mapping[str, Any]

    def read_value(self) -> Any:
        """Read the whole dataset, as a numpy array or scalar."""


@dataclass(frozen=True)
class StoredLeaf:
    """A leaf: its dataset, or the value of all its elements.

    `dtype` is torch's name, None for numpy arrays.
    """

    name: str
    dtype: str | None
    dataset: FoundDataset | None = None
    shape: tuple[int, ...] = ()
    fill: float | bool | None = None


@dataclass
class CerebrasReader:
    """Reads one checkpoint.

    `attributes` are those of the root group. `find` returns a dataset by its path, or raises
    CorruptError.
    """

    attributes: Mapping[str, Any]
    find: Callable[[str], FoundDataset]
    leaves: list[StoredLeaf] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)

    def read_tree(self) -> Node:
        """Read the tree, and put its leaves into `leaves`.

        Raises CorruptError if the tree cannot be read safely and completely.
        """
        try:
            version = float(self.attributes["__version__"])
            if version == 0.4:
                return self._read_node(self._legacy_spec(), (), self._legacy_leaf)
            if version >= 0.5:
                return self._read_node(self._tree_spec(), (), self._read_leaf)
        except (
            KeyError,
            TypeError,
            ValueError,
            IndexError,
            AttributeError,
            RecursionError,
        ) as error:
            raise CorruptError(
                f"not a whole Cerebras checkpoint: {shown(error)}; use another copy of the file"
            ) from error

        raise CorruptError(
            f"a Cerebras checkpoint of format {version}; 0.4 and from 0.5 on can be read"
        )

    def _legacy_spec(self) -> "_LegacySpec":
        data = bytes.fromhex(self.attributes["__spec__"])
        spec = unpickle(data, "__spec__", _LEGACY_TREE)
        if not isinstance(spec, _LegacySpec):
            raise CorruptError("the tree of the checkpoint has an unknown type")
        return spec

    def _tree_spec(self) -> Any:
        if not self.attributes.get("__SUCCESS__", False):
            raise CorruptError(
                "the checkpoint was never finished (no __SUCCESS__); use an older one"
            )
        # torch's form of a tree
        protocol, tree = json.loads(json.loads(self.attributes["__spec__"])[1])
        if protocol != _TREE_PROTOCOL:
            raise CorruptError(f"a tree of protocol {protocol!r}; {_TREE_PROTOCOL} is known")
        return tree

    def _read_node(
        self, spec: Any, path: tuple[str, ...], read_leaf: Callable[[str], Node]
    ) -> Node:
        """Read the node of a specification; `read_leaf` reads a leaf by its name."""
        if len(path) > MAX_LEVELS:
            raise CorruptError(f"{printable('.'.join(path))[:60]}: over {MAX_LEVELS} levels deep")
        if spec["type"] is None:
            return read_leaf(".".join(path))
        kind = _KINDS.get(str(spec["type"]).rpartition(".")[2])
        if kind is None:
            raise CorruptError(
                f"{'.'.join(path) or 'the object'}: a container of type {spec['type']!r}"
            )

        context, children = spec["context"], spec["children_spec"]
        if isinstance(context, str):
            context = json.loads(context)
        detail: Any = None
        names: Any = range(len(children))
        keys: Any = []
        if kind == "defaultdict":
            detail, keys = context["default_factory_name"], context["dict_context"]
            # The format names the first child after the factory, and the second after the keys.
            if len(children) > 2:
                raise CorruptError(
                    f"{'.'.join(path)}: a defaultdict of {len(children)}, which the format loses"
                )
            names = (f"<class '{detail}'>", str(keys))[: len(children)]
        elif kind in ("dict", "odict"):
            names = keys = context

        nodes = []
        for name, child in zip(names, children, strict=True):
            nodes.append(self._read_node(child, (*path, str(name)), read_leaf))
        key_nodes = tuple(Node("value", _check_type(key, _KEYS)) for key in keys)
        return Node(kind, detail, key_nodes, tuple(nodes))

    # Leaves of 0.5

    def _read_leaf(self, name: str) -> Node:
        if name not in self.nodes:
            outer = json.loads(self.attributes[f"{name}.__metadata__"])
            if outer["__objects__"] != [name]:
                raise CorruptError(
                    f"{name}: a link to another checkpoint; load that one, or save this one whole"
                )
            self.nodes[name] = self._leaf_node(name, outer[f"{name}.__metadata__"])
        return self.nodes[name]

    def _leaf_node(self, name: str, metadata: Mapping[str, Any]) -> Node:
        path = metadata.get("key", name)
        kind = metadata.get("__TYPE__") or self.find(path).attributes.get("__TYPE__")
        if kind == "TorchTensorSerializer" and metadata.get("__TORCH__", True):
            return self._tensor_leaf(name, self.find(path), metadata)
        if kind in ("TorchTensorSerializer", "NumpyArraySerializer"):
            return self._array_leaf(name, self.find(path), metadata.get("ft_array"))
        if kind == "ScalarSerializer":
            return Node("value", _check_type(metadata["scalar_value"], (bool, int, float)))
        if kind == "StringSerializer":
            return Node("value", _check_type(metadata["string_value"], (str,)))
        if kind == "NoneSerializer":
            return Node("value", None)
        if kind == "ObjectSerializer":
            data = np.asarray(self.find(path).attributes["__BYTES__"]).tobytes()
            return _unpickle_leaf(name, data)

        if kind == "LinkedObject":
            target = str(metadata["key"])
            if target == name or target not in self.nodes:
                raise CorruptError(f"{name}: linked to {target}, which does not come before it")
            return self.nodes[target]

        if kind == "DeferredFullTensor":
            return self._constant_leaf(name, metadata)
        raise CorruptError(
            f"{name}: a leaf of type {kind!r}, which leads outside the file or is unknown"
        )

    def _tensor_leaf(self, name: str, dataset: FoundDataset, metadata: Mapping[str, Any]) -> Node:
        attributes = dataset.attributes
        label = str(next(iter(attributes.get("dtypes", metadata["dtypes"]))))
        stored_dtype = metadata.get("ft_dtype", label.removeprefix("torch."))
        dtype = str(attributes.get("ft_dtype", stored_dtype))
        return self._add_leaf(StoredLeaf(name, dtype, dataset))

    def _array_leaf(self, name: str, dataset: FoundDataset, exact: str | None) -> Node:
        described, shape = json.loads(exact) if exact else (None, ())
        node = self._add_leaf(StoredLeaf(name, None, dataset))
        return Node("array", (node.value, described, tuple(shape)))

    def _constant_leaf(self, name: str, metadata: Mapping[str, Any]) -> Node:
        shape = tuple(int(size) for size in metadata["shape"])
        dtype = str(metadata["dtype"]).removeprefix("torch.")
        size_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        if size_bytes > _MAX_FILL_BYTES or min(shape, default=0) < 0:
            raise CorruptError(f"{name}: a constant tensor of {shape}")
        fill = metadata.get("fill_value") or 0
        return self._add_leaf(StoredLeaf(name, dtype, None, shape, fill))

    def _add_leaf(self, leaf: StoredLeaf) -> Node:
        self.leaves.append(leaf)
        return Node("tensor", len(self.leaves) - 1)

    # Leaves of 0.4

    def _legacy_leaf(self, name: str) -> Node:
        dataset = self.find(quote(name, safe=""))
        attributes = dataset.attributes
        kind = str(attributes["__H5_TYPE__"])
        if kind == "TorchTensorH5Type":
            dtype = "bfloat16" if attributes.get("is_bfloat16") else dataset.dtype.name
            return self._add_leaf(StoredLeaf(name, dtype, dataset))

        if kind == "NumpyArrayH5Type":
            return self._array_leaf(name, dataset, None)
        if kind == "ScalarH5Type":
            return Node("value", np.asarray(dataset.read_value()).item())
        if kind == "StringH5Type":
            return Node("value", _check_type(attributes["string_value"], (str,)))
        if kind == "NoneH5Type":
            return Node("value", None)
        if kind == "ObjectH5Type":
            return _unpickle_leaf(name, bytes.fromhex(attributes["object_value"]))
        raise CorruptError(
            f"{name}: a leaf of type {kind!r}, which leads outside the file or is unknown"
        )


class _LegacySpec(metaclass=Sealed):
    """Stand-in for torch's TreeSpec in the pickled tree of format 0.4."""

    type: Any = None
    context: Any = None
    children_specs: Any = ()

    def __getitem__(self, name: str) -> Any:
        """Return a field, as in the specifications of 0.5."""
        if name == "context":
            return list(self.context) if isinstance(self.context, (list, tuple)) else self.context
        if name == "children_spec":
            return list(self.children_specs)
        return self.type


_LEGACY_TREE: dict[str, Any] = {
    **PLAIN_VALUES,
    "torch.utils._pytree.TreeSpec": _LegacySpec,
    "torch.utils._pytree.LeafSpec": _LegacySpec,
    "dill._dill._load_type": str,
    "collections.OrderedDict": "OrderedDict",
}


def _check_type(value: Any, types: tuple[type, ...]) -> Any:
    if type(value) not in types:
        raise CorruptError(f"{value!r}, expected {' or '.join(kind.__name__ for kind in types)}")
    return value


def _unpickle_leaf(name: str, data: bytes) -> Node:
    try:
        return Node("value", unpickle(data, name))
    except (CorruptError, LoadError):
        return Node("value", OpaqueObject(name, data))
