"""Host memory that stays in its place, so that an accelerator copies from and to it by itself, at the line's rate.

torch's own allocator rounds what is asked for up to a power of two, and keeps it. For blocks of such sizes that is
just right; a snapshot would take up to twice its size. So where a backend registers memory that is there already, that
is done; else torch's allocator serves, and where it has none, plain memory, through which copies are right but slower.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.devices.accelerators import choosing_device, has_streams
from ft_ckpt.storage.buffers import Block, Memory, address_of, new_block, new_block_of

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
