"""Reads and writes Cerebras checkpoints (HDF5): the object tree and its leaves; 0.5 is written, 0.4
and from 0.5 on are read.

Nothing in the file is run: the pickled tree of 0.4 and its objects are decoded by `pickles`, and
unknown objects stay opaque. Links to other files, unfinished files and unknown kinds of leaves are
refused.
"""

import json
import math
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np

from ft_ckpt.errors import CorruptError, LoadError, SelectionError, shown
from ft_ckpt.extensions.hdf5.hdf5_metadata import Attribute, Dataset
from ft_ckpt.formats import (
    ITEM_BYTES,
    MAPPINGS,
    MOST_LEVELS,
    PLAIN_VALUES,
    Node,
    OpaqueObject,
    Sealed,
    Spec,
    unpickle,
)
from ft_ckpt.messages import printable

MOST_FILL_BYTES = 1 << 40  # of a constant tensor that has no bytes in the file
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
        """The whole dataset, as a numpy array or scalar."""


@dataclass(frozen=True)
class StoredLeaf:
    """A leaf: its dataset, or the value of all its elements; `dtype` is torch's name, None for
    numpy arrays.
    """

    name: str
    dtype: str | None
    dataset: FoundDataset | None = None
    shape: tuple[int, ...] = ()
    fill: float | bool | None = None


