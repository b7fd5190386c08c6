"""The run that a saver serves: its objects, how far it is, what it needs to go on, and when it saves next."""

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from ft_ckpt import schedule
from ft_ckpt.config import SaverConfig
from ft_ckpt.distributed import broadcast
from ft_ckpt.distributed.ranks import Ranks, current_ranks
from ft_ckpt.distributed.source import Source
from ft_ckpt.errors import ConfigError, LoadError, RanksDisagreeError, damaged_input, listing
from ft_ckpt.messages import warn
from ft_ckpt.model.base_model import BaseWatch
from ft_ckpt.schedule import Every
from ft_ckpt.storage.place import Place
from ft_ckpt.training import capture as capturing
from ft_ckpt.training import rank_state, resume, state
from ft_ckpt.training.accelerate_run import LiveRun, fit_point
from ft_ckpt.training.capture import Captured, Objects
from ft_ckpt.training.exchange import decide_together, hear_leader
from ft_ckpt.training.extra_state import with_extra_state
from ft_ckpt.training.feeds import DataPositions
from ft_ckpt.training.gradient_flags import changed_flags
from ft_ckpt.training.gradients import StepWatch
from ft_ckpt.training.items import (
    Item,
    Key,
    items_in_saved_order,
    known_sources,
    main_model,
    object_signatures,
    optimizers_among,
    plain_optimizers,
    refuse_unsaveable,
    run_items,
    walk_models,
)
from ft_ckpt.training.polling import ClockPoll
from ft_ckpt.training.rank_state import OnRank
from ft_ckpt.training.resume import Damage, RankOutcomes, RestoreReport, RestoreStake, merge_outcomes
from ft_ckpt.training.run_progress import Progress
from ft_ckpt.training.run_settings import fingerprint_differences, run_fingerprint
from ft_ckpt.training.state import Document
from ft_ckpt.training.state_files import ResumePoint


@dataclass(frozen=True)
class _Metrics:
    metrics: Mapping[str, float]


