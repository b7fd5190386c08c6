"""Failing requests to object stores: count the client's calls, and break one of them or all from
that one on.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

REQUESTS = ("put", "get", "head", "list", "list_with_delimiter", "copy", "delete")


class BrokenLine:
    """Counts requests; the `at`-th fails, with `for_good` all later ones too; `acts_first` loses
    only the response.
    """

    def __init__(self, at: int, *, for_good: bool = False, acts_first: bool = False) -> None:
        self.at, self.for_good, self.acts_first, self.count = at, for_good, acts_first, 0
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
    """The `at`-th request (1 is the first) of any client in this process fails while the block
    runs.
    """
    import obstore

    line = BrokenLine(at, for_good=for_good, acts_first=acts_first)

    def counted(real: Any) -> Any:
        def request(*args: Any, **more: Any) -> Any:
            if line.takes():
                return real(*args, **more)
            if acts_first:
                real(*args, **more)
            raise obstore.exceptions.GenericError("connection reset by peer")

        return request

    with pytest.MonkeyPatch.context() as patch:
        for name in REQUESTS:
            patch.setattr(obstore, name, counted(getattr(obstore, name)))
        yield line
