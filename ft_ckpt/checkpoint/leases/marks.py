"""Marks in the folder of a checkpoint, which guard it or say what is going on there.

Every operation on a checkpoint in a bucket first puts a mark and then lists the folder, so that of
two concurrent operations at least one sees the other's mark. A removal gives way: it deletes its
tombstone when it sees a pin, a lease, a save, or another removal. All others wait until the removal
is over, and list again.

`leases` says how long a mark is valid. Pins, metrics and signatures do not expire.
"""

import time
from collections.abc import Iterable

from ft_ckpt.checkpoint.leases.leases import may_live
from ft_ckpt.errors import UnreadableError
from ft_ckpt.storage import PREFIX, Store, Stored

PIN = f"{PREFIX}pin"
# in a bucket: a signature and the manifest that it covers (`extensions.transfer.copies`)
SIGNED = f"{PREFIX}signature"
SAVING = f"{PREFIX}saving"  # a save to a bucket in progress
TOMBSTONE = f"{PREFIX}dropped"  # lists the files to delete; in a bucket, prefix of the names
_POLL_SECONDS, _PATIENCE_SECONDS = 0.2, 60.0  # waiting for a removal, which takes a few requests


def is_mark(name: str) -> bool:
    """Whether an object directly in a checkpoint's folder is a mark."""
    return name.startswith(PREFIX) and "/" not in name


def living_marks(store: Store, objects: Iterable[Stored], kind: str, now: float) -> list[str]:
    """The names of the marks of one `kind` among `objects` whose processes may be alive."""
    marks = [stored for stored in objects if stored.name.startswith(kind)]
    return [mark.name for mark in marks if may_live(store, mark, now)]


def settled_list(store: Store, own_mark: str | None) -> list[Stored]:
    """All objects of a checkpoint in a bucket, once no removal may miss the mark `own_mark`.

    `own_mark` was just put there; without it, nothing is waited for. Raises UnreadableError after a
    minute.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        objects = store.list()
        times = [stored.modified for stored in objects if stored.name == own_mark]
        if not times:
            return objects
        removals = living_marks(store, objects, TOMBSTONE, now=times[0])
        if not removals:
            return objects
        if time.monotonic() > deadline:
            raise UnreadableError(
                f"{store.url}: is being deleted ({removals[0]}); try again in a minute"
            )
        time.sleep(_POLL_SECONDS)
