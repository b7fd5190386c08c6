"""Guards of a checkpoint folder: marks (lock objects in a bucket), pins, leases, the mark of a
save.

Every operation on a checkpoint in a bucket first puts a mark and then lists the folder, so that of
two concurrent operations at least one sees the other's mark. A removal gives way: it deletes its
tombstone when it sees a pin, a lease, a save, or another removal. All others wait until the removal
is over, and list again.

`leases` says how long a mark is valid. Pins, metrics and signatures do not expire.
"""

import getpass
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.catalog import load_manifest
from ft_ckpt.checkpoint.contents import why_no_checkpoint
from ft_ckpt.checkpoint.leases import (
    LEASE,
    STALE_SECONDS,
    ExclusiveLease,
    Lease,
    mark_holder,
    may_live,
    new_mark,
    read_mark,
    store_time,
)
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import (
    CheckpointError,
    NameTakenError,
    NotACheckpointError,
    TargetError,
    UnreadableError,
)
from ft_ckpt.storage import (
    PREFIX,
    LocalStore,
    Place,
    Store,
    Stored,
    folder_of,
    list_names,
    locks,
    open_place,
)

PIN = f"{PREFIX}pin"
# in a bucket: a signature and the manifest that it covers, see `extensions.transfer.signatures`
SIGNED = f"{PREFIX}signature"
SAVING = f"{PREFIX}saving"  # a save to a bucket in progress
TOMBSTONE = f"{PREFIX}dropped"  # lists the files to delete; in a bucket, prefix of the names
_POLL_SECONDS, _PATIENCE_SECONDS = 0.2, 60.0  # waiting for a removal, which takes a few requests


def is_mark(name: str) -> bool:
    """Whether an object directly in a checkpoint's folder is a mark."""
    return name.startswith(PREFIX) and "/" not in name


def living_marks(store: Store, listed: Iterable[Stored], kind: str, now: float) -> list[str]:
    """The names of the marks of one `kind` whose processes may be alive."""
    return [
        each.name for each in listed if each.name.startswith(kind) and may_live(store, each, now)
    ]


def settled_list(store: Store, own: str | None) -> list[Stored]:
    """All objects of a checkpoint in a bucket, once no removal is in progress that may have missed
    the mark `own`.

    `own` was just put there; without it, nothing is waited for. Raises UnreadableError after a
    minute.
    """
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        listed = store.list()
        now = next((each.modified for each in listed if each.name == own), None)
        busy = [] if now is None else living_marks(store, listed, TOMBSTONE, now)
        if not busy:
            return listed
        if time.monotonic() > until:
            raise UnreadableError(
                f"{store.url}: is being deleted ({busy[0]}); try again in a minute"
            )
        time.sleep(_POLL_SECONDS)


@contextmanager
def lease_in_bucket(store: Store) -> Iterator[str | None]:
    """Hold a lease on the checkpoint in `store` during the block; yields its name.

    None without write access: such a reader cannot prevent a deletion.
    """
    lease = Lease(store, new_mark(LEASE))
    try:
        lease.put()
    except CheckpointError:
        yield None
        return
    lease.begin()
    try:
        yield lease.name
    finally:
        lease.release()


def pin(path: str | os.PathLike[str] | Place, reason: str = "") -> None:
    """Exempt the checkpoint `path` from all retention rules, durably; `ls` and `prune` show
    `reason`.

    Raises NotACheckpointError when nothing is committed there; TargetError or NoSpaceError when the
    pin cannot be written, and none is left. In a bucket also UnreadableError when it is unknown
    whether a removal is in progress.
    """
    store = open_place(path).folder
    _check_committed(store)
    made = datetime.now(timezone.utc).isoformat(timespec="seconds")
    store.write(PIN, json.dumps({"reason": reason, "time": made, "user": _user_name()}).encode())
    try:
        if store.local_folder is None:
            settled_list(store, PIN)
        _check_committed(store)
    except NotACheckpointError:  # deleted meanwhile, by a removal that may have missed the pin
        store.delete([PIN])
        raise


def unpin(path: str | os.PathLike[str] | Place) -> bool:
    """Delete the pin of `path`, durably; False when there was none. Raises TargetError."""
    store = open_place(path).folder
    if store.stat(PIN) is None:
        return False
    store.delete([PIN])
    return True


def pin_reason(path: str | os.PathLike[str] | Place) -> str | None:
    """The user and the reason of the pin of checkpoint `path`, for messages; None when it is not
    pinned.
    """
    store = open_place(path).folder
    if store.stat(PIN) is None:
        return None
    found = read_mark(store, PIN)
    who = f" by {found['user']}" if found.get("user") else ""
    why = f": {found['reason']}" if found.get("reason") else ""
    return f"pinned{who}{why}"


def _check_committed(store: Store) -> None:
    if store.stat(MANIFEST_NAME) is None:
        raise NotACheckpointError(why_no_checkpoint(Place(store)))


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no entry in the password file, as in many containers
        return f"uid {os.getuid()}"


