"""The verdict on a meeting of ranks, from what each of them reported. Pure functions: nothing is sent here."""

from typing import Any

from ft_ckpt.errors import CheckpointError, NoSpaceError

ADVICE = "call it on every rank, not under `if accelerator.is_main_process`, and with the same arguments"


def error_facts(error: BaseException | None) -> dict[str, Any]:
    """The facts of an error that other ranks need: its text, and whether a disk is full."""
    if error is None:
        return {"error": None, "full": False}
    text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return {"error": text, "full": isinstance(error, NoSpaceError)}


def judge_entries(
    what: str, entries: dict[int, dict[str, Any]], size: int, same: tuple[str, ...], limit: float
) -> tuple[str | None, str]:
    """The problem that the ranks' entries show, None for none, and its kind; `same` names fields to be equal."""
    missing = [rank for rank in range(size) if rank not in entries]
    if missing:
        return f"{what}: rank(s) {rank_numbers(missing)} did not enter it within {limit:g} s; {ADVICE}", "disagree"
    elsewhere = [rank for rank, entry in entries.items() if entry["what"] != what]
    if elsewhere:
        called = entries[elsewhere[0]]["what"]
        return f"{what}: rank(s) {rank_numbers(elsewhere)} called {called} instead; {ADVICE}", "disagree"
    failed = [rank for rank, entry in entries.items() if entry["error"] is not None]
    if failed:
        text = "; ".join(f"rank {rank}: {entries[rank]['error']}" for rank in failed[:4])
        kind = "full" if all(entries[rank]["full"] for rank in failed) else "failed"
        return f"{what} failed, nothing was committed: {text}", kind
    differing = [difference for name in same if (difference := _field_difference(name, list(entries.values())))]
    return (f"{what}: ranks disagree: {'; '.join(differing)}" if differing else None), "disagree"


def _field_difference(name: str, entries: list[dict[str, Any]]) -> str | None:
    first = entries[0]["value"].get(name)
    odd = [rank for rank, entry in enumerate(entries) if entry["value"].get(name) != first]
    if not odd:
        return None
    return f"{name} is {first!r} on rank 0 and {entries[odd[0]]['value'].get(name)!r} on rank(s) {rank_numbers(odd)}"


def rank_numbers(ranks: list[int]) -> str:
    """The ranks in one line, the first eight of them by number."""
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
