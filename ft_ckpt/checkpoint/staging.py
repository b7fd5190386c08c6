"""How a save becomes visible: its files are written into a staging store, which is then committed, or discarded.

On a disk that is a hidden folder that `commit` puts in place. A bucket has no step that puts many objects in place:
there files go under their final names, and the manifest, written last and only if there is none, is the commit.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ft_ckpt.checkpoint import commit
from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.storage.buffers import BLOCK_BYTES
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.store import Store


class Staging(Protocol):
    """One save on its way."""

    @property
    def store(self) -> Store:
        """Where its files are written; no reader takes it for a checkpoint before `commit`."""
        ...

    @property
    def beside(self) -> Store:
        """The folder in which the checkpoint is to be, with others of its run."""
        ...

    def commit(self, manifest: Manifest) -> None:
        """Make the files the checkpoint, durably, or change nothing; raises as `commit.commit_stage` does."""
        ...

    def discard(self) -> None:
        """Delete the files of a save that is not committed; nothing happens after `commit`."""
        ...


@dataclass(frozen=True)
class LocalStaging:
    """A hidden folder, `stage`, that becomes the folder `target`."""

    stage: Path
    target: Path
    direct_bytes: int | None = BLOCK_BYTES  # see LocalStore

    @property
    def store(self) -> LocalStore:
        """The files in the stage."""
        return stage_store(self.stage, self.direct_bytes)

    @property
    def beside(self) -> LocalStore:
        """The folder of the target."""
        return LocalStore(self.target.parent)

    def commit(self, manifest: Manifest) -> None:
        """Put the stage in place, see `commit.commit_stage`."""
        commit.commit_stage(self.stage, self.target, manifest)

    def discard(self) -> None:
        """Delete the stage, see `commit.discard_stage`."""
        commit.discard_stage(self.stage)


def open_staging(target: Path, direct_bytes: int | None = BLOCK_BYTES) -> LocalStaging:
    """A fresh staging for the folder `target`; raises as `commit.open_stage` does. `direct_bytes`: see LocalStore."""
    return LocalStaging(commit.open_stage(target), target, direct_bytes)


def stage_store(stage: Path, direct_bytes: int | None = BLOCK_BYTES) -> LocalStore:
    """The files in a stage, for any rank that sees it: they are synced by the commit."""
    return LocalStore(stage, direct_bytes, syncs=False)
