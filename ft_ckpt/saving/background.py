"""Background saves: the thread that writes a snapshot, and its errors.

The call plans the save, agrees on it with all ranks and begins to copy the tensors. Then a thread
runs `run_save` from the copies; its agreements use a channel that no other save uses. The thread
moves no tensors between ranks: each rank writes the elements that it holds. Where each file has one
writer, as in a bucket, the call gathers the elements that the writer lacks.
"""

import atexit
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial, wraps
from itertools import count
from typing import ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from ft_ckpt.config import SaverConfig
from ft_ckpt.jobs import JobQueue, yield_to_training
from ft_ckpt.messages import warn
from ft_ckpt.model.tensors import load_conversion_table
from ft_ckpt.ranks import Outcome, Ranks, current_ranks
from ft_ckpt.saving.agree import agree_on_plan
from ft_ckpt.saving.context import SaveContext
from ft_ckpt.saving.execute import Attempt, run_save
from ft_ckpt.saving.folder_sharing import SharedFolders
from ft_ckpt.saving.planning import (
    Mode,
    PendingSave,
    SavePlan,
    SaveReport,
    SaveRequest,
    plan_save,
    plan_writes,
)
from ft_ckpt.saving.snapshot import (
    Snapshot,
    SnapshotPlan,
    SnapshotSources,
    gather_for_writers,
    ids_changed_by_steps,
    plan_snapshot,
)
from ft_ckpt.saving.stage import StagedSave
from ft_ckpt.values import parse_size

P = ParamSpec("P")
T = TypeVar("T")
# Optimizers that call a hook before they step -> the further tensors that their steps change
Steppers = Mapping[torch.optim.Optimizer, Sequence[Tensor]]
# called with the report, or None after an error, and the seconds that optimizers waited for copies
OnEnd = Callable[[SaveReport | None, float], object]

_LAG_SECONDS = 0.001  # lets the caller go on before the thread takes the GIL
_MAX_STEPS_BETWEEN_CHECKS = 64  # training steps between exchanges of whether a save has ended
_channels = count(1)  # channel ids; incremented in lockstep on all ranks


