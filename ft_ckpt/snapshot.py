"""Host copies of tensors, of one moment: no later optimizer step shows in them.

What a known optimizer alone changes may be copied while the next forward and backward run: a hook lets the next step
wait for the copy. Everything else is copied before `take` returns. The memory is reused from one snapshot to the next.
"""

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from threading import Event
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
Copies = Mapping[Hashable, Tensor]  # by what `key` says of the live tensor


class Snapshot:
    """The copies of one moment; one moment at a time."""

    def __init__(self) -> None:
        self.waited_seconds = 0.0  # by optimizers, over all snapshots
        self._now, self._late = _Room(), _Room()
        self._copied: dict[Hashable, Tensor] = {}
        self._left: list[Tensor] = []
        self._ready: dict[torch.device, Any] = {}  # CUDA device -> event after which its tensors may be read
        self._done = Event()
        self._done.set()
        self._hooks: dict[int, tuple[Any, Any]] = {}  # id -> (optimizer, which keeps the id its own; handle)

    def watch(self, optimizers: Iterable[Any]) -> frozenset[int]:
        """Let the next step of each optimizer wait for the copies; the ids of all tensors that these steps change."""
        owned: set[int] = set()
        for optimizer in optimizers:
            if id(optimizer) not in self._hooks:
                self._hooks[id(optimizer)] = (optimizer, optimizer.register_step_pre_hook(self._hold))
            owned.update(id(p) for group in optimizer.param_groups for p in group["params"])
            owned.update(id(v) for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor))
        return frozenset(owned)

    def take(self, now: Sequence[Tensor], late: Sequence[Tensor]) -> None:
        """Copy `now`; `late` is copied by `finish`, and watched optimizers do not step before that."""
        self._copied = _copy(self._now, now, {})
        self._left = list(late)
        self._ready = {device: _event(device) for device in {t.device for t in late if t.device.type == "cuda"}}
        self._done.clear()

    def finish(self) -> Copies:
        """Copy what is left, and let optimizers step, whatever happens here. From any thread; all copies by `key`."""
        try:
            return {**self._copied, **_copy(self._late, self._left, self._ready)}
        finally:
            self.drop()

    def drop(self) -> None:
        """Nobody will call `finish`: let optimizers step."""
        self._copied, self._left = {}, []
        self._done.set()

    def close(self) -> None:
        """Take the hooks off, and give the memory back."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self._now, self._late = _Room(), _Room()

    def _hold(self, *_: Any) -> None:
        if not self._done.is_set():
            begun = time.monotonic()
            self._done.wait()
            self.waited_seconds += time.monotonic() - begun


def key(tensor: Tensor) -> Hashable:
    """What tells two live tensors apart: the memory they are, and how they see it."""
    return tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride()


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of host memory that copies of `tensors` take."""
    return sum(_padded(tensor.nbytes) for tensor in tensors)


class _Room:
    """Memory that grows to the largest snapshot and is used again; pinned where a GPU copies into it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Room for a copy of each tensor."""
        needed = size_of(tensors)
        if self._memory.numel() < needed:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes before the larger one comes
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=any(t.is_cuda for t in tensors))
        places, at = [], 0
        for tensor in tensors:
            places.append(self._memory[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            at += _padded(tensor.nbytes)
        return places


def _copy(room: _Room, tensors: Sequence[Tensor], ready: Mapping[torch.device, Any]) -> dict[Hashable, Tensor]:
    live = {key(tensor): tensor for tensor in tensors}
    copies = dict(zip(live, room.like(list(live.values())), strict=True))
    with torch.no_grad():
        for device, names in groupby(sorted(live, key=lambda k: str(live[k].device)), lambda k: live[k].device):
            if device.type == "cuda":
                _from_cuda(device, [(copies[name], live[name]) for name in names], ready.get(device))
                continue
            for name in names:
                copies[name].copy_(live[name])
    return copies


def _from_cuda(device: torch.device, pairs: Iterable[tuple[Tensor, Tensor]], ready: Any) -> None:
    """Copy beside what the GPU computes: on a stream of its own, which begins after the event `ready`."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_event(_event(device) if ready is None else ready)
    with torch.cuda.stream(stream):
        for target, live in pairs:
            target.copy_(live, non_blocking=True)
    stream.synchronize()


def _event(device: torch.device) -> Any:
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT
