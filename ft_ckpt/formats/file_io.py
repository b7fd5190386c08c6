"""Reads many tensors of a file in parallel, ahead of use, and writes new tensor files."""

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from ft_ckpt.devices import PinnedBlocks, has_streams
from ft_ckpt.errors import IncompleteError
from ft_ckpt.formats.layout import Layout, TensorFile, TensorRecord
from ft_ckpt.storage import (
    ByteRun,
    DurableFile,
    FileRecord,
    Region,
    Store,
    Writer,
    is_in_page_cache,
    read_ahead,
    read_in_place,
    region_of,
    whole_digest,
)

THREADS = 4


class Landing(Protocol):
    """Takes the bytes of a run, in order and in pieces of any size."""

    def put(self, data: Tensor) -> None:
        """Take the next bytes (1-D, uint8); `data` may be overwritten as soon as this returns."""
        ...


@dataclass(eq=False)
class StraightLanding:
    """Copies the next bytes into the tensor's own memory, from byte `at` on."""

    local: Tensor  # contiguous
    at: int = 0

    def put(self, data: Tensor, *, lasts: bool = False) -> None:
        """Copy the next bytes into place; asynchronously if `data` lasts until the device has
        copied it.
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

    Tensors on accelerators are filled through pinned blocks, and are complete for all streams when
    this returns.
    """
    in_place: dict[ByteRun, Tensor] = {}
    for run, landing in landings.items():
        tensor = _tensor_to_fill(run, landing)
        if tensor is not None:
            in_place[run] = tensor
    read_in_place({run: tensor.data_ptr() for run, tensor in in_place.items()}, threads)
    for tensor in in_place.values():
        torch.autograd.graph.increment_version(tensor)
    order = {id(file): place for place, file in enumerate(run.file for run in landings)}
    streamed = landings.keys() - in_place.keys()
    runs = sorted(streamed, key=lambda run: (order[id(run.file)], run.start))
    places = {one.local.device for one in landings.values() if isinstance(one, StraightLanding)}
    devices = frozenset(filter(has_streams, places))
    keeper = PinnedBlocks(devices) if devices else None
    for part in read_ahead(runs, threads, direct, keeper=keeper):
        landing, data = landings[part.run], bytes_at(part.address, part.size_bytes)
        if isinstance(landing, StraightLanding):
            landing.put(data, lasts=landing.local.device in devices)
        else:
            landing.put(data)
    return sum(run.size_bytes for run in landings)


def _tensor_to_fill(run: ByteRun, landing: Landing) -> Tensor | None:
    """The host tensor whose whole memory takes the bytes of `run` as they are in the page cache."""
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
        """The tensor `name` of the file; `read_all` fills it."""
        spec, run = self._file.specs[name], whole_run(self._file, name)
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
    """All tensors of `file` by name, read directly into new memory of `device`."""
    coming = DeviceTensors(file, device)
    tensors = {name: coming.new_tensor(name) for name in file.specs}
    coming.read_all()
    return tensors


def whole_run(file: TensorFile, name: str) -> ByteRun | None:
    """The byte range of the tensor in its file; None when it has to be read through its format."""
    ask = getattr(file, "runs", None)
    runs = None if ask is None or getattr(file, "verify", False) else ask(name)
    return runs[0] if runs is not None and len(runs) == 1 else None


def bytes_at(address: int, size_bytes: int) -> Tensor:
    """A tensor over existing memory, which it does not keep alive."""
    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=torch.uint8)


def copy_bytes(to: Tensor, at: int, data: Tensor) -> None:
    """Copy bytes into the host memory of `to`, by memmove: torch's copy threads wait for each other
    by spinning.
    """
    ctypes.memmove(to.data_ptr() + at, data.data_ptr(), data.numel())
    torch.autograd.graph.increment_version(to)


@dataclass(frozen=True)
class FilePlan:
    """A weight file to write: its path, relative to the checkpoint, and its layout."""

    path: str
    layout: Layout

    def records(self) -> list[TensorRecord]:
        """The record of each tensor, with its offsets."""
        return [
            TensorRecord(
                spec.name, spec.shape, spec.dtype, self.path, start, start + spec.size_bytes
            )
            for spec, start in zip(self.layout.specs, self.layout.starts, strict=True)
        ]


def write_file(
    plan: FilePlan, regions: Iterable[Region], store: Store, writer: Writer
) -> FileRecord:
    """Write the planned file from `regions`: the bytes of its tensors, in the order of the layout.

    Raises IncompleteError when a region is not the one the layout expects next, NoSpaceError when
    the disk is full.
    """
    layout, feed = plan.layout, iter(regions)
    with writer.fill(store.create(plan.path, layout.size_bytes)) as file:
        file.put_region(region_of(0, layout.header))
        end = _fill_tensors(file, layout, feed)
        file.put_zeros(end, layout.size_bytes)
        for extra in feed:
            raise IncompleteError(
                f"{plan.path}: {_describe_region(extra)} came after the last planned tensor; "
                "nothing is kept"
            )
        digest = file.finish()
    etag = None if file.stored is None else file.stored.etag
    sha256 = None if file.sha256 is None else file.sha256.hexdigest()
    return FileRecord(plan.path, layout.size_bytes, whole_digest(digest), etag=etag, sha256=sha256)


def _fill_tensors(file: DurableFile, layout: Layout, feed: Iterator[Region]) -> int:
    """Write the tensors and the trailer of a file; returns the offset of their end."""
    digests = (
        {spec.name: xxhash.xxh3_128() for spec in layout.specs}
        if layout.trailer is not None
        else {}
    )
    end = len(layout.header)
    for spec, start in zip(layout.specs, layout.starts, strict=True):
        file.put_zeros(end, start)
        end = start + spec.size_bytes
        for region in _next_regions(spec.name, start, end, feed):
            file.put_region(region, digests.get(spec.name))
    if layout.trailer is None or layout.trailer_start is None:
        return end
    file.put_zeros(end, layout.trailer_start)
    file.await_digests()
    trailer = layout.trailer({name: digest.digest() for name, digest in digests.items()})
    file.put_region(region_of(layout.trailer_start, trailer))
    return layout.trailer_start + len(trailer)


def _next_regions(name: str, start: int, end: int, feed: Iterator[Region]) -> Iterator[Region]:
    """The regions of one tensor. Raises IncompleteError when other regions arrive."""
    while start < end:
        region = next(feed, None)
        if region is None or region.start != start or region.size_bytes > end - start:
            found = "nothing" if region is None else _describe_region(region)
            raise IncompleteError(
                f"{name}: {end - start} bytes missing when {found} came; nothing is kept"
            )
        yield region
        start += region.size_bytes


def _describe_region(region: Region) -> str:
    return f"{region.size_bytes} bytes for byte {region.start} of the file"
