"""The outcome of a resume, item by item, and how the ranks agree on it.

Ranks agree: they exchange their outcomes, and all of them get the same result.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ft_ckpt.ranks import Ranks, Values


@dataclass(frozen=True)
class Restored:
    """The outcome of one item.

    `status` is "restored", "absent" (on one side) or "failed", and `detail` gives the reason.
    """

    name: str
    status: str
    detail: str = ""


@dataclass(frozen=True)
class RestoreReport:
    """The outcome of a resume, item by item, and how the run differs from the one that saved."""

    path: Path | str | None = None
    """The checkpoint; None after a fresh start."""
    items: tuple[Restored, ...] = ()
    """Each with its `name`, `status` ("restored", "absent" on one side, or "failed") and a `detail`
    that says why.
    """
    differences: tuple[str, ...] = ()
    """Settings in which this run differs from the one that saved."""
    notes: tuple[str, ...] = ()
    """Decisions of the resume that a reader should know."""
    requests: int = 0
    """Range requests of all ranks to a bucket; 0 for a checkpoint on a disk."""

    @property
    def problems(self) -> tuple[str, ...]:
        """A line for each item that was not restored."""
        return tuple(
            f"{item.name}: {item.status}: {item.detail}" for item in not_restored(self.items)
        )


def not_restored(outcomes: Sequence[Restored]) -> tuple[Restored, ...]:
    return tuple(outcome for outcome in outcomes if outcome.status != "restored")


def agree_on_outcomes(
    ranks: Ranks,
    what: str,
    outcomes: Sequence[Restored],
    requests: int = 0,
    error: BaseException | None = None,
) -> tuple[tuple[Restored, ...], int]:
    """Agree with the other ranks on one outcome per item, and on the sum of `requests`.

    Collective: call it on every rank. The outcome of an item is the failure on the lowest rank
    where it failed, or success if it failed on none. Its detail names the rank, and the node if
    there are several. `error` is the error of this rank, or None; it is raised on all ranks, as
    `Ranks.agree` raises it.
    """
    if not_restored(outcomes):
        node = ranks.node
        outcomes = [_on_node(outcome, node) for outcome in outcomes]
    value = {"items": [asdict(outcome) for outcome in outcomes], "requests": requests}
    merged = ranks.agree(what, value, error, decide=_merge_outcomes).result
    return tuple(Restored(**item) for item in merged["items"]), merged["requests"]


def _on_node(outcome: Restored, node: str | None) -> Restored:
    """Add the name of the node to the detail of a failure."""
    if node is None or outcome.status != "failed":
        return outcome
    return replace(outcome, detail=f"{outcome.detail} (on {node})")


def _merge_outcomes(values: Values) -> dict[str, Any]:
    merged: dict[str, dict[str, str]] = {}
    for rank, value in enumerate(values):
        for item in value["items"]:
            name = item["name"]
            has_failed = item["status"] != "restored"
            if name in merged and (not has_failed or merged[name]["status"] != "restored"):
                continue
            detail = item["detail"]
            if has_failed and rank > 0:
                detail = f"on rank {rank}: {detail}"
            merged[name] = {**item, "detail": detail}
    requests = sum(value["requests"] for value in values)
    return {"items": [*merged.values()], "requests": requests}
