"""The dual file: valid safetensors and valid HDF5 at once.

    safetensors length and header, padded to a power of two | HDF5 metadata, our index | tensors without gaps

HDF5 allows a user block of 512 * 2**n bytes before its superblock, which contains the safetensors header. For
safetensors, the HDF5 metadata are one helper tensor of bytes, because in that format every byte after the header
belongs to exactly one tensor. They cannot be in the header: the superblock's signature has bytes that JSON forbids.
"""

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ft_ckpt.formats import cerebras, hdf5_layout, tensor_file
from ft_ckpt.formats import hdf5_metadata as hdf5_bytes
from ft_ckpt.formats.hdf5 import has_user_block
from ft_ckpt.formats.layout import ITEM_BYTES, Layout, Spec
from ft_ckpt.formats.pytree import Node
from ft_ckpt.formats.safetensors import HELPER, NAMES, lay_out_safetensors
from ft_ckpt.formats.safetensors_file import is_safetensors, tree_metadata
from ft_ckpt.formats.tensor_file import RawFile


def lay_out_dual(
    specs: Sequence[Spec], metadata: Mapping[str, str], ties: Mapping[str, str] = MappingProxyType({})
) -> Layout:
    """The layout of a dual file that holds `specs` as one flat dict, its `ties` in the metadata.

    Raises SelectionError for types it cannot keep.
    """
    lay_out_safetensors(specs, {})  # raises for types that only HDF5 has
    content = cerebras.describe_checkpoint(tensor_file.flat_tree(specs), specs)
    return _dual_layout(specs, content, None, {**metadata, **ties})


def lay_out_dual_tree(
    root: Node, leaves: Sequence[Spec], arrays: Sequence[int], native_floats: bool = False
) -> tuple[Layout, Sequence[str]]:
    """The layout of a dual file that holds the object `root`, and the name of each leaf in it."""
    content = cerebras.describe_checkpoint(root, leaves, arrays, native_floats)
    specs = [Spec(name, leaf.shape, leaf.dtype) for name, leaf in zip(content.names, leaves, strict=True)]
    lay_out_safetensors(specs, {})
    return _dual_layout(specs, content, root, tree_metadata(root, content.names)), content.names


def _dual_layout(
    specs: Sequence[Spec], content: cerebras.Content, root: Node | None, metadata: Mapping[str, str]
) -> Layout:
    order = sorted(range(len(specs)), key=lambda leaf: -ITEM_BYTES[specs[leaf].dtype])  # no gaps, yet all aligned
    starts, at = [], 0
    for leaf in order:
        starts.append(at)
        at += specs[leaf].size_bytes
    by_leaf = dict(zip(order, starts, strict=True))
    text = tensor_file.index_text(
        tensor_file.TensorIndex(hdf5_layout.index_rows(specs, order, starts, ""), root, metadata)
    )
    datasets = hdf5_layout.placed_datasets(content.datasets, by_leaf)
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
    datasets: Sequence[hdf5_bytes.Dataset], content: cerebras.Content, text: bytes, data_bytes: int, base: int
) -> bytes:
    """The HDF5 metadata and the index, up to the first tensor."""
    room = len(text) + tensor_file.FOOTER_BYTES
    page = room + -room % hdf5_bytes.PAGE_BYTES
    moved = [
        hdf5_bytes.Dataset(item.path, item.type, item.shape, item.attributes, item.start + page)
        if item.start is not None
        else item
        for item in datasets
    ]
    moved.append(hdf5_layout.index_dataset(room, page - room))
    bare = hdf5_bytes.hdf5_header(moved, content.attributes, page + data_bytes, base)
    data_start = base + len(bare) + page
    end = tensor_file.index_footer(text, data_start, data_start - room, data_start + data_bytes)
    return bare + bytes(page - room) + text + end


def _dual_header(
    specs: Sequence[Spec], starts: Mapping[int, int], middle_bytes: int, metadata: Mapping[str, str]
) -> bytes:
    head: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    head[HELPER] = {"dtype": "U8", "shape": [middle_bytes], "data_offsets": [0, middle_bytes]}
    for leaf, start in starts.items():
        spec = specs[leaf]
        places = [middle_bytes + start, middle_bytes + start + spec.size_bytes]
        head[spec.name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": places}
    return json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode()


def is_dual(file: RawFile) -> bool:
    """Whether the file begins as safetensors and goes on as HDF5."""
    return is_safetensors(file) and has_user_block(file)
