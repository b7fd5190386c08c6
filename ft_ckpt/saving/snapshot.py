"""Takes the snapshot of a background save: host copies of this rank's tensors at one moment."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.devices import Moment, copy_to_host, is_accelerator, pinned_memory, record_moment
from ft_ckpt.ranks import Ranks
from ft_ckpt.ranks.moving import gather_tensors, moves_to
from ft_ckpt.ranks.sharding import ReplicatedSharding, Source
from ft_ckpt.ranks.wrappers import optimizer_parameter
from ft_ckpt.saving.planning import WritePlan

_ALIGNMENT = 64
# engines whose parameters only an optimizer step changes
_IN_PLACE = ("plain", "fsdp1", "fsdp2", "zero3", "zero")
Copies = Mapping[int, Tensor]  # by the keys of the live tensors


class Snapshot:
    """Host copies of the tensors at one moment; there is one snapshot at a time."""

    def __init__(self) -> None:
        self.waited_seconds = 0.0  # that optimizers waited for the copies of the current save
        self._now, self._late = _CopyMemory(), _CopyMemory()
        self._copied: Copies = {}
        self._remaining: Copies = {}  # live tensors that are not copied yet
        # the moments after which the tensors of an accelerator may be read
        self._ready: dict[torch.device, Moment] = {}
        self._done = Event()
        self._done.set()
        # by id of the optimizer: the optimizer, which keeps the id valid, and the hook's handle
        self._hooks: dict[int, tuple[Any, Any]] = {}

    def watch_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Make the next step of each optimizer wait for the copies."""
        for optimizer in optimizers:
            if id(optimizer) not in self._hooks:
                handle = optimizer.register_step_pre_hook(self._wait_for_copies)
                self._hooks[id(optimizer)] = optimizer, handle

    def begin_copies(self, now: Copies, late: Copies) -> None:
        """Copy the tensors `now`, and leave the tensors `late` to `finish_copies`.

        The next step of each watched optimizer waits for `finish_copies`.
        """
        self._copied = _copy_by_device(self._now, now, {})
        self._remaining = late
        self._ready = {}
        for device in {tensor.device for tensor in late.values()}:
            if is_accelerator(device):
                self._ready[device] = record_moment(device)
        self._done.clear()

    def finish_copies(self) -> Copies:
        """Copy the remaining tensors, in any thread, and return all copies by key.

        Afterwards optimizers may step, even if a copy has failed.
        """
        try:
            return {**self._copied, **_copy_by_device(self._late, self._remaining, self._ready)}
        finally:
            self.drop_copies()

    def drop_copies(self) -> None:
        """Let optimizers step without `finish_copies`."""
        self._copied, self._remaining = {}, {}
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
    """Return the ids of the tensors that the steps of `optimizers` change.

    These are the parameters and the state of each optimizer, and the further tensors that
    `optimizers` maps it to. Nothing else changes them during training, if their engine is one of
    `_IN_PLACE`; a forward pass may change buffers, which are not among them.
    """
    changed: set[int] = set()
    for optimizer, further in optimizers.items():
        changed.update(map(id, further))
        for group in optimizer.param_groups:
            changed.update(map(id, group["params"]))
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, Tensor):
                changed.update(id(value) for value in state.values() if isinstance(value, Tensor))
    return frozenset(changed)


def copies_size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of host memory that copies of `tensors` take."""
    return sum(_aligned_size(tensor.nbytes) for tensor in tensors)


class _CopyMemory:
    """Memory of the size of the largest snapshot, which all snapshots use.

    The memory is pinned if an accelerator copies into it.
    """

    def __init__(self) -> None:
        # on the CPU even if the script has another default device
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._shapes: list[Any] = []
        self._places: list[Tensor] = []

    def places_for(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return memory for a copy of each tensor, in its dtype and shape."""
        tensors = list(tensors)
        shapes: list[Any] = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if shapes == self._shapes:  # as in most saves of a run
            return self._places
        needed = copies_size(tensors)
        if self._memory.numel() < needed:
            # free the old memory before the new is allocated
            self._memory, self._places = self._memory.new_empty(0), []
            accelerators = [tensor.device for tensor in tensors if is_accelerator(tensor.device)]
            if accelerators:
                self._memory = pinned_memory(needed, accelerators[0])
            else:
                self._memory = self._memory.new_empty(needed)
        self._shapes, self._places = shapes, []
        start = 0
        for tensor in tensors:
            piece = self._memory[start : start + tensor.nbytes]
            self._places.append(piece.view(tensor.dtype).view(tensor.shape))
            start += _aligned_size(tensor.nbytes)
        return self._places


