"""Finds accelerators, copies between them and the host, and allocates pinned host memory.

Pinned memory cannot be paged out, so devices copy from and to it directly and without waiting.
Registered memory is ordinary memory that was pinned after its allocation.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.storage.io import Block, BlockAllocator, Memory, address_of, new_block, new_block_of

# size of a piece of `host_pieces`
PIECE_BYTES = 8 << 20
# Smaller memory comes from torch's allocator, which is faster and rounds it up by little.
_MIN_REGISTERED_BYTES = 16 << 20
# MADV_WIPEONFORK of Linux 4.14: a forked process gets empty pages
_WIPEONFORK = 18
# cudaHostRegisterPortable: the memory is pinned for all devices of the process
_PORTABLE = 1


def is_accelerator(device: torch.device) -> bool:
    """Check whether tensors on `device` are outside of host memory."""
    return device.type not in ("cpu", "meta")


def current_device() -> torch.device | None:
    """Return the current accelerator of this thread, with its index; None if there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    return torch.device(device.type, torch.accelerator.current_device_index())


def has_streams(device: torch.device) -> bool:
    """Check whether `device` may have streams and events.

    Only devices of the type of torch's current accelerator can have them.
    """
    current = torch.accelerator.current_accelerator()
    return current is not None and is_accelerator(device) and device.type == current.type


