"""The lease of a run's directory, by which only one process at a time trains into it.

The lease is a file, the mark `.ft_ckpt-run` in the directory, on a disk or in a bucket. The first
save or resume of a run writes it, a thread renews it every 20 seconds, and the saver deletes it
when it closes. The mark names the process that wrote it. Another process that finds it does this:

    that process has ended on this machine     it takes the lease over at once
    that process lives on this machine, and    it raises an error
    its last renewal is less than a minute
    old
    all else, such as another machine or       it watches the mark for a minute by its own clock: it
    container, or a stopped process            raises an error if the mark changes, and takes the
                                               lease over if not

The content of a mark (its facts) identifies the process: its number, start time and machine. It
also has the time of the last renewal, so that each renewal changes the mark.

So a job that was killed and starts again elsewhere waits for at most a minute. Clocks of two
machines are never compared. A process that was stopped for longer finds the mark of another process
before its next commit, and does not commit.
"""

import atexit
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from ft_ckpt.checkpoint.leases import ExclusiveLease, holder_of, parse_mark
from ft_ckpt.errors import CheckpointError, LeaseTakenError, MissingError, NameTakenError, explained
from ft_ckpt.messages import LOG
from ft_ckpt.processes import is_gone, is_of_this_machine, process_facts, steady_seconds
from ft_ckpt.storage import PREFIX, Store, make_folder
from ft_ckpt.storage.places import Place

RUN_LEASE = f"{PREFIX}run"
LEASE_SECONDS = 60.0
RENEW_SECONDS = 20.0
# how often a mark is read while a process watches it for its renewal
_POLLS = 30
# How long to wait after taking a lease over. Several processes may do so at the same moment. The
# last one to write the mark has the lease.
_SETTLE_SECONDS_ON_DISK = 0.1
_SETTLE_SECONDS_IN_BUCKET = 1.0
_WAITING = "%s: %s may train into it; waiting %.0f s for a renewal of its lease"
_EXPIRED = "%s: taken over from %s, which has not renewed its lease for %.0f s"
# the leases of this process by the identity of their directory
_of_process: dict[str, "RunLease"] = {}
# protects `_of_process` and the users of its leases
_table_lock = threading.Lock()
# One thread at a time takes a lease. A second one would find the mark of this process without its
# lease in `_of_process`, and take it for a mark that an earlier process left.
_take_lock = threading.Lock()


@dataclass(eq=False)
class RunLease(ExclusiveLease):
    """The lease of one directory. All savers of this process that save there share it.

    Attributes:
        name: The name of the mark.
        pid: The id of the process that holds the lease. A forked child has no part in it.
        is_lost: Whether another process has taken the directory over.
        users: The savers that use the lease.
    """

    name: str = RUN_LEASE
    pid: int = field(default_factory=os.getpid)
    is_lost: bool = False
    users: WeakSet[Any] = field(default_factory=WeakSet)
    _began_at: float = field(default_factory=time.monotonic)
    _renewed_at: float = field(default_factory=steady_seconds)
    _renewals_done: int = 0

    @property
    def content(self) -> dict[str, Any]:
        return {
            **super().content,
            "renewals": self._renewals_done,  # so that each renewal changes the mark
            "held_seconds": round(time.monotonic() - self._began_at, 1),
            "renewed": steady_seconds(),
        }

    def put(self, *, create_only: bool = False) -> None:
        now = steady_seconds()
        self._renewals_done += 1
        super().put(create_only=create_only)
        self._renewed_at = now

    def take(self) -> None:
        """Write the mark. If there is one already, do what the table of the module says.

        Raises LeaseTakenError naming the process that trains there.
        """
        # the text of a mark that is watched for a renewal, and when the watch ends
        watched: str | None = None
        deadline = 0.0
        while True:
            text = _mark_text(self.store)
            if text is None:
                if self._put_first():
                    break
                continue

            if self.token in text:  # this process has written it, and the answer was lost
                break
            facts = parse_mark(text)
            if _has_ended(facts):
                LOG.info(
                    "%s: taken over from %s, which has ended", self.store.url, holder_of(facts)
                )
                self._take_over()
                break

            if watched is None:
                _refuse_if_alive(self.store, facts)
                watched = text
                deadline = time.monotonic() + LEASE_SECONDS
                LOG.warning(_WAITING, self.store.url, holder_of(facts), LEASE_SECONDS)
            elif text != watched:
                raise LeaseTakenError(_busy_text(self.store, facts, 0.0))
            elif time.monotonic() > deadline:
                LOG.warning(_EXPIRED, self.store.url, holder_of(facts), LEASE_SECONDS)
                self._take_over()
                break

            time.sleep(LEASE_SECONDS / _POLLS)

        self.begin(RENEW_SECONDS)

    def renew(self) -> None:
        """Renew the mark while a saver uses it.

        If all savers were deleted without `close`, the lease is released.
        """
        if self._is_unused():
            self.release()
        else:
            self._renew_own()

    def check(self) -> None:
        """Raise LeaseTakenError if another process has taken the directory over.

        The mark is read only if this process has not renewed it in time, for example because it was
        stopped.
        """
        if self.is_held and steady_seconds() - self._renewed_at > 2 * RENEW_SECONDS:
            # If the disk or bucket fails, the save fails too, and reports the error.
            with suppress(CheckpointError):
                self._renew_own()
        if self.is_lost:
            facts = parse_mark(_mark_text(self.store) or "")
            raise LeaseTakenError(
                f"{self.store.url}: taken over by {holder_of(facts)}, as this process did not "
                f"renew its lease for {LEASE_SECONDS:.0f} s (was it stopped?); nothing was "
                "committed, end this process"
            )

    def leave(self, user: object) -> None:
        """Release the lease when its last user leaves."""
        self.users.discard(user)
        if self._is_unused():
            self.release()

    def release(self) -> None:
        if self.is_held and self.pid == os.getpid():
            super().release()

    def _renew_own(self) -> None:
        """Write the mark again, unless another process has written its own: then it is lost.

        Raises TargetError if the folder is gone.
        """
        text = _mark_text(self.store)
        if text is None:
            self.is_lost = not self._put_first()
        elif self.token in text:
            self.put()
        else:
            self.is_lost = True
        if self.is_lost:
            self.stop()

    def _put_first(self) -> bool:
        """Write the mark where there is none. Returns False if another process was faster."""
        try:
            self.put(create_only=True)
        except NameTakenError:
            return False
        return True

    def _is_unused(self) -> bool:
        """Check whether no saver uses the lease any more.

        If so, the lease is also forgotten, and the next saver takes a new one.
        """
        with _table_lock:
            if self.users:
                return False
            if _of_process.get(self.store.identity) is self:
                del _of_process[self.store.identity]
            return True

    def _take_over(self) -> None:
        """Replace the mark of another process. Raises LeaseTakenError if a third one was later."""
        self.put()
        is_on_disk = self.store.local_folder is not None
        time.sleep(_SETTLE_SECONDS_ON_DISK if is_on_disk else _SETTLE_SECONDS_IN_BUCKET)
        if not self.is_ours:
            facts = parse_mark(_mark_text(self.store) or "")
            raise LeaseTakenError(_busy_text(self.store, facts, 0.0))