@torch.no_grad()
def _copy_by_device(
    memory: _CopyMemory, live: Copies, ready: Mapping[torch.device, Moment]
) -> dict[int, Tensor]:
    copies = dict(zip(live, memory.places_for(live.values()), strict=True))
    by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for key, tensor in live.items():
        by_device.setdefault(tensor.device, []).append((copies[key], tensor))
    for device, pairs in by_device.items():
        if is_accelerator(device):
            copy_to_host(pairs, ready.get(device) or record_moment(device))
        else:  # one call: between two calls the training thread can hold the GIL for milliseconds
            torch._foreach_copy_([copy for copy, _ in pairs], [tensor for _, tensor in pairs])
    return copies


def _aligned_size(size: int) -> int:
    return size + -size % _ALIGNMENT


@dataclass(frozen=True)
class SnapshotPlan:
    """The tensors that a background save copies or gathers on this rank, by key."""

    now: Copies  # copied in the call, because training may change them at any time
    late: Copies  # copied in the thread, because nothing but an optimizer step changes them
    # by the rank that writes them: tensors that the call gathers
    gathers: Mapping[int, tuple[Source, ...]]
    size_bytes: int  # of host memory

    @property
    def gathered_keys(self) -> frozenset[int]:
        keys: set[int] = set()
        for sources in self.gathers.values():
            keys.update(source.key for source in sources)
        return frozenset(keys)


@dataclass(frozen=True, eq=False)
class SnapshotSources:
    """Gives the planned tensors the elements of a snapshot in place of the live ones."""

    copies: Copies
    gathered: frozenset[int] = frozenset()  # keys of the tensors that were gathered

    def __call__(self, source: Source) -> Source:
        if source.key in self.gathered:
            source = replace(source, sharding=ReplicatedSharding(source.shape))
        return source.holding(self.copies.get(source.key))


def plan_snapshot(
    writes: WritePlan, ranks: Ranks, changed: frozenset[int], *, gathers: bool
) -> SnapshotPlan:
    """Plan the copies that this rank needs to write its part of `writes`.

    `changed` has the ids of `ids_changed_by_steps`: tensors among these may be copied late, because
    watched optimizers wait before they step. `gathers` says whether the call gathers the elements
    that the writer of a file lacks.
    """
    moving = _gathers_by_writer(writes) if gathers else {}
    incoming = moving.get(ranks.rank, ())
    incoming_keys = {source.key for source in incoming}
    now: dict[int, Tensor] = {}
    late: dict[int, Tensor] = {}
    for key, source in writes.tensors_for(ranks.rank).items():
        if key in incoming_keys:
            continue
        local = source.local
        if local is None:
            continue
        is_late = source.engine in _IN_PLACE and id(optimizer_parameter(source.live)) in changed
        copies = late if is_late else now
        copies[key] = local
    size_bytes = copies_size([*now.values(), *late.values()])
    size_bytes += sum(source.size_bytes for source in incoming)
    return SnapshotPlan(now, late, moving, size_bytes)


def _gathers_by_writer(writes: WritePlan) -> dict[int, tuple[Source, ...]]:
    """Return for each writing rank the tensors that it writes and lacks elements of."""
    gathers = {}
    for writer in sorted({file.writer for file in writes.files} | {0}):
        lacking = []
        for source in writes.tensors_for(writer).values():
            if source.sharding.is_opaque or moves_to(source, writer):
                lacking.append(source)
        if lacking:
            gathers[writer] = tuple(lacking)
    return gathers


def gather_for_writers(plan: SnapshotPlan, ranks: Ranks) -> dict[int, Tensor]:
    """Gather the tensors in `plan.gathers`, and return by key those that this rank writes.

    Collective: call it on every rank. Raises the error of any rank.
    """
    gathered: dict[int, Tensor] = {}
    if not plan.gathers:
        return gathered

    def gather_all() -> None:
        for writer, sources in plan.gathers.items():
            # by key, because tensors of several models may have one name
            by_key = [replace(source, name=str(source.key)) for source in sources]
            for key, tensor in gather_tensors(by_key, ranks, writer).items():
                gathered[int(key)] = tensor

    ranks.run("the copies of save()", gather_all)
    return gathered
