"""Pins: small hidden files in checkpoints' folders by which people keep them, until the pins are taken out."""

import getpass
import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import CheckpointError, NotACheckpointError
from ft_ckpt.storage.local_disk import local_path
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.placing import PREFIX
from ft_ckpt.storage.store import Store, read_text

PIN = f"{PREFIX}pin"
_MARK_LIMIT_BYTES = 64 << 10


def pin(path: str | os.PathLike[str], reason: str = "") -> None:
    """Keep the checkpoint `path` whatever any rule says, durably; `reason` is shown by `ls` and `prune`.

    Raises NotACheckpointError when nothing is committed there; TargetError or NoSpaceError when it cannot be
    written, and no pin is left.
    """
    store = LocalStore(local_path(path))
    _check_committed(store)
    made = datetime.now(timezone.utc).isoformat(timespec="seconds")
    store.write(PIN, json.dumps({"reason": reason, "time": made, "user": _user_name()}).encode())
    try:
        _check_committed(store)
    except NotACheckpointError:  # deleted meanwhile: whoever did may not have seen the pin
        unpin(path)
        raise


def unpin(path: str | os.PathLike[str]) -> bool:
    """Take the pin out of `path`, durably; False when there was none. Raises TargetError."""
    store = LocalStore(local_path(path))
    if store.stat(PIN) is None:
        return False
    store.delete([PIN])
    return True


def pin_reason(path: str | os.PathLike[str]) -> str | None:
    """The user and the reason of the pin of checkpoint `path`, in words; None when it is not pinned."""
    store = LocalStore(Path(path))
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


def read_mark(store: Store, name: str) -> dict[str, Any]:
    """The JSON object in a pin or lease; empty when it was cut short, as it may be when its writer died."""
    try:
        found = json.loads(read_text(store, name, _MARK_LIMIT_BYTES))
    except (CheckpointError, RecursionError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
