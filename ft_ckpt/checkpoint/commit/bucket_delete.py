"""Deletes checkpoints, training states and the leftovers of killed saves in a bucket.

A bucket has neither renames nor locks. So each removal has five steps, and it may be interrupted
between any two of them:

    1. write a tombstone            a mark, see `marks`, that lists the files to delete
    2. list the folder              if there are other marks, delete the tombstone and give up
    3. delete or replace the        now no manifest lists the files to delete
       manifest
    4. delete the files             in bulk
    5. delete the tombstone

If the process dies, its tombstone says what remains: delete the files that the tombstone lists and
the manifest does not. As long as step 3 is not done, there are no such files. Files that no
manifest listed stay. The files of a dead save are an exception, if its mark records that all files
in the folder belong to saves ("cleared").
"""

import time
from collections.abc import Callable, Iterable, Mapping, Set as AbstractSet
from dataclasses import replace
from functools import partial

from ft_ckpt.checkpoint.catalog import METRIC
from ft_ckpt.checkpoint.commit.delete import Removal, manifest_files, without_state
from ft_ckpt.checkpoint.leases import (
    LEASE,
    PIN,
    SAVING,
    SIGNED,
    STALE_SECONDS,
    TOMBSTONE,
    clear_spent_mark,
    is_mark,
    living_marks,
    mark_holder,
    may_live,
    new_mark,
    pin_reason,
    put_mark,
    read_mark,
)
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_NAME,
    load_manifest,
    manifest_to_json,
    manifest_version,
)
from ft_ckpt.storage import ABANDONED_SECONDS, PREFIX, Store, Stored
from ft_ckpt.storage.places import Place

# the objects of a checkpoint's folder by name
Listed = Mapping[str, Stored]


def drop_from_bucket(store: Store) -> Removal:
    """Delete the checkpoint in `store`, unless a mark guards it.

    Raises what `delete.delete_checkpoint` raises.
    """
    version = manifest_version(store)
    if version is None:  # deleted by another process
        return Removal(store.url)
    to_delete = manifest_files(store, MANIFEST_NAME)
    delete_manifest = partial(store.delete, [MANIFEST_NAME])
    removal = _remove_files(store, to_delete, version, delete_manifest, dead_marks=None)
    return replace(removal, dropped=not removal.why)


def strip_in_bucket(store: Store) -> Removal:
    """Delete the training state of the checkpoint in `store`, unless a mark guards it.

    Raises what `drop_from_bucket` raises.
    """
    version = manifest_version(store)
    if version is None:
        return Removal(store.url)
    manifest = load_manifest(store)
    stateless_manifest = without_state(manifest)
    to_delete = {file.path for file in manifest.files} - {
        file.path for file in stateless_manifest.files
    }
    text = manifest_to_json(stateless_manifest).encode()
    replace_manifest = partial(store.write, MANIFEST_NAME, text)
    removal = _remove_files(store, to_delete, version, replace_manifest)
    return replace(removal, stripped=not removal.why, left=())


def recover_in_bucket(store: Store, listed: Listed, now: float) -> Removal | None:
    """Finish interrupted operations of dead processes in the folder `store`, which is `listed`.

    Return None if there are none. Without a manifest, the files of a dead save are deleted if its
    mark is "cleared". The mark itself is deleted a day after its last renewal, because a process
    that seemed dead may write again; the mark of a committed save is deleted at once.
    """
    committed = listed.get(MANIFEST_NAME)
    saving = listed.get(SAVING)
    if committed and saving and clear_spent_mark(store):
        saving = None
        listed = {name: stored for name, stored in listed.items() if name != SAVING}

    dead_marks = _dead_marks(store, listed, now)
    if committed or saving:
        # pins, signatures and metrics outlive their process
        dead_marks = {name for name in dead_marks if not name.startswith((PIN, SIGNED, METRIC))}

    to_delete: set[str] = set()
    for name in dead_marks:
        if name.startswith(TOMBSTONE):
            to_delete |= manifest_files(store, name)

    unfinished: set[str] = set()
    is_dead = saving is not None and not committed and not may_live(store, saving, now)
    if is_dead and read_mark(store, SAVING).get("cleared"):
        unfinished = files_of_save(listed)
    if saving and not unfinished and saving.modified < now - ABANDONED_SECONDS:
        dead_marks.add(SAVING)
    to_delete |= unfinished
    if committed and to_delete:
        to_delete -= manifest_files(store, MANIFEST_NAME)
    if (to_delete | dead_marks).isdisjoint(listed):
        return None
    removal = _remove_files(
        store, to_delete, committed.version if committed else None, dead_marks=dead_marks
    )
    is_finished = not removal.why and any(name.startswith(TOMBSTONE) for name in dead_marks)
    if is_finished and not committed:
        return replace(removal, dropped=True)
    return replace(removal, stripped=is_finished and not to_delete.isdisjoint(listed), left=())


