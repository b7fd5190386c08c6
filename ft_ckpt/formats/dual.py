"""Safetensors files as we read them, and the dual file: valid safetensors and valid HDF5 at once.

    safetensors length and header, padded to a power of two | HDF5 metadata, our index | tensors without gaps

HDF5 allows a user block of 512 * 2**n bytes ahead of its superblock: that is where the safetensors header is. For
safetensors, all of the HDF5 metadata is one helper tensor of bytes, since that format allows no byte outside tensors.
There is no way without it: the superblock's signature has bytes that JSON forbids, so it cannot lie in the header,
and every byte after the header belongs to exactly one tensor.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ft_ckpt.errors import CorruptError, UnreadableError, damaged_input
from ft_ckpt.formats import safetensors
from ft_ckpt.formats.hdf5 import cerebras_write, hdf5_file
from ft_ckpt.formats.hdf5 import index as hdf5_index
from ft_ckpt.formats.hdf5 import metadata as hdf5_bytes
from ft_ckpt.formats.layout import ITEM_BYTES, Layout, Spec, checked_sizes
from ft_ckpt.formats.mapped_file import RawFile
from ft_ckpt.formats.pytree import Node
from ft_ckpt.formats.pytree_json import decode_node, encode_node

# What `from_pretrained` drops in silence: names with "rotary_emb.inv_freq" where the model has rotary embeddings, and
# those that end in ".position_ids" where it has position ids. Elsewhere it is listed as unexpected, and ignored.
HELPER = "__hdf5__.rotary_emb.inv_freq.position_ids"
TREE = "ft_ckpt_tree"  # key of the safetensors metadata that holds the tree of an object that is no flat dict
_MOST_HEADER_BYTES = 100_000_000  # what the safetensors library takes
_NAMES = {stored: name for name, stored in safetensors.NAMES.items()}


def lay_out_dual(specs: Sequence[Spec], metadata: Mapping[str, str], native_floats: bool = False) -> Layout:
    """The layout of a dual file that holds `specs` as one flat dict. Raises SelectionError for types it cannot keep."""
    safetensors.lay_out_safetensors(specs, {})  # for its refusals: it has fewer types than HDF5
    content = cerebras_write.describe_checkpoint(hdf5_index.flat_tree(specs), specs, native_floats=native_floats)
    return _dual_layout(specs, content, None, metadata)


def lay_out_dual_tree(
    root: Node, leaves: Sequence[Spec], arrays: Sequence[int], native_floats: bool = False
) -> tuple[Layout, Sequence[str]]:
    """The layout of a dual file that holds the object `root`, and the name of each leaf in it."""
    content = cerebras_write.describe_checkpoint(root, leaves, arrays, native_floats)
    specs = [Spec(name, leaf.shape, leaf.dtype) for name, leaf in zip(content.names, leaves, strict=True)]
    safetensors.lay_out_safetensors(specs, {})
    metadata = (
        {} if hdf5_index.is_flat(root, content.names) else {TREE: json.dumps([list(content.names), encode_node(root)])}
    )
    return _dual_layout(specs, content, root, metadata), content.names


def _dual_layout(
    specs: Sequence[Spec], content: cerebras_write.Content, root: Node | None, metadata: Mapping[str, str]
) -> Layout:
    order = sorted(range(len(specs)), key=lambda leaf: -ITEM_BYTES[specs[leaf].dtype])  # no gaps, yet all aligned
    starts, at = [], 0
    for leaf in order:
        starts.append(at)
        at += specs[leaf].size_bytes
    by_leaf = dict(zip(order, starts, strict=True))
    text = hdf5_index.index_text(hdf5_index.TensorIndex(hdf5_file.index_rows(specs, order, starts, ""), root, metadata))
    datasets = hdf5_file.placed_datasets(content.datasets, by_leaf)
    base = 512
    while True:  # the header counts the bytes of the metadata, whose padding depends on where the header ends
        middle = _hdf5_half(datasets, content, text, at, base)
        head = _dual_header(specs, by_leaf, len(middle), metadata)
        if len(head) <= base - 8:
            break
        base = max(2 * base, 1 << (len(head) + 7).bit_length())
    header = (base - 8).to_bytes(8, "little") + head + b" " * (base - 8 - len(head)) + middle
    return Layout(header, tuple(specs[leaf] for leaf in order),
                  tuple(len(header) + start for start in starts), len(header) + at)  # fmt: skip


def _hdf5_half(
    datasets: Sequence[hdf5_bytes.Dataset], content: cerebras_write.Content, text: bytes, data_bytes: int, base: int
) -> bytes:
    """The HDF5 metadata and the index, up to the first tensor."""
    room = len(text) + hdf5_index.FOOTER_BYTES
    page = room + -room % hdf5_bytes.PAGE_BYTES
    moved = [
        hdf5_bytes.Dataset(item.path, item.type, item.shape, item.attributes, item.start + page)
        if item.start is not None
        else item
        for item in datasets
    ]
    moved.append(hdf5_file.index_dataset(room, page - room))
    bare = hdf5_bytes.hdf5_header(moved, content.attributes, page + data_bytes, base)
    data_start = base + len(bare) + page
    end = hdf5_index.index_footer(text, data_start, data_start - room, data_start + data_bytes)
    return bare + bytes(page - room) + text + end


def _dual_header(
    specs: Sequence[Spec], starts: Mapping[int, int], middle_bytes: int, metadata: Mapping[str, str]
) -> bytes:
    head: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    head[HELPER] = {"dtype": "U8", "shape": [middle_bytes], "data_offsets": [0, middle_bytes]}
    for leaf, start in starts.items():
        spec = specs[leaf]
        places = [middle_bytes + start, middle_bytes + start + spec.size_bytes]
        head[spec.name] = {"dtype": safetensors.NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": places}
    return json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()


def lay_out_safetensors_object(root: Node, leaves: Sequence[Spec]) -> tuple[Layout, Sequence[str]]:
    """A plain safetensors file that holds the object `root`, its tree in the metadata unless it is a flat dict."""
    names = cerebras_write.leaf_names(root, len(leaves))
    specs = [Spec(name, leaf.shape, leaf.dtype) for name, leaf in zip(names, leaves, strict=True)]
    return safetensors.lay_out_safetensors(specs, _tree_metadata(root, names)), names


def _tree_metadata(root: Node, names: Sequence[str]) -> dict[str, str]:
    """What the metadata say of an object: its tree, unless it is a flat dict."""
    return {} if hdf5_index.is_flat(root, names) else {TREE: json.dumps([list(names), encode_node(root)])}


class SafetensorsFile(hdf5_file.IndexedFile):
    """An open safetensors file; the helper tensor of a dual file is not among its `specs`."""


def open_safetensors(path: Path, mapped: bool = True, verify: bool = False) -> SafetensorsFile:
    """Open a safetensors file, dual or not. Raises CorruptError when its header is not sound."""
    raw = RawFile(path, mapped)
    try:
        with damaged_input("its header"):
            index, helper_end = _parse_header(raw)
            hdf5_index.check_index(index, "its header")
    except UnreadableError:
        raise
    except CorruptError as error:
        raise CorruptError(f"{path.name}: not a whole safetensors file ({error}); use another copy") from error
    other = hdf5_index.read_index(raw, helper_end) if helper_end else None
    if other is not None and _tables_differ(index, other):
        raise CorruptError(f"{path.name}: its two tables of tensors differ; use another copy of the file")
    return SafetensorsFile(raw, other or index, verify)


def _tables_differ(one: hdf5_index.TensorIndex, other: hdf5_index.TensorIndex) -> bool:
    places = [{name: index.start(name) for name in index.rows} for index in (one, other)]
    return one.specs != other.specs or places[0] != places[1]


def _parse_header(raw: RawFile) -> tuple[hdf5_index.TensorIndex, int]:
    """What the header says, and the end of the HDF5 half (0: none). Raises ValueError and its like."""
    length = int.from_bytes(raw.bytes(0, 8), "little")
    if length > min(_MOST_HEADER_BYTES, raw.size_bytes - 8):
        raise CorruptError(f"a header of {length} bytes")
    head = json.loads(bytes(raw.bytes(8, length)))
    metadata = {str(key): str(value) for key, value in head.pop("__metadata__", {}).items()}
    specs, starts, at, helper_end = {}, {}, 8 + length, 0
    for name, row in sorted(head.items(), key=lambda item: item[1]["data_offsets"]):
        spec = Spec(name, checked_sizes(row["shape"]), _NAMES[row["dtype"]])
        start, end = checked_sizes(row["data_offsets"])
        if (
            8 + length + start != at
            or end - start != spec.size_bytes
            or min(spec.shape, default=0) < 0
            or type(start) is not int
        ):
            raise CorruptError(f"{name}: bytes {start} to {end}")
        specs[name], starts[name], at = spec, at, at + spec.size_bytes
        helper_end = at if name == HELPER else helper_end
    if at != raw.size_bytes:
        raise CorruptError(f"{raw.size_bytes} bytes, {at} in its table")
    ordered = [name for name in head if name != HELPER]
    names, root = ordered, None
    if TREE in metadata:
        names, tree = json.loads(metadata.pop(TREE))
        root = decode_node(tree)
    leaves = {name: leaf for leaf, name in enumerate(names)}
    rows = {name: [specs[name].dtype, specs[name].shape, starts[name], "", leaves[name]] for name in ordered}
    return hdf5_index.TensorIndex(rows, root, metadata), helper_end
