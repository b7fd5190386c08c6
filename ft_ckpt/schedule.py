"""When to save: schedules, the optimal interval, the log of saves. Pure functions of a `History`.

Ranks must save together or not at all. `own_reason` depends on values that all ranks share (step,
epochs, agreed metrics), so each rank acts on its own answer. `shared_reason` depends on clocks and
signals, which differ: ranks exchange their answers at steps known in advance (`next_poll`), and the
reason of one rank holds for all.
"""

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any

from typing_extensions import Self

from ft_ckpt.errors import (
    ConfigError,
    LoadError,
    Rule,
    check_settings,
    is_number,
    refuse_unknown_fields,
)
from ft_ckpt.schema import Count, FieldError, Seconds, as_record

_UNITS = {
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}


def optimal_interval(save_seconds: float, mtbf_seconds: float, order: str = "daly") -> float:
    """The work between two saves, in seconds, that minimises the expected loss.

    It lies between the end of a save and the start of the next. `order` "young" is the first-order
    result sqrt(2 C M), with C the save time and M the time between failures. "daly" adds higher
    orders, which matter when C is not far below M; for C >= 2 M it is M. Raises ConfigError when a
    time is not above 0 or for another `order`.
    """
    if not (save_seconds > 0 and mtbf_seconds > 0):
        raise ConfigError(
            f"save time {save_seconds} s, time between failures {mtbf_seconds} "
            "s: both must be above 0"
        )
    if order not in ("daly", "young"):
        raise ConfigError(f"order={order!r}: expected daly or young")
    young = math.sqrt(2 * save_seconds * mtbf_seconds)
    if order == "young" or math.isinf(young):
        return young
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def bounded_interval(save_seconds: float, max_overhead: float) -> float:
    """The shortest interval in seconds at which saves take at most `max_overhead` of the time.

    `max_overhead` is a fraction in (0, 1].
    """
    return save_seconds * (1 - max_overhead) / max_overhead


def expected_overhead(
    interval_seconds: float, save_seconds: float, mtbf_seconds: float, restart_seconds: float = 0.0
) -> float:
    """Time spent on saving, repeated work and restarts, as a multiple of the time of useful work.

    Exact for failures at a constant rate, also during saves and restarts; infinite when the run
    would in practice never reach the next checkpoint. `mtbf_seconds` may be infinite.
    """
    if math.isinf(mtbf_seconds):
        return save_seconds / interval_seconds
    try:
        tries = math.expm1((interval_seconds + save_seconds) / mtbf_seconds)
        return (
            mtbf_seconds * math.exp(restart_seconds / mtbf_seconds) * tries / interval_seconds - 1
        )
    except OverflowError:
        return math.inf


def parse_seconds(duration: float | timedelta | str) -> float:
    """Seconds in a number of seconds, a timedelta, or text such as "90s", "45min", "24h", "7d".

    Raises ConfigError for any other value, and for one that is not above 0.
    """
    seconds = math.nan
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", duration.lower())
        seconds = float(match[1]) * _UNITS[match[2]] if match and match[2] in _UNITS else math.nan
    elif isinstance(duration, (int, float)) and not isinstance(duration, bool):
        seconds = float(duration)
    if seconds > 0:
        return seconds
    raise ConfigError(
        f"{duration!r} is not a duration; write seconds as a number, or text "
        "such as '90s', '24h', '7d'"
    )


_MAX_LOGGED = 500  # saves; beyond it, every second one of the older half is dropped


@dataclass(frozen=True)
class LoggedSave:
    """One save of a run's state.

    `stall_seconds` is None until the call returns; of a save in the background it includes the wait
    of optimizers only after the commit. `seconds` and `size_bytes` are None until the commit, all
    of them after a resume from this save.
    """

    step: int
    saved_at: float  # unix seconds, of the call
    reason: str | None  # of the schedule; None if the script asked for it
    metrics: Mapping[str, float] = field(default_factory=dict)
    stall_seconds: float | None = None  # time that training waited
    seconds: float | None = None  # until the commit
    size_bytes: int | None = None  # of all files


def append_save(log: Sequence[LoggedSave], entry: LoggedSave) -> tuple[LoggedSave, ...]:
    """The log with one more entry; a long log is thinned out at its older end."""
    entries = [save for save in log if save.step != entry.step]
    entries.append(entry)
    if len(entries) <= _MAX_LOGGED:
        return tuple(entries)
    half = len(entries) // 2
    return (*entries[:half:2], *entries[half:])


