"""What a run is resumed from, as it lies in the files: one JSON document, tensors, and objects made of both.

Read by ranges from plain tensor files; nothing is executed.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from ft_ckpt.distributed.read_shards import WantedTensor, fill_tensor
from ft_ckpt.distributed.wrappers import is_distributed
from ft_ckpt.errors import LoadError, SelectionError
from ft_ckpt.formats.layout import Spec, TensorFile
from ft_ckpt.formats.listed_file import ListedFile
from ft_ckpt.formats.pytree import unflatten
from ft_ckpt.formats.pytree_json import decode_node
from ft_ckpt.formats.registry import format_named
from ft_ckpt.storage.file_proof import FileProof, share_proofs
from ft_ckpt.storage.listed_store import ListedStore
from ft_ckpt.training.run_document import read_document
from ft_ckpt.training.state import FOLDER, Document, source_of, tree_tensors


class StoredTensors:
    """The tensor files of one checkpoint, opened when first needed; tensors by the folder of their part and name."""

    def __init__(
        self,
        held: OpenCheckpoint,
        remote: Callable[[str], TensorFile] | None = None,
        proofs: Sequence[FileProof] = (),
    ) -> None:
        """`remote` gives the tensors of the part in a folder, where another rank reads them for this one; `proofs` are
        the comparisons of whole files that are due.
        """
        self._held, self._remote, parts = held, remote, held.manifest.parts
        self.late_files, self.proofs = [proof.record for proof in proofs], proofs
        kinds = {part.kind for part in parts}
        self.is_remote = remote is not None
        self.is_adapter = "adapter" in kinds and "model" not in kinds  # the base is elsewhere
        self._formats = {part.path: part.format for part in parts}
        self._files = {(part.path, tensor.name): tensor.file for part in parts for tensor in part.tensors}
        self._open: dict[str, TensorFile] = {}

    def take_share(self, number: int, count: int) -> None:
        """Leave comparisons to other ranks, of which there are `count` with this one, the `number`th."""
        self.proofs = share_proofs(self.proofs, number, count)

    def file_of(self, part: str, name: str) -> TensorFile:
        """The file that holds the tensor `name` of the part in folder `part`. Raises LoadError when none does."""
        place = self._files.get((part, name))
        if place is None:
            raise LoadError(f"{name}: not among the tensors of the checkpoint {self._held.location}")
        if place not in self._open:
            self._open[place] = self._remote(part) if self._remote else self._listed_file(part, place)
        return self._open[place]

    def _listed_file(self, part: str, place: str) -> ListedFile:
        """The file at `place`, of tensors of the part in folder `part`."""

        def open_file() -> TensorFile:
            return format_named(self._formats[part]).open_file(self._held.store.open(place))

        proof = next((one for one in self.proofs if one.record.path == place), None)
        return ListedFile(self._held.store.where(place), self._specs[place], open_file, proof)

    @cached_property
    def _specs(self) -> dict[str, dict[str, Spec]]:
        """What the manifest says of the tensors in each file, in its order."""
        found: dict[str, dict[str, Spec]] = {}
        for tensor in (tensor for part in self._held.manifest.parts for tensor in part.tensors):
            found.setdefault(tensor.file, {})[tensor.name] = Spec(tensor.name, tensor.shape, tensor.dtype)
        return found

    def state_names(self, prefix: str) -> frozenset[str]:
        """Names of the training state's tensors that begin with `prefix`, without it."""
        return frozenset(n[len(prefix) :] for part, n in self._files if part == FOLDER and n.startswith(prefix))

    def read(self, part: str, name: str, start: int, stop: int) -> Tensor:
        """Flat elements [start, stop) of a tensor, on the host."""
        return self.file_of(part, name).read(name, start, stop)

    def state_tensor(self, name: str) -> Tensor:
        """The tensor `name` of the training state, whole, on the host."""
        file = self.file_of(FOLDER, name)
        return file.read(name).view(file.specs[name].shape)

    def close(self) -> None:
        """Let go of the files."""
        for file in self._open.values():
            file.close()


@dataclass(frozen=True, eq=False)
class ResumePoint:
    """An open checkpoint to resume from, in which each thing is read once: manifest, document of the state, tensors."""

    checkpoint: OpenCheckpoint
    document: Document
    tensors: StoredTensors
    served: str = ""  # ranks that rank 0 reads the tensors for, in words
    is_proved_late: bool = False  # digests of its files, on any rank, are compared while these are read

    def way_to_read(self, fan_out: str) -> str:
        """The way that `choose_filler` takes for what SaverConfig.fan_out says."""
        if self.served:
            return "broadcast"
        return "small" if fan_out == "auto" and isinstance(self.checkpoint.store, ListedStore) else fan_out


def open_resume_point(held: OpenCheckpoint, stack: ExitStack, proofs: Sequence[FileProof] = ()) -> ResumePoint:
    """What there is to resume from in an open checkpoint, until the stack ends; `proofs` of its files are still due.

    Raises CorruptError.
    """
    tensors = StoredTensors(held, proofs=proofs)
    stack.callback(tensors.close)
    return ResumePoint(held, read_document(held.store, held.manifest), tensors)


def entries_of_rank(document: Document, rank: int) -> Document:
    """What the document has of this rank alone; nothing for a rank that was not there."""
    ranks: list[Document] = document["ranks"]
    return ranks[rank] if rank < len(ranks) else {}


def tree_of_rank(document: Document, stored: StoredTensors, rank: int, name: str) -> Any:
    """The object `name` that the rank stored for itself; None when there is none."""
    entry = entries_of_rank(document, rank).get(name)
    return None if entry is None else tree_of(entry, f"rank-{rank}/{name}", stored)


def tree_of(entry: Document, prefix: str, stored: StoredTensors, like: Any = None) -> Any:
    """The object that `entry` describes. Tensors that `like` has cut over the ranks are made and read in its way."""
    cut = _cut_tensors(like)

    def make_tensor(index: int) -> Any:
        name = f"{prefix}/{index}"
        if index not in cut:
            return stored.state_tensor(name)
        fresh = torch.empty_like(cut[index])
        made = source_of(name, fresh)
        fill_tensor(WantedTensor(made, made.local, stored.file_of(FOLDER, name), name))
        return fresh

    def make_array(index: int) -> Any:
        return stored.state_tensor(f"{prefix}/{index}").numpy()

    return unflatten(decode_node(entry["tree"]), make_tensor, make_array)


def _cut_tensors(like: Any) -> dict[int, Tensor]:
    """The distributed tensors in the state of an object as it is now, by their place in its tree."""
    if like is None:
        return {}
    with suppress(SelectionError):  # what it holds before it is loaded may be of any kind
        tensors = tree_tensors(like.state_dict())
        return {index: tensor for index, tensor in enumerate(tensors) if is_distributed(tensor)}
    return {}
