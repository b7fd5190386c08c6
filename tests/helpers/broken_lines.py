"""Failing requests to object stores: one request of a client fails, or all from that one on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

REQUESTS = ("put", "get", "head", "list", "list_with_delimiter", "copy", "delete")


class BrokenLine:
    """Counts requests: the `at`-th fails, and with `for_good` all later ones."""

    def __init__(self, at: int, *, for_good: bool = False) -> None:
        self.at, self.for_good, self.count = at, for_good, 0
        self._lock = threading.Lock()

    @property
    def is_broken(self) -> bool:
        """Whether a request has failed."""
        return self.count >= self.at

    def takes(self) -> bool:
        """Count a request; return whether it succeeds."""
        with self._lock:
            self.count += 1
            return self.count < self.at or (self.count > self.at and not self.for_good)


@contextmanager
def broken_line(
    at: int, *, for_good: bool = False, acts_first: bool = False
) -> Iterator[BrokenLine]:
    """Fail the `at`-th request (1 is the first) of all clients in this process during the block.

    With `for_good` all later requests fail, too. With `acts_first` the service has done what is
    requested, and the response is lost.
    """
    import obstore

    line = BrokenLine(at, for_good=for_good)

    def counted(call: Any) -> Any:
        def request(*args: Any, **options: Any) -> Any:
            if line.takes():
                return call(*args, **options)
            if acts_first:
                call(*args, **options)
            raise obstore.exceptions.GenericError("connection reset by peer")

        return request

    with pytest.MonkeyPatch.context() as patch:
        for name in REQUESTS:
            patch.setattr(obstore, name, counted(getattr(obstore, name)))
        yield line
