"""Files that are opened by their index, and the named tensors of such a file."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from ft_ckpt.errors import CorruptError, damaged_input
from ft_ckpt.formats.files import MAP_BYTES, RawFile, TensorFile, TensorView
from ft_ckpt.formats.index.file_index import TensorIndex
from ft_ckpt.formats.trees import Node
from ft_ckpt.storage.io import ByteRun

# (start, stop) -> flat elements [start, stop) of one tensor
ReadElements = Callable[[int, int], Any]


class IndexedFile(TensorFile):
    """An open file with its `index`: tensors, the tree of the object, names of the leaves."""

    def __init__(self, raw: RawFile, index: TensorIndex, verify: bool = False) -> None:
        """Open the tensors of `raw` by their index; `verify` compares digests of whole tensors."""
        self.raw, self.index, self.verify = raw, index, verify
        self.specs = index.specs
        # functions that read the tensors that cannot be mapped
        self.readers: dict[str, ReadElements] = {}
        # h5py's file, or None if h5py is not needed
        self.library: Any = None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read elements [start, stop) of the flat tensor `name`.

        Only their bytes are read or mapped. Raises CorruptError when the file has changed or is too
        short, and, with `verify`, when a whole tensor has another digest.
        """
        with damaged_input(f"{self.raw.name}: {name}"):
            return self._read_elements(name, start, stop)

    def _read_elements(self, name: str, start: int, stop: int | None) -> Tensor:
        dtype_name, shape, *_ = self.index.rows[name]
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise CorruptError(
                f"{self.raw.name}: {name} has dtype {dtype_name!r}, which this torch does not know"
            )

        is_whole = start == 0 and stop is None
        if stop is None:
            stop = math.prod(shape)
        reader = self.readers.get(name)
        if reader is not None:
            self.raw.check()
            tensor = as_tensor(reader(start, stop)).reshape(-1)
        else:
            first_byte = self.index.start(name) + start * dtype.itemsize
            tensor = self.raw.tensor(first_byte, stop - start, dtype)

        if is_whole and tensor.numel() and (self.verify or reader is not None):
            self._verify_digest(name, tensor.view(torch.uint8).numpy())
        return tensor

    @property
    def has_digests(self) -> bool:
        """Whether every tensor can be verified."""
        return all(row[3] for row in self.index.rows.values())

    def runs(self, name: str) -> Sequence[ByteRun] | None:
        """Return the byte range of tensor `name` in the file.

        Returns None when the tensor is not stored in one piece, or its digest is compared as it is
        read.
        """
        if self.verify or name in self.readers:
            return None
        return [ByteRun(name, self.raw.file, self.index.start(name), self.specs[name].size_bytes)]

    def maps(self, name: str) -> bool:
        """Check whether reading the whole tensor costs no more than reading a part of it.

        This is so if it is mapped or small.
        """
        if name in self.readers:
            return False
        return self.raw.mapped or self.specs[name].size_bytes < MAP_BYTES

    def check(self) -> None:
        """Raise CorruptError if the file is closed, or has changed since it was opened."""
        self.raw.check()

    def read_array(self, number: int) -> np.ndarray[Any, Any]:
        """Read the leaf `number` as a numpy array with its own memory."""
        name = self.index.names[number]
        with damaged_input(f"{self.raw.name}: {name}"):
            return self._stored_array(name)

    def _stored_array(self, name: str) -> np.ndarray[Any, Any]:
        if name in self.readers:
            self.raw.check()
            shape = self.index.rows[name][1]
            values = np.asarray(self.readers[name](0, math.prod(shape)))
            self._verify_digest(name, values)
            return np.reshape(values, shape)
        spec = self.specs[name]
        data = self.raw.bytes(self.index.start(name), spec.size_bytes)
        if self.verify:
            self._verify_digest(name, np.frombuffer(data, np.uint8))
        return np.frombuffer(data, np.dtype(spec.dtype)).reshape(spec.shape)

    def close(self) -> None:
        self.raw.close()

    def _verify_digest(self, name: str, values: np.ndarray[Any, Any]) -> None:
        expected = self.index.rows[name][3]
        if expected and xxhash.xxh3_128_hexdigest(values.data) != expected:
            raise CorruptError(
                f"{self.raw.name}: {name} is damaged (its digest differs); use "
                "another copy of the file"
            )


def as_tensor(values: Any) -> Tensor:
    """Convert values to a tensor with its own memory, in native byte order."""
    if isinstance(values, Tensor):
        return values
    return torch.from_numpy(np.asarray(values).astype(values.dtype.newbyteorder("=")))


def named_tensors(file: IndexedFile) -> TensorView:
    """Name the tensors and arrays of a file that holds an object by their leaves.

    A leaf at several places of the object is one tensor with `ties`, as are the aliases in the
    metadata of a flat file. Values that are not tensors are `skipped`.
    """
    index = file.index
    walk = _TreeWalk(file.skipped)
    names = list(file.specs)
    if index.root is not None:
        walk.visit(index.root, "")
        names = [index.names[leaf] for leaf in sorted(walk.paths)]

    ties = {path: index.names[leaf] for path, leaf in walk.further_paths.items()}
    metadata: dict[str, str] = {}
    stored = set(names)
    for key, value in index.metadata.items():
        key, value = str(key), str(value)
        if value in stored and key not in stored:
            ties[key] = value
        else:
            metadata[key] = value

    view_names = {name: name for name in names}
    return TensorView.of_file(file, view_names, ties=ties, metadata=metadata, skipped=walk.skipped)


class _TreeWalk:
    """Visits the nodes of an object, and collects the paths of tensors and of other values."""

    def __init__(self, skipped: Sequence[str]) -> None:
        self.skipped = list(skipped)
        self.paths: dict[int, str] = {}  # number of a leaf: its first path
        self.further_paths: dict[str, int] = {}

    def visit(self, node: Node, path: str) -> None:
        is_number_array = node.kind == "array" and node.value[1] is None
        if node.kind == "tensor" or is_number_array:
            leaf = int(node.value[0] if is_number_array else node.value)
            if self.paths.setdefault(leaf, path) != path:
                self.further_paths[path] = leaf
        elif node.children:
            for key, child in zip(_child_keys(node), node.children, strict=True):
                self.visit(child, f"{path}.{key}" if path else key)
        elif node.kind not in ("dict", "list", "tuple"):
            kind = type(node.value).__name__ if node.kind == "value" else node.kind
            self.skipped.append(f"{path}: {kind}")


def _child_keys(node: Node) -> list[str]:
    """Return the key of each child in its path: its number if the key is not a plain value."""
    if not node.keys:
        return [str(number) for number in range(len(node.children))]
    keys = []
    for number, key in enumerate(node.keys):
        keys.append(str(key.value) if key.kind == "value" else str(number))
    return keys