def lease_run(directory: Place, user: object) -> RunLease:
    """Return the lease of the run in `directory`, which this process takes if it has none.

    The savers of one process share the lease. `user` uses it until `RunLease.leave`, or until the
    object is deleted.

    Raises LeaseTakenError naming the process that trains there, TargetError if the mark cannot be
    written, and UnreadableError if it cannot be read.
    """
    store = directory.absolute.folder
    if store.local_folder is not None:
        with explained(store.local_folder):
            make_folder(store.local_folder)

    # The mark need not reach the disk, because a power cut ends the process too. Renewals must not
    # make a deleted folder again.
    store = store.unsynced
    with _take_lock:
        with _table_lock:
            lease = _of_process.get(store.identity)
            if lease is not None and lease.pid == os.getpid() and not lease.is_lost:
                lease.users.add(user)
                return lease
        lease = RunLease(store)
        lease.users.add(user)
        lease.take()
        with _table_lock:
            _of_process[store.identity] = lease
        return lease


def _mark_text(store: Store) -> str | None:
    """Read the text of the mark; return None if there is no mark. Raises UnreadableError."""
    try:
        return store.read(RUN_LEASE).decode(errors="replace")
    except MissingError:
        return None


def _has_ended(facts: dict[str, Any]) -> bool:
    """Check whether the process that wrote the mark has ended.

    A mark that names this process counts as ended. It was written before an exec, or this process
    has lost its record of it.
    """
    if is_gone(facts):
        return True
    identity = process_facts()
    return bool(facts) and all(facts.get(name) == identity[name] for name in identity)


def _refuse_if_alive(store: Store, facts: dict[str, Any]) -> None:
    """Raise LeaseTakenError if the process is on this machine and has renewed within a minute."""
    age = _age_on_this_machine(facts)
    if age is not None and age < LEASE_SECONDS:
        raise LeaseTakenError(_busy_text(store, facts, age))


def _age_on_this_machine(facts: dict[str, Any]) -> float | None:
    """Return the seconds since the last renewal. None if the process is on another machine."""
    renewed = facts.get("renewed")
    if not is_of_this_machine(facts) or not isinstance(renewed, (int, float)):
        return None
    return max(0.0, steady_seconds() - renewed)


def _busy_text(store: Store, facts: dict[str, Any], age: float) -> str:
    """Return the text of the error that the process of `facts` trains into the folder.

    `age` is the number of seconds since its last renewal.
    """
    seconds_at_renewal = facts.get("held_seconds")
    since = ""
    if isinstance(seconds_at_renewal, (int, float)):
        since = f" for {seconds_at_renewal + age:.0f} s"
    return (
        f"{store.url}: {holder_of(facts)} trains into it{since}, its lease was renewed {age:.0f} s "
        "ago; end it, close its saver or use another folder (lease=False goes on without a lease: "
        "checkpoints may be of either)"
    )


def _forget_leases() -> None:
    """Forget all leases in a forked child, which has no part in the leases of its parent."""
    global _table_lock, _take_lock
    _table_lock, _take_lock = threading.Lock(), threading.Lock()
    _of_process.clear()


os.register_at_fork(after_in_child=_forget_leases)


@atexit.register
def _release_all() -> None:
    for lease in list(_of_process.values()):
        with suppress(CheckpointError, OSError):
            lease.release()
