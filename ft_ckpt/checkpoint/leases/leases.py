"""Leases: marks by which a process shows that it works in a folder.

A mark is a small JSON file or object in the folder. Its process renews it each minute. How long it
is valid after its last renewal depends on where it is:

- In a bucket it is valid for ten minutes, by the clock of the store. The reader learns the time by
  writing a mark of its own.
- On a shared disk it is valid for half an hour. There the time of a file may come from the clock of
  the node that wrote it, and a lease must survive clocks that are 20 minutes apart.
- On the machine of its process it is valid only while the process lives.

The lease of a run's directory (`runs.folder.lease`) has a stricter rule, which needs only the
reader's clock.
"""

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ft_ckpt.errors import CheckpointError, MissingError, UnreadableError
from ft_ckpt.processes import is_gone, new_owner, process_facts
from ft_ckpt.storage import PREFIX, Store, Stored, read_text


@dataclass(eq=False)
class Renewal:
    """A function that the renewing thread calls every `seconds`."""

    renew: Callable[[], object]
    seconds: float
    # time of the next call, by time.monotonic
    due: float
    is_over: bool = False
    # This lock is held during a call. It is reentrant, because a call may end its own renewal.
    running: Any = field(default_factory=threading.RLock)

    def call(self) -> None:
        with self.running:
            if not self.is_over:
                # An error is ignored, because a lease may miss several renewals.
                with suppress(Exception):
                    self.renew()
            self.due = time.monotonic() + self.seconds


class _Renewals:
    """The renewals of this process, and the thread that calls them while there are any."""

    def __init__(self) -> None:
        self._renewals: list[Renewal] = []
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self, renew: Callable[[], object], seconds: float) -> Renewal:
        renewal = Renewal(renew, seconds, time.monotonic() + seconds)
        with self._change:
            self._renewals.append(renewal)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(
                    target=self._work, name="ft_ckpt-leases", daemon=True
                )
                self._thread.start()
            self._change.notify()
        return renewal

    def end(self, renewal: Renewal) -> None:
        with self._change:
            if renewal in self._renewals:
                self._renewals.remove(renewal)
            self._change.notify()
        # a call in progress may write the mark once more
        with renewal.running:
            renewal.is_over = True

    def _work(self) -> None:
        renewal = self._await_due()
        while renewal is not None:
            renewal.call()
            renewal = self._await_due()

    def _await_due(self) -> Renewal | None:
        """Wait for the next renewal that is due, and return it.

        Return None if there are no renewals, so that the thread ends.
        """
        with self._change:
            while self._renewals:
                first = min(self._renewals, key=lambda renewal: renewal.due)
                seconds = first.due - time.monotonic()
                if seconds <= 0:
                    return first
                self._change.wait(seconds)
            self._thread = None
            return None


_renewals_of_process = _Renewals()


def start_renewal(renew: Callable[[], object], seconds: float) -> Renewal:
    """Call `renew` every `seconds` until `end_renewal`; its errors are ignored."""
    return _renewals_of_process.start(renew, seconds)


def end_renewal(renewal: Renewal) -> None:
    """End the calls of a renewal, after waiting for a call in progress."""
    _renewals_of_process.end(renewal)


def _forget_renewals() -> None:
    global _renewals_of_process
    _renewals_of_process = _Renewals()


os.register_at_fork(after_in_child=_forget_renewals)


# Names of readers' leases begin with LEASE, and names of objects by which a process reads the clock
# of a store begin with CLOCK.
LEASE = f"{PREFIX}lease-"
CLOCK = f"{PREFIX}clock-"
RENEWAL_SECONDS, STALE_SECONDS = 60.0, 600.0
DISK_STALE_SECONDS = 1800.0
_MARK_LIMIT_BYTES = 64 << 10


def new_mark(kind: str) -> str:
    """Return a new name for a mark of this process, with the prefix `kind`."""
    return kind + new_owner()


