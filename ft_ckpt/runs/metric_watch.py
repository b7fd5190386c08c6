"""Notices metrics by which checkpoints are ranked and that no step reports."""

from collections.abc import Iterable

from ft_ckpt.messages import warn
from ft_ckpt.retention import name_metrics


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

        Without any metric so far, warn after `min_saves` saves: the first ones may come before an
        evaluation.
        """
        if not self._absent or not (self._reported or self._saves >= min_saves):
            return
        names = name_metrics(sorted(self._absent), self._reported)
        warn(
            f"no step so far had the metric {names}, by which checkpoints are ranked: none is "
            "deleted until one has it; pass it to saver.step(metrics) or "
            "saver.save_state(metrics=...), or let `ft-ckpt watch` measure it",
            stacklevel=5,
        )
        self._absent.clear()
