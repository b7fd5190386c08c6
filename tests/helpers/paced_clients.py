"""Clients of one bucket whose requests a test lets through one by one, or ends between any two."""

import threading
from collections.abc import Callable
from typing import Any

from faulty_stores import READS, WRITES, Stopped, Watch, WatchedStore

from ft_ckpt.storage import Store


class PacedClient(Watch):
    """One client: its action is done in a thread, which waits before each request."""

    def __init__(self, after_request: Callable[["PacedClient", str, str], object]) -> None:
        super().__init__()
        self.after_request = after_request  # called with the name of the call and the URL
        self.change = threading.Condition()
        self.allowed = self.running = self.waiting = 0
        self.next_request = "", ""  # the call and the URL of one that waits
        self.is_stopped, self.is_done = False, True
        self.error: BaseException | None = None
        self.thread = threading.Thread()

    def begin(self, action: Callable[[], object]) -> None:
        """Begin an action, up to its first request."""
        self.allowed, self.is_stopped, self.is_done, self.error = 0, False, False, None
        self.thread = threading.Thread(target=self._act, args=(action,), daemon=True)
        self.thread.start()
        self.go_on(0)

    def go_on(self, requests: int) -> None:
        """Let that many requests through; return when they are done, or the action is."""
        with self.change:
            self.allowed += requests
            self.change.notify_all()
            self.change.wait_for(self._has_stopped)
            self.allowed = 0
        if self.is_done:
            self.thread.join()

    def stop(self) -> None:
        """End the client as a kill would: it makes no further request."""
        with self.change:
            self.is_stopped = True
            self.change.notify_all()
        if not self.is_done:
            self.thread.join()

    def store(self, inner: Store) -> "PacedStore":
        return PacedStore(inner, self)

    def request(self, call: str, where: str, action: Callable[[], Any]) -> Any:
        """Make a request as soon as it may be made."""
        with self.change:
            self.waiting += 1
            self.next_request = call, where
            self.change.notify_all()
            self.change.wait_for(lambda: self.allowed > 0 or self.is_stopped)
            self.waiting -= 1
            if self.is_stopped:
                raise Stopped
            self.allowed -= 1
            self.running += 1
        try:
            result = action()
            self.after_request(self, call, where)
            return result
        finally:
            with self.change:
                self.running -= 1
                self.change.notify_all()

    def _has_stopped(self) -> bool:
        has_used_all = self.allowed == 0 and self.running == 0 and self.waiting > 0
        return has_used_all or self.is_done

    def _act(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:  # the test looks at it
            self.error = error
        finally:
            with self.change:
                self.is_done = True
                self.change.notify_all()


class PacedStore(WatchedStore):
    """A bucket as one client sees it."""

    watch: PacedClient

    def within(self, folder: str) -> "PacedStore":
        return PacedStore(self.inner.within(folder), self.watch)

    @property
    def parent(self) -> "PacedStore | None":
        above = self.inner.parent
        return None if above is None else PacedStore(above, self.watch)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name not in (*READS, *WRITES):
            return method

        def paced(*args: Any, **options: Any) -> Any:
            def act() -> Any:
                return self._as_of_now(method(*args, **options))

            return self.watch.request(name, self._urls_of(args), act)

        return paced
