"""The run of a saver: its registered objects, its progress, and the state that each rank has for
itself.
"""

import random
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ft_ckpt import schedule
from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    SelectionError,
    listing,
)
from ft_ckpt.extensions.deepspeed import zero_optimizer
from ft_ckpt.messages import short, warn
from ft_ckpt.model import BaseWatch, check_model
from ft_ckpt.ranks import Ranks, Source, current_ranks, engine_names, unwrap, user_class
from ft_ckpt.retention import name_metrics
from ft_ckpt.runs import gradients as accumulation, rng
from ft_ckpt.runs.data_position import DataPositions, check_position, describe_data
from ft_ckpt.runs.gradients import StepWatch
from ft_ckpt.runs.items import (
    Item,
    Key,
    main_model,
    object_signatures,
    optimizers_among,
    plain_optimizers,
    refuse_unsaveable,
    run_items,
    walk_run,
    zero_optimizers,
)
from ft_ckpt.runs.optimizers import is_schedule_free_in_training
from ft_ckpt.runs.reminder import StepReminder
from ft_ckpt.runs.restore import Restored, RestoreReport
from ft_ckpt.runs.state import (
    Captured,
    Document,
    StoredTensors,
    capture_run,
    local_state,
    tree_of_rank,
)
from ft_ckpt.runs.triggers import ClockPoll
from ft_ckpt.runs.watched import WatchedModel, changed_models, watch_model, watched_digests
from ft_ckpt.schedule import Every
from ft_ckpt.storage import Place, Store

_GRADIENTS, _RANDOM, _FEED, _STEPS, _SYNC = "gradients", "rng", "loader", "accumulation", "sync"


def capture_rank_state(run: "TrainingRun", items: Sequence[Item]) -> dict[str, Any]:
    """The state of this rank, as trees by name.

    Raises SelectionError if pending gradients cannot be read.
    """
    accelerator, models, is_synced = (
        run.accelerator,
        run.models_by_item(),
        _is_synced(run.accelerator),
    )
    own: dict[str, Any] = {_RANDOM: rng.capture_generators()}
    own |= {f"{_FEED}-{index}": state for index, state in enumerate(run.feeds.state_dicts())}
    if hasattr(accelerator, "step"):
        own[_STEPS], own[_SYNC] = int(accelerator.step), is_synced
    if not is_synced and any(
        zero_optimizer.is_accumulating(optimizer) for optimizer in zero_optimizers(items)
    ):
        raise SelectionError(
            "gradients: DeepSpeed does not expose them; save when the optimizer has stepped"
        )
    if not is_synced or run.steps.is_pending(models.values):
        own[_GRADIENTS] = {
            name: accumulation.pending_gradients(model) for name, model in models.items()
        }
    return own


def _is_synced(accelerator: Any) -> bool:
    """Whether Accelerate, if it counts micro-batches, is between steps."""
    return bool(getattr(accelerator, "sync_gradients", True))


def read_rank_state(
    document: Document, stored: StoredTensors, ranks: Ranks
) -> tuple[dict[str, Any], list[Restored]]:
    """Read this rank's own state without gradients, by name, and the items that cannot be restored.

    Overwrites nothing.

    On another number of ranks the data positions are those of rank 0, from which all ranks compute
    theirs.
    """
    saved, trees, failed = len(document["ranks"]), {}, []
    source_rank = min(ranks.rank, saved - 1)
    names = [*document["ranks"][source_rank]]
    feeds = [name for name in names if name.startswith(f"{_FEED}-")]
    for name in (*feeds, *({_RANDOM, _STEPS, _SYNC} & {*names})):
        item = "data" if name in feeds else _RANDOM if name == _RANDOM else _GRADIENTS
        try:
            tree = tree_of_rank(
                document, stored, 0 if name in feeds and saved != ranks.size else source_rank, name
            )
            if problems := _tree_problems(name, tree):
                failed.append(Restored(item, "failed", listing(problems)))
            trees[name] = tree
        except CorruptError as error:
            failed.append(Restored(item, "failed", str(error)))
    if {*feeds} != {f"{_FEED}-{number}" for number in range(len(feeds))}:
        failed.append(Restored("data", "failed", f"places of {listing(feeds, ', ')}"))
    if _RANDOM not in names:
        failed.append(Restored(_RANDOM, "failed", "not in the checkpoint"))
    if any(_GRADIENTS in trees_of_rank for trees_of_rank in document["ranks"]) and (
        saved != ranks.size or _GRADIENTS not in names
    ):
        detail = (
            f"saved in the middle of gradient accumulation by {saved} rank(s), resumed on "
            f"{ranks.size}"
        )
        failed.append(Restored(_GRADIENTS, "failed", detail))
    return trees, failed


