"""Pins: small hidden files in checkpoints' folders by which people keep them, until the pins are taken out."""

import getpass
import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import CheckpointError, NotACheckpointError, explained
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.placing import PREFIX, write_text

PIN = f"{PREFIX}pin"
_MARK_LIMIT_BYTES = 64 << 10


def pin(path: str | os.PathLike[str], reason: str = "") -> None:
    """Keep the checkpoint `path` whatever any rule says, durably; `reason` is shown by `ls` and `prune`.

    Raises NotACheckpointError when nothing is committed there; TargetError or NoSpaceError when it cannot be
    written, and no pin is left.
    """
    path = local_disk.local_path(path)
    _check_committed(path)
    made = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with explained(path):
        write_text(path / PIN, json.dumps({"reason": reason, "time": made, "user": _user_name()}))
    try:
        _check_committed(path)
    except NotACheckpointError:  # deleted meanwhile: whoever did may not have seen the pin
        unpin(path)
        raise


def unpin(path: str | os.PathLike[str]) -> bool:
    """Take the pin out of `path`, durably; False when there was none. Raises TargetError."""
    try:
        local_disk.unlink(local_disk.local_path(path) / PIN)
    except FileNotFoundError:
        return False
    local_disk.sync_path(Path(path))
    return True


def pin_reason(path: str | os.PathLike[str]) -> str | None:
    """The user and the reason of the pin of checkpoint `path`, in words; None when it is not pinned."""
    file = Path(path) / PIN
    if not file.exists():
        return None
    found = read_mark(file)
    who = f" by {found['user']}" if found.get("user") else ""
    why = f": {found['reason']}" if found.get("reason") else ""
    return f"pinned{who}{why}"


def _check_committed(path: Path) -> None:
    if not (path / MANIFEST_NAME).is_file():
        raise NotACheckpointError(f"{path}: no {MANIFEST_NAME} in it; pin a checkpoint that `ft-ckpt ls` lists")


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry in the password file, as in many containers
        return f"uid {os.getuid()}"


def read_mark(file: Path) -> dict[str, Any]:
    """The JSON object in a pin or lease; empty when it was cut short, as it may be when its writer died."""
    try:
        found = json.loads(local_disk.read_text(file, _MARK_LIMIT_BYTES))
    except (CheckpointError, OSError, RecursionError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
