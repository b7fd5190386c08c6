"""Notices what a training loop forgets: to call `saver.step()`, to report the metrics that rank."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from ft_ckpt.messages import warn
from ft_ckpt.retention import name_metrics
from ft_ckpt.runs.state import StepWatch
from ft_ckpt.schedule import Every

Models = Callable[[], list[nn.Module]]


class StepReminder:
    """Warns once if the run has trained under a schedule and `step` was never called.

    A step of the run's optimizers, or weights that have changed, prove that the run has trained.
    The warning comes when the schedule's number of optimizer steps is reached, at the end of the
    data, or when the saver is closed.
    """

    def __init__(self, every: Every | None, steps: StepWatch) -> None:
        self._every, self._steps = every, steps
        self._is_settled = every is None
        self._batches = 0
        # versions of the weights at the beginning, by id of the parameter
        self._versions: dict[int, int] = {}

    def note_call(self) -> None:
        """Record a call of `step`, after which no reminder is needed."""
        self._is_settled = True

    def watch_batches(
        self, batches: Iterator[Any], models: Models, *, is_main: bool
    ) -> Iterator[Any]:
        """Yield the batches of a loop, and remind it when a save was due.

        `models`: those of the run, if known.
        """
        if self._is_settled:
            yield from batches
            return
        if not self._versions:
            self._versions = _versions_of(models())
        due_steps = self._every.steps if self._every is not None else None
        for batch in batches:
            self._batches += 1
            yield batch
            if due_steps is not None and self._steps.count >= due_steps:
                self.remind(models, is_main=is_main)
        self.remind(models, is_main=is_main)

    def remind(self, models: Models, *, is_main: bool) -> None:
        """Warn, on rank 0, if the run has trained and `step` was never called."""
        if self._is_settled or not self._has_trained(models):
            return
        self._is_settled = True
        if is_main:
            done = [f"{self._batches} batch(es)"] if self._batches else []
            done += [f"{self._steps.count} optimizer step(s)"] if self._steps.count else []
            warn(
                f"saver.step(): not called in {' and '.join(done)}, so every=... has saved "
                "nothing; call it on every rank after each batch",
            )

    def _has_trained(self, models: Models) -> bool:
        if self._steps.count:
            return True
        now = _versions_of(models()) if self._versions else {}
        return any(now.get(key, version) != version for key, version in self._versions.items())


def _versions_of(models: list[nn.Module]) -> dict[int, int]:
    """Read torch's counters, which rise with each write in place, such as that of an optimizer."""
    versions = {}
    for model in models:
        for parameter in model.parameters():
            if not parameter.is_inference():
                versions[id(parameter)] = parameter._version
    return versions


class MetricWatch:
    """Warns once of metrics that rank checkpoints and were never reported."""

    def __init__(self, rankings: Iterable[str]) -> None:
        self._absent = set(rankings)  # not reported so far
        self._reported: set[str] = set()  # all metrics that were
        self._saves = 0

    def note_metrics(self, names: Iterable[str]) -> None:
        self._reported.update(names)
        self._absent.difference_update(names)

    def note_save(self) -> None:
        self._saves += 1

    def warn_of_absent(self, min_saves: int) -> None:
        """Warn once of absent metrics, although others were reported.

        If no metric was reported so far, the warning comes after `min_saves` saves, because the
        first saves may come before an evaluation.
        """
        if not self._absent or not (self._reported or self._saves >= min_saves):
            return
        names = name_metrics(sorted(self._absent), self._reported)
        warn(
            f"no step so far had the metric {names}, by which checkpoints are ranked: none is "
            "deleted until one has it; pass it to saver.step(metrics) or "
            "saver.save_state(metrics=...), or let `ft-ckpt watch` measure it",
        )
        self._absent.clear()
