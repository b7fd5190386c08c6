"""Decides whether to save now, and for which reason.

Ranks must save together or not at all:

- `own_reason` depends on values that all ranks share (step, epochs, metrics of rank 0). So each
  rank acts on its own answer.
- `shared_reason` depends on clocks and signals, which differ between ranks. So ranks exchange their
  answers (a poll) at steps that all of them know in advance (`next_poll`), and the reason of one
  rank holds for all.
"""

import math
from collections.abc import Mapping

from ft_ckpt.schedule.every import Every
from ft_ckpt.schedule.history import History, is_improvement
from ft_ckpt.schedule.intervals import bounded_interval, optimal_interval, parse_seconds

# how long a signal may wait for the next poll
_POLL_SECONDS = 1.0
# largest fraction of the time that polls may take
_POLL_SHARE = 0.005
# most steps between two polls, in case steps suddenly take long
_MAX_STEPS_BETWEEN_POLLS = 100
# assumed time of a save until one is measured; short, so that the first save comes early
_FIRST_SAVE_SECONDS = 1.0
# time before the deadline if no save was measured yet, and the least time otherwise
_UNMEASURED_MARGIN_SECONDS = 300.0
_MIN_MARGIN_SECONDS = 60.0


def own_reason(
    every: Every,
    history: History,
    step: int,
    epochs_done: int,
    metrics: Mapping[str, float] | None = None,
) -> str | None:
    """Return the reason to save after `step`, from values that all ranks share.

    It is "steps", "epochs", "best" or None. It is the same on every rank if the `metrics` are. A
    step that was saved has no further reason.
    """
    if step <= history.saved_step:
        return None
    if every.steps and step // every.steps > history.saved_step // every.steps:
        return "steps"
    if every.epochs and epochs_done // every.epochs > history.saved_epochs // every.epochs:
        return "epochs"
    return "best" if is_improvement(every, history, metrics or {}) else None


def shared_reason(
    every: Every, history: History, now: float, now_unix: float, signal: str | None = None
) -> str | None:
    """Return this rank's reason to save, from clocks and signals.

    It is the `signal`, "deadline", "minutes", "optimum" or None. `now` is monotonic time as in the
    history, and `now_unix` is unix time. Ranks may have different reasons, and agree on one at
    polls. A signal is returned even if the step was saved already, so that the caller exits. For
    the other reasons, a step that was saved has no further reason.
    """
    if signal is not None or history.step <= history.saved_step:
        return signal
    if _before_deadline(every, history, now, now_unix):
        return "deadline"
    waited = now - history.saved_at
    if every.minutes and waited >= every.minutes * 60:
        return "minutes"
    interval = interval_seconds(every, history)
    if interval is not None and waited >= interval:
        return "optimum"
    return None


def interval_seconds(every: Every, history: History) -> float | None:
    """Return the interval for `every.mtbf`, in seconds from the end of a save.

    Returns None without `every.mtbf`. The estimated time between failures begins at `every.mtbf`,
    and approaches the time that the run itself measures. Several failures between two saves count
    as one.
    """
    if every.mtbf is None:
        return None
    cost = history.save_seconds or _FIRST_SAVE_SECONDS
    mtbf = (parse_seconds(every.mtbf) + history.run_seconds) / (1 + history.failures)
    return max(optimal_interval(cost, mtbf), bounded_interval(cost, every.max_overhead))


def needs_poll(every: Every) -> bool:
    """Check whether ranks have to poll.

    The answer of rank 0 holds for all, because the environments of ranks may differ.
    """
    return bool(every.minutes or every.signals or every.mtbf) or every.deadline_unix() is not None


def next_poll(history: History, step: int, poll_seconds: float) -> int:
    """Return the step of the next poll.

    It is about a second later, or more if polls would otherwise take more than 0.5 % of the time.
    It is never more than 100 steps later, and it is the next step until steps are measured.
    `poll_seconds` is the shortest measured poll, which has not waited for slow ranks. Ranks measure
    different times, so the answer of rank 0 must be sent to the others.
    """
    if not history.step_seconds:
        return step + 1
    steps_per_second = int(_POLL_SECONDS / history.step_seconds)
    steps_for_share = math.ceil(poll_seconds / _POLL_SHARE / history.step_seconds)
    steps = max(1, steps_per_second, steps_for_share)
    return step + int(min(steps, _MAX_STEPS_BETWEEN_POLLS))


def _before_deadline(every: Every, history: History, now: float, now_unix: float) -> bool:
    """Check whether to save for the deadline.

    The margin is the time before the deadline in which a save is due. The first save comes at its
    start. Another one comes when as much work is unsaved as there is time left, if two saves still
    fit. So work inside the margin is saved too, and jobs that are as short as the margin.
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
    """Return the margin before the deadline in seconds."""
    if every.deadline_margin_minutes is not None:
        return every.deadline_margin_minutes * 60
    if history.save_seconds is None:
        return _UNMEASURED_MARGIN_SECONDS
    measured = 3 * history.save_seconds + 2 * (history.step_seconds or 0)
    return max(_MIN_MARGIN_SECONDS, measured)
