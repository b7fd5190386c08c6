"""Defines the reports of copy, push, pull and sync."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.checkpoint.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class TransferReport:
    """A checkpoint that was transferred."""

    path: Path | str
    """The checkpoint: a path, or a URL."""
    files: tuple[str, ...]
    """Paths of the files, relative to the checkpoint's folder."""
    bytes: int
    """Size of the files, in bytes."""
    seconds: float
    """Duration of the transfer."""


@dataclass(frozen=True, kw_only=True)
class CopyReport(TransferReport):
    """A checkpoint that was copied, or was there already."""

    path: Path | str
    """The copy: a path, or a URL."""
    source: Path | str
    """The checkpoint that was copied: a path, or a URL."""
    is_new: bool
    """False if the same checkpoint was there already."""
    sent_bytes: int
    """How many of the bytes this process read and wrote."""
    reused: tuple[str, ...] = ()
    """Files taken from another checkpoint at the destination."""


def new_copy_report(path: Path | str, source: Path | str, manifest: Manifest) -> CopyReport:
    """Return the report of a copy that has sent all files, without its duration."""
    size_bytes = sum(file.size_bytes for file in manifest.files)
    return CopyReport(
        path=path,
        source=source,
        is_new=True,
        files=tuple(file.path for file in manifest.files),
        bytes=size_bytes,
        sent_bytes=size_bytes,
        seconds=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class PushReport(TransferReport):
    """A finished push."""

    path: Path | str
    """The checkpoint that was pushed."""
    url: str
    """The destination, as `pull` takes it."""
    repo_id: str
    """The repository, or "" in a bucket."""
    oid: str
    """The commit. In a bucket, the digest of the manifest of `path`."""
    commit_url: str
    """URL of the commit. In a bucket, the URL of the manifest."""
    is_new: bool
    """Whether a commit was made. False if the destination had all files."""
    files: tuple[str, ...]
    """Paths of the pushed files in the repository. In a bucket, they are relative to the
    checkpoint, and the manifest is not among them.
    """
    deleted: tuple[str, ...] = ()
    """Paths of files of older checkpoints that were deleted with the same commit."""
    notes: tuple[str, ...] = ()
    """Files that were left out or changed, and metadata of the card that could not be updated."""


@dataclass(frozen=True, kw_only=True)
class PullReport(TransferReport):
    """A finished pull."""

    path: Path
    """The folder of the checkpoint."""
    url: str
    """The source."""
    oid: str
    """The commit. In a bucket, the digest of the manifest."""
    verified: bool
    """Whether there was a manifest. If so, all files have the digests in it."""


@dataclass(frozen=True)
class SyncReport:
    """The outcome of `sync`, or of its dry run.

    Checkpoints are named as in the folder of the run.
    """

    missing: tuple[str, ...]
    """Checkpoints that the destination lacked, had in part, or had from an older save under the
    same name. The newest is first.
    """
    present: tuple[str, ...]
    """Checkpoints that the destination had."""
    copied: tuple[CopyReport, ...]
    """Reports of the missing checkpoints that were copied. There are none in a dry run."""
    dropped: tuple[str, ...]
    """Checkpoints deleted at the destination, because the source has deleted them."""
    stripped: tuple[str, ...]
    """Checkpoints whose training state was deleted at the destination, because the source has
    deleted it.
    """
    kept: Mapping[str, tuple[str, ...]]
    """Checkpoints that were not deleted, with the reasons: a pin, a lease."""
    problems: tuple[str, ...]
    """Checkpoints that were not copied or deleted, with the reasons."""

    @property
    def sent_bytes(self) -> int:
        """Bytes read from the source and written to the destination."""
        return sum(report.sent_bytes for report in self.copied)
