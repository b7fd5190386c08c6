"""Fills live tensors from stored ones: each rank reads the elements that it holds.

A rank holds one or several boxes of a tensor: a box is a range of indices in each dimension. The
boxes are those of the current run, so the number of ranks may differ from that of the save. Threads
read many tensors ahead in byte order, with direct I/O (bypassing the page cache) if that is faster.

A landing is the memory in which bytes of a file end. If a box is contiguous in the file, its bytes
go directly into the tensor. Otherwise whole rows are read, and the columns of the box are copied.
"""

import math
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor

from ft_ckpt.errors import LoadError, listing
from ft_ckpt.formats import dtype_name
from ft_ckpt.formats.files import (
    THREADS,
    Landing,
    StraightLanding,
    TensorFile,
    copy_bytes,
    read_runs,
    whole_run,
)
from ft_ckpt.formats.trees import PLAIN
from ft_ckpt.ranks.sharding import Box, Source, box_memories, global_rank
from ft_ckpt.storage.io import ByteRun, new_block

# A reader of a format reads this much at a time, in addition to the memory of the tensor.
_SLICE_BYTES = 64 << 20
# This many bytes of whole rows are collected before their columns are copied.
_STAGE_BYTES = 16 << 20
# If the runs of a box (its consecutive bytes in the file) are shorter, they are read together with
# the bytes between them.
_MIN_RUN_BYTES = 64 << 10


@dataclass(frozen=True, eq=False)
class WantedBox:
    """One box of a tensor to fill from a stored tensor.

    Attributes:
        box: The box, in coordinates of `view`.
        local: The memory of the box.
        view: The shape of the whole tensor, or (numel,) if it is flattened.
        dtype: The stored dtype.
        file: The file of the stored tensor.
        name: Its name in the file.
    """

    box: Box
    local: Tensor
    view: tuple[int, ...]
    dtype: torch.dtype
    file: TensorFile
    name: str


