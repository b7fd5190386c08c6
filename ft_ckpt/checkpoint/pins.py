"""Small hidden files in a checkpoint's folder that say it must stay: pins of people, leases of readers.

A pin stays until it is taken out. A lease is a file that its holder keeps locked, and touches every minute: on the
holder's machine it counts while it is locked, so never longer than the holder lives; on another, where locks may not
be seen, also while it was touched within ten minutes. A lease is taken first and the manifest read after it, as
whoever deletes takes the manifest away first and looks for leases after it: one of the two always sees the other.
"""

import contextlib
import getpass
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import CheckpointError, NotACheckpointError, explained
from ft_ckpt.storage import local_disk, owners
from ft_ckpt.storage.placing import PREFIX, write_text

PIN = f"{PREFIX}pin"
DROPPED = f"{PREFIX}dropped"  # the manifest of what is being deleted, see `remove`
_LEASE = f"{PREFIX}lease-"
_MARK_LIMIT_BYTES = 64 << 10
_BEAT_SECONDS, _STALE_SECONDS = 60.0, 600.0


def pin(path: str | os.PathLike[str], reason: str = "") -> None:
    """Keep the checkpoint `path` whatever any rule says, durably; `reason` is shown to whoever asks.

    Raises NotACheckpointError when nothing is committed there; TargetError or NoSpaceError when it cannot be
    written, and no pin is left.
    """
    path = local_disk.local_path(path)
    _check(path)
    made = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with explained(path):
        write_text(path / PIN, json.dumps({"reason": reason, "time": made, "user": _user()}))
    try:
        _check(path)
    except NotACheckpointError:  # deleted meanwhile: whoever did may not have seen the pin
        unpin(path)
        raise


def unpin(path: str | os.PathLike[str]) -> bool:
    """Take the pin out of `path`, durably; False when there was none. Raises TargetError."""
    try:
        local_disk.unlink(local_disk.local_path(path) / PIN)
    except FileNotFoundError:
        return False
    local_disk.sync(Path(path))
    return True


def pinned(path: str | os.PathLike[str]) -> str | None:
    """Who pinned the checkpoint `path` and why, in words; None when it is not pinned."""
    file = Path(path) / PIN
    if not file.exists():
        return None
    found = _read(file)
    who = f" by {found['user']}" if found.get("user") else ""
    why = f": {found['reason']}" if found.get("reason") else ""
    return f"pinned{who}{why}"


@contextlib.contextmanager
def lease(path: str | os.PathLike[str]) -> Iterator[None]:
    """While this lasts, no sweep deletes the checkpoint `path`; read its manifest inside, once.

    Nothing happens when it is no checkpoint of ours or its folder cannot be written, as nothing can be deleted there.
    """
    held = _take(Path(path))
    if held is None:
        yield
        return
    file, handle = held
    over = threading.Event()
    beats = threading.Thread(target=_beat, args=(handle, over), name="ft_ckpt-lease", daemon=True)
    beats.start()
    try:
        yield
    finally:
        over.set()
        beats.join()
        os.close(handle)
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def leased(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """The processes that have a lease on `path`, in words; those that are gone do not count."""
    return tuple(f"in use by {_holder(file)}" for file in _leases(Path(path)) if _holds(file))


def _check(path: Path) -> None:
    if not (path / MANIFEST_NAME).is_file():
        raise NotACheckpointError(f"{path}: no {MANIFEST_NAME} in it; pin a checkpoint that `ft-ckpt ls` lists")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry in the password file, as in many containers
        return f"uid {os.getuid()}"


def _take(path: Path) -> tuple[Path, int] | None:
    """The file of a new lease and its handle. The lock is the handle's: it holds wherever a save moves the file to."""
    file = path / f"{_LEASE}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        if not (path / MANIFEST_NAME).is_file():
            return None
        for old in _leases(path):
            if not _holds(old):
                old.unlink(missing_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError:
        return None
    told = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine": owners.machine() if owners.lock(handle) else None,
    }
    with contextlib.suppress(OSError):  # on a full disk it says nothing, and goes by its time
        os.write(handle, json.dumps(told).encode())
    return file, handle


def _beat(handle: int, over: threading.Event) -> None:
    while not over.wait(_BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(handle)


def _leases(path: Path) -> list[Path]:
    try:
        return sorted(file for file in path.iterdir() if file.name.startswith(_LEASE))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _read(file: Path) -> dict[str, Any]:
    """What a mark says; nothing when it is cut short, as it may be when its writer died."""
    try:
        found = json.loads(local_disk.read_text(file, _MARK_LIMIT_BYTES))
    except (CheckpointError, OSError, RecursionError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _holder(file: Path) -> str:
    found = _read(file)
    return f"process {found.get('pid')} on {found.get('host')}" if found else file.name.removeprefix(_LEASE)


def _holds(file: Path) -> bool:
    try:
        touched = file.stat().st_mtime
    except OSError:
        return False
    if owners.is_locked(file):
        return True
    machine = _read(file).get("machine")
    return (machine is None or machine != owners.machine()) and time.time() - touched < _STALE_SECONDS
