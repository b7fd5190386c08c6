"""The index that ends an HDF5 file of ours: which tensors there are, where, with which digests, and of which object.

It is JSON, and a footer of 64 bytes that proves that nothing has moved. What comes from a file is checked as a whole
when it is read, so that users of a `TensorIndex` can rely on its rows and its tree.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import xxhash

from ft_ckpt.errors import CorruptError, damaged_input, listing
from ft_ckpt.formats.layout import ITEM_BYTES, Spec
from ft_ckpt.formats.pytree import Node
from ft_ckpt.formats.pytree_json import decode_node, encode_node
from ft_ckpt.formats.raw_file import RawFile

_MAGIC = b"ft_ckpt1"
_FOOTER = "<8sQQQ16s8x"  # magic, data start, index start, file size, digest of the JSON; then the digest of these
FOOTER_BYTES = 64
TREE = "ft_ckpt_tree"  # key that the metadata of safetensors has the tree of an object under; here it is the `root`
_MOST = 1 << 62  # any size or place

Row = Sequence[Any]  # of the index: torch's dtype, shape, start (from the data start), digest in hexadecimal, leaf;
# and where it is compressed, what `hdf5_chunks` needs to read it


@dataclass(frozen=True)
class TensorIndex:
    """An index: a row for each tensor, in file order; the tree of the object (None: a flat dict); the metadata."""

    rows: Mapping[str, Row]
    root: Node | None
    metadata: Mapping[str, str]
    data_start: int = 0

    @cached_property
    def names(self) -> list[str]:
        """The names of the leaves in the order of the tree."""
        names = [""] * len(self.rows)
        for name, row in self.rows.items():
            names[row[4]] = name
        return names

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """The tensors by name, in file order."""
        return {name: Spec(name, tuple(row[1]), row[0]) for name, row in self.rows.items()}

    @property
    def tree(self) -> Node:
        """The tree of the object."""
        return flat_tree([self.specs[name] for name in self.names]) if self.root is None else self.root

    def start(self, name: str) -> int:
        """The tensor's first byte in the file."""
        return int(self.rows[name][2]) + self.data_start


def flat_tree(specs: Sequence[Spec]) -> Node:
    """The tree of a flat dict of tensors."""
    keys = tuple(Node("value", spec.name) for spec in specs)
    return Node("dict", None, keys, tuple(Node("tensor", index) for index in range(len(specs))))


def is_flat(root: Node, names: Sequence[str]) -> bool:
    """True for a dict of tensors, each under its own name: safetensors needs no tree to say that."""
    keys = [key.value for key in root.keys]
    children = [(child.kind, child.value) for child in root.children]
    return root.kind == "dict" and keys == list(names) and children == [("tensor", i) for i in range(len(names))]


def with_digests(index: TensorIndex, digests: Mapping[str, bytes]) -> TensorIndex:
    """`index` with the digests of what was written; what is compressed has its own already."""
    final = {name: row if len(row) > 5 else [*row[:3], digests[name].hex(), row[4]] for name, row in index.rows.items()}
    return TensorIndex(final, index.root, index.metadata)


def index_text(index: TensorIndex) -> bytes:
    """The index as JSON, of the same length whatever the digests are."""
    whole = {"ft_index": 1, "metadata": index.metadata, "tensors": index.rows}
    if index.root is not None:
        whole["tree"] = encode_node(index.root)
    return json.dumps(whole, separators=(",", ":")).encode()


def index_footer(text: bytes, data_start: int, index_start: int, file_bytes: int) -> bytes:
    """The footer, which follows the JSON and proves that nothing has moved."""
    known = struct.pack(_FOOTER, _MAGIC, data_start, index_start, file_bytes, xxhash.xxh3_128_digest(text))
    return known + xxhash.xxh3_64_digest(known)


def read_index(raw: RawFile, end: int | None = None) -> TensorIndex | None:
    """The index whose footer ends at byte `end` (default: of the file). None when there is none to be trusted.

    Raises CorruptError when it is where it should be but damaged.
    """
    end = raw.size_bytes if end is None else end
    if end < FOOTER_BYTES:
        return None
    known = _parse_footer(bytes(raw.bytes(end - FOOTER_BYTES, FOOTER_BYTES)))
    if known is None:
        return None
    data_start, start, file_bytes, digest = known
    if file_bytes != raw.size_bytes or start > end - FOOTER_BYTES:
        return None
    return parse_index(bytes(raw.bytes(start, end - FOOTER_BYTES - start)), digest, data_start, raw.name)


def moved_index(data: bytes, source: str) -> TensorIndex:
    """The index in the bytes of its dataset, wherever that is now; its places are worthless.

    Raises CorruptError when it is damaged: then the file is, and what it says without an index is no better.
    """
    known = _parse_footer(data[-FOOTER_BYTES:])
    if known is None:
        raise CorruptError(f"{source}: its index is damaged; use another copy of the file")
    return parse_index(data[:-FOOTER_BYTES], known[3], 0, source)


def _parse_footer(tail: bytes) -> tuple[int, int, int, bytes] | None:
    if len(tail) != FOOTER_BYTES or xxhash.xxh3_64_digest(tail[:-8]) != tail[-8:]:
        return None
    magic, *known = struct.unpack(_FOOTER, tail[:-8])
    return tuple(known) if magic == _MAGIC else None


def parse_index(text: bytes, digest: bytes, data_start: int, source: str) -> TensorIndex:
    """The index in `text`, places counted from the start of the file. Raises CorruptError, naming `source`."""
    if xxhash.xxh3_128_digest(text) != digest:
        raise CorruptError(f"{source}: its index is damaged (digest differs); use another copy of the file")
    with damaged_input(f"{source}: its index"):
        whole = json.loads(text)
        if whole["ft_index"] != 1:
            raise CorruptError(f"{source}: an index of version {whole['ft_index']!r:.20}; upgrade ft_ckpt")
        root = decode_node(whole["tree"]) if "tree" in whole else None
        metadata = {str(key): str(value) for key, value in whole["metadata"].items() if key != TREE}
        index = TensorIndex(whole["tensors"], root, metadata, data_start)
        check_index(index, source)
    return index


def check_index(index: TensorIndex, source: str) -> None:
    """Raise CorruptError where the rows of an index are no tensors, or its tree asks for others than it has."""
    count = len(index.rows)
    if sorted([row[4] for row in index.rows.values()]) != list(range(count)):
        raise CorruptError(f"{source}: its index does not name each of {count} tensors once; use another copy")
    wrong = [name for name, row in index.rows.items() if not _is_sound(row)]
    if wrong or (index.root is not None and _most_leaf(index.root) >= count):
        where = listing(wrong, ", ") or "the tree"
        raise CorruptError(f"{source}: {where}: malformed in its index; use another copy of the file")


def _is_sound(row: Row) -> bool:
    dtype, shape, start, digest, *_ = row
    numbers = [start, *shape]
    whole = dtype in ITEM_BYTES and type(digest) is str and all(type(one) is int for one in numbers)
    return whole and min(numbers) >= 0 and max(numbers) < _MOST


def _most_leaf(root: Node) -> int:
    """The highest number of a leaf in the tree."""
    most, stack = -1, [root]
    while stack:
        node = stack.pop()
        if node.kind in ("tensor", "array", "blob"):
            most = max(most, node.value if node.kind == "tensor" else node.value[0])
        stack += node.children
        stack += [node.value] if isinstance(node.value, Node) else []
    return most
