"""Why to save now: decisions from the past of a run, as pure functions.

Ranks must save together or not at all. `own_reason` depends on values that all ranks share (step,
epochs, agreed metrics), so each rank acts on its own answer. `shared_reason` depends on clocks and
signals, which differ: ranks exchange their answers at steps known in advance (`next_poll`), and the
reason of one rank holds for all.
"""

import math
from collections.abc import Mapping

from ft_ckpt.schedule.every import Every
from ft_ckpt.schedule.history import History, is_improvement
from ft_ckpt.schedule.intervals import bounded_interval, optimal_interval, parse_seconds

_POLL_SECONDS = 1.0  # latency of a signal
_POLL_SHARE = 0.005  # largest fraction of the time for polls
_MAX_STEPS_UNASKED = 100  # bounds the latency if steps suddenly take long
# assumed until a save is measured; short, so that the first save comes early
_FIRST_SAVE_SECONDS = 1.0
_UNMEASURED_MARGIN_SECONDS = 300.0
_MIN_MARGIN_SECONDS = 60.0


def own_reason(
    every: Every,
    history: History,
    step: int,
    epochs_done: int,
    metrics: Mapping[str, float] | None = None,
) -> str | None:
    """Return the reason to save after `step` from values that all ranks share.

    It is "steps", "epochs", "best" or None, equal on every rank if `metrics` are. Never twice for
    one step.
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
    """Return the reason of this rank to save, from clocks and signals.

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
    if interval is not None and waited >= interval:
        return "optimum"
    return None


def interval_seconds(every: Every, history: History) -> float | None:
    """Return the interval for `every.mtbf`, in seconds from the end of a save; None without it.

    The estimated time between failures starts from one assumed failure in `every.mtbf` and
    approaches the rate of the run, in which several failures between two saves count as one.
    """
    if every.mtbf is None:
        return None
    cost = history.save_seconds or _FIRST_SAVE_SECONDS
    mtbf = (parse_seconds(every.mtbf) + history.run_seconds) / (1 + history.failures)
    return max(optimal_interval(cost, mtbf), bounded_interval(cost, every.max_overhead))


def needs_poll(every: Every) -> bool:
    """Check whether ranks have to poll.

    Rank 0's answer holds for all, because environments may differ.
    """
    return bool(every.minutes or every.signals or every.mtbf) or every.deadline_unix() is not None


def next_poll(history: History, step: int, poll_seconds: float) -> int:
    """Return the step of the next poll: in about a second, for at most 0.5 % of the time.

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


def _before_deadline(every: Every, history: History, now: float, now_unix: float) -> bool:
    """Check whether to save for the deadline.

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
