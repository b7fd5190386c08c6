"""Reads many tensors of files in parallel, ahead of use, into memory of the host or a device.

A run is a range of bytes in a file. A landing receives the bytes of one run.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ft_ckpt.devices import PinnedBlocks, has_streams
from ft_ckpt.formats.files.tensor_file import TensorFile
from ft_ckpt.storage.io import ByteRun, is_in_page_cache, read_ahead, read_in_place

THREADS = 4


class Landing(Protocol):
    """Receives the bytes of a run, in order and in pieces of any size."""

    def put(self, data: Tensor) -> None:
        """Take the next bytes (1-D, uint8); `data` may be overwritten as soon as this returns."""
        ...


@dataclass(eq=False)
class StraightLanding:
    """Copies the next bytes into the tensor's own memory, from byte `at` on."""

    local: Tensor  # contiguous
    at: int = 0

    def put(self, data: Tensor, *, lasts: bool = False) -> None:
        """Copy the next bytes into place.

        With `lasts`, `data` stays valid until a device has copied it, and the copy is asynchronous.
        """
        end = self.at + data.numel()
        if self.local.device.type == "cpu" and data.device.type == "cpu":
            copy_bytes(self.local, self.at, data)
        else:
            # one element may have any stride
            flat = self.local.as_strided((self.local.numel(),), (1,))
            flat.view(torch.uint8)[self.at : end].copy_(data, non_blocking=lasts)
        self.at = end


def read_runs(
    landings: Mapping[ByteRun, Landing], threads: int = THREADS, direct: str = "auto"
) -> int:
    """Read all runs in file order and pass each to its landing. Returns the number of bytes.

    A run that is in the page cache is copied directly into its host tensor. Tensors on accelerators
    are filled through pinned blocks, and are complete for all streams when this returns.
    """
    in_place: dict[ByteRun, Tensor] = {}
    for run, landing in landings.items():
        tensor = _tensor_to_fill(run, landing)
        if tensor is not None:
            in_place[run] = tensor

    read_in_place({run: tensor.data_ptr() for run, tensor in in_place.items()}, threads)
    for tensor in in_place.values():
        torch.autograd.graph.increment_version(tensor)
    file_numbers: dict[int, int] = {}
    for run in landings:
        file_numbers.setdefault(id(run.file), len(file_numbers))
    streamed = landings.keys() - in_place.keys()
    runs = sorted(streamed, key=lambda run: (file_numbers[id(run.file)], run.start))
    straight = [entry for entry in landings.values() if isinstance(entry, StraightLanding)]
    devices = frozenset(filter(has_streams, {landing.local.device for landing in straight}))
    pinned_blocks = PinnedBlocks(devices) if devices else None
    for part in read_ahead(runs, threads, direct, allocator=pinned_blocks):
        landing, data = landings[part.run], bytes_at(part.address, part.size_bytes)
        if isinstance(landing, StraightLanding):
            landing.put(data, lasts=landing.local.device in devices)
        else:
            landing.put(data)

    return sum(run.size_bytes for run in landings)


def _tensor_to_fill(run: ByteRun, landing: Landing) -> Tensor | None:
    """Return the host tensor that the bytes of `run` fill, if they are in the page cache."""
    if not isinstance(landing, StraightLanding) or landing.local.device.type != "cpu":
        return None
    if landing.at or landing.local.nbytes != run.size_bytes or not is_in_page_cache(run):
        return None
    return landing.local


class DeviceTensors:
    """New tensors on a device, read block by block directly into its memory."""

    def __init__(self, file: TensorFile, device: torch.device) -> None:
        self._file, self._device = file, device
        self._landings: dict[ByteRun, Landing] = {}

    def new_tensor(self, name: str) -> Tensor:
        """Allocate the tensor `name` of the file; `read_all` fills it."""
        spec = self._file.specs[name]
        run = whole_run(self._file, name)
        if run is None:
            return self._file.read(name).view(spec.shape).to(self._device)
        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
        if run.size_bytes:
            self._landings[run] = StraightLanding(tensor)
        return tensor

    def read_all(self, threads: int = THREADS) -> None:
        """Read the values of all tensors.

        Raises CorruptError when the file is too short or has changed.
        """
        read_runs(self._landings, threads)


def read_onto(file: TensorFile, device: torch.device) -> dict[str, Tensor]:
    """Read all tensors of `file` directly into new memory of `device`, by name."""
    device_tensors = DeviceTensors(file, device)
    tensors = {name: device_tensors.new_tensor(name) for name in file.specs}
    device_tensors.read_all()
    return tensors


def whole_run(file: TensorFile, name: str) -> ByteRun | None:
    """Return the byte range of a tensor, or None if it has to be read through its format."""
    runs = file.runs(name)
    return runs[0] if runs is not None and len(runs) == 1 else None


def bytes_at(address: int, size_bytes: int) -> Tensor:
    """Make a tensor over existing memory, which it does not keep alive."""
    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)


def copy_bytes(to: Tensor, at: int, data: Tensor) -> None:
    """Copy bytes into the host memory of `to`, from byte `at` on.

    memmove does it, because torch's copy threads wait for each other by spinning.
    """
    ctypes.memmove(to.data_ptr() + at, data.data_ptr(), data.numel())
    torch.autograd.graph.increment_version(to)
