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

from ft_ckpt.storage.io import Block, BlockAllocator, Memory, address_of, new_block, new_block_of

PIECE_BYTES = 8 << 20  # copied to the host while the previous piece is in use
_MIN_REGISTERED_BYTES = 16 << 20  # below, torch's allocator rounds up little and is faster
_WIPEONFORK = 18  # linux 4.14: MADV_WIPEONFORK
_PORTABLE = 1  # for all devices of the process


def is_accelerator(device: torch.device) -> bool:
    """Check whether tensors on `device` are outside of host memory."""
    return device.type not in ("cpu", "meta")


def current_device() -> torch.device | None:
    """Return the current accelerator of this thread, with its index, or None without one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    return torch.device(device.type, torch.accelerator.current_device_index())


def has_streams(device: torch.device) -> bool:
    """Check whether `device` is of the type of torch's current accelerator.

    No other type can have streams and events.
    """
    current = torch.accelerator.current_accelerator()
    return current is not None and is_accelerator(device) and device.type == current.type


def choosing_device(device: torch.device) -> AbstractContextManager[None]:
    """Make `device` this thread's current one in a block.

    A new thread would use, and initialise, the first device.
    """
    return torch.accelerator.device_index(device.index) if has_streams(device) else nullcontext()


def pinned_memory(size_bytes: int, device: torch.device) -> Tensor:
    """Allocate memory for copies from and to `device`: uint8, one dimension.

    Large memory is page-aligned.
    """
    if size_bytes and has_streams(device):
        # torch's allocator rounds up to a power of two
        is_rounded = size_bytes.bit_count() > 1
        is_registered = size_bytes >= _MIN_REGISTERED_BYTES and is_rounded
        block = _registered_block(size_bytes, device) if is_registered else None
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
    """Memory that stays registered with a backend while it is referenced.

    In a forked process it is empty.
    """

    device: torch.device | None = None  # set when it is registered
    process = 0  # id of the process that registered it

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Unregister the memory before it is freed; at exit the system does both."""
        if self.device is not None and not is_ending() and self.process == os.getpid():
            with choosing_device(self.device):
                _runtime_of(self.device).cudaHostUnregister(address_of(self))


def _registered_block(size_bytes: int, device: torch.device) -> RegisteredBlock | None:
    """Allocate registered memory; return None if the backend has none, or refuses."""
    runtime = _runtime_of(device)
    if runtime is None:
        return None
    block = new_block_of(RegisteredBlock, size_bytes)
    # Pages shared with a forked process, such as a data loader's worker, are copied at the first
    # write of either process, and the device would still use the old pages. So a fork gets empty
    # pages; without any, unmapping fails.
    with choosing_device(device), suppress(OSError):
        block.madvise(_WIPEONFORK)
        if not int(runtime.cudaHostRegister(address_of(block), size_bytes, _PORTABLE)):
            block.device, block.process = device, os.getpid()
            return block
        with suppress(RuntimeError):  # clears the error, which the next kernel would report
            torch.zeros(1, device=device)
    return None


def _runtime_of(device: torch.device) -> Any:
    """Return CUDA's runtime, or ROCm's with the same names: torch has no general call for this."""
    get_runtime = getattr(torch.get_device_module(device), "cudart", None)
    return None if get_runtime is None else get_runtime()


@dataclass(frozen=True, eq=False)
class Moment:
    """The work that a thread had queued on a device at some point."""

    device: torch.device
    event: Any  # None if the backend has no events: `record_moment` has waited for the work

    def await_done(self) -> None:
        if self.event is not None:
            _await_call(self.device, self.event.synchronize)


@torch.no_grad()
def record_moment(device: torch.device) -> Moment:
    """Record the work that this thread has queued on the current stream of `device`.

    The call blocks only if the backend has no events.
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
    """Fill host tensors (the first of each pair) from device tensors, after the moment `after`.

    The copies run on a stream of their own; other work of the device goes on. All bytes are there
    when this returns.
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
    finally:  # also after a failure: the caller may reuse the memory of the earlier copies
        _await_call(after.device, stream.synchronize)


@torch.no_grad()
def host_pieces(flat: Tensor, piece_bytes: int = PIECE_BYTES) -> Iterator[Tensor]:
    """Yield the elements of a one-dimensional accelerator tensor, in order, in pieces on the host.

    A piece is valid until the next one is requested, which is copied meanwhile.
    """
    step = max(1, piece_bytes // flat.element_size())
    buffer_bytes = min(step, flat.numel()) * flat.element_size()
    buffers = [pinned_memory(buffer_bytes, flat.device) for _ in range(2)]
    in_flight: deque[tuple[Tensor, Moment]] = deque()
    try:
        for number, start in enumerate(range(0, flat.numel(), step)):
            live = flat[start : start + step]
            piece = buffers[number % 2][: live.nbytes].view(flat.dtype)
            piece.copy_(live, non_blocking=has_streams(flat.device))
            in_flight.append((piece, record_moment(flat.device)))
            if number:
                yield _arrived_piece(in_flight)
        if in_flight:
            yield _arrived_piece(in_flight)
    finally:
        while in_flight:
            _arrived_piece(in_flight)


class PinnedBlocks(BlockAllocator):
    """Pinned blocks, from which `devices` copy on this thread's streams."""

    def __init__(self, devices: frozenset[torch.device]) -> None:
        self.devices = devices
        self._copied: dict[int, list[Moment]] = {}  # by the block's address

    def make_block(self, size_bytes: int) -> Memory:
        return pinned_block(size_bytes, next(iter(self.devices)))

    def record_copies(self, block: Memory) -> None:
        """Record the work queued on the devices, which may still copy from the block."""
        self._copied[address_of(block)] = [record_moment(device) for device in self.devices]

    def await_copies(self, block: Memory) -> None:
        for moment in self._copied.pop(address_of(block), ()):
            moment.await_done()


def _arrived_piece(in_flight: deque[tuple[Tensor, Moment]]) -> Tensor:
    piece, moment = in_flight.popleft()
    moment.await_done()
    return piece


def _new_stream(device: torch.device) -> Any:
    """Make a stream; return None if the backend has none that can be selected."""
    if has_streams(device):
        with suppress(RuntimeError), choosing_device(device):
            stream = torch.Stream(device)
            with stream:
                return stream
    return None


def _await_call(device: torch.device, call: Callable[[], Any]) -> None:
    """Wait by `call`, or if the backend does not support it, until `device` is idle.

    Errors of the device are raised either way.
    """
    with choosing_device(device):
        try:
            call()
        except RuntimeError:
            torch.accelerator.synchronize(device)
