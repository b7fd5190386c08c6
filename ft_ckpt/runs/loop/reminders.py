"""Warns of what a training loop forgets.

It may forget to call `saver.step()`, or to report the metrics by which checkpoints are ranked.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from ft_ckpt.messages import warn
from ft_ckpt.retention import name_metrics
from ft_ckpt.runs.state import StepWatch
from ft_ckpt.schedule import Every

Models = Callable[[], list[nn.Module]]


class StepReminder:
    """Warns once if a run with a schedule has trained, and `step` was never called.

    A run has trained if one of its optimizers has stepped or its weights have changed. The warning
    comes when the optimizers have done as many steps as the schedule saves after, at the end of the
    data, or when the saver is closed.
    """

    def __init__(self, every: Every | None, steps: StepWatch) -> None:
        self._every, self._steps = every, steps
        # whether no warning can come any more
        self._is_done = every is None
        self._batch_count = 0
        # versions of the weights when the first loop began, by the id of the parameter
        self._versions: dict[int, int] = {}

    def note_call(self) -> None:
        """Record a call of `step`, after which no warning is needed."""
        self._is_done = True

    def watch_batches(
        self, batches: Iterator[Any], models: Models, *, is_main: bool
    ) -> Iterator[Any]:
        """Yield the batches of a training loop, and warn once a save was due.

        `models` returns the models of the run, or [] if none is known yet.
        """
        if self._is_done:
            yield from batches
            return
        if not self._versions:
            self._versions = _versions_of(models())
        due_steps = self._every.steps if self._every is not None else None
        for batch in batches:
            self._batch_count += 1
            yield batch
            if due_steps is not None and self._steps.count >= due_steps:
                self.remind(models, is_main=is_main)
        self.remind(models, is_main=is_main)

    def remind(self, models: Models, *, is_main: bool) -> None:
        """Warn, on rank 0, if the run has trained and `step` was never called."""
        if self._is_done or not self._has_trained(models):
            return
        self._is_done = True
        if is_main:
            done = []
            if self._batch_count:
                done.append(f"{self._batch_count} batch(es)")
            if self._steps.count:
                done.append(f"{self._steps.count} optimizer step(s)")
            warn(
                f"saver.step(): not called in {' and '.join(done)}, so every=... has saved "
                "nothing; call it on every rank after each batch",
            )

    def _has_trained(self, models: Models) -> bool:
        if self._steps.count:
            return True
        if not self._versions:
            return False
        versions_now = _versions_of(models())
        for key, version in self._versions.items():
            if versions_now.get(key, version) != version:
                return True
        return False


def _versions_of(models: list[nn.Module]) -> dict[int, int]:
    """Return the version of each parameter by its id.

    Torch raises the version of a tensor at each write in place, such as an optimizer's.
    """
    versions = {}
    for model in models:
        for parameter in model.parameters():
            if not parameter.is_inference():
                versions[id(parameter)] = parameter._version
    return versions


class MetricWatch:
    """Warns once if metrics by which checkpoints are ranked were never reported."""

    def __init__(self, rankings: Iterable[str]) -> None:
        # metrics of the rankings that were not reported so far
        self._absent = set(rankings)
        # all metrics that were reported
        self._reported: set[str] = set()
        self._save_count = 0

    def note_metrics(self, names: Iterable[str]) -> None:
        self._reported.update(names)
        self._absent.difference_update(names)

    def note_save(self) -> None:
        self._save_count += 1

    def warn_of_absent(self, min_saves: int) -> None:
        """Warn once if metrics of the rankings were not reported although others were.

        If no metric at all was reported, the warning comes only after `min_saves` saves, because
        the first saves may come before an evaluation.
        """
        is_time_to_warn = bool(self._reported) or self._save_count >= min_saves
        if not self._absent or not is_time_to_warn:
            return
        names = name_metrics(sorted(self._absent), self._reported)
        warn(
            f"no step so far had the metric {names}, by which checkpoints are ranked: none is "
            "deleted until one has it; pass it to saver.step(metrics) or "
            "saver.save_state(metrics=...), or let `ft-ckpt watch` measure it",
        )
        self._absent.clear()
