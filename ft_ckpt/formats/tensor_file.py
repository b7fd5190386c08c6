"""Open files whose index says where each tensor lies: the reader that HDF5 and safetensors files share."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import xxhash

from ft_ckpt.errors import CorruptError, damaged_input
from ft_ckpt.formats.layout import Spec
from ft_ckpt.formats.raw_file import MAP_BYTES, RawFile
from ft_ckpt.formats.tensor_index import TensorIndex
from ft_ckpt.storage.read_ahead import ByteRun


def tensor_digest(data: Any) -> str:
    """The digest of a tensor's bytes."""
    return xxhash.xxh3_128_hexdigest(data)


class IndexedFile:
    """An open file: `specs` by name, and its `index` with the tree of the object and the names of its leaves."""

    def __init__(self, raw: RawFile, index: TensorIndex, verify: bool = False) -> None:
        self.raw, self.index, self.verify = raw, index, verify
        self.readers: dict[str, Callable[[int, int], Any]] = {}  # of those that cannot be mapped
        self.library: Any = None  # h5py's file, where its calls are needed
        self.skipped: tuple[str, ...] = ()  # "name: what it is" of what is in the file and not in the index

    @property
    def specs(self) -> dict[str, Spec]:
        """The tensors by name, in file order; for a foreign file, in the order of its tree."""
        return self.index.specs

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of the flat tensor `name`; only their bytes are read or mapped.

        Raises CorruptError when the file has changed, is too short or, with `verify`, has another digest.
        """
        with damaged_input(f"{self.raw.name}: {name}"):
            return self._read_elements(name, start, stop)

    def _read_elements(self, name: str, start: int, stop: int | None) -> torch.Tensor:
        kind, shape, *_ = self.index.rows[name]
        dtype = getattr(torch, kind, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptError(f"{self.raw.name}: {name} is of type {kind!r}, which this torch has not")
        whole, stop = start == 0 and stop is None, math.prod(shape) if stop is None else stop
        if name in self.readers:
            self.raw.check()
            tensor = as_tensor(self.readers[name](start, stop)).reshape(-1)
            if whole and self.verify:
                self._verify_digest(name, tensor)
            return tensor
        tensor = self.raw.tensor(self.index.start(name) + start * dtype.itemsize, stop - start, dtype)
        if whole and self.verify:
            self._verify_digest(name, tensor)
        return tensor

    @property
    def has_digests(self) -> bool:
        """True when every tensor can be verified."""
        return all(row[3] for row in self.index.rows.values())

    def runs(self, name: str) -> list[ByteRun] | None:
        """The byte range of tensor `name` in the file; None when it is not stored in one piece."""
        run = ByteRun(name, self.raw.file, self.index.start(name), self.specs[name].size_bytes)
        return None if name in self.readers else [run]

    def maps(self, name: str) -> bool:
        """True when reading a part of the tensor costs as much as all of it."""
        return name not in self.readers and (self.raw.mapped or self.specs[name].size_bytes < MAP_BYTES)

    def check(self) -> None:
        """Raise CorruptError when the file was cut short or written to since it was opened."""
        self.raw.check()

    def read_array(self, number: int) -> np.ndarray[Any, Any]:
        """The leaf `number` as a numpy array of its own memory."""
        name = self.index.names[number]
        with damaged_input(f"{self.raw.name}: {name}"):
            return self._stored_array(name)

    def _stored_array(self, name: str) -> np.ndarray[Any, Any]:
        if name in self.readers:
            self.raw.check()
            shape = self.index.rows[name][1]
            return np.asarray(np.reshape(self.readers[name](0, math.prod(shape)), shape))
        spec = self.specs[name]
        data = self.raw.bytes(self.index.start(name), spec.size_bytes)
        if self.verify:
            self._verify_digest(name, torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0))
        return np.frombuffer(data, np.dtype(spec.dtype)).reshape(spec.shape)

    def close(self) -> None:
        """Close the file."""
        self.raw.close()

    def _verify_digest(self, name: str, tensor: torch.Tensor) -> None:
        known = self.index.rows[name][3]
        data: Any = tensor.view(torch.uint8).numpy() if tensor.numel() else b""
        if known and xxhash.xxh3_128_hexdigest(data) != known:
            raise CorruptError(f"{self.raw.name}: {name} is damaged (its digest differs); use another copy of the file")


def as_tensor(values: Any) -> torch.Tensor:
    """Values that were read, as a tensor of its own memory in the byte order of this machine."""
    if isinstance(values, torch.Tensor):
        return values
    return torch.from_numpy(np.asarray(values).astype(values.dtype.newbyteorder("=")))
