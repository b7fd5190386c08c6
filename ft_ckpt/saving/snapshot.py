"""Takes the snapshot of a background save: copies of this rank's tensors at one moment.

The copies are in host memory. Tensors that training may change at any time are copied in the call
of the save. Tensors that only an optimizer step changes are copied later, in the thread of the
save; the next step of each optimizer waits for these copies.
"""

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

# Each copy begins at a multiple of this many bytes.
_ALIGNMENT = 64
# Engines whose parameters only an optimizer step changes.
_CHANGED_BY_STEPS = ("plain", "fsdp1", "fsdp2", "zero3", "zero")
# Tensors by `Source.key`: live tensors, or copies of them.
TensorsByKey = Mapping[int, Tensor]


class Snapshot:
    """Copies tensors in host memory at one moment; there is one snapshot at a time.

    Attributes:
        waited_seconds: How long optimizers have waited for the copies of the current save.
    """

    def __init__(self) -> None:
        self.waited_seconds = 0.0

        # Memory for the copies of the call, and for those of the thread.
        self._call_memory = _CopyMemory()
        self._thread_memory = _CopyMemory()
        self._copied: TensorsByKey = {}

        # Live tensors that are not copied yet.
        self._remaining: TensorsByKey = {}

        # For each accelerator, the moment after which its tensors may be read.
        self._ready: dict[torch.device, Moment] = {}

        # Set while no optimizer has to wait.
        self._done = Event()
        self._done.set()

        # By id of the optimizer: the optimizer, which keeps the id valid, and the hook's handle.
        self._hooks: dict[int, tuple[Any, Any]] = {}

    def watch_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Make the next step of each optimizer wait for the copies."""
        for optimizer in optimizers:
            if id(optimizer) not in self._hooks:
                handle = optimizer.register_step_pre_hook(self._wait_for_copies)
                self._hooks[id(optimizer)] = optimizer, handle

    def begin_copies(self, now: TensorsByKey, late: TensorsByKey) -> None:
        """Copy the tensors `now`. `finish_copies` copies the tensors `late`.

        The next step of each watched optimizer waits for `finish_copies`.
        """
        self._copied = _copy_by_device(self._call_memory, now, {})
        self._remaining = late
        self._ready = {}
        for device in {tensor.device for tensor in late.values()}:
            if is_accelerator(device):
                self._ready[device] = record_moment(device)
        self._done.clear()

    def finish_copies(self) -> TensorsByKey:
        """Copy the remaining tensors, in any thread, and return all copies by key.

        Afterwards optimizers may step, even if a copy has failed.
        """
        try:
            late_copies = _copy_by_device(self._thread_memory, self._remaining, self._ready)
            return {**self._copied, **late_copies}
        finally:
            self.drop_copies()

    def drop_copies(self) -> None:
        """Forget the copies, and let optimizers step."""
        self._copied, self._remaining = {}, {}
        self._done.set()

    def close(self) -> None:
        """Remove the hooks and free the memory."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._call_memory = _CopyMemory()
        self._thread_memory = _CopyMemory()

    def _wait_for_copies(self, *_: Any) -> None:
        if not self._done.is_set():
            begun = time.monotonic()
            self._done.wait()
            self.waited_seconds += time.monotonic() - begun


def ids_changed_by_steps(optimizers: Mapping[Any, Iterable[Tensor]]) -> frozenset[int]:
    """Return the ids of the tensors that the steps of `optimizers` change.

    These are the parameters and the state of each optimizer, and the further tensors that
    `optimizers` maps it to. If the engine of such a tensor is one of `_CHANGED_BY_STEPS`, nothing
    else changes it during training. Buffers are not among the tensors, because a forward pass may
    change them.
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
    """Host memory for copies, which is reused by the next snapshot.

    It has the size of the largest snapshot so far. It is pinned if an accelerator copies into it.
    """

    def __init__(self) -> None:
        # The device is given, because the script may have set another default device.
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        # The dtypes and shapes of the last snapshot, and its tensors in the memory.
        self._shapes: list[Any] = []
        self._tensors: list[Tensor] = []

    def tensors_like(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return a tensor in this memory for each of `tensors`, of the same dtype and shape."""
        tensors = list(tensors)
        shapes: list[Any] = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if shapes == self._shapes:  # as in most saves of a run
            return self._tensors
        needed = copies_size(tensors)
        if self._memory.numel() < needed:
            # The old memory is freed before the new memory is allocated.
            self._memory = self._memory.new_empty(0)
            self._tensors = []
            accelerators = [tensor.device for tensor in tensors if is_accelerator(tensor.device)]
            if accelerators:
                self._memory = pinned_memory(needed, accelerators[0])
            else:
                self._memory = self._memory.new_empty(needed)

        self._shapes = shapes
        self._tensors = []
        start = 0
        for tensor in tensors:
            piece = self._memory[start : start + tensor.nbytes]
            self._tensors.append(piece.view(tensor.dtype).view(tensor.shape))
            start += _aligned_size(tensor.nbytes)

        return self._tensors


