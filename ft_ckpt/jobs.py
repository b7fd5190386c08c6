"""Runs jobs in background threads, and waits for them when the process exits.

`BackgroundJob` is the handle that users get. `JobQueue` runs jobs one after the other.
"""

import atexit
import concurrent.futures.thread  # noqa: F401 - its exit hook must be registered before the one below
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar
from weakref import WeakSet

Result = TypeVar("Result")

# The niceness of background threads: about a tenth of a normal thread's share of a busy processor.
_NICE = 10


@dataclass(frozen=True, eq=False, kw_only=True)
class BackgroundJob(Generic[Result]):
    """A job on one checkpoint in the background."""

    path: Path | str
    """The folder of the checkpoint; its URL if it is in a bucket."""
    future: "Future[Result]"
    """Resolves to the report of the job."""

    @property
    def done(self) -> bool:
        """Whether the job has ended, with or without an error."""
        return self.future.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the job, at most `timeout` seconds.

        Returns whether it has ended, with or without an error.
        """
        return bool(wait([self.future], timeout).done)

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the job, at most `timeout` seconds, and return its report.

        Raises the error of the job; TimeoutError after `timeout` seconds.
        """
        return self.future.result(timeout)


class JobQueue:
    """Runs jobs one after the other, each in a daemon thread. The process waits for them at exit.

    At exit `at_exit` is called, by default `join`. A ThreadPoolExecutor is not used, because Python
    joins its threads at exit even if the user has interrupted that wait.
    """

    def __init__(self, at_exit: Callable[[], object] | None = None) -> None:
        self.at_exit = at_exit or self.join
        self._lock = threading.Lock()
        self._last: threading.Thread | None = None
        _queues.add(self)

    def start(self, name: str, job: Callable[[], Result]) -> "Future[Result]":
        """Run `job` in a thread called `name`, after all earlier jobs.

        The future has its outcome.
        """
        future: Future[Result] = Future()
        with self._lock:
            previous = self._last

            def run() -> None:
                if previous is not None:
                    previous.join()
                try:
                    result = job()
                except BaseException as error:  # noqa: BLE001 - raised by the future
                    future.set_exception(error)
                else:
                    future.set_result(result)

            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()  # raises RuntimeError at the system's limit of threads
            self._last = thread

        return future

    def join(self, seconds: float | None = None) -> bool:
        """Wait for all jobs, at most `seconds`. Returns whether all have ended.

        In a forked process they have ended, because a fork has no threads of its parent.
        """
        last = self._last
        if last is None:
            return True
        last.join(seconds)
        return not last.is_alive()

    @property
    def last_thread(self) -> threading.Thread | None:
        """The thread of the newest job."""
        return self._last


_queues: WeakSet[JobQueue] = WeakSet()


def end_queues() -> None:
    """Wait for the jobs of all queues.

    A job may start jobs in another queue, for example a save starts uploads. So this repeats until
    no queue has a new job.
    """
    seen: set[threading.Thread | None] = {None}
    while True:
        waiting = [queue for queue in list(_queues) if queue.last_thread not in seen]
        if not waiting:
            return
        for queue in waiting:
            seen.add(queue.last_thread)
            queue.at_exit()


# Jobs use thread pools, which accept no work after their own exit hook. Hooks run in the reverse
# order of their registration, so this one runs before that of the pools, which was imported above.
getattr(threading, "_register_atexit", atexit.register)(end_queues)


def yield_to_training() -> None:
    """Lower the priority of the calling thread for good. Threads that it starts inherit it.

    Nothing happens on systems that have no priorities of threads, or that forbid it.
    """
    if not sys.platform.startswith("linux"):
        return  # elsewhere the priority is that of the whole process
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), _NICE))