def _tree_problems(name: str, tree: Any) -> list[str]:
    """The problems of a tree of `capture_rank_state`. Raises CorruptError for a data position."""
    if name == _RANDOM:
        return rng.generator_problems(tree)
    if name == _SYNC:
        return [] if type(tree) is bool else [f"{_SYNC} is {short(tree)}"]
    if name == _STEPS:
        return [] if type(tree) is int and 0 <= tree < 1 << 63 else [f"{_STEPS} is {short(tree)}"]
    check_position(tree)
    return []


def restore_rank_state(
    run: "TrainingRun",
    document: Document,
    stored: StoredTensors,
    ranks: Ranks,
    trees: Mapping[str, Any],
) -> tuple[list[str], list[Restored]]:
    """Restore the trees of `read_rank_state` and the pending gradients. Returns notes and outcomes.

    Random numbers come last, because anything before may draw some. Gradients that the checkpoint
    lacks are dropped.
    """
    saved, notes, outcomes = len(document["ranks"]), [], []
    own = document["ranks"][min(ranks.rank, saved - 1)]
    feeds = DataPositions(
        [trees[name] for index in range(len(trees)) if (name := f"{_FEED}-{index}") in trees]
    )
    if f"{_FEED}-0" in trees:
        outcomes.append(Restored("data", "restored"))
    if _STEPS in trees and run.accelerator is not None:
        run.accelerator.step = trees[_STEPS]
        run.accelerator.gradient_state._set_sync_gradients(trees.get(_SYNC, _GRADIENTS not in own))
    models = run.models_by_item()
    for model in models.values():
        accumulation.restore_gradients(model, {})
    if any(_GRADIENTS in names for names in document["ranks"]):
        gradients = tree_of_rank(document, stored, ranks.rank, _GRADIENTS)
        outcomes.append(_restore_gradients(models, gradients, saved, ranks))
    problems = rng.restore_generators(trees[_RANDOM])
    outcomes.append(Restored(_RANDOM, "failed" if problems else "restored", "; ".join(problems)))
    if saved != ranks.size:
        notes.append(
            f"saved by {saved} rank(s), resumed on {ranks.size}: weights and optimizer are the "
            f"same; ranks 0 to {min(saved, ranks.size) - 1} go on with their random numbers, "
            "further ones with new ones"
        )
    if ranks.rank >= saved:
        _reseed_new_rank(ranks.rank)
    run.feeds = feeds
    return notes, outcomes


def _restore_gradients(
    models: Mapping[str, nn.Module], gradients: Any, saved: int, ranks: Ranks
) -> Restored:
    if saved != ranks.size or gradients is None:
        detail = (
            f"saved in the middle of gradient accumulation by {saved} rank(s), resumed on "
            f"{ranks.size}"
        )
        return Restored(_GRADIENTS, "failed", detail)
    try:
        for name, model in models.items():
            accumulation.restore_gradients(model, gradients.get(name, {}))
    except (CheckpointError, RuntimeError) as error:
        return Restored(_GRADIENTS, "failed", str(error))
    return Restored(_GRADIENTS, "restored")


def _reseed_new_rank(rank: int) -> None:
    """Seed a rank that the saved run did not have: from another rank's restored state and its own
    number.
    """
    import numpy as np
    import torch

    seed = (
        int(torch.randint(2**62, (), device="cpu").item()) ^ (rank * 0x9E3779B97F4A7C15)
    ) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@dataclass(frozen=True)
class Progress:
    """The progress of a run, and the checkpoint it was resumed from."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Passes over the data done, as `remaining` counts them for the first loader it was called
    with.
    """
    batch: int = 0
    """Batches of this rank done in the current pass of that loader."""
    samples: int = 0
    """Samples of that loader given to all ranks together since the run began."""
    resumed_from: Path | str | None = None
    """The checkpoint, its URL if it is in a bucket; None when the run began afresh."""
    report: RestoreReport = field(default_factory=RestoreReport)
    """The outcome of the resume; without items when the run began afresh."""
    published: str | None = None
    """The version that was published last (`PublishReport.version`), also before the resume: the
    one that engines had when the checkpoint was saved.
    """


def fingerprint_differences(saved: Document, now: Document) -> tuple[str, ...]:
    """A sentence for each setting that both have and that differs."""
    return tuple(
        f"{name}: {saved[name]!r} when it was saved, {now[name]!r} now"
        for name in saved
        if name in now and saved[name] != now[name]
    )


