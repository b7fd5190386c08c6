"""Marks in the folder of a checkpoint, which guard it or announce an operation on it.

A mark is a small JSON file or object in the folder. The mark of a removal is called a tombstone.

Every operation on a checkpoint in a bucket first writes its mark and then lists the folder. So of
two concurrent operations at least one sees the mark of the other. A removal that sees a pin, a
lease, a save or another removal gives up and deletes its tombstone. All other operations wait until
the removal is over, and list the folder again.

`leases` says how long a mark is valid. Pins, metrics and signatures do not expire.
"""

import time
from collections.abc import Iterable

from ft_ckpt.checkpoint.leases.leases import may_live
from ft_ckpt.errors import UnreadableError
from ft_ckpt.storage import PREFIX, Store, Stored

PIN = f"{PREFIX}pin"
# a signature and the manifest that it covers, in a bucket (`extensions.transfer.copies`)
SIGNED = f"{PREFIX}signature"
SAVING = f"{PREFIX}saving"  # the mark of a save to a bucket that is in progress
TOMBSTONE = f"{PREFIX}dropped"  # lists the files to delete; in a bucket, a prefix of names
# A removal takes few requests, so waiting for it for a minute is enough.
_POLL_SECONDS, _PATIENCE_SECONDS = 0.2, 60.0


def is_mark(name: str) -> bool:
    """Check whether an object directly in a checkpoint's folder is a mark."""
    return name.startswith(PREFIX) and "/" not in name


def living_marks(store: Store, objects: Iterable[Stored], kind: str, now: float) -> list[str]:
    """Return the names of the marks of one `kind` in `objects` whose processes may be alive."""
    marks = [stored for stored in objects if stored.name.startswith(kind)]
    return [mark.name for mark in marks if may_live(store, mark, now)]


def list_after_removals(store: Store, mark: str | None) -> list[Stored]:
    """Wait for removals that might not have seen `mark`, and list all objects of a checkpoint.

    `mark` is the name of a mark that this process has just written in a bucket. With None, no
    removal is waited for. Raises UnreadableError if a removal is not over after a minute.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        objects = store.list()
        times = [stored.modified for stored in objects if stored.name == mark]
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
