"""Holds the state of a training run: its objects, its progress, and its position in the data."""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from ft_ckpt import schedule
from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import listing
from ft_ckpt.model.base import BaseWatch
from ft_ckpt.ranks import Ranks, current_ranks
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.runs.data import DataPositions
from ft_ckpt.runs.items import Item, Key, RunObjects
from ft_ckpt.runs.loop.progress import Progress
from ft_ckpt.runs.loop.reminders import MetricWatch, StepReminder
from ft_ckpt.runs.loop.triggers import ClockPoll
from ft_ckpt.runs.state import (
    Captured,
    Document,
    RestoreReport,
    StepWatch,
    capture_rank_state,
    capture_run,
    is_synced,
    local_state,
    not_restored,
    run_fingerprint,
)
from ft_ckpt.schedule import Every
from ft_ckpt.storage import Store
from ft_ckpt.storage.places import Place


class TrainingRun:
    """The objects and the progress of one training run.

    Call methods that take `ranks` on every rank.
    """

    def __init__(self, accelerator: Any, config: SaverConfig) -> None:
        self.accelerator = accelerator
        self.config = config
        self.objects = RunObjects(accelerator)

        # names of changing state that checkpoints of the run do not have, for reports
        self.unsaved: list[str] = []

        # optimizer steps done
        self.step = 0

        # whether `note_step` was called
        self.has_begun = False

        # positions in the data loaders
        self.feeds = DataPositions()
        self.run_id = uuid.uuid4().hex

        # ids of the runs that this one branched off
        self._ancestors: set[str] = set()
        self.resumed_from: Place | None = None

        # when that checkpoint was saved, as its manifest has it
        self.resumed_moment = ""

        # the version that was published last; up to date on rank 0 only
        self.published: str | None = None

        # the outcome of the resume
        self.report = RestoreReport()

        # names of items that a resume of this run left unrestored, as `allow` permits
        self._unrestored: set[str] = set()

        # steps, saves and measurements, from which the schedule decides
        self.history = schedule.begin_history(0, 0, time.monotonic())
        self.poll = ClockPoll(config.every)
        self.steps = StepWatch()

        # whether gradients were pending after the last batch
        self._is_unfinished = False
        self.base = BaseWatch(config.attribute)
        self.reminder = StepReminder(config.every, self.steps)
        self.metrics = MetricWatch(config.rankings)

        # metrics of the last step
        self.last_metrics: dict[str, float] = {}

    def register(self, objects: Mapping[str, Any]) -> None:
        """Add objects to the run by name. Raises as `RunObjects.register`."""
        self.objects.register(objects)
        self._watch_steps()
        self.note_base()

    def register_changed(self, ranks: Ranks) -> None:
        """Register the watched models whose values have changed.

        Collective: call it on every rank.
        """
        changed = self.objects.take_changed(ranks)
        if changed:
            self.register(changed)

    def note_base(self) -> None:
        """Record the base model under the adapters as the script has made it."""
        if self.objects.has_model:
            self.base.sample_base(self.model, current_ranks().rank)

    @property
    def model(self) -> nn.Module:
        """The model whose weights are saved. Raises ConfigError when there is none."""
        return self.objects.model

    @property
    def progress(self) -> Progress:
        location = self.resumed_from.location if self.resumed_from else None
        return Progress(
            self.step,
            **self.feeds.counts,
            resumed_from=location,
            report=self.report,
            published=self.published,
        )

    def check_objects(self) -> None:
        """Raise SelectionError early if the state of an object of the run cannot be saved."""
        self._watch_steps()
        self.objects.refuse_unsaveable()
        # A model that is passed later is checked then.
        if self.config.every is None or not self.objects.has_model:
            return
        items, sources = self.objects.walk()
        self.objects.signatures(sources)
        local_state(items, sources, {})

    def check_first_step(self, ranks: Ranks) -> None:
        """Raise SelectionError after the first step if there is state that cannot be saved.

        Collective: call it on every rank. Many optimizers make their state in the first step.
        Nothing is checked without a schedule, or if failed saves are warnings.
        """
        if self.config.every is None or self.config.on_failure != "raise":
            return
        ranks.run("the first step", self.check_objects)

    def capture_state(self, ranks: Ranks, versions: Mapping[str, str]) -> Captured:
        """Capture the state of the run and the tensors of its models, without copying tensors.

        Collective: call it on every rank. `versions` has the version of each library by name.
        """

        def current_objects() -> tuple[nn.Module, list[Item], dict[str, Any]]:
            self._watch_steps()
            items, models = self.objects.items(), self.objects.models()
            trees = capture_rank_state(self.accelerator, models, items, self.feeds, self.steps)
            return self.model, items, trees

        self.register_changed(ranks)
        captured = capture_run(current_objects, ranks)
        captured.document.update(
            {
                "progress": {"step": self.step, **self.feeds.counts},
                "history": self.history.to_json(),
                "keep": None if self.config.keep is None else asdict(self.config.keep),
                "run_id": self.run_id,
                "ancestors": sorted(self._ancestors),
                "let_go": sorted(self._unrestored),
                "watched": self.objects.watched_digests(),
                "unsaved": self.unsaved,
                "published": self.published,
                "fingerprint": self.current_fingerprint(captured.sources, ranks, versions),
                "signatures": self.objects.signatures(captured.sources),
            }
        )
        return captured

    def restore_progress(self, document: Document, origin: Store, created: str) -> None:
        """Set step, run id and history to those in the checkpoint at `origin`.

        `document` is its training state. `created` is the time of its save, as in its manifest.
        """
        progress = document["progress"]
        self.step = progress["step"]
        self.run_id = document["run_id"]
        self.resumed_from = Place(origin).absolute
        self.resumed_moment = created
        self.published = document.get("published")
        self._ancestors = set(document.get("ancestors", ()))
        self._unrestored = set(document.get("let_go", ()))
        self.history = schedule.begin_history(
            self.step, progress["epoch"], time.monotonic(), document["history"]
        )

        # What the script has trained before this resume does not count.
        self._is_unfinished = False
        self.last_metrics = {}
        self.poll.resume_at(self.step)

    def note_resumed(self, report: RestoreReport) -> None:
        """Record the report of a resume that has succeeded on all ranks."""
        self._unrestored |= {item.name for item in not_restored(report.items)}
        self.report = report

    def note_absent(self, names: Iterable[str]) -> None:
        """Report that the checkpoint lacks the objects `names`, which begin as they are."""
        absent = sorted(names)
        if absent:
            note = f"{listing(absent, ', ')}: not in the checkpoint, begins as the script makes it"
            self.report = replace(self.report, notes=(*self.report.notes, note))

    def agree_on_metrics(self, metrics: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
        """Return the metrics that decide on saves.

        If `every.best` saves by a metric, these are the metrics of rank 0 on all ranks, because
        losses differ between ranks. The call is collective then.
        """
        best = None if self.config.every is None else self.config.every.best
        if ranks.size == 1 or best is None or best[0] not in metrics:
            return dict(metrics)
        return dict(ranks.agree("saver.step()", metrics).result)

    def reason_to_save(self, metrics: Mapping[str, float], ranks: Ranks) -> str | None:
        """Return why to save now; None if there is no reason.

        Collective: call it on every rank. The result is the same on every rank if the `metrics`
        are.
        """
        every = self.config.every
        if every is None:
            return None
        reason = schedule.own_reason(every, self.history, self.step, self._epochs_done(), metrics)
        return self.poll.reason_to_save(self.history, self.step, ranks) or reason

    def is_batch_done(self) -> bool:
        """Record the end of a batch, and return whether an optimizer step is complete."""
        self.reminder.note_call()
        self._watch_steps()
        self._is_unfinished = self.steps.is_unfinished(lambda: self.objects.models().values())
        return self.is_between_steps

    def note_step(
        self, step: int | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Count one more optimizer step, or set the count to `step`."""
        now = time.monotonic()
        self.step = self.step + 1 if step is None else step
        self.last_metrics = dict(metrics or {})
        self.metrics.note_metrics(self.last_metrics)
        if self.has_begun:
            self.history = schedule.after_step(self.history, self.step, now)
        else:
            # The time before the first step does not count, such as loading the model.
            self.history = replace(self.history, step=self.step, seen_at=now, saved_at=now)
        self.has_begun = True

    def note_saved(
        self, reason: str | None, metrics: Mapping[str, float], cost: float | None = None
    ) -> None:
        """Record a save for `reason`.

        Called when the save begins, and again with its `cost` in seconds when the call returns.
        """
        self.metrics.note_metrics(metrics)
        if cost is None:
            self.metrics.note_save()
        self.history = schedule.after_save(
            self.config.every or Every(),
            self.history,
            self.step,
            self._epochs_done(),
            time.monotonic(),
            cost_seconds=cost,
            metrics=metrics,
            reason=reason,
        )

    @property
    def is_between_steps(self) -> bool:
        """Whether the optimizer had used all gradients at the end of the last batch."""
        return is_synced(self.accelerator) and not self._is_unfinished

    @property
    def own_ids(self) -> frozenset[str]:
        """The ids of runs whose checkpoints this run may replace: its own and its ancestors'."""
        return frozenset({self.run_id, *self._ancestors})

    def branch_off(self, run_id: str | None) -> None:
        """Continue under the id `run_id`; do nothing if it is None.

        The run has gone back to an older checkpoint. The later checkpoints under the old id do not
        belong to what is trained now.
        """
        if run_id is not None:
            self._ancestors.add(self.run_id)
            self.run_id = run_id

    def fields_of_save(self, step: int | None, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return step, metrics and run id for a save of weights.

        `step` and `metrics` override those of the run.
        """
        if not self.has_begun and self.resumed_from is None:
            return {"step": step, "metrics": dict(metrics)}
        step = self.step if step is None else step
        last_metrics = self.last_metrics if step == self.step else {}
        return {"step": step, "metrics": dict(metrics or last_metrics), "run_id": self.run_id}

    def watch_loop(self, batches: Iterator[Any], ranks: Ranks) -> Iterator[Any]:
        """Yield the batches of a training loop, and warn if it does not call `step`."""
        self._watch_steps()
        yield from self.reminder.watch_batches(batches, self._current_models, is_main=ranks.is_main)

    def remind_of_step(self, *, is_main: bool) -> None:
        """Warn on rank 0 if the run has trained under its schedule and `step` was never called."""
        self.reminder.remind(self._current_models, is_main=is_main)

    def _current_models(self) -> list[nn.Module]:
        """Return the models of the run; [] before one is prepared or registered."""
        if self.objects.main_model is None:
            return []
        return list(self.objects.models().values())

    def close(self) -> None:
        """Restore signal handlers and remove the optimizers' hooks."""
        self.steps.close()
        self.poll.close()

    def _watch_steps(self) -> None:
        """Hook all optimizers of the run so far."""
        self.steps.watch_optimizers(self.objects.plain_optimizers())

    def _epochs_done(self) -> int:
        """Return the number of completed passes over the data, rounded down to `every.epochs`."""
        every = self.config.every
        epochs = 1
        if every is not None and every.epochs is not None:
            epochs = every.epochs
        return epochs * self.feeds.passes_done(epochs)

    def current_fingerprint(
        self, sources: Mapping[Key, Source], ranks: Ranks, versions: Mapping[str, str]
    ) -> Document:
        """Return the run's settings that a resume compares, see `run_fingerprint`.

        `sources` are the tensors of its models.
        """
        return run_fingerprint(
            self.accelerator,
            self.model,
            sources.values(),
            self.objects.items(),
            [feed.loader for feed in self.feeds.known_positions],
            ranks.size,
            versions,
        )
