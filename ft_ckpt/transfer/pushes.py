"""Pushes in the background: one after the other, each of a checkpoint that is held open from the call on.

A push that fails is warned of, and raised from its handle; the checkpoint itself is not touched by it.
"""

import atexit
import concurrent.futures.thread  # noqa: F401 - what is registered below must come after what this registers
import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.errors import listing
from ft_ckpt.storage.place import Place, location_name
from ft_ckpt.transfer.reports import PushReport

_LOG = logging.getLogger("ft_ckpt")


@dataclass(frozen=True, eq=False)
class PendingPush:
    """A push in the background."""

    path: Path | str
    """The checkpoint that is pushed: its path, or its URL."""
    url: str
    """Where to."""
    future: "Future[PushReport]"
    """What it comes to."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.future.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, at most `timeout` seconds; whether it has ended, well or not."""
        return bool(wait([self.future], timeout).done)

    def result(self, timeout: float | None = None) -> PushReport:
        """Wait for it, at most `timeout` seconds, and give its report.

        Raises what the push raised; TimeoutError when time is up.
        """
        return self.future.result(timeout)


class _PushQueue:
    """The threads of this process that push; each begins when the one before has ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last: threading.Thread | None = None

    def begin(self, push: PendingPush, job: Callable[[], PushReport]) -> None:
        """Run `job` for `push` once those before it are over."""
        with self.lock:
            # Not a thread that Python waits for by itself: whoever interrupts the wait below wants to leave.
            name = f"ft_ckpt-push-{location_name(push.path)}"
            thread = threading.Thread(target=_run_push, args=(self.last, push, job), name=name, daemon=True)
            thread.start()
            self.last = thread

    def join(self) -> None:
        """Wait for all; in a forked child, which has no such thread, return at once."""
        if self.last is not None:
            self.last.join()


_QUEUE = _PushQueue()


def start_push(place: Place, url: str, send: Callable[[OpenCheckpoint], PushReport]) -> PendingPush:
    """Send the checkpoint at `place` in the background; it is leased from now on.

    What is wrong with the checkpoint itself is told by the handle, too.
    """
    push = PendingPush(place.location, url, Future())
    stack = ExitStack()
    try:
        held = stack.enter_context(open_checkpoint(place))
    except Exception as error:  # noqa: BLE001 - raised from the handle
        _end_failed(push, error)
        return push

    def send_held() -> PushReport:
        with stack:
            return send(held)

    _QUEUE.begin(push, send_held)
    return push


def wait_for_pushes(pushes: Sequence[PendingPush]) -> None:
    """Wait until all have ended; whoever interrupts that is told what has not been pushed."""
    waiting = [push for push in pushes if not push.done]
    for push in waiting:
        _LOG.info("waiting until %s is pushed to %s", location_name(push.path), push.url)
    try:
        wait([push.future for push in waiting])
    except BaseException:
        warn_of_unpushed(waiting)
        raise


def warn_of_unpushed(pushes: Sequence[PendingPush]) -> None:
    """Name those that have not ended."""
    if left := [f"{push.path} to {push.url}" for push in pushes if not push.done]:
        warnings.warn(f"{listing(left)}: not pushed yet; `ft-ckpt push` does it again", stacklevel=3)


def _run_push(before: threading.Thread | None, push: PendingPush, job: Callable[[], PushReport]) -> None:
    if before is not None:
        before.join()
    try:
        push.future.set_result(job())
    except BaseException as error:  # noqa: BLE001 - raised from the handle
        _end_failed(push, error)


def _end_failed(push: PendingPush, error: BaseException) -> None:
    warnings.warn(
        f"{push.path}: not pushed: {error}; the checkpoint is not touched, `ft-ckpt push {push.path} {push.url}` does "
        "it again",
        stacklevel=4,
    )
    push.future.set_exception(error)


# Uploads use thread pools, which take no more work once the interpreter begins to end: they are waited for before, as
# what was registered last is called first.
getattr(threading, "_register_atexit", atexit.register)(_QUEUE.join)
