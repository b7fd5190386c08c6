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

from ft_ckpt.extensions.hdf5.cerebras_writer import Content, describe_checkpoint
from ft_ckpt.extensions.hdf5.hdf5 import has_user_block
from ft_ckpt.extensions.hdf5.hdf5_layout import (
    index_dataset,
    index_rows,
    named_specs,
    placed_datasets,
)
from ft_ckpt.extensions.hdf5.hdf5_metadata import PAGE_BYTES, Dataset
from ft_ckpt.extensions.hdf5.hdf5_skeleton import hdf5_header
from ft_ckpt.formats import ITEM_BYTES, Layout, Spec
from ft_ckpt.formats.files import RawFile
from ft_ckpt.formats.index import FOOTER_BYTES, TensorIndex, flat_tree, index_footer, index_text
from ft_ckpt.formats.safetensors import (
    HELPER,
    NAMES,
    is_safetensors,
    lay_out_safetensors,
    tree_metadata,
)
from ft_ckpt.formats.trees import Node

_MAX_HELPER_BYTES = 1 << 40  # of the helper tensor; its digits make room for the true size


def lay_out_dual(
    specs: Sequence[Spec],
    metadata: Mapping[str, str],
    ties: Mapping[str, str] = MappingProxyType({}),
) -> Layout:
    """Lay out a dual file that contains `specs` as one flat dict, with `ties` in its metadata.

    Raises SelectionError for unsupported dtypes.
    """
    lay_out_safetensors(specs, {})  # raises for types that only HDF5 has
    content = describe_checkpoint(flat_tree(specs), specs)
    return _dual_layout(specs, content, None, {**metadata, **ties})


def lay_out_dual_tree(
    root: Node, leaves: Sequence[Spec], arrays: Sequence[int], native_floats: bool = False
) -> tuple[Layout, Sequence[str]]:
    """Lay out a dual file that contains the object `root`, and name its leaves in order.

    Raises SelectionError for unsupported dtypes.
    """
    content = describe_checkpoint(root, leaves, arrays, native_floats)
    specs = named_specs(content.names, leaves)
    lay_out_safetensors(specs, {})  # raises for types that only HDF5 has
    metadata = tree_metadata(root, content.names)
    return _dual_layout(specs, content, root, metadata), content.names


def _dual_layout(
    specs: Sequence[Spec], content: Content, root: Node | None, metadata: Mapping[str, str]
) -> Layout:
    # aligned, without gaps
    order = sorted(range(len(specs)), key=lambda number: -ITEM_BYTES[specs[number].dtype])
    *starts, end = accumulate((specs[number].size_bytes for number in order), initial=0)
    start_of = dict(zip(order, starts, strict=True))
    text = index_text(TensorIndex(index_rows(specs, order, starts, ""), root, metadata))
    index_bytes = len(text) + FOOTER_BYTES
    index_bytes += -index_bytes % PAGE_BYTES
    datasets = _datasets_behind(content.datasets, start_of, index_bytes)

    # The size of the HDF5 metadata depends on the user block, which contains the safetensors
    # header, which contains that size.
    widest = _safetensors_header(specs, start_of, _MAX_HELPER_BYTES, metadata)
    base = max(PAGE_BYTES, 1 << (len(widest) + 7).bit_length())
    middle = hdf5_header(datasets, content.attributes, base)
    data_start = base + len(middle) + index_bytes
    text = text.ljust(index_bytes - FOOTER_BYTES)
    text += index_footer(text, data_start, data_start - index_bytes, data_start + end)
    head = _safetensors_header(specs, start_of, len(middle) + index_bytes, metadata)
    header = (base - 8).to_bytes(8, "little") + head.ljust(base - 8) + middle + text
    return Layout(
        header,
        tuple(specs[number] for number in order),
        tuple(data_start + start for start in starts),
        data_start + end,
    )


def _datasets_behind(
    datasets: Sequence[Dataset], starts: Mapping[int, int], index_bytes: int
) -> list[Dataset]:
    """Return `datasets` behind the index, which begins and ends on a page, without gaps."""
    shifted = {number: index_bytes + start for number, start in starts.items()}
    placed = placed_datasets(datasets, shifted, lambda _size_bytes: 1)
    placed.append(index_dataset(index_bytes, 0, PAGE_BYTES))
    return placed


def _safetensors_header(
    specs: Sequence[Spec], starts: Mapping[int, int], middle_bytes: int, metadata: Mapping[str, str]
) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    header[HELPER] = {"dtype": "U8", "shape": [middle_bytes], "data_offsets": [0, middle_bytes]}
    for number, start in starts.items():
        spec = specs[number]
        first = middle_bytes + start
        header[spec.name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [first, first + spec.size_bytes],
        }
    return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()


def is_dual(file: RawFile) -> bool:
    """Check whether a file starts as safetensors and has an HDF5 superblock after a user block."""
    return is_safetensors(file) and has_user_block(file)