@torch.no_grad()
def _copy_by_device(
    memory: _CopyMemory, live: TensorsByKey, ready: Mapping[torch.device, Moment]
) -> dict[int, Tensor]:
    """Copy the `live` tensors into `memory`, and return the copies by key.

    `ready` has the moments after which the tensors of accelerators may be read. By default that is
    the moment of this call.
    """
    copies = dict(zip(live, memory.tensors_like(live.values()), strict=True))
    by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
    for key, tensor in live.items():
        by_device.setdefault(tensor.device, []).append((copies[key], tensor))
    for device, pairs in by_device.items():
        if is_accelerator(device):
            copy_to_host(pairs, ready.get(device) or record_moment(device))
        else:
            # All are copied in one call, because the training thread can take the GIL between two
            # calls and hold it for milliseconds.
            torch._foreach_copy_([copy for copy, _ in pairs], [tensor for _, tensor in pairs])
    return copies


def _aligned_size(size: int) -> int:
    return size + -size % _ALIGNMENT


@dataclass(frozen=True)
class SnapshotPlan:
    """The tensors that a background save copies or gathers on this rank, by key.

    Attributes:
        now: Tensors that are copied in the call, because training may change them at any time.
        late: Tensors that are copied in the thread, because only an optimizer step changes them.
        gathers: Tensors that are gathered in the call, by the rank that writes them.
        size_bytes: The host memory that this rank needs.
    """

    now: TensorsByKey
    late: TensorsByKey
    gathers: Mapping[int, tuple[Source, ...]]
    size_bytes: int

    @property
    def gathered_keys(self) -> frozenset[int]:
        """The keys of all tensors that are gathered, on any rank."""
        keys: set[int] = set()
        for sources in self.gathers.values():
            keys.update(source.key for source in sources)
        return frozenset(keys)


@dataclass(frozen=True, eq=False)
class SnapshotSources:
    """Maps the source of a planned tensor to a source that reads the copy in a snapshot.

    Attributes:
        copies: The copies by key.
        gathered_keys: Keys of the tensors that were gathered: their copies are whole.
    """

    copies: TensorsByKey
    gathered_keys: frozenset[int] = frozenset()

    def __call__(self, source: Source) -> Source:
        if source.key in self.gathered_keys:
            source = replace(source, sharding=ReplicatedSharding(source.shape))
        return source.holding(self.copies.get(source.key))


def plan_snapshot(
    writes: WritePlan, ranks: Ranks, changed: frozenset[int], *, gathers: bool
) -> SnapshotPlan:
    """Plan the copies that this rank needs to write its part of `writes`.

    `changed` has the result of `ids_changed_by_steps`. These tensors may be copied late, because
    watched optimizers wait before they step. `gathers` says whether the call of the save gathers
    the elements that the writer of a file does not hold.
    """
    gathers_by_writer = _gathers_by_writer(writes) if gathers else {}
    incoming = gathers_by_writer.get(ranks.rank, ())
    incoming_keys = {source.key for source in incoming}
    now: dict[int, Tensor] = {}
    late: dict[int, Tensor] = {}
    for key, source in writes.tensors_for(ranks.rank).items():
        if key in incoming_keys:
            continue
        local = source.local
        if local is None:
            continue
        parameter = optimizer_parameter(source.live)
        is_late = source.engine in _CHANGED_BY_STEPS and id(parameter) in changed
        copies = late if is_late else now
        copies[key] = local

    size_bytes = copies_size([*now.values(), *late.values()])
    size_bytes += sum(source.size_bytes for source in incoming)
    return SnapshotPlan(now, late, gathers_by_writer, size_bytes)


def _gathers_by_writer(writes: WritePlan) -> dict[int, tuple[Source, ...]]:
    """Return for each writer the tensors of which it must receive elements.

    Rank 0 is always among the writers, because it compares tied tensors.
    """
    writers = {file.writer for file in writes.files}
    writers.add(0)
    gathers_by_writer = {}
    for writer in sorted(writers):
        sources = []
        for source in writes.tensors_for(writer).values():
            if source.sharding.is_opaque or moves_to(source, writer):
                sources.append(source)
        if sources:
            gathers_by_writer[writer] = tuple(sources)
    return gathers_by_writer


def gather_for_writers(plan: SnapshotPlan, ranks: Ranks) -> dict[int, Tensor]:
    """Gather the tensors in `plan.gathers`, and return by key those that this rank writes.

    Collective: call it on every rank. Raises the error of any rank.
    """
    gathered: dict[int, Tensor] = {}
    if not plan.gathers:
        return gathered

    def gather_all() -> None:
        for writer, sources in plan.gathers.items():
            # Each tensor is named by its key, because tensors of several models may have one name.
            named_by_key = [replace(source, name=str(source.key)) for source in sources]
            for key, tensor in gather_tensors(named_by_key, ranks, writer).items():
                gathered[int(key)] = tensor

    ranks.run("the copies of save()", gather_all)
    return gathered
