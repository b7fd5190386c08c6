"""Reads many tensors in the order of their bytes: by threads, ahead, past the page cache where that pays."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ft_ckpt.formats.layout import TensorFile
from ft_ckpt.storage.read_ahead import ByteRun, read_ahead

THREADS = 4


class Landing(Protocol):
    """Takes the bytes of a run, in order and in pieces of any size."""

    def put(self, data: Tensor) -> None:
        """The next bytes, one dimension of uint8, which may be overwritten after this."""
        ...


@dataclass(eq=False)
class StraightLanding:
    """Copies the next bytes into the memory of the tensor itself, from byte `at` on."""

    local: Tensor  # contiguous
    at: int = 0

    def put(self, data: Tensor) -> None:
        """Copy the next bytes into their place."""
        end = self.at + data.numel()
        if self.local.device.type == "cpu" and data.device.type == "cpu":
            copy_bytes(self.local, self.at, data)
        else:
            flat = self.local.as_strided((self.local.numel(),), (1,))  # one element may have any stride
            flat.view(torch.uint8)[self.at : end].copy_(data)
        self.at = end


def read_runs(landings: Mapping[ByteRun, Landing], threads: int = THREADS, direct: str = "auto") -> int:
    """Read all runs in the order of their bytes and hand each to its landing. Returns the bytes read."""
    order = {id(file): place for place, file in enumerate(run.file for run in landings)}
    runs = sorted(landings, key=lambda run: (order[id(run.file)], run.start))
    for part in read_ahead(runs, threads, direct):
        landings[part.run].put(bytes_at(part.address, part.size_bytes))
    return sum(run.size_bytes for run in runs)


def read_onto(file: TensorFile, device: torch.device, threads: int = THREADS) -> dict[str, Tensor]:
    """All tensors of `file` by name in new memory of `device`, read straight into it a block at a time."""
    tensors, landings = {}, dict[ByteRun, Landing]()
    for name, spec in file.specs.items():
        run = whole_run(file, name)
        if run is None:
            tensors[name] = file.read(name).view(spec.shape).to(device)
            continue
        tensors[name] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        if run.size_bytes:
            landings[run] = StraightLanding(tensors[name])
    read_runs(landings, threads)
    return tensors


def whole_run(file: TensorFile, name: str) -> ByteRun | None:
    """The byte range of the tensor in its file; None when it has to be read through its format."""
    ask = getattr(file, "runs", None)
    runs = None if ask is None or getattr(file, "verify", False) else ask(name)
    return runs[0] if runs is not None and len(runs) == 1 else None


def bytes_at(address: int, size_bytes: int) -> Tensor:
    """Memory seen as a tensor; it does not keep the memory."""
    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)


def copy_bytes(to: Tensor, at: int, data: Tensor) -> None:
    """Copy bytes into the host memory of `to`: not as torch does it, whose threads wait for each other by spinning."""
    ctypes.memmove(to.data_ptr() + at, data.data_ptr(), data.numel())
    torch.autograd.graph.increment_version(to)
