"""Marks: small hidden objects in checkpoints' folders that say what is done there. In a bucket they stand for locks.

Whoever is about to do something with a checkpoint in a bucket puts a mark first and lists the folder after it, so that
of two at least one sees the other's. A removal gives way: it takes its tombstone back when it sees a pin, a lease, a
save, or another removal. All others wait until the removal that they see is over, and then look at what is there.

A mark counts while it was put within ten minutes, by the clock of the store: when it was listed last, one's own was
just put. On the machine of its process it counts no longer than the process lives. Pins count always.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from ft_ckpt.errors import CheckpointError, UnreadableError
from ft_ckpt.storage import owners
from ft_ckpt.storage.placing import PREFIX
from ft_ckpt.storage.store import Store, Stored, read_text

PIN = f"{PREFIX}pin"
LEASE = f"{PREFIX}lease-"  # begins the names of leases
SAVING = f"{PREFIX}saving"  # of a save to a bucket that is under way
TOMBSTONE = f"{PREFIX}dropped"  # what is being deleted; in a bucket, begins the names of such lists
CLOCK = f"{PREFIX}clock-"  # begins the names of objects that are put to learn the time
PROBE = f"{PREFIX}probe-"  # begins the names of objects that are put to try a bucket
BEAT_SECONDS, STALE_SECONDS = 60.0, 600.0
_MARK_LIMIT_BYTES = 64 << 10
_POLL_SECONDS, _PATIENCE_SECONDS = 0.2, 60.0  # of those who wait for a removal, which is over in a few requests


def read_mark(store: Store, name: str) -> dict[str, Any]:
    """The JSON object in a mark; empty when it was cut short, as it may be when its writer died."""
    try:
        found = json.loads(read_text(store, name, _MARK_LIMIT_BYTES))
    except (CheckpointError, RecursionError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def mark_holder(store: Store, name: str) -> str:
    """The process that put a mark, in words."""
    found = read_mark(store, name)
    return f"process {found.get('pid')} on {found.get('host')}" if found else name.removeprefix(LEASE)


def put_mark(store: Store, name: str, *, create_only: bool = False, **facts: Any) -> None:
    """Put a mark that tells its process, and `facts`. Raises TargetError."""
    store.write(name, json.dumps({**owners.process_facts(), **facts}).encode(), create_only=create_only)


def store_time(store: Store) -> float:
    """The time of a store by its own clock, in unix seconds: that of an object put there. Raises TargetError."""
    clock = own_mark(CLOCK)
    put_mark(store, clock)
    try:
        found = store.stat(clock)
    finally:
        store.delete([clock])
    if found is None:
        raise UnreadableError(f"{store.where(clock)}: put there, and not there; the store is used by no other tool?")
    return found.modified


def own_mark(kind: str) -> str:
    """A new name for a mark of this process, which begins with `kind`."""
    return kind + owners.new_owner()


def is_mark(name: str) -> bool:
    """Whether an object directly in a checkpoint's folder is a mark."""
    return name.startswith(PREFIX) and "/" not in name


def may_live(store: Store, mark: Stored, now: float) -> bool:
    """Whether the process of a mark may live; `now` is in unix seconds, by the clock of the store."""
    return mark.modified > now - STALE_SECONDS and not owners.is_gone(read_mark(store, mark.name))


def living_marks(store: Store, listed: Iterable[Stored], kind: str, now: float) -> list[str]:
    """The names of the marks of one `kind` whose processes may live."""
    return [each.name for each in listed if each.name.startswith(kind) and may_live(store, each, now)]


def settled_list(store: Store, own: str | None) -> list[Stored]:
    """All objects of a checkpoint in a bucket, when no removal is under way that may not have seen the mark `own`.

    `own` was just put there; without one, nothing is waited for. Raises UnreadableError after a minute.
    """
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        listed = store.list()
        now = next((each.modified for each in listed if each.name == own), None)
        busy = [] if now is None else living_marks(store, listed, TOMBSTONE, now)
        if not busy:
            return listed
        if time.monotonic() > until:
            raise UnreadableError(f"{store.url}: being deleted, in whole or in part ({busy[0]}); try again in a while")
        time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def lease_in_bucket(store: Store) -> Iterator[str | None]:
    """Put a lease on the checkpoint in `store`, again each minute, and delete it after the block; yields its name.

    None where nothing can be written: whoever reads there has no say in what is deleted.
    """
    name = own_mark(LEASE)
    try:
        put_mark(store, name)
    except CheckpointError:
        yield None
        return
    over = threading.Event()
    beats = threading.Thread(target=_renew_mark, args=(store, name, over), name="ft_ckpt-lease", daemon=True)
    beats.start()
    try:
        yield name
    finally:
        over.set()
        beats.join()
        with contextlib.suppress(CheckpointError):  # it will be dead in ten minutes
            store.delete([name])


def _renew_mark(store: Store, name: str, over: threading.Event) -> None:
    while not over.wait(BEAT_SECONDS):
        with contextlib.suppress(CheckpointError):
            put_mark(store, name)
