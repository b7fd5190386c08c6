"""The dual file: valid safetensors and valid HDF5 at once.

    safetensors length and header, padded to a power of two | HDF5 metadata, our index | tensors
    without gaps

HDF5 allows a user block of 512 * 2**n bytes before its superblock, which contains the safetensors
header. For safetensors, the HDF5 metadata are one helper tensor of bytes, because in that format
every byte after the header belongs to exactly one tensor. They cannot be in the header: the
superblock's signature has bytes that JSON forbids.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any

from ft_ckpt.extensions.hdf5 import cerebras, hdf5_layout
from ft_ckpt.extensions.hdf5.hdf5 import has_user_block
from ft_ckpt.extensions.hdf5.hdf5_metadata import PAGE_BYTES, Dataset
from ft_ckpt.extensions.hdf5.hdf5_skeleton import hdf5_header
from ft_ckpt.formats import (
    HELPER,
    ITEM_BYTES,
    NAMES,
    Layout,
    Node,
    RawFile,
    Spec,
    is_safetensors,
    lay_out_safetensors,
    tensor_file,
    tree_metadata,
)

_MAX_HELPER_BYTES = 1 << 40  # of the helper tensor; its digits make room for the true size


def lay_out_dual(
    specs: Sequence[Spec],
    metadata: Mapping[str, str],
    ties: Mapping[str, str] = MappingProxyType({}),
) -> Layout:
    """The layout of a dual file that contains `specs` as one flat dict, with `ties` in its
    metadata.

    Raises SelectionError for unsupported dtypes.
    """
    lay_out_safetensors(specs, {})  # raises for types that only HDF5 has
    content = cerebras.describe_checkpoint(tensor_file.flat_tree(specs), specs)
    return _dual_layout(specs, content, None, {**metadata, **ties})


def lay_out_dual_tree(
    root: Node, leaves: Sequence[Spec], arrays: Sequence[int], native_floats: bool = False
) -> tuple[Layout, Sequence[str]]:
    """The layout of a dual file that contains the object `root`, and the names of its leaves, in
    order.

    Raises SelectionError for unsupported dtypes.
    """
    content = cerebras.describe_checkpoint(root, leaves, arrays, native_floats)
    specs = [
        Spec(name, leaf.shape, leaf.dtype) for name, leaf in zip(content.names, leaves, strict=True)
    ]
    lay_out_safetensors(specs, {})
    return _dual_layout(specs, content, root, tree_metadata(root, content.names)), content.names


def _dual_layout(
    specs: Sequence[Spec], content: cerebras.Content, root: Node | None, metadata: Mapping[str, str]
) -> Layout:
    # aligned, without gaps
    order = sorted(range(len(specs)), key=lambda leaf: -ITEM_BYTES[specs[leaf].dtype])
    *starts, end = accumulate((specs[leaf].size_bytes for leaf in order), initial=0)
    by_leaf = dict(zip(order, starts, strict=True))
    rows = hdf5_layout.index_rows(specs, order, starts, "")
    text = tensor_file.index_text(tensor_file.TensorIndex(rows, root, metadata))
    index_bytes = len(text) + tensor_file.FOOTER_BYTES
    index_bytes += -index_bytes % PAGE_BYTES
    datasets = _placed_datasets(content.datasets, by_leaf, index_bytes)
    widest = _safetensors_header(specs, by_leaf, _MAX_HELPER_BYTES, metadata)
    base = max(PAGE_BYTES, 1 << (len(widest) + 7).bit_length())
    middle = hdf5_header(datasets, content.attributes, base)
    data_start = base + len(middle) + index_bytes
    text = text.ljust(index_bytes - tensor_file.FOOTER_BYTES)
    text += tensor_file.index_footer(text, data_start, data_start - index_bytes, data_start + end)
    head = _safetensors_header(specs, by_leaf, len(middle) + index_bytes, metadata)
    header = (base - 8).to_bytes(8, "little") + head.ljust(base - 8) + middle + text
    ordered = tuple(specs[leaf] for leaf in order)
    return Layout(header, ordered, tuple(data_start + start for start in starts), data_start + end)


def _placed_datasets(
    datasets: Sequence[Dataset],
    starts: Mapping[int, int],
    index_bytes: int,
) -> list[Dataset]:
    """`datasets` behind the index, which begins and ends on a page; there are no gaps."""
    behind = {leaf: index_bytes + start for leaf, start in starts.items()}
    placed = hdf5_layout.placed_datasets(datasets, behind, lambda _size_bytes: 1)
    placed.append(hdf5_layout.index_dataset(index_bytes, 0, PAGE_BYTES))
    return placed


def _safetensors_header(
    specs: Sequence[Spec], starts: Mapping[int, int], middle_bytes: int, metadata: Mapping[str, str]
) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    header[HELPER] = {"dtype": "U8", "shape": [middle_bytes], "data_offsets": [0, middle_bytes]}
    for leaf, start in starts.items():
        spec = specs[leaf]
        offsets = [middle_bytes + start, middle_bytes + start + spec.size_bytes]
        header[spec.name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": offsets,
        }
    return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()


def is_dual(file: RawFile) -> bool:
    """True when the file starts as safetensors and has an HDF5 superblock after a user block."""
    return is_safetensors(file) and has_user_block(file)