@dataclass(frozen=True, eq=False)
class WantedTensor:
    """The elements of a tensor that this rank holds, to fill from a stored tensor.

    Attributes:
        info: The tensor.
        local: The memory of the `boxes`; None if this rank holds no elements.
        file: The file of the stored tensor.
        name: Its name in the file.
    """

    info: Source
    local: Tensor | None
    file: TensorFile
    name: str

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The elements of the tensor that this rank holds."""
        return self.info.sharding.local_boxes(global_rank())

    def in_boxes(self) -> list[WantedBox]:
        """Return the boxes with their memory, none if this rank holds no element."""
        if self.local is None or not self.local.numel():
            return []
        view, dtype = self.info.sharding.view, self.info.dtype
        boxes = []
        for box, memory in box_memories(self.boxes, self.local):
            boxes.append(WantedBox(box, memory, view, dtype, self.file, self.name))
        return boxes


def fill_all(tensors: Iterable[WantedTensor], threads: int = THREADS, direct: str = "auto") -> int:
    """Overwrite this rank's elements of each tensor with the stored ones; return the bytes read.

    `threads` and `direct` are passed to `read_ahead`. In addition to the tensors this needs memory
    for the blocks of `read_ahead`, and 16 MiB or one row for a tensor whose rows are staged. Raises
    LoadError naming every tensor that is missing or of another shape or dtype, before anything is
    read; CorruptError if a file is too short or has changed.
    """
    tensors = list(tensors)
    check_all(tensors)
    landings: dict[ByteRun, Landing] = {}
    through_format = []
    for tensor in tensors:
        for wanted_box in tensor.in_boxes():
            landings_of_box = _landings_of_box(wanted_box)
            if landings_of_box is None:
                through_format.append(wanted_box)
            else:
                landings.update(landings_of_box)
    return read_runs(landings, threads, direct) + sum(map(_fill_box, through_format))


def fill_tensor(tensor: WantedTensor) -> int:
    """Overwrite this rank's elements of one tensor, through the reader of the file's format.

    Returns the number of bytes read. Raises what `fill_all` raises.
    """
    check_all([tensor])
    return sum(map(_fill_box, tensor.in_boxes()))


def _fill_box(target: WantedBox) -> int:
    """Fill one box through the reader of the file's format; return the bytes read."""
    if _is_expanded(target.local):
        return _fill_expanded(target)
    first, stop = 0, 1
    if target.view:
        first = target.box.offsets[0]
        stop = first + target.box.sizes[0]

    row_numel = math.prod(target.view[1:])
    step = max(1, _SLICE_BYTES // max(1, row_numel * target.dtype.itemsize))
    size_bytes = 0
    for low in range(first, stop, step):
        high = min(low + step, stop)
        data = target.file.read(target.name, low * row_numel, high * row_numel)
        put_rows(target, low, data.view(-1, *target.view[1:]))
        size_bytes += data.nbytes

    return size_bytes


def check_all(tensors: Iterable[WantedTensor]) -> None:
    """Raise LoadError naming each stored tensor that is missing or of another shape or dtype."""
    problems = []
    for tensor in tensors:
        problem = _spec_problem(tensor)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise LoadError(listing(problems))


def is_first_process() -> bool:
    """Check whether this is rank 0 of its launch, or the only process.

    The environment says so, and no process group is needed.
    """
    return os.environ.get("RANK", "0") == "0"


def readers_here() -> int:
    """Return the number of processes of this launch on this machine."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(count) if count.isdigit() else 1


@dataclass(eq=False)
class _RowsLanding:
    """Collects whole rows for a box that has only some columns, gaps in memory, or another dtype.

    Attributes:
        target: The box.
        low: How many rows of the box are done.
        filled: How many bytes are in the stage.
        stage: Memory for the next rows.
    """

    target: WantedBox
    low: int = 0
    filled: int = 0
    stage: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))

    def put(self, data: Tensor) -> None:
        target, rows_of_box = self.target, self.target.box.sizes[0]
        row_bytes = math.prod(target.view[1:]) * target.dtype.itemsize
        step = max(1, _STAGE_BYTES // row_bytes)
        while data.numel():
            rows = min(step, rows_of_box - self.low)
            if not self.stage.numel():
                # separate pages: freed at once, without fragmenting the heap
                self.stage = torch.frombuffer(new_block(rows * row_bytes), dtype=torch.uint8)
            count = min(data.numel(), rows * row_bytes - self.filled)
            copy_bytes(self.stage, self.filled, data[:count])
            data, self.filled = data[count:], self.filled + count
            if self.filled == rows * row_bytes:
                whole = self.stage[: self.filled].view(target.dtype).view(rows, *target.view[1:])
                put_rows(target, target.box.offsets[0] + self.low, whole)
                self.low, self.filled = self.low + rows, 0
                if self.low == rows_of_box:
                    self.stage = self.stage.new_empty(0)


def put_rows(target: WantedBox, low: int, rows: Tensor) -> None:
    """Copy consecutive whole rows of the tensor, from row `low` on, into the box.

    Rows outside the box are ignored.
    """
    box = target.box
    if not target.view:
        target.local.copy_(rows.reshape(()))
        return
    first = box.offsets[0]
    begin, end = max(low, first), min(low + rows.shape[0], first + box.sizes[0])
    if begin < end:
        part = rows[begin - low : end - low]
        for dim in range(1, len(target.view)):
            part = part.narrow(dim, box.offsets[dim], box.sizes[dim])
        target.local[begin - first : end - first].copy_(part)


def _landings_of_box(target: WantedBox) -> dict[ByteRun, Landing] | None:
    """Return the byte ranges of a box in the file, each with its landing.

    For example, the columns 0 and 1 of a tensor of shape (2, 4) are the elements [0, 2) and [4, 6).
    Each of these runs is one range. If runs are short, one range has whole rows. Returns None if
    the box must be read through the reader of the file's format.
    """
    local, box, view = target.local, target.box, target.view
    has_dtype, item_bytes = local.dtype == target.dtype, target.dtype.itemsize
    run = whole_run(target.file, target.name)
    if run is None or type(local) not in PLAIN or _is_expanded(local):
        return None
    if not view and not has_dtype:
        return None
    last_cut = 0  # the last dimension that is cut
    for dim, size in enumerate(view):
        if box.sizes[dim] != size:
            last_cut = dim

    run_bytes = math.prod(box.sizes[last_cut:]) * item_bytes
    is_long = last_cut == 0 or run_bytes >= _MIN_RUN_BYTES
    landings: dict[ByteRun, Landing] = {}
    if local.is_contiguous() and has_dtype and is_long:
        for number, first in enumerate(_run_starts(box, view, last_cut)):
            start = run.start + first * item_bytes
            piece = ByteRun(target.name, run.file, start, run_bytes)
            landings[piece] = StraightLanding(local, number * run_bytes)
        return landings

    row_bytes = math.prod(view[1:]) * item_bytes
    start, size_bytes = run.start + box.offsets[0] * row_bytes, box.sizes[0] * row_bytes
    landings[ByteRun(target.name, run.file, start, size_bytes)] = _RowsLanding(target)
    return landings


def _run_starts(box: Box, view: tuple[int, ...], last_cut: int) -> Iterable[int]:
    """Yield the first element of each run of the box in the flattened tensor, in order."""
    strides = [math.prod(view[dim + 1 :]) for dim in range(len(view))]
    indices = []  # in each dimension before the last one that is cut
    for dim in range(last_cut):
        low = box.offsets[dim]
        indices.append(range(low, low + box.sizes[dim]))
    first = sum(map(operator.mul, box.offsets[last_cut:], strides[last_cut:]))
    for place in product(*indices):
        yield first + sum(map(operator.mul, place, strides))


def _spec_problem(tensor: WantedTensor) -> str | None:
    name, spec = tensor.name, tensor.file.specs.get(tensor.name)
    if not tensor.boxes and tensor.local is not None and tensor.local.numel():
        return (
            f"{tensor.info.name}: unknown which of its elements this rank holds "
            f"({tensor.info.engine})"
        )

    if spec is None:
        return f"{name}: not in the checkpoint, and {tensor.info.name} needs it"
    shape, dtype = tensor.info.shape, dtype_name(tensor.info.dtype)
    if (spec.shape, spec.dtype) == (shape, dtype):
        return None
    return (
        f"{name}: {spec.dtype} {list(spec.shape)} in the checkpoint, {dtype} "
        f"{list(shape)} in this run"
    )


def _is_expanded(local: Tensor) -> bool:
    """Check whether several elements share memory, as in a result of `expand`."""
    pairs = zip(local.stride(), local.shape, strict=True)
    return any(stride == 0 and size > 1 for stride, size in pairs)


def _fill_expanded(target: WantedBox) -> int:
    """Fill each memory location once; return the bytes read.

    Raises LoadError if elements that share a location differ in the file.
    """
    local = target.local
    whole = torch.empty(local.shape, dtype=local.dtype, device="cpu")
    size_bytes = _fill_box(replace(target, local=whole))
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in local.stride())
    expanded = whole[once].expand(local.shape).contiguous()
    if not torch.equal(expanded.view(-1).view(torch.uint8), whole.view(-1).view(torch.uint8)):
        raise LoadError(
            f"{target.name}: elements share memory here (made by expand), and differ in the "
            "checkpoint"
        )
    local[once].copy_(whole[once])
    return size_bytes
