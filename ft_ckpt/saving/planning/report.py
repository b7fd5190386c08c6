"""The report of a finished save, and the handle of a background save."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft_ckpt.jobs import BackgroundJob
from ft_ckpt.storage.places import Place, open_place

if TYPE_CHECKING:  # the types of handles that a run puts into `follow_ups`
    from ft_ckpt.extensions.rl.publishing import PendingPublish
    from ft_ckpt.extensions.transfer.sending import PendingPush


@dataclass(frozen=True)
class SaveReport:
    """A finished save: its folder, its size and the saver's decisions.

    The report is identical on every rank, with two exceptions: `seconds` differs, and rank 0 alone
    has `follow_ups` (`push`, `upload` and `publish`).
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
    follow_ups: Mapping[str, BackgroundJob[Any]] = field(default_factory=dict)
    """Jobs that the save has started, by kind: "push", "upload", "publish"; on rank 0 alone."""
    target: Place | None = field(default=None, repr=False, compare=False)

    @property
    def push(self) -> "PendingPush | None":
        """The push to the Hub that the save requested; on rank 0 alone."""
        job: Any = self.follow_ups.get("push")
        return job  # type: ignore[no-any-return]  # the run's handle of this kind

    @property
    def upload(self) -> "PendingPush | None":
        """The upload from the staging folder to the bucket, if there is one; on rank 0 alone."""
        job: Any = self.follow_ups.get("upload")
        return job  # type: ignore[no-any-return]  # the run's handle of this kind

    @property
    def publish(self) -> "PendingPublish | None":
        """The publish to the servers of the setting `publish`; on rank 0 alone."""
        job: Any = self.follow_ups.get("publish")
        return job  # type: ignore[no-any-return]  # the run's handle of this kind

    @property
    def place(self) -> Place:
        """The committed folder, with the store client of its bucket."""
        return open_place(self.path) if self.target is None else self.target


@dataclass(frozen=True, eq=False, kw_only=True)
class PendingSave(BackgroundJob[SaveReport]):
    """A background save to the folder `path`, which exists once the save is committed.

    The handle is done from the start if no thread could carry out the save, which was then
    committed before the call returned. The saver's next call raises the error of the save, as
    `result` does.
    """
