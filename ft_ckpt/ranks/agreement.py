"""Decides what ranks that agree get: the same result, or the same error.

To agree, each rank puts an entry into the key-value store of the process group. Rank 0 reads the
entries of all ranks, and answers with one verdict, which every rank reads.

An entry has the name of the call (`what`), the `value` of the rank, and its `error`, if it has
failed, with the class that the other ranks raise (`raises`). A verdict has the `result` for every
rank; or it has the text of a `problem` and the class of error (`kind`) that all ranks raise. Both
are dictionaries, which the store holds as JSON. `Ranks.agree` exchanges them.
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
# Errors that the other ranks raise with the same class, because callers act on it. Any other error
# is a RankError on the other ranks.
_OF_ALL_RANKS = (LeaseTakenError, NoSpaceError)
# The values of all ranks, in rank order. Equal values are one object.
Values = Sequence[Mapping[str, Any]]
Verdict = dict[str, Any]


@dataclass(frozen=True)
class Agreed:
    """The result of an agreement."""

    result: Any
    """On every rank: the result of `decide`, by default rank 0's value."""
    values: Values = ()
    """On rank 0 only: the value of each rank."""


def value_of_rank_0(values: Values) -> Any:
    """Return the value of rank 0, as the result for every rank."""
    return values[0]


def describe_error(error: BaseException | None, node: str | None = None) -> dict[str, Any]:
    """Describe an error of this rank for the other ranks: its text, and the class that they raise.

    The result has the fields `error` and `raises` of an entry. `node` is the host name of this
    rank, None if all ranks are on one node. From now on the text of the error ends with it.
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


def failure_of_rank(rank: int, description: Mapping[str, Any]) -> Verdict:
    """Return the verdict that a failed rank stores for the other ranks.

    `description` is the result of `describe_error`.
    """
    return _error_verdict(description["raises"], f"rank {rank} failed: {description['error']}")


def disagreement(problem: str) -> Verdict:
    """Return the verdict that ranks made different calls or passed different values."""
    return _error_verdict(RanksDisagreeError.__name__, problem)


def verdict_on(
    values: Values,
    decide: Callable[[Values], Any],
    describe: Callable[[BaseException], Mapping[str, Any]],
) -> Verdict:
    """Return the verdict for every rank: the result of `decide`, or the error that it raised.

    `describe` is `describe_error` with the node of this rank.
    """
    try:
        # Converted to JSON and back, so that this rank has the same value as the ranks that read
        # it. For example, tuples become lists.
        return {"problem": None, "result": json.loads(json.dumps(decide(values)))}
    except Exception as error:  # noqa: BLE001 - raised on every rank
        kind = type(error) if isinstance(error, CheckpointError) else RankError
        return _error_verdict(kind.__name__, describe(error)["error"])


def judge_entries(
    what: str, entries: dict[int, dict[str, Any]], size: int, same: tuple[str, ...], limit: float
) -> Verdict | None:
    """Return the verdict on the first problem in the entries of the ranks, or None without one.

    Problems are, in this order: a rank without an entry, which has not entered the call `what`
    within `limit` seconds; a rank that has made another call; a rank that has failed; values that
    differ in a field named in `same`. `entries` are by rank, and `size` is the number of ranks.
    """
    missing = [rank for rank in range(size) if rank not in entries]
    if missing:
        return disagreement(
            f"{what}: rank(s) {rank_numbers(missing)} did not enter it within {limit:g} s; {ADVICE}"
        )

    in_other_call = [rank for rank, entry in entries.items() if entry["what"] != what]
    if in_other_call:
        called = entries[in_other_call[0]]["what"]
        return disagreement(
            f"{what}: rank(s) {rank_numbers(in_other_call)} called {called} instead; {ADVICE}"
        )

    failed = [rank for rank, entry in entries.items() if entry["error"] is not None]
    if failed:
        text = "; ".join(f"rank {rank}: {entries[rank]['error']}" for rank in failed[:4])
        kinds = {entries[rank]["raises"] for rank in failed}
        kind = kinds.pop() if len(kinds) == 1 else RankError.__name__
        return _error_verdict(kind, f"{what} failed: {text}")

    differences = []
    for name in same:
        difference = _field_difference(name, list(entries.values()))
        if difference is not None:
            differences.append(difference)

    if not differences:
        return None
    return disagreement(f"{what}: ranks disagree: {'; '.join(differences)}")


def raise_problem(verdict: Verdict) -> NoReturn:
    """Raise the error of a verdict."""
    kind: type[CheckpointError] = getattr(errors, verdict["kind"])
    error = kind(verdict["problem"])
    # The text already names the node of each rank that has failed. So no node is added to it.
    error.node = ""
    raise error


def runs_of(values: Sequence[Any]) -> dict[str, Any]:
    """Run-length encode the values of all ranks; `values_of_runs` decodes them.

    For example, ["a", "a", "b"] is {"values": ["a", "b"], "runs": [[0, 2], [1, 1]]}: a run is the
    index of a value, and how many consecutive ranks have it.
    """
    texts = [json.dumps(value) for value in values]
    indices = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    runs = [[indices[text], len([*run])] for text, run in groupby(texts)]
    return {"values": [json.loads(text) for text in indices], "runs": runs}


def values_of_runs(encoded: Mapping[str, Any]) -> list[Any]:
    """Decode `runs_of`: return the value of each rank, with equal values as one object."""
    values: list[Any] = []
    for index, count in encoded["runs"]:
        values += [encoded["values"][index]] * count
    return values


def rank_numbers(ranks: Sequence[int]) -> str:
    """Return the ranks as text, with at most eight numbers."""
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _error_verdict(kind: str, problem: str) -> Verdict:
    return {"problem": problem, "kind": kind}


def _field_difference(name: str, entries: list[dict[str, Any]]) -> str | None:
    """Return as text how a field of the values differs between ranks, or None if it does not."""
    first = entries[0]["value"].get(name)
    differing = [rank for rank, entry in enumerate(entries) if entry["value"].get(name) != first]
    if not differing:
        return None
    other = entries[differing[0]]["value"].get(name)
    return f"{name} is {first!r} on rank 0 and {other!r} on rank(s) {rank_numbers(differing)}"
