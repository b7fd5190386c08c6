"""Defines `checkpoint_closure`, a decorator for functions that run at checkpoint steps.

The training loop calls such a function in each iteration. It runs at some of them, on all ranks.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

from torch import nn

from ft_ckpt import schedule
from ft_ckpt.config import every_of
from ft_ckpt.errors import CheckpointError, ConfigError, RankError, listing
from ft_ckpt.ranks import Ranks, Values, current_ranks, try_action
from ft_ckpt.ranks.wrappers import ModelTensors
from ft_ckpt.runs.loop import ClockPoll
from ft_ckpt.saver import CheckpointSaver, open_savers
from ft_ckpt.schedule import Every, History

P = ParamSpec("P")
R = TypeVar("R")
# the name of the function that is running, if one is
_running: list[str] = []


@overload
def checkpoint_closure(function: Callable[P, R], /) -> Callable[P, R | None]: ...
@overload
def checkpoint_closure(
    *,
    every: Every | None = None,
    total_steps: int | None = None,
    saver: CheckpointSaver[Any] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
def checkpoint_closure(
    function: Callable[..., Any] | None = None,
    /,
    *,
    every: Every | None = None,
    total_steps: int | None = None,
    saver: CheckpointSaver[Any] | None = None,
) -> Any:
    """Run a function only at checkpoint steps and at the last step; other calls return None.

    Call it in every iteration of the training loop, after `saver.step()`, on every rank. It runs on
    all ranks at the same step. The optimizer has stepped then, and the models that the saver knows
    are sharded as they are between steps.

    Steps and epochs are those of `saver`, by default of the saver that is open. Without a saver, or
    if `saver.step()` is not called, calls are counted. `every` is by default that of the saver.
    Only the saver watches signals. The last step is `total_steps`, or the end of the data if
    `saver.remaining(loader, epochs=...)` knows it. If the loader cannot tell which batch is the
    last one of an epoch, the end of the epoch is noticed an iteration late.

    An exception of the function is raised, and RankError on the other ranks. Raises ConfigError for
    invalid arguments, CheckpointError for a call inside another such function, and
    RanksDisagreeError if ranks call it at different steps.
    """
    every = every_of(every)
    problems = []
    if not isinstance(every, Every | None):
        problems.append(f"every={every!r}: expected Every(...)")
    elif every is not None and every.best:
        problems.append(
            f"every.best={every.best!r}: calls have no metrics; give it to the saver, which gets "
            "them in step()"
        )

    if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
        problems.append(f"total_steps={total_steps!r}: expected a whole number above 0")
    if function is not None and not callable(function):
        problems.append(
            f"{function!r}: expected a function; write @checkpoint_closure(every=Every(steps=100))"
        )

    if problems:
        raise ConfigError(f"checkpoint_closure: {listing(problems)}")

    def decorate(inner: Callable[..., Any]) -> Callable[..., Any]:
        name = f"{getattr(inner, '__name__', type(inner).__name__)}()"
        closure_schedule = _ClosureSchedule(name, every, total_steps, saver)

        @wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            return closure_schedule.call_if_due(lambda: inner(*args, **kwargs))

        return call

    return decorate if function is None else decorate(function)


class _ClosureSchedule:
    """Decides when one function runs. It follows the steps of the saver, or counts calls."""

    def __init__(
        self,
        name: str,
        every: Every | None,
        total_steps: int | None,
        saver: CheckpointSaver[Any] | None,
    ) -> None:
        self.name = name
        self._every = every
        self._total_steps = total_steps
        self._saver = saver
        # whether to look for an open saver
        self._finds_saver = saver is None
        # None until the first call
        self._poll: ClockPoll | None = None
        # the schedule in use, and the steps and runs of the function
        self._schedule = Every()
        self._history = History()
        # number of calls, if they count as steps
        self._call_count = 0

    def call_if_due(self, function: Callable[[], Any]) -> Any:
        """Run `function` if it is due at this call, and return its result. Else return None.

        Collective: call it on every rank.
        """
        if _running:
            raise CheckpointError(
                f"{self.name}: called inside {_running[-1]}, which runs at a checkpoint step "
                "already; call it from the training loop, or leave its decorator out"
            )

        self._find_saver()
        if self._saver is not None:
            # The loop uses the schedule of the saver, so no reminder to call `step` is needed.
            self._saver._run.reminder.note_call()
            if not self._saver._run.is_between_steps:
                return None

        poll = self._record_step()
        reason = self._reason_to_run(poll)
        return None if reason is None else self._run_everywhere(reason, function)

    def _reason_to_run(self, poll: ClockPoll) -> str | None:
        """Return why the function is due: a reason of the schedule, "last" or None."""
        step = self._history.step
        # All ranks must poll, so this comes first.
        polled_reason = poll.reason_to_save(self._history, step, self._current_ranks())
        if polled_reason is not None:
            return polled_reason
        reason = schedule.own_reason(self._schedule, self._history, step, self._epochs_done())
        if reason is not None:
            return reason
        return "last" if self._is_last() else None

    def _run_everywhere(self, reason: str, function: Callable[[], Any]) -> Any:
        """Run `function` on all ranks, once all have called it and have resharded their weights."""
        ranks = self._current_ranks()
        before = self._history
        begun_at = time.monotonic()
        _, error = try_action(self._restore_shards)
        ranks.agree(self.name, {"step": before.step}, error, same=("step",))

        # If the function fails, it runs again an interval later.
        self._history = self._after_call(before, reason, None)
        _running.append(self.name)
        try:
            result, error = ranks.attempt(function)
        finally:
            _running.pop()

        text = None if error is None else f"{type(error).__name__}: {error}"
        agreed = ranks.agree(f"the end of {self.name}", {"error": text}, decide=_failed_ranks)
        if error is not None:
            raise error
        if agreed.result:
            raise RankError(f"{self.name} failed on {agreed.result}")
        self._history = self._after_call(before, reason, time.monotonic() - begun_at)
        return result

    def _after_call(self, before: History, reason: str, cost: float | None) -> History:
        """Return the history after the function has run for `cost` seconds."""
        return schedule.after_save(
            self._schedule,
            before,
            before.step,
            self._epochs_done(),
            time.monotonic(),
            cost_seconds=cost,
            reason=reason,
        )

    def _find_saver(self) -> None:
        """Use the open saver, unless one was passed.

        After the saver is closed, its last step stays the current one.
        """
        if not self._finds_saver:
            return
        savers = open_savers()
        stepped_savers = [saver for saver in savers if saver._run.has_begun]
        if stepped_savers:
            savers = stepped_savers
        if len(savers) > 1:
            raise ConfigError(
                f"{self.name}: {len(savers)} savers are open; say which counts the steps: "
                "@checkpoint_closure(saver=saver), or close the others"
            )

        if savers and savers[0] is not self._saver:
            self._saver = savers[0]
            if self._saver._run.has_begun:
                self._poll = None

    def _record_step(self) -> ClockPoll:
        """Record in the history that a step has ended.

        At the first call the history begins. It begins again if the saver has gone back to an
        earlier step by a resume.
        """
        step = self._current_step()
        now = time.monotonic()
        if self._poll is None or step < self._history.step:
            self._schedule = self._make_schedule()
            self._poll = ClockPoll(self._schedule)
            # The history begins a step earlier, so that this step may be a checkpoint step.
            history = schedule.begin_history(step - 1, self._epochs_done(with_last=False), now)
            self._history = replace(history, step=step)
        self._history = schedule.after_step(self._history, step, now)
        return self._poll

    def _current_step(self) -> int:
        """Return the step of the saver, or the number of this call.

        Raises ConfigError if calls were counted before the saver has stepped.
        """
        if self._saver is None or not self._saver._run.has_begun:
            self._call_count += 1
            return self._call_count
        if self._call_count:
            raise ConfigError(
                f"{self.name}: the first {self._call_count} call(s) came before saver.step(), so "
                "that its steps would be counted late; call it after saver.step()"
            )
        return self._saver._run.step

    def _make_schedule(self) -> Every:
        """Return the schedule of the arguments, or that of the saver, without signals and metrics.

        Raises ConfigError if there is none, or if nothing counts its epochs.
        """
        every = self._every
        if every is None and self._saver is not None:
            every = self._saver.config.every
        if every is None and self._total_steps is None:
            raise ConfigError(
                f"{self.name}: no schedule; pass @checkpoint_closure(every=Every(steps=100)), or "
                "open a saver with every= before the first call"
            )

        knows_epochs = self._saver is not None and bool(self._saver._run.feeds.known_positions)
        if every is not None and every.epochs and not knows_epochs:
            raise ConfigError(
                f"{self.name}: every.epochs={every.epochs}, but no saver knows the epochs: take "
                "the batches from saver.remaining(loader), and pass saver="
            )

        if every is None:
            every = Every(deadline=None)
        return replace(every, signals=(), best=None)

    def _epochs_done(self, *, with_last: bool = True) -> int:
        """Count completed passes over the data, rounded down to multiples of `every.epochs`."""
        if self._saver is None:
            return 0
        epochs = self._schedule.epochs or 1
        return epochs * self._saver._run.feeds.passes_done(epochs, with_last=with_last)

    def _is_last(self) -> bool:
        """Check whether this is the last step, and the function has not run at it."""
        saved_step = self._history.saved_step
        step = self._history.step
        if self._total_steps is not None:
            return saved_step < self._total_steps <= step
        if self._saver is None or self._saver._epochs is None:
            return False
        feed = self._saver._run.feeds.current
        if feed is None or step <= saved_step:
            return False
        return bool(feed.at_end) and feed.epoch + 1 >= self._saver._epochs

    def _restore_shards(self) -> None:
        """Reshard the parameters of every model that the saver knows.

        Listing the tensors of a model reshards its parameters.
        """
        if self._saver is None:
            return
        run = self._saver._run
        for model in (*getattr(run.accelerator, "_models", ()), *run.objects.registered.values()):
            if isinstance(model, nn.Module):
                ModelTensors(model).sources(allow_meta=True)

    def _current_ranks(self) -> Ranks:
        return current_ranks() if self._saver is None else self._saver._current_ranks()


def _failed_ranks(values: Values) -> str:
    """Return the errors of all ranks as text; "" if there are none."""
    errors = [(rank, value["error"]) for rank, value in enumerate(values)]
    return listing([f"rank {rank}: {error}" for rank, error in errors if error])
