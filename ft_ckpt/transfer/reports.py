"""What is asked of a push or a pull beside its two ends, and what comes of it."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class PushOptions:
    """How a checkpoint is pushed."""

    revision: str | None = None
    private: bool | None = None
    token: str | None = field(default=None, repr=False)
    state: bool = False  # the state of the run goes along
    base_id: str | None = None  # what the base is called on the Hub
    message: str | None = None
    quiet: bool = False  # no progress bars
    card: str | None = None  # the text that takes the place of the card that is there; None keeps that one


@dataclass(frozen=True)
class PushReport:
    """A finished push: where the checkpoint is now, and what was decided on the way."""

    path: Path | str
    """The checkpoint that was pushed."""
    url: str
    """Where it is, as `pull` takes it."""
    repo_id: str
    """The repository; "" in a bucket."""
    oid: str
    """The commit that it is in; in a bucket the digest of the manifest that was pushed."""
    commit_url: str
    """Address of that commit, or of the manifest in a bucket."""
    is_new: bool
    """Whether a commit was made; False when all of it was there already."""
    files: tuple[str, ...]
    """Paths of the files of the checkpoint, in the repository."""
    deleted: tuple[str, ...]
    """Paths of files of older checkpoints that were deleted with the same commit."""
    bytes: int
    """Size of the files, in bytes."""
    seconds: float
    """How long it took."""
    notes: tuple[str, ...]
    """What was left out or changed, and a reader should know."""


@dataclass(frozen=True)
class PullReport:
    """A finished pull."""

    path: Path
    """The folder it is in."""
    url: str
    """Where it came from."""
    oid: str
    """The commit that it was taken from; of a bucket the digest of the manifest there."""
    verified: bool
    """Whether there was a manifest, with which all files agree."""
    files: tuple[str, ...]
    """Paths of its files, relative to the folder."""
    bytes: int
    """Size of the files, in bytes."""
    seconds: float
    """How long it took."""
