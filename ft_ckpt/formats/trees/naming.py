"""Names the leaves of an object: the keys that lead to them, joined by dots.

The walk also describes the tree as torch's `treespec_dumps` does, which Cerebras stores.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ft_ckpt.errors import SelectionError
from ft_ckpt.formats.trees.pytree import MAPPINGS, Node
from ft_ckpt.messages import printable

_MAX_NAME_BYTES = 30_000  # of HDF5
LEAF_SPEC: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
_TORCH_TREES = {
    "dict": "builtins.dict",
    "odict": "collections.OrderedDict",
    "list": "builtins.list",
    "tuple": "builtins.tuple",
    "set": "builtins.set",
    "deque": "collections.deque",
}
_NEAREST = {  # the kind that stands for one that torch's trees have not
    "counter": "dict",
    "defaultdict": "dict",
    "namedtuple": "tuple",
    "size": "tuple",
    "frozenset": "set",
}
# what names of HDF5 cannot have: zero bytes, and what is not Unicode
_UNSAFE = str.maketrans({"\0": "\u2400", **{chr(code): "\ufffd" for code in range(0xD800, 0xE000)}})


def safe_name(name: str) -> str:
    """Replace the characters in `name` that names of HDF5 cannot have."""
    return name.translate(_UNSAFE)


def leaf_names(root: Node, count: int) -> list[str]:
    """Return the names of the `count` leaves of the object `root`.

    Raises SelectionError for a name that is too long.
    """
    _, leaves = describe_tree(root)
    names = [""] * count
    for name, node in leaves.items():
        if node.kind == "value":
            continue
        number = leaf_number(node)
        if not names[number]:
            names[number] = name
    return names


def leaf_number(node: Node) -> int:
    """Return the number of the leaf of a node of kind "tensor", "array" or "blob"."""
    number: int = node.value if node.kind == "tensor" else node.value[0]
    return number


def describe_tree(root: Node) -> tuple[dict[str, Any], dict[str, Node]]:
    """Describe the tree as torch's tree specifications do, and return its leaves by dotted names.

    Raises SelectionError for a name that is too long.
    """
    try:
        walk = _TreeWalk()
        return walk.describe_node(root, "", ""), walk.leaves
    except _CollisionError:
        walk = _TreeWalk(escapes_dots=True)
        return walk.describe_node(root, "", ""), walk.leaves


class _CollisionError(Exception):
    pass


@dataclass
class _TreeWalk:
    """Describes a tree and collects its leaves.

    Raises _CollisionError when two leaves get one name.
    """

    escapes_dots: bool = False  # in keys, so that no two paths give one name
    leaves: dict[str, Node] = field(default_factory=dict)

    def describe_node(self, node: Node, prefix: str, name: str) -> dict[str, Any]:
        kind = _NEAREST.get(node.kind, node.kind)
        if kind not in _TORCH_TREES:
            self._add_leaf(name, node)
            return LEAF_SPEC

        keys: list[Any] = list(range(len(node.children)))
        context: Any = None
        if node.kind in MAPPINGS:
            context = keys = list(self._child_keys(node.keys))
        children = []
        for key, child in zip(keys, node.children, strict=True):
            child_name = f"{prefix}{key}"
            children.append(self.describe_node(child, f"{child_name}.", child_name))

        return {
            "type": _TORCH_TREES[kind],
            "context": json.dumps(context),
            "children_spec": children,
        }

    def _add_leaf(self, name: str, node: Node) -> None:
        if name in self.leaves:
            raise _CollisionError
        size_bytes = len(name.encode())
        if size_bytes > _MAX_NAME_BYTES:
            raise SelectionError(
                f"{printable(name)[:60]}...: a name of {size_bytes} bytes; HDF5 takes "
                f"{_MAX_NAME_BYTES}, shorten the keys"
            )
        self.leaves[name] = node

    def _child_keys(self, keys: Iterable[Node]) -> Iterator[Any]:
        used: set[str] = set()
        for node in keys:
            key: Any = node.value if node.kind == "value" else _text_key(node)
            if type(key) not in (str, int, bool, float, type(None)):
                key = str(key)
            if type(key) is str:
                key = safe_name(key)
                if self.escapes_dots:
                    key = key.replace("%", "%25").replace(".", "%2E")
            elif self.escapes_dots and "." in str(key):
                key = str(key).replace(".", "%2E")
            while str(key) in used:
                key = f"{key}~"
            used.add(str(key))
            yield key


def _text_key(node: Node) -> str:
    if node.kind == "value":
        return repr(node.value)
    return f"({', '.join(map(_text_key, node.children))})"
