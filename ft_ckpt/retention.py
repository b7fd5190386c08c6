"""Decides by rules which checkpoints of a run stay. All functions are pure and read no disk.

Begin at `plan_pruning`. To prune is to delete the checkpoints that no rule selects. To strip a
checkpoint is to delete its training state and keep its weights.
"""

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
# a metric, "min" or "max", and how many checkpoints (default 1)
Best: TypeAlias = tuple[str, str] | tuple[str, str, int]
# the pattern that names the period of a time
_PERIODS = {"hourly": "%Y-%m-%d %Hh", "daily": "%Y-%m-%d", "weekly": "week %G-%V"}
_COUNTS = ("last", "every_steps", *_PERIODS)


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints to keep: those that at least one rule selects.

    All are kept if there is no rule, and while none of them has the metric of a `best` rule.

    `last`: the newest n. `every_steps`: each whose step is a multiple of n. `best`: the best by a
    metric, as ("eval_loss", "min") or ("accuracy", "max", 3), or several such; of equal ones the
    oldest. `hourly`, `daily`, `weekly`: the newest of each of the last n hours, days or weeks that
    have one (in UTC, and by ISO weeks). `state`: separate rules for the training state. A
    checkpoint that only the outer rules select loses its training state.

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
        """The rules of `best`, each as (metric, "min" or "max", how many)."""
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
        """Whether there is a rule for weights. If not, all checkpoints are kept."""
        if self.best:
            return True
        return any(getattr(self, name) is not None for name in _COUNTS)


def _best_rules(best: Any) -> list[Any]:
    """Return the rules in the setting `best`, which is one rule, several, or None."""
    if not best:
        return []
    is_single = not isinstance(best, Sequence) or isinstance(best[0], str)
    return [best] if is_single else list(best)


def keep_from_record(record: Mapping[str, Any] | None) -> Keep:
    """Return the rules that a training state records. For None they are `Keep()`, without rules.

    Raises ConfigError, KeyError or TypeError for an invalid record.
    """
    if record is None:
        return Keep()
    rules = dict(record)
    if rules["state"] is not None:
        rules["state"] = keep_from_record(rules["state"])
    return Keep(**rules)


@dataclass(frozen=True, kw_only=True)
class HeldCheckpoint:
    """The properties of one checkpoint that the rules use.

    Attributes:
        path: Its folder or URL.
        step: Its step, if it has one.
        created: When it was saved, in unix seconds.
        metrics: Its metrics by name.
        guards: Reasons to keep it whatever the rules say, such as "pinned".
        valid: Whether its files are complete.
        has_state: Whether it has a training state.
        has_weights: Whether it has weights besides the training state.
        run_id: The run that it belongs to, if any.
        is_export: Whether it is exempt from the rules: weights that a run has saved on request, or
            an average.
        number: The number of the save, which orders checkpoints without a step.
        base: The checkpoint without which it cannot be read, if it is a delta.
    """

    path: Path | str
    step: int | None
    created: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    guards: tuple[str, ...] = ()
    valid: bool = True
    has_state: bool = False
    has_weights: bool = True
    run_id: str | None = None
    is_export: bool = False
    number: int = 0
    base: Path | str | None = None


@dataclass(frozen=True)
class PrunePlan:
    """What to do with the checkpoints. Each field lists them oldest first.

    Attributes:
        keep: The checkpoints to keep, each with the reasons.
        drop: The checkpoints to delete.
        strip: The kept checkpoints that lose their training state.
    """

    keep: Mapping[Path | str, tuple[str, ...]]
    drop: tuple[Path | str, ...]
    strip: tuple[Path | str, ...]


