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
        rules: list[Rule] = [(name, _is_count, "a whole number from 1") for name in _COUNTS]
        rules.append(("best", _are_best_rules, "(metric, 'min' or 'max') and perhaps how many"))
        rules.append(("state", _is_without_state, "rules without a state of their own"))
        check_settings(self, rules)

    @property
    def rankings(self) -> tuple[tuple[str, str, int], ...]:
        """Every `best` as (metric, mode, how many)."""
        rankings = []
        for metric, mode, *counts in _best_rules(self.best):
            count = int(counts[0]) if counts else 1
            rankings.append((metric, mode, count))
        return tuple(rankings)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that the `best` rules rank by, without those of `state`."""
        return tuple(metric for metric, _, _ in self.rankings)

    @property
    def has_rules(self) -> bool:
        """Whether there is a rule for weights; otherwise all are kept."""
        if self.best:
            return True
        return any(getattr(self, name) is not None for name in _COUNTS)


def _best_rules(best: Any) -> list[Any]:
    """Return the rules in the setting `best`: several, or one alone."""
    if not best:
        return []
    is_single = not isinstance(best, Sequence) or isinstance(best[0], str)
    return [best] if is_single else list(best)


def keep_from_record(record: Mapping[str, Any] | None) -> Keep:
    """Return the rules that a training state records; without rules for None.

    Raises ConfigError, KeyError, TypeError.
    """
    if record is None:
        return Keep()
    rules = dict(record)
    if rules["state"] is not None:
        rules["state"] = keep_from_record(rules["state"])
    return Keep(**rules)


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
    # weights saved in the folder of a run, or an average: exempt from the rules
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
    checkpoints: Sequence[HeldCheckpoint], keep: Keep, run_id: str | None = None
) -> PrunePlan:
    """Apply `keep` to the `checkpoints` of the run `run_id`, or to each run separately if None.

    Other checkpoints are kept: exports, and those without a run unless there are no runs. Of each
    run these are never dropped or stripped: the newest valid one, the newest valid one with a
    training state, and those with guards. An invalid checkpoint does not displace a valid one: the
    rules are applied with and without it, and either result keeps a checkpoint. The base of a kept
    checkpoint is kept. Nothing of a run is dropped while none of it is valid, or while no valid one
    of it has a metric that the rules rank by.
    """
    oldest_first = sorted(checkpoints, key=_age_key)
    runs = _judged_runs(oldest_first, run_id)
    firm = _firm_reasons(checkpoints, runs)
    by_rules: dict[Path | str, tuple[str, ...]] = {}
    stripped: list[HeldCheckpoint] = []
    for run in runs:
        by_rules.update(_chosen_by_rules(run, keep))
        stripped += _losing_state(run, keep, firm)
    stripped.sort(key=_age_key)
    # without their state, they would be empty
    emptied = {checkpoint.path for checkpoint in stripped if not checkpoint.has_weights}
    kept: dict[Path | str, tuple[str, ...]] = {}
    for checkpoint in oldest_first:
        reasons = (*firm[checkpoint.path], *by_rules.get(checkpoint.path, ()))
        if reasons and checkpoint.path not in emptied:
            kept[checkpoint.path] = reasons
    _keep_bases(kept, checkpoints)
    paths = [checkpoint.path for checkpoint in oldest_first]
    return PrunePlan(
        keep={path: kept[path] for path in paths if path in kept},
        drop=tuple(path for path in paths if path not in kept),
        strip=tuple(checkpoint.path for checkpoint in stripped if checkpoint.path in kept),
    )


def _keep_bases(
    kept: dict[Path | str, tuple[str, ...]], checkpoints: Sequence[HeldCheckpoint]
) -> None:
    """Add the checkpoints to `kept` that those in it need to be read, also those of other runs."""
    bases = {checkpoint.path: checkpoint.base for checkpoint in checkpoints}
    unfollowed = list(kept)
    while unfollowed:
        path = unfollowed.pop()
        base = bases[path]
        if base is not None and base in bases and base not in kept:
            kept[base] = (f"the base of {str(path).rpartition('/')[2]}",)
            unfollowed.append(base)


def check_metrics(
    checkpoints: Sequence[HeldCheckpoint], keep: Keep, run_id: str | None = None
) -> None:
    """Raise ConfigError for a metric of `keep` that no checkpoint has, and name those there are.

    Only checkpoints count to which the metric applies.
    """
    judged: list[HeldCheckpoint] = []
    for run in _judged_runs(checkpoints, run_id):
        judged += run
    state = keep.state or Keep()
    measured = metrics_of(judged)
    unmeasured = sorted({*keep.metrics, *state.metrics} - measured)
    if judged and unmeasured:
        raise ConfigError(
            f"best: no checkpoint has {name_metrics(unmeasured, measured)}; nothing was deleted. "
            "Give the name of a metric that they have"
        )


def metrics_of(checkpoints: Iterable[HeldCheckpoint]) -> set[str]:
    """Return the metrics that a valid one of the checkpoints has, as a number."""
    names: set[str] = set()
    for checkpoint in checkpoints:
        if not checkpoint.valid:
            continue
        for name, value in checkpoint.metrics.items():
            if not math.isnan(value):
                names.add(name)
    return names


def name_metrics(unmeasured: Sequence[str], measured: Iterable[str]) -> str:
    """Name missing metrics in a text, and those there are, the nearest names first."""
    choices = sorted(measured)
    names = listing([repr(metric) for metric in unmeasured], ", ")
    question = did_you_mean(unmeasured, choices)
    explanation = f"metrics: {listing(choices, ', ')}" if choices else "they have no metrics"
    if question:
        explanation = f"{question} {explanation}"
    return f"{names} ({explanation})"


def _judged_runs(
    checkpoints: Sequence[HeldCheckpoint], run_id: str | None
) -> list[list[HeldCheckpoint]]:
    """Group the checkpoints that the rules apply to by run."""
    saved = [checkpoint for checkpoint in checkpoints if not checkpoint.is_export]
    by_run: dict[str | None, list[HeldCheckpoint]] = {}
    for checkpoint in saved:
        by_run.setdefault(checkpoint.run_id, []).append(checkpoint)
    if run_id is not None:
        return [by_run.get(run_id, [])]
    without_run = by_run.pop(None, [])
    if not by_run:
        return [without_run]
    return [by_run[name] for name in sorted(by_run, key=str)]


def newest_valid(checkpoints: Iterable[HeldCheckpoint]) -> dict[Path | str, str]:
    """Return the reasons by path to keep the newest valid checkpoints, with and without state."""
    valid = sorted((checkpoint for checkpoint in checkpoints if checkpoint.valid), key=_age_key)
    with_state = [checkpoint for checkpoint in valid if checkpoint.has_state]
    reasons: dict[Path | str, str] = {}
    if with_state:
        reasons[with_state[-1].path] = "newest valid with state"
    if valid:
        reasons[valid[-1].path] = "newest valid"
    return reasons


def _age_key(checkpoint: HeldCheckpoint) -> tuple[int, int, float, str]:
    """Return the key that sorts a run's checkpoints as `catalog.in_run_order` does.

    It is the step, the number and the time of creation; then the path.
    """
    step = -1 if checkpoint.step is None else checkpoint.step
    return step, checkpoint.number, checkpoint.created, str(checkpoint.path)


def _firm_reasons(
    checkpoints: Sequence[HeldCheckpoint], runs: Sequence[Sequence[HeldCheckpoint]]
) -> dict[Path | str, tuple[str, ...]]:
    """Return the reasons to keep each checkpoint regardless of the rules.

    `runs` are the checkpoints that rules apply to.
    """
    reasons = {checkpoint.path: checkpoint.guards for checkpoint in checkpoints}
    judged: set[Path | str] = set()
    for run in runs:
        judged.update(checkpoint.path for checkpoint in run)
    for checkpoint in checkpoints:
        if checkpoint.path not in judged:
            reasons[checkpoint.path] += ("of another run" if checkpoint.run_id else "of no run",)
    for run in runs:
        if not any(checkpoint.valid for checkpoint in run):
            for checkpoint in run:
                reasons[checkpoint.path] += ("no valid one is there",)
        for path, reason in newest_valid(run).items():
            reasons[path] += (reason,)
    return reasons


def _losing_state(
    run: Sequence[HeldCheckpoint], keep: Keep, firm: Mapping[Path | str, tuple[str, ...]]
) -> list[HeldCheckpoint]:
    """Return the checkpoints of a run whose training state no rule keeps."""
    if keep.state is None:
        return []
    stateful = [checkpoint for checkpoint in run if checkpoint.has_state]
    chosen = _chosen_by_rules(stateful, keep.state)
    losing = []
    for checkpoint in stateful:
        if not firm[checkpoint.path] and checkpoint.path not in chosen:
            losing.append(checkpoint)
    return losing


def _chosen_by_rules(
    checkpoints: Sequence[HeldCheckpoint], keep: Keep
) -> dict[Path | str, tuple[str, ...]]:
    """Return the checkpoints that a rule selects, each with those rules, oldest first."""
    if not keep.has_rules:
        return {checkpoint.path: ("no rule drops it",) for checkpoint in checkpoints}
    unmeasured = sorted(set(keep.metrics) - metrics_of(checkpoints))
    if unmeasured:
        reason = f"no checkpoint has {listing(unmeasured, ', ')}"
        return {checkpoint.path: (reason,) for checkpoint in checkpoints}
    valid = [checkpoint for checkpoint in checkpoints if checkpoint.valid]
    chosen: dict[Path | str, tuple[str, ...]] = {}
    for group in (checkpoints, valid):
        for checkpoint, reason in _selections(group, keep):
            reasons = chosen.get(checkpoint.path, ())
            if reason not in reasons:
                chosen[checkpoint.path] = (*reasons, reason)
    return chosen


def _selections(
    checkpoints: Sequence[HeldCheckpoint], keep: Keep
) -> Iterator[tuple[HeldCheckpoint, str]]:
    """Yield each checkpoint that a rule selects, with the rule: once for each such rule."""
    for checkpoint in _last_of(checkpoints, keep.last):
        yield checkpoint, f"last {keep.last}"
    for checkpoint in checkpoints:
        if _is_multiple(checkpoint.step, keep.every_steps):
            yield checkpoint, f"every {keep.every_steps} steps"
    for metric, mode, count in keep.rankings:
        # of equal ones the oldest first
        for checkpoint in _ranked(checkpoints, metric, mode)[:count]:
            yield checkpoint, f"best {metric}"
    for name, pattern in _PERIODS.items():
        newest = _newest_by_period(checkpoints, pattern)
        for period in _last_of(list(newest), getattr(keep, name)):
            yield newest[period], f"{name}: {period}"


def _is_multiple(step: int | None, every_steps: int | None) -> bool:
    return step is not None and every_steps is not None and step % every_steps == 0


def _has_metric(checkpoint: HeldCheckpoint, metric: str) -> bool:
    return not math.isnan(checkpoint.metrics.get(metric, math.nan))


def _ranked(checkpoints: Iterable[HeldCheckpoint], metric: str, mode: str) -> list[HeldCheckpoint]:
    """Return the checkpoints that have the metric, the best first."""
    measured = [checkpoint for checkpoint in checkpoints if _has_metric(checkpoint, metric)]
    sign = 1 if mode == "min" else -1
    return sorted(measured, key=lambda checkpoint: sign * checkpoint.metrics[metric])


def _newest_by_period(
    checkpoints: Iterable[HeldCheckpoint], pattern: str
) -> dict[str, HeldCheckpoint]:
    """Return the newest checkpoint of each period, the oldest period first.

    `pattern` names a period. Within a period the order is that of the run: its nodes' clocks may
    differ.
    """
    newest: dict[str, HeldCheckpoint] = {}
    for checkpoint in sorted(checkpoints, key=_age_key):
        created = datetime.fromtimestamp(checkpoint.created, timezone.utc)
        newest[created.strftime(pattern)] = checkpoint
    return dict(sorted(newest.items()))


def missed_rules(checkpoint: HeldCheckpoint, keep: Keep) -> tuple[str, ...]:
    """Return why no rule of `keep` selects `checkpoint`: a phrase for each rule.

    `plan_pruning` drops it.
    """
    if keep.state is not None and not checkpoint.has_weights:
        keep = keep.state
    reasons = []
    if keep.last is not None:
        reasons.append(f"not one of the last {keep.last}")
    if keep.every_steps is not None:
        step = "no step" if checkpoint.step is None else f"step {checkpoint.step}"
        reasons.append(f"{step} is not a multiple of {keep.every_steps}")
    for metric, mode, count in keep.rankings:
        rank = "the best" if count == 1 else f"among the best {count}"
        if _has_metric(checkpoint, metric):
            reasons.append(f"not {rank} by {metric} ({mode})")
        else:
            reasons.append(f"no {metric}")
    for period, periods in (("hour", keep.hourly), ("day", keep.daily), ("week", keep.weekly)):
        if periods is not None:
            reasons.append(f"not the newest of one of the last {periods} {period}s")
    return tuple(reasons)


def _last_of(items: Sequence[_T], count: int | None) -> Sequence[_T]:
    return items[-count:] if count else ()


def _is_count(value: object) -> bool:
    # JSON takes no number of NumPy
    return value is None or (isinstance(value, int) and is_number(value, 1))


def _is_without_state(rules: Any) -> bool:
    return rules is None or rules.state is None


def _are_best_rules(best: object) -> bool:
    return all(_is_best_rule(rule) for rule in _best_rules(best))


def _is_best_rule(best: object) -> bool:
    if not isinstance(best, Sequence) or len(best) not in (2, 3) or not isinstance(best[0], str):
        return False
    return best[1] in ("min", "max") and all(is_number(count, 1, whole=True) for count in best[2:])
