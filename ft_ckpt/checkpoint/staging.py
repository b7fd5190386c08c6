"""How a save becomes visible: its files are written into a staging store, which is then committed, or discarded.

On a disk that is a hidden folder that `commit` puts in place. A bucket has no step that puts many objects in place:
there files go under their final names, and the manifest, written last and only if there is none, is the commit.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ft_ckpt.checkpoint import commit
from ft_ckpt.checkpoint.catalog import check_paths, next_number
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest, manifest_to_json
from ft_ckpt.errors import CorruptError, NameTakenError, TargetError, listing
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


@dataclass(frozen=True)
class ObjectStaging:
    """Objects of any store, under their final names; the manifest makes them a checkpoint."""

    store: Store
    beside: Store

    def commit(self, manifest: Manifest) -> None:
        """Compare the objects with the manifest, and write it, if there is none: readers see all or nothing.

        Raises CorruptError where they differ; NameTakenError where another save was faster, whose objects these may
        have replaced: it has to be verified; TargetError.
        """
        check_paths(manifest, self.store.url)
        if manifest.step is None:
            manifest = replace(manifest, number=next_number(self.store, self.beside))
        self._check_objects(manifest)
        text = manifest_to_json(manifest).encode()
        try:
            self.store.write(MANIFEST_NAME, text, create_only=True)
        except TargetError:  # the answer may have been lost, and what is there be ours
            if not self._holds(text):
                raise

    def discard(self) -> None:
        """Delete all objects, unless there is a manifest."""
        if self.store.stat(MANIFEST_NAME) is None:
            self.store.delete([each.name for each in self.store.list()])

    def _check_objects(self, manifest: Manifest) -> None:
        found = {each.name: each.size_bytes for each in self.store.list() if each.name != MANIFEST_NAME}
        expected = {file.path: file.size_bytes for file in manifest.files}
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        if wrong:
            raise CorruptError(
                f"{self.store.url}: {listing(wrong, ', ')}: not in the store as the manifest has them; save again"
            )

    def _holds(self, text: bytes) -> bool:
        try:
            return self.store.read(MANIFEST_NAME) == text
        except CorruptError:
            return False


def open_object_staging(beside: Store, name: str) -> ObjectStaging:
    """A staging for the checkpoint `name` in the folder `beside` of any store, in which nothing may be yet.

    Raises NameTakenError where a checkpoint is, TargetError where another save is under way or has ended before its
    manifest: which of both cannot be told.
    """
    store = beside.within(name)
    there = [each.name for each in store.list()]
    if MANIFEST_NAME in there:
        raise NameTakenError(
            f"{store.url}: a checkpoint is there, and cannot be replaced in one step; use another name"
        )
    if there:
        raise TargetError(
            f"{store.url}: {listing(there, ', ')}: of a save that is under way, or was broken off; delete them "
            "then, or use another name"
        )
    return ObjectStaging(store, beside)


def open_staging(target: Path, direct_bytes: int | None = BLOCK_BYTES) -> LocalStaging:
    """A fresh staging for the folder `target`; raises as `commit.open_stage` does. `direct_bytes`: see LocalStore."""
    return LocalStaging(commit.open_stage(target), target, direct_bytes)


def stage_store(stage: Path, direct_bytes: int | None = BLOCK_BYTES) -> LocalStore:
    """The files in a stage, for any rank that sees it: they are synced by the commit."""
    return LocalStore(stage, direct_bytes, syncs=False)
