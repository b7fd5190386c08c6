"""Background saves: the thread that writes a snapshot, and its errors.

The call plans the save, agrees on it with all ranks and begins to copy the tensors. A thread
carries out `run_save` from the copies, with a channel of its own for agreements. The thread moves
no tensors between ranks: each rank writes the elements it holds. In a bucket, where each file has
one writer, the call gathers the elements that the writer lacks.
"""

import atexit
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import count
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from ft_ckpt.config import SaverConfig, parse_size
from ft_ckpt.messages import warn
from ft_ckpt.model import load_conversion_table
from ft_ckpt.ranks import Ranks, current_ranks, try_action
from ft_ckpt.runs import AfterSave, TrainingRun, optimizers_among, run_items, yield_to_training
from ft_ckpt.saving.agree import agree_on_plan
from ft_ckpt.saving.execute import PreparedSave, run_save
from ft_ckpt.saving.plan import plan_save
from ft_ckpt.saving.report import SaveReport
from ft_ckpt.saving.request import SaveRequest
from ft_ckpt.saving.shared_folders import SharedFolders
from ft_ckpt.saving.snapshot import (
    Snapshot,
    SnapshotPlan,
    SnapshotSources,
    gather_for_writers,
    ids_changed_by_steps,
    plan_snapshot,
)
from ft_ckpt.saving.stage import StagedSave
from ft_ckpt.saving.write_plan import plan_writes
from ft_ckpt.schedule import History, after_commit

P = ParamSpec("P")
T = TypeVar("T")


