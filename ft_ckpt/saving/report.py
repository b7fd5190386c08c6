"""The report of a finished save."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ft_ckpt.extensions.rl import PendingPublish
from ft_ckpt.extensions.transfer import PendingPush
from ft_ckpt.storage import Place, open_place


@dataclass(frozen=True)
class SaveReport:
    """A finished save: its folder, its size and the saver's decisions.

    Identical on every rank except `seconds`, and `push`, `upload` and `publish`, which only rank 0
    has.
    """

    path: Path | str
    """The committed folder; its URL where it is in a bucket."""
    kind: str
    """ "full", "adapter" or "attribute"."""
    bytes: int
    """Total size of the files, in bytes; hard links are counted once."""
    tensors: int
    """Number of stored tensors."""
    seconds: float
    """Seconds from the call to the durable commit."""
    casts: Mapping[str, int]
    """Number of tensors for each cast, such as "float32->bfloat16"."""
    notes: tuple[str, ...]
    """Decisions of the saver that affect a reader of the checkpoint."""
    step: int | None
    """Training step of this checkpoint."""
    push: PendingPush | None = None
    """The push to the Hub that the save requested; on rank 0 alone."""
    upload: PendingPush | None = None
    """The upload from the staging folder to the bucket, if there is one; on rank 0 alone."""
    publish: PendingPublish | None = None
    """The publish to the servers of the setting `publish`; on rank 0 alone."""
    target: Place | None = field(default=None, repr=False, compare=False)

    @property
    def place(self) -> Place:
        """The committed folder with the client of its bucket, as other functions of ft_ckpt take
        it.
        """
        return open_place(self.path) if self.target is None else self.target
