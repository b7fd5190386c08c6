"""Copies between accelerators and the host, beside what the accelerator computes, and when their bytes may be used.

A copy that does not block is only asked for: the host reads nothing of it, and changes nothing that it reads from,
before an event behind it has passed. Where a backend has neither streams nor events, copies block instead.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.devices.accelerators import choosing_device, has_streams
from ft_ckpt.devices.pinned import pinned_block, pinned_memory
from ft_ckpt.storage.buffers import Memory, address_of

PIECE_BYTES = 8 << 20  # on its way to the host while another one is used


@dataclass(frozen=True, eq=False)
class Moment:
    """What a thread had asked of a device up to a moment."""

    device: torch.device
    event: Any  # None where the device has none: all was done before the moment was made

    def await_done(self) -> None:
        """Wait until the device has done it."""
        if self.event is not None:
            _await_call(self.device, self.event.synchronize)


@torch.no_grad()
def record_moment(device: torch.device) -> Moment:
    """The moment of the call: what this thread has asked of `device` on its current stream.

    It does not wait, but where the backend has no events.
    """
    event = None
    if has_streams(device):
        with suppress(RuntimeError), choosing_device(device):
            made: Any = torch.Event(device)
            made.record(torch.accelerator.current_stream(device))
            event = made
        if event is None:
            torch.accelerator.synchronize(device)
    return Moment(device, event)


@torch.no_grad()
def copy_to_host(pairs: Iterable[tuple[Tensor, Tensor]], after: Moment) -> None:
    """Fill host tensors, the first of each pair, from those of the device of `after`, as they are after that moment.

    They are copied beside what the device is asked for meanwhile. All bytes are there when this returns.
    """
    stream = _new_stream(after.device)
    if stream is None:
        after.await_done()
        for target, live in pairs:
            target.copy_(live)
        return
    if after.event is not None:
        _await_call(after.device, lambda: stream.wait_event(after.event))
    try:
        with choosing_device(after.device), stream:
            for target, live in pairs:
                target.copy_(live, non_blocking=True)
    finally:  # also of those before one that failed: their memory may be used for something else from here on
        _await_call(after.device, stream.synchronize)


@torch.no_grad()
def host_pieces(flat: Tensor, piece_bytes: int = PIECE_BYTES) -> Iterator[Tensor]:
    """The elements of a tensor of one dimension on an accelerator, in order, in pieces on the host.

    A piece is valid until the next one is asked for; that one comes over meanwhile.
    """
    step, is_later = max(1, piece_bytes // flat.element_size()), has_streams(flat.device)
    rooms = [pinned_memory(min(step, flat.numel()) * flat.element_size(), flat.device) for _ in range(2)]
    coming: deque[tuple[Tensor, Moment]] = deque()
    try:
        for number, start in enumerate(range(0, flat.numel(), step)):
            live = flat[start : start + step]
            piece = rooms[number % 2][: live.nbytes].view(flat.dtype)
            piece.copy_(live, non_blocking=is_later)
            coming.append((piece, record_moment(flat.device)))
            if number:
                yield _arrived_piece(*coming.popleft())
        if coming:
            yield _arrived_piece(*coming.popleft())
    finally:
        for piece, moment in coming:
            _arrived_piece(piece, moment)


class PinnedBlocks:
    """Blocks to read files into whose bytes `devices` copy, on this thread's streams: a `BlockKeeper`."""

    def __init__(self, devices: frozenset[torch.device]) -> None:
        self.devices = devices
        self._copied: dict[int, list[Moment]] = {}  # by the block's address

    def make_block(self, size_bytes: int) -> Memory:
        """New memory, pinned for all devices."""
        return pinned_block(size_bytes, next(iter(self.devices)))

    def leave_block(self, block: Memory) -> None:
        """What the devices have been asked for so far may be copying from it."""
        self._copied[address_of(block)] = [record_moment(device) for device in self.devices]

    def await_block(self, block: Memory) -> None:
        """Wait for these copies."""
        for moment in self._copied.pop(address_of(block), ()):
            moment.await_done()


def _arrived_piece(piece: Tensor, moment: Moment) -> Tensor:
    moment.await_done()
    return piece


def _new_stream(device: torch.device) -> Any:
    """A stream beside the current one; None where the backend has none that can be chosen."""
    if has_streams(device):
        with suppress(RuntimeError), choosing_device(device):
            stream = torch.Stream(device)
            with stream:
                return stream
    return None


def _await_call(device: torch.device, call: Callable[[], Any]) -> None:
    """Wait by `call`, or where the backend has no such thing, until `device` has done all it was asked for.

    What went wrong on the device is raised either way.
    """
    with choosing_device(device):
        try:
            call()
        except RuntimeError:
            torch.accelerator.synchronize(device)
