"""Leases: small hidden files in checkpoints' folders by which readers keep them from being deleted.

A lease is a file that its holder keeps locked, and touches every minute: on the holder's machine it counts while it is
locked, so never longer than the holder lives; on another, where locks may not be seen, also while it was touched within
ten minutes. A lease is taken first and the manifest read after it, as a deletion takes the manifest away first and
looks for leases after it: one of the two always sees the other. Leases in a bucket are `marks`.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.checkpoint.marks import BEAT_SECONDS, LEASE, STALE_SECONDS, lease_in_bucket, mark_holder, read_mark
from ft_ckpt.storage import owners
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place, open_place


@contextlib.contextmanager
def hold_lease(path: str | os.PathLike[str] | Place) -> Iterator[str | None]:
    """Keep the checkpoint `path` from being deleted while the block runs; read its manifest inside, once.

    Nothing happens when it is no checkpoint of ours or its folder cannot be written, as nothing can be deleted there.
    In a bucket it has to be a checkpoint; the lease's name comes out, with which it is listed, see `settled_list`.
    """
    store = open_place(path).folder
    if not isinstance(store, LocalStore):
        with lease_in_bucket(store) as name:
            yield name
        return
    held = _take_lease(store.folder)
    if held is None:
        yield None
        return
    file, handle = held
    over = threading.Event()
    beats = threading.Thread(target=_renew_lease, args=(handle, over), name="ft_ckpt-lease", daemon=True)
    beats.start()
    try:
        yield None
    finally:
        over.set()
        beats.join()
        os.close(handle)
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def lease_reasons(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """A line for each living process that holds a lease on `path`."""
    return tuple(f"in use by {_lease_holder(file)}" for file in _lease_files(Path(path)) if _is_held(file))


def _take_lease(path: Path) -> tuple[Path, int] | None:
    """The file of a new lease and its handle, which carries the lock wherever a save moves the file to."""
    file = path / f"{LEASE}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        if not (path / MANIFEST_NAME).is_file():
            return None
        for old in _lease_files(path):
            if not _is_held(old):
                old.unlink(missing_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError:
        return None
    told = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "machine": owners.machine_id() if owners.lock_descriptor(handle) else None,
    }
    with contextlib.suppress(OSError):  # on a full disk it says nothing, and goes by its time
        os.write(handle, json.dumps(told).encode())
    return file, handle


def _renew_lease(handle: int, over: threading.Event) -> None:
    while not over.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(handle)


def _lease_files(path: Path) -> list[Path]:
    try:
        return sorted(file for file in path.iterdir() if file.name.startswith(LEASE))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _lease_holder(file: Path) -> str:
    return mark_holder(LocalStore(file.parent), file.name)


def _is_held(file: Path) -> bool:
    return not owners.has_ended(file, read_mark(LocalStore(file.parent), file.name).get("machine"), STALE_SECONDS)
