"""Staging: the files of a save are written to a hidden folder or a bucket prefix, then committed or
discarded.

On a disk, `commit` puts the hidden folder in place. A bucket cannot move many objects in one step:
objects get their final names, and writing the manifest, last and only if there is none, is the
commit.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ft_ckpt.checkpoint import commit
from ft_ckpt.checkpoint.bucket_delete import files_of_save
from ft_ckpt.checkpoint.catalog import next_number
from ft_ckpt.checkpoint.commit import recover_target
from ft_ckpt.checkpoint.delete import manifest_files
from ft_ckpt.checkpoint.guards import (
    PIN,
    SAVING,
    TOMBSTONE,
    SaveMark,
    clear_spent_mark,
    is_mark,
    settled_list,
)
from ft_ckpt.checkpoint.leases import LEASE
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest, check_paths, manifest_to_json
from ft_ckpt.errors import CorruptError, NameTakenError, TargetError, listing
from ft_ckpt.storage import (
    BLOCK_BYTES,
    SMALL_BYTES,
    FileRecord,
    LocalStore,
    Place,
    Store,
    Stored,
    read_record,
)

_READS_AT_ONCE = 8
_PAUSES = (0.0, 1.0, 4.0)  # seconds before each attempt to write the manifest


class Staging(Protocol):
    """One save in progress."""

    @property
    def store(self) -> Store:
        """The store for its files; not a checkpoint before `commit`."""
        ...

    @property
    def beside(self) -> Store:
        """The folder that will contain the checkpoint."""
        ...

    def commit(self, manifest: Manifest) -> None:
        """Make the files the checkpoint, durably, or change nothing; raises as
        `commit.commit_stage` does.
        """
        ...

    def discard(self) -> None:
        """Delete the files of an uncommitted save; does nothing after `commit`."""
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
        return replace(stage_store(self.stage, self.direct_bytes), max_mode=self.max_mode)

    @property
    def beside(self) -> LocalStore:
        return LocalStore(self.target.parent)

    def commit(self, manifest: Manifest) -> None:
        commit.commit_stage(self.stage, self.target, manifest, self.max_mode)

    def discard(self) -> None:
        commit.discard_stage(self.stage)


@dataclass(frozen=True)
class ObjectStaging:
    """Objects under their final names, which the manifest makes a checkpoint; `mark` excludes other
    saves.
    """

    store: Store
    beside: Store
    mark: SaveMark

    def commit(self, manifest: Manifest) -> None:
        """Compare the objects with the manifest, and write it if there is none: readers see all or
        nothing.

        Raises CorruptError if they differ; NameTakenError if another save committed first (verify
        it: its objects may have been replaced by these); TargetError, also when another save has
        taken the folder over.
        """
        check_paths(manifest, self.store.url)
        if manifest.step is None and manifest.number is None:
            manifest = replace(manifest, number=next_number(self.store, self.beside))
        found = {each.name: each for each in self.store.list() if not _is_meta(each.name)}
        self._check_objects(manifest, found)
        self.mark.check()
        files = tuple(replace(file, etag=found[file.path].etag) for file in manifest.files)
        manifest = replace(manifest, files=files, token=self.mark.token)
        put_manifest(self.store, manifest_to_json(manifest).encode())
        self.mark.release()

    def discard(self) -> None:
        """Delete all objects, unless there is a manifest, or another save has taken the folder
        over.
        """
        if self.mark.is_held:
            if self.mark.is_ours and self.store.stat(MANIFEST_NAME) is None:
                self.store.delete(
                    [each.name for each in self.store.list() if not _is_meta(each.name)]
                )
            self.mark.release()

    def _check_objects(self, manifest: Manifest, found: Mapping[str, Stored]) -> None:
        """Raise CorruptError naming all objects that are not exactly those written by this save."""
        expected = {file.path: file for file in manifest.files}
        wrong = sorted(
            name
            for name in found.keys() | expected.keys()
            if _differs(found.get(name), expected.get(name))
        )
        # small objects, written in one request, have no known version: compare their bytes
        if not wrong:
            small = [
                file
                for file in manifest.files
                if file.etag is None and file.size_bytes < SMALL_BYTES
            ]
            with ThreadPoolExecutor(_READS_AT_ONCE) as pool:
                read = pool.map(lambda file: read_record(self.store, file.path).digest, small)
                wrong = [
                    file.path
                    for file, digest in zip(small, read, strict=True)
                    if digest != file.digest
                ]
        if wrong:
            raise CorruptError(
                f"{self.store.url}: {listing(wrong, ', ')}: stored with another size or digest "
                "than was written; save again"
            )


def _differs(found: Stored | None, expected: FileRecord | None) -> bool:
    if found is None or expected is None or found.size_bytes != expected.size_bytes:
        return True
    return expected.etag is not None and found.etag != expected.etag


def _is_meta(name: str) -> bool:  # manifest or mark: not one of the files that a manifest lists
    return name == MANIFEST_NAME or is_mark(name)


def put_manifest(store: Store, text: bytes) -> None:
    """Write the manifest if there is none: the commit of objects that are all there.

    The manifest that is there afterwards decides, not the response. Raises NameTakenError when it
    is another save's, TargetError when there is none, or it cannot be read.
    """
    found: bytes | None
    for pause in _PAUSES:
        time.sleep(pause)
        try:
            store.write(MANIFEST_NAME, text, create_only=True)
            found = text
        except TargetError as error:
            found, refusal = None, error
            with suppress(CorruptError):
                found = store.read(MANIFEST_NAME)
        if found == text:
            return
        if found is not None:
            raise NameTakenError(
                f"{store.url}: another save committed to this name at the same time, so files may "
                "be mixed; run `ft-ckpt verify`"
            )
    raise refusal


def open_object_staging(
    beside: Store, name: str, *, run_id: str | None = None, overwrite: bool = False
) -> ObjectStaging:
    """A staging for the checkpoint `name` in the folder `beside` of any store.

    Leftovers of a dead save, or of one of the same run, are deleted; with `overwrite` also an
    existing checkpoint, manifest first, so that there is none until the new one is whole.

    Raises NameTakenError if there is a checkpoint, TargetError if another save is in progress
    there, or files that belong to no checkpoint are in the way.
    """
    store = beside.within(name)
    mark = SaveMark(store, run_id=run_id)
    mark.take()
    try:
        _clear_folder(store, settled_list(store, SAVING), mark, overwrite=overwrite)
    except BaseException:
        mark.release()
        raise
    return ObjectStaging(store, beside, mark)


def _clear_folder(
    store: Store, listed: Sequence[Stored], mark: SaveMark, *, overwrite: bool
) -> None:
    """Delete the objects in the way of a save; raises as `open_object_staging` does."""
    names = {each.name for each in listed}
    guards = sorted(name for name in names if name.startswith((PIN, LEASE)))
    listing_files = [name for name in names if name.startswith((MANIFEST_NAME, TOMBSTONE))]
    if MANIFEST_NAME in names and not overwrite:
        raise NameTakenError(
            f"{store.url}: exists already, and a bucket cannot replace a checkpoint in one step; "
            "use another name, or overwrite=True, which deletes the old checkpoint before the new "
            "one is complete"
        )
    if MANIFEST_NAME in names and guards:
        raise NameTakenError(
            f"{store.url}: the checkpoint is pinned or being read: {listing(guards)}"
        )
    ours = {path for name in listing_files for path in manifest_files(store, name)} & names
    ours |= (
        files_of_save(names - {MANIFEST_NAME})
        if mark.cleared and MANIFEST_NAME not in names
        else set()
    )
    if others := sorted(name for name in names - ours if not _is_meta(name)):
        raise TargetError(
            f"{store.url}: {listing(others, ', ')}: files that belong to no checkpoint are in the "
            "way; move them, or use another name"
        )
    # first: without the manifest, only the mark says which save the rest belongs to
    mark.declare_clear()
    store.delete([MANIFEST_NAME] if MANIFEST_NAME in names else [])
    store.delete(
        [*sorted(ours), *(name for name in names if name.startswith((TOMBSTONE, PIN, LEASE)))]
    )


def open_staging_at(
    target: Place,
    direct_bytes: int | None = BLOCK_BYTES,
    *,
    run_id: str | None = None,
    overwrite: bool = False,
    max_mode: int = 0o777,
) -> Staging:
    """A new staging for a place in any store; raises as `open_staging` and `open_object_staging`
    do.

    On a disk, `max_mode` limits the permissions of what is committed.
    """
    store = target.folder
    if store.local_folder is not None:
        return open_staging(store.local_folder, direct_bytes, max_mode)
    return open_object_staging(target.beside, target.basename, run_id=run_id, overwrite=overwrite)


def settle_staging_at(target: Place) -> None:
    """Delete the leftovers at `target` of a save that was killed after its commit, as far as
    possible.
    """
    store = target.folder
    if store.local_folder is not None:
        recover_target(store.local_folder)
    else:
        clear_spent_mark(store)


def open_staging(
    target: Path, direct_bytes: int | None = BLOCK_BYTES, max_mode: int = 0o777
) -> LocalStaging:
    """A new staging for the folder `target`; raises as `commit.open_stage` does.

    Other arguments: see LocalStore.
    """
    return LocalStaging(commit.open_stage(target), target, direct_bytes, max_mode)


def stage_store(stage: Path, direct_bytes: int | None = BLOCK_BYTES) -> LocalStore:
    """The store of the files in a stage, on any rank that sees it; the commit syncs them."""
    return LocalStore(stage, direct_bytes, syncs=False)
