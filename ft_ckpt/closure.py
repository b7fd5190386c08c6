"""`checkpoint_closure`: functions that a loop calls each iteration and that run at some."""

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
_running: list[str] = []  # the name of the function that is running, if any


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

    Call it in every iteration of the training loop, after `saver.step()`, on every rank: it runs on
    all of them, at the same step. It sees a consistent state: the optimizer has stepped, and the
    models that the saver knows are sharded as they are between steps.

    Steps and epochs are those of `saver`, by default of the one that is open; without one, or when
    it is not stepped, calls are counted. `every` defaults to the saver's; only the saver watches
    signals. The last step is `total_steps`, or the end of the data if `saver.remaining(loader,
    epochs=...)` knows it. If the loader cannot tell the last batch of an epoch, the end of the
    epoch is seen an iteration late.

    An exception of the function is raised, and RankError on the other ranks. Raises ConfigError for
    invalid arguments, CheckpointError for a call inside another such function, RanksDisagreeError
    when ranks call it at different steps.
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
        scheduled = _ClosureSchedule(name, every, total_steps, saver)

        @wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            return scheduled.call_if_due(lambda: inner(*args, **kwargs))

        return call

    return decorate if function is None else decorate(function)


class _ClosureSchedule:
    """The progress of one function's loop, and when the function runs."""

    def __init__(
        self,
        name: str,
        every: Every | None,
        total_steps: int | None,
        saver: CheckpointSaver[Any] | None,
    ) -> None:
        self.name = name
        self._every, self._total_steps, self._saver = every, total_steps, saver
        self._finds_saver = saver is None
        self._poll: ClockPoll | None = None  # None until the first call
        self._schedule, self._history = Every(), History()
        self._calls = 0

    def call_if_due(self, function: Callable[[], Any]) -> Any:
        """Run `function` if it is due at this call, and return its result, else None.

        Collective: call it on every rank.
        """
        if _running:
            raise CheckpointError(
                f"{self.name}: called inside {_running[-1]}, which runs at a checkpoint step "
                "already; call it from the training loop, or leave its decorator out"
            )
        self._find_saver()
        if self._saver is not None:
            self._saver._run.reminder.note_call()  # its schedule decides here
            if not self._saver._run.is_between_steps:
                return None
        poll = self._note_step()
        step = self._history.step
        reason = schedule.own_reason(self._schedule, self._history, step, self._epochs_done())
        reason = poll.reason_to_save(self._history, step, self._current_ranks()) or reason
        reason = reason or ("last" if self._is_last() else None)
        return None if reason is None else self._run_everywhere(reason, function)

    def _run_everywhere(self, reason: str, function: Callable[[], Any]) -> Any:
        """Run `function` on all ranks when all have entered.

        Their weights are then sharded as between steps.
        """
        ranks = self._current_ranks()
        before = self._history
        begun = time.monotonic()
        _, error = try_action(self._restore_shards)
        ranks.agree(self.name, {"step": before.step}, error, same=("step",))
        # if it fails, it runs again an interval later
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
        self._history = self._after_call(before, reason, time.monotonic() - begun)
        return result

    def _after_call(self, before: History, reason: str, cost: float | None) -> History:
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
        """Take the open saver, unless one was passed.

        After it is closed, its last step stays current.
        """
        if not self._finds_saver:
            return
        savers = open_savers()
        savers = [saver for saver in savers if saver._run.has_begun] or savers
        if len(savers) > 1:
            raise ConfigError(
                f"{self.name}: {len(savers)} savers are open; say which counts the steps: "
                "@checkpoint_closure(saver=saver), or close the others"
            )
        if savers and savers[0] is not self._saver:
            self._saver = savers[0]
            if self._saver._run.has_begun:
                self._poll = None

    def _note_step(self) -> ClockPoll:
        """Note the step that has ended.

        Start again at the first call, and if the saver was resumed since.
        """
        step = self._current_step()
        now = time.monotonic()
        if self._poll is None or step < self._history.step:
            self._schedule = self._make_schedule()
            self._poll = ClockPoll(self._schedule)
            # One step behind, so that this one may be a checkpoint step.
            begun = schedule.begin_history(step - 1, self._epochs_done(with_last=False), now)
            self._history = replace(begun, step=step)
        self._history = schedule.after_step(self._history, step, now)
        return self._poll

    def _current_step(self) -> int:
        if self._saver is None or not self._saver._run.has_begun:
            self._calls += 1
            return self._calls
        if self._calls:
            raise ConfigError(
                f"{self.name}: the first {self._calls} call(s) came before saver.step(), so that "
                "its steps would be counted late; call it after saver.step()"
            )
        return self._saver._run.step

    def _make_schedule(self) -> Every:
        """Return the schedule of the arguments, or the saver's without its signals and metrics."""
        every = self._every or (self._saver.config.every if self._saver is not None else None)
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
        return replace(every or Every(deadline=None), signals=(), best=None)

    def _epochs_done(self, *, with_last: bool = True) -> int:
        """Count completed passes over the data, rounded down to multiples of `every.epochs`."""
        if self._saver is None:
            return 0
        epochs = self._schedule.epochs or 1
        return epochs * self._saver._run.feeds.passes_done(epochs, with_last=with_last)

    def _is_last(self) -> bool:
        saved_step, step = self._history.saved_step, self._history.step
        if self._total_steps is not None:
            return saved_step < self._total_steps <= step
        if self._saver is None or self._saver._epochs is None:
            return False
        feed = self._saver._run.feeds.current
        if feed is None or step <= saved_step:
            return False
        return bool(feed.at_end) and feed.epoch + 1 >= self._saver._epochs

    def _restore_shards(self) -> None:
        """Reshard the parameters of every model that the saver knows, by listing its tensors."""
        if self._saver is None:
            return
        run = self._saver._run
        for model in (*getattr(run.accelerator, "_models", ()), *run.objects.registered.values()):
            if isinstance(model, nn.Module):
                ModelTensors(model).sources(allow_meta=True)

    def _current_ranks(self) -> Ranks:
        return current_ranks() if self._saver is None else self._saver._current_ranks()


def _failed_ranks(values: Values) -> str:
    errors = [(rank, value["error"]) for rank, value in enumerate(values)]
    return listing([f"rank {rank}: {error}" for rank, error in errors if error])