def plan_pruning(
    checkpoints: Sequence[HeldCheckpoint], keep: Keep, run_id: str | None = None
) -> PrunePlan:
    """Apply the rules `keep` to the run `run_id`, or to each run separately if it is None.

    All other checkpoints are kept, and exports too. Checkpoints without a run are kept, unless
    there are no runs at all: then they count as one run.

    In each run these are neither dropped nor stripped:

    - the newest valid checkpoint, and the newest valid one with a training state
    - checkpoints with guards
    - all checkpoints while none of them is valid

    Nothing of a run is dropped while no valid checkpoint of it has a metric of `best`.

    An invalid checkpoint does not take the place of a valid one: the rules are applied with and
    without invalid checkpoints, and a checkpoint is kept if either result selects it. The base of a
    kept checkpoint is kept.
    """
    oldest_first = sorted(checkpoints, key=_age_key)
    runs = _group_by_run(oldest_first, run_id)
    fixed_reasons = _reasons_without_rules(checkpoints, runs)
    rule_reasons: dict[Path | str, tuple[str, ...]] = {}
    stripped: list[HeldCheckpoint] = []
    for run in runs:
        rule_reasons.update(_select_by_rules(run, keep))
        stripped += _losing_state(run, keep, fixed_reasons)

    stripped.sort(key=_age_key)

    # Checkpoints without weights would be empty without their training state, so they are dropped.
    emptied = {checkpoint.path for checkpoint in stripped if not checkpoint.has_weights}
    kept: dict[Path | str, tuple[str, ...]] = {}
    for checkpoint in oldest_first:
        reasons = (*fixed_reasons[checkpoint.path], *rule_reasons.get(checkpoint.path, ()))
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
    """Add to `kept` the bases of the checkpoints in it, also those of other runs."""
    bases = {checkpoint.path: checkpoint.base for checkpoint in checkpoints}
    to_visit = list(kept)
    while to_visit:
        path = to_visit.pop()
        base = bases[path]
        if base is not None and base in bases and base not in kept:
            kept[base] = (f"the base of {str(path).rpartition('/')[2]}",)
            to_visit.append(base)


def check_metrics(
    checkpoints: Sequence[HeldCheckpoint], keep: Keep, run_id: str | None = None
) -> None:
    """Raise ConfigError if no checkpoint has a metric of `keep`.

    The error names the metrics that there are. Only checkpoints to which the rules apply count.
    """
    ruled_checkpoints: list[HeldCheckpoint] = []
    for run in _group_by_run(checkpoints, run_id):
        ruled_checkpoints += run
    state = keep.state or Keep()
    measured = metrics_of(ruled_checkpoints)
    unmeasured = sorted({*keep.metrics, *state.metrics} - measured)
    if ruled_checkpoints and unmeasured:
        raise ConfigError(
            f"best: no checkpoint has {name_metrics(unmeasured, measured)}; nothing was deleted. "
            "Give the name of a metric that they have"
        )


def metrics_of(checkpoints: Iterable[HeldCheckpoint]) -> set[str]:
    """Return the names of the metrics that at least one valid checkpoint has, other than NaN."""
    names: set[str] = set()
    for checkpoint in checkpoints:
        if not checkpoint.valid:
            continue
        for name, value in checkpoint.metrics.items():
            if not math.isnan(value):
                names.add(name)
    return names


def name_metrics(unmeasured: Sequence[str], measured: Iterable[str]) -> str:
    """Return a text that names missing metrics, then the ones there are, and the nearest names."""
    choices = sorted(measured)
    names = listing([repr(metric) for metric in unmeasured], ", ")
    question = did_you_mean(unmeasured, choices)
    explanation = f"metrics: {listing(choices, ', ')}" if choices else "they have no metrics"
    if question:
        explanation = f"{question} {explanation}"
    return f"{names} ({explanation})"


def _group_by_run(
    checkpoints: Sequence[HeldCheckpoint], run_id: str | None
) -> list[list[HeldCheckpoint]]:
    """Return the checkpoints to which the rules apply, as a list for each run."""
    by_run: dict[str | None, list[HeldCheckpoint]] = {}
    for checkpoint in checkpoints:
        if not checkpoint.is_export:
            by_run.setdefault(checkpoint.run_id, []).append(checkpoint)
    if run_id is not None:
        return [by_run.get(run_id, [])]
    without_run = by_run.pop(None, [])
    if not by_run:
        return [without_run]
    return [by_run[name] for name in sorted(by_run, key=str)]


def newest_valid(checkpoints: Iterable[HeldCheckpoint]) -> dict[Path | str, str]:
    """Return the newest valid checkpoint, and the newest valid one with a training state.

    The result has the reason to keep each of them by its path.
    """
    valid = sorted((checkpoint for checkpoint in checkpoints if checkpoint.valid), key=_age_key)
    with_state = [checkpoint for checkpoint in valid if checkpoint.has_state]
    reasons: dict[Path | str, str] = {}
    if with_state:
        reasons[with_state[-1].path] = "newest valid with state"
    if valid:
        reasons[valid[-1].path] = "newest valid"
    return reasons


def _age_key(checkpoint: HeldCheckpoint) -> tuple[int, int, float, str]:
    """Return the key that sorts the checkpoints of a run, as `catalog.in_run_order` does.

    It is the step, then the number, then the time of creation, then the path.
    """
    step = -1 if checkpoint.step is None else checkpoint.step
    return step, checkpoint.number, checkpoint.created, str(checkpoint.path)


