"""Agreement of ranks: each rank puts a value into torch's store, and all get one verdict.

A verdict is a dictionary. It has the `result` for every rank, or a `problem` and the `kind` of
error that all ranks raise.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
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
# Errors that all ranks raise with their own class, because callers act on it. Any other error is a
# RankError on the other ranks.
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


def error_facts(error: BaseException | None, node: str | None = None) -> dict[str, Any]:
    """Describe an error for the other ranks: its text, and the class that they raise.

    `node` is the node of this rank, None if all ranks are on one node. The text of the error ends
    with it from now on.
    """
    if error is None:
        return {"error": None, "raises": RankError.__name__}
    if isinstance(error, CheckpointError):
        if error.node is None:
            error.node = node
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
        if node is not None:
            text += f" (on {node})"
    kind = type(error) if isinstance(error, _OF_ALL_RANKS) else RankError
    return {"error": text, "raises": kind.__name__}


def failure_of_rank(rank: int, facts: Mapping[str, Any]) -> Verdict:
    """Return the verdict that a rank with an error of these facts leaves for the other ranks."""
    return _refusal(facts["raises"], f"rank {rank} failed: {facts['error']}")


def disagreement(problem: str) -> Verdict:
    """Return the verdict that ranks made different calls or passed different values."""
    return _refusal(RanksDisagreeError.__name__, problem)


def verdict_on(
    values: Values,
    decide: Callable[[Values], Any],
    facts_of: Callable[[BaseException], Mapping[str, Any]],
) -> Verdict:
    """Return the verdict for every rank: the result of `decide`, or the error that it raised.

    `facts_of` is `error_facts` with the node of this rank.
    """
    try:
        # converted, so that this rank has the same value as the ranks that read it as JSON
        return {"problem": None, "result": json.loads(json.dumps(decide(values)))}
    except Exception as error:  # noqa: BLE001 - raised on every rank
        kind = type(error) if isinstance(error, CheckpointError) else RankError
        return _refusal(kind.__name__, facts_of(error)["error"])


def judge_entries(
    what: str, entries: dict[int, dict[str, Any]], size: int, same: tuple[str, ...], limit: float
) -> Verdict | None:
    """Return the verdict on a problem in the entries of the ranks, or None if there is none.

    `entries` are by rank. A rank without an entry has not entered within `limit` seconds. `same`
    names the fields that must be equal on all ranks.
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
        kind = kinds.pop() if len(kinds) == 1 else RankError.__name__
        return _refusal(kind, f"{what} failed: {text}")
    differences = []
    for name in same:
        difference = _field_difference(name, list(entries.values()))
        if difference is not None:
            differences.append(difference)
    if not differences:
        return None
    return disagreement(f"{what}: ranks disagree: {'; '.join(differences)}")


def raise_problem(verdict: Verdict) -> NoReturn:
    """Raise the error of a verdict or of a failure report."""
    kind: type[CheckpointError] = getattr(errors, verdict["kind"])
    error = kind(verdict["problem"])
    error.node = ""  # the text names the node of each rank that failed
    raise error


def runs_of(values: Sequence[Any]) -> dict[str, Any]:
    """Run-length encode the values of all ranks; `values_of_runs` decodes them."""
    texts = [json.dumps(value) for value in values]
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    runs = [[places[text], len([*run])] for text, run in groupby(texts)]
    return {"values": [json.loads(text) for text in places], "runs": runs}


def values_of_runs(encoded: Mapping[str, Any]) -> list[Any]:
    """Decode `runs_of`: return the value of each rank, with equal values as one object."""
    values: list[Any] = []
    for place, count in encoded["runs"]:
        values += [encoded["values"][place]] * count
    return values


def rank_numbers(ranks: Sequence[int]) -> str:
    """Return the ranks as text, with at most eight numbers."""
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
