"""Description of an object as a Cerebras checkpoint of format 0.5.

The description has attributes, and a dataset for each leaf.
"""

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ft_ckpt.extensions.hdf5.cerebras_types import (
    EMULATED_TYPES,
    NATIVE_FLOAT_TYPES,
    PLAIN_TYPES,
    leaf_path,
    stored_type,
)
from ft_ckpt.extensions.hdf5.hdf5_metadata import Attribute, Dataset
from ft_ckpt.formats import Spec
from ft_ckpt.formats.trees import LEAF_SPEC, Node, describe_tree, leaf_number

_VERSION = 0.5
_RTFX_DTYPES = {  # numbers of Cerebras by the label of a dtype
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
_MAX_INT = 1 << 4096  # larger ones are written in hexadecimal
_LEAF_TEXT = json.dumps(LEAF_SPEC)


@dataclass(frozen=True)
class Content:
    """The checkpoint without its tensors' bytes: attributes of the root, names of leaves, datasets.

    The first datasets are those of the leaves, in order; their offsets are not yet known.
    """

    attributes: Mapping[str, Attribute]
    names: Sequence[str]
    datasets: Sequence[Dataset]


def describe_checkpoint(
    root: Node, leaves: Sequence[Spec], arrays: Iterable[int] = (), native_floats: bool = False
) -> Content:
    """Return the content of a file for the object `root`.

    `leaves` has shape and dtype by number, and `arrays` the numbers of numpy arrays. Raises
    SelectionError for a name that is too long.
    """
    tree, nodes = describe_tree(root)
    describer = _LeafDescriber(leaves, frozenset(arrays), native_floats)
    attributes: dict[str, Attribute] = {
        "__version__": _VERSION,
        "__spec__": json.dumps([None, json.dumps([1, tree])]),
        "__SUCCESS__": True,  # an unfinished file has no superblock, or is a temporary file
    }
    for name, node in nodes.items():
        metadata_text = describer.describe_leaf(name, node)
        attributes[f"{name}.__metadata__"] = _wrap_metadata(name, metadata_text)
    datasets = [describer.datasets[number] for number in range(len(leaves))]
    datasets += describer.objects.values()
    return Content(attributes, describer.names, datasets)


@dataclass(frozen=True)
class _LeafKind:
    """What tensors of one dtype and shape have in common."""

    type: str  # in the file
    metadata: dict[str, Any]
    metadata_text: str  # as JSON
    attributes: Mapping[str, Attribute]  # of the dataset


def _leaf_kind(stored: str, metadata: dict[str, Any], shape: tuple[int, ...]) -> _LeafKind:
    return _LeafKind(stored, metadata, json.dumps(metadata), _as_attributes(metadata, shape))


def _as_attributes(metadata: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Attribute]:
    """Return the metadata as attributes of the dataset, which the format's tools read first."""
    attributes: dict[str, Attribute] = {}
    for name, value in metadata.items():
        if name == "shapes":
            attributes[name] = np.array([shape], np.int64).reshape(1, len(shape))
        elif name == "rtfx_dtypes":
            attributes[name] = np.array(value, np.int64)
        else:
            attributes[name] = tuple(value) if isinstance(value, list) else value
    return attributes


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
        """Return the metadata of one leaf, as JSON."""
        if node.kind == "value":
            return json.dumps(self._describe_value(name, node.value))
        number = leaf_number(node)
        if number in self.datasets:
            return json.dumps(_describe_link(self.names[number]))
        self.names[number] = name
        spec = self.leaves[number]
        kind = self._kind_of(spec, node, number in self.arrays)
        path = leaf_path(name)
        self.datasets[number] = Dataset(path, kind.type, spec.shape, kind.attributes)
        if len(path) == 1:
            return kind.metadata_text
        return json.dumps(kind.metadata | _path_metadata(name))

    def _kind_of(self, spec: Spec, node: Node, is_array: bool) -> _LeafKind:
        """Return what a leaf has in common with others.

        Tensors of one dtype and shape share one record.
        """
        stored = stored_type(spec.dtype, self.native_floats)
        if is_array:
            return _leaf_kind(stored, _describe_array(node), spec.shape)
        key = (spec.dtype, spec.shape)
        if key not in self.kinds:
            self.kinds[key] = _leaf_kind(stored, self._describe_tensor(spec), spec.shape)
        return self.kinds[key]

    def _describe_tensor(self, spec: Spec) -> dict[str, Any]:
        label = self._label_of(spec.dtype)
        metadata = {
            "__TYPE__": "TorchTensorSerializer",
            "__NUMPY__": True,
            "__TORCH__": True,
            "shapes": [list(spec.shape)],
            "dtypes": [f"torch.{label}"],
            "rtfx_dtypes": [_RTFX_DTYPES.get(label, 0)],
            "compressed": False,
        }
        if label != spec.dtype:
            metadata["ft_dtype"] = spec.dtype
        return metadata

    def _label_of(self, dtype: str) -> str:
        """Return the dtype that readers of Cerebras see."""
        if dtype in PLAIN_TYPES:
            return dtype
        if self.native_floats and dtype in NATIVE_FLOAT_TYPES:
            return NATIVE_FLOAT_TYPES[dtype][1]
        return EMULATED_TYPES[dtype][1]

    def _describe_value(self, name: str, value: Any) -> dict[str, Any]:
        if isinstance(value, np.generic):
            is_number = value.dtype.kind in "biuf" and value.dtype.itemsize <= 8
            value = value.item() if is_number else str(value)

        if value is None:
            return {"__TYPE__": "NoneSerializer", "__NONE__": True}
        if isinstance(value, int) and abs(value) >= _MAX_INT:
            value = hex(value)  # JSON readers limit the number of digits
        if isinstance(value, (bool, int, float)):
            return {"__TYPE__": "ScalarSerializer", "scalar_value": value, "__NONE__": True}
        if isinstance(value, str):
            return {"__TYPE__": "StringSerializer", "string_value": value, "__NONE__": True}

        # bytes, complex, torch's dtype and device: nothing that runs
        data = pickle.dumps(value, protocol=4)
        attributes: dict[str, Attribute] = {"__BYTES__": data, "__TYPE__": "ObjectSerializer"}
        self.objects[name] = Dataset(leaf_path(name), "f4", None, attributes)
        return {"__TYPE__": "ObjectSerializer", "__BYTES__": True} | _path_metadata(name)


def _describe_link(name: str) -> dict[str, Any]:
    return {"__TYPE__": "LinkedObject", "key": name, "__LINKED__": True, "__NONE__": True}


def _describe_array(node: Node) -> dict[str, Any]:
    metadata = {
        "__TYPE__": "NumpyArraySerializer",
        "__NUMPY__": True,
        "is_bfloat16": False,
        "compressed": False,
    }
    if node.kind != "blob":
        metadata["ft_array"] = json.dumps(node.value[1:])
    return metadata


def _path_metadata(name: str) -> dict[str, str]:
    path = leaf_path(name)
    return {} if len(path) == 1 else {"key": "/".join(path)}


def _wrap_metadata(name: str, metadata_text: str) -> str:
    """Return the JSON text of a leaf's attribute of the root.

    The text has the leaf's metadata, and the tree of a dict with this leaf alone. Strings of JSON
    are put together, because to encode a dict for each leaf takes five times as long.
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