def _reasons_without_rules(
    checkpoints: Sequence[HeldCheckpoint], runs: Sequence[Sequence[HeldCheckpoint]]
) -> dict[Path | str, tuple[str, ...]]:
    """Return the reasons to keep each checkpoint whatever the rules say; () if there is none.

    `runs` are the checkpoints to which rules apply.
    """
    reasons = {checkpoint.path: checkpoint.guards for checkpoint in checkpoints}
    ruled_paths: set[Path | str] = set()
    for run in runs:
        ruled_paths.update(checkpoint.path for checkpoint in run)
    for checkpoint in checkpoints:
        if checkpoint.path not in ruled_paths:
            reasons[checkpoint.path] += ("of another run" if checkpoint.run_id else "of no run",)

    for run in runs:
        if not any(checkpoint.valid for checkpoint in run):
            for checkpoint in run:
                reasons[checkpoint.path] += ("no valid one is there",)
        for path, reason in newest_valid(run).items():
            reasons[path] += (reason,)

    return reasons


def _losing_state(
    run: Sequence[HeldCheckpoint], keep: Keep, fixed_reasons: Mapping[Path | str, tuple[str, ...]]
) -> list[HeldCheckpoint]:
    """Return the checkpoints of a run whose training state neither a rule nor a reason keeps."""
    if keep.state is None:
        return []
    with_state = [checkpoint for checkpoint in run if checkpoint.has_state]
    selected = _select_by_rules(with_state, keep.state)
    losing_state = []
    for checkpoint in with_state:
        if not fixed_reasons[checkpoint.path] and checkpoint.path not in selected:
            losing_state.append(checkpoint)
    return losing_state


def _select_by_rules(
    checkpoints: Sequence[HeldCheckpoint], keep: Keep
) -> dict[Path | str, tuple[str, ...]]:
    """Return the checkpoints that a rule selects, each with the rules that select it."""
    if not keep.has_rules:
        return {checkpoint.path: ("no rule drops it",) for checkpoint in checkpoints}
    unmeasured = sorted(set(keep.metrics) - metrics_of(checkpoints))
    if unmeasured:
        reason = f"no checkpoint has {listing(unmeasured, ', ')}"
        return {checkpoint.path: (reason,) for checkpoint in checkpoints}

    valid = [checkpoint for checkpoint in checkpoints if checkpoint.valid]
    selected: dict[Path | str, tuple[str, ...]] = {}
    for group in (checkpoints, valid):
        for checkpoint, reason in _selections(group, keep):
            reasons = selected.get(checkpoint.path, ())
            if reason not in reasons:
                selected[checkpoint.path] = (*reasons, reason)

    return selected


def _selections(
    checkpoints: Sequence[HeldCheckpoint], keep: Keep
) -> Iterator[tuple[HeldCheckpoint, str]]:
    """Yield each selected checkpoint with the rule, once for each rule that selects it."""
    for checkpoint in _last_of(checkpoints, keep.last):
        yield checkpoint, f"last {keep.last}"
    for checkpoint in checkpoints:
        if _is_multiple(checkpoint.step, keep.every_steps):
            yield checkpoint, f"every {keep.every_steps} steps"
    for metric, mode, count in keep.rankings:
        # The sort is stable, so of equal ones the oldest comes first.
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

    `pattern` is a value of _PERIODS. Within a period the newest is the last in the order of the
    run, because the clocks of its nodes may differ.
    """
    newest: dict[str, HeldCheckpoint] = {}
    for checkpoint in sorted(checkpoints, key=_age_key):
        created = datetime.fromtimestamp(checkpoint.created, timezone.utc)
        newest[created.strftime(pattern)] = checkpoint
    return dict(sorted(newest.items()))


def missed_rules(checkpoint: HeldCheckpoint, keep: Keep) -> tuple[str, ...]:
    """Return for each rule a phrase that says why it does not select `checkpoint`.

    The caller knows that `plan_pruning` drops it.
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
    # A whole number of NumPy is refused, because JSON cannot store it.
    return value is None or (isinstance(value, int) and is_number(value, 1))


def _is_without_state(rules: Any) -> bool:
    return rules is None or rules.state is None


def _are_best_rules(best: object) -> bool:
    return all(_is_best_rule(rule) for rule in _best_rules(best))


def _is_best_rule(best: object) -> bool:
    if not isinstance(best, Sequence) or len(best) not in (2, 3) or not isinstance(best[0], str):
        return False
    return best[1] in ("min", "max") and all(is_number(count, 1, whole=True) for count in best[2:])
