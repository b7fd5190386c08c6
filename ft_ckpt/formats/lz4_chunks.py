"""HDF5's LZ4 filter without its plugin: each chunk is a frame of independent blocks.

Source: the description of filter 32004. Total bytes (8, big-endian), block bytes (4), then of each block its stored
bytes (4) and the bytes, which are raw where as many as the block has.
"""

import importlib
import struct
from typing import Any

import numpy as np

from ft_ckpt.errors import CorruptError

LZ4 = 32004


def read_lz4(dataset: Any) -> np.ndarray[Any, Any]:
    """All values of an h5py `dataset` whose only filter is LZ4. Raises CorruptError without the lz4 package."""
    if len(dataset._filters) != 1:  # h5py's only list of filters
        raise CorruptError(f"{dataset.name}: compressed with filters not installed here; pip install hdf5plugin")
    values = np.zeros(dataset.shape, dataset.dtype)
    for number in range(dataset.id.get_num_chunks()):
        info = dataset.id.get_chunk_info(number)
        mask, stored = dataset.id.read_direct_chunk(info.chunk_offset)
        data = stored if mask & 1 else decode(stored, dataset.name)
        chunk = np.frombuffer(data, dataset.dtype).reshape(dataset.chunks)
        place = tuple(
            slice(start, min(start + step, size))
            for start, step, size in zip(info.chunk_offset, dataset.chunks, dataset.shape, strict=True)
        )
        values[place] = chunk[tuple(slice(part.stop - part.start) for part in place)]
    return values


def decode(frame: bytes, name: str) -> bytes:
    """The bytes of one chunk. Raises CorruptError for a frame that is not whole."""
    try:
        total, block = struct.unpack_from(">QI", frame)
        parts, at, left = [], 12, total
        while left:
            (stored,) = struct.unpack_from(">I", frame, at)
            size = min(block, left)
            data = frame[at + 4 : at + 4 + stored]
            if len(data) != stored or not size:
                raise CorruptError(f"{name}: an LZ4 chunk is cut short")
            parts.append(data if stored == size else _block(data, size, name))
            at, left = at + 4 + stored, left - size
        return b"".join(parts)
    except struct.error as error:
        raise CorruptError(f"{name}: an LZ4 chunk is damaged") from error


def _block(data: bytes, size: int, name: str) -> bytes:
    try:
        lz4 = importlib.import_module("lz4.block")
    except ImportError as error:
        raise CorruptError(f"{name}: compressed with LZ4; pip install hdf5plugin (or lz4)") from error
    try:
        return bytes(lz4.decompress(data, uncompressed_size=size))
    except Exception as error:
        raise CorruptError(f"{name}: an LZ4 chunk is damaged ({error})") from error
