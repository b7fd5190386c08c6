"""The verdict on a meeting of ranks, from what each of them reported. Pure functions: nothing is sent here.

A verdict is a dictionary: what every rank is `told`, or a `problem` and the `kind` of error that every rank raises.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn

from ft_ckpt import errors
from ft_ckpt.errors import CheckpointError, NoSpaceError, RankError, RanksDisagreeError

ADVICE = "call it on every rank, not under `if accelerator.is_main_process`, and with the same arguments"
Values = Sequence[Mapping[str, Any]]  # of all ranks, in rank order; what is equal is one object
Verdict = dict[str, Any]


@dataclass(frozen=True)
class Agreed:
    """What a meeting came to."""

    told: Any
    """On every rank: what was made of all values, by default rank 0's."""
    values: Values = ()
    """On rank 0 alone: the value of each rank."""


def value_of_leader(values: Values) -> Any:
    """Rank 0's."""
    return values[0]


def error_facts(error: BaseException | None) -> dict[str, Any]:
    """The facts of an error that other ranks need: its text, and whether a disk is full."""
    if error is None:
        return {"error": None, "full": False}
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return {"error": text, "full": isinstance(error, NoSpaceError)}


def failure_of_rank(rank: int, error: BaseException) -> Verdict:
    """What a rank that has failed leaves for the others."""
    own = error_facts(error)
    return _refusal(NoSpaceError if own["full"] else RankError, f"rank {rank} failed: {own['error']}")


def disagreement(problem: str) -> Verdict:
    """The verdict that ranks did not do the same."""
    return _refusal(RanksDisagreeError, problem)


def verdict_on(values: Values, decide: Callable[[Values], Any]) -> Verdict:
    """What every rank is told: what `decide` makes of all values, or what it raises."""
    try:
        return {"problem": None, "told": json.loads(json.dumps(decide(values)))}  # as the others read it
    except Exception as error:  # noqa: BLE001 - raised on every rank
        kind = type(error) if isinstance(error, CheckpointError) else RankError
        return _refusal(kind, error_facts(error)["error"])


def judge_entries(
    what: str, entries: dict[int, dict[str, Any]], size: int, same: tuple[str, ...], limit: float
) -> Verdict | None:
    """The verdict on a problem that the ranks' entries show, None for none; `same` names fields to be equal."""
    missing = [rank for rank in range(size) if rank not in entries]
    if missing:
        return disagreement(f"{what}: rank(s) {rank_numbers(missing)} did not enter it within {limit:g} s; {ADVICE}")
    elsewhere = [rank for rank, entry in entries.items() if entry["what"] != what]
    if elsewhere:
        called = entries[elsewhere[0]]["what"]
        return disagreement(f"{what}: rank(s) {rank_numbers(elsewhere)} called {called} instead; {ADVICE}")
    failed = [rank for rank, entry in entries.items() if entry["error"] is not None]
    if failed:
        text = "; ".join(f"rank {rank}: {entries[rank]['error']}" for rank in failed[:4])
        kind = NoSpaceError if all(entries[rank]["full"] for rank in failed) else RankError
        return _refusal(kind, f"{what} failed: {text}")
    differing = [difference for name in same if (difference := _field_difference(name, list(entries.values())))]
    return disagreement(f"{what}: ranks disagree: {'; '.join(differing)}") if differing else None


def raise_told(told: Verdict) -> NoReturn:
    """Raise what a verdict or a report of failure says."""
    raise _error_told(told)


def _error_told(told: Verdict) -> CheckpointError:
    kind: type[CheckpointError] = getattr(errors, told["kind"])
    return kind(told["problem"])


def runs_of(values: Sequence[Any]) -> dict[str, Any]:
    """Values of all ranks, said once each, with how many neighbours have them; `values_of_runs` reads it."""
    texts = [json.dumps(value) for value in values]
    places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    runs = [[places[text], len([*some])] for text, some in groupby(texts)]
    return {"values": [json.loads(text) for text in places], "runs": runs}


def values_of_runs(told: Mapping[str, Any]) -> list[Any]:
    """The value of each rank; what is equal is one object."""
    return [told["values"][place] for place, count in told["runs"] for _ in range(count)]


def rank_numbers(ranks: Sequence[int]) -> str:
    """The ranks in one line, the first eight of them by number."""
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _refusal(kind: type[CheckpointError], problem: str) -> Verdict:
    return {"problem": problem, "kind": kind.__name__}


def _field_difference(name: str, entries: list[dict[str, Any]]) -> str | None:
    first = entries[0]["value"].get(name)
    odd = [rank for rank, entry in enumerate(entries) if entry["value"].get(name) != first]
    if not odd:
        return None
    return f"{name} is {first!r} on rank 0 and {entries[odd[0]]['value'].get(name)!r} on rank(s) {rank_numbers(odd)}"
