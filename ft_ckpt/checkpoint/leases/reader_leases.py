"""Leases of readers: a checkpoint that is being read is not deleted."""

import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.checkpoint.leases.leases import (
    DISK_STALE_SECONDS,
    LEASE,
    Lease,
    mark_holder,
    new_mark,
    read_mark,
)
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import CheckpointError
from ft_ckpt.processes import machine_id, process_facts
from ft_ckpt.storage import Store, list_names
from ft_ckpt.storage.local import LocalStore, folder_of, has_ended, lock_descriptor
from ft_ckpt.storage.places import Place


@contextmanager
def hold_lease(place: Place) -> Iterator[str | None]:
    """Protect the checkpoint at `place` from deletion while the block runs.

    Read the manifest inside the block, once. In a bucket `place` must be a checkpoint. Yields the
    name of the lease, for `list_after_removals`. Yields None if there is no lease: because there is
    no manifest, or because the folder cannot be written, so that nothing can be deleted in it
    either.
    """
    store = place.folder
    if store.local_folder is None:
        lease = _put_object_lease(store)
    else:
        lease = _put_file_lease(store, store.local_folder)
    if lease is None:
        yield None
        return
    lease.begin()
    try:
        yield lease.name
    finally:
        lease.release()


def lease_reasons(path: Path) -> tuple[str, ...]:
    """Return a line for each living process that has a lease on the checkpoint `path` of a disk."""
    store = LocalStore(path)
    living = [file for file in _lease_files(path) if not _has_expired(file)]
    return tuple(f"in use by {mark_holder(store, file.name)}" for file in living)


@dataclass(eq=False)
class _FileLease(Lease):
    """A lease on a checkpoint on a disk: a locked file.

    The file is kept open, because a save may move the folder aside.
    """

    descriptor: int = -1

    @property
    def file(self) -> Path:
        return folder_of(self.store) / self.name

    def put(self, *, create_only: bool = True) -> None:
        """Create the file. Raises OSError."""
        self.descriptor = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        machine = None
        # if another process checks the new lease at this moment, its age alone counts
        with suppress(BlockingIOError):
            machine = machine_id() if lock_descriptor(self.descriptor) else None
        identity = {**process_facts(), "machine": machine}
        with suppress(OSError):  # on a full disk the file stays empty, and its age alone counts
            os.write(self.descriptor, json.dumps(identity).encode())

    def renew(self) -> None:
        os.utime(self.descriptor)

    def release(self) -> None:
        self.stop()
        os.close(self.descriptor)
        with suppress(OSError):
            self.file.unlink(missing_ok=True)


def _put_object_lease(store: Store) -> Lease | None:
    """Put a lease on a checkpoint in a bucket.

    Return None without write access: such a reader cannot prevent a deletion.
    """
    lease = Lease(store, new_mark(LEASE))
    try:
        lease.put()
    except CheckpointError:
        return None
    return lease


def _put_file_lease(store: Store, folder: Path) -> _FileLease | None:
    """Put a lease on the checkpoint in `folder`.

    Return None without a checkpoint, or if the lease cannot be written.
    """
    name = f"{LEASE}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    lease = _FileLease(store, name)
    try:
        if not (folder / MANIFEST_NAME).is_file():
            return None
        for file in _lease_files(folder):
            if _has_expired(file):
                file.unlink(missing_ok=True)
        lease.put()
    except OSError:
        return None
    return lease


def _lease_files(folder: Path) -> list[Path]:
    return [folder / name for name in list_names(folder) if name.startswith(LEASE)]


def _has_expired(file: Path) -> bool:
    content = read_mark(LocalStore(file.parent), file.name)
    return has_ended(file, content, DISK_STALE_SECONDS)
