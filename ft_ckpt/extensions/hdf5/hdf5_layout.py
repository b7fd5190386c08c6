"""Layout of HDF5 files that can be mapped: all metadata, then the tensors, then an index.

   superblock and metadata | to a page | large tensors, each on a page | small ones, each on 64
   bytes | index

The file is a Cerebras checkpoint of format 0.5, and every HDF5 tool lists it. The index is a
dataset of bytes at the end of the file: JSON (metadata, tree of the object, and for each tensor
dtype, shape, offset and xxh3-128 digest) and a footer of 64 bytes. ft_ckpt uses the HDF5 library to
read it only if there is no index, or if the footer shows that another program has moved the data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.extensions.hdf5.cerebras_types import INDEX, STORABLE_DTYPES
from ft_ckpt.extensions.hdf5.cerebras_writer import Content, describe_checkpoint
from ft_ckpt.extensions.hdf5.hdf5_metadata import PAGE_BYTES, Dataset
from ft_ckpt.extensions.hdf5.hdf5_skeleton import dataset_bytes, hdf5_header
from ft_ckpt.formats import Layout, Spec
from ft_ckpt.formats.files import MAP_BYTES
from ft_ckpt.formats.index import (
    FOOTER_BYTES,
    NO_DIGEST,
    Row,
    TensorIndex,
    flat_tree,
    index_footer,
    index_text,
    is_flat,
    with_digests,
)
from ft_ckpt.formats.trees import Node

_SMALL_STEP = 64


def lay_out_hdf5(
    specs: Sequence[Spec],
    metadata: Mapping[str, str],
    ties: Mapping[str, str] = MappingProxyType({}),
) -> Layout:
    """Lay out a file that contains `specs` as one flat dict, with tied tensors under each name.

    `ties` maps an alias to the stored name; with ties, `metadata` is not stored. Raises
    SelectionError for unsupported dtypes.
    """
    unsupported = [
        f"{spec.name}: {spec.dtype}" for spec in specs if spec.dtype not in STORABLE_DTYPES
    ]
    if unsupported:
        raise SelectionError(f"{listing(unsupported, ', ')}: not a type of HDF5 files; convert it")
    if not ties:
        content = describe_checkpoint(flat_tree(specs), specs)
        return _hdf5_layout(specs, content, None, dict(metadata))

    numbers = {spec.name: number for number, spec in enumerate(specs)}
    for alias, stored_name in ties.items():
        numbers[alias] = numbers[stored_name]
    keys = tuple(Node("value", name) for name in numbers)
    leaves = tuple(Node("tensor", number) for number in numbers.values())
    layout, _ = lay_out_hdf5_tree(Node("dict", None, keys, leaves), specs, ())
    return layout


def lay_out_hdf5_tree(
    root: Node, leaves: Sequence[Spec], arrays: Sequence[int], native_floats: bool = False
) -> tuple[Layout, Sequence[str]]:
    """Lay out a file that contains the object `root`, and name its leaves in order."""
    content = describe_checkpoint(root, leaves, arrays, native_floats)
    specs = named_specs(content.names, leaves)
    stored_root = None if is_flat(root, content.names) else root
    return _hdf5_layout(specs, content, stored_root, {}), content.names


def named_specs(names: Sequence[str], leaves: Sequence[Spec]) -> list[Spec]:
    """Return the specs of `leaves` with their names."""
    pairs = zip(names, leaves, strict=True)
    return [Spec(name, leaf.shape, leaf.dtype) for name, leaf in pairs]


def index_rows(
    specs: Sequence[Spec], order: Sequence[int], starts: Sequence[int], digest: str
) -> dict[str, Row]:
    """Return the index rows of `specs`, in file order, all with the same `digest`."""
    rows: dict[str, Row] = {}
    for number, start in zip(order, starts, strict=True):
        spec = specs[number]
        rows[spec.name] = [spec.dtype, spec.shape, start, digest, number]
    return rows


def _alignment_of(size_bytes: int) -> int:
    return PAGE_BYTES if size_bytes >= MAP_BYTES else _SMALL_STEP


def _place_tensors(specs: Sequence[Spec]) -> tuple[list[int], list[int], int]:
    """Place `specs` in the file: their order by number, their offsets, and the end of the last."""
    large = [number for number, spec in enumerate(specs) if spec.size_bytes >= MAP_BYTES]
    small = [number for number, spec in enumerate(specs) if spec.size_bytes < MAP_BYTES]
    order = large + small
    starts = []
    end = 0
    for number in order:
        size_bytes = specs[number].size_bytes
        start = end + -end % _alignment_of(size_bytes)
        starts.append(start)
        end = start + size_bytes
    return order, starts, end


def _hdf5_layout(
    specs: Sequence[Spec], content: Content, root: Node | None, metadata: Mapping[str, str]
) -> Layout:
    order, starts, end = _place_tensors(specs)
    index = TensorIndex(index_rows(specs, order, starts, NO_DIGEST), root, metadata)
    index_start = end + -end % _SMALL_STEP
    index_bytes = len(index_text(index)) + FOOTER_BYTES
    by_leaf = dict(zip(order, starts, strict=True))
    datasets = placed_datasets(content.datasets, by_leaf, _alignment_of)
    datasets.append(index_dataset(index_bytes, index_start, _SMALL_STEP))
    header = hdf5_header(datasets, content.attributes)
    data_start = len(header)
    size_bytes = data_start + index_start + index_bytes

    def make_trailer(digests: Mapping[str, bytes]) -> bytes:
        text = index_text(with_digests(index, digests))
        return text + index_footer(text, data_start, data_start + index_start, size_bytes)

    return Layout(
        header,
        tuple(specs[number] for number in order),
        tuple(data_start + start for start in starts),
        size_bytes,
        data_start + index_start,
        make_trailer,
    )


def placed_datasets(
    datasets: Sequence[Dataset], starts: Mapping[int, int], alignment_of: Callable[[int], int]
) -> list[Dataset]:
    """Return `datasets` with the offsets of their bytes, by number, aligned for their size.

    Datasets without bytes stay as they are.
    """
    placed = []
    for number, dataset in enumerate(datasets):
        size_bytes = dataset_bytes(dataset)
        if number in starts and size_bytes:
            dataset = replace(dataset, start=starts[number], alignment=alignment_of(size_bytes))
        placed.append(dataset)
    return placed


def index_dataset(size_bytes: int, start: int, alignment: int) -> Dataset:
    """Return the dataset of the index."""
    return Dataset((INDEX,), "u1", (size_bytes,), {}, start, alignment)
