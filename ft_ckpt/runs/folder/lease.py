"""The lease of a run's directory: one process trains into it at a time.

The lease is the mark `.ft_ckpt-run` in the directory, on a disk or in a bucket. The first save or
resume of a run writes it, and the saver deletes it when it closes. Another process that finds the
mark looks for the process that wrote it:

    it has ended on this machine     take over at once
    it lives on this machine         error, while its renewals are younger than a minute
    all else (another machine or     watch the mark by the own clock: error if it changes, take over
    container, a stopped process)    if it does not change for a minute

So a job that was killed and starts again elsewhere waits for at most a minute. Clocks of two
machines are never compared. A process that was stopped for longer finds the mark of another one
before its next commit, and refuses.
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
LEASE_SECONDS, RENEW_SECONDS = 60.0, 20.0
_POLLS = 30  # of a mark, while waiting for its renewal
# several processes may take over a dead lease at the same moment: the last mark counts
_SETTLE_SECONDS_ON_DISK = 0.1
_SETTLE_SECONDS_IN_BUCKET = 1.0
_WAITING = "%s: %s may train into it; waiting %.0f s for a renewal of its lease"
_EXPIRED = "%s: taken over from %s, which has not renewed its lease for %.0f s"
_of_process: dict[str, "RunLease"] = {}  # by the identity of the directory
_table_lock = threading.Lock()  # for `_of_process` and the users of its leases
_take_lock = threading.Lock()  # one thread at a time: its mark would look abandoned to a second one


@dataclass(eq=False)
class RunLease(ExclusiveLease):
    """The lease of one directory, shared by the savers of this process that use it."""

    name: str = RUN_LEASE
    pid: int = field(default_factory=os.getpid)
    is_lost: bool = False  # another process has taken the directory over
    users: WeakSet[Any] = field(default_factory=WeakSet)
    _began_at: float = field(default_factory=time.monotonic)
    _renewed_at: float = field(default_factory=steady_seconds)
    _renewals_done: int = 0

    @property
    def facts(self) -> dict[str, Any]:
        return {
            **super().facts,
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
        """Put the mark, after waiting for one that may be dead.

        Raises LeaseTakenError naming the process that trains there.
        """
        watched: str | None = None  # the text of a mark whose renewal is waited for
        deadline = 0.0
        while True:
            text = _mark_text(self.store)
            if text is None:
                if self._put_first():
                    break
                continue
            if self.token in text:  # the answer to our own write was lost
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

        Release it when all of them were deleted without `close`.
        """
        if self._is_unused():
            self.release()
        else:
            self._renew_own()

    def check(self) -> None:
        """Raise LeaseTakenError when another process has taken the directory over.

        Reads the mark only if it was not renewed in time, as of a process that was stopped.
        """
        if self.is_held and steady_seconds() - self._renewed_at > 2 * RENEW_SECONDS:
            # a failing disk or bucket fails the save too, which reports the error
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
        if self.is_held and self.pid == os.getpid():  # a forked child has no part in it
            super().release()

    def _renew_own(self) -> None:
        """Put the mark again, unless another process has put its own.

        Raises TargetError where the folder is gone.
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
        """Put the mark where there was none; False when another process was faster."""
        try:
            self.put(create_only=True)
        except NameTakenError:
            return False
        return True

    def _is_unused(self) -> bool:
        """Check whether no saver uses the lease any more: the next saver takes a new one."""
        with _table_lock:
            if self.users:
                return False
            if _of_process.get(self.store.identity) is self:
                del _of_process[self.store.identity]
            return True

    def _take_over(self) -> None:
        self.put()
        is_on_disk = self.store.local_folder is not None
        time.sleep(_SETTLE_SECONDS_ON_DISK if is_on_disk else _SETTLE_SECONDS_IN_BUCKET)
        if not self.is_ours:
            raise LeaseTakenError(
                _busy_text(self.store, parse_mark(_mark_text(self.store) or ""), 0.0)
            )


def lease_run(directory: Place, user: object) -> RunLease:
    """Return the lease of the run in `directory`, in use by `user` until it leaves or is deleted.

    The savers of one process share the lease. Raises LeaseTakenError naming the process that trains
    there, TargetError if the mark cannot be written, UnreadableError if it cannot be read.
    """
    store = directory.absolute.folder
    if store.local_folder is not None:
        with explained(store.local_folder):
            make_folder(store.local_folder)
    # unsynced: a power cut ends the process, too, and renewals do not make the folder again
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
    """Check whether the process that put the mark has ended.

    If the mark names this process, it was put before an exec, or there is no record of it: such a
    mark counts as ended.
    """
    if is_gone(facts):
        return True
    identity = process_facts()
    return bool(facts) and all(facts.get(name) == identity[name] for name in identity)


def _refuse_if_alive(store: Store, facts: dict[str, Any]) -> None:
    """Raise LeaseTakenError if the process lives on this machine and renewed within a minute."""
    age = _age_on_this_machine(facts)
    if age is not None and age < LEASE_SECONDS:
        raise LeaseTakenError(_busy_text(store, facts, age))


def _age_on_this_machine(facts: dict[str, Any]) -> float | None:
    """Return the seconds since the last renewal by a process of this machine, else None."""
    renewed = facts.get("renewed")
    if not is_of_this_machine(facts) or not isinstance(renewed, (int, float)):
        return None
    return max(0.0, steady_seconds() - renewed)


def _busy_text(store: Store, facts: dict[str, Any], age: float) -> str:
    seconds = facts.get("held_seconds")  # at its last renewal
    since = f" for {seconds + age:.0f} s" if isinstance(seconds, (int, float)) else ""
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
