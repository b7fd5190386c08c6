"""Pushes in the background: one after the other, each of a checkpoint that is held open from the call on.

A push that fails is warned of, and raised from its handle; the checkpoint itself is not touched by it. The uploads of a
staging folder (`uploads`) have a queue of their own: what a run resumes from does not wait for what others read.
"""

import atexit
import concurrent.futures.thread  # noqa: F401 - what is registered below must come after what this registers
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.errors import listing
from ft_ckpt.messages import LOG, warn
from ft_ckpt.storage.place import Place, location_name
from ft_ckpt.transfer.reports import PushReport


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


class PushQueue:
    """Threads that push; each begins when the one before has ended. The process waits for them before it ends."""

    def __init__(self, at_exit: Callable[[], object] | None = None) -> None:
        self.lock = threading.Lock()
        self.last: threading.Thread | None = None
        self.at_exit = at_exit or self.join
        _QUEUES.add(self)

    def begin(self, name: str, job: Callable[[], object]) -> None:
        """Run `job`, which raises nothing, in a thread of that name once those before it are over."""
        with self.lock:
            # Not a thread that Python waits for by itself: whoever interrupts the wait below wants to leave.
            thread = threading.Thread(target=_run_after, args=(self.last, job), name=name, daemon=True)
            thread.start()
            self.last = thread

    def join(self, seconds: float | None = None) -> bool:
        """Wait for all, at most so long; whether they are over. In a forked child, which has none, at once."""
        last = self.last
        if last is None:
            return True
        last.join(seconds)
        return not last.is_alive()


_QUEUES: WeakSet[PushQueue] = WeakSet()
_QUEUE = PushQueue()


def start_push(place: Place, url: str, send: Callable[[OpenCheckpoint], PushReport]) -> PendingPush:
    """Send the checkpoint at `place` in the background; it is leased from now on.

    What is wrong with the checkpoint itself is told by the handle, too.
    """
    push = PendingPush(place.location, url, Future())
    stack = ExitStack()
    try:
        held = stack.enter_context(open_checkpoint(place, compares=False))
    except Exception as error:  # noqa: BLE001 - raised from the handle
        _end_failed(push, error)
        return push

    def send_held() -> None:
        try:
            with stack:
                report = send(held)
        except BaseException as error:  # noqa: BLE001 - raised from the handle
            _end_failed(push, error)
        else:
            push.future.set_result(report)

    _QUEUE.begin(f"ft_ckpt-push-{location_name(push.path)}", send_held)
    return push


def wait_for_pushes(pushes: Sequence[PendingPush]) -> None:
    """Wait until all have ended; whoever interrupts that is told what has not been pushed."""
    waiting = [push for push in pushes if not push.done]
    for push in waiting:
        LOG.info("waiting until %s is pushed to %s", location_name(push.path), push.url)
    try:
        wait([push.future for push in waiting])
    except BaseException:
        warn_of_unpushed(waiting)
        raise


def warn_of_unpushed(pushes: Sequence[PendingPush]) -> None:
    """Name those that have not ended."""
    if left := [f"{push.path} to {push.url}" for push in pushes if not push.done]:
        warn(f"{listing(left)}: not pushed yet; `ft-ckpt push` does it again", stacklevel=3)


def _run_after(before: threading.Thread | None, job: Callable[[], object]) -> None:
    if before is not None:
        before.join()
    job()


def _end_failed(push: PendingPush, error: BaseException) -> None:
    warn(
        f"{push.path}: not pushed: {error}; the checkpoint is not touched, `ft-ckpt push {push.path} {push.url}` does "
        "it again",
        stacklevel=4,
    )
    push.future.set_exception(error)


def _end_queues() -> None:
    for queue in list(_QUEUES):
        queue.at_exit()


# Uploads use thread pools, which take no more work once the interpreter begins to end: they are waited for before, as
# what was registered last is called first.
getattr(threading, "_register_atexit", atexit.register)(_end_queues)
