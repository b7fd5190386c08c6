"""Pins: small hidden files in checkpoints' folders by which people keep them, until the pins are taken out."""

import getpass
import json
import os
from datetime import datetime, timezone

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.checkpoint.marks import PIN, read_mark, settled_list
from ft_ckpt.errors import NotACheckpointError
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.store import Store


def pin(path: str | os.PathLike[str] | Place, reason: str = "") -> None:
    """Keep the checkpoint `path` whatever any rule says, durably; `reason` is shown by `ls` and `prune`.

    Raises NotACheckpointError when nothing is committed there; TargetError or NoSpaceError when it cannot be
    written, and no pin is left. In a bucket UnreadableError when it cannot be told whether it is being deleted.
    """
    store = open_place(path).folder
    _check_committed(store)
    made = datetime.now(timezone.utc).isoformat(timespec="seconds")
    store.write(PIN, json.dumps({"reason": reason, "time": made, "user": _user_name()}).encode())
    try:
        if not isinstance(store, LocalStore):
            settled_list(store, PIN)
        _check_committed(store)
    except NotACheckpointError:  # deleted meanwhile: whoever did may not have seen the pin
        store.delete([PIN])
        raise


def unpin(path: str | os.PathLike[str] | Place) -> bool:
    """Take the pin out of `path`, durably; False when there was none. Raises TargetError."""
    store = open_place(path).folder
    if store.stat(PIN) is None:
        return False
    store.delete([PIN])
    return True


def pin_reason(path: str | os.PathLike[str] | Place) -> str | None:
    """The user and the reason of the pin of checkpoint `path`, in words; None when it is not pinned."""
    store = open_place(path).folder
    if store.stat(PIN) is None:
        return None
    found = read_mark(store, PIN)
    who = f" by {found['user']}" if found.get("user") else ""
    why = f": {found['reason']}" if found.get("reason") else ""
    return f"pinned{who}{why}"


def _check_committed(store: Store) -> None:
    if store.stat(MANIFEST_NAME) is None:
        raise NotACheckpointError(f"{store.url}: no {MANIFEST_NAME} in it; pin a checkpoint that `ft-ckpt ls` lists")


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry in the password file, as in many containers
        return f"uid {os.getuid()}"
