"""The index of a tensor file: a row for each tensor, the tree of the object, the metadata.

The HDF5 and dual files that ft_ckpt writes store the index as JSON, followed by a footer of 64
bytes. The footer shows a reader that no other program has moved the tensors:

    magic (8) | data start (8) | index start (8) | file size (8) | digest of the JSON (16) | zeros
    (8) | digest of all these (8)
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import xxhash

from ft_ckpt.errors import CorruptError, damaged_input, listing
from ft_ckpt.formats.files import RawFile
from ft_ckpt.formats.layout import ITEM_BYTES, Spec
from ft_ckpt.formats.trees import Node, decode_node, encode_node

# key of an object's tree in the metadata of safetensors; here it is the `root`
TREE = "ft_ckpt_tree"
FOOTER_BYTES = 64
NO_DIGEST = "0" * 32  # in the place of a digest that is not known yet
_MAGIC = b"ft_ckpt1"
_FOOTER = "<8sQQQ16s8x"  # without the last digest
_MAX_NUMBER = 1 << 62  # above any size or offset

# A row has torch's dtype, the shape, the start (from the data start), the digest in hexadecimal and
# the number of the leaf. ft_ckpt 0.1 to 0.3 added the chunks of a compressed tensor, which only the
# HDF5 library reads.
Row = Sequence[Any]


@dataclass(frozen=True)
class TensorIndex:
    """A row for each tensor in file order, the tree of the object, and the metadata.

    The tree is None for a flat dict.
    """

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
        return {name: Spec(name, tuple(row[1]), row[0]) for name, row in self.rows.items()}

    @property
    def tree(self) -> Node:
        """The tree of the object, also of a flat dict."""
        if self.root is not None:
            return self.root
        return flat_tree([self.specs[name] for name in self.names])

    def start(self, name: str) -> int:
        """Return the offset of a tensor's first byte in the file."""
        return int(self.rows[name][2]) + self.data_start


def flat_tree(specs: Sequence[Spec]) -> Node:
    """Make the tree of a flat dict of tensors."""
    keys = tuple(Node("value", spec.name) for spec in specs)
    leaves = tuple(Node("tensor", number) for number in range(len(specs)))
    return Node("dict", None, keys, leaves)


def is_flat(root: Node, names: Sequence[str]) -> bool:
    """Check whether an object is a dict of tensors, each under its own name.

    Such an object needs no tree in a file.
    """
    if root.kind != "dict" or [key.value for key in root.keys] != list(names):
        return False
    leaves = [(child.kind, child.value) for child in root.children]
    return leaves == [("tensor", number) for number in range(len(names))]


def with_digests(index: TensorIndex, digests: Mapping[str, bytes]) -> TensorIndex:
    """Return `index` with the digests of the written tensors."""
    rows = {name: [*row[:3], digests[name].hex(), row[4]] for name, row in index.rows.items()}
    return TensorIndex(rows, index.root, index.metadata)


def index_text(index: TensorIndex) -> bytes:
    """Encode the index as JSON, whose length does not depend on the digests."""
    document = {"ft_index": 1, "metadata": index.metadata, "tensors": index.rows}
    if index.root is not None:
        document["tree"] = encode_node(index.root)
    return json.dumps(document, separators=(",", ":")).encode()


class _Footer(NamedTuple):
    data_start: int
    index_start: int
    file_bytes: int
    text_digest: bytes


def index_footer(text: bytes, data_start: int, index_start: int, file_bytes: int) -> bytes:
    """Make the footer after the JSON: offsets, file size and digest.

    A reader compares the footer with the file to see that nothing has moved.
    """
    digest = xxhash.xxh3_128_digest(text)
    fields = struct.pack(_FOOTER, _MAGIC, data_start, index_start, file_bytes, digest)
    return fields + xxhash.xxh3_64_digest(fields)


