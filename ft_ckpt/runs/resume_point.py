"""An open checkpoint to resume from."""

from contextlib import ExitStack
from dataclasses import dataclass

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.runs.state_document import Document, read_document
from ft_ckpt.runs.stored_tensors import StoredTensors
from ft_ckpt.storage import ListedStore


@dataclass(frozen=True, eq=False)
class ResumePoint:
    """An open checkpoint to resume from: manifest, document, tensors; each is read once."""

    checkpoint: OpenCheckpoint
    document: Document
    tensors: StoredTensors
    far_ranks: str = ""  # that do not see the checkpoint and read a copy, as text

    def way_to_read(self, fan_out: str) -> str:
        """The way for `choose_filler`, from SaverConfig.fan_out and the store of the checkpoint.

        The same on all ranks.

        Ranks that read a copy on their disk do not ask rank 0 for small ranges of the bucket.
        """
        is_in_bucket = isinstance(self.checkpoint.store, ListedStore) and not self.far_ranks
        return "small" if fan_out == "auto" and is_in_bucket else fan_out


def open_resume_point(checkpoint: OpenCheckpoint, stack: ExitStack) -> ResumePoint:
    """Open the state of an open checkpoint until the stack closes. Raises CorruptError."""
    tensors = StoredTensors(checkpoint)
    stack.callback(tensors.close)
    document = read_document(checkpoint.store, checkpoint.manifest)
    return ResumePoint(checkpoint, document, tensors)
