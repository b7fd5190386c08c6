"""`checkpoint_closure`: functions that a training loop calls each iteration and that run at some of them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

from torch import nn

from ft_ckpt import schedule
from ft_ckpt.config import SaverConfig, every_of
from ft_ckpt.distributed.agreement import Values
from ft_ckpt.distributed.ranks import Ranks, current_ranks, try_action
from ft_ckpt.distributed.tensors import ModelTensors
from ft_ckpt.errors import CheckpointError, ConfigError, RankError, listing
from ft_ckpt.saver import CheckpointSaver, open_savers
from ft_ckpt.schedule import Every
from ft_ckpt.training.run import TrainingRun

P = ParamSpec("P")
R = TypeVar("R")
_at_work: list[str] = []  # the function that runs now, if any


@overload
def checkpoint_closure(function: Callable[P, R], /) -> Callable[P, R | None]: ...
@overload
def checkpoint_closure(
    *, every: Every | None = None, total_steps: int | None = None, saver: CheckpointSaver | None = None
) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
def checkpoint_closure(
    function: Callable[..., Any] | None = None,
    /,
    *,
    every: Every | None = None,
    total_steps: int | None = None,
    saver: CheckpointSaver | None = None,
) -> Any:
    """Let a function run at checkpoint steps and at the last step only; elsewhere a call returns None.

    Call it in every iteration of the training loop, after `saver.step()`, on every rank: it runs on all of them, at
    the same step. What it reads is one moment: the optimizer has stepped, and the weights of the models that the
    saver knows are in their place, sharded as they are between steps.

    Steps and epochs are those of `saver`, by default of the one that is open; without one, or when it is not stepped,
    calls are counted. `every` defaults to the saver's; signals are the saver's alone. The last step is `total_steps`,
    or the end of the data where `saver.remaining(loader, epochs=...)` knows it. Epochs whose end the loader cannot
    tell in time are seen an iteration late.

    An exception of the function is raised, and RankError on the other ranks. Raises ConfigError for what cannot work,
    CheckpointError for a call inside another such function, RanksDisagreeError when ranks do not call it alike.
    """
    every = every_of(every)
    problems = [*_every_problems(every), *_total_problems(total_steps)]
    if function is not None and not callable(function):
        problems.append(f"{function!r}: expected a function; write @checkpoint_closure(every=Every(steps=100))")
    if problems:
        raise ConfigError(f"checkpoint_closure: {listing(problems)}")

    def decorate(inner: Callable[..., Any]) -> Callable[..., Any]:
        scheduled = _ClosureSchedule(f"{getattr(inner, '__name__', type(inner).__name__)}()", every, total_steps, saver)

        @wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            return scheduled.call_if_due(lambda: inner(*args, **kwargs))

        return call

    return decorate if function is None else decorate(function)


class _ClosureSchedule:
    """Where one function's loop is, and when the function runs."""

    def __init__(self, name: str, every: Every | None, total_steps: int | None, saver: CheckpointSaver | None) -> None:
        self.name = name
        self._every, self._total_steps, self._saver = every, total_steps, saver
        self._given = saver is not None
        self._own: TrainingRun | None = None  # its steps are the saver's or our calls, its history is ours
        self._calls = 0

    def call_if_due(self, function: Callable[[], Any]) -> Any:
        """One more call: what `function` returns when it runs in this one, else None. On every rank."""
        self._refuse_nesting()
        self._find_saver()
        if self._saver is not None and not self._saver._run.is_between_steps:
            return None
        own = self._counted_run()
        reason = own.reason_to_save({}, self._current_ranks()) or ("last" if self._is_last(own) else None)
        return None if reason is None else self._run_everywhere(own, reason, function)

    def _run_everywhere(self, own: TrainingRun, reason: str, function: Callable[[], Any]) -> Any:
        """Run `function` on all ranks, when all are here and the weights are in their place."""
        ranks, before, begun = self._current_ranks(), own.history, time.monotonic()
        _, error = try_action(self._restore_shards)
        ranks.agree(self.name, {"step": own.step}, error, same=("step",))
        own.note_saved(reason, {})  # if it fails, it runs again an interval later
        with _running_closure(self.name):
            result, error = ranks.attempt(function)
        _raise_everywhere(self.name, error, ranks)
        own.history = before
        own.note_saved(reason, {}, time.monotonic() - begun)
        return result

    def _refuse_nesting(self) -> None:
        if _at_work:
            raise CheckpointError(
                f"{self.name}: called inside {_at_work[-1]}, which runs at a checkpoint step already; call it from the "
                "training loop, or leave its decorator out"
            )

    def _find_saver(self) -> None:
        """The saver given, or the one that is open; once it is closed, its step stays the last one."""
        opened = [] if self._given else open_savers()
        found = [saver for saver in opened if _is_stepped(saver)] or opened
        if len(found) > 1:
            raise ConfigError(
                f"{self.name}: {len(found)} savers are open; say which counts the steps: "
                "@checkpoint_closure(saver=saver), or close the others"
            )
        if found and found[0] is not self._saver:
            self._saver = found[0]
            self._own = None if _is_stepped(found[0]) else self._own

    def _counted_run(self) -> TrainingRun:
        """Our run at the step that is over now."""
        step, saver = self._current_step(), self._saver
        if self._own is None or step < self._own.step:  # the first call, or the saver was resumed since
            self._own = self._begin_run(step)
        if saver is not None:
            self._own.feeds = saver._run.feeds
        if step > self._own.step:
            self._own.note_step(step)
        return self._own

    def _current_step(self) -> int:
        if self._saver is None or not _is_stepped(self._saver):
            self._calls += 1
            return self._calls
        if self._calls:
            raise ConfigError(
                f"{self.name}: the first {self._calls} call(s) came before saver.step(), so that its steps would be "
                "counted late; call it after saver.step()"
            )
        return self._saver._run.step

    def _begin_run(self, step: int) -> TrainingRun:
        """A run of our own that is one step behind, so that this one may be a checkpoint step."""
        every = self._every or (self._saver.config.every if self._saver is not None else None)
        if every is None and self._total_steps is None:
            raise ConfigError(
                f"{self.name}: nothing says when it runs: @checkpoint_closure(every=Every(steps=100)), or a saver "
                "with every=, open before the first call"
            )
        if every is not None and every.epochs and (self._saver is None or not self._saver._run.feeds.known_positions):
            raise ConfigError(
                f"{self.name}: every.epochs={every.epochs}, but no saver knows the epochs: take the batches from "
                "saver.remaining(loader), and pass saver="
            )
        run = TrainingRun(None, SaverConfig(every=replace(every or Every(deadline=None), signals=(), best=None)))
        of = (run.config.every.epochs if run.config.every is not None else None) or 1
        epochs = of * self._saver._run.feeds.passes_done(of, with_last=False) if self._saver is not None else 0
        run.step, run.history = step - 1, schedule.begin_history(step - 1, epochs, time.monotonic())
        return run

    def _is_last(self, own: TrainingRun) -> bool:
        done = own.history.saved_step
        if self._total_steps is not None:
            return done < self._total_steps <= own.step
        epochs, feed = (self._saver._epochs, own.feeds.current) if self._saver is not None else (None, None)
        if epochs is None or feed is None:
            return False
        return done < own.step and bool(feed.at_end) and feed.epoch + 1 >= epochs

    def _restore_shards(self) -> None:
        """Let every model that the saver knows put its shards back in place, as looking at them does."""
        if self._saver is None:
            return
        run = self._saver._run
        for model in (*getattr(run.accelerator, "_models", ()), *run.registered.values()):
            if isinstance(model, nn.Module):
                ModelTensors(model).sources(allow_meta=True)

    def _current_ranks(self) -> Ranks:
        return current_ranks() if self._saver is None else self._saver._current_ranks()


