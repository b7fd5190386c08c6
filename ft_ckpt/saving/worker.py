"""One job at a time in a thread of its own. Its error is kept until somebody asks how it went."""

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any
from weakref import WeakSet

from ft_ckpt.messages import warn

_LAG_SECONDS = 0.001  # in which the caller goes on, that would else wait for its turn of Python


class Worker:
    """A thread for each job, one job in flight."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._future: Future[Any] | None = None
        _OPEN.add(self)

    def start_job(self, job: Callable[[], Any]) -> "Future[Any]":
        """Begin `job`; the one before it must have been settled."""
        future = self._future = Future()
        self._thread = threading.Thread(target=_run_job, args=(job, future), name="ft_ckpt-save")
        self._thread.start()
        return future

    def finish_at_once(self, result: Any) -> "Future[Any]":
        """As `start`, of a job that was done at once."""
        future = self._future = Future()
        future.set_result(result)
        return future

    @property
    def is_owing(self) -> bool:
        """Whether a job was begun whose outcome nobody has asked for."""
        return self._future is not None

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._future is None or self._future.done()

    def take_result(self) -> Any:
        """Wait for the job, and give its result or raise its error, once; None when nothing is owed."""
        if self._future is None:
            return None
        wait([self._future])
        future, self._future = self._future, None
        return future.result()

    def join(self) -> None:
        """Wait for the thread; in a forked child, which has no such thread, return at once."""
        if self._thread is not None:
            self._thread.join()

    def unread_error(self) -> BaseException | None:
        """The error that nobody has been told of."""
        return self._future.exception() if self._future is not None and self._future.done() else None


_OPEN: WeakSet[Worker] = WeakSet()


def _run_job(job: Callable[[], Any], future: "Future[Any]") -> None:
    time.sleep(_LAG_SECONDS)
    try:
        future.set_result(job())
    except BaseException as error:  # noqa: BLE001 - raised where somebody asks for the outcome
        future.set_exception(error)


def _join_workers() -> None:
    for worker in list(_OPEN):
        worker.join()


def _warn_of_unread_errors() -> None:
    for worker in list(_OPEN):
        if (error := worker.unread_error()) is not None:
            warn(f"a save in the background failed, and the program ended without asking: {error}", stacklevel=1)


# Jobs may use thread pools, which take no more work once the interpreter begins to end: they are waited for before.
getattr(threading, "_register_atexit", atexit.register)(_join_workers)
atexit.register(_warn_of_unread_errors)