@contextmanager
def hold_lease(path: str | os.PathLike[str] | Place) -> Iterator[str | None]:
    """Protect the checkpoint `path` from deletion while the block runs; read its manifest inside,
    once.

    Does nothing without a manifest, or if the folder cannot be written: nothing can be deleted
    there either. In a bucket it must be a checkpoint; yields the name of the lease for
    `settled_list`.
    """
    store = open_place(path).folder
    if store.local_folder is None:
        with lease_in_bucket(store) as name:
            yield name
        return
    lease = _take_lease(store, store.local_folder)
    if lease is None:
        yield None
        return
    lease.begin()
    try:
        yield None
    finally:
        lease.release()


def lease_reasons(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """A line for each living process that holds a lease on `path`."""
    store = LocalStore(Path(path))
    return tuple(
        f"in use by {mark_holder(store, file.name)}"
        for file in _lease_files(store.folder)
        if _is_held(file)
    )


@dataclass(eq=False)
class _FileLease(Lease):
    """A lease on a checkpoint on a disk: a locked file, kept open, as a save may move the folder
    aside.
    """

    handle: int = -1

    def put(self, *, create_only: bool = True) -> None:
        """Create the file. Raises OSError."""
        file = folder_of(self.store) / self.name
        self.handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        machine = None
        # another process checks the new lease at this moment: only its age counts then
        with suppress(BlockingIOError):
            machine = locks.machine_id() if locks.lock_descriptor(self.handle) else None
        identity = {"host": socket.gethostname(), "pid": os.getpid(), "machine": machine}
        with suppress(OSError):  # on a full disk it stays empty, and only its age counts
            os.write(self.handle, json.dumps(identity).encode())

    def renew(self) -> None:
        os.utime(self.handle)

    def release(self) -> None:
        self.stop()
        os.close(self.handle)
        with suppress(OSError):
            (folder_of(self.store) / self.name).unlink(missing_ok=True)


def _take_lease(store: Store, path: Path) -> _FileLease | None:
    """A new lease on the checkpoint in `store`; None without one, and if its folder cannot be
    written.
    """
    lease = _FileLease(store, f"{LEASE}{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        if not (path / MANIFEST_NAME).is_file():
            return None
        for old in _lease_files(path):
            if not _is_held(old):
                old.unlink(missing_ok=True)
        lease.put()
    except OSError:
        return None
    return lease


def _lease_files(path: Path) -> list[Path]:
    return [path / name for name in list_names(path) if name.startswith(LEASE)]


def _is_held(file: Path) -> bool:
    return not locks.has_ended(
        file, read_mark(LocalStore(file.parent), file.name).get("machine"), STALE_SECONDS
    )


def clear_spent_mark(store: Store) -> bool:
    """Delete the mark of a save that was killed after it committed the checkpoint in `store`; True
    if there was one.

    A mark that cannot be read or deleted now stays.
    """
    with suppress(CheckpointError):
        token = read_mark(store, SAVING).get("token")
        if token is not None and load_manifest(store).token == token:
            store.delete([SAVING])
            return True
    return False


@dataclass(eq=False)
class SaveMark(ExclusiveLease):
    """The mark of one save in the folder `store`, held until `release`."""

    name: str = SAVING
    run_id: str | None = None
    # everything in the folder is of this save, or of dead ones that it took over
    cleared: bool = False

    def take(self) -> None:
        """Put the mark, replacing that of a dead save or of this run.

        Raises TargetError while another is alive.
        """
        try:
            self.put(create_only=True)
        except NameTakenError:
            if not self.is_ours:  # otherwise the response of our own write was lost
                self._take_over()
        self.begin()

    def declare_clear(self) -> None:
        """Record in the mark that no foreign files are in the folder, for the cleanup after a
        crash.
        """
        if not self.cleared:
            self.cleared = True
            self.put()

    def check(self) -> None:
        """Raise TargetError when another save has taken the folder over."""
        if not self.is_ours:
            raise TargetError(
                f"{self.store.url}: taken over by {mark_holder(self.store, SAVING)}, which took "
                "this save for dead; nothing was committed"
            )

    @property
    def facts(self) -> dict[str, Any]:
        return {**super().facts, "run_id": self.run_id, "cleared": self.cleared}

    def _take_over(self) -> None:
        found = read_mark(self.store, SAVING)
        is_own = self.run_id is not None and found.get("run_id") == self.run_id
        if not is_own and self._is_alive():
            raise TargetError(
                f"{self.store.url}: {mark_holder(self.store, SAVING)} is saving there, or was "
                "killed less than ten minutes ago; use another name, or try again then"
            )
        self.cleared = bool(found.get("cleared"))
        self.put()
        self.check()

    def _is_alive(self) -> bool:
        now, mark = store_time(self.store), self.store.stat(SAVING)
        return mark is not None and may_live(self.store, mark, now)