def _is_stepped(saver: CheckpointSaver) -> bool:
    return saver._run.has_begun


@contextmanager
def _running_closure(name: str) -> Iterator[None]:
    _at_work.append(name)
    try:
        yield
    finally:
        _at_work.pop()


def _raise_everywhere(name: str, error: BaseException | None, ranks: Ranks) -> None:
    """Raise this rank's own `error`, or say which other rank had one; no rank goes on alone."""
    said = None if error is None else f"{type(error).__name__}: {error}"

    def failures_of(values: Values) -> str:
        failed = [f"rank {rank}: {value['error']}" for rank, value in enumerate(values) if value["error"]]
        return listing(failed)

    failed = ranks.agree(f"the end of {name}", {"error": said}, decide=failures_of).told
    if error is not None:
        raise error
    if failed:
        raise RankError(f"{name} failed on {failed}")


def _every_problems(every: Every | None) -> list[str]:
    if not isinstance(every, Every | None):
        return [f"every={every!r}: expected Every(...)"]
    if every is not None and every.best:
        return [f"every.best={every.best!r}: calls have no metrics; give it to the saver, which gets them in step()"]
    return []


def _total_problems(total: int | None) -> list[str]:
    if total is None or (isinstance(total, int) and not isinstance(total, bool) and total > 0):
        return []
    return [f"total_steps={total!r}: expected a whole number above 0"]
