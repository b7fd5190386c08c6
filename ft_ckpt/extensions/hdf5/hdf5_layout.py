"""Lays out HDF5 files that can be mapped: all metadata first, then the tensors, then an index with
their digests.

    superblock and metadata | to a page | large tensors, each on a page | small ones, each on 64
    bytes | index

The file is a Cerebras checkpoint of format 0.5, and every HDF5 tool lists it. The index is a
dataset of bytes at the end of the file: JSON (metadata, tree of the object, and for each tensor
dtype, shape, offset and xxh3-128 digest) and a footer of 64 bytes. Our reader uses the HDF5 library
only if there is no index, or if the footer shows that another program has moved the data since.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.extensions.hdf5 import cerebras
from ft_ckpt.extensions.hdf5.hdf5_metadata import PAGE_BYTES, Dataset
from ft_ckpt.extensions.hdf5.hdf5_skeleton import dataset_bytes, hdf5_header
from ft_ckpt.formats import (
    FOOTER_BYTES,
    MAP_BYTES,
    NO_DIGEST,
    Layout,
    Node,
    Row,
    Spec,
    TensorIndex,
    flat_tree,
    index_footer,
    index_text,
    is_flat,
    with_digests,
)

_SMALL_STEP = 64


def lay_out_hdf5(
    specs: Sequence[Spec],
    metadata: Mapping[str, str],
    ties: Mapping[str, str] = MappingProxyType({}),
) -> Layout:
    """The layout of a file that contains `specs` as one flat dict, tied tensors under each of their
    names.

    `ties`: alias to stored name; with ties, `metadata` is not stored. Raises SelectionError for
    unsupported dtypes.
    """
    unsupported = [
        f"{spec.name}: {spec.dtype}" for spec in specs if spec.dtype not in cerebras.DTYPES
    ]
    if unsupported:
        raise SelectionError(f"{listing(unsupported, ', ')}: not a type of HDF5 files; convert it")
    if not ties:
        return _hdf5_layout(
            specs, cerebras.describe_checkpoint(flat_tree(specs), specs), None, dict(metadata)
        )
    leaves = {spec.name: leaf for leaf, spec in enumerate(specs)}
    leaves |= {alias: leaves[stored] for alias, stored in ties.items()}
    keys = tuple(Node("value", name) for name in leaves)
    root = Node("dict", None, keys, tuple(Node("tensor", leaf) for leaf in leaves.values()))
    return lay_out_hdf5_tree(root, specs, ())[0]


def lay_out_hdf5_tree(
    root: Node, leaves: Sequence[Spec], arrays: Sequence[int], native_floats: bool = False
) -> tuple[Layout, Sequence[str]]:
    """The layout of a file that contains the object `root`, and the names of its leaves, in
    order.
    """
    content = cerebras.describe_checkpoint(root, leaves, arrays, native_floats)
    specs = [
        Spec(name, leaf.shape, leaf.dtype) for name, leaf in zip(content.names, leaves, strict=True)
    ]
    return _hdf5_layout(
        specs, content, None if is_flat(root, content.names) else root, {}
    ), content.names


def index_rows(
    specs: Sequence[Spec], order: Sequence[int], starts: Sequence[int], digest: str
) -> dict[str, Row]:
    """The index rows of `specs`, in file order, all with the same `digest`."""
    return {
        specs[leaf].name: [specs[leaf].dtype, specs[leaf].shape, start, digest, leaf]
        for leaf, start in zip(order, starts, strict=True)
    }


def _alignment_of(size_bytes: int) -> int:
    return PAGE_BYTES if size_bytes >= MAP_BYTES else _SMALL_STEP


def _place_tensors(specs: Sequence[Spec]) -> tuple[list[int], list[int], int]:
    """The order of `specs` in the file as indexes, their offsets in that order, and the end of the
    last.
    """
    large = [index for index, spec in enumerate(specs) if spec.size_bytes >= MAP_BYTES]
    small = [index for index, spec in enumerate(specs) if spec.size_bytes < MAP_BYTES]
    starts, at = [], 0
    for index in large + small:
        at += -at % _alignment_of(specs[index].size_bytes)
        starts.append(at)
        at += specs[index].size_bytes
    return large + small, starts, at


def _hdf5_layout(
    specs: Sequence[Spec], content: cerebras.Content, root: Node | None, metadata: Mapping[str, str]
) -> Layout:
    order, starts, end = _place_tensors(specs)
    index = TensorIndex(index_rows(specs, order, starts, NO_DIGEST), root, metadata)
    index_start = end + -end % _SMALL_STEP
    index_bytes = len(index_text(index)) + FOOTER_BYTES
    by_leaf = dict(zip(order, starts, strict=True))
    datasets = placed_datasets(content.datasets, by_leaf, _alignment_of)
    datasets.append(index_dataset(index_bytes, index_start, _SMALL_STEP))
    header = hdf5_header(datasets, content.attributes)
    data_start, size_bytes = len(header), len(header) + index_start + index_bytes

    def make_trailer(digests: Mapping[str, bytes]) -> bytes:
        text = index_text(with_digests(index, digests))
        return text + index_footer(text, data_start, data_start + index_start, size_bytes)

    ordered = tuple(specs[leaf] for leaf in order)
    return Layout(
        header,
        ordered,
        tuple(data_start + start for start in starts),
        size_bytes,
        data_start + index_start,
        make_trailer,
    )


def placed_datasets(
    datasets: Sequence[Dataset], starts: Mapping[int, int], alignment_of: Callable[[int], int]
) -> list[Dataset]:
    """`datasets` with the offsets of their bytes, by number, and the alignment for their size.

    Those without bytes stay as they are.
    """
    placed = []
    for number, dataset in enumerate(datasets):
        size_bytes = dataset_bytes(dataset)
        if number in starts and size_bytes:
            dataset = replace(dataset, start=starts[number], alignment=alignment_of(size_bytes))
        placed.append(dataset)
    return placed


def index_dataset(size_bytes: int, start: int, alignment: int) -> Dataset:
    """The dataset of the index."""
    return Dataset((cerebras.INDEX,), "u1", (size_bytes,), {}, start, alignment)
