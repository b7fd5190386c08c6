"""Pins: marks that exempt a checkpoint from all retention rules."""

import getpass
import json
import os
from datetime import datetime, timezone

from ft_ckpt.checkpoint.leases.leases import read_mark
from ft_ckpt.checkpoint.leases.marks import PIN, list_after_removals
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, why_no_checkpoint
from ft_ckpt.errors import NotACheckpointError
from ft_ckpt.storage import Store
from ft_ckpt.storage.places import Place


def pin(place: Place, reason: str = "") -> None:
    """Exempt the checkpoint at `place` from all retention rules, durably.

    `ls` and `prune` show `reason`. Raises NotACheckpointError if no checkpoint is committed at
    `place`; TargetError or NoSpaceError if the pin cannot be written, and then there is no pin;
    UnreadableError if the checkpoint is in a bucket and it is unknown whether a removal is in
    progress.
    """
    store = place.folder
    _check_committed(store)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    store.write(PIN, json.dumps({"reason": reason, "time": now, "user": _user_name()}).encode())
    try:
        if store.local_folder is None:
            list_after_removals(store, PIN)
        _check_committed(store)
    except NotACheckpointError:  # deleted at the same time, by a removal that has missed the pin
        store.delete([PIN])
        raise


def unpin(place: Place) -> bool:
    """Delete the pin of the checkpoint at `place`, durably; return False if there was none.

    Raises TargetError if the pin cannot be deleted.
    """
    store = place.folder
    if store.stat(PIN) is None:
        return False
    store.delete([PIN])
    return True


def pin_reason(place: Place) -> str | None:
    """Return the user and the reason of a pin, for messages; None if there is no pin."""
    store = place.folder
    if store.stat(PIN) is None:
        return None
    content = read_mark(store, PIN)
    by_user = f" by {content['user']}" if content.get("user") else ""
    reason = f": {content['reason']}" if content.get("reason") else ""
    return f"pinned{by_user}{reason}"


def _check_committed(store: Store) -> None:
    if store.stat(MANIFEST_NAME) is None:
        raise NotACheckpointError(why_no_checkpoint(Place(store)))


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry in the password file, as in many containers
        return f"uid {os.getuid()}"
