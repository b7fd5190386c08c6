"""The run that a saver serves: its objects, how far it is, what it needs to go on, and when it saves next."""

import random
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ft_ckpt import accumulation, capturing, fan_out, resume, rng, schedule, training, zero_optimizer
from ft_ckpt.capturing import Captured, Objects
from ft_ckpt.config import SaverConfig
from ft_ckpt.engines import Source
from ft_ckpt.errors import CheckpointError, ConfigError, LoadError, SelectionError, listing
from ft_ckpt.fingerprint import differences, fingerprint
from ft_ckpt.items import Item, Key, items_of, known_sources, model_of, with_extra_state
from ft_ckpt.opening import OpenCheckpoint
from ft_ckpt.position import Feed
from ft_ckpt.ranks import Ranks
from ft_ckpt.resume import Restored, RestoreReport
from ft_ckpt.schedule import Every
from ft_ckpt.signals import SignalWatch
from ft_ckpt.structure import Kept
from ft_ckpt.training import Document

_GRADIENTS, _RANDOM, _FEED, _STEPS = "gradients", "rng", "loader", "accumulation"


@dataclass(frozen=True)
class Progress:
    """How far a run is. `resumed_from` and `report` tell how it came there, if it was resumed."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # passes over the data done, as `remaining` counts them
    batch: int = 0  # batches of this rank done in the current pass
    samples: int = 0  # done by all ranks
    resumed_from: Path | None = None
    report: RestoreReport | None = None


class Run:
    """What one training run consists of. All methods that take `ranks` are collective."""

    def __init__(self, accelerator: Any, config: SaverConfig) -> None:
        self.accelerator = accelerator
        self.config = config
        self.registered: dict[str, Any] = {}
        self.step = 0
        self.feeds: list[Feed] = []
        self.run_id = uuid.uuid4().hex
        self.resumed_from: Path | None = None
        self.report: RestoreReport | None = None
        self.history = schedule.started(0, 0, time.monotonic())
        self.watch = SignalWatch(config.every.signals) if config.every is not None else None
        self._waiting: list[Any] = []  # places in the data of loaders that have not been asked for yet
        self._begun = False
        self._polls = True  # until rank 0 says otherwise: what asks for it may be in its environment alone
        self._poll_at = 1
        self._poll_seconds = 1.0  # what a meeting of all ranks costs: the least that was measured

    def register(self, objects: Mapping[str, Any]) -> None:
        """Take further objects into the run by name; "model" is the one whose weights are saved.

        Raises SelectionError for one whose state cannot be kept, ConfigError for a name that is taken.
        """
        items_of(self.accelerator, {**self.registered, **objects})
        self.registered.update(objects)

    @property
    def model(self) -> nn.Module:
        """The model whose weights are saved. Raises ConfigError when there is none."""
        model = model_of(self.accelerator, self.registered)
        if model is None:
            raise ConfigError(
                "no model: prepare one with Accelerate before this, or pass it: saver.register(model=model, ...)"
            )
        return model

    @property
    def progress(self) -> Progress:
        """How far the run is now."""
        return Progress(self.step, **self._place(), resumed_from=self.resumed_from, report=self.report)

    def remaining(self, loader: Any, ranks: Ranks, replay: bool | None = None) -> Iterator[Any]:
        """The batches of one pass that have not been seen; `replay` as for `Feed`."""
        yield from self._feed(loader, ranks, replay).batches()

    def at_epoch_end(self) -> bool:
        """Whether the batch at hand is known to be the last of its pass."""
        return bool(self.feeds and self.feeds[0].at_end)

    def check(self) -> None:
        """Raise SelectionError, now and not after hours, when something of the run cannot be kept."""
        if not getattr(self.accelerator, "_models", None) and "model" not in self.registered:
            return  # what is passed later is looked at when it is
        items = with_extra_state(self.model, items_of(self.accelerator, self.registered))
        training.look(items, known_sources(self.model, items), {})

    def capture(self, ranks: Ranks, versions: Mapping[str, str], kept: Kept) -> Captured:
        """The state of the whole run, and the sources of its models; `kept` as for `capturing`. Nothing is moved."""

        def objects() -> Objects:
            items = items_of(self.accelerator, self.registered)
            return Objects(self.model, items, self._own(items))

        captured = capturing.capture(objects, ranks, kept)
        captured.document.update(
            {
                "progress": {"step": self.step, **self._place()},
                "history": self.history.to_json(),
                "run_id": self.run_id,
                "fingerprint": self._fingerprint(captured.found, ranks, versions),
            }
        )
        return captured

    def reinstate(
        self, held: OpenCheckpoint, ranks: Ranks, allow: Iterable[str] | bool, versions: Mapping[str, str]
    ) -> RestoreReport:
        """Put the whole run back into the state of `held`; what is in `allow` may fail (True: everything)."""
        path = held.path
        report, error = ranks.attempt(lambda: self._put_back(held, ranks, versions))
        found = [] if report is None else [[item.name, item.status, item.detail] for item in report.items]
        answers = ranks.agree("resume()", {"items": found}, error)
        items = _worst([[Restored(*item) for item in answer["items"]] for answer in answers])
        final: RestoreReport = replace(report, items=items)
        refused = [line for line in final.problems if allow is not True and line.split(":")[0] not in _names(allow)]
        if refused:
            raise LoadError(
                f"{path}: {listing(refused)}. Pass the same objects as the saved run, or resume(allow=[names]) to go "
                "on without; the model may be partly overwritten"
            )
        for item in _zero(items_of(self.accelerator, self.registered)):
            zero_optimizer.refresh(item.value)
        self._settle_differences(final)
        return final

    def agreed(self, metrics: Mapping[str, float], ranks: Ranks) -> dict[str, float]:
        """The metrics that count where one decides when to save: rank 0's, since each rank may have its own loss."""
        every = self.config.every
        if every is None or every.best is None or every.best[0] not in metrics:
            return dict(metrics)
        answers = ranks.agree("saver.step()", {"metrics": dict(metrics)})
        return dict(answers[0]["metrics"])

    def due(self, metrics: Mapping[str, float], ranks: Ranks, pass_ended: bool = False) -> str | None:
        """Why to save now, the same on every rank if the `metrics` are; None for no reason."""
        every = self.config.every
        if every is None:
            return None
        epochs = self._epochs_done() + (0 if pass_ended else int(self.at_epoch_end()))
        reason = schedule.own_reason(every, self.history, self.step, epochs, metrics)
        return self._asked(every, ranks) or reason

    def stepped(self, step: int | None = None) -> None:
        """One more optimizer step is done."""
        self.step, now = self.step + 1 if step is None else step, time.monotonic()
        if self._begun:
            self.history = schedule.stepped(self.history, self.step, now)
        else:  # what came before the first step, such as loading the model, is no step's time
            self.history = replace(self.history, step=self.step, seen_at=now, saved_at=now)
        self._begun = True

    def note_saved(self, reason: str | None, metrics: Mapping[str, float], cost: float | None = None) -> None:
        """A save for `reason` is made now, or was and took `cost` seconds."""
        epochs = self._epochs_done() + int(self.at_epoch_end())
        every = self.config.every or Every()
        self.history = schedule.saved(
            every,
            self.history,
            self.step,
            epochs,
            time.monotonic(),
            cost_seconds=cost,
            metrics=metrics,
            reason=reason,
        )

    @property
    def is_between_steps(self) -> bool:
        """Whether the optimizer has taken in all gradients there are."""
        return bool(getattr(self.accelerator, "sync_gradients", True))

    def close(self) -> None:
        """Give signals back to whoever had them."""
        if self.watch is not None:
            self.watch.close()

    def _asked(self, every: Every, ranks: Ranks) -> str | None:
        """What clocks and signals ask for; ranks meet for it only at steps they all know."""
        if self.step < self._poll_at or not self._polls:
            return None
        begun = time.monotonic()
        signal = self.watch.received if self.watch is not None else None
        wanted = schedule.shared_reason(every, self.history, begun, time.time(), signal)
        next_poll = schedule.next_poll(self.history, self.step, self._poll_seconds)
        told = {"reason": wanted, "signal": signal, "next": next_poll, "polls": schedule.needs_poll(every)}
        answers = ranks.agree("saver.step()", told)
        self._poll_seconds = min(self._poll_seconds, time.monotonic() - begun)
        self._poll_at, self._polls = answers[0]["next"], answers[0]["polls"]
        signals: list[str | None] = [answer["signal"] for answer in answers if answer["signal"]]
        reasons: list[str | None] = [*signals, answers[0]["reason"]]
        return reasons[0]

    def _feed(self, loader: Any, ranks: Ranks, replay: bool | None) -> Feed:
        for feed in self.feeds:
            if feed.loader is loader:
                return feed
        feed = Feed(loader, ranks.rank, ranks.size, replay=replay)
        index = len(self.feeds)
        if index < len(self._waiting) and self._waiting[index] is not None:
            for note in feed.load_state_dict(self._waiting[index]):
                warnings.warn(f"loader {index}: {note}", stacklevel=3)
        self.feeds.append(feed)
        return feed

    def _own(self, items: Sequence[Item]) -> dict[str, Any]:
        """What this rank has of its own."""
        own: dict[str, Any] = {_RANDOM: rng.capture()}
        for index, feed in enumerate(self.feeds):
            own[f"{_FEED}-{index}"] = feed.state_dict()
        for index in range(len(self.feeds), len(self._waiting)):
            own[f"{_FEED}-{index}"] = self._waiting[index]
        if hasattr(self.accelerator, "step"):
            own[_STEPS] = int(self.accelerator.step)
        if not self.is_between_steps:
            if any(zero_optimizer.accumulating(item.value) for item in _zero(items)):
                raise SelectionError("gradients: DeepSpeed keeps them to itself; save when the optimizer has stepped")
            own[_GRADIENTS] = accumulation.gradients(self.model)
        return own

    def _place(self) -> dict[str, int]:
        names = ("epoch", "batch", "samples")
        if self.feeds:
            return {name: getattr(self.feeds[0], name) for name in names}
        return {name: self._waiting[0][name] if self._waiting else 0 for name in names}

    def _epochs_done(self) -> int:
        return self._place()["epoch"]

    def _fingerprint(self, found: Mapping[Key, Source], ranks: Ranks, versions: Mapping[str, str]) -> Document:
        items = items_of(self.accelerator, self.registered)
        objects = {item.name: item.value for item in items}
        loaders = list(getattr(self.accelerator, "_dataloaders", ())) or [feed.loader for feed in self.feeds]
        return fingerprint(self.model, found.values(), objects, loaders, self.accelerator, ranks.size, versions)

    def _put_back(self, held: OpenCheckpoint, ranks: Ranks, versions: Mapping[str, str]) -> RestoreReport:
        document = resume.read_document(held.folder)
        items = with_extra_state(self.model, items_of(self.accelerator, self.registered))
        found = known_sources(self.model, items)
        fill_all = fan_out.filler(self.config.fan_out, ranks, self.config.bucket_bytes)
        with resume.opened(held) as stored:
            outcomes = [resume.restore_weights(found, document, stored, fill_all)]
            for item in _zero(items):
                zero_optimizer.adopt_weights(item.value)
            outcomes += resume.restore_items(items, found, document, stored, ranks.rank, fill_all)
            apart, lost = resume.restore_apart(items, found, document, stored, ranks.rank, ranks.size)
            outcomes += apart
            notes, more = self._put_back_own(document, stored, ranks)
        progress = document["progress"]
        self.step, self.run_id, self.resumed_from = progress["step"], document["run_id"], held.path
        self.history = schedule.started(self.step, progress["epoch"], time.monotonic(), document["history"])
        self._poll_at = self.step + 1
        changed = differences(document["fingerprint"], self._fingerprint(found, ranks, versions))
        return RestoreReport(held.path, (*outcomes, *more), (*changed, *lost), tuple(notes))

    def _put_back_own(
        self, document: Document, stored: resume.Stored, ranks: Ranks
    ) -> tuple[list[str], list[Restored]]:
        """What each rank has of its own; random numbers last, since anything before may draw some."""
        saved, notes, outcomes = len(document["ranks"]), [], []
        stand_in = min(ranks.rank, saved - 1)
        trees = {name: resume.own_tree(document, stored, stand_in, name) for name in document["ranks"][stand_in]}
        if saved != ranks.size:  # what all ranks have seen together is rank 0's to tell
            feeds = [name for name in trees if name.startswith(f"{_FEED}-")]
            trees |= {name: resume.own_tree(document, stored, 0, name) for name in feeds}
        self.feeds, self._waiting = [], []
        while f"{_FEED}-{len(self._waiting)}" in trees:
            self._waiting.append(trees[f"{_FEED}-{len(self._waiting)}"])
        if self._waiting:
            outcomes.append(Restored("data", "restored"))
        if _STEPS in trees and self.accelerator is not None:
            self.accelerator.step = trees[_STEPS]
            self.accelerator.gradient_state._set_sync_gradients(_GRADIENTS not in trees)
        if any(_GRADIENTS in names for names in document["ranks"]):
            outcomes.append(self._put_back_gradients(trees.get(_GRADIENTS), saved, ranks))
        problems = rng.restore(trees[_RANDOM])
        outcomes.append(Restored(_RANDOM, "failed" if problems else "restored", "; ".join(problems)))
        if saved != ranks.size:
            notes.append(
                f"saved by {saved} rank(s), resumed on {ranks.size}: weights and optimizer are the same; ranks 0 to "
                f"{min(saved, ranks.size) - 1} go on with their random numbers, further ones with new ones"
            )
        if ranks.rank >= saved:
            _scatter(ranks.rank)
        return notes, outcomes

    def _put_back_gradients(self, gradients: Any, saved: int, ranks: Ranks) -> Restored:
        if saved != ranks.size or gradients is None:
            detail = f"saved in the middle of gradient accumulation by {saved} rank(s), resumed on {ranks.size}"
            return Restored(_GRADIENTS, "failed", detail)
        try:
            accumulation.restore_gradients(self.model, gradients)
        except (CheckpointError, RuntimeError) as error:
            return Restored(_GRADIENTS, "failed", str(error))
        return Restored(_GRADIENTS, "restored")

    def _settle_differences(self, report: RestoreReport) -> None:
        told = [*report.differences, *report.notes]
        if report.differences and self.config.on_difference == "raise":
            raise LoadError(
                f"{report.path}: {listing(list(report.differences))}; start with the same settings, or "
                "on_difference='warn' to go on"
            )
        if told and self.config.on_difference == "warn":
            warnings.warn(f"{report.path}: {listing(told)}", stacklevel=4)


def _zero(items: Iterable[Item]) -> list[Item]:
    return [item for item in items if item.kind == "optimizer" and zero_optimizer.is_zero(item.value)]


def _worst(answers: list[list[Restored]]) -> tuple[Restored, ...]:
    """One outcome for each item: the first rank's that is not a success, with the rank named."""
    merged: dict[str, Restored] = {}
    for rank, items in enumerate(answers):
        for item in items:
            known = merged.setdefault(item.name, item)
            if known.status == "restored" and item.status != "restored":
                merged[item.name] = replace(item, detail=f"on rank {rank}: {item.detail}")
    return tuple(merged.values())


def _names(allow: Iterable[str] | bool) -> frozenset[str]:
    return frozenset() if isinstance(allow, bool) else frozenset(allow)


def _scatter(rank: int) -> None:
    """New random numbers for a rank that was not there: from those it was lent, moved apart by its number."""
    import numpy as np
    import torch

    seed = (int(torch.randint(2**62, ()).item()) ^ (rank * 0x9E3779B97F4A7C15)) % 2**63
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
