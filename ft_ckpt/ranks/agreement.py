"""Agreement of ranks: collects a value of each rank in torch's store and computes one verdict for
all.

A verdict is a dictionary: the `result` for every rank, or a `problem` and the `kind` of error that
all ranks raise.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import groupby
from queue import SimpleQueue
from typing import Any, NoReturn

from ft_ckpt import errors
from ft_ckpt.errors import (
    CheckpointError,
    LeaseTakenError,
    NoSpaceError,
    RankError,
    RanksDisagreeError,
)

ADVICE = (
    "call it on every rank, not under `if accelerator.is_main_process`, and with the same arguments"
)
# on which all ranks decide alike what to do; else a RankError
_OF_ALL_RANKS = (LeaseTakenError, NoSpaceError)
Values = Sequence[Mapping[str, Any]]  # of all ranks, in rank order; equal values are one object
Verdict = dict[str, Any]


@dataclass(frozen=True)
class Agreed:
    """The result of an agreement."""

    result: Any
    """On every rank: the result of `decide`, by default rank 0's value."""
    values: Values = ()
    """On rank 0 only: the value of each rank."""


def value_of_leader(values: Values) -> Any:
    return values[0]


def error_facts(error: BaseException | None) -> dict[str, Any]:
    """The error for other ranks: its text, and the class that they raise."""
    if error is None:
        return {"error": None, "raises": RankError.__name__}
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    kind = type(error) if isinstance(error, _OF_ALL_RANKS) else RankError
    return {"error": text, "raises": kind.__name__}


def failure_of_rank(rank: int, error: BaseException) -> Verdict:
    """The verdict that a failed rank leaves for the others."""
    facts = error_facts(error)
    return _refusal(facts["raises"], f"rank {rank} failed: {facts['error']}")


def disagreement(problem: str) -> Verdict:
    """The verdict that ranks made different calls or passed different values."""
    return _refusal(RanksDisagreeError.__name__, problem)


def verdict_on(values: Values, decide: Callable[[Values], Any]) -> Verdict:
    """The verdict for every rank: the result of `decide`, or the error it raised."""
    try:
        # as other ranks read it
        return {"problem": None, "result": json.loads(json.dumps(decide(values)))}
    except Exception as error:  # noqa: BLE001 - raised on every rank
        kind = type(error) if isinstance(error, CheckpointError) else RankError
        return _refusal(kind.__name__, error_facts(error)["error"])


def judge_entries(
    what: str, entries: dict[int, dict[str, Any]], size: int, same: tuple[str, ...], limit: float
) -> Verdict | None:
    """The verdict if the entries of the ranks show a problem, else None; `same` names fields that
    must be equal.
    """
    missing = [rank for rank in range(size) if rank not in entries]
    if missing:
        return disagreement(
            f"{what}: rank(s) {rank_numbers(missing)} did not enter it within {limit:g} s; {ADVICE}"
        )
    elsewhere = [rank for rank, entry in entries.items() if entry["what"] != what]
    if elsewhere:
        called = entries[elsewhere[0]]["what"]
        return disagreement(
            f"{what}: rank(s) {rank_numbers(elsewhere)} called {called} instead; {ADVICE}"
        )
    failed = [rank for rank, entry in entries.items() if entry["error"] is not None]
    if failed:
        text = "; ".join(f"rank {rank}: {entries[rank]['error']}" for rank in failed[:4])
        kinds = {entries[rank]["raises"] for rank in failed}
        return _refusal(
            kinds.pop() if len(kinds) == 1 else RankError.__name__, f"{what} failed: {text}"
        )
    differing = [
        difference
        for name in same
        if (difference := _field_difference(name, list(entries.values())))
    ]
    return disagreement(f"{what}: ranks disagree: {'; '.join(differing)}") if differing else None


def raise_problem(verdict: Verdict) -> NoReturn:
    """Raise the error of a verdict or of a failure report."""
    kind: type[CheckpointError] = getattr(errors, verdict["kind"])
    raise kind(verdict["problem"])


