"""Saves that are finished while training goes on: which ones can be, their snapshot, and what becomes of them.

The ranks meet in the foreground, where all is chosen and what must be is copied. The rest of the way, from the files
laid out to the commit, is that of any save, from the copies, in a thread; its agreements have keys of their own in the
store, and no collective runs in it: what ranks hold is written by each of them. In a bucket, where each file has one
writer, what that does not hold comes to it in the foreground.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from ft_ckpt.config import SaverConfig
from ft_ckpt.distributed.agreement import Values
from ft_ckpt.distributed.gather import gather_tensors
from ft_ckpt.distributed.ranks import Ranks, current_ranks, try_action
from ft_ckpt.model.conversion import load_conversion_table
from ft_ckpt.saving import replicas
from ft_ckpt.saving.copy_plan import CopyPlan, plan_copies, with_copies
from ft_ckpt.saving.execute import SaveReport, accept_differences, compares_replicas, run_save
from ft_ckpt.saving.follow_up import AfterSave
from ft_ckpt.saving.move_tensors import SharedFolders
from ft_ckpt.saving.plan import SavePlan, plan_save
from ft_ckpt.saving.priority import yield_to_training
from ft_ckpt.saving.request import SaveRequest
from ft_ckpt.saving.snapshot import Snapshot, ids_changed_by_steps
from ft_ckpt.saving.worker import Worker
from ft_ckpt.schedule import History, after_commit
from ft_ckpt.training.items import optimizers_among, run_items
from ft_ckpt.training.run import TrainingRun

_channels = count(1)  # alike on all ranks: one is taken where all of them are


@dataclass(frozen=True, eq=False)
class PendingSave:
    """A save in the background, to the folder `path`, which exists once it is done.

    That may be at once: what could not be left to a thread was done before the call returned.
    """

    path: Path | str
    """The folder that the save makes; its URL where it is in a bucket."""
    future: "Future[SaveReport]"
    """What the save comes to."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait for it, at most `timeout` seconds, and give its report.

        Raises what the save would have raised, which the saver's next call raises as well; TimeoutError when time is
        up.
        """
        return self.future.result(timeout)


class BackgroundSaver:
    """The saves in the background of one saver, one in flight."""

    def __init__(self, of: TrainingRun) -> None:
        self.before: History | None = None  # the run's before the save in flight, if that is one of its states
        self._of = of
        self.snapshot = Snapshot()
        self._worker = Worker()
        self._channel = ""
        self._looks = 0
        self._shared = SharedFolders()
        if of.config.background:
            load_conversion_table()

    def save(self, config: SaverConfig, make: Callable[[], SaveRequest], then: AfterSave) -> SaveReport | PendingSave:
        """Carry out what `make` gives, in the background if `config` says so.

        The answer is what `then` makes of its report. Collective; raises what `saving.run` does.
        """
        begun, ranks = time.monotonic(), current_ranks(config.enter_timeout_seconds)
        request, error = try_action(make)
        if config.background:
            return self._start_in_background(request, error, ranks, config, begun, then)
        plan: SavePlan | None = None
        if request is not None:
            plan, error = ranks.attempt(partial(plan_save, request, ranks, config))
        return self._save_now(request, error, ranks, config, begun, plan, then)

    def _start_in_background(
        self,
        request: SaveRequest | None,
        error: BaseException | None,
        ranks: Ranks,
        config: SaverConfig,
        begun: float,
        then: AfterSave,
    ) -> PendingSave:
        """Begin `request` in the background; or carry it out now, where no snapshot of it can be taken.

        It would be larger than it may, or tensors must come together from several ranks.
        """
        request, plan, copies = self._agree_on_snapshot(request, error, ranks, config)
        self._looks = 0
        if copies is None or not self._shared.is_seen_by_all(request.target.beside, ranks):
            report = self._save_now(request, None, ranks, config, begun, plan, then)
            return PendingSave(report.path, self._worker.finish_at_once(report))
        _, error = try_action(lambda: self.snapshot.begin_copies(copies.now, copies.late))
        try:
            gathered = self._gather_now(copies, ranks, config)
            self._channel = self._channel or f"background-{next(_channels)}"
            ranks = current_ranks(config.enter_timeout_seconds, self._channel)
            if config.each_rank_writes == "auto":
                config = replace(config, each_rank_writes="on")
            if copies.gathers:  # no rank could make the digests of earlier files, which one alone writes now
                config = replace(config, reuse_frozen="off")

            def finish() -> SaveReport:
                held, trouble = try_action(self.snapshot.finish_copies)
                yield_to_training(low_io=config.io_priority == "low")  # after the copies: the optimizer waits for them
                copied = with_copies(plan, {**(held or {}), **gathered}, copies)
                return self._save_now(request, error or trouble, ranks, config, begun, copied, then)

            return PendingSave(request.target.location, self._worker.start_job(finish))
        except BaseException:
            self.snapshot.drop_copies()
            raise

    def _gather_now(self, copies: CopyPlan, ranks: Ranks, config: SaverConfig) -> dict[int, Tensor]:
        """The tensors of files with one writer each: whole, by key, on the rank that writes them. Collective."""
        gathered: dict[int, Tensor] = {}
        if copies.gathers:

            def gather_all() -> None:
                for to, sources in copies.gathers:
                    named = [replace(one, name=str(one.key)) for one in sources]  # two models may share a name
                    found = gather_tensors(named, ranks, config.bucket_bytes, to)
                    gathered.update({int(key): tensor for key, tensor in found.items()})

            _, error = ranks.attempt(gather_all)
            ranks.agree("the copies of save()", error=error)
        return gathered

    def _agree_on_snapshot(
        self, request: SaveRequest | None, error: BaseException | None, ranks: Ranks, config: SaverConfig
    ) -> tuple[SaveRequest, SavePlan, CopyPlan | None]:
        """The request with the replicas that differ, its plan, and the copies; None where it must be finished now."""
        plan: SavePlan | None = None
        copies: CopyPlan | None = None
        digests: dict[str, replicas.ReplicaDigest] = {}
        if request is not None:
            made, error = try_action(partial(self._plan_snapshot, request, ranks, config))
            plan, copies = made or (None, None)
        compares = plan is not None and compares_replicas(request, ranks)
        if plan is not None and compares:
            held = replicas.replicated_tensors(plan.plans)
            some, error = try_action(partial(replicas.digest_replicas, held, ranks.rank))
            digests = some or {}
        can, target = copies is not None and copies.can_wait(config), str(request.target) if request else ""
        facts = {"path": target, "can_wait": can, "replicas": replicas.digests_by_place(digests)}
        terms = ranks.agree("save() in the background", facts, error, same=("path",), decide=_terms_of_snapshot).told
        assert request is not None, "the agreement has raised the error"
        assert plan is not None, "the agreement has raised the error"
        if compares:
            apart = {} if terms["replicas_alike"] else replicas.differing_replicas(digests, ranks)
            request = accept_differences(request, apart, ranks, config)
            if apart:  # to be laid out anew
                return self._agree_on_snapshot(request, None, ranks, config)
        return request, plan, copies if terms["can_wait"] else None

    def _plan_snapshot(self, request: SaveRequest, ranks: Ranks, config: SaverConfig) -> tuple[SavePlan, CopyPlan]:
        """The plan and its copies; the optimizers that copies may wait for are watched from here on."""
        steppers = {} if request.adapter_only else _hooked_optimizers(self._of)
        self.snapshot.watch_optimizers(steppers)
        plan = plan_save(request, ranks, config)
        return plan, plan_copies(plan, request, ranks, config, ids_changed_by_steps(steppers))

    def _save_now(
        self,
        request: SaveRequest | None,
        error: BaseException | None,
        ranks: Ranks,
        config: SaverConfig,
        begun: float,
        plan: SavePlan | None,
        then: AfterSave,
    ) -> SaveReport:
        report = run_save(None if error else request, error, ranks, config, begun, plan, self._shared)
        return then(report)

    def wait_for_save(self) -> SaveReport | None:
        """Wait for the save in flight and give its report, or raise what it raised; None when there is none."""
        before, self.before = self.before, None
        report, error = try_action(self._worker.take_result)
        if before is not None and error is not None:
            self._of.history = replace(self._of.history, best=before.best, saves=before.saves)
        elif before is not None:
            self._of.history = after_commit(self._of.history, report.seconds, report.bytes)
        if error is not None:
            raise error
        return report  # type: ignore[no-any-return]  # of `attempt`, which takes anything

    def has_ended(self, ranks: Ranks) -> bool:
        """Whether the save in flight has ended on all ranks, as they all know; asked at every step, by all ranks.

        They meet for it at the first step after it began, the second, the fourth, and so on, and then every 64th.
        """
        if not self._worker.is_owing or ranks.size == 1:
            return self._worker.is_owing and self._worker.is_done
        self._looks += 1
        if self._looks % 64 and self._looks & (self._looks - 1):
            return False
        ended = {"ended": self._worker.is_done}
        return bool(ranks.agree("saver.step()", ended, decide=lambda values: all(v["ended"] for v in values)).told)

    def close(self) -> None:
        """Settle, and give the optimizers and the memory back."""
        try:
            self.wait_for_save()
        finally:
            self.snapshot.close()


def _terms_of_snapshot(facts: Values) -> dict[str, bool]:
    alike = replicas.are_alike(one["replicas"] for one in facts)
    return {"can_wait": all(one["can_wait"] for one in facts), "replicas_alike": alike}


def _hooked_optimizers(of: TrainingRun) -> dict[torch.optim.Optimizer, list[Tensor]]:
    """The optimizers that say when they are about to step, and what their steps change beside their own tensors."""
    known = optimizers_among(run_items(of.accelerator, of.registered))
    found = [kind.hooked_optimizer(optimizer) for _, kind, optimizer in known]
    return {
        one: further
        for one, further in found
        if isinstance(one, torch.optim.Optimizer) and getattr(type(one).step, "hooked", False)
    }
