"""Deletes checkpoints, training states and the leftovers of killed saves in a bucket.

A bucket has neither renames nor locks, so each removal has five steps, and may be interrupted
between any two:

    put a tombstone     a mark, see `guards`, that lists the files to delete
    list the folder     and give way to other marks: only the tombstone is deleted
    the manifest        is deleted or replaced: from here on no manifest lists the files to delete
    delete the rest     in bulk
    delete the tombstone

The tombstone of a dead process defines the remaining work: delete the files that it lists and the
manifest, if there is one, does not. If the manifest was not touched yet, there are none. Files that
no manifest of ours listed stay, except those of a dead save whose mark records that all files in
the folder belong to saves ("cleared").
"""

import time
from collections.abc import Callable, Iterable, Mapping, Set as AbstractSet
from dataclasses import replace
from functools import partial

from ft_ckpt.checkpoint.catalog import load_manifest
from ft_ckpt.checkpoint.delete import Removal, manifest_files, without_state
from ft_ckpt.checkpoint.guards import (
    PIN,
    SAVING,
    SIGNED,
    TOMBSTONE,
    clear_spent_mark,
    is_mark,
    living_marks,
    pin_reason,
)
from ft_ckpt.checkpoint.leases import (
    LEASE,
    STALE_SECONDS,
    mark_holder,
    may_live,
    new_mark,
    put_mark,
    read_mark,
)
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, manifest_to_json
from ft_ckpt.checkpoint.metrics import METRIC
from ft_ckpt.storage import ABANDONED_SECONDS, PREFIX, Place, Store, Stored

Listed = Mapping[str, Stored]  # objects of a checkpoint's folder, by name


def drop_from_bucket(store: Store) -> Removal:
    """Delete the checkpoint in `store`, unless something guards it; raises as
    `delete.delete_checkpoint` does.
    """
    found = store.stat(MANIFEST_NAME)
    if found is None:  # deleted by another process
        return Removal(store.url)
    doomed = manifest_files(store, MANIFEST_NAME)
    done = _remove_files(
        store, doomed, found.version, partial(store.delete, [MANIFEST_NAME]), spent=None
    )
    return replace(done, dropped=not done.why)


def strip_in_bucket(store: Store) -> Removal:
    """Delete the training state of the checkpoint in `store`, unless something guards it; raises as
    above.
    """
    found = store.stat(MANIFEST_NAME)
    if found is None:
        return Removal(store.url)
    manifest = load_manifest(store)
    bare = without_state(manifest)
    doomed = {file.path for file in manifest.files} - {file.path for file in bare.files}
    text = manifest_to_json(bare).encode()
    done = _remove_files(store, doomed, found.version, partial(store.write, MANIFEST_NAME, text))
    return replace(done, stripped=not done.why, left=())


def settle_in_bucket(store: Store, listed: Listed, now: float) -> Removal | None:
    """Finish interrupted operations of dead processes in the folder `store`, as `listed`; None if
    there are none.

    Without a manifest, the files of a dead save are deleted if its mark is "cleared". The mark
    itself is deleted a day after its last renewal, because a process that seemed dead may write
    again; that of a committed save at once.
    """
    committed, saving = listed.get(MANIFEST_NAME), listed.get(SAVING)
    if committed and saving and clear_spent_mark(store):
        saving = None
        listed = {name: each for name, each in listed.items() if name != SAVING}
    spent = {
        each.name
        for each in listed.values()
        if is_mark(each.name) and not may_live(store, each, now)
    } - {SAVING}
    if committed or saving:
        # they outlive their process
        spent = {name for name in spent if not name.startswith((PIN, SIGNED, METRIC))}
    doomed = {
        path for name in spent if name.startswith(TOMBSTONE) for path in manifest_files(store, name)
    }
    is_dead = saving is not None and not committed and not may_live(store, saving, now)
    unfinished = (
        files_of_save(listed) if is_dead and read_mark(store, SAVING).get("cleared") else set()
    )
    if saving and not unfinished and saving.modified < now - ABANDONED_SECONDS:
        spent.add(SAVING)
    doomed |= unfinished
    if committed and doomed:
        doomed -= manifest_files(store, MANIFEST_NAME)
    if (doomed | spent).isdisjoint(listed):
        return None
    done = _remove_files(store, doomed, committed.version if committed else None, spent=spent)
    finished = not done.why and any(name.startswith(TOMBSTONE) for name in spent)
    dropped, stripped = finished and not committed, finished and not doomed.isdisjoint(listed)
    return replace(
        done, dropped=dropped, stripped=stripped and not dropped, left=done.left if dropped else ()
    )