def as_in_training(method: Callable[P, T]) -> Callable[P, T]:
    """Run the method outside of `torch.inference_mode`, so that training can modify the tensors it
    creates.
    """

    @wraps(method)
    def call_outside(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return call_outside


_LAG_SECONDS = 0.001  # lets the caller go on before the worker takes the GIL


class Worker:
    """Runs one job at a time, each in a new thread."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.future: Future[Any] | None = None  # of the last job, until its result is taken
        _OPEN.add(self)

    def start_job(self, job: Callable[[], Any]) -> "Future[Any]":
        """Start `job`. Call `take_result` for the previous job first."""
        future = self.future = Future()

        def run_job() -> None:
            time.sleep(_LAG_SECONDS)
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - raised by `take_result`
                future.set_exception(error)

        self.thread = threading.Thread(target=run_job, name="ft_ckpt-save")
        self.thread.start()
        return future

    def take_result(self) -> Any:
        """Wait for the job and return its result or raise its error, once; None without a job."""
        if self.future is None:
            return None
        wait([self.future])
        future, self.future = self.future, None
        return future.result()


_OPEN: WeakSet[Worker] = WeakSet()


def _join_workers() -> None:
    for worker in list(_OPEN):
        if worker.thread is not None:  # in a forked child it counts as ended
            worker.thread.join()


def _warn_of_unread_errors() -> None:
    for worker in list(_OPEN):
        if (
            worker.future is not None
            and worker.future.done()
            and (error := worker.future.exception()) is not None
        ):
            warn(
                "a background save failed, and the program ended without "
                f"reading its result: {error}",
                stacklevel=1,
            )


# Jobs may use thread pools, which take no more work once the interpreter shuts down, so jobs are
# joined before that.
getattr(threading, "_register_atexit", atexit.register)(_join_workers)
atexit.register(_warn_of_unread_errors)


_channels = count(1)  # channel ids; incremented in lockstep on all ranks


@dataclass(frozen=True, eq=False)
class PendingSave:
    """A background save to the folder `path`, which exists once the save is committed.

    It is done from the start if no thread could carry out the save: the call then returned after
    the commit.
    """

    path: Path | str
    """The folder of the checkpoint; its URL if it is in a bucket."""
    future: "Future[SaveReport]"
    """Resolves to the SaveReport."""

    @property
    def done(self) -> bool:
        """Whether the save has ended, with success or not."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait at most `timeout` seconds and return the report.

        Raises the error of the save, which the saver's next call raises as well; TimeoutError after
        `timeout`.
        """
        return self.future.result(timeout)


class SaveRunner:
    """Runs the saves of one saver: in the foreground, or one at a time in the background."""

    def __init__(self, run: TrainingRun) -> None:
        # before the save in flight, if that saves the state of the run
        self.before: History | None = None
        self._run = run
        self.snapshot = Snapshot()
        self._worker = Worker()
        self._channel = ""
        self._steps_in_flight = 0
        self._shared = SharedFolders()
        if run.config.background:
            load_conversion_table()

    def save(
        self, config: SaverConfig, make: Callable[[], SaveRequest], then: AfterSave
    ) -> SaveReport | PendingSave:
        """Carry out the request that `make` returns, in the background if `config` says so.

        Returns `then(report)`, or a handle that resolves to it. Collective; raises what `run_save`
        raises.
        """
        begun, ranks = time.monotonic(), current_ranks(config.enter_timeout_seconds)
        request, error = try_action(make)
        if config.background:
            return self._start_in_background(request, error, ranks, config, begun, then)
        return then(run_save(request, error, ranks, config, begun, None, self._shared))

    def _start_in_background(
        self,
        request: SaveRequest | None,
        error: BaseException | None,
        ranks: Ranks,
        config: SaverConfig,
        begun: float,
        then: AfterSave,
    ) -> PendingSave:
        """Start `request` in the background, or carry it out now if no snapshot of it can be taken.

        That is the case if the copies exceed their limit, if tensors must move between ranks while
        files are written, or if not all ranks see the target folder.
        """
        request, prepared, snapshot = self._agree_on_snapshot(request, error, ranks, config)
        self._steps_in_flight, self.snapshot.waited_seconds = 0, 0.0
        if snapshot is None or not self._shared.is_seen_by_all(request.target.beside, ranks):
            prepared = PreparedSave(prepared.plan)
            report = then(run_save(request, None, ranks, config, begun, prepared, self._shared))
            done = self._worker.future = Future()
            done.set_result(report)
            return PendingSave(report.path, done)
        _, error = try_action(lambda: self.snapshot.begin_copies(snapshot.now, snapshot.late))
        try:
            gathered = gather_for_writers(snapshot, ranks)
            self._channel = self._channel or f"background-{next(_channels)}"
            ranks = current_ranks(config.enter_timeout_seconds, self._channel)
            if snapshot.gathers:  # digests of earlier files need the elements of all ranks
                config = replace(config, reuse_frozen="off")

            def finish() -> SaveReport:
                copied, copy_error = try_action(self.snapshot.finish_copies)
                yield_to_training()  # after the copies: the optimizer waits for them
                sources = SnapshotSources({**(copied or {}), **gathered}, snapshot.gathered_keys)
                from_copies = replace(prepared, sources=sources)
                return then(
                    run_save(
                        request,
                        error or copy_error,
                        ranks,
                        config,
                        begun,
                        from_copies,
                        self._shared,
                    )
                )

            return PendingSave(request.target.location, self._worker.start_job(finish))
        except BaseException:
            self.snapshot.drop_copies()
            raise

    def _agree_on_snapshot(
        self,
        request: SaveRequest | None,
        error: BaseException | None,
        ranks: Ranks,
        config: SaverConfig,
    ) -> tuple[SaveRequest, PreparedSave, SnapshotPlan | None]:
        """The request with the replicas that differ, its plan, and its snapshot, or None if the
        save must run now.
        """
        prepared: PreparedSave | None = None
        snapshot: SnapshotPlan | None = None
        if request is not None:
            planned, error = try_action(partial(self._plan_snapshot, request, ranks, config))
            prepared, snapshot = planned or (None, None)
        staged = None if prepared is None else StagedSave(prepared.plan)
        max_bytes = math.inf if config.snapshot_bytes is None else parse_size(config.snapshot_bytes)
        fits = snapshot is not None and snapshot.size_bytes <= max_bytes
        agreed = agree_on_plan(
            "save() in the background", request, staged, error, ranks, config, fits=fits
        )
        assert prepared is not None, "the agreement has raised the error"
        if agreed.replicas_differ:
            return self._agree_on_snapshot(agreed.request, None, ranks, config)
        return agreed.request, prepared, snapshot if agreed.fits else None

    def _plan_snapshot(
        self, request: SaveRequest, ranks: Ranks, config: SaverConfig
    ) -> tuple[PreparedSave, SnapshotPlan | None]:
        """The plan and its snapshot; None if tensors move between ranks while files are written.

        The next step of the run's optimizers waits for the copies from here on.
        """
        steppers = {} if request.adapter_only else _hooked_optimizers(self._run)
        self.snapshot.watch_optimizers(steppers)
        plan = plan_save(request, ranks, config)
        if config.each_rank_writes == "auto":  # the thread cannot gather what other ranks hold
            config = replace(config, each_rank_writes="on")
        has_state_dict = request.state_dict is not None
        writes = plan_writes(plan, request.target, config, ranks.size, state_dict=has_state_dict)
        prepared = PreparedSave(plan, writes)
        gathers = ranks.size > 1 and not request.target.is_local
        if has_state_dict if gathers else writes.moves_tensors:
            return prepared, None
        owned = frozenset[int]() if has_state_dict else ids_changed_by_steps(steppers)
        return prepared, plan_snapshot(writes, ranks, owned, gathers=gathers)

    def wait_for_save(self) -> SaveReport | None:
        """Wait for the save in flight and return its report or raise its error; None when there is
        none.
        """
        before, self.before = self.before, None
        report, error = try_action(self._worker.take_result)
        if before is not None and error is not None:
            self._run.history = replace(self._run.history, best=before.best, saves=before.saves)
        elif before is not None:
            waited = self.snapshot.waited_seconds
            self._run.history = after_commit(
                self._run.history, report.seconds, report.bytes, waited
            )
        if error is not None:
            raise error
        return report  # type: ignore[no-any-return]  # `try_action` takes any function

    def has_ended(self, ranks: Ranks) -> bool:
        """Whether the save in flight has ended on all ranks; called at every step, on all ranks.

        Ranks exchange it at steps 1, 2, 4, ... after the start of the save, then at every 64th.
        """
        future = self._worker.future
        if future is None or ranks.size == 1:
            return future is not None and future.done()
        self._steps_in_flight += 1
        is_power_of_two = self._steps_in_flight.bit_count() == 1
        if not is_power_of_two and self._steps_in_flight % 64:
            return False
        ended = {"ended": future.done()}
        return bool(
            ranks.agree(
                "saver.step()", ended, decide=lambda values: all(v["ended"] for v in values)
            ).result
        )

    def close(self) -> None:
        """Wait for the save in flight, unhook the optimizers and free the memory."""
        try:
            self.wait_for_save()
        finally:
            self.snapshot.close()


def _hooked_optimizers(run: TrainingRun) -> dict[torch.optim.Optimizer, list[Tensor]]:
    """The optimizers that call a hook before they step, each with the further tensors that its
    steps change.
    """
    items = optimizers_among(run_items(run.accelerator, run.registered))
    optimizers = [kind.hooked_optimizer(optimizer) for _, kind, optimizer in items]
    return {
        optimizer: further
        for optimizer, further in optimizers
        if isinstance(optimizer, torch.optim.Optimizer)
        and getattr(type(optimizer).step, "hooked", False)
    }
