"""The run of a saver: its registered objects, its progress, and the state of each rank."""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ft_ckpt import schedule
from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import ConfigError, listing
from ft_ckpt.model.base import BaseWatch
from ft_ckpt.model.parts import check_model
from ft_ckpt.ranks import Ranks, current_ranks
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import unwrap
from ft_ckpt.runs.data import DataPositions
from ft_ckpt.runs.items import (
    Item,
    Key,
    WatchedModel,
    changed_models,
    main_model,
    object_signatures,
    optimizers_among,
    plain_optimizers,
    refuse_unsaveable,
    run_items,
    walk_run,
    watch_model,
    watched_digests,
)
from ft_ckpt.runs.loop.progress import Progress
from ft_ckpt.runs.loop.reminders import MetricWatch, StepReminder
from ft_ckpt.runs.loop.triggers import ClockPoll
from ft_ckpt.runs.optimizers import is_schedule_free_in_training
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
        self.registered: dict[str, Any] = {}
        self.watched: dict[str, WatchedModel] = {}
        # names of moving state that no checkpoint of the run has, for the reports
        self.unsaved: list[str] = []
        self.step = 0
        self.feeds = DataPositions()
        self.run_id = uuid.uuid4().hex
        self.resumed_from: Place | None = None
        self.resumed_moment = ""  # when that checkpoint was saved, as in its manifest
        # the version that was published last; current on rank 0 alone
        self.published: str | None = None
        self.report = RestoreReport()
        self.history = schedule.begin_history(0, 0, time.monotonic())
        self.poll = ClockPoll(config.every)
        self.steps = StepWatch()
        self.base = BaseWatch(config.attribute)
        self.reminder = StepReminder(config.every, self.steps)
        self.has_begun = False  # True after a step
        self._is_unfinished = False  # gradients were pending after the last batch
        self.last_metrics: dict[str, float] = {}  # of the last step
        self._ancestors: set[str] = set()  # ids of the runs that this one branched off
        # items that resumes of this run left out, as `allow` permits
        self._left_out: set[str] = set()
        self.metrics = MetricWatch(config.rankings)

    def register(self, objects: Mapping[str, Any]) -> None:
        """Add objects to the run by name; "model" is the one whose weights are saved.

        Raises SelectionError for an object whose state cannot be saved, ConfigError for a name that
        is taken.
        """
        if "model" in objects:
            check_model(objects["model"])
        items = run_items(self.accelerator, {**self.registered, **objects})
        refuse_unsaveable(item for item in items if item.name in objects)
        self.registered.update(objects)
        self.steps.watch_optimizers(plain_optimizers(items))
        self.note_base()

    def watch(self, name: str, model: nn.Module) -> None:
        """Watch a model that the script makes at each start.

        It is registered once its values have changed. Raises as `ModelTensors.sources` for tensors
        that cannot be stored.
        """
        self.watched[name] = watch_model(model)

    def register_changed(self, ranks: Ranks) -> None:
        """Register the watched models whose values have changed. Collective."""
        names = changed_models(self.watched, ranks)
        if names:
            self.register({name: self.watched.pop(name).model for name in names})

    def note_base(self) -> None:
        """Record the base of the model's adapters as the script has made it."""
        if "model" in self.registered or getattr(self.accelerator, "_models", None):
            self.base.note_base(self.model, current_ranks().rank)

    @property
    def model(self) -> nn.Module:
        """The model whose weights are saved. Raises ConfigError when there is none."""
        model = main_model(self.accelerator, self.registered)
        if model is None:
            raise ConfigError(
                "no model: prepare one with Accelerate before this, or pass it: "
                "saver.register(model=model, ...)"
            )
        return model

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
        refuse_unsaveable(self._watch_steps())
        if self.config.every is None:
            return
        if not getattr(self.accelerator, "_models", None) and "model" not in self.registered:
            return  # a model passed later is checked then
        items, _, sources = walk_run(self.model, run_items(self.accelerator, self.registered))
        object_signatures(self.accelerator, self.registered, lambda: sources)
        local_state(items, sources, {})

    def check_first_step(self, ranks: Ranks) -> None:
        """Raise SelectionError after the first step for state that cannot be saved. Collective.

        Many optimizers make their state in the first step. Does nothing without a schedule, or if
        failed saves are warnings.
        """
        if self.config.every is None or self.config.on_failure != "raise":
            return
        ranks.run("the first step", self.check_objects)

    def steppers(self) -> dict[Optimizer, list[Tensor]]:
        """The optimizers that call a hook before they step.

        Each comes with the further tensors that its steps change.
        """
        hooked: dict[Optimizer, list[Tensor]] = {}
        for item in optimizers_among(run_items(self.accelerator, self.registered)):
            inner, further = item.kind.hooked_optimizer(item.optimizer)
            if isinstance(inner, Optimizer) and getattr(type(inner).step, "hooked", False):
                hooked[inner] = further
        return hooked

    def capture_state(self, ranks: Ranks, versions: Mapping[str, str]) -> Captured:
        """Capture the state of the whole run, and the sources of its models.

        Collective. Moves nothing.
        """

        def current_objects() -> tuple[nn.Module, list[Item], dict[str, Any]]:
            items = self._watch_steps()
            models = self.models_by_item()
            trees = capture_rank_state(self.accelerator, models, items, self.feeds, self.steps)
            return self.model, items, trees

        self.register_changed(ranks)
        captured = capture_run(current_objects, ranks)
        signatures = object_signatures(self.accelerator, self.registered, lambda: captured.sources)
        captured.document.update(
            {
                "progress": {"step": self.step, **self.feeds.counts},
                "history": self.history.to_json(),
                "keep": None if self.config.keep is None else asdict(self.config.keep),
                "run_id": self.run_id,
                "ancestors": sorted(self._ancestors),
                "let_go": sorted(self._left_out),
                "watched": watched_digests(self.watched),
                "unsaved": self.unsaved,
                "published": self.published,
                "fingerprint": self.current_fingerprint(captured.sources, ranks, versions),
                "signatures": signatures,
            }
        )
        return captured

    def restore_progress(self, document: Document, origin: Store, created: str) -> None:
        """Take over step, run id and history from the checkpoint at `origin`.

        `created`: the moment of its save.
        """
        progress = document["progress"]
        self.step = progress["step"]
        self.run_id = document["run_id"]
        self.resumed_from = Place(origin).absolute
        self.resumed_moment = created
        self.published = document.get("published")
        self._ancestors = set(document.get("ancestors", ()))
        self._left_out = set(document.get("let_go", ()))
        self.history = schedule.begin_history(
            self.step, progress["epoch"], time.monotonic(), document["history"]
        )
        # the step before a roll-back is not the last one
        self._is_unfinished = False
        self.last_metrics = {}
        self.poll.resume_at(self.step)

    def note_resumed(self, report: RestoreReport) -> None:
        """Record that the resume of `report` has succeeded on all ranks."""
        self._left_out |= {item.name for item in not_restored(report.items)}
        self.report = report

    def note_absent(self, names: Iterable[str]) -> None:
        """Report the objects that the checkpoint does not have: they begin as they are."""
        absent = sorted(names)
        if absent:
            note = f"{listing(absent, ', ')}: not in the checkpoint, begins as the script makes it"
            self.report = replace(self.report, notes=(*self.report.notes, note))

    def agree_on_metrics(self, metrics: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
        """The metrics that decide on saves.

        They are rank 0's if `every.best` ranks by them, because losses differ between ranks.
        """
        best = None if self.config.every is None else self.config.every.best
        if ranks.size == 1 or best is None or best[0] not in metrics:
            return dict(metrics)
        return dict(ranks.agree("saver.step()", metrics).result)

    def reason_to_save(self, metrics: Mapping[str, float], ranks: Ranks) -> str | None:
        """Why to save now, or None; the same on every rank if the `metrics` are."""
        every = self.config.every
        if every is None:
            return None
        reason = schedule.own_reason(every, self.history, self.step, self._epochs_done(), metrics)
        return self.poll.reason_to_save(self.history, self.step, ranks) or reason

    def is_batch_done(self) -> bool:
        """Whether the batch just done completed a step."""
        self.reminder.note_call()
        self._watch_steps()
        self._is_unfinished = self.steps.is_unfinished(lambda: self.models_by_item().values())
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
        else:  # time before the first step, such as loading the model, does not count
            self.history = replace(self.history, step=self.step, seen_at=now, saved_at=now)
        self.has_begun = True

    def note_saved(
        self, reason: str | None, metrics: Mapping[str, float], cost: float | None = None
    ) -> None:
        """Record a save for `reason`: when it begins, and again with its `cost` in seconds."""
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
        """Continue as the run `run_id`, if it is not None.

        Later checkpoints of the current run do not belong to the new one.
        """
        if run_id is not None:
            self._ancestors.add(self.run_id)
            self.run_id = run_id

    def facts_of_save(self, step: int | None, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Step, metrics and run id for a save of weights.

        `step` and `metrics` override those of the run.
        """
        if not self.has_begun and self.resumed_from is None:
            return {"step": step, "metrics": dict(metrics)}
        step = self.step if step is None else step
        last_metrics = self.last_metrics if step == self.step else {}
        return {"step": step, "metrics": dict(metrics or last_metrics), "run_id": self.run_id}

    def notes_on_weights(self, model: nn.Module) -> tuple[str, ...]:
        """What a reader of the weights of `model` should know of the optimizers that train them."""
        trained = {id(parameter) for parameter in unwrap(model).parameters()}
        notes: list[str] = []
        for optimizer in plain_optimizers(run_items(self.accelerator, self.registered)):
            members: set[int] = set()
            for group in optimizer.param_groups:
                members.update(id(parameter) for parameter in group["params"])
            if trained & members and is_schedule_free_in_training(optimizer):
                notes.append(
                    f"{type(optimizer).__name__} is in train mode: the weights are the point of "
                    "training, not the average that it is evaluated by; call optimizer.eval() "
                    "before a save of weights to use"
                )
        return tuple(notes)

    def notes_on_averages(self) -> tuple[str, ...]:
        """Which weights the folder of a checkpoint has, if the run keeps an average of them too."""
        notes = []
        for name, model in self.models_by_item().items():
            if isinstance(model, AveragedModel) and name:
                notes.append(
                    f"{name}: an average of the weights, kept with the training state; the folder "
                    "has the weights of training"
                )
        return tuple(notes)

    def watch_loop(self, batches: Iterator[Any], ranks: Ranks) -> Iterator[Any]:
        """Yield the batches of a training loop, and remind it of `step` if it does not call it."""
        self._watch_steps()
        yield from self.reminder.watch_batches(batches, self._current_models, is_main=ranks.is_main)

    def remind_of_step(self, *, is_main: bool) -> None:
        """Warn on rank 0 if the run has trained under its schedule and `step` was never called."""
        self.reminder.remind(self._current_models, is_main=is_main)

    def _current_models(self) -> list[nn.Module]:
        """The models of the run; none before one is prepared or registered."""
        model = main_model(self.accelerator, self.registered)
        return [] if model is None else [*self.models_by_item().values()]

    def close(self) -> None:
        """Restore signal handlers and remove the optimizers' hooks."""
        self.steps.close()
        self.poll.close()

    def _watch_steps(self) -> list[Item]:
        """Hook all optimizers of the run so far; returns the items of the run."""
        items = run_items(self.accelerator, self.registered)
        self.steps.watch_optimizers(plain_optimizers(items))
        return items

    def models_by_item(self) -> dict[str, nn.Module]:
        """The models of the run by item, "" for the one whose weights are saved."""
        items = run_items(self.accelerator, self.registered)
        return {"": self.model, **{item.name: item.value for item in items if item.kind == "model"}}

    def _epochs_done(self) -> int:
        """Completed passes over the data, rounded down to multiples of `every.epochs`."""
        epochs = (self.config.every.epochs if self.config.every is not None else None) or 1
        return epochs * self.feeds.passes_done(epochs)

    def current_fingerprint(
        self, sources: Mapping[Key, Source], ranks: Ranks, versions: Mapping[str, str]
    ) -> Document:
        """Settings of the run that a resume compares, see `run_fingerprint`.

        `sources` are the tensors of its models.
        """
        return run_fingerprint(
            self.accelerator,
            self.model,
            sources.values(),
            run_items(self.accelerator, self.registered),
            [feed.loader for feed in self.feeds.known_positions],
            ranks.size,
            versions,
        )