def mark_guards(store: Store, listed: Listed, now: float) -> tuple[str, ...]:
    """The reasons, read from its marks, why the checkpoint in `store` must not be deleted."""
    pinned = pin_reason(Place(store)) if PIN in listed else None
    leases = (
        f"in use by {mark_holder(store, name)}"
        for name in living_marks(store, listed.values(), LEASE, now)
    )
    return (*((pinned,) if pinned else ()), *leases, *_save_under_way(store, listed, now))


def _remove_files(
    store: Store,
    doomed: AbstractSet[str],
    seen: str | None,
    touch: Callable[[], None] | None = None,
    *,
    spent: AbstractSet[str] | None = frozenset(),
) -> Removal:
    """The five steps.

    `seen`: the version of the manifest that was read, None without one; `touch` deletes or replaces
    it. `spent`: marks to delete as well; None for all except that of a save.
    """
    begun, tombstone = time.monotonic(), new_mark(f"{TOMBSTONE}-")
    put_mark(store, tombstone, files=[{"path": path} for path in sorted(doomed)])
    listed = {each.name: each for each in store.list()}
    why = _obstacles(store, listed, tombstone, seen, guarded=touch is not None)
    # the tombstone may soon expire for others
    if not why and time.monotonic() - begun > STALE_SECONDS / 2:
        why = ("its store answers too slowly to delete anything safely",)
    if why:
        store.delete([tombstone])
        return Removal(store.url, why=why)
    if touch is not None:
        touch()
    gone = {name for name in doomed & listed.keys() if not is_mark(name)}
    marks = {name for name in listed if is_mark(name) and name != tombstone}
    store.delete(sorted(gone))
    store.delete([*sorted(marks - {SAVING} if spent is None else marks & spent), tombstone])
    left = sorted(listed.keys() - gone - marks - {tombstone, MANIFEST_NAME})
    freed = sum(listed[name].size_bytes for name in gone)
    return Removal(store.url, freed_bytes=freed, left=tuple(map(store.where, left)))


def _obstacles(
    store: Store, listed: Listed, tombstone: str, seen: str | None, *, guarded: bool
) -> tuple[str, ...]:
    """The reasons to give way. Pins and leases protect the manifest and the files it lists."""
    own, manifest = listed.get(tombstone), listed.get(MANIFEST_NAME)
    if own is None or (manifest.version if manifest else None) != seen:
        return ("it was changed while it was to be deleted",)
    others = {name: each for name, each in listed.items() if name != tombstone}
    if living_marks(store, others.values(), TOMBSTONE, own.modified):
        return ("another sweep is at work on it",)
    return (
        mark_guards(store, others, own.modified)
        if guarded
        else _save_under_way(store, others, own.modified)
    )


def _save_under_way(store: Store, listed: Listed, now: float) -> tuple[str, ...]:
    return (
        ("a save to it is not finished",)
        if living_marks(store, listed.values(), SAVING, now)
        else ()
    )


def files_of_save(listed: Iterable[str]) -> set[str]:
    """The files of a save into a folder that was empty when it began: all except marks.

    Empty if a folder below has a checkpoint or marks: the owner of the files is then unknown.
    """
    names = set(listed)
    is_run = any(name.endswith(f"/{MANIFEST_NAME}") or f"/{PREFIX}" in name for name in names)
    return set() if is_run else {name for name in names if not is_mark(name)}
