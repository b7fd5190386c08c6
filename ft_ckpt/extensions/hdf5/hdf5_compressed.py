"""Writes compressed HDF5 files: gzip, which every reader of HDF5 has, in chunks of about 1 MiB.

Threads compress the chunks, and h5py writes them. Like an uncompressed file, the file is a
checkpoint of Cerebras's format with an index. The offsets of the chunks are in the metadata of
HDF5, not in the index.
"""

import math
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from h5py import h5d, h5s

from ft_ckpt.extensions.hdf5.cerebras_writer import describe_checkpoint
from ft_ckpt.extensions.hdf5.hdf5_layout import index_dataset, index_rows, named_specs
from ft_ckpt.extensions.hdf5.hdf5_metadata import Attribute, Dataset
from ft_ckpt.extensions.hdf5.hdf5_skeleton import (
    GZIP_LEVEL,
    create_objects,
    created_file,
    dataset_bytes,
    encoded_path,
    hdf5_type,
)
from ft_ckpt.formats import Spec, ceil_div
from ft_ckpt.formats.index import (
    FOOTER_BYTES,
    NO_DIGEST,
    TensorIndex,
    index_footer,
    index_text,
    is_flat,
    with_digests,
)
from ft_ckpt.formats.trees import Node
from ft_ckpt.storage.places import LibraryFile

Bytes = npt.NDArray[np.uint8]
_CHUNK_BYTES = 1 << 20  # limit; the default size of the HDF5 library's chunk cache
_MIN_BYTES = 4096  # smaller tensors stay uncompressed: an index of their chunks costs more
_MAX_THREADS = 16
_DATASET_BYTES, _CHUNK_METADATA_BYTES = 8192, 1024  # upper bounds, besides the values


def write_compressed(
    path: Path,
    root: Node,
    leaves: Sequence[Spec],
    arrays: Sequence[int],
    native_floats: bool,
    values_of: Callable[[int], Bytes],
) -> None:
    """Write a new file `path` that contains the object `root`.

    `values_of` returns the bytes of a leaf by number. Raises OSError when the disk fails, or has no
    room for the file with its tensors uncompressed.
    """
    content = describe_checkpoint(root, leaves, arrays, native_floats)
    index = _index_without_digests(root, leaves, content.names)
    index_bytes = len(index_text(index)) + FOOTER_BYTES
    datasets = [replace(dataset, chunk=_chunk_shape(dataset)) for dataset in content.datasets]
    datasets.append(index_dataset(index_bytes, 0, 1))
    with LibraryFile(path, _max_bytes(datasets, content.attributes)) as file:
        try:
            with created_file(file) as library:
                create_objects(library, datasets, content.attributes)
                leaf_datasets = datasets[: len(leaves)]
                digests = _write_leaves(library, leaf_datasets, values_of, file.check)
                by_name = dict(zip(content.names, digests, strict=True))
                text = index_text(with_digests(index, by_name))
                text += index_footer(text, 0, 0, 0)
                _write_values(library, datasets[-1], np.frombuffer(text, np.uint8))
        finally:
            file.check()  # an error of the library may be the consequence


def _index_without_digests(root: Node, leaves: Sequence[Spec], names: Sequence[str]) -> TensorIndex:
    specs = named_specs(names, leaves)
    rows = index_rows(specs, range(len(specs)), [0] * len(specs), NO_DIGEST)
    return TensorIndex(rows, None if is_flat(root, names) else root, {})


def _chunk_shape(dataset: Dataset) -> tuple[int, ...]:
    """Return the shape of a chunk, or () for a dataset that stays uncompressed.

    A chunk has at most 1 MiB. One dimension is cut into ranges. The dimensions before it are cut
    into single elements, and those after it are not cut. For example, a float32 tensor of shape
    (4, 1024, 1024) has chunks of shape (1, 256, 1024).
    """
    size_bytes = dataset_bytes(dataset)
    if not dataset.shape or size_bytes < _MIN_BYTES:
        return ()
    chunk = list(dataset.shape)
    row_bytes = size_bytes
    for dim, size in enumerate(dataset.shape):
        if row_bytes <= _CHUNK_BYTES:
            break
        row_bytes //= size
        chunk[dim] = max(1, _CHUNK_BYTES // row_bytes)
    return tuple(chunk)


def _max_bytes(datasets: Sequence[Dataset], attributes: Mapping[str, Attribute]) -> int:
    """Return an upper bound of the size of the file."""
    total = _DATASET_BYTES * len(datasets)
    for name, value in attributes.items():
        total += 4 * (len(name) + len(str(value)))
    for dataset in datasets:
        total += dataset_bytes(dataset)
        if dataset.chunk and dataset.shape:
            pairs = zip(dataset.shape, dataset.chunk, strict=True)
            chunk_count = math.prod(ceil_div(size, step) for size, step in pairs)
            total += _CHUNK_METADATA_BYTES * chunk_count
    return total


def _write_leaves(
    library: Any,
    datasets: Sequence[Dataset],
    values_of: Callable[[int], Bytes],
    check: Callable[[], None],
) -> list[bytes]:
    """Write the values of all leaves, compressed by several threads, and return their digests.

    `values_of` returns the bytes of a leaf by number. `check` raises the error of an earlier write.
    """
    digests = []
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    jobs: deque[tuple[Any, tuple[int, ...], Future[bytes]]] = deque()

    def write_first_chunk() -> None:
        handle, corner, job = jobs.popleft()
        handle.write_direct_chunk(corner, job.result())
        check()

    with ThreadPoolExecutor(threads, "ft_ckpt-compress") as pool:
        for number, dataset in enumerate(datasets):
            values = values_of(number)
            digests.append(xxhash.xxh3_128_digest(values.data))
            if not dataset.chunk:
                _write_values(library, dataset, values)
                continue
            handle = h5d.open(library, encoded_path(dataset.path))
            for corner, part in _chunks(dataset, values):
                if len(jobs) >= 4 * threads:
                    write_first_chunk()
                job = pool.submit(_compress_chunk, part, dataset.chunk)
                jobs.append((handle, corner, job))

        while jobs:
            write_first_chunk()

    return digests


def _write_values(library: Any, dataset: Dataset, values: Bytes) -> None:
    if values.size:
        handle = h5d.open(library, encoded_path(dataset.path))
        handle.write(h5s.ALL, h5s.ALL, values, hdf5_type(dataset.type))


def _chunks(dataset: Dataset, values: Bytes) -> Iterator[tuple[tuple[int, ...], Bytes]]:
    """Yield the first index of each chunk, and its elements.

    The last dimension of the elements are the bytes of one element.
    """
    shape = dataset.shape or ()
    elements = values.reshape(*shape, -1)
    steps = [range(0, size, step) for size, step in zip(shape, dataset.chunk, strict=True)]
    for corner in product(*steps):
        window = tuple(slice(at, at + step) for at, step in zip(corner, dataset.chunk, strict=True))
        yield corner, elements[window]


def _compress_chunk(part: Bytes, chunk: tuple[int, ...]) -> bytes:
    """Compress a chunk as HDF5's filters "shuffle" and "deflate" do.

    A chunk at the edge of the tensor is filled up with zeros.
    """
    item_bytes = part.shape[-1]
    whole = np.zeros((*chunk, item_bytes), np.uint8)
    whole[tuple(slice(0, size) for size in part.shape[:-1])] = part
    shuffled = whole.reshape(-1, item_bytes).T.tobytes()
    return zlib.compress(shuffled, GZIP_LEVEL)