def runs_of(values: Sequence[Any]) -> dict[str, Any]:
    """Run-length encoded values of all ranks; `values_of_runs` decodes them."""
    texts = [json.dumps(value) for value in values]
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    runs = [[places[text], len([*run])] for text, run in groupby(texts)]
    return {"values": [json.loads(text) for text in places], "runs": runs}


def values_of_runs(encoded: Mapping[str, Any]) -> list[Any]:
    """The value of each rank; equal values are one object."""
    return [encoded["values"][place] for place, count in encoded["runs"] for _ in range(count)]


def rank_numbers(ranks: Sequence[int]) -> str:
    """The ranks as text, at most eight of them by number."""
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _refusal(kind: str, problem: str) -> Verdict:
    return {"problem": problem, "kind": kind}


def _field_difference(name: str, entries: list[dict[str, Any]]) -> str | None:
    first = entries[0]["value"].get(name)
    differing = [rank for rank, entry in enumerate(entries) if entry["value"].get(name) != first]
    if not differing:
        return None
    other = entries[differing[0]]["value"].get(name)
    return f"{name} is {first!r} on rank 0 and {other!r} on rank(s) {rank_numbers(differing)}"


_PART_BYTES = 4 << 20  # per key: above 8 MiB torch's store crashes, and the process group with it
_KEYS_AT_ONCE = 32  # per call, because the server holds its whole answer in memory


def put_value(store: Any, key: str, value: Any) -> int:
    """Store a value in parts under `key` and further keys, `key` last.

    Returns the number of parts.
    """
    text = json.dumps(value).encode()
    parts = [text[low : low + _PART_BYTES] for low in range(0, len(text), _PART_BYTES)]
    for number, part in enumerate(parts[1:], 1):
        store.set(_part_key(key, number), part)
    store.set(key, b"%d %b" % (len(parts), parts[0]))
    return len(parts)


def get_values(store: Any, keys: Sequence[str]) -> Iterator[Any]:
    """The value under each of the keys, which exist; equal values are one object."""
    known: dict[bytes, Any] = {}
    for low in range(0, len(keys), _KEYS_AT_ONCE):
        batch = keys[low : low + _KEYS_AT_ONCE]
        for key, stored in zip(batch, store.multi_get(batch), strict=True):
            count, _, first = stored.partition(b" ")
            text = b"".join(
                [first, *(store.get(_part_key(key, number)) for number in range(1, int(count)))]
            )
            if text not in known:
                known[text] = json.loads(text)
            yield known[text]


def delete_value(store: Any, key: str, parts: int) -> None:
    """Delete a value of `parts` parts.

    Raises RuntimeError or NotImplementedError if the store cannot delete.
    """
    store.delete_key(key)
    for number in range(1, parts):
        store.delete_key(_part_key(key, number))


def _part_key(key: str, number: int) -> str:
    return f"{key}/part-{number}"


_LEAST_SECONDS = 10.0  # an answer may take this long on a busy machine
_Call = tuple[futures.Future[Any], Callable[..., Any], tuple[Any, ...]]


class AnsweringStore:
    """A store that raises RankError after `silent_seconds` (at least 10 s) without an answer, and
    then at each call.
    """

    def __init__(self, store: Any, silent_seconds: float = 600.0) -> None:
        self.silent_seconds = silent_seconds
        self._store, self._calls, self._is_silent = store, SimpleQueue[_Call](), False
        # so that the wait of one call is not counted as silence of another
        self._one_at_a_time = threading.Lock()
        threading.Thread(
            target=_answer_calls, args=(self._calls,), name="ft_ckpt-store", daemon=True
        ).start()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._ask, getattr(self._store, name))

    def clone(self) -> "AnsweringStore":
        """A separate client of the same store."""
        return AnsweringStore(self._store.clone(), self.silent_seconds)

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        waits = sum(
            (value for value in arguments if isinstance(value, timedelta)), timedelta()
        ).total_seconds()
        limit, answer = max(self.silent_seconds, _LEAST_SECONDS), futures.Future[Any]()
        with self._one_at_a_time:
            if not self._is_silent:
                self._calls.put((answer, call, arguments))
                self._is_silent = not futures.wait([answer], limit + waits).done
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