class TrainingRun:
    """What one training run consists of. All methods that take `ranks` are collective."""

    def __init__(self, accelerator: Any, config: SaverConfig) -> None:
        self.accelerator = accelerator
        self.config = config
        self.registered: dict[str, Any] = {}
        self.step = 0
        self.feeds = DataPositions()
        self.run_id = uuid.uuid4().hex
        self.resumed_from: Place | None = None
        self.report = RestoreReport()
        self.history = schedule.begin_history(0, 0, time.monotonic())
        self.poll, self.steps, self.base = ClockPoll(config.every), StepWatch(), BaseWatch(config.attribute)
        self.has_begun = False  # a step was done
        self.stake = RestoreStake()
        self._is_unfinished = False  # after the last batch gradients waited for a step
        self.last_metrics: dict[str, float] = {}  # of the last step
        self._ancestors: set[str] = set()  # runs that this one went back in
        self._let_go: set[str] = set()  # items that resumes of this run were allowed to do without
        self._saves, self._absent = 0, set(config.rankings)  # saves made, and metrics that never came

    def register(self, objects: Mapping[str, Any]) -> None:
        """Take further objects into the run by name; "model" is the one whose weights are saved.

        Raises SelectionError for one whose state cannot be kept, ConfigError for a name that is taken.
        """
        items = run_items(self.accelerator, {**self.registered, **objects})
        refuse_unsaveable(item for item in items if item.name in objects)
        self.registered.update(objects)
        self.steps.watch_optimizers(plain_optimizers(items))
        self.note_base()

    def note_base(self) -> None:
        """Remember the base of the model's adapters as the script has made it."""
        if "model" in self.registered or getattr(self.accelerator, "_models", None):
            self.base.note_base(self.model, current_ranks().rank)

    @property
    def model(self) -> nn.Module:
        """The model whose weights are saved. Raises ConfigError when there is none."""
        model = main_model(self.accelerator, self.registered)
        if model is None:
            raise ConfigError(
                "no model: prepare one with Accelerate before this, or pass it: saver.register(model=model, ...)"
            )
        return model

    @property
    def progress(self) -> Progress:
        """How far the run is now."""
        found = self.resumed_from.location if self.resumed_from else None
        return Progress(self.step, **self.feeds.counts, resumed_from=found, report=self.report)

    def check_objects(self) -> None:
        """Raise SelectionError, now and not after hours, when something of the run cannot be kept."""
        refuse_unsaveable(self._watch_steps())
        if self.config.every is None:
            return
        if not getattr(self.accelerator, "_models", None) and "model" not in self.registered:
            return  # what is passed later is looked at when it is
        items = run_items(self.accelerator, self.registered)
        models = walk_models(self.model, items)
        items = with_extra_state(self.model, items, models)
        found = known_sources(models, items)
        object_signatures(self.accelerator, self.registered, lambda: found)
        state.local_state(items, found, {})

    def capture_state(self, ranks: Ranks, versions: Mapping[str, str]) -> Captured:
        """The state of the whole run, and the sources of its models. Collective. Nothing is moved."""

        def current_objects() -> Objects:
            items = self._watch_steps()
            return Objects(self.model, items, rank_state.capture_rank_state(self._on_rank(items)))

        captured = capturing.capture_run(current_objects, ranks)
        signed = object_signatures(self.accelerator, self.registered, lambda: captured.found)
        captured.document.update(
            {
                "progress": {"step": self.step, **self.feeds.counts},
                "history": self.history.to_json(),
                "keep": None if self.config.keep is None else asdict(self.config.keep),
                "run_id": self.run_id,
                "ancestors": sorted(self._ancestors),
                "let_go": sorted(self._let_go),
                "fingerprint": self._current_fingerprint(captured.found, ranks, versions),
                "signatures": signed,
            }
        )
        return captured

    def restore_state(
        self, point: ResumePoint, ranks: Ranks, allow: Iterable[str] | bool, versions: Mapping[str, str]
    ) -> Damage:
        """Put the whole run back to where `point` was made; what is in `allow` may fail (True: everything).

        Where files of `point` are found damaged, which the answer tells, another one is to be taken: the run is half
        restored then, as it is when this raises.
        """
        path = point.checkpoint.location
        allowed = None if allow is True else frozenset(() if isinstance(allow, bool) else allow)
        report, error = ranks.attempt(lambda: self._put_back(point, ranks, allowed, versions))
        if isinstance(report, Damage):
            return report
        mine = None if report is None else RankOutcomes(report.items, report.requests)
        kinds = (RankOutcomes, RankOutcomes)
        told, _ = decide_together(ranks, "resume()", mine, merge_outcomes, kinds, error)
        final: RestoreReport = replace(report, items=told.items, requests=told.requests)
        if refused := _refused(final.items, allowed):
            how = "the model may be partly overwritten" if self.stake.names else "nothing was overwritten"
            raise LoadError(
                f"{path}: {listing(refused)}. Pass the same objects as the saved run, or resume(allow=[names]) to go "
                f"on without; {how}"
            )
        self._let_go |= {item.name for item in final.items if item.status != "restored"}
        for _, kind, optimizer in optimizers_among(run_items(self.accelerator, self.registered)):
            kind.refresh_weights(optimizer)
        self.report = final
        self.stake.clear()
        self._settle_differences(final)
        return Damage()

    def agree_on_metrics(self, metrics: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
        """The metrics that count where one decides when to save: rank 0's, since each rank may have its own loss."""
        every = self.config.every
        if every is None or every.best is None or every.best[0] not in metrics:
            return dict(metrics)
        return dict(hear_leader(ranks, "saver.step()", _Metrics, _Metrics(dict(metrics))).metrics)

    def reason_to_save(self, metrics: Mapping[str, float], ranks: Ranks) -> str | None:
        """Why to save now, the same on every rank if the `metrics` are; None for no reason."""
        every = self.config.every
        if every is None:
            return None
        reason = schedule.own_reason(every, self.history, self.step, self._epochs_done(), metrics)
        return self.poll.reason_to_save(self.history, self.step, ranks) or reason

    def is_batch_done(self) -> bool:
        """Whether the batch that is over, on this rank as on all, completed a step. Raises LoadError, see above."""
        self.stake.refuse_half_restored()
        self._watch_steps()
        self._is_unfinished = self.steps.is_unfinished(lambda: self._models_by_item().values())
        return self.is_between_steps

    def note_step(self, step: int | None = None, metrics: Mapping[str, float] | None = None) -> None:
        """One more optimizer step is done."""
        self.step, now = self.step + 1 if step is None else step, time.monotonic()
        self.last_metrics = dict(metrics or {})
        self._absent -= self.last_metrics.keys()
        if self.has_begun:
            self.history = schedule.after_step(self.history, self.step, now)
        else:  # what came before the first step, such as loading the model, is no step's time
            self.history = replace(self.history, step=self.step, seen_at=now, saved_at=now)
        self.has_begun = True

    def note_saved(self, reason: str | None, metrics: Mapping[str, float], cost: float | None = None) -> None:
        """A save for `reason` is made now, or was and took `cost` seconds."""
        self._absent -= metrics.keys()
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
        """Whether the optimizer had taken in all gradients there were when the last batch was over."""
        return bool(getattr(self.accelerator, "sync_gradients", True)) and not self._is_unfinished

    @property
    def is_under_way(self) -> bool:
        """Whether something of this run was done here or taken over: what is saved now belongs to it."""
        return self.has_begun or self.resumed_from is not None

    @property
    def lacks_save(self) -> bool:
        """Whether steps were done since the last save."""
        return self.has_begun and self.step > self.history.saved_step

    @property
    def own_ids(self) -> frozenset[str]:
        """The names whose checkpoints this run may replace: its own, and those of runs that it went back in."""
        return frozenset({self.run_id, *self._ancestors})

    def branch_off(self, run_id: str | None) -> None:
        """Go on as another run, if it has a name: what this one had saved after the point gone back to is not of it."""
        if run_id is not None:
            self._ancestors.add(self.run_id)
            self.run_id = run_id

    def warn_of_absent_metrics(self, least: int) -> None:
        """Say once that metrics have never come which checkpoints are ranked by, after `least` saves."""
        if self._saves >= least and self._absent:
            warn(
                f"{listing(sorted(self._absent), ', ')}: checkpoints are to be ranked by it, and no save had it; give "
                "it to saver.step(metrics) or saver.save_state(metrics=...)",
                stacklevel=5,
            )
            self._absent = set()

    def facts_of_save(self, step: int | None, metrics: Mapping[str, float]) -> dict[str, Any]:
        """What a save of weights within this run says of it: `step` and `metrics` unless given, and whose it is."""
        if not self.is_under_way:
            return {"step": step, "metrics": dict(metrics)}
        step = self.step if step is None else step
        known = self.last_metrics if step == self.step else {}
        return {"step": step, "metrics": dict(metrics) or dict(known), "run_id": self.run_id}

    def close(self) -> None:
        """Give signals back to whoever had them, and the optimizers' hooks."""
        self.steps.close()
        self.poll.close()

    def _watch_steps(self) -> list[Item]:
        """Hear of the steps of all optimizers that are known by now: the run's items."""
        items = run_items(self.accelerator, self.registered)
        self.steps.watch_optimizers(plain_optimizers(items))
        return items

    def _models_by_item(self) -> dict[str, nn.Module]:
        """The models of the run by their items, "" for the one that is saved."""
        items = run_items(self.accelerator, self.registered)
        return {"": self.model, **{item.name: item.value for item in items if item.kind == "model"}}

    def _on_rank(self, items: Sequence[Item]) -> OnRank:
        return OnRank(self.accelerator, self._models_by_item(), self.feeds, self.steps, items)

    def _epochs_done(self) -> int:
        """Passes that loaders have come to the end of, in multiples of what the schedule counts by."""
        of = (self.config.every.epochs if self.config.every is not None else None) or 1
        return of * self.feeds.passes_done(of)

    def _current_fingerprint(self, found: Mapping[Key, Source], ranks: Ranks, versions: Mapping[str, str]) -> Document:
        items = run_items(self.accelerator, self.registered)
        objects = {item.name: item.value for item in items}
        prepared = list(getattr(self.accelerator, "_dataloaders", ()))
        loaders = prepared or [feed.loader for feed in self.feeds.known_positions]
        return run_fingerprint(self.model, found.values(), objects, loaders, self.accelerator, ranks.size, versions)

    def _put_back(
        self, point: ResumePoint, ranks: Ranks, allowed: frozenset[str] | None, versions: Mapping[str, str]
    ) -> RestoreReport | Damage:
        items = items_in_saved_order(self.accelerator, self.registered, point.document.get("signatures", {}))
        models = walk_models(self.model, items)
        items = with_extra_state(self.model, items, models)
        found = known_sources(models, items)
        fitted = fit_point(point, LiveRun(self.accelerator, self.model, items, found, ranks.rank, ranks.size))
        held, document, stored, items = point.checkpoint, fitted.point.document, fitted.point.tensors, fitted.items
        trees, unread = rank_state.read_rank_state(document, stored, ranks)
        odd = [*fitted.outcomes, *unread]  # of one item the first counts: a folder's own names its file
        odd += resume.find_misfits(items, found, document, stored, ranks.rank)
        odd += resume.compare_adapters(self.model, self.config.attribute, held, stored)
        base = resume.compare_base(self.model, self.config.attribute, document, held, ranks.rank)
        odd += [one for one in base if one.status != "restored"]
        told, _ = decide_together(
            ranks, "checking the state of resume()", RankOutcomes(tuple(odd), 0), merge_outcomes, (RankOutcomes,) * 2
        )
        if allowed is not None:
            _refuse_unknown(allowed, items, document, told.items)
        if _refused(told.items, allowed):
            damage = resume.find_damage(fitted.point, odd, ranks)
            return damage if damage.problems else RestoreReport(held.location, tuple(odd))
        self.stake.put_names(document, held.location)
        given_up = {one.name for one in told.items}
        items = [item for item in items if item.name not in given_up]
        way = point.way_to_read(self.config.fan_out)
        fill_all = broadcast.choose_filler(way, ranks, self.config.bucket_bytes)
        outcomes = [] if "weights" in given_up else [resume.restore_weights(found, document, stored, fill_all)]
        outcomes += [one for one in base if one.status == "restored"]
        for _, kind, optimizer in optimizers_among(items):
            kind.adopt_weights(optimizer)
        filled = [item for item in items if item.kind != "object"]
        outcomes += resume.restore_items(filled, found, document, stored, ranks.rank, fill_all)
        try:
            damage = resume.find_damage(fitted.point, outcomes, ranks)
        except RanksDisagreeError as error:
            return resume.report_of_failed(held.location, outcomes, error)
        if damage.problems:  # before objects are given anything of it
            return damage
        others = [item for item in items if item.kind == "object"]
        outcomes += resume.restore_items(others, found, document, stored, ranks.rank, fill_all)
        self._is_unfinished = False
        with damaged_input(f"{held.location}: its training state"):
            apart, lost = resume.restore_apart(items, found, document, stored, ranks)
            outcomes += apart
            on_rank = self._on_rank(items)
            self.feeds, notes, more = rank_state.restore_rank_state(on_rank, document, stored, ranks, trees)
            progress = document["progress"]
            self.step, self.run_id, self.resumed_from = progress["step"], document["run_id"], Place(held.origin)
            self._ancestors, self._let_go = set(document.get("ancestors", ())), set(document.get("let_go", ()))
            now = time.monotonic()
            self.history = schedule.begin_history(self.step, progress["epoch"], now, document["history"])
        if point.served:
            notes = (*notes, f"rank(s) {point.served} do not see the checkpoint: rank 0 has read it for them")
        notes = (*fitted.notes, *notes)
        self.poll.resume_at(self.step)
        changed = fingerprint_differences(document["fingerprint"], self._current_fingerprint(found, ranks, versions))
        changed += (*changed_flags(document, found), *lost)
        outcomes = [*odd, *outcomes, *more]
        return RestoreReport(held.location, tuple(outcomes), changed, notes, held.requests)

    def _settle_differences(self, report: RestoreReport) -> None:
        told = [*report.differences, *report.notes]
        if report.differences and self.config.on_difference == "raise":
            raise LoadError(
                f"{report.path}: {listing(list(report.differences))}; start with the same settings, or "
                "on_difference='warn' to go on"
            )
        if told and self.config.on_difference == "warn":
            warn(f"{report.path}: {listing(told)}", stacklevel=4)


_NO_ITEMS = (
    "adapter settings",
    "base",
    "data",
    "gradients",
    "replicas",
    "rng",
)  # what resumes report beside the objects of a run


def _refused(outcomes: Iterable[resume.Restored], allowed: frozenset[str] | None) -> list[str]:
    """A line for each item that was not restored and has to be; `allowed` None: none has to be."""
    problems = RestoreReport(items=tuple(outcomes)).problems
    return [line for line in problems if allowed is not None and line.split(":")[0] not in allowed]


def _refuse_unknown(
    allowed: frozenset[str], items: Iterable[Item], document: Document, outcomes: Iterable[resume.Restored]
) -> None:
    """Raise ConfigError for names that are no item of this run, of the checkpoint, or of those let go before."""
    known = {*_NO_ITEMS, *document["items"], *document.get("let_go", ()), *(item.name for item in items)}
    known |= {one.name for one in outcomes} - {"weights"}
    if unknown := sorted(repr(name) for name in allowed - known):
        raise ConfigError(
            f"resume(allow=...): {listing(unknown, ', ')}: no item; there are {listing(sorted(known), ', ', 20)}"
        )
