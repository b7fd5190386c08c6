"""Reads the tensors of an open checkpoint, and the trees of its training state.

A tree is the nested state of an object. The document has its nodes, and its tensors are stored
under numbers: the tree at the prefix "scheduler" has "scheduler/0", "scheduler/1" and so on.
"""

from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.errors import LoadError, SelectionError
from ft_ckpt.formats import Spec, format_named
from ft_ckpt.formats.files import ListedFile, TensorFile
from ft_ckpt.formats.trees import decode_node, unflatten
from ft_ckpt.ranks.moving import WantedTensor, fill_tensor
from ft_ckpt.ranks.wrappers import is_distributed
from ft_ckpt.runs.state.document import FOLDER, Document, entries_of_rank
from ft_ckpt.runs.state.trees import live_tensors, source_of_leaf


class StoredTensors:
    """The tensors of one checkpoint, by the folder of their part and their name.

    A part is one saved model of the checkpoint, or the training state. Files are opened when a
    tensor in them is first needed.
    """

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint
        parts = checkpoint.manifest.parts
        kinds = {part.kind for part in parts}
        # whether the checkpoint has adapters without their base
        self.is_adapter = "adapter" in kinds and "model" not in kinds
        self._formats = {part.path: part.format for part in parts}
        self._paths: dict[tuple[str, str], str] = {}
        for part in parts:
            for tensor in part.tensors:
                self._paths[part.path, tensor.name] = tensor.file
        self._open: dict[str, TensorFile] = {}

    def file_of(self, part: str, name: str) -> TensorFile:
        """Return the file that holds the tensor `name` of the part in the folder `part`.

        Raises LoadError if there is no such tensor.
        """
        path = self._paths.get((part, name))
        if path is None:
            location = self._checkpoint.location
            raise LoadError(f"{name}: not among the tensors of the checkpoint {location}")
        if path not in self._open:
            where = self._checkpoint.store.where(path)
            open_file = partial(self._open_file, path, format_named(self._formats[part]))
            self._open[path] = ListedFile(where, self._specs[path], open_file)
        return self._open[path]

    def _open_file(self, path: str, file_format: Any) -> TensorFile:
        file: TensorFile = file_format.open_file(self._checkpoint.store.open(path))
        return file

    @cached_property
    def _specs(self) -> dict[str, dict[str, Spec]]:
        """The specs of the tensors in each file, in the order of the manifest."""
        specs: dict[str, dict[str, Spec]] = {}
        for part in self._checkpoint.manifest.parts:
            for tensor in part.tensors:
                spec = Spec(tensor.name, tensor.shape, tensor.dtype)
                specs.setdefault(tensor.file, {})[tensor.name] = spec
        return specs

    def state_names(self, prefix: str) -> frozenset[str]:
        """Return the names of the state's tensors that begin with `prefix`, without the prefix."""
        names = [name for part, name in self._paths if part == FOLDER]
        return frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def state_tensor(self, name: str) -> Tensor:
        """Read the whole tensor `name` of the training state into host memory."""
        file = self.file_of(FOLDER, name)
        return file.read(name).view(file.specs[name].shape)

    def close(self) -> None:
        for file in self._open.values():
            file.close()


def tree_of_rank(document: Document, stored: StoredTensors, rank: int, name: str) -> Any:
    """Read the tree `name` that the rank stored for itself; return None if there is none."""
    entry = entries_of_rank(document, rank).get(name)
    if entry is None:
        return None
    return tree_of(entry, f"rank-{rank}/{name}", stored)


def tree_of(entry: Document, prefix: str, stored: StoredTensors, like: Any = None) -> Any:
    """Read the tree that `entry` describes, with its tensors.

    If `like` is an object, its current state says which of the tensors are DTensors: these are made
    with the same placements.
    """
    distributed = _distributed_tensors(like)

    def read_tensor(index: int) -> Any:
        name = f"{prefix}/{index}"
        if index not in distributed:
            return stored.state_tensor(name)
        tensor = torch.empty_like(distributed[index])
        source = source_of_leaf(name, tensor)
        file = stored.file_of(FOLDER, name)
        fill_tensor(WantedTensor(source, source.local, file, name))
        return tensor

    def read_array(index: int) -> Any:
        return stored.state_tensor(f"{prefix}/{index}").numpy()

    return unflatten(decode_node(entry["tree"]), read_tensor, read_array)


def _distributed_tensors(value: Any) -> Mapping[int, Tensor]:
    """Return the distributed tensors in the state of an object, by their index in its tree."""
    if value is None:
        return {}
    with suppress(SelectionError):  # before loading, the state may have values of any type
        tensors = live_tensors(value.state_dict(), "state")
        return {index: tensor for index, tensor in enumerate(tensors) if is_distributed(tensor)}
    return {}