def choosing_device(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` the current device of this thread in a block.

    Without it a new thread would initialize and use the first device.
    """
    if not has_streams(device):
        return nullcontext()
    return torch.accelerator.device_index(device.index)


def pinned_memory(size_bytes: int, device: torch.device) -> Tensor:
    """Allocate pinned memory for copies from and to `device`: a tensor of uint8 in one dimension.

    Large memory is aligned to pages. If the memory cannot be pinned, it is ordinary memory.
    """
    if size_bytes and has_streams(device):
        # Torch's allocator rounds sizes up to a power of two, which wastes much of large memory.
        is_rounded_up = size_bytes.bit_count() > 1
        block = None
        if is_rounded_up and size_bytes >= _MIN_REGISTERED_BYTES:
            block = _registered_block(size_bytes, device)
        if block is not None:
            return torch.frombuffer(block, dtype=torch.uint8)
        with suppress(RuntimeError), choosing_device(device):
            return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    if not size_bytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(new_block(size_bytes), dtype=torch.uint8)


def pinned_block(size_bytes: int, device: torch.device) -> Memory:
    """Allocate memory as `pinned_memory` does, as a block to read into."""
    memory: Any = pinned_memory(size_bytes, device).numpy()
    return memoryview(memory)


class RegisteredBlock(Block):
    """Memory that stays registered (pinned) while it is referenced.

    A forked process sees empty memory.

    Attributes:
        device: The device with whose backend it is registered; None if it is not registered.
        process: The id of the process that has registered it.
    """

    device: torch.device | None = None
    process = 0

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Unregister the memory before it is freed. At exit the system does both."""
        if self.device is not None and not is_ending() and self.process == os.getpid():
            with choosing_device(self.device):
                _runtime_of(self.device).cudaHostUnregister(address_of(self))


def _registered_block(size_bytes: int, device: torch.device) -> RegisteredBlock | None:
    """Allocate registered memory. Returns None if the backend cannot or does not register it."""
    runtime = _runtime_of(device)
    if runtime is None:
        return None
    block = new_block_of(RegisteredBlock, size_bytes)

    # A fork, such as a worker of a data loader, shares pages with this process. They are copied at
    # the first write of either process, and the device would go on with the old pages. So a fork
    # gets empty pages. It must have some, because unmapping would fail without them.
    with choosing_device(device), suppress(OSError):
        block.madvise(_WIPEONFORK)
        if not int(runtime.cudaHostRegister(address_of(block), size_bytes, _PORTABLE)):
            block.device, block.process = device, os.getpid()
            return block
        # Use the device once, to clear the error: the next kernel of the script would report it.
        with suppress(RuntimeError):
            torch.zeros(1, device=device)

    return None


def _runtime_of(device: torch.device) -> Any:
    """Return the runtime of CUDA or ROCm, which have the same names; None for other devices."""
    get_runtime = getattr(torch.get_device_module(device), "cudart", None)
    return None if get_runtime is None else get_runtime()


@dataclass(frozen=True, eq=False)
class Moment:
    """The work that a thread had queued on a device at one moment.

    Attributes:
        device: The device.
        event: An event after that work. None if the backend has no events: then `record_moment` has
            waited for the work.
    """

    device: torch.device
    event: Any

    def await_done(self) -> None:
        """Wait until the work is done."""
        if self.event is not None:
            _await_call(self.device, self.event.synchronize)


@torch.no_grad()
def record_moment(device: torch.device) -> Moment:
    """Record which work this thread has queued on the current stream of `device` so far.

    If the backend has no events, the call waits for the work.
    """
    event = None
    if has_streams(device):
        with suppress(RuntimeError), choosing_device(device):
            recorded: Any = torch.Event(device)
            recorded.record(torch.accelerator.current_stream(device))
            event = recorded
        if event is None:
            torch.accelerator.synchronize(device)
    return Moment(device, event)


@torch.no_grad()
def copy_to_host(pairs: Iterable[tuple[Tensor, Tensor]], after: Moment) -> None:
    """Copy device tensors to host tensors, once the work of `after` is done.

    A pair is (host tensor, device tensor). The copies run on a stream of their own, so other work
    of the device goes on. All bytes have arrived when the call returns.
    """
    stream = _new_stream(after.device)
    if stream is None:
        after.await_done()
        for host_tensor, device_tensor in pairs:
            host_tensor.copy_(device_tensor)
        return

    if after.event is not None:
        _await_call(after.device, lambda: stream.wait_event(after.event))
    try:
        with choosing_device(after.device), stream:
            for host_tensor, device_tensor in pairs:
                host_tensor.copy_(device_tensor, non_blocking=True)
    finally:
        # Also after a failure, because the caller may reuse the memory of the earlier copies.
        _await_call(after.device, stream.synchronize)


@torch.no_grad()
def host_pieces(flat: Tensor, piece_bytes: int = PIECE_BYTES) -> Iterator[Tensor]:
    """Yield the elements of a one-dimensional accelerator tensor in order, as pieces on the host.

    While the caller uses a piece, the next one is copied. A piece is valid until the caller
    requests the next one.
    """
    step = max(1, piece_bytes // flat.element_size())
    buffer_bytes = min(step, flat.numel()) * flat.element_size()
    buffers = [pinned_memory(buffer_bytes, flat.device) for _ in range(2)]
    in_flight: deque[tuple[Tensor, Moment]] = deque()
    try:
        for number, start in enumerate(range(0, flat.numel(), step)):
            elements = flat[start : start + step]
            piece = buffers[number % 2][: elements.nbytes].view(flat.dtype)
            piece.copy_(elements, non_blocking=has_streams(flat.device))
            in_flight.append((piece, record_moment(flat.device)))
            if number:
                yield _arrived_piece(in_flight)
        if in_flight:
            yield _arrived_piece(in_flight)
    finally:
        while in_flight:
            _arrived_piece(in_flight)


class PinnedBlocks(BlockAllocator):
    """Allocates pinned blocks, from which `devices` copy, and waits before a block is reused."""

    def __init__(self, devices: frozenset[torch.device]) -> None:
        self.devices = devices
        # the work that may still copy from a block, by the address of the block
        self._copies: dict[int, list[Moment]] = {}

    def make_block(self, size_bytes: int) -> Memory:
        return pinned_block(size_bytes, next(iter(self.devices)))

    def record_copies(self, block: Memory) -> None:
        """Record the work queued on the devices, which may still copy from the block."""
        self._copies[address_of(block)] = [record_moment(device) for device in self.devices]

    def await_copies(self, block: Memory) -> None:
        """Wait until no device copies from the block any more."""
        for moment in self._copies.pop(address_of(block), ()):
            moment.await_done()


def _arrived_piece(in_flight: deque[tuple[Tensor, Moment]]) -> Tensor:
    """Wait until the oldest piece has arrived on the host, and return it."""
    piece, moment = in_flight.popleft()
    moment.await_done()
    return piece


def _new_stream(device: torch.device) -> Any:
    """Make a stream. Returns None if the backend has no streams that can be selected."""
    if has_streams(device):
        with suppress(RuntimeError), choosing_device(device):
            stream = torch.Stream(device)
            with stream:
                return stream
    return None


def _await_call(device: torch.device, call: Callable[[], Any]) -> None:
    """Wait by `call`. If the backend does not support it, wait until `device` is idle.

    Errors of the device are raised in both cases.
    """
    with choosing_device(device):
        try:
            call()
        except RuntimeError:
            torch.accelerator.synchronize(device)
