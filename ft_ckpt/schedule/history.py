"""Records the past of a run: its steps, its saves, and how long they took."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ft_ckpt.errors import LoadError
from ft_ckpt.schedule.every import Every
from ft_ckpt.schedule.save_log import LoggedSave, finish_last, log_from_json, log_to_json
from ft_ckpt.schema import Count, FieldError, Seconds, as_record

# the reasons for a save after which a run continues
ROUTINE = ("steps", "epochs", "best", "minutes", "optimum")
# weights of the newest measurement in the running means
_STEP_WEIGHT = 0.1
_SAVE_WEIGHT = 0.3


@dataclass(frozen=True)
class History:
    """The past of a run, from which the schedule decides.

    Times ending in `_at` are seconds of a monotonic clock.

    Attributes:
        step: The last step.
        seen_at: When that step, or the save after it, ended.
        saved_step: The step of the last save.
        saved_epochs: The completed epochs at the last save.
        saved_at: When the last save ended.
        step_seconds: The running mean of the time of a step; None before the first measurement.
        save_seconds: The running mean of the time of a save; None before the first measurement.
        best: The best value of each metric of `Every.best` over all saves.
        run_seconds: How long the run has trained, over all restarts.
        failures: How often the run was resumed after a save of the schedule, so probably a failure.
        reason: The reason of the last save.
        saves: The log of the saves.
    """

    step: int = 0
    seen_at: float = 0.0
    saved_step: int = 0
    saved_epochs: int = 0
    saved_at: float = 0.0
    step_seconds: float | None = None
    save_seconds: float | None = None
    best: Mapping[str, float] = field(default_factory=dict)
    run_seconds: float = 0.0
    failures: int = 0
    reason: str | None = None
    saves: tuple[LoggedSave, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the values with which a resumed run continues.

        They are the fields of `_KeptHistory` and the log of the saves.
        """
        values = {name: getattr(self, name) for name in _KEPT_FIELDS}
        return values | {"best": dict(self.best), "saves": log_to_json(self.saves)}


@dataclass(frozen=True)
class _KeptHistory:
    """The fields of `History` that `to_json` keeps, besides the log of the saves."""

    saved_epochs: Count
    best: Mapping[str, float]
    step_seconds: Seconds | None
    save_seconds: Seconds | None
    run_seconds: Seconds
    failures: Count
    reason: str | None


_KEPT_FIELDS = tuple(declared.name for declared in fields(_KeptHistory))


def begin_history(
    step: int, epochs_done: int, now: float, kept: Mapping[str, Any] | None = None
) -> History:
    """Return the history of a run that starts or resumes at `step` and the time `now`.

    `kept` is the result of `History.to_json` in the resumed run. Its epochs replace `epochs_done`,
    because the schedule has counted them for that save. A resume from a save of the schedule (see
    ROUTINE) counts as a failure after that save. Raises LoadError if `kept` is not from `to_json`.
    """
    history = History(
        step=step, seen_at=now, saved_step=step, saved_epochs=epochs_done, saved_at=now
    )
    if kept is None:
        return history
    try:
        record = as_record(kept, _KeptHistory)
    except FieldError as error:
        raise LoadError(
            f"history: {error}; the file was not written by ft_ckpt or was changed since"
        ) from error

    saves = log_from_json(kept.get("saves", []))
    was_routine = record.reason in ROUTINE
    history = replace(history, **vars(record), saves=saves)
    return replace(history, failures=record.failures + was_routine)


def after_step(history: History, step: int, now: float) -> History:
    """Return the history after `step` has ended at `now`.

    It is the same history if it has that step already.
    """
    if step <= history.step:
        return history
    passed = now - history.seen_at
    seconds = _running_mean(history.step_seconds, passed / (step - history.step), _STEP_WEIGHT)
    return replace(
        history,
        step=step,
        seen_at=now,
        step_seconds=seconds,
        run_seconds=history.run_seconds + passed,
    )


def after_save(
    every: Every,
    history: History,
    step: int,
    epochs_done: int,
    now: float,
    *,
    cost_seconds: float | None = None,
    metrics: Mapping[str, float] | None = None,
    reason: str | None = None,
) -> History:
    """Return the history after a save at `step` that has ended at `now`.

    The save has stopped the training for `cost_seconds`. Without a cost the mean stays as it is.
    There is none in the history that the checkpoint itself stores, because the save has not ended
    then. There is also none after a failed save, which has no metrics either: the next try then
    comes an interval later.
    """
    best = dict(history.best)
    if metrics and every.best and is_improvement(every, history, metrics):
        name, _ = every.best
        best[name] = float(metrics[name])

    return replace(
        history,
        step=max(step, history.step),
        seen_at=now,
        saved_step=step,
        saved_epochs=epochs_done,
        saved_at=now,
        save_seconds=_running_mean(history.save_seconds, cost_seconds, _SAVE_WEIGHT),
        best=best,
        run_seconds=history.run_seconds + now - history.seen_at,
        reason=reason,
    )


def after_commit(
    history: History, seconds: float, size_bytes: int, waited_seconds: float
) -> History:
    """Return the history after a save in the background was committed.

    `seconds` is the time of the whole save, and `size_bytes` the size of all its files.
    `waited_seconds` is how long optimizers have waited for its copies after the call.
    """
    mean = _running_mean(history.save_seconds, seconds, _SAVE_WEIGHT)
    return replace(
        history,
        save_seconds=mean,
        saves=finish_last(history.saves, seconds, size_bytes, waited_seconds),
    )


def is_improvement(every: Every, history: History, metrics: Mapping[str, float]) -> bool:
    """Check whether the metric of `every.best` is finite and better than at all earlier saves."""
    if every.best is None:
        return False
    name, mode = every.best
    if name not in metrics:
        return False
    value = float(metrics[name])
    best = history.best.get(name)
    if best is None or not math.isfinite(value):
        return math.isfinite(value)
    return value < best if mode == "min" else value > best


def _running_mean(before: float | None, value: float | None, weight: float) -> float | None:
    """Return the mean `before` moved towards `value` by the fraction `weight`."""
    if before is None:
        return value
    if value is None:
        return before
    return before + weight * (value - before)
