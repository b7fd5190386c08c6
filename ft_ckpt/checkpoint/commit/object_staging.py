"""The staging of a save to a bucket, which cannot move many objects in one step.

Objects are written under their final names. The commit is writing the manifest, last and only if
there is none.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from ft_ckpt.checkpoint.commit.bucket_delete import files_of_save
from ft_ckpt.checkpoint.commit.delete import manifest_files
from ft_ckpt.checkpoint.leases import (
    LEASE,
    PIN,
    SAVING,
    TOMBSTONE,
    SaveMark,
    is_mark,
    list_after_removals,
)
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    check_paths,
    manifest_to_json,
    next_number,
)
from ft_ckpt.errors import CorruptError, NameTakenError, TargetError, listing
from ft_ckpt.storage import Store, Stored
from ft_ckpt.storage.digests import SMALL_BYTES, FileRecord, read_record

_MAX_READS = 8  # concurrent reads
_PAUSES = (0.0, 1.0, 4.0)  # seconds before each attempt to write the manifest


@dataclass(frozen=True)
class ObjectStaging:
    """Objects under their final names, which the manifest will make a checkpoint.

    `mark` excludes other saves.
    """

    store: Store
    beside: Store
    mark: SaveMark

    def commit(self, manifest: Manifest) -> None:
        """Compare the objects with the manifest, and write the manifest if there is none.

        Readers see the whole checkpoint or none. Raises CorruptError if objects and manifest
        differ; NameTakenError if another save has committed first (verify that checkpoint, because
        these objects may have replaced its own); TargetError if the manifest cannot be written, or
        if another save has taken over the folder.
        """
        check_paths(manifest, self.store.url)
        if manifest.step is None and manifest.number is None:
            manifest = replace(manifest, number=next_number(self.store, self.beside))
        objects = {stored.name: stored for stored in self._list_files()}
        self._check_objects(manifest, objects)
        self.mark.check()
        files = tuple(replace(file, etag=objects[file.path].etag) for file in manifest.files)
        manifest = replace(manifest, files=files, token=self.mark.token)
        put_manifest(self.store, manifest_to_json(manifest).encode())
        self.mark.release()

    def discard(self) -> None:
        """Delete all objects, unless there is a manifest or another save has the folder."""
        if not self.mark.is_held:
            return
        if self.mark.is_ours and self.store.stat(MANIFEST_NAME) is None:
            self.store.delete([stored.name for stored in self._list_files()])
        self.mark.release()

    def _list_files(self) -> list[Stored]:
        return [stored for stored in self.store.list() if not _is_meta(stored.name)]

    def _check_objects(self, manifest: Manifest, objects: Mapping[str, Stored]) -> None:
        """Raise CorruptError naming all objects that differ from what this save has written."""
        records = {file.path: file for file in manifest.files}
        names = sorted(objects.keys() | records.keys())
        wrong = [name for name in names if _differs(objects.get(name), records.get(name))]
        if not wrong:
            wrong = self._wrong_small_files(manifest)
        if wrong:
            raise CorruptError(
                f"{self.store.url}: {listing(wrong, ', ')}: stored with another size or digest "
                "than was written; save again"
            )

    def _wrong_small_files(self, manifest: Manifest) -> list[str]:
        """Return the small objects with other bytes.

        Their digests are compared, because an object written in one request has no known version.
        """
        digests = {}
        for file in manifest.files:
            if file.etag is None and file.size_bytes < SMALL_BYTES:
                digests[file.path] = file.digest
        with ThreadPoolExecutor(_MAX_READS) as pool:
            stored = pool.map(lambda path: read_record(self.store, path), digests)
            return [record.path for record in stored if record.digest != digests[record.path]]


def open_object_staging(
    beside: Store, name: str, *, run_id: str | None = None, overwrite: bool = False
) -> ObjectStaging:
    """Open a staging for the checkpoint `name` in the folder `beside` of any store.

    Leftovers of a dead save, or of a save of the same run, are deleted. With `overwrite` an
    existing checkpoint is deleted too, its manifest first, so that there is no checkpoint until the
    new one is whole. Raises NameTakenError if there is a checkpoint; TargetError if another save is
    in progress in the folder, or if files that belong to no checkpoint are in the way.
    """
    store = beside.within(name)
    mark = SaveMark(store, run_id=run_id)
    mark.take()
    try:
        _clear_folder(store, list_after_removals(store, SAVING), mark, overwrite=overwrite)
    except BaseException:
        mark.release()
        raise
    return ObjectStaging(store, beside, mark)


def put_manifest(store: Store, text: bytes) -> None:
    """Write the manifest if there is none, which commits objects that are already written.

    The manifest that can be read afterwards decides whether this save is committed, not the
    response. Raises NameTakenError if it is the manifest of another save, TargetError if there is
    none or it cannot be read.
    """
    for pause in _PAUSES:
        time.sleep(pause)
        try:
            store.write(MANIFEST_NAME, text, create_only=True)
        except TargetError as error:
            refusal = error
        else:
            return

        stored_text: bytes | None = None
        with suppress(CorruptError):
            stored_text = store.read(MANIFEST_NAME)
        if stored_text == text:
            return
        if stored_text is not None:
            raise NameTakenError(
                f"{store.url}: another save committed to this name at the same time, so files may "
                "be mixed; run `ft-ckpt verify`"
            )

    raise refusal


def _clear_folder(
    store: Store, objects: Sequence[Stored], mark: SaveMark, *, overwrite: bool
) -> None:
    """Delete the objects in the way of a save. Raises what `open_object_staging` raises."""
    names = {stored.name for stored in objects}
    guards = sorted(name for name in names if name.startswith((PIN, LEASE)))
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

    files: set[str] = set()  # of checkpoints and dead saves
    for name in names:
        if name.startswith((MANIFEST_NAME, TOMBSTONE)):
            files |= manifest_files(store, name)

    if mark.cleared and MANIFEST_NAME not in names:
        files |= files_of_save(names)
    files &= names
    foreign = sorted(name for name in names - files if not _is_meta(name))
    if foreign:
        raise TargetError(
            f"{store.url}: {listing(foreign, ', ')}: files that belong to no checkpoint are in the "
            "way; move them, or use another name"
        )

    # declared first: without a manifest, the mark alone says that the files belong to saves
    mark.declare_clear()
    if MANIFEST_NAME in names:
        store.delete([MANIFEST_NAME])
    spent_marks = [name for name in names if name.startswith((TOMBSTONE, PIN, LEASE))]
    store.delete([*sorted(files), *spent_marks])


def _differs(stored: Stored | None, record: FileRecord | None) -> bool:
    if stored is None or record is None or stored.size_bytes != record.size_bytes:
        return True
    return record.etag is not None and stored.etag != record.etag


def _is_meta(name: str) -> bool:
    """Check for the manifest or a mark, which no manifest lists."""
    return name == MANIFEST_NAME or is_mark(name)