def _dead_marks(store: Store, listed: Listed, now: float) -> set[str]:
    """Return the marks whose processes are dead, except the mark of a save."""
    dead_marks = set()
    for stored in listed.values():
        if is_mark(stored.name) and not may_live(store, stored, now):
            dead_marks.add(stored.name)
    return dead_marks - {SAVING}


def mark_guards(store: Store, listed: Listed, now: float) -> tuple[str, ...]:
    """Return the reasons, from its marks, why the checkpoint in `store` must not be deleted."""
    reasons = []
    reason_of_pin = pin_reason(Place(store)) if PIN in listed else None
    if reason_of_pin:
        reasons.append(reason_of_pin)
    for name in living_marks(store, listed.values(), LEASE, now):
        reasons.append(f"in use by {mark_holder(store, name)}")
    return (*reasons, *_save_in_progress(store, listed, now))


def _remove_files(
    store: Store,
    to_delete: AbstractSet[str],
    read_version: str | None,
    change_manifest: Callable[[], None] | None = None,
    *,
    dead_marks: AbstractSet[str] | None = frozenset(),
) -> Removal:
    """Take the five steps of a removal.

    `read_version` is the version of the manifest that was read, or None without a manifest.
    `change_manifest` deletes or replaces the manifest. `dead_marks` are deleted too. If it is None,
    all marks except the mark of a save are deleted.
    """
    started = time.monotonic()
    tombstone = new_mark(f"{TOMBSTONE}-")
    put_mark(store, tombstone, files=[{"path": path} for path in sorted(to_delete)])
    listed = {stored.name: stored for stored in store.list()}
    why = _obstacles(store, listed, tombstone, read_version, guarded=change_manifest is not None)

    # If this took long, the tombstone may expire for other processes during the removal.
    if not why and time.monotonic() - started > STALE_SECONDS / 2:
        why = ("its store answers too slowly to delete anything safely",)
    if why:
        store.delete([tombstone])
        return Removal(store.url, why=why)

    if change_manifest is not None:
        change_manifest()
    marks = {name for name in listed if is_mark(name) and name != tombstone}
    deleted = {name for name in to_delete & listed.keys() if not is_mark(name)}
    deleted_marks = marks - {SAVING} if dead_marks is None else marks & dead_marks
    store.delete(sorted(deleted))
    store.delete([*sorted(deleted_marks), tombstone])
    unlisted = sorted(listed.keys() - deleted - marks - {tombstone, MANIFEST_NAME})
    freed_bytes = sum(listed[name].size_bytes for name in deleted)
    return Removal(store.url, freed_bytes=freed_bytes, left=tuple(map(store.where, unlisted)))


def _obstacles(
    store: Store, listed: Listed, tombstone: str, read_version: str | None, *, guarded: bool
) -> tuple[str, ...]:
    """Return the reasons to give up the removal.

    Pins and leases are reasons only if `guarded`, because they protect the manifest and its files.
    """
    mark = listed.get(tombstone)
    manifest = listed.get(MANIFEST_NAME)
    current_version = manifest.version if manifest else None
    if mark is None or current_version != read_version:
        return ("it was changed while it was to be deleted",)
    now = mark.modified
    other_objects = {name: stored for name, stored in listed.items() if name != tombstone}
    if living_marks(store, other_objects.values(), TOMBSTONE, now):
        return ("another sweep is at work on it",)
    if guarded:
        return mark_guards(store, other_objects, now)
    return _save_in_progress(store, other_objects, now)


def _save_in_progress(store: Store, listed: Listed, now: float) -> tuple[str, ...]:
    if living_marks(store, listed.values(), SAVING, now):
        return ("a save to it is not finished",)
    return ()


def files_of_save(listed: Iterable[str]) -> set[str]:
    """Return the files of a save into a folder that was empty at its start.

    These are all files except marks. Return no files if a folder below has a checkpoint or marks,
    because then it is unknown to which save the files belong.
    """
    names = set(listed)
    for name in names:
        if name.endswith(f"/{MANIFEST_NAME}") or f"/{PREFIX}" in name:
            return set()
    return {name for name in names if not is_mark(name)}
