"""The thread of this process that renews its leases, while it has any."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Renewal:
    """A function that the renewing thread calls every `seconds`."""

    renew: Callable[[], object]
    seconds: float
    due: float  # by time.monotonic
    is_over: bool = False
    # locked during a call; a call may end its own renewal
    running: Any = field(default_factory=threading.RLock)

    def call(self) -> None:
        with self.running:
            if not self.is_over:
                with suppress(Exception):  # it is tried again: a lease may miss several renewals
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
        """The next renewal when it is due; None when there is none left, and the thread ends."""
        with self._change:
            while self._renewals:
                first = min(self._renewals, key=lambda renewal: renewal.due)
                seconds = first.due - time.monotonic()
                if seconds <= 0:
                    return first
                self._change.wait(seconds)
            self._thread = None
            return None


_of_process = _Renewals()


def start_renewal(renew: Callable[[], object], seconds: float) -> Renewal:
    """Call `renew` every `seconds` until `end_renewal`; its errors are ignored."""
    return _of_process.start(renew, seconds)


def end_renewal(renewal: Renewal) -> None:
    """Call it no more; waits for a call in progress."""
    _of_process.end(renewal)


def _forget_renewals() -> None:
    global _of_process
    _of_process = _Renewals()


os.register_at_fork(after_in_child=_forget_renewals)
