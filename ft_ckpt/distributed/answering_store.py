"""The key-value store of a process group, whose calls end: torch's own wait for ever when the network has gone.

Its client sends a request and reads the answer, with no time-out for most of them. A thread that reads cannot be woken,
so calls are made by a thread of this store, which is left behind when no answer comes.
"""

import threading
from collections.abc import Callable
from concurrent import futures
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

from ft_ckpt.errors import RankError

_LEAST_SECONDS = 10.0  # that an answer may take on a machine that is busy with other things
_Call = tuple[futures.Future[Any], Callable[..., Any], tuple[Any, ...]]


class AnsweringStore:
    """A store by whose calls RankError is raised when it has not answered for `silent_seconds`, and ever after.

    It has at least ten seconds to answer.
    """

    def __init__(self, store: Any, silent_seconds: float = 600.0) -> None:
        self.silent_seconds = silent_seconds
        self._store, self._calls, self._is_silent = store, SimpleQueue[_Call](), False
        self._one_at_a_time = threading.Lock()  # so that nobody takes another's wait for silence
        threading.Thread(target=_answer_calls, args=(self._calls,), name="ft_ckpt-store", daemon=True).start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._ask, getattr(self._store, name))

    def clone(self) -> "AnsweringStore":
        """A client of its own to the same store."""
        return AnsweringStore(self._store.clone(), self.silent_seconds)

    def _ask(self, call: Callable[..., Any], *given: Any) -> Any:
        waits = sum((one for one in given if isinstance(one, timedelta)), timedelta()).total_seconds()
        limit, answer = max(self.silent_seconds, _LEAST_SECONDS), futures.Future[Any]()
        with self._one_at_a_time:
            if not self._is_silent:
                self._calls.put((answer, call, given))
                self._is_silent = not futures.wait([answer], limit + waits).done
        if not self._is_silent:
            return answer.result()
        raise RankError(
            f"the key-value store of the process group has not answered for {limit:g} s: the network, or the process "
            "that keeps it, is gone; start the ranks again"
        )


def _answer_calls(calls: "SimpleQueue[_Call]") -> None:
    while True:
        answer, call, given = calls.get()
        try:
            answer.set_result(call(*given))
        except Exception as error:  # noqa: BLE001 - raised where the call was made
            answer.set_exception(error)