@dataclass
class CerebrasReader:
    """Reads one checkpoint.

    `attributes`: of its root; `find`: returns a dataset by path, or raises CorruptError.
    """

    attributes: Mapping[str, Any]
    find: Callable[[str], FoundDataset]
    leaves: list[StoredLeaf] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)

    def read_tree(self) -> Node:
        """The tree; its leaves are in `leaves`.

        Raises CorruptError if it cannot be read safely and completely.
        """
        try:
            version = float(self.attributes["__version__"])
            if version == 0.4:
                spec = unpickle(
                    bytes.fromhex(self.attributes["__spec__"]), "__spec__", _LEGACY_TREE
                )
                if not isinstance(spec, _LegacySpec):
                    raise CorruptError("the tree of the checkpoint has an unknown type")
                return self._read_node(spec, (), self._legacy_leaf)
            if version >= 0.5:
                if not self.attributes.get("__SUCCESS__", False):
                    raise CorruptError(
                        "the checkpoint was never finished (no __SUCCESS__); use an older one"
                    )
                # torch's form of a tree
                protocol, tree = json.loads(json.loads(self.attributes["__spec__"])[1])
                if protocol != 1:
                    raise CorruptError(f"a tree of protocol {protocol!r}; 1 is known")
                return self._read_node(tree, (), self._read_leaf)
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

    def _read_node(self, spec: Any, path: tuple[str, ...], leaf: Callable[[str], Node]) -> Node:
        if len(path) > MOST_LEVELS:
            raise CorruptError(f"{printable('.'.join(path))[:60]}: over {MOST_LEVELS} levels deep")
        if spec["type"] is None:
            return leaf(".".join(path))
        kind = _KINDS.get(str(spec["type"]).rpartition(".")[2])
        if kind is None:
            raise CorruptError(
                f"{'.'.join(path) or 'the object'}: a container of type {spec['type']!r}"
            )
        context, children = spec["context"], spec["children_spec"]
        context = json.loads(context) if isinstance(context, str) else context
        detail: Any = None
        names: Any = range(len(children))
        keys: Any = []
        if kind == "defaultdict":
            detail, keys = context["default_factory_name"], context["dict_context"]
            # the format names the children after the factory and the keys: two names
            if len(children) > 2:
                raise CorruptError(
                    f"{'.'.join(path)}: a defaultdict of {len(children)}, which the format loses"
                )
            names = (f"<class '{detail}'>", str(keys))[: len(children)]
        elif kind in ("dict", "odict"):
            names = keys = context
        nodes = tuple(
            self._read_node(child, (*path, str(name)), leaf)
            for name, child in zip(names, children, strict=True)
        )
        return Node(
            kind, detail, tuple(Node("value", _check_type(key, _KEYS)) for key in keys), nodes
        )

    def _read_leaf(self, name: str) -> Node:
        if name not in self.nodes:
            outer = json.loads(self.attributes[f"{name}.__metadata__"])
            if outer["__objects__"] != [name]:
                raise CorruptError(
                    f"{name}: a link to another checkpoint; load that one, or save this one whole"
                )
            self.nodes[name] = self._leaf_node(name, outer[f"{name}.__metadata__"])
        return self.nodes[name]

    def _leaf_node(self, name: str, known: Mapping[str, Any]) -> Node:
        path = known.get("key", name)
        kind = known.get("__TYPE__") or self.find(path).attributes.get("__TYPE__")
        if kind == "TorchTensorSerializer" and known.get("__TORCH__", True):
            dataset = self.find(path)
            label = str(next(iter(dataset.attributes.get("dtypes", known["dtypes"]))))
            dtype = str(
                dataset.attributes.get(
                    "ft_dtype", known.get("ft_dtype", label.removeprefix("torch."))
                )
            )
            return self._add_leaf(StoredLeaf(name, dtype, dataset))
        if kind in ("TorchTensorSerializer", "NumpyArraySerializer"):
            return self._array_leaf(name, self.find(path), known.get("ft_array"))
        if kind == "ScalarSerializer":
            return Node("value", _check_type(known["scalar_value"], (bool, int, float)))
        if kind == "StringSerializer":
            return Node("value", _check_type(known["string_value"], (str,)))
        if kind == "NoneSerializer":
            return Node("value", None)
        if kind == "ObjectSerializer":
            return _unpickle_leaf(
                name, np.asarray(self.find(path).attributes["__BYTES__"]).tobytes()
            )
        if kind == "LinkedObject":
            target = str(known["key"])
            if target == name or target not in self.nodes:
                raise CorruptError(f"{name}: linked to {target}, which does not come before it")
            return self.nodes[target]
        if kind == "DeferredFullTensor":
            return self._constant_leaf(name, known)
        raise CorruptError(
            f"{name}: a leaf of type {kind!r}, which leads outside the file or is unknown"
        )

    def _array_leaf(self, name: str, dataset: FoundDataset, exact: str | None) -> Node:
        described, shape = json.loads(exact) if exact else (None, ())
        node = self._add_leaf(StoredLeaf(name, None, dataset))
        return Node("array", (node.value, described, tuple(shape)))

    def _constant_leaf(self, name: str, known: Mapping[str, Any]) -> Node:
        shape, dtype = (
            tuple(int(size) for size in known["shape"]),
            str(known["dtype"]).removeprefix("torch."),
        )
        if math.prod(shape) * ITEM_BYTES[dtype] > MOST_FILL_BYTES or min(shape, default=0) < 0:
            raise CorruptError(f"{name}: a constant tensor of {shape}")
        return self._add_leaf(StoredLeaf(name, dtype, None, shape, known.get("fill_value") or 0))

    def _add_leaf(self, leaf: StoredLeaf) -> Node:
        self.leaves.append(leaf)
        return Node("tensor", len(self.leaves) - 1)

    def _legacy_leaf(self, name: str) -> Node:
        dataset = self.find(quote(name, safe=""))
        kind, known = str(dataset.attributes["__H5_TYPE__"]), dataset.attributes
        if kind == "TorchTensorH5Type":
            return self._add_leaf(
                StoredLeaf(
                    name, "bfloat16" if known.get("is_bfloat16") else dataset.dtype.name, dataset
                )
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
        raise CorruptError(
            f"{name}: a leaf of type {kind!r}, which leads outside the file or is unknown"
        )


class _LegacySpec(metaclass=Sealed):
    """Stand-in for torch's TreeSpec in the pickled tree of format 0.4."""

    type: Any = None
    context: Any = None
    children_specs: Any = ()

    def __getitem__(self, name: str) -> Any:
        if name == "context":
            return list(self.context) if isinstance(self.context, (list, tuple)) else self.context
        return list(self.children_specs) if name == "children_spec" else self.type


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


VERSION = 0.5
INDEX = "__ft_index__"
GROUP = "__ft__"  # of datasets whose names HDF5 would parse as paths
LONGEST_NAME_BYTES = 30_000
RTFX = {
    "bool": 1,
    "int16": 3,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint16": 7,
    "uint32": 8,
    "uint64": 9,
    "float16": 10,
    "float32": 11,
    "float64": 12,
    "bfloat16": 15,
}
STORED = {  # torch's dtype: (type in the file, label), if HDF5 has no such type
    "bfloat16": ("i2", "bfloat16"),
    "complex32": ("u4", "uint32"),
    **dict.fromkeys(
        ("float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", "float8_e4m3fnuz"), ("u1", "uint8")
    ),
    **dict.fromkeys(("float8_e5m2fnuz", "float4_e2m1fn_x2"), ("u1", "uint8")),
}
# types that every reader converts
NATIVE = {"bfloat16": ("bf16", "float32"), "float8_e5m2": ("e5m2", "float32")}
_PLAIN = {
    "bool": "bool",
    "int8": "i1",
    "int16": "i2",
    "int32": "i4",
    "int64": "i8",
    "uint8": "u1",
    "uint16": "u2",
    "uint32": "u4",
    "uint64": "u8",
    "float16": "f2",
    "float32": "f4",
    "float64": "f8",
    "complex64": "c8",
    "complex128": "c16",
}
DTYPES = (*_PLAIN, *STORED)  # all that can be stored
_LEAF: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
_LEAF_TEXT = json.dumps(_LEAF)
_TORCH_TREES = {
    "dict": "builtins.dict",
    "odict": "collections.OrderedDict",
    "list": "builtins.list",
    "tuple": "builtins.tuple",
    "set": "builtins.set",
    "deque": "collections.deque",
}
_NEAREST = {
    "counter": "dict",
    "defaultdict": "dict",
    "namedtuple": "tuple",
    "size": "tuple",
    "frozenset": "set",
}
_UNSAFE = str.maketrans({"\0": "\u2400", **{chr(code): "\ufffd" for code in range(0xD800, 0xE000)}})


@dataclass(frozen=True)
class Content:
    """The checkpoint without its tensors' bytes: attributes of the root, names of the leaves,
    datasets.

    The first datasets are those of the leaves, in order; their offsets are not yet known.
    """

    attributes: Mapping[str, Attribute]
    names: Sequence[str]
    datasets: Sequence[Dataset]


def describe_checkpoint(
    root: Node, leaves: Sequence[Spec], arrays: Iterable[int] = (), native_floats: bool = False
) -> Content:
    """The content for the object `root`.

    `leaves`: shape and dtype by index; `arrays`: the indices of numpy arrays.

    Raises SelectionError for a name that is too long.
    """
    tree, nodes = _walk_object(root)
    writer = _LeafDescriber(leaves, frozenset(arrays), native_floats)
    attributes: dict[str, Attribute] = {
        "__version__": VERSION,
        "__spec__": json.dumps([None, json.dumps([1, tree])]),
        "__SUCCESS__": True,  # an unfinished file has no superblock, or is a temporary file
    }
    for name, node in nodes.items():
        attributes[f"{name}.__metadata__"] = _wrap_metadata(name, writer.describe_leaf(name, node))
    objects = list(writer.objects.values())
    return Content(
        attributes, writer.names, [writer.datasets[index] for index in range(len(leaves))] + objects
    )


def leaf_names(root: Node, count: int) -> list[str]:
    """The names of the `count` leaves of the object `root`.

    Raises as `describe_checkpoint` does.
    """
    names = [""] * count
    for name, node in _walk_object(root)[1].items():
        if node.kind != "value":
            names[_leaf_index(node)] = names[_leaf_index(node)] or name
    return names


def _walk_object(root: Node) -> tuple[dict[str, Any], dict[str, Node]]:
    """The tree as torch writes its tree specifications, and the leaves by their dotted names."""
    try:
        walk = _TreeWalk()
        return walk.describe_node(root, "", ""), walk.leaves
    except _CollisionError:
        walk = _TreeWalk(escape=True)
        return walk.describe_node(root, "", ""), walk.leaves


def _leaf_index(node: Node) -> int:
    """The index of the leaf of a node of kind "tensor", "array" or "blob"."""
    index: int = node.value if node.kind == "tensor" else node.value[0]
    return index


class _CollisionError(Exception):
    pass


@dataclass
class _TreeWalk:
    """Describes a tree and collects its leaves.

    Raises _CollisionError when two leaves get one name.
    """

    escape: bool = False  # escape dots in keys, so that no two paths give one name
    leaves: dict[str, Node] = field(default_factory=dict)

    def describe_node(self, node: Node, prefix: str, name: str) -> dict[str, Any]:
        kind = _NEAREST.get(node.kind, node.kind)
        if kind not in _TORCH_TREES:
            if name in self.leaves:
                raise _CollisionError
            if len(name.encode()) > LONGEST_NAME_BYTES:
                raise SelectionError(
                    f"{printable(name)[:60]}...: a name of {len(name.encode())} bytes; HDF5 takes "
                    f"{LONGEST_NAME_BYTES}, shorten the keys"
                )
            self.leaves[name] = node
            return _LEAF
        keys: list[Any] = list(range(len(node.children)))
        context: Any = None
        if node.kind in MAPPINGS:
            context = keys = list(self._child_keys(node.keys))
        pairs = zip(keys, node.children, strict=True)
        children = [
            self.describe_node(child, f"{prefix}{key}.", f"{prefix}{key}") for key, child in pairs
        ]
        return {
            "type": _TORCH_TREES[kind],
            "context": json.dumps(context),
            "children_spec": children,
        }

    def _child_keys(self, keys: Iterable[Node]) -> Iterator[Any]:
        used: set[str] = set()
        for node in keys:
            key: Any = node.value if node.kind == "value" else _text_key(node)
            if type(key) not in (str, int, bool, float, type(None)):
                key = str(key)
            if type(key) is str:
                key = key.translate(_UNSAFE)
                key = key.replace("%", "%25").replace(".", "%2E") if self.escape else key
            elif self.escape and "." in str(key):
                key = str(key).replace(".", "%2E")
            while str(key) in used:
                key = f"{key}~"
            used.add(str(key))
            yield key


def _text_key(node: Node) -> str:
    parts = [
        _text_key(child) if child.kind != "value" else repr(child.value) for child in node.children
    ]
    return f"({', '.join(parts)})"


@dataclass(frozen=True)
class _LeafKind:
    """What tensors of one dtype and shape have in common."""

    type: str  # in the file
    metadata: dict[str, Any]
    metadata_text: str  # as JSON
    attributes: Mapping[str, Attribute]  # of the dataset


def _leaf_kind(stored: str, metadata: dict[str, Any], shape: tuple[int, ...]) -> _LeafKind:
    return _LeafKind(stored, metadata, json.dumps(metadata), _as_attributes(metadata, shape))


@dataclass
class _LeafDescriber:
    """Makes the metadata and the dataset of each leaf."""

    leaves: Sequence[Spec]
    arrays: frozenset[int]
    native_floats: bool
    datasets: dict[int, Dataset] = field(default_factory=dict)
    objects: dict[str, Dataset] = field(default_factory=dict)
    kinds: dict[tuple[str, tuple[int, ...]], _LeafKind] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = [""] * len(self.leaves)

    def describe_leaf(self, name: str, node: Node) -> str:
        """The metadata of one leaf, as JSON."""
        if node.kind == "value":
            return json.dumps(self._describe_value(name, node.value))
        index = _leaf_index(node)
        if index in self.datasets:
            link = {
                "__TYPE__": "LinkedObject",
                "key": self.names[index],
                "__LINKED__": True,
                "__NONE__": True,
            }
            return json.dumps(link)
        self.names[index] = name
        spec = self.leaves[index]
        kind = self._kind_of(spec, node, index in self.arrays)
        path = _leaf_path(name)
        self.datasets[index] = Dataset(path, kind.type, spec.shape, kind.attributes)
        if len(path) == 1:
            return kind.metadata_text
        return json.dumps(kind.metadata | _path_metadata(name))

    def _kind_of(self, spec: Spec, node: Node, is_array: bool) -> _LeafKind:
        """What a leaf has in common with others; tensors of one dtype and shape share one
        record.
        """
        stored = stored_type(spec.dtype, self.native_floats)
        if is_array:
            return _leaf_kind(stored, self._describe_array(node), spec.shape)
        key = (spec.dtype, spec.shape)
        if key not in self.kinds:
            self.kinds[key] = _leaf_kind(stored, self._describe_tensor(spec), spec.shape)
        return self.kinds[key]

    def _describe_tensor(self, spec: Spec) -> dict[str, Any]:
        native = NATIVE.get(spec.dtype) if self.native_floats else None
        label = spec.dtype if spec.dtype in _PLAIN else (native or STORED[spec.dtype])[1]
        known = {
            "__TYPE__": "TorchTensorSerializer",
            "__NUMPY__": True,
            "__TORCH__": True,
            "shapes": [list(spec.shape)],
            "dtypes": [f"torch.{label}"],
            "rtfx_dtypes": [RTFX.get(label, 0)],
            "compressed": False,
        }
        return known if label == spec.dtype else known | {"ft_dtype": spec.dtype}

    def _describe_array(self, node: Node) -> dict[str, Any]:
        known = {
            "__TYPE__": "NumpyArraySerializer",
            "__NUMPY__": True,
            "is_bfloat16": False,
            "compressed": False,
        }
        return known if node.kind == "blob" else known | {"ft_array": json.dumps(node.value[1:])}

    def _describe_value(self, name: str, value: Any) -> dict[str, Any]:
        if isinstance(value, np.generic):
            value = (
                value.item()
                if value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
                else str(value)
            )
        if value is None:
            return {"__TYPE__": "NoneSerializer", "__NONE__": True}
        if isinstance(value, int) and abs(value) >= 1 << 4096:
            value = hex(value)  # JSON readers limit the number of digits
        if isinstance(value, (bool, int, float)):
            return {"__TYPE__": "ScalarSerializer", "scalar_value": value, "__NONE__": True}
        if isinstance(value, str):
            return {"__TYPE__": "StringSerializer", "string_value": value, "__NONE__": True}
        # bytes, complex, torch's dtype and device: nothing that runs
        data = pickle.dumps(value, protocol=4)
        known: dict[str, Attribute] = {"__BYTES__": data, "__TYPE__": "ObjectSerializer"}
        self.objects[name] = Dataset(_leaf_path(name), "f4", None, known)
        return {"__TYPE__": "ObjectSerializer", "__BYTES__": True} | _path_metadata(name)


def stored_type(dtype: str, native_floats: bool = False) -> str:
    """The HDF5 type that stores torch's `dtype`."""
    native = NATIVE.get(dtype) if native_floats else None
    return _PLAIN.get(dtype) or (native or STORED[dtype])[0]


def dataset_path(name: str) -> tuple[str, ...]:
    """The path of a leaf's dataset, given the leaf's name in the index."""
    return _leaf_path(name.translate(_UNSAFE))


def _leaf_path(name: str) -> tuple[str, ...]:
    """The path of a leaf's dataset: its name, or an escaped name in GROUP if HDF5 would parse it as
    a path.
    """
    if "/" in name or name in ("", ".", "..", INDEX, GROUP):
        return (GROUP, "=" + quote(name, safe=""))
    return (name,)


def _path_metadata(name: str) -> dict[str, str]:
    path = _leaf_path(name)
    return {} if len(path) == 1 else {"key": "/".join(path)}


def _as_attributes(known: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Attribute]:
    """The metadata as attributes of the dataset, which the format's tools read first."""
    attributes: dict[str, Attribute] = {}
    for name, value in known.items():
        if name == "shapes":
            attributes[name] = np.array([shape], np.int64).reshape(1, len(shape))
        elif name == "rtfx_dtypes":
            attributes[name] = np.array(value, np.int64)
        else:
            attributes[name] = tuple(value) if isinstance(value, list) else value
    return attributes


def _wrap_metadata(name: str, metadata_text: str) -> str:
    """The JSON text of a leaf's attribute of the root: its metadata, and the tree of a dict with
    this leaf alone.

    Strings of JSON are put together, because to encode a dict for each leaf takes five times as
    long.
    """
    key = json.dumps(name)
    metadata_key = json.dumps(f"{name}.__metadata__")
    context = json.dumps(f"[{key}]")
    tree = json.dumps(
        f'[1, {{"type": "builtins.dict", "context": {context}, "children_spec": [{_LEAF_TEXT}]}}]'
    )
    return (
        f'{{"__spec__": [null, {tree}], "__objects__": [{key}], {metadata_key}: {metadata_text}}}'
    )
