"""Handles signals that ask a process to end.

After the first one the run saves at the end of the step and exits. A second one ends the process at
once.
"""

import _thread
import ctypes
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

# for how long after the first signal further ones are ignored
DUPLICATE_SECONDS = 1.0
# module of torch's SIGCHLD handler, which raises an error when a worker of a loader has ended
_LOADERS = "torch.utils.data._utils.signal_handling"
_watches: "weakref.WeakSet[SignalWatch]" = weakref.WeakSet()


def exit_code(name: str, chosen: int | None = None) -> int:
    """Return the code to exit with after a save on the signal `name`.

    It is `chosen`, or by default 128 plus the number of the signal. On Linux:

        SIGHUP  129      SIGUSR1  138
        SIGINT  130      SIGUSR2  140
        SIGQUIT 131      SIGTERM  143
                         SIGXCPU  152

    A process that a second signal has ended was killed by that signal. Python shows this as minus
    the number of the signal, and a shell as the same code as here.
    """
    return 128 + signal.Signals[name] if chosen is None else chosen


class SignalWatch:
    """Records the name of the first signal that arrives in `received`.

    Further signals within a second are ignored, because launchers forward signals that the
    scheduler has already sent to all processes. After that second the signals have their default
    effect: any of them ends the process at once, even if it hangs in a collective. A committed
    checkpoint is not affected. A checkpoint that is being written is not committed.

    `close` restores the previous handlers. Signals that were ignored before (`nohup`, background
    jobs of a shell) stay ignored. Forked child processes get the previous handlers. Python handles
    signals in the main thread only: in another thread nothing is watched, and `note` says so.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.received: str | None = None
        self.note: str | None = None
        self._process = os.getpid()
        self._previous: dict[int, Any] = {}
        self._is_closed = False

        # reentrant, because a signal may interrupt `close`
        self._lock = threading.RLock()
        numbers = [signal.Signals[name] for name in names]
        if threading.current_thread() is not threading.main_thread():
            self.note = "signals are not watched: only the main thread can, and this is another"
            return

        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)

        _watches.add(self)

    def close(self) -> None:
        """Restore the previous handlers, unless others were set since. May be called twice."""
        # Python does not let other threads change handlers.
        if threading.current_thread() is threading.main_thread():
            with self._lock:
                self._restore_handlers()

    def _restore_handlers(self) -> None:
        self._is_closed = True
        for number, previous in self._previous.items():
            if signal.getsignal(number) in (self._on_signal, self._ignore):
                signal.signal(number, _still_in_force(number, previous))

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        # In a child that was not forked by Python, nothing reads `received`.
        if os.getpid() != self._process:
            self._restore_handlers()
            os.kill(os.getpid(), number)
        elif self.received is None:
            self.received = signal.Signals(number).name
            self._let_workers_end()
            # If no thread can be started, later signals stay ignored.
            with suppress(RuntimeError):
                # Not a threading.Timer, because starting one takes a lock that the interrupted code
                # may hold.
                _thread.start_new_thread(self._restore_defaults_in, (DUPLICATE_SECONDS,))

    def _let_workers_end(self) -> None:
        """Let the current step finish although the signal has ended the workers of its loader.

        Schedulers send a signal to all processes of a job. Torch raises an error in this process
        when a worker has ended, so its handler is replaced.
        """
        handler = signal.getsignal(signal.SIGCHLD)
        if getattr(handler, "__module__", None) == _LOADERS:
            self._previous[signal.SIGCHLD] = handler
            signal.signal(signal.SIGCHLD, self._ignore)

    def _ignore(self, number: int, frame: FrameType | None) -> None:
        pass

    def _restore_defaults_in(self, after_seconds: float) -> None:
        """Restore the system's default handling of the signals.

        It acts even while the main thread runs no Python code. It is set by a call in C, because
        Python lets only the main thread do so. For Python the handler is still that of this object,
        so that `close` restores the previous one.
        """
        time.sleep(after_seconds)
        with self._lock:
            if self._is_closed:
                return
            for number in self._previous:
                ctypes.pythonapi.PyOS_setsig(int(number), None)


def _still_in_force(number: int, handler: Any) -> Any:
    """Return `handler`, or the handler before it if its watch is closed.

    Watches may be closed in any order, so several of them may be skipped.
    """
    watch = getattr(handler, "__self__", None)
    while isinstance(watch, SignalWatch) and watch._is_closed and number in watch._previous:
        handler = watch._previous[number]
        watch = getattr(handler, "__self__", None)
    return signal.SIG_DFL if handler is None else handler


def _restore_in_child() -> None:
    """Restore the handlers in a forked child.

    A handler in Python would wait while the child runs C code.
    """
    for watch in list(_watches):
        watch._restore_handlers()


os.register_at_fork(after_in_child=_restore_in_child)
