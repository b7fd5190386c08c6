"""Background saves: their snapshot, the thread that writes it, and their errors.

The call plans the save, agrees on it with all ranks and begins to copy the tensors. A thread carries out `run_save`
from the copies, with a channel of its own for agreements. The thread moves no tensors between ranks: each rank writes
the elements it holds. In a bucket, where each file has one writer, the call gathers the elements that the writer lacks.
"""

import atexit
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial, wraps
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from ft_ckpt.config import SaverConfig, parse_size
from ft_ckpt.devices import Moment, copy_to_host, is_accelerator, pinned_memory, record_moment
from ft_ckpt.distributed.gather import gather_tensors, moves_to
from ft_ckpt.distributed.ranks import Ranks, current_ranks, try_action
from ft_ckpt.distributed.sharding import ReplicatedSharding
from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.wrappers import optimizer_parameter
from ft_ckpt.formats.registry import format_named
from ft_ckpt.messages import warn
from ft_ckpt.model.conversion import load_conversion_table
from ft_ckpt.model.entries import Entry, Group
from ft_ckpt.saving import files
from ft_ckpt.saving.execute import SaveReport, agree_on_plan, run_save
from ft_ckpt.saving.follow_up import AfterSave, yield_to_training
from ft_ckpt.saving.plan import SavePlan, SaveRequest, plan_save
from ft_ckpt.saving.write import SharedFolders, StagedSave
from ft_ckpt.schedule import History, after_commit
from ft_ckpt.storage.digests import chunk_of_rank
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.training.items import optimizers_among, run_items
from ft_ckpt.training.run import TrainingRun

P = ParamSpec("P")
T = TypeVar("T")
_ALIGNMENT = 64
_IN_PLACE = ("plain", "fsdp1", "fsdp2", "zero3", "zero")  # engines whose tensors only the optimizer step changes
Copies = Mapping[int, Tensor]  # by the keys of the live tensors


