"""Accelerator memory: available devices, copies to and from the host, pinned host memory."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.storage.read_ahead import Block, Memory, address_of, new_block, new_block_of


def is_accelerator(device: torch.device) -> bool:
    """Whether tensors of `device` lie in memory that the host does not read."""
    return device.type not in ("cpu", "meta")


def current_device() -> torch.device | None:
    """The accelerator that this thread computes on, with its number; None where there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else torch.device(device.type, torch.accelerator.current_device_index())


def has_streams(device: torch.device) -> bool:
    """Whether `device` is of the kind that torch calls this process's accelerator, which has streams and events."""
    return is_accelerator(device) and device.type == getattr(torch.accelerator.current_accelerator(), "type", None)


def choosing_device(device: torch.device) -> AbstractContextManager[None]:
    """A block in which `device` is this thread's: a new thread's is the first, which would be woken up for nothing."""
    return torch.accelerator.device_index(device.index) if has_streams(device) else nullcontext()


_WIPEONFORK = 18  # linux 4.14: MADV_WIPEONFORK
_PORTABLE = 1  # for all devices of the process
_LEAST_OWN_BYTES = 16 << 20  # below, what rounding takes is little, and torch's allocator has it at hand


def pinned_memory(size_bytes: int, device: torch.device) -> Tensor:
    """New memory for copies from and to `device`: bytes, in one dimension, page-aligned where it is large."""
    if size_bytes and has_streams(device):
        is_large = size_bytes >= _LEAST_OWN_BYTES and size_bytes & (size_bytes - 1)
        block = _registered_block(size_bytes, device) if is_large else None
        if block is not None:
            return torch.frombuffer(block, dtype=torch.uint8)
        with suppress(RuntimeError), choosing_device(device):
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(new_block(size_bytes), dtype=torch.uint8) if size_bytes else torch.empty(0).byte()


def pinned_block(size_bytes: int, device: torch.device) -> Memory:
    """The same as a block for reading into."""
    memory: Any = pinned_memory(size_bytes, device).numpy()
    return memoryview(memory)


class RegisteredBlock(Block):
    """Memory that is registered with a backend for as long as anything uses it; in a forked process it is empty."""

    device: torch.device | None = None  # once it is registered
    process = 0  # by which

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Let the backend go before the memory does; at the end of the process the system does both."""
        if self.device is not None and not is_ending() and self.process == os.getpid():
            with choosing_device(self.device):
                _runtime_of(self.device).cudaHostUnregister(address_of(self))


def _registered_block(size_bytes: int, device: torch.device) -> RegisteredBlock | None:
    """New memory that is registered; None where the backend does not offer that, or refuses it."""
    runtime = _runtime_of(device)
    if runtime is None:
        return None
    block = new_block_of(RegisteredBlock, size_bytes)
    # Pages shared with a fork, such as a worker that loads data, are copied at the first write of either side; the
    # device would go on with the old ones. A fork has empty pages there instead of none, since it unmaps them.
    with choosing_device(device), suppress(OSError):
        block.madvise(_WIPEONFORK)
        if not int(runtime.cudaHostRegister(address_of(block), size_bytes, _PORTABLE)):
            block.device, block.process = device, os.getpid()
            return block
        with suppress(RuntimeError):  # takes the error away, which the next kernel would report as its own
            torch.zeros(1, device=device)
    return None


def _runtime_of(device: torch.device) -> Any:
    """CUDA's runtime, or ROCm's under the same names: torch has no call for this that is every backend's."""
    offer = getattr(torch.get_device_module(device), "cudart", None)
    return None if offer is None else offer()


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