def read_index(raw: RawFile, end: int | None = None) -> TensorIndex | None:
    """Read the index whose footer ends at byte `end` (default: the end of the file).

    Returns None if there is no valid footer. Raises CorruptError when the index itself is damaged.
    """
    end = raw.size_bytes if end is None else end
    if end < FOOTER_BYTES:
        return None
    text_end = end - FOOTER_BYTES
    footer = _parse_footer(bytes(raw.bytes(text_end, FOOTER_BYTES)))
    if footer is None or footer.file_bytes != raw.size_bytes or footer.index_start > text_end:
        return None
    text = bytes(raw.bytes(footer.index_start, text_end - footer.index_start))
    return _parse_index(text, footer.text_digest, footer.data_start, raw.name)


def moved_index(data: bytes, source: str) -> TensorIndex:
    """Read the index from the bytes of its dataset, which another program has moved.

    The offsets in the index are invalid then. Raises CorruptError when the index is damaged, as the
    rest of the file may be.
    """
    footer = _parse_footer(data[-FOOTER_BYTES:])
    if footer is None:
        raise CorruptError(f"{source}: its index is damaged; use another copy of the file")
    return _parse_index(data[:-FOOTER_BYTES], footer.text_digest, 0, source)


def _parse_footer(data: bytes) -> _Footer | None:
    fields, digest = data[:-8], data[-8:]
    if len(data) != FOOTER_BYTES or xxhash.xxh3_64_digest(fields) != digest:
        return None
    magic, *values = struct.unpack(_FOOTER, fields)
    return _Footer(*values) if magic == _MAGIC else None


def _parse_index(text: bytes, digest: bytes, data_start: int, source: str) -> TensorIndex:
    """Parse the index in `text`, whose offsets count from `data_start`.

    Raises CorruptError, naming `source`.
    """
    if xxhash.xxh3_128_digest(text) != digest:
        raise CorruptError(
            f"{source}: its index is damaged (digest differs); use another copy of the file"
        )

    with damaged_input(f"{source}: its index"):
        document = json.loads(text)
        version = document["ft_index"]
        if version != 1:
            raise CorruptError(f"{source}: an index of version {version!r:.20}; upgrade ft_ckpt")
        root = decode_node(document["tree"]) if "tree" in document else None
        metadata = {str(key): str(value) for key, value in document["metadata"].items()}
        metadata.pop(TREE, None)
        index = TensorIndex(document["tensors"], root, metadata, data_start)
        check_index(index, source)

    return index


def check_index(index: TensorIndex, source: str) -> None:
    """Raise CorruptError if a row is invalid, or the tree refers to tensors that are not listed."""
    count = len(index.rows)
    numbers = sorted([row[4] for row in index.rows.values()])
    if numbers != list(range(count)):
        raise CorruptError(
            f"{source}: its index does not name each of {count} tensors once; use another copy"
        )

    malformed = [name for name, row in index.rows.items() if not _is_valid(row)]
    if malformed:
        where = listing(malformed, ", ")
    elif index.root is not None and _last_leaf(index.root) >= count:
        where = "the tree"
    else:
        return

    raise CorruptError(f"{source}: {where}: malformed in its index; use another copy of the file")


def _is_valid(row: Row) -> bool:
    dtype, shape, start, digest, *_ = row
    if dtype not in ITEM_BYTES or type(digest) is not str:
        return False
    numbers = [start, *shape]
    if any(type(number) is not int for number in numbers):
        return False
    return all(0 <= number < _MAX_NUMBER for number in numbers)


def _last_leaf(root: Node) -> int:
    """Return the highest number of a leaf in the tree, or -1 without leaves."""
    last = -1
    stack = [root]
    while stack:
        node = stack.pop()
        if node.kind == "tensor":
            last = max(last, node.value)
        elif node.kind in ("array", "blob"):
            last = max(last, node.value[0])
        stack += node.children
        if isinstance(node.value, Node):
            stack.append(node.value)
    return last
