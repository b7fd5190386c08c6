"""Puts values of any size into the key-value store of the process group, and reads them.

The values are JSON. A large value is stored in several parts. `AnsweringStore` is a client that
raises an error if the store does not answer.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

from ft_ckpt.errors import RankError

# An answer may take this long on a busy machine.
_MIN_SILENT_SECONDS = 10.0
# The most bytes under one key. Above 8 MiB the store of torch crashes, and with it the process
# group.
_PART_BYTES = 4 << 20
# The most keys that are requested in one call: the server holds the whole answer in memory.
_KEYS_AT_ONCE = 32


def put_value(store: Any, key: str, value: Any) -> int:
    """Store a value under `key`, in parts if it is large; return the number of parts.

    The first part is under `key` itself, after the number of parts. It is written last. So a reader
    that sees `key` can read all parts.
    """
    text = json.dumps(value).encode()
    parts = [text[low : low + _PART_BYTES] for low in range(0, len(text), _PART_BYTES)]
    for number, part in enumerate(parts[1:], 1):
        store.set(_part_key(key, number), part)
    store.set(key, b"%d %b" % (len(parts), parts[0]))
    return len(parts)


def get_values(store: Any, keys: Sequence[str]) -> Iterator[Any]:
    """Yield the value under each of the keys, all of which exist; equal values are one object."""
    decoded: dict[bytes, Any] = {}
    for low in range(0, len(keys), _KEYS_AT_ONCE):
        batch = keys[low : low + _KEYS_AT_ONCE]
        for key, stored in zip(batch, store.multi_get(batch), strict=True):
            count, _, text = stored.partition(b" ")
            further = [store.get(_part_key(key, number)) for number in range(1, int(count))]
            text = b"".join([text, *further])
            if text not in decoded:
                decoded[text] = json.loads(text)
            yield decoded[text]


def delete_value(store: Any, key: str, parts: int) -> None:
    """Delete a value of `parts` parts.

    Raises RuntimeError or NotImplementedError if the store cannot delete.
    """
    store.delete_key(key)
    for number in range(1, parts):
        store.delete_key(_part_key(key, number))


def _part_key(key: str, number: int) -> str:
    return f"{key}/part-{number}"


_Call = tuple[futures.Future[Any], Callable[..., Any], tuple[Any, ...]]


class AnsweringStore:
    """A store that raises RankError after `silent_seconds` without an answer, at least 10 s.

    After the first such error, every call raises at once.
    """

    def __init__(self, store: Any, silent_seconds: float = 600.0) -> None:
        self.silent_seconds = silent_seconds
        self._store = store
        self._calls = SimpleQueue[_Call]()
        self._is_silent = False
        # One call at a time, so that no call counts the wait of another one as silence.
        self._one_at_a_time = threading.Lock()
        answering = partial(_answer_calls, self._calls)
        threading.Thread(target=answering, name="ft_ckpt-store", daemon=True).start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._ask, getattr(self._store, name))

    def clone(self) -> "AnsweringStore":
        """Return a separate client of the same store."""
        return AnsweringStore(self._store.clone(), self.silent_seconds)

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        waits = [value.total_seconds() for value in arguments if isinstance(value, timedelta)]
        limit = max(self.silent_seconds, _MIN_SILENT_SECONDS)
        answer = futures.Future[Any]()
        with self._one_at_a_time:
            if not self._is_silent:
                self._calls.put((answer, call, arguments))
                self._is_silent = not futures.wait([answer], limit + sum(waits)).done
        if not self._is_silent:
            return answer.result()
        raise RankError(
            f"the key-value store of the process group has not answered for {limit:g} s: the "
            "network, or the process that keeps it, is gone; start the ranks again"
        )


def _answer_calls(calls: "SimpleQueue[_Call]") -> None:
    while True:
        answer, call, arguments = calls.get()
        try:
            answer.set_result(call(*arguments))
        except Exception as error:  # noqa: BLE001 - raised where the call was made
            answer.set_exception(error)
