"""Which devices there are beside the host."""

from contextlib import AbstractContextManager, nullcontext

import torch


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