def finish_last(
    log: Sequence[LoggedSave], seconds: float, size_bytes: int, waited_seconds: float
) -> tuple[LoggedSave, ...]:
    """The log after the commit of the last save.

    It was in the background, and optimizers have waited for it.
    """
    if not log:
        return ()
    last = log[-1]
    stall = None if last.stall_seconds is None else last.stall_seconds + waited_seconds
    last = replace(last, seconds=seconds, size_bytes=size_bytes, stall_seconds=stall)
    return (*log[:-1], last)


def log_to_json(log: Sequence[LoggedSave]) -> list[dict[str, Any]]:
    """The log as JSON values; metrics that are not finite are text."""
    entries = []
    for save in log:
        metrics = {
            name: value if math.isfinite(value) else str(value)
            for name, value in save.metrics.items()
        }
        entries.append({**vars(save), "metrics": metrics})
    return entries


def log_from_json(document: Any) -> tuple[LoggedSave, ...]:
    """The log from the result of `log_to_json`. Raises LoadError for another document."""
    try:
        stored = as_record(document, tuple[_StoredSave, ...])
        return tuple(save.logged() for save in stored)
    except ValueError as error:
        raise LoadError(
            f"saves: {error} in the log of saves; the file was not written by ft_ckpt or was "
            "changed since"
        ) from error


@dataclass(frozen=True)
class _StoredSave:
    """One save in a JSON document: metrics that are not finite are text."""

    step: int
    saved_at: float
    reason: str | None
    metrics: Mapping[str, float | str]
    stall_seconds: float | None
    seconds: float | None
    size_bytes: int | None

    def logged(self) -> LoggedSave:
        metrics = {name: float(value) for name, value in self.metrics.items()}
        return LoggedSave(**{**vars(self), "metrics": metrics})


# Signals that ask a process to end.
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU")
ROUTINE = ("steps", "epochs", "best", "minutes", "optimum")  # reasons after which a run continues
DEADLINE_VARIABLE = "SLURM_JOB_END_TIME"  # unix seconds, set by Slurm in the environment of a job

_POLL_SECONDS = 1.0  # latency of a signal
_POLL_SHARE = 0.005  # largest fraction of the time for polls
_MAX_STEPS_UNASKED = 100  # bounds the latency if steps suddenly take long
# assumed until a save is measured; short, so that the first save comes early
_FIRST_SAVE_SECONDS = 1.0
_UNMEASURED_MARGIN_SECONDS = 300.0
_MIN_MARGIN_SECONDS = 60.0
_STEP_WEIGHT, _SAVE_WEIGHT = 0.1, 0.3  # of the newest measurement in the running mean


