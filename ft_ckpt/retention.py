"""Rules that decide which checkpoints stay. Pure: reads no disk."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from typing_extensions import Self

from ft_ckpt.errors import (
    ConfigError,
    Rule,
    check_settings,
    is_number,
    listing,
    refuse_unknown_fields,
)
from ft_ckpt.messages import did_you_mean

_T = TypeVar("_T")
# metric, "min" or "max", how many (default 1)
Best: TypeAlias = tuple[str, str] | tuple[str, str, int]
_PERIODS = {"hourly": "%Y-%m-%d %Hh", "daily": "%Y-%m-%d", "weekly": "week %G-%V"}
_COUNTS = ("last", "every_steps", *_PERIODS)


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints to keep: those that any rule selects.

    Without a rule all are kept, and so are all while none of them has the metric of a `best` rule.

    `last`: the newest n. `every_steps`: each whose step is a multiple. `best`: the best by a
    metric, as ("eval_loss", "min") or ("accuracy", "max", 3), or several such; of equal ones the
    oldest. `hourly`, `daily`, `weekly`: the newest of each of the last n hours, days or weeks (UTC,
    ISO weeks) that have one. `state`: separate rules for the training state; a checkpoint that only
    the outer rules keep loses its state.

    Raises ConfigError naming every invalid rule.
    """

    last: int | None = None
    every_steps: int | None = None
    best: Best | Sequence[Best] | None = None
    hourly: int | None = None
    daily: int | None = None
    weekly: int | None = None
    state: "Keep | None" = None

    def __new__(cls, *values: Any, **settings: Any) -> Self:
        refuse_unknown_fields(cls, values, settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        counts: list[Rule] = [(name, _is_count, "a whole number from 1") for name in _COUNTS]
        best = "(metric, 'min' or 'max') and perhaps how many"
        check_settings(
            self,
            [
                *counts,
                ("best", lambda _: all(map(_is_best_rule, self._best_rules)), best),
                (
                    "state",
                    lambda rules: rules is None or rules.state is None,
                    "rules without a state of their own",
                ),
            ],
        )

    @property
    def rankings(self) -> tuple[tuple[str, str, int], ...]:
        """Every `best` as (metric, mode, how many)."""
        return tuple(
            (best[0], best[1], best[2] if len(best) == 3 else 1) for best in self._best_rules
        )

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that the `best` rules rank by, without those of `state`."""
        return tuple(metric for metric, _, _ in self.rankings)

    @property
    def has_rules(self) -> bool:
        """Whether there is a rule for weights; otherwise all are kept."""
        return bool(self._best_rules) or any(getattr(self, name) is not None for name in _COUNTS)

    @property
    def _best_rules(self) -> list[Best]:
        if not self.best:
            return []
        is_one = not isinstance(self.best, Sequence) or isinstance(self.best[0], str)
        return [self.best] if is_one else list(self.best)  # type: ignore[list-item, arg-type]


def keep_from_record(record: Mapping[str, Any] | None) -> Keep:
    """The rules that a training state records; without rules for None.

    Raises ConfigError, KeyError, TypeError.
    """
    if record is None:
        return Keep()
    state = record["state"]
    return Keep(**{**record, "state": None if state is None else keep_from_record(state)})


@dataclass(frozen=True, kw_only=True)
class HeldCheckpoint:
    """The properties of one checkpoint that the rules use."""

    path: Path | str  # or its URL
    step: int | None
    created: float  # unix seconds
    metrics: Mapping[str, float] = field(default_factory=dict)
    guards: tuple[str, ...] = ()  # reasons to keep it regardless of the rules: pinned, in use, ...
    valid: bool = True
    has_state: bool = False
    has_weights: bool = True
    run_id: str | None = None
    # weights saved beside a run's checkpoints, or an average: exempt from the rules
    is_export: bool = False
    number: int = 0  # order of checkpoints without a step
    base: Path | str | None = None  # the checkpoint that it needs to be read


@dataclass(frozen=True)
class PrunePlan:
    """The checkpoints to keep, with reasons, to delete, and to keep without their training state.

    Oldest first.
    """

    keep: Mapping[Path | str, tuple[str, ...]]
    drop: tuple[Path | str, ...]
    strip: tuple[Path | str, ...]


def plan_pruning(
    held: Sequence[HeldCheckpoint], keep: Keep, run_id: str | None = None
) -> PrunePlan:
    """Apply `keep` to the checkpoints `held`: to those of the run `run_id` if given, else to each
    run separately.

    Other checkpoints are kept: exports, and those without a run unless there are no runs. Of each
    run these are never dropped or stripped: the newest valid one, the newest valid one with a
    training state, and those with guards. An invalid checkpoint does not displace a valid one: the
    rules are applied with and without it, and either result keeps a checkpoint. The base of a kept
    checkpoint is kept. Nothing of a run is dropped while none of it is valid, or while no valid one
    of it has a metric that the rules rank by.
    """
    oldest_first = sorted(held, key=_age_key)
    runs = _judged_runs(oldest_first, run_id)
    firm = _firm_reasons(held, runs)
    asked = {path: why for ours in runs for path, why in _chosen_by_rules(ours, keep).items()}
    stays = {each.path: (*firm[each.path], *asked.get(each.path, ())) for each in oldest_first}
    bare = sorted((each for ours in runs for each in _losing_state(ours, keep, firm)), key=_age_key)
    # stripped of state, they would be empty
    alone = {each.path for each in bare if not each.has_weights}
    kept = {path: why for path, why in stays.items() if why and path not in alone}
    bases = {each.path: each.base for each in held}
    for each in reversed(oldest_first):  # a base is older
        base = bases[each.path]
        if each.path in kept and base in bases and base is not None:
            kept.setdefault(base, (f"the base of {str(each.path).rpartition('/')[2]}",))
    kept = {path: kept[path] for path in stays if path in kept}
    drop = tuple(path for path in stays if path not in kept)
    return PrunePlan(kept, drop, tuple(each.path for each in bare if each.path in kept))


def check_metrics(held: Sequence[HeldCheckpoint], keep: Keep, run_id: str | None = None) -> None:
    """Raise ConfigError for a metric of `keep` that none of the checkpoints has to which it
    applies; names theirs.
    """
    judged = [each for ours in _judged_runs(held, run_id) for each in ours]
    state = keep.state or Keep()
    measured = metrics_of(judged)
    if judged and (unmeasured := sorted({*keep.metrics, *state.metrics} - measured)):
        raise ConfigError(
            f"best: no checkpoint has {name_metrics(unmeasured, measured)}; nothing was deleted. "
            "Give the name of a metric that they have"
        )


def metrics_of(held: Iterable[HeldCheckpoint]) -> set[str]:
    """The metrics that a valid one of the checkpoints has, as a number."""
    names = set[str]()
    for each in held:
        if each.valid:
            names.update(name for name, value in each.metrics.items() if not math.isnan(value))
    return names


def name_metrics(unmeasured: Sequence[str], measured: Iterable[str]) -> str:
    """Text that names metrics which are missing, and those that there are, the nearest names
    first.
    """
    choices = sorted(measured)
    names = listing([repr(metric) for metric in unmeasured], ", ")
    question = did_you_mean(unmeasured, choices)
    choices_text = f"metrics: {listing(choices, ', ')}" if choices else "they have no metrics"
    return f"{names} ({question} {choices_text})" if question else f"{names} ({choices_text})"


def _judged_runs(held: Sequence[HeldCheckpoint], run_id: str | None) -> list[list[HeldCheckpoint]]:
    """The checkpoints that the rules apply to, grouped by run."""
    asked = [each for each in held if not each.is_export]
    named = sorted({each.run_id for each in asked if each.run_id is not None})
    wanted: Sequence[str | None] = [run_id] if run_id is not None else named or [None]
    return [[each for each in asked if each.run_id == one] for one in wanted]


def newest_valid(held: Iterable[HeldCheckpoint]) -> dict[Path | str, str]:
    """The newest valid checkpoint and the newest valid one with a training state, with the reason
    by path.
    """
    whole = sorted((each for each in held if each.valid), key=_age_key)
    found = {
        each.path: "newest valid with state"
        for each in [one for one in whole if one.has_state][-1:]
    }
    return found | {each.path: "newest valid" for each in whole[-1:]}


def _age_key(each: HeldCheckpoint) -> tuple[int, int, float, str]:
    """The order of `catalog.in_run_order` within a run: step, number, time of creation; then
    path.
    """
    return -1 if each.step is None else each.step, each.number, each.created, str(each.path)


def _firm_reasons(
    held: Sequence[HeldCheckpoint], runs: Sequence[Sequence[HeldCheckpoint]]
) -> dict[Path | str, tuple[str, ...]]:
    """The reasons to keep each checkpoint regardless of the rules; `runs`: the checkpoints that
    rules apply to.
    """
    reasons = {each.path: each.guards for each in held}
    judged = {each.path for ours in runs for each in ours}
    for each in held:
        if each.path not in judged:
            reasons[each.path] += ("of another run" if each.run_id else "of no run",)
    for ours in runs:
        unproved = () if any(each.valid for each in ours) else ("no valid one is there",)
        for each in ours:
            reasons[each.path] += unproved
        for path, why in newest_valid(ours).items():
            reasons[path] += (why,)
    return reasons


def _losing_state(
    ours: Sequence[HeldCheckpoint], keep: Keep, firm: Mapping[Path | str, tuple[str, ...]]
) -> list[HeldCheckpoint]:
    if keep.state is None:
        return []
    stateful = [each for each in ours if each.has_state]
    asked = _chosen_by_rules(stateful, keep.state)
    return [each for each in stateful if not firm[each.path] and each.path not in asked]


def _chosen_by_rules(
    held: Sequence[HeldCheckpoint], keep: Keep
) -> dict[Path | str, tuple[str, ...]]:
    """The checkpoints of `held` that a rule selects, each with those rules, oldest first."""
    if not keep.has_rules:
        return {each.path: ("no rule drops it",) for each in held}
    if unmeasured := sorted(set(keep.metrics) - metrics_of(held)):
        return {each.path: (f"no checkpoint has {listing(unmeasured, ', ')}",) for each in held}
    found: dict[Path | str, list[str]] = {}
    for group in (held, [each for each in held if each.valid]):
        for each, reason in _asked_by_rules(group, keep):
            reasons = found.setdefault(each.path, [])
            if reason not in reasons:
                reasons.append(reason)
    return {path: tuple(reasons) for path, reasons in found.items()}


def _asked_by_rules(
    held: Sequence[HeldCheckpoint], keep: Keep
) -> Iterator[tuple[HeldCheckpoint, str]]:
    yield from ((each, f"last {keep.last}") for each in _last_of(held, keep.last))
    for each in held:
        if keep.every_steps and each.step is not None and each.step % keep.every_steps == 0:
            yield each, f"every {keep.every_steps} steps"
    for metric, mode, count in keep.rankings:
        known = [each for each in held if not math.isnan(each.metrics.get(metric, math.nan))]
        known.sort(
            key=lambda each: each.metrics[metric] if mode == "min" else -each.metrics[metric]
        )
        # of equal ones the oldest first
        yield from ((each, f"best {metric}") for each in known[:count])
    for name, pattern in _PERIODS.items():
        last_of = {
            datetime.fromtimestamp(each.created, timezone.utc).strftime(pattern): each
            for each in sorted(held, key=lambda each: (each.created, _age_key(each)))
        }
        yield from (
            (last_of[period], f"{name}: {period}")
            for period in _last_of(list(last_of), getattr(keep, name))
        )


def missed_rules(checkpoint: HeldCheckpoint, keep: Keep) -> tuple[str, ...]:
    """Why no rule of `keep` selects `checkpoint`, which `plan_pruning` drops: a phrase a rule."""
    if keep.state is not None and not checkpoint.has_weights:
        keep = keep.state
    reasons = [] if keep.last is None else [f"not one of the last {keep.last}"]
    if keep.every_steps is not None:
        step = "no step" if checkpoint.step is None else f"step {checkpoint.step}"
        reasons.append(f"{step} is not a multiple of {keep.every_steps}")
    for metric, mode, count in keep.rankings:
        rank = "the best" if count == 1 else f"among the best {count}"
        has_metric = not math.isnan(checkpoint.metrics.get(metric, math.nan))
        reasons.append(f"not {rank} by {metric} ({mode})" if has_metric else f"no {metric}")
    for period, periods in (("hour", keep.hourly), ("day", keep.daily), ("week", keep.weekly)):
        if periods is not None:
            reasons.append(f"not the newest of one of the last {periods} {period}s")
    return tuple(reasons)


def _last_of(items: Sequence[_T], count: int | None) -> Sequence[_T]:
    return items[-count:] if count else ()


def _is_count(value: object) -> bool:
    # JSON takes no number of NumPy
    return value is None or (isinstance(value, int) and is_number(value, 1))


def _is_best_rule(best: object) -> bool:
    if not isinstance(best, Sequence) or len(best) not in (2, 3) or not isinstance(best[0], str):
        return False
    return best[1] in ("min", "max") and all(is_number(count, 1, whole=True) for count in best[2:])
