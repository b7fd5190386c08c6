"""Staging: a hidden folder or a bucket prefix for the files of a save until its commit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ft_ckpt.checkpoint.commit import commit
from ft_ckpt.checkpoint.commit.object_staging import open_object_staging
from ft_ckpt.checkpoint.commit.recovery import recover_target
from ft_ckpt.checkpoint.leases import clear_spent_mark
from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.storage import Store
from ft_ckpt.storage.io import BLOCK_BYTES
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place


class Staging(Protocol):
    """One save in progress."""

    @property
    def store(self) -> Store:
        """The store for the files of the save; not a checkpoint before `commit`."""
        ...

    @property
    def beside(self) -> Store:
        """The folder that will contain the checkpoint."""
        ...

    def commit(self, manifest: Manifest) -> None:
        """Make the files the checkpoint, durably, or change nothing.

        Raises what `commit.commit_stage` raises.
        """
        ...

    def discard(self) -> None:
        """Delete the files of an uncommitted save; do nothing after `commit`."""
        ...


@dataclass(frozen=True)
class LocalStaging:
    """A hidden folder, `stage`, that becomes the folder `target`."""

    stage: Path
    target: Path
    direct_bytes: int | None = BLOCK_BYTES  # see LocalStore
    max_mode: int = 0o777  # see LocalStore

    @property
    def store(self) -> LocalStore:
        return stage_store(self.stage, self.direct_bytes).limited(self.max_mode)

    @property
    def beside(self) -> LocalStore:
        return LocalStore(self.target.parent)

    def commit(self, manifest: Manifest) -> None:
        commit.commit_stage(self.stage, self.target, manifest, self.max_mode)

    def discard(self) -> None:
        commit.discard_stage(self.stage)


def open_staging_at(
    target: Place,
    direct_bytes: int | None = BLOCK_BYTES,
    *,
    run_id: str | None = None,
    overwrite: bool = False,
    max_mode: int = 0o777,
) -> Staging:
    """Open a new staging for a place in any store.

    On a disk, `max_mode` limits the permissions of what is committed. Raises what `open_staging`
    and `open_object_staging` raise.
    """
    folder = target.folder.local_folder
    if folder is not None:
        return open_staging(folder, direct_bytes, max_mode)
    return open_object_staging(target.beside, target.basename, run_id=run_id, overwrite=overwrite)


def open_staging(
    target: Path, direct_bytes: int | None = BLOCK_BYTES, max_mode: int = 0o777
) -> LocalStaging:
    """Open a new staging for the folder `target`.

    The other arguments are those of LocalStore. Raises what `commit.make_stage` raises.
    """
    return LocalStaging(commit.make_stage(target), target, direct_bytes, max_mode)


def stage_store(stage: Path, direct_bytes: int | None = BLOCK_BYTES) -> LocalStore:
    """Return the store of the files in a stage, for any rank that sees the stage.

    The store syncs no file, because the commit syncs all of them.
    """
    return LocalStore(stage, direct_bytes, syncs=False)


def recover_staging_at(target: Place) -> None:
    """Delete the leftovers at `target` of a save that was killed after its commit."""
    store = target.folder
    if store.local_folder is not None:
        recover_target(store.local_folder)
    else:
        clear_spent_mark(store)
