"""Host copies of tensors, of one moment: no later optimizer step shows in them.

What a known optimizer alone changes may be copied while the next forward and backward run: a hook lets the next step
wait for the copy. Everything else is copied before `begin_copies` returns. The memory is reused from one snapshot to
the next.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from operator import attrgetter
from threading import Event
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ft_ckpt.devices.accelerators import is_accelerator
from ft_ckpt.devices.copies import Moment, copy_to_host, record_moment
from ft_ckpt.devices.pinned import pinned_memory

P = ParamSpec("P")
T = TypeVar("T")
_ALIGNMENT = 64
_DEVICE = attrgetter("device")
Copies = Mapping[int, Tensor]  # by the keys of the live tensors


def as_in_training(method: Callable[P, T]) -> Callable[P, T]:
    """The method outside of `torch.inference_mode`: what it makes lives on, and training changes it."""

    @wraps(method)
    def call_outside(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return call_outside


class Snapshot:
    """The copies of one moment; one moment at a time."""

    def __init__(self) -> None:
        self.waited_seconds = 0.0  # by optimizers, over all snapshots
        self._now, self._late = _CopyMemory(), _CopyMemory()
        self._copied: Copies = {}
        self._left: Copies = {}
        self._ready: dict[torch.device, Moment] = {}  # of each accelerator, after which its tensors may be read
        self._done = Event()
        self._done.set()
        self._hooks: dict[int, tuple[Any, Any]] = {}  # id -> (optimizer, which keeps the id its own; handle)

    def watch_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Let the next step of each optimizer wait for the copies."""
        for optimizer in optimizers:
            if id(optimizer) not in self._hooks:
                self._hooks[id(optimizer)] = (optimizer, optimizer.register_step_pre_hook(self._wait_for_copies))

    def begin_copies(self, now: Copies, late: Copies) -> None:
        """Copy `now`; `late` is copied by `finish_copies`, and watched optimizers do not step before that."""
        self._copied = _copy_by_device(self._now, now, {})
        self._left = late
        devices = {*map(_DEVICE, late.values())}
        self._ready = {device: record_moment(device) for device in devices if is_accelerator(device)}
        self._done.clear()

    def finish_copies(self) -> Copies:
        """Copy what is left, and let optimizers step, whatever happens here. From any thread; all copies by name."""
        try:
            return {**self._copied, **_copy_by_device(self._late, self._left, self._ready)}
        finally:
            self.drop_copies()

    def drop_copies(self) -> None:
        """Nobody will call `finish_copies`: let optimizers step."""
        self._copied, self._left = {}, {}
        self._done.set()

    def close(self) -> None:
        """Take the hooks off, and give the memory back."""
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
    """The ids of all tensors that the steps of these optimizers change: their own, and those given for each."""
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
    """Memory that grows to the largest snapshot and is used again; pinned where an accelerator copies into it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._shapes: list[Any] = []
        self._places: list[Tensor] = []

    def places_for(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Room for a copy of each tensor."""
        tensors = list(tensors)
        shapes: list[Any] = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if shapes == self._shapes:  # as in most saves of a run
            return self._places
        needed = copies_size(tensors)
        if self._memory.numel() < needed:
            self._memory, self._places = torch.empty(0, dtype=torch.uint8), []  # the old goes before the larger comes
            self._memory = _host_memory(needed, tensors)
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
        else:  # one call: between two a thread that trains keeps Python to itself for milliseconds
            torch._foreach_copy_([one for one, _ in pairs], [other for _, other in pairs])
    return copies


def _host_memory(size_bytes: int, tensors: Iterable[Tensor]) -> Tensor:
    device = next((tensor.device for tensor in tensors if is_accelerator(tensor.device)), None)
    return torch.empty(size_bytes, dtype=torch.uint8) if device is None else pinned_memory(size_bytes, device)


def _aligned_size(size: int) -> int:
    return size + -size % _ALIGNMENT