def _unwrap_accelerate(value: Any) -> Any:
    for attribute in ("optimizer", "scheduler"):
        if type(value).__module__.startswith("accelerate.") and hasattr(value, attribute):
            return _unwrap_accelerate(getattr(value, attribute))
    return value


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
        self.poll, self.steps, self.base = (
            ClockPoll(config.every),
            StepWatch(),
            BaseWatch(config.attribute),
        )
        self.reminder = StepReminder(config.every, self.steps)
        self.has_begun = False  # True after a step
        self._is_unfinished = False  # gradients were pending after the last batch
        self.last_metrics: dict[str, float] = {}  # of the last step
        self._ancestors: set[str] = set()  # ids of the runs that this one branched off
        # items that resumes of this run left out, as `allow` permits
        self._left_out: set[str] = set()
        self._saves = 0
        # metrics that rank checkpoints and were not reported so far
        self._absent = set(config.rankings)
        self._reported: set[str] = set()  # all metrics that were

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
        """Watch a model that the script makes at each start: it is registered once its values have
        changed.

        Raises as `ModelTensors.sources` for tensors that cannot be stored.
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
        items, _, found = walk_run(self.model, run_items(self.accelerator, self.registered))
        object_signatures(self.accelerator, self.registered, lambda: found)
        local_state(items, found, {})

    def check_first_step(self, ranks: Ranks) -> None:
        """Raise SelectionError after the first step for state that cannot be saved: many optimizers
        make it then.

        Collective. Does nothing without a schedule, or if failed saves are warnings.
        """
        if self.config.every is None or self.config.on_failure != "raise":
            return
        ranks.run("the first step", self.check_objects)

    def capture_state(self, ranks: Ranks, versions: Mapping[str, str]) -> Captured:
        """Capture the state of the whole run, and the sources of its models.

        Collective. Moves nothing.
        """

        def current_objects() -> tuple[nn.Module, list[Item], dict[str, Any]]:
            items = self._watch_steps()
            return self.model, items, capture_rank_state(self, items)

        self.register_changed(ranks)
        captured = capture_run(current_objects, ranks)
        signed = object_signatures(self.accelerator, self.registered, lambda: captured.found)
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
                "fingerprint": self.current_fingerprint(captured.found, ranks, versions),
                "signatures": signed,
            }
        )
        return captured

    def restore_progress(self, document: Document, origin: Store, created: str) -> None:
        """Take over step, run id and history from the checkpoint at `origin`; `created`: the moment
        of its save.
        """
        self.resumed_moment = created
        progress = document["progress"]
        self.step, self.run_id = progress["step"], document["run_id"]
        self.resumed_from = Place(origin).absolute
        self._ancestors, self._left_out = (
            set(document.get("ancestors", ())),
            set(document.get("let_go", ())),
        )
        self.history = schedule.begin_history(
            self.step, progress["epoch"], time.monotonic(), document["history"]
        )
        self.published = document.get("published")
        # the step before a roll-back is not the last one
        self._is_unfinished, self.last_metrics = False, {}
        self.poll.resume_at(self.step)

    def note_resumed(self, report: RestoreReport) -> None:
        """Record that the resume of `report` has succeeded on all ranks."""
        self._left_out |= {item.name for item in report.items if item.status != "restored"}
        self.report = report

    def note_absent(self, names: Iterable[str]) -> None:
        """Name in the report of the resume objects that the checkpoint does not have, and that
        begin as they are.
        """
        if listed := sorted(names):
            note = f"{listing(listed, ', ')}: not in the checkpoint, begins as the script makes it"
            self.report = replace(self.report, notes=(*self.report.notes, note))

    def agree_on_metrics(self, metrics: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
        """The metrics that decide on saves: rank 0's if `every.best` ranks by them, because losses
        differ per rank.
        """
        every = self.config.every
        if ranks.size == 1 or every is None or every.best is None or every.best[0] not in metrics:
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
        self.step, now = self.step + 1 if step is None else step, time.monotonic()
        self.last_metrics = dict(metrics or {})
        self._note_metrics(self.last_metrics)
        if self.has_begun:
            self.history = schedule.after_step(self.history, self.step, now)
        else:  # time before the first step, such as loading the model, does not count
            self.history = replace(self.history, step=self.step, seen_at=now, saved_at=now)
        self.has_begun = True

    def note_saved(
        self, reason: str | None, metrics: Mapping[str, float], cost: float | None = None
    ) -> None:
        """Record a save for `reason`: when it begins, and again with its `cost` in seconds."""
        self._note_metrics(metrics)
        self._saves += cost is None
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
        return _is_synced(self.accelerator) and not self._is_unfinished

    @property
    def own_ids(self) -> frozenset[str]:
        """The ids of runs whose checkpoints this run may replace: its own, and those it branched
        off.
        """
        return frozenset({self.run_id, *self._ancestors})

    def branch_off(self, run_id: str | None) -> None:
        """Continue as the run `run_id`, if given: later checkpoints of the current run do not
        belong to it.
        """
        if run_id is not None:
            self._ancestors.add(self.run_id)
            self.run_id = run_id

    def warn_of_absent_metrics(self, least: int) -> None:
        """Warn once of metrics that rank checkpoints and were not reported, although others were.

        Without any metric so far, warn after `least` saves: the first ones may come before an
        evaluation.
        """
        if self._absent and (self._reported or self._saves >= least):
            warn(
                "no step so far had the metric "
                f"{name_metrics(sorted(self._absent), self._reported)}, by which checkpoints are "
                "ranked: none is deleted until one has it; pass it to saver.step(metrics) or "
                "saver.save_state(metrics=...), or let `ft-ckpt watch` measure it",
                stacklevel=5,
            )
            self._absent = set()

    def _note_metrics(self, metrics: Mapping[str, float]) -> None:
        self._reported |= metrics.keys()
        self._absent -= metrics.keys()

    def facts_of_save(self, step: int | None, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Step, metrics and run id for a save of weights; `step` and `metrics` override those of
        the run.
        """
        if not self.has_begun and self.resumed_from is None:
            return {"step": step, "metrics": dict(metrics)}
        step = self.step if step is None else step
        known = self.last_metrics if step == self.step else {}
        return {"step": step, "metrics": dict(metrics) or dict(known), "run_id": self.run_id}

    def steppers(self) -> dict[Optimizer, list[Tensor]]:
        """The optimizers that call a hook before they step, each with the further tensors that its
        steps change.
        """
        hooked: dict[Optimizer, list[Tensor]] = {}
        items = run_items(self.accelerator, self.registered)
        for _, kind, optimizer in optimizers_among(items):
            inner, further = kind.hooked_optimizer(optimizer)
            has_hooks = getattr(type(inner).step, "hooked", False)
            if isinstance(inner, Optimizer) and has_hooks:
                hooked[inner] = further
        return hooked

    def notes_on_weights(self, model: nn.Module) -> tuple[str, ...]:
        """What a reader of the weights of `model` should know of the optimizers that train them."""
        trained = {id(parameter) for parameter in unwrap(model).parameters()}
        notes: list[str] = []
        for optimizer in plain_optimizers(run_items(self.accelerator, self.registered)):
            members = {
                id(parameter) for group in optimizer.param_groups for parameter in group["params"]
            }
            if trained & members and is_schedule_free_in_training(optimizer):
                notes.append(
                    f"{type(optimizer).__name__} is in train mode: the weights are the point of "
                    "training, not the average that it is evaluated by; call optimizer.eval() "
                    "before a save of weights to use"
                )
        return tuple(notes)

    def notes_on_averages(self) -> tuple[str, ...]:
        """Which weights the folder of a checkpoint has, if the run keeps an average of them too."""
        models = self.models_by_item().items()
        return tuple(
            (
                f"{name}: an average of the weights, kept with the training state; the folder "
                "has the weights of training"
            )
            for name, model in models
            if isinstance(model, AveragedModel) and name
        )

    def watch_loop(self, batches: Iterator[Any], ranks: Ranks) -> Iterator[Any]:
        """Yield the batches of a training loop, and remind it of `step` if it does not call it."""
        self._watch_steps()
        yield from self.reminder.watch_batches(batches, self._known_models, is_main=ranks.is_main)

    def remind_of_step(self, *, is_main: bool) -> None:
        """Warn on rank 0 if the run has trained under its schedule and `step` was never called."""
        self.reminder.remind(self._known_models, is_main=is_main)

    def _known_models(self) -> list[nn.Module]:
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
        self, found: Mapping[Key, Source], ranks: Ranks, versions: Mapping[str, str]
    ) -> Document:
        """Settings of the run that a resume compares, as plain values by name; objects are compared
        by their class.

        `found` are the tensors of its models.
        """
        facts: Document = {
            "world size": ranks.size,
            "engine": engine_names(found.values()),
            "model": user_class(type(unwrap(self.model))).__name__,
            "parameters": sum(one.numel for one in {s.key: s for s in found.values()}.values()),
            "gradient accumulation": getattr(self.accelerator, "gradient_accumulation_steps", None),
            "mixed precision": getattr(self.accelerator, "mixed_precision", None),
        }
        for item in run_items(self.accelerator, self.registered):
            facts[item.name] = type(_unwrap_accelerate(item.value)).__name__
        prepared = list(getattr(self.accelerator, "_dataloaders", ()))
        for index, loader in enumerate(
            prepared or [feed.loader for feed in self.feeds.known_positions]
        ):
            size = getattr(loader, "total_batch_size", None) or getattr(loader, "batch_size", None)
            facts |= {
                f"loader {index}: batch size": size,
                f"loader {index}: samples": describe_data(loader)[1],
            }
        facts |= {f"version of {name}": version for name, version in versions.items()}
        return {name: value for name, value in facts.items() if value is not None}