@dataclass(frozen=True, kw_only=True)
class Every:
    """When to save: whenever one of these is due.

    `Every()` alone saves on signals and before the end of a Slurm job.

    Raises ConfigError, with every problem at once, for invalid values.
    """

    steps: int | None = None
    """At each multiple of this many steps."""
    epochs: int | None = None
    """At the end of each multiple of this many epochs."""
    minutes: float | None = None
    """This long after the last save ended."""
    best: tuple[str, str] | None = None
    """Name of a metric and "min" or "max": whenever it is better than at all earlier saves."""
    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGINT")
    """On one of these: save at the end of the step, then exit; a second signal ends the process at
    once.
    """
    exit_code: int | None = None
    """Exit code after a save on a signal; None is 128 plus the signal's number, as in a shell."""
    deadline: float | datetime | str | None = "auto"
    """Before this time: unix seconds, a datetime, ISO 8601 text (local without offset); "auto": end
    of a Slurm job.
    """
    deadline_margin_minutes: float | None = None
    """Time before the deadline; None is three saves and two steps as measured, at least 1 minute (5
    if unmeasured).
    """
    mtbf: float | timedelta | str | None = None
    """Mean time between failures of the run, in seconds or as "24h": saves at the interval with the
    smallest loss.
    """
    max_overhead: float = 0.05
    """Largest fraction of the time that saves for `mtbf` may take, in (0, 1]; other reasons are not
    limited.
    """

    def __new__(cls, *values: Any, **settings: Any) -> Self:
        refuse_unknown_fields(cls, values, settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_settings(self, _RULES)

    @classmethod
    def optimal(
        cls, mtbf: float | timedelta | str, max_overhead: float = 0.05, **others: Any
    ) -> "Every":
        """Save at the interval with the smallest loss for failures every `mtbf` on average.

        The run measures its saves and corrects the interval.
        """
        return cls(mtbf=mtbf, max_overhead=max_overhead, **others)

    def deadline_unix(self) -> float | None:
        """The deadline in unix seconds; None when there is none."""
        if self.deadline == "auto":
            end = os.environ.get(DEADLINE_VARIABLE, "")
            return float(end) if end.isdecimal() else None
        return _unix_seconds(self.deadline)


@dataclass(frozen=True)
class History:
    """The past of a run, from which the schedule decides.

    Times are in seconds of a monotonic clock.
    """

    step: int = 0
    seen_at: float = 0.0  # when that step, or the save after it, ended
    saved_step: int = 0
    saved_epochs: int = 0
    saved_at: float = 0.0
    step_seconds: float | None = None  # running means; None before the first measurement
    save_seconds: float | None = None
    best: Mapping[str, float] = field(default_factory=dict)
    run_seconds: float = 0.0  # over all restarts
    failures: int = 0
    reason: str | None = None  # of the last save
    saves: tuple[LoggedSave, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The values with which a resumed run continues.

        They are best metrics, measurements, failures, and the log of its saves.
        """
        values = {name: getattr(self, name) for name in _KEPT_FIELDS}
        return values | {"best": dict(self.best), "saves": log_to_json(self.saves)}


@dataclass(frozen=True)
class _KeptHistory:
    """What `History.to_json` keeps."""

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
    """The history of a run that begins at `step`, or resumes there.

    `kept` is the `History.to_json` of the resumed run. Its epochs were counted for that save and
    take precedence over `epochs_done`. A resume from a routine save counts as a failure after that
    save. Raises LoadError when `kept` is not from `to_json`.
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


def own_reason(
    every: Every,
    history: History,
    step: int,
    epochs_done: int,
    metrics: Mapping[str, float] | None = None,
) -> str | None:
    """The reason to save after `step` from values that all ranks share.

    It is "steps", "epochs", "best" or None, equal on every rank if `metrics` are. Never twice for
    one step.
    """
    if step <= history.saved_step:
        return None
    if every.steps and step // every.steps > history.saved_step // every.steps:
        return "steps"
    if every.epochs and epochs_done // every.epochs > history.saved_epochs // every.epochs:
        return "epochs"
    return "best" if _is_improvement(every, history, metrics or {}) else None


def shared_reason(
    every: Every, history: History, now: float, now_unix: float, signal: str | None = None
) -> str | None:
    """The reason of this rank to save, from clocks and signals.

    It is the `signal`, "deadline", "minutes", "optimum" or None. Reasons differ between ranks,
    which agree at polls. A signal is returned even if the step is already saved, so that the caller
    exits; the other reasons never come twice for one step.
    """
    if signal is not None or history.step <= history.saved_step:
        return signal
    if _before_deadline(every, history, now, now_unix):
        return "deadline"
    waited = now - history.saved_at
    if every.minutes and waited >= every.minutes * 60:
        return "minutes"
    interval = interval_seconds(every, history)
    return "optimum" if interval is not None and waited >= interval else None


def interval_seconds(every: Every, history: History) -> float | None:
    """The current interval for `every.mtbf`, in seconds from the end of a save; None without it.

    The estimated time between failures starts from one assumed failure in `every.mtbf` and
    approaches the rate of the run, in which several failures between two saves count as one.
    """
    if every.mtbf is None:
        return None
    cost = history.save_seconds or _FIRST_SAVE_SECONDS
    mtbf = (parse_seconds(every.mtbf) + history.run_seconds) / (1 + history.failures)
    return max(optimal_interval(cost, mtbf), bounded_interval(cost, every.max_overhead))


def needs_poll(every: Every) -> bool:
    """Whether ranks have to poll.

    Rank 0's answer holds for all, because environments may differ.
    """
    return bool(every.minutes or every.signals or every.mtbf) or every.deadline_unix() is not None


def next_poll(history: History, step: int, poll_seconds: float) -> int:
    """The step of the next poll, after `step`: about once a second, for at most 0.5 % of the time.

    Every step until steps are measured, never more than 100 steps later. `poll_seconds`: the
    shortest measured poll, without the wait for slow ranks. Ranks measure different times, so the
    poll distributes rank 0's answer.
    """
    if not history.step_seconds:
        return step + 1
    gap_of_latency = int(_POLL_SECONDS / history.step_seconds)
    gap_of_cost = math.ceil(poll_seconds / _POLL_SHARE / history.step_seconds)
    gap = max(1, gap_of_latency, gap_of_cost)
    return step + int(min(gap, _MAX_STEPS_UNASKED))


def after_step(history: History, step: int, now: float) -> History:
    """The history after `step` ended at `now`; unchanged when that step is already in it."""
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
    """The history after a save at `step` that ended at `now`.

    The save stopped the training for `cost_seconds`. Without a cost the mean stays: in the history
    that the checkpoint itself stores, and after a failed save (without metrics too), so that the
    next try comes an interval later.
    """
    best = dict(history.best)
    if metrics and every.best and _is_improvement(every, history, metrics):
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
    """The history once a background save of `size_bytes` is committed.

    `seconds`: of the whole save. `waited_seconds`: that optimizers waited for its copies after the
    call.
    """
    mean = _running_mean(history.save_seconds, seconds, _SAVE_WEIGHT)
    return replace(
        history,
        save_seconds=mean,
        saves=finish_last(history.saves, seconds, size_bytes, waited_seconds),
    )


def _is_improvement(every: Every, history: History, metrics: Mapping[str, float]) -> bool:
    if every.best is None or every.best[0] not in metrics:
        return False
    name, mode = every.best
    value = float(metrics[name])
    before = history.best.get(name)
    if before is None or not math.isfinite(value):
        return math.isfinite(value)
    return value < before if mode == "min" else value > before


def _before_deadline(every: Every, history: History, now: float, now_unix: float) -> bool:
    """Whether to save for the deadline.

    It is at the start of the margin, then when the unsaved work equals the time left. The second
    case covers work inside the margin and jobs as short as the margin; only while two saves fit.
    """
    deadline = every.deadline_unix()
    if deadline is None:
        return False
    seconds_left = deadline - now_unix
    margin = _deadline_margin(every, history)
    if not 0 < seconds_left <= margin:
        return False
    unsaved_seconds = now - history.saved_at
    is_first_in_margin = seconds_left + unsaved_seconds > margin
    two_saves_fit = seconds_left >= 2 * (history.save_seconds or 0)
    return is_first_in_margin or (unsaved_seconds >= seconds_left and two_saves_fit)


def _deadline_margin(every: Every, history: History) -> float:
    if every.deadline_margin_minutes is not None:
        return every.deadline_margin_minutes * 60
    if history.save_seconds is None:
        return _UNMEASURED_MARGIN_SECONDS
    measured = 3 * history.save_seconds + 2 * (history.step_seconds or 0)
    return max(_MIN_MARGIN_SECONDS, measured)


def _running_mean(before: float | None, value: float | None, weight: float) -> float | None:
    if before is None or value is None:
        return value if before is None else before
    return before + weight * (value - before)


def _unix_seconds(when: float | datetime | str | None) -> float | None:
    if isinstance(when, str):
        # Python 3.10 does not know the letter
        when = datetime.fromisoformat(when.replace("Z", "+00:00"))
    return when.timestamp() if isinstance(when, datetime) else when


def _is_duration(value: Any) -> bool:
    return value is None or parse_seconds(value) > 0


def _is_best(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, (tuple, list)) and len(value) == 2 and value[1] in ("min", "max")


def _is_deadline(value: Any) -> bool:
    return value in (None, "auto") or is_number(_unix_seconds(value), 0, sys.float_info.max)


def _number_rule(
    field: str,
    words: str,
    least: float,
    most: float = math.inf,
    *,
    whole: bool = False,
    optional: bool = True,
) -> Rule:
    return (
        field,
        lambda value: (optional and value is None) or is_number(value, least, most, whole=whole),
        words,
    )


_ABOVE_ZERO = math.ulp(0.0)
_RULES: tuple[Rule, ...] = (
    _number_rule("steps", "a whole number above 0", 1, whole=True),
    _number_rule("epochs", "a whole number above 0", 1, whole=True),
    _number_rule("minutes", "a number above 0", _ABOVE_ZERO),
    _number_rule("exit_code", "0 to 255", 0, 255, whole=True),
    _number_rule("deadline_margin_minutes", "0 or more", 0),
    _number_rule("max_overhead", "a number above 0, at most 1", _ABOVE_ZERO, 1, optional=False),
    ("best", _is_best, 'the name of a metric and "min" or "max"'),
    (
        "signals",
        lambda names: isinstance(names, (tuple, list)) and all(name in SIGNALS for name in names),
        f"a tuple of {', '.join(SIGNALS)}",
    ),
    ("deadline", _is_deadline, '"auto", unix seconds, a datetime or ISO 8601 text'),
    ("mtbf", _is_duration, "a duration: seconds, or text such as '90s', '24h', '7d'"),
)