def put_mark(store: Store, name: str, *, create_only: bool = False, **content: Any) -> None:
    """Write a mark with the identity of this process and `content`. Raises TargetError."""
    text = json.dumps({**process_facts(), **content})
    store.write(name, text.encode(), create_only=create_only)


def read_mark(store: Store, name: str) -> dict[str, Any]:
    """Read the JSON object in a mark; return {} for a mark whose writer died while writing it."""
    try:
        return parse_mark(read_text(store, name, _MARK_LIMIT_BYTES))
    except CheckpointError:
        return {}


def parse_mark(text: str) -> dict[str, Any]:
    """Parse the text of a mark; return {} for text that is not a JSON object."""
    try:
        content = json.loads(text)
    except (RecursionError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def mark_holder(store: Store, name: str) -> str:
    """Describe the process that wrote a mark, for messages."""
    content = read_mark(store, name)
    return holder_of(content) if content else name.removeprefix(LEASE)


def holder_of(content: dict[str, Any]) -> str:
    """Describe the process that the content of a mark names, for messages."""
    return f"process {content.get('pid')} on {content.get('host')}"


def store_time(store: Store) -> float:
    """Return the time of the store's clock in unix seconds, from an object written to it.

    Raises TargetError if the object cannot be written, UnreadableError if it disappears.
    """
    clock = new_mark(CLOCK)
    put_mark(store, clock)
    try:
        stored = store.stat(clock)
    finally:
        store.delete([clock])
    if stored is None:
        raise UnreadableError(
            f"{store.where(clock)}: disappeared after it was written; check that no other program "
            "deletes files in this folder"
        )
    return stored.modified


def may_live(store: Store, mark: Stored, now: float) -> bool:
    """Check whether the process of a mark may be alive.

    `now` is the time of the store's clock in unix seconds.
    """
    return mark.modified > now - stale_seconds(store) and not is_gone(read_mark(store, mark.name))


def stale_seconds(store: Store) -> float:
    """Return for how many seconds after its last renewal a mark in `store` is valid."""
    return STALE_SECONDS if store.local_folder is None else DISK_STALE_SECONDS


@dataclass(eq=False)
class Lease:
    """The mark `name` of this process in `store`, which it renews from `begin` until `release`."""

    store: Store
    name: str
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    _renewal: Renewal | None = None

    @property
    def content(self) -> dict[str, Any]:
        """The contents of the mark, except for the identity of the process."""
        return {"token": self.token}

    def put(self, *, create_only: bool = False) -> None:
        """Write the mark.

        Raises TargetError, and NameTakenError with `create_only` if there is such a mark.
        """
        put_mark(self.store, self.name, create_only=create_only, **self.content)

    def begin(self, seconds: float | None = None) -> None:
        """Renew the mark each minute, or every `seconds`, from now on."""
        self._renewal = start_renewal(self.renew, RENEWAL_SECONDS if seconds is None else seconds)

    def renew(self) -> None:
        """Write the mark again."""
        self.put()

    @property
    def is_held(self) -> bool:
        return self._renewal is not None

    def stop(self) -> None:
        """Stop renewing the mark, and leave it in the store."""
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            end_renewal(renewal)

    def release(self) -> None:
        """Stop renewing the mark, and delete it."""
        self.stop()
        with suppress(CheckpointError):  # otherwise it expires
            self.store.delete([self.name])


@dataclass(eq=False)
class ExclusiveLease(Lease):
    """A lease whose name other processes use too, so that they may replace its mark."""

    @property
    def is_ours(self) -> bool:
        """Whether the mark is of this lease. Raises UnreadableError if it cannot be read now."""
        try:
            return self.token.encode() in self.store.read(self.name)
        except MissingError:
            return False

    def renew(self) -> None:
        """Write the mark again, unless another process has replaced it."""
        if self.is_ours:
            self.put()
        else:
            self.stop()

    def release(self) -> None:
        """Stop renewing the mark, and delete it if it is still of this lease."""
        self.stop()
        with suppress(CheckpointError):  # otherwise it expires
            if self.is_ours:
                self.store.delete([self.name])
