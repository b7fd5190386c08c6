"""Opens safetensors and dual files, and lays out safetensors files of objects."""

import json
from collections.abc import Sequence
from dataclasses import replace

from ft_ckpt.errors import CorruptError, UnreadableError, damaged_input
from ft_ckpt.formats.files import RawFile
from ft_ckpt.formats.index import TREE, IndexedFile, TensorIndex, check_index, is_flat, read_index
from ft_ckpt.formats.layout import Layout, Spec
from ft_ckpt.formats.safetensors.header import (
    HELPER,
    SafetensorsHeader,
    lay_out_safetensors,
    parse_header,
)
from ft_ckpt.formats.tensor_format import TensorFormat
from ft_ckpt.formats.trees import Node, decode_node, encode_node, leaf_names
from ft_ckpt.storage import Store, etag_of
from ft_ckpt.storage.digests import FileRecord


def lay_out_safetensors_object(root: Node, leaves: Sequence[Spec]) -> tuple[Layout, Sequence[str]]:
    """Lay out a file that holds the object `root`; return the layout and the name of each leaf."""
    names = leaf_names(root, len(leaves))
    specs = [Spec(name, leaf.shape, leaf.dtype) for name, leaf in zip(names, leaves, strict=True)]
    return lay_out_safetensors(specs, tree_metadata(root, names)), names


def tree_metadata(root: Node, names: Sequence[str]) -> dict[str, str]:
    """Return the tree of `root` as the metadata of a file; {} for a flat dict, which needs none."""
    if is_flat(root, names):
        return {}
    return {TREE: json.dumps([list(names), encode_node(root)])}


def is_safetensors(file: RawFile) -> bool:
    """Check whether the file begins as safetensors does: a length, and a header of JSON."""
    return file.size_bytes > 8 and file.bytes(8, 1) == b"{"


def open_safetensors(raw: RawFile, verify: bool = False) -> IndexedFile:
    """Open a safetensors or dual file, without the helper tensor of a dual file.

    Raises CorruptError when the header is invalid.
    """
    try:
        with damaged_input("its header"):
            header = parse_header(raw.bytes, raw.size_bytes)
            index = _header_index(header)
            check_index(index, "its header")
    except UnreadableError:
        raise
    except CorruptError as error:
        raise CorruptError(
            f"{raw.name}: not a whole safetensors file ({error}); use another copy"
        ) from error

    helper = header.tensors.get(HELPER)
    hdf5_index = read_index(raw, helper.end) if helper is not None else None
    if hdf5_index is None:
        return IndexedFile(raw, index, verify)
    if not _are_equal(index, hdf5_index):
        raise CorruptError(
            f"{raw.name}: its two tables of tensors differ; use another copy of the file"
        )

    return IndexedFile(raw, hdf5_index, verify)


def _are_equal(index: TensorIndex, hdf5_index: TensorIndex) -> bool:
    if index.specs != hdf5_index.specs:
        return False
    return all(index.start(name) == hdf5_index.start(name) for name in index.rows)


def _header_index(header: SafetensorsHeader) -> TensorIndex:
    """Make an index without digests from the header."""
    tensors = {name: entry for name, entry in header.tensors.items() if name != HELPER}
    names, metadata, root = list(tensors), dict(header.metadata), None
    if TREE in metadata:
        names, tree = json.loads(metadata.pop(TREE))
        root = decode_node(tree)
    numbers = {name: number for number, name in enumerate(names)}
    rows = {
        name: [entry.dtype, entry.shape, entry.start, "", numbers[name]]
        for name, entry in tensors.items()
    }
    return TensorIndex(rows, root, metadata)


def link_second_names(
    tensor_format: TensorFormat, written: Sequence[FileRecord], store: Store
) -> list[FileRecord]:
    """Link files in `store` under the second name of their format, if it has one.

    Returns the records of the links, which are none in a store without links.
    """
    if not tensor_format.link_suffix:
        return []
    links = []
    for record in written:
        stem = record.path.removesuffix(tensor_format.suffixes[0])
        second = stem + tensor_format.link_suffix
        if store.copy(record.path, second):
            links.append(replace(record, path=second, etag=etag_of(store, second)))
    return links
