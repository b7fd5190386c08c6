"""Keeps the error of a step on this rank, until all ranks agree on the outcome."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Outcome:
    """The error with which a block has ended; None if it has succeeded."""

    error: BaseException | None = None

    def raise_error(self) -> None:
        """Raise the error, if there is one."""
        if self.error is not None:
            raise self.error

    @contextmanager
    def deferring_error(self) -> Iterator[None]:
        """Keep the error of the block, so that `agree` can raise it on all ranks."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - passed to `agree`, which reports and raises it
            self.error = error


def try_action(action: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return the result of `action` and None, or None and its error.

    The caller passes the error to `agree`, which raises it on all ranks.
    """
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - passed to `agree`, which reports and raises it
        return None, error