def as_in_training(method: Callable[P, T]) -> Callable[P, T]:
    """Run the method outside of `torch.inference_mode`, so that training can modify the tensors it creates."""

    @wraps(method)
    def call_outside(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return call_outside


class Snapshot:
    """The host copies of the tensors at one moment; one snapshot at a time."""

    def __init__(self) -> None:
        self.waited_seconds = 0.0  # of optimizers, for the copies of the current save
        self._now, self._late = _CopyMemory(), _CopyMemory()
        self._copied: Copies = {}
        self._left: Copies = {}
        self._ready: dict[torch.device, Moment] = {}  # after which the tensors of an accelerator may be read
        self._done = Event()
        self._done.set()
        self._hooks: dict[int, tuple[Any, Any]] = {}  # by id: (optimizer, which keeps the id unique; handle)

    def watch_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Make the next step of each optimizer wait for the copies."""
        for optimizer in optimizers:
            if id(optimizer) not in self._hooks:
                self._hooks[id(optimizer)] = (optimizer, optimizer.register_step_pre_hook(self._wait_for_copies))

    def begin_copies(self, now: Copies, late: Copies) -> None:
        """Copy `now`; `finish_copies` copies `late`, and the next step of watched optimizers waits for it."""
        self._copied = _copy_by_device(self._now, now, {})
        self._left = late
        devices = {tensor.device for tensor in late.values()}
        self._ready = {device: record_moment(device) for device in devices if is_accelerator(device)}
        self._done.clear()

    def finish_copies(self) -> Copies:
        """Copy the rest, in any thread, and return all copies by key. Then optimizers may step, even on an error."""
        try:
            return {**self._copied, **_copy_by_device(self._late, self._left, self._ready)}
        finally:
            self.drop_copies()

    def drop_copies(self) -> None:
        """Let optimizers step without `finish_copies`."""
        self._copied, self._left = {}, {}
        self._done.set()

    def close(self) -> None:
        """Remove the hooks and free the memory."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._now, self._late = _CopyMemory(), _CopyMemory()

    def _wait_for_copies(self, *_: Any) -> None:
        if not self._done.is_set():
            begun = time.monotonic()
            self._done.wait()
            self.waited_seconds += time.monotonic() - begun


def ids_changed_by_steps(optimizers: Mapping[Any, Iterable[Tensor]]) -> frozenset[int]:
    """The ids of all tensors that steps change: each optimizer's parameters, state and values in `optimizers`."""
    owned: set[int] = set()
    for optimizer, further in optimizers.items():
        owned.update(map(id, further))
        owned.update(id(p) for group in optimizer.param_groups for p in group["params"])
        states = [state for key, state in optimizer.state.items() if isinstance(key, Tensor)]
        owned.update(id(value) for state in states for value in state.values() if isinstance(value, Tensor))
    return frozenset(owned)


def copies_size(tensors: Iterable[Tensor]) -> int:
    """Bytes of host memory that copies of `tensors` take."""
    return sum(_aligned_size(tensor.nbytes) for tensor in tensors)


class _CopyMemory:
    """Reused memory of the size of the largest snapshot; pinned where an accelerator copies into it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever the script's default device
        self._shapes: list[Any] = []
        self._places: list[Tensor] = []

    def places_for(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Memory for a copy of each tensor."""
        tensors = list(tensors)
        shapes: list[Any] = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if shapes == self._shapes:  # as in most saves of a run
            return self._places
        needed = copies_size(tensors)
        if self._memory.numel() < needed:
            self._memory, self._places = self._memory.new_empty(0), []  # freed first
            device = next((tensor.device for tensor in tensors if is_accelerator(tensor.device)), None)
            self._memory = pinned_memory(needed, device) if device else self._memory.new_empty(needed)
        self._shapes, self._places, at = shapes, [], 0
        for tensor in tensors:
            self._places.append(self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            at += _aligned_size(tensor.nbytes)
        return self._places


@torch.no_grad()
def _copy_by_device(room: _CopyMemory, live: Copies, ready: Mapping[torch.device, Moment]) -> dict[int, Tensor]:
    copies = dict(zip(live, room.places_for(live.values()), strict=True))
    by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for name, tensor in live.items():
        by_device.setdefault(tensor.device, []).append((copies[name], tensor))
    for device, pairs in by_device.items():
        if is_accelerator(device):
            copy_to_host(pairs, ready.get(device) or record_moment(device))
        else:  # one call: between two calls the training thread can hold the GIL for milliseconds
            torch._foreach_copy_([copy for copy, _ in pairs], [tensor for _, tensor in pairs])
    return copies


def _aligned_size(size: int) -> int:
    return size + -size % _ALIGNMENT


@dataclass(frozen=True)
class CopyPlan:
    """The tensors that a background save copies, by key."""

    now: Mapping[int, Tensor]
    late: Mapping[int, Tensor]  # changed only by the next optimizer step
    size_bytes: int  # of host memory
    needs_gather: bool  # tensors must move between ranks while files are written, which a thread cannot do
    gathers: tuple[tuple[int, tuple[Source, ...]], ...] = ()  # (writing rank, tensors that the call gathers there)


def plan_copies(
    plan: SavePlan, request: SaveRequest, ranks: Ranks, config: SaverConfig, owned: frozenset[int]
) -> CopyPlan:
    """The copies that `plan` needs on this rank.

    `owned`: ids of the tensors that only the steps of watched optimizers change.
    """
    has_one_writer = ranks.size > 1 and not isinstance(request.target.folder, LocalStore)  # each file
    gathers: dict[int, tuple[Source, ...]] = {}
    if has_one_writer:
        by_writer = _by_writer(plan, ranks, config)
        gathers = {
            to: tuple(source for source in sources if _must_move(source, to)) for to, sources in by_writer.items()
        }
        written = [source for source in by_writer.get(ranks.rank, ()) if not _must_move(source, ranks.rank)]
    else:
        written = [*_written_here(plan, ranks)]
    local_sources = {source.key: source for source in written}
    held = {key: local for key, source in local_sources.items() if (local := source.local) is not None}
    late: set[int] = set()
    if request.state_dict is None:
        plain = {key: local_sources[key] for key in held if local_sources[key].engine in _IN_PLACE}
        late = {key for key, source in plain.items() if id(optimizer_parameter(source.live)) in owned}
    blocks = request.state_dict is not None if has_one_writer else _needs_gather(plan, request, ranks, config)
    return CopyPlan(
        now={key: local for key, local in held.items() if key not in late},
        late={key: held[key] for key in held if key in late},
        size_bytes=copies_size(held.values()) + sum(source.size_bytes for source in gathers.get(ranks.rank, ())),
        needs_gather=blocks,
        gathers=tuple((to, sources) for to, sources in gathers.items() if sources),
    )


def with_copies(plan: SavePlan, held: Mapping[int, Tensor], copies: CopyPlan) -> SavePlan:
    """The plan with the copies `held`, by key, instead of live tensors; gathered tensors are whole on their writers."""
    gathered = {source.key for _, sources in copies.gathers for source in sources}
    groups: dict[Group, Group] = {}

    def copied(source: Source) -> Source:
        whole = replace(source, sharding=ReplicatedSharding(source.shape)) if source.key in gathered else source
        return whole.holding(held.get(source.key))

    def renewed(entry: Entry) -> Entry:
        group = entry.group
        if group is not None and group not in groups:
            groups[group] = replace(group, sources=tuple(map(copied, group.sources)))
        source = None if entry.source is None else copied(entry.source)
        return entry._replace(source=source, group=None if group is None else groups[group])

    parts = [replace(one.part, entries=tuple(map(renewed, one.part.entries))) for one in plan.plans]
    plans = tuple(replace(one, part=part) for one, part in zip(plan.plans, parts, strict=True))
    ties = tuple((copied(one), copied(other)) for one, other in plan.ties_to_check)
    return replace(plan, plans=plans, ties_to_check=ties)


def _needs_gather(plan: SavePlan, request: SaveRequest, ranks: Ranks, config: SaverConfig) -> bool:
    """Whether a tensor must move between ranks while files are written."""
    sources = [source for one in plan.plans for entry in one.part.entries for source in entry.sources]
    if any(source.sharding.is_opaque for source in sources):
        return True
    if ranks.size == 1:
        return False
    plain = all(format_named(one.format).is_plain for one in plan.plans) and config.compression is None
    if not plain or config.each_rank_writes == "off" or config.nonfinite == "raise" or request.state_dict is not None:
        return True
    if any(source.sharding.is_sharded for pair in plan.ties_to_check for source in pair):
        return True
    return any(
        entry.group is not None or (entry.source is not None and entry.source.sharding.is_sharded and cuts is None)
        for share in files.divide_files(plan.plans, ranks.size)
        for entry, cuts, spec in zip(share.entries, share.cuts, share.file.layout.specs, strict=True)
        if spec.size_bytes
    )


def _by_writer(plan: SavePlan, ranks: Ranks, config: SaverConfig) -> dict[int, list[Source]]:
    """The tensors that each rank writes, once each, if each file has one writer; on rank 0 also the ties to check."""
    planned = [file for one in plan.plans for file in one.files]
    size = ranks.size if plan.is_spread and config.each_rank_writes != "off" else 1
    writers = dict(zip((file.path for file in planned), files.assign_writers(planned, size), strict=True))
    found: dict[int, dict[int, Source]] = {0: {source.key: source for pair in plan.ties_to_check for source in pair}}
    for one in plan.plans:
        entries = {entry.name: entry for entry in one.part.entries}
        for file in one.files:
            sources = (source for spec in file.layout.specs for source in entries[spec.name].sources)
            found.setdefault(writers[file.path], {}).update({source.key: source for source in sources})
    return {to: list(sources.values()) for to, sources in found.items()}


def _must_move(source: Source, to: int) -> bool:
    """Whether the rank `to` lacks a part of the tensor."""
    return source.sharding.is_opaque or moves_to(source, to)


def _written_here(plan: SavePlan, ranks: Ranks) -> Iterator[Source]:
    """The tensors that this rank writes a part of, and the ties to check."""
    yield from (source for pair in plan.ties_to_check for source in pair)
    if ranks.size == 1:
        yield from (source for one in plan.plans for entry in one.part.entries for source in entry.sources)
        return
    for share in files.divide_files(plan.plans, ranks.size):
        for entry, cuts in zip(share.entries, share.cuts, strict=True):
            mine = ranks.is_main if cuts is None else any(chunk_of_rank(cut, ranks.rank) for cut in cuts)
            yield from entry.sources if mine else ()


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
        if worker.future is not None and worker.future.done() and (error := worker.future.exception()) is not None:
            warn(f"a background save failed, and the program ended without reading its result: {error}", stacklevel=1)


# Jobs may use thread pools, which take no more work once the interpreter shuts down, so jobs are joined before that.
getattr(threading, "_register_atexit", atexit.register)(_join_workers)
atexit.register(_warn_of_unread_errors)


_channels = count(1)  # channel ids; incremented in lockstep on all ranks


@dataclass(frozen=True, eq=False)
class PendingSave:
    """A background save to the folder `path`, which exists once the save is committed.

    It is done from the start if no thread could carry out the save: the call then returned after the commit.
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

        Raises the error of the save, which the saver's next call raises as well; TimeoutError after `timeout`.
        """
        return self.future.result(timeout)


class SaveRunner:
    """Runs the saves of one saver: in the foreground, or one at a time in the background."""

    def __init__(self, run: TrainingRun) -> None:
        self.before: History | None = None  # before the save in flight, if that saves the state of the run
        self._run = run
        self.snapshot = Snapshot()
        self._worker = Worker()
        self._channel = ""
        self._steps_in_flight = 0
        self._shared = SharedFolders()
        if run.config.background:
            load_conversion_table()

    def save(self, config: SaverConfig, make: Callable[[], SaveRequest], then: AfterSave) -> SaveReport | PendingSave:
        """Carry out the request that `make` returns, in the background if `config` says so.

        Returns `then(report)`, or a handle that resolves to it. Collective; raises what `run_save` raises.
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

        That is the case if the copies exceed their limit, if tensors must move between ranks while files are written,
        or if not all ranks see the target folder.
        """
        request, plan, copies = self._agree_on_snapshot(request, error, ranks, config)
        self._steps_in_flight, self.snapshot.waited_seconds = 0, 0.0
        if copies is None or not self._shared.is_seen_by_all(request.target.beside, ranks):
            report = then(run_save(request, None, ranks, config, begun, plan, self._shared))
            done = self._worker.future = Future()
            done.set_result(report)
            return PendingSave(report.path, done)
        _, error = try_action(lambda: self.snapshot.begin_copies(copies.now, copies.late))
        try:
            gathered = self._gather_now(copies, ranks, config)
            self._channel = self._channel or f"background-{next(_channels)}"
            ranks = current_ranks(config.enter_timeout_seconds, self._channel)
            if config.each_rank_writes == "auto":
                config = replace(config, each_rank_writes="on")
            if copies.gathers:  # digests of earlier files need the elements of all ranks
                config = replace(config, reuse_frozen="off")

            def finish() -> SaveReport:
                copied, copy_error = try_action(self.snapshot.finish_copies)
                yield_to_training()  # after the copies: the optimizer waits for them
                from_copies = with_copies(plan, {**(copied or {}), **gathered}, copies)
                return then(run_save(request, error or copy_error, ranks, config, begun, from_copies, self._shared))

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
                    named = [replace(source, name=str(source.key)) for source in sources]  # names may be equal
                    found = gather_tensors(named, ranks, to)
                    gathered.update({int(key): tensor for key, tensor in found.items()})

            _, error = ranks.attempt(gather_all)
            ranks.agree("the copies of save()", error=error)
        return gathered

    def _agree_on_snapshot(
        self, request: SaveRequest | None, error: BaseException | None, ranks: Ranks, config: SaverConfig
    ) -> tuple[SaveRequest, SavePlan, CopyPlan | None]:
        """The request with the replicas that differ, its plan, and its copies, or None if the save must run now."""
        plan: SavePlan | None = None
        copies: CopyPlan | None = None
        if request is not None:
            made, error = try_action(partial(self._plan_snapshot, request, ranks, config))
            plan, copies = made or (None, None)
        staged = None if plan is None else StagedSave(plan)
        limit = config.snapshot_bytes
        most = math.inf if limit is None else parse_size(limit)
        fits = copies is not None and not copies.needs_gather and copies.size_bytes <= most
        agreed = agree_on_plan("save() in the background", request, staged, error, ranks, config, fits=fits)
        assert plan is not None, "the agreement has raised the error"
        if agreed.replicas_differ:
            return self._agree_on_snapshot(agreed.request, None, ranks, config)
        return agreed.request, plan, copies if agreed.fits else None

    def _plan_snapshot(self, request: SaveRequest, ranks: Ranks, config: SaverConfig) -> tuple[SavePlan, CopyPlan]:
        """The plan and its copies. The next step of the run's optimizers waits for the copies from here on."""
        steppers = {} if request.adapter_only else _hooked_optimizers(self._run)
        self.snapshot.watch_optimizers(steppers)
        plan = plan_save(request, ranks, config)
        return plan, plan_copies(plan, request, ranks, config, ids_changed_by_steps(steppers))

    def wait_for_save(self) -> SaveReport | None:
        """Wait for the save in flight and return its report or raise its error; None when there is none."""
        before, self.before = self.before, None
        report, error = try_action(self._worker.take_result)
        if before is not None and error is not None:
            self._run.history = replace(self._run.history, best=before.best, saves=before.saves)
        elif before is not None:
            waited = self.snapshot.waited_seconds
            self._run.history = after_commit(self._run.history, report.seconds, report.bytes, waited)
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
        if self._steps_in_flight % 64 and self._steps_in_flight & (self._steps_in_flight - 1):
            return False
        ended = {"ended": future.done()}
        return bool(ranks.agree("saver.step()", ended, decide=lambda values: all(v["ended"] for v in values)).result)

    def close(self) -> None:
        """Wait for the save in flight, unhook the optimizers and free the memory."""
        try:
            self.wait_for_save()
        finally:
            self.snapshot.close()


def _hooked_optimizers(run: TrainingRun) -> dict[torch.optim.Optimizer, list[Tensor]]:
    """The optimizers that call a hook before they step, each with the further tensors that its steps change."""
    items = optimizers_among(run_items(run.accelerator, run.registered))
    optimizers = [kind.hooked_optimizer(optimizer) for _, kind, optimizer in items]
    return {
        optimizer: further
        for optimizer, further in optimizers
        if isinstance(optimizer, torch.optim.Optimizer) and getattr(type(optimizer).step, "hooked", False)
    }
