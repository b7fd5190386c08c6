"""Runs the saves of one saver, in the foreground or in a background thread.

A background save has two halves. The call plans the save, compares the plans of all ranks, and
begins to copy the tensors into host memory: this is the snapshot. Then a thread writes the copies
by `run_save`, while training goes on.

The thread must not disturb the collectives of training, so it moves no tensors between ranks. Each
rank writes the elements that it holds. If each file has one writer, as in a bucket, the call
gathers the elements that the writer does not hold. The ranks still exchange outcomes in the thread,
through the key-value store. These messages have a channel of their own, which separates them from
those of the training thread.
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
# Optimizers that call a hook before they step, with the tensors that their steps change in addition
# to their parameters and state.
Steppers = Mapping[torch.optim.Optimizer, Sequence[Tensor]]
# A function of two arguments: the report, or None after an error, and the seconds that optimizers
# have waited for copies.
OnEnd = Callable[[SaveReport | None, float], object]

# The thread sleeps this long at its start, so that the caller goes on before it takes the GIL.
_LAG_SECONDS = 0.001
# The ranks exchange at least every so many training steps whether a save has ended.
_MAX_STEPS_BETWEEN_CHECKS = 64
# Numbers of channels. Saves are collective, so all ranks take the same number for a saver.
_channels = count(1)


def as_in_training(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method to run outside of `torch.inference_mode`.

    Training could not modify tensors that the method creates in this mode.
    """

    @wraps(method)
    def call_outside(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return call_outside


class SaveRunner:
    """Runs the saves of one saver: in the foreground, or one at a time in the background.

    Attributes:
        on_end: Called once by `wait_for_save` for the save in flight.
        snapshot: The copies of the save in flight.
        queue: The thread of background saves.
        future: The last background save, until it is waited for.
    """

    def __init__(self, steppers: Callable[[], Steppers], *, background: bool = False) -> None:
        """Prepare for saves.

        `steppers` returns the optimizers whose steps wait for the copies of a background save.
        `background` says whether background saves are expected, so that the first one is as fast as
        the others.
        """
        self.on_end: OnEnd | None = None
        self.snapshot = Snapshot()
        self.queue = JobQueue()
        self.future: Future[SaveReport] | None = None
        self._steppers = steppers
        self._channel = ""
        self._steps_in_flight = 0
        self._shared_folders = SharedFolders()
        _runners.add(self)
        if background:
            load_conversion_table()

    def save(
        self, make_request: Callable[[], SaveRequest], config: SaverConfig
    ) -> SaveReport | PendingSave:
        """Carry out the save that `make_request` requests.

        Returns the report. With `config.background`, returns a handle that resolves to the report.
        An error of `make_request` is raised on all ranks. Collective: call it on every rank. Raises
        what `run_save` raises.
        """
        ranks = current_ranks(config.enter_timeout_seconds)
        context = SaveContext(ranks, config, shared_folders=self._shared_folders)
        if config.background:
            return self._start_in_background(make_request, context)
        return run_save(Attempt(make_request), context)

    def _start_in_background(
        self, make_request: Callable[[], SaveRequest], context: SaveContext
    ) -> PendingSave:
        """Start a save in the background, or run it in the foreground if it cannot be.

        A save runs in the foreground in three cases: its copies exceed `snapshot_bytes`; tensors
        must move between ranks while files are written; or rank 0 must write everything, because
        some ranks do not see the target folder or it is a mounted bucket.
        """
        attempt, snapshot = self._plan_and_agree(make_request, context)
        ranks = context.ranks
        request = attempt.make_request()
        folder = request.target.beside
        mode = Mode.MAIN
        if snapshot is not None:
            planned_mode = self._shared_folders.last_mode(folder)
            mode = self._shared_folders.sharing_of(folder, ranks).mode
            # The first plan for a folder expects the mode of most folders.
            if mode not in (planned_mode, Mode.MAIN):
                attempt, snapshot = self._plan_and_agree(lambda: request, context)

        self._steps_in_flight = 0
        self.snapshot.waited_seconds = 0.0
        if snapshot is None or mode is Mode.MAIN:
            report = run_save(replace(attempt, writes=None), context)
            self.future = Future()
            self.future.set_result(report)
            return PendingSave(path=report.path, future=self.future)

        # An error of the first copies is kept for the thread, which raises it on all ranks. If it
        # were raised here, the other ranks would wait for this one.
        copy_outcome = Outcome()
        with copy_outcome.deferring_error():
            self.snapshot.begin_copies(snapshot.now, snapshot.late)
        try:
            copies = gather_for_writers(snapshot, ranks)
            # `_complete_copies` is the first step of the thread. It adds the late copies to
            # `copies` before the thread reads any.
            from_copies = replace(
                attempt,
                make_request=partial(self._complete_copies, request, copies, copy_outcome),
                sources=SnapshotSources(copies, snapshot.gathered_keys),
            )
            thread_context = self._context_of_thread(context, snapshot)
            save = partial(_save_after_lag, from_copies, thread_context)
            self.future = self.queue.start("ft_ckpt-save", save)
            return PendingSave(path=request.target.location, future=self.future)
        except BaseException:
            self.snapshot.drop_copies()
            raise

    def _context_of_thread(self, context: SaveContext, snapshot: SnapshotPlan) -> SaveContext:
        """Return the context of the thread, whose ranks use the channel of this runner."""
        config = context.config
        if not self._channel:
            self._channel = f"background-{next(_channels)}"
        ranks = current_ranks(config.enter_timeout_seconds, self._channel)
        if snapshot.gathers:
            # The digest of an earlier file needs the elements of all ranks, which the thread does
            # not have.
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
            # From here on the thread has a low priority. The copies had none, because the next step
            # of the optimizer waits for them.
            yield_to_training()
        copy_outcome.raise_error()
        return request

    def _plan_and_agree(
        self, make_request: Callable[[], SaveRequest], context: SaveContext
    ) -> tuple[Attempt, SnapshotPlan | None]:
        """Plan the save and its snapshot, and compare the plans of all ranks.

        Returns the attempt with this plan, and the snapshot, which is None if the save must run in
        the foreground. Collective: call it on every rank.
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
        if not agreed.fits:
            snapshot = None
        return attempt, snapshot

    def _plan_snapshot(
        self, request: SaveRequest, context: SaveContext
    ) -> tuple[Attempt, SnapshotPlan | None]:
        """Plan the save and its snapshot on this rank.

        The optimizers of the run get a hook: once copies have begun, the next step waits for them.
        The snapshot is None if tensors must move between ranks while files are written.
        """
        ranks, config = context.ranks, context.config
        steppers = {} if request.adapter_only else self._steppers()
        self.snapshot.watch_optimizers(steppers)
        plan: SavePlan = plan_save(request, ranks, config)
        if config.each_rank_writes == "auto":
            # Each rank writes its own elements, even of a small checkpoint: the thread cannot
            # gather them on rank 0.
            config = replace(config, each_rank_writes="on")

        has_state_dict = request.state_dict is not None
        mode = self._shared_folders.last_mode(request.target.beside)
        writes = plan_writes(plan, config, ranks.size, has_state_dict).limited_to(mode)
        attempt = Attempt(lambda: request, plan, writes)
        call_gathers = ranks.size > 1 and mode is Mode.SPREAD
        if call_gathers:
            # A state dict is on rank 0 alone, so the call cannot gather its tensors on writers.
            if has_state_dict:
                return attempt, None
        elif writes.moves_tensors:
            return attempt, None

        changed = frozenset[int]() if has_state_dict else ids_changed_by_steps(steppers)
        return attempt, plan_snapshot(writes, ranks, changed, gathers=call_gathers)

    def wait_for_save(self) -> SaveReport | None:
        """Wait for the save in flight and return its report, or raise its error.

        Return None if no save is in flight.
        """
        if self.future is not None:
            # An interrupt ends this wait, but not the save, which stays in flight.
            wait([self.future])

        future = self.future
        self.future = None
        on_end = self.on_end
        self.on_end = None
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
        at steps 1, 2, 4, ... after the start of the save, then at every 64th step. At the other
        steps the result is False.
        """
        if self.future is None:
            return False
        has_ended = self.future.done()
        if ranks.size == 1:
            return has_ended
        self._steps_in_flight += 1
        is_power_of_two = self._steps_in_flight.bit_count() == 1
        is_multiple = self._steps_in_flight % _MAX_STEPS_BETWEEN_CHECKS == 0
        if not (is_power_of_two or is_multiple):
            return False
        agreed = ranks.agree(
            "saver.step()",
            {"ended": has_ended},
            decide=lambda values: all(value["ended"] for value in values),
        )
        return bool(agreed.result)

    def close(self) -> None:
        """Wait for the save in flight, remove the hooks of optimizers and free the memory."""
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
