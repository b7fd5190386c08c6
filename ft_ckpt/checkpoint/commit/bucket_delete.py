"""Deletes checkpoints, training states and the leftovers of killed saves in a bucket.

A bucket has neither renames nor locks, so each removal has five steps, and may be interrupted
between any two:

    put a tombstone     a mark, see `marks`, that lists the files to delete
    list the folder     and give way to other marks, by deleting only the tombstone
    the manifest        is deleted or replaced: after this no manifest lists the files to delete
    delete the rest     in bulk
    delete the tombstone

The tombstone of a dead process defines the remaining work: delete the files that the tombstone
lists and the manifest, if there is one, does not. If the manifest is the old one, there are no such
files. Files that no manifest listed stay, except the files of a dead save whose mark records that
all files in the folder belong to saves ("cleared").
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

Listed = Mapping[str, Stored]  # objects of a checkpoint's folder, by name


def drop_from_bucket(store: Store) -> Removal:
    """Delete the checkpoint in `store`, unless a mark guards it.

    Raises what `delete.delete_checkpoint` raises.
    """
    version = manifest_version(store)
    if version is None:  # deleted by another process
        return Removal(store.url)
    doomed = manifest_files(store, MANIFEST_NAME)
    delete_manifest = partial(store.delete, [MANIFEST_NAME])
    removal = _remove_files(store, doomed, version, delete_manifest, spent=None)
    return replace(removal, dropped=not removal.why)


def strip_in_bucket(store: Store) -> Removal:
    """Delete the training state of the checkpoint in `store`, unless a mark guards it.

    Raises what `drop_from_bucket` raises.
    """
    version = manifest_version(store)
    if version is None:
        return Removal(store.url)
    manifest = load_manifest(store)
    bare = without_state(manifest)
    doomed = {file.path for file in manifest.files} - {file.path for file in bare.files}
    text = manifest_to_json(bare).encode()
    replace_manifest = partial(store.write, MANIFEST_NAME, text)
    removal = _remove_files(store, doomed, version, replace_manifest)
    return replace(removal, stripped=not removal.why, left=())


def recover_in_bucket(store: Store, listed: Listed, now: float) -> Removal | None:
    """Finish interrupted operations of dead processes in the folder `store`, which is `listed`.

    Return None if there are none. Without a manifest, the files of a dead save are deleted if its
    mark is "cleared". The mark itself is deleted a day after its last renewal, because a process
    that seemed dead may write again; the mark of a committed save is deleted at once.
    """
    committed, saving = listed.get(MANIFEST_NAME), listed.get(SAVING)
    if committed and saving and clear_spent_mark(store):
        saving = None
        listed = {name: stored for name, stored in listed.items() if name != SAVING}
    spent = _spent_marks(store, listed, now)
    if committed or saving:
        # these outlive their process
        spent = {name for name in spent if not name.startswith((PIN, SIGNED, METRIC))}
    doomed: set[str] = set()
    for name in spent:
        if name.startswith(TOMBSTONE):
            doomed |= manifest_files(store, name)
    unfinished: set[str] = set()
    is_dead = saving is not None and not committed and not may_live(store, saving, now)
    if is_dead and read_mark(store, SAVING).get("cleared"):
        unfinished = files_of_save(listed)
    if saving and not unfinished and saving.modified < now - ABANDONED_SECONDS:
        spent.add(SAVING)
    doomed |= unfinished
    if committed and doomed:
        doomed -= manifest_files(store, MANIFEST_NAME)
    if (doomed | spent).isdisjoint(listed):
        return None
    removal = _remove_files(store, doomed, committed.version if committed else None, spent=spent)
    is_finished = not removal.why and any(name.startswith(TOMBSTONE) for name in spent)
    if is_finished and not committed:
        return replace(removal, dropped=True)
    return replace(removal, stripped=is_finished and not doomed.isdisjoint(listed), left=())


def _spent_marks(store: Store, listed: Listed, now: float) -> set[str]:
    """Return the marks whose processes are dead, except the mark of a save."""
    spent = set()
    for stored in listed.values():
        if is_mark(stored.name) and not may_live(store, stored, now):
            spent.add(stored.name)
    return spent - {SAVING}


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
    doomed: AbstractSet[str],
    read_version: str | None,
    touch: Callable[[], None] | None = None,
    *,
    spent: AbstractSet[str] | None = frozenset(),
) -> Removal:
    """Take the five steps of a removal.

    `read_version` is the version of the manifest that was read, None without a manifest; `touch`
    deletes or replaces the manifest. `spent` are marks to delete as well; None stands for all marks
    except the mark of a save.
    """
    started, tombstone = time.monotonic(), new_mark(f"{TOMBSTONE}-")
    put_mark(store, tombstone, files=[{"path": path} for path in sorted(doomed)])
    listed = {stored.name: stored for stored in store.list()}
    why = _obstacles(store, listed, tombstone, read_version, guarded=touch is not None)
    # after that time the tombstone may soon expire for other processes
    if not why and time.monotonic() - started > STALE_SECONDS / 2:
        why = ("its store answers too slowly to delete anything safely",)
    if why:
        store.delete([tombstone])
        return Removal(store.url, why=why)
    if touch is not None:
        touch()
    marks = {name for name in listed if is_mark(name) and name != tombstone}
    deleted = {name for name in doomed & listed.keys() if not is_mark(name)}
    deleted_marks = marks - {SAVING} if spent is None else marks & spent
    store.delete(sorted(deleted))
    store.delete([*sorted(deleted_marks), tombstone])
    unlisted = sorted(listed.keys() - deleted - marks - {tombstone, MANIFEST_NAME})
    freed_bytes = sum(listed[name].size_bytes for name in deleted)
    return Removal(store.url, freed_bytes=freed_bytes, left=tuple(map(store.where, unlisted)))


def _obstacles(
    store: Store, listed: Listed, tombstone: str, read_version: str | None, *, guarded: bool
) -> tuple[str, ...]:
    """Return the reasons to give way.

    If `guarded`, pins and leases are reasons: they protect the manifest and the files it lists.
    """
    mark, manifest = listed.get(tombstone), listed.get(MANIFEST_NAME)
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
    """Return the files of a save into a folder that was empty at its start: all except marks.

    Return no files if a folder below has a checkpoint or marks, because it is then unknown whose
    files they are.
    """
    names = set(listed)
    for name in names:
        if name.endswith(f"/{MANIFEST_NAME}") or f"/{PREFIX}" in name:
            return set()
    return {name for name in names if not is_mark(name)}
