"""How a step has ended on this rank, before all ranks agree on it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Outcome:
    """How a block has ended: with this error, or None."""

    error: BaseException | None = None

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    @contextmanager
    def deferring_error(self) -> Iterator[None]:
        """Keep the error of the block, which `agree` raises on all ranks."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - passed to `agree`, which reports and raises it
            self.error = error


def try_action(action: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """Return the result of `action` and None, or None and its error.

    For steps on whose outcome the ranks agree next.
    """
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - passed to `agree`, which reports and raises it
        return None, error