def as_in_training(method: Callable[P, T]) -> Callable[P, T]:
    """Run the method outside of `torch.inference_mode`.

    Training can modify the tensors that the method creates.
    """

    @wraps(method)
    def call_outside(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return call_outside


class SaveRunner:
    """Run the saves of one saver: in the foreground, or one at a time in the background.

    `steppers` returns the optimizers whose steps wait for the copies of a background save.
    """

    def __init__(self, steppers: Callable[[], Steppers], *, background: bool = False) -> None:
        self.on_end: OnEnd | None = None  # of the save in flight, called once by `wait_for_save`
        self.snapshot = Snapshot()
        self.queue = JobQueue()
        self.future: Future[SaveReport] | None = None  # of the last save, until it is waited for
        self._steppers = steppers
        self._channel = ""
        self._steps_in_flight = 0
        self._shared = SharedFolders()
        _runners.add(self)
        if background:
            load_conversion_table()

    def save(
        self, make_request: Callable[[], SaveRequest], config: SaverConfig
    ) -> SaveReport | PendingSave:
        """Carry out a request, in the background if `config.background`.

        Returns the report, or in the background a handle that resolves to it. An error of
        `make_request` is raised on all ranks. Collective: call it on every rank. Raises what
        `run_save` raises.
        """
        ranks = current_ranks(config.enter_timeout_seconds)
        context = SaveContext(ranks, config, shared=self._shared)
        if config.background:
            return self._start_in_background(make_request, context)
        return run_save(Attempt(make_request), context)

    def _start_in_background(
        self, make_request: Callable[[], SaveRequest], context: SaveContext
    ) -> PendingSave:
        """Start a save in the background, or run it in the foreground if it needs that.

        A save runs in the foreground if its copies exceed `snapshot_bytes`, if tensors must move
        between ranks while files are written, or if rank 0 must write everything: some ranks do not
        see the target folder, or it is a mounted bucket.
        """
        attempt, snapshot = self._plan_and_agree(make_request, context)
        request, ranks = attempt.make_request(), context.ranks
        folder, mode = request.target.beside, Mode.MAIN
        if snapshot is not None:
            planned_mode = self._shared.last_mode(folder)
            mode = self._shared.sharing_of(folder, ranks).mode
            if mode not in (planned_mode, Mode.MAIN):
                attempt, snapshot = self._plan_and_agree(lambda: request, context)
        self._steps_in_flight, self.snapshot.waited_seconds = 0, 0.0
        if snapshot is None or mode is Mode.MAIN:
            report = run_save(replace(attempt, writes=None), context)
            self.future = Future()
            self.future.set_result(report)
            return PendingSave(path=report.path, future=self.future)
        # An error of the first copies is kept for the thread, in which all ranks agree on errors:
        # raised here, it would leave the other ranks waiting.
        copy_outcome = Outcome()
        with copy_outcome.deferring_error():
            self.snapshot.begin_copies(snapshot.now, snapshot.late)
        try:
            copies = gather_for_writers(snapshot, ranks)
            # the first step of the thread completes `copies`; it reads from them afterwards
            from_copies = replace(
                attempt,
                make_request=partial(self._complete_copies, request, copies, copy_outcome),
                sources=SnapshotSources(copies, snapshot.gathered_keys),
            )
            in_thread = self._context_of_thread(context, snapshot)
            save = partial(_save_after_lag, from_copies, in_thread)
            self.future = self.queue.start("ft_ckpt-save", save)
            return PendingSave(path=request.target.location, future=self.future)
        except BaseException:
            self.snapshot.drop_copies()
            raise

    def _context_of_thread(self, context: SaveContext, snapshot: SnapshotPlan) -> SaveContext:
        """Return the context of the thread, with the channel for its agreements."""
        config = context.config
        self._channel = self._channel or f"background-{next(_channels)}"
        ranks = current_ranks(config.enter_timeout_seconds, self._channel)
        if snapshot.gathers:  # digests of earlier files need the elements of all ranks
            config = replace(config, reuse_frozen="off")
        return replace(context, ranks=ranks, config=config)

    def _complete_copies(
        self, request: SaveRequest, copies: dict[int, Tensor], copy_outcome: Outcome
    ) -> SaveRequest:
        """Finish the copies of the snapshot in the thread, then return the request.

        Raises the error of `copy_outcome`, or of the copies.
        """
        try:
            copies.update(self.snapshot.finish_copies())
        finally:
            yield_to_training()  # after the copies, because the optimizer waits for them
        copy_outcome.raise_error()
        return request

    def _plan_and_agree(
        self, make_request: Callable[[], SaveRequest], context: SaveContext
    ) -> tuple[Attempt, SnapshotPlan | None]:
        """Plan the save and its snapshot, and agree on both with all ranks.

        The snapshot is None if the save must run in the foreground.
        """
        attempt = Attempt(make_request)
        snapshot: SnapshotPlan | None = None
        with context.ranks.deferring_error() as planning:
            attempt, snapshot = self._plan_snapshot(make_request(), context)
        limit = context.config.snapshot_bytes
        max_bytes = math.inf if limit is None else parse_size(limit)
        agreed = agree_on_plan(
            "save() in the background",
            attempt.plan,
            StagedSave(),
            planning.error,
            context,
            fits=snapshot is not None and snapshot.size_bytes <= max_bytes,
        )
        request = agreed.plan.request
        if agreed.replicas_differ:
            return self._plan_and_agree(lambda: request, context)
        attempt = replace(attempt, make_request=lambda: request, plan=agreed.plan)
        return attempt, snapshot if agreed.fits else None

    def _plan_snapshot(
        self, request: SaveRequest, context: SaveContext
    ) -> tuple[Attempt, SnapshotPlan | None]:
        """Plan the save and its snapshot on this rank.

        Once copies begin, the next step of the run's optimizers waits for them. The snapshot is
        None if tensors must move between ranks while files are written.
        """
        ranks, config = context.ranks, context.config
        steppers = {} if request.adapter_only else self._steppers()
        self.snapshot.watch_optimizers(steppers)
        plan: SavePlan = plan_save(request, ranks, config)
        if config.each_rank_writes == "auto":  # the thread cannot gather from other ranks
            config = replace(config, each_rank_writes="on")
        has_state_dict = request.state_dict is not None
        mode = self._shared.last_mode(request.target.beside)
        writes = plan_writes(plan, config, ranks.size, has_state_dict).limited_to(mode)
        attempt = Attempt(lambda: request, plan, writes)
        gathers = ranks.size > 1 and mode is Mode.SPREAD
        if gathers:
            # the call gathers the live tensors of all ranks, but rank 0 alone has a state dict
            if has_state_dict:
                return attempt, None
        elif writes.moves_tensors:  # while files are written, when the thread moves no tensors
            return attempt, None
        changed = frozenset[int]() if has_state_dict else ids_changed_by_steps(steppers)
        return attempt, plan_snapshot(writes, ranks, changed, gathers=gathers)

    def wait_for_save(self) -> SaveReport | None:
        """Wait for the save in flight and return its report, or raise its error.

        Return None if no save is in flight.
        """
        if self.future is not None:
            wait([self.future])  # if this is interrupted, the save stays in flight
        future, self.future = self.future, None
        on_end, self.on_end = self.on_end, None
        report: SaveReport | None = None
        try:
            if future is not None:
                report = future.result()
            return report
        finally:
            if on_end is not None:
                on_end(report, self.snapshot.waited_seconds)

    def has_ended(self, ranks: Ranks) -> bool:
        """Check whether the save in flight has ended on all ranks.

        Collective: call it on every rank, at every training step. The ranks exchange their answers
        at steps 1, 2, 4, ... after the start of the save, then at every 64th step.
        """
        if self.future is None:
            return False
        has_ended = self.future.done()
        if ranks.size == 1:
            return has_ended
        self._steps_in_flight += 1
        is_power_of_two = self._steps_in_flight.bit_count() == 1
        if not is_power_of_two and self._steps_in_flight % _MAX_STEPS_BETWEEN_CHECKS:
            return False
        agreed = ranks.agree(
            "saver.step()",
            {"ended": has_ended},
            decide=lambda values: all(value["ended"] for value in values),
        )
        return bool(agreed.result)

    def close(self) -> None:
        """Wait for the save in flight, unhook the optimizers and free the memory."""
        try:
            self.wait_for_save()
        finally:
            self.snapshot.close()


def _save_after_lag(attempt: Attempt, context: SaveContext) -> SaveReport:
    time.sleep(_LAG_SECONDS)
    return run_save(attempt, context)


_runners: WeakSet[SaveRunner] = WeakSet()


@atexit.register
def _warn_of_unread_errors() -> None:
    for runner in list(_runners):
        if runner.future is None or not runner.future.done():
            continue
        error = runner.future.exception()
        if error is not None:
            warn(
                "a background save failed, and the program ended without "
                f"reading its result: {error}",
            )
