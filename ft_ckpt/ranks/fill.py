"""Fills live tensors from stored ones: each rank reads its own elements, or rank 0 reads and
broadcasts.

Boxes come from the shardings of the current run, so the number of ranks may differ from that of the
save. Threads read many tensors ahead in byte order, bypassing the page cache if that is faster.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, product
from typing import NamedTuple

import torch
from torch import Tensor

from ft_ckpt.errors import LoadError, RankError, listing
from ft_ckpt.formats import (
    PLAIN,
    THREADS,
    Landing,
    StraightLanding,
    TensorFile,
    bytes_at,
    copy_bytes,
    dtype_name,
    read_runs,
    whole_run,
)
from ft_ckpt.ranks import gather
from ft_ckpt.ranks.gather import bytes_as, padded_size, wire_device
from ft_ckpt.ranks.ranks import Ranks, global_rank, try_action
from ft_ckpt.ranks.sharding import Box, part_count
from ft_ckpt.ranks.source import Source, box_memories
from ft_ckpt.storage import ByteRun, new_block, read_ahead

_SLICE_BYTES = 64 << 20  # per read, to bound the memory beside the tensor
_STAGE_BYTES = 16 << 20  # rows staged before their columns are copied out
_LEAST_RUN_BYTES = 64 << 10  # shorter runs of a box are read together with the bytes between them


@dataclass(frozen=True, eq=False)
class WantedBox:
    """One box of a tensor to fill from a stored tensor."""

    mine: Box  # in coordinates of `view`
    local: Tensor  # its memory
    view: tuple[int, ...]
    dtype: torch.dtype  # stored
    file: TensorFile
    name: str  # in the file


@dataclass(frozen=True, eq=False)
class WantedTensor:
    """This rank's elements of a tensor, to fill from a stored tensor."""

    info: Source
    local: Tensor | None  # memory of the `boxes`; None without elements
    file: TensorFile
    name: str  # in the file

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The elements of the tensor that this rank holds."""
        return self.info.sharding.local_boxes(global_rank())

    def in_boxes(self) -> list[WantedBox]:
        """The boxes with their memory; empty if this rank holds no element."""
        view, dtype = self.info.sharding.view, self.info.dtype
        memories = (
            []
            if self.local is None or not self.local.numel()
            else box_memories(self.boxes, self.local)
        )
        return [
            WantedBox(box, memory, view, dtype, self.file, self.name) for box, memory in memories
        ]


def fill_all(wanted: Iterable[WantedTensor], threads: int = THREADS, direct: str = "auto") -> int:
    """Overwrite this rank's elements of each tensor with the stored ones.

    Returns the number of bytes read.

    Memory beside the tensors: the blocks of `read_ahead`, and a stage of 16 MiB or one row where
    rows are staged. `direct`: as in `read_ahead`. Raises LoadError naming every tensor that is
    missing or of another shape or dtype, before anything is read; CorruptError if a file is too
    short or has changed.
    """
    tensors = list(wanted)
    check_all(tensors)
    landings: dict[ByteRun, Landing] = {}
    through_format = []
    for box in chain.from_iterable(tensor.in_boxes() for tensor in tensors):
        of_box = _landings_of_box(box)
        if of_box is None:
            through_format.append(box)
            continue
        landings.update(of_box)
    return read_runs(landings, threads, direct) + sum(map(_fill_box, through_format))


def fill_tensor(tensor: WantedTensor) -> int:
    """As `fill_all`, for one tensor, through the reader of the file's format."""
    check_all([tensor])
    return sum(map(_fill_box, tensor.in_boxes()))


def _fill_box(box: WantedBox) -> int:
    if _is_expanded(box.local):
        return _fill_expanded(box)
    first, rows = (box.mine.offsets[0], box.mine.sizes[0]) if box.view else (0, 1)
    row, count = math.prod(box.view[1:]), 0
    step = max(1, _SLICE_BYTES // max(1, row * box.dtype.itemsize))
    for low in range(first, first + rows, step):
        data = box.file.read(box.name, low * row, min(low + step, first + rows) * row)
        _put_rows(box, low, data.view(-1, *box.view[1:]))
        count += data.nbytes
    return count


def check_all(wanted: Iterable[WantedTensor]) -> None:
    """Raise LoadError naming each stored tensor that is missing or of another shape or dtype."""
    problems = [problem for tensor in wanted if (problem := _spec_problem(tensor))]
    if problems:
        raise LoadError(listing(problems))


def is_first_process() -> bool:
    """Whether this is rank 0 of its launch, or alone; known without a process group."""
    return os.environ.get("RANK", "0") == "0"


def readers_here() -> int:
    """Number of processes of this launch on this machine, which may read the same files."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(count) if count.isdigit() else 1


@dataclass(eq=False)
class _RowsLanding:
    """Stages whole rows for a box that has part of the columns, or a tensor with gaps or another
    dtype.
    """

    box: WantedBox
    low: int = 0  # rows of the box that are done
    filled: int = 0  # bytes in the stage
    stage: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))

    def put(self, data: Tensor) -> None:
        box, rows_of_box = self.box, self.box.mine.sizes[0]
        row_bytes = math.prod(box.view[1:]) * box.dtype.itemsize
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
                whole = self.stage[: self.filled].view(box.dtype).view(rows, *box.view[1:])
                _put_rows(box, box.mine.offsets[0] + self.low, whole)
                self.low, self.filled = self.low + rows, 0
                if self.low == rows_of_box:
                    self.stage = self.stage.new_empty(0)


def _put_rows(box: WantedBox, low: int, rows: Tensor) -> None:
    """Copy consecutive whole rows of the tensor, from row `low` on, into the box; rows outside of
    it are ignored.
    """
    if not box.view:
        box.local.copy_(rows.reshape(()))
        return
    first = box.mine.offsets[0]
    begin, end = max(low, first), min(low + rows.shape[0], first + box.mine.sizes[0])
    if begin < end:
        part = rows[begin - low : end - low]
        for dim in range(1, len(box.view)):
            part = part.narrow(dim, box.mine.offsets[dim], box.mine.sizes[dim])
        box.local[begin - first : end - first].copy_(part)


def _landings_of_box(box: WantedBox) -> dict[ByteRun, Landing] | None:
    """The byte ranges of this rank's box and their landings; None if it must be read through the
    file's format.
    """
    view, dtype = box.view, box.dtype
    local, mine, name, item = box.local, box.mine, box.name, dtype.itemsize
    run = whole_run(box.file, name)
    if (
        run is None
        or type(local) not in PLAIN
        or _is_expanded(local)
        or (not view and local.dtype != dtype)
    ):
        return None
    last = max((dim for dim, size in enumerate(view) if mine.sizes[dim] != size), default=0)
    size = math.prod(mine.sizes[last:]) * item
    if local.is_contiguous() and local.dtype == dtype and (not last or size >= _LEAST_RUN_BYTES):
        starts = (run.start + start * item for start in _run_starts(mine, view, last))
        return {
            ByteRun(name, run.file, start, size): StraightLanding(local, n * size)
            for n, start in enumerate(starts)
        }
    row_bytes = math.prod(view[1:]) * item
    rows = ByteRun(
        name, run.file, run.start + mine.offsets[0] * row_bytes, mine.sizes[0] * row_bytes
    )
    return {rows: _RowsLanding(box)}


def _run_starts(mine: Box, view: tuple[int, ...], last: int) -> Iterable[int]:
    """The starts of the box's runs in the flattened tensor, in order; `last` is the last dimension
    that is cut.
    """
    strides = [math.prod(view[dim + 1 :]) for dim in range(len(view))]
    places = [
        range(low, low + size) for low, size in zip(mine.offsets[:last], mine.sizes, strict=False)
    ]
    begin = sum(
        low * stride for low, stride in zip(mine.offsets[last:], strides[last:], strict=True)
    )
    for place in product(*places):
        yield begin + sum(index * stride for index, stride in zip(place, strides, strict=False))


def _spec_problem(tensor: WantedTensor) -> str | None:
    name, spec = tensor.name, tensor.file.specs.get(tensor.name)
    if not tensor.boxes and tensor.local is not None and tensor.local.numel():
        return (
            f"{tensor.info.name}: unknown which of its elements this rank holds "
            f"({tensor.info.engine})"
        )
    if spec is None:
        return f"{name}: not in the checkpoint, and {tensor.info.name} needs it"
    wanted = (tensor.info.shape, dtype_name(tensor.info.dtype))
    if (spec.shape, spec.dtype) == wanted:
        return None
    return (
        f"{name}: {spec.dtype} {list(spec.shape)} in the checkpoint, {wanted[1]} "
        f"{list(wanted[0])} in this run"
    )


def _is_expanded(local: Tensor) -> bool:
    """Whether several elements share memory, as in a result of `expand`."""
    return any(
        stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True)
    )


def _fill_expanded(box: WantedBox) -> int:
    """Fill each memory location once.

    Raises LoadError if the elements that share it differ in the file.
    """
    local = box.local
    whole = torch.empty(local.shape, dtype=local.dtype, device="cpu")
    size_bytes = _fill_box(replace(box, local=whole))
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in local.stride())
    expanded = whole[once].expand(local.shape).contiguous()
    if not torch.equal(expanded.view(-1).view(torch.uint8), whole.view(-1).view(torch.uint8)):
        raise LoadError(
            f"{box.name}: elements share memory here (made by expand), and differ in the checkpoint"
        )
    local[once].copy_(whole[once])
    return size_bytes


# (name in errors, function that lists the tensors)
Filler = Callable[[str, Callable[[], list[WantedTensor]]], None]
_BROADCAST_BYTES = 16 << 20  # per read of a tensor through its format
SMALL_RANGE_BYTES = 4 << 20  # smaller ranges of a rank are not worth a request to a bucket


def each_reads(_what: str, collect: Callable[[], list[WantedTensor]]) -> None:
    """Read this rank's elements of the tensors of `collect`.

    Not collective. Raises as `fill_all` and `collect`.
    """
    wanted = collect()
    check_all(wanted)
    fill_all(tensor for tensor in wanted if not _is_whole_everywhere(tensor))
    # Processes that read the same bytes share the page cache; with direct I/O each would read the
    # disk.
    fill_all(
        (tensor for tensor in wanted if _is_whole_everywhere(tensor)),
        direct="auto" if readers_here() == 1 else "off",
    )


def choose_filler(way: str, ranks: Ranks) -> Filler:
    """The filler for a `way` of SaverConfig.fan_out, or for "small": rank 0 reads small ranges for
    all ranks.

    With "small" and "broadcast" the filler is collective: all ranks must call it for the same
    tensors in the same order. An error of `collect` on one rank, or of rank 0's reads, is raised on
    all ranks.
    """
    if way not in ("broadcast", "small") or ranks.size == 1:
        return each_reads
    chosen = _is_whole_everywhere if way == "broadcast" else _is_small

    def fill(what: str, collect: Callable[[], list[WantedTensor]]) -> None:
        plan, error = try_action(lambda: _BroadcastPlan(collect(), chosen))
        ranks.agree(
            f"reading {what}",
            {"tensors": "" if plan is None else plan.digest},
            error,
            same=("tensors",),
        )
        assert plan is not None  # else `agree` has raised the error
        broadcast_tensors(plan, ranks)
        fill_all(plan.own)

    return fill


class _Rows(NamedTuple):
    """Rows [low, high) of a tensor's view, and their offsets in a bucket."""

    tensor: WantedTensor
    low: int
    high: int
    start: int
    stop: int  # both in bytes


class _BroadcastPlan:
    """The tensors to fill, and all memory for it, allocated first so that no rank fails between
    broadcasts.

    Needs BUCKET_BYTES beside the tensors, or the memory of one row if a row alone is larger. Raises
    as `check_all`.
    """

    def __init__(self, wanted: list[WantedTensor], chosen: Callable[[WantedTensor], bool]) -> None:
        check_all(wanted)
        self.common = _in_file_order([tensor for tensor in wanted if chosen(tensor)])
        self.own = [tensor for tensor in wanted if not chosen(tensor)]
        self.buckets = _cut_into_buckets(self.common, gather.BUCKET_BYTES)
        size_bytes = max((bucket[-1].stop for bucket in self.buckets), default=0)
        self.room = torch.empty(size_bytes + 1, dtype=torch.uint8, device=wire_device())

    @property
    def digest(self) -> str:
        """Equal on ranks that expect the same tensors."""
        described = (
            (one.name, one.info.shape, one.info.dtype, one.info.sharding.view)
            for one in self.common
        )
        expected = "\n".join(map(str, described))
        return hashlib.blake2b(expected.encode(), digest_size=8).hexdigest()


def _cut_into_buckets(wanted: Sequence[WantedTensor], limit: int) -> list[list[_Rows]]:
    """The tensors cut at whole rows into buckets of at most `limit` bytes, or one row."""
    buckets: list[list[_Rows]] = []
    for tensor in wanted:
        view = tensor.info.sharding.view
        rows, row_bytes = view[0] if view else 1, math.prod(view[1:]) * tensor.info.dtype.itemsize
        step = max(1, limit // max(1, row_bytes))
        for low in range(0, rows if row_bytes else 0, step):
            high = min(low + step, rows)
            start = padded_size(buckets[-1][-1].stop) if buckets else limit
            if start + (high - low) * row_bytes > limit:
                buckets.append([])
                start = 0
            buckets[-1].append(_Rows(tensor, low, high, start, start + (high - low) * row_bytes))
    return buckets


def broadcast_tensors(plan: _BroadcastPlan, ranks: Ranks) -> None:
    """Fill each rank's part of tensors that rank 0 reads. Collective, with the same tensors on all
    ranks.

    A read error is raised on rank 0, and RankError on the others; a rank's own copy error is raised
    there alone.
    """
    import torch.distributed as dist

    room = plan.room
    feed = _PieceFeed(_stored_pieces(plan.common)) if ranks.is_main else None
    own_error = None
    for bucket in plan.buckets:
        size, error = bucket[-1].stop, None
        if feed is not None:
            targets = [room[rows.start : rows.stop] for rows in bucket]
            _, error = try_action(partial(feed.fill_all, targets))
            room[size] = int(error is not None)
        dist.broadcast(room[: size + 1], src=0)
        if error is not None:
            raise error
        if room[size].item():
            raise RankError("rank 0 could not read the checkpoint; its own error says why")
        if own_error is None:
            _, own_error = try_action(lambda: _take_from(bucket, room))  # noqa: B023 - called at once
    if own_error is not None:  # raised last, because the broadcasts needed this rank
        raise own_error


def _take_from(bucket: Sequence[_Rows], room: Tensor) -> None:
    """Copy this rank's elements from the buffer of a bucket."""
    for rows in bucket:
        shape = (rows.high - rows.low, *rows.tensor.info.sharding.view[1:])
        for box in rows.tensor.in_boxes():
            _put_rows(box, rows.low, bytes_as(room, rows.start, box.dtype, shape))


def _is_whole_everywhere(tensor: WantedTensor) -> bool:
    """Whether every rank holds the whole tensor; the same on all ranks."""
    sharding = tensor.info.sharding
    return not sharding.is_sharded and not sharding.is_opaque


def _is_small(tensor: WantedTensor) -> bool:
    """Whether each rank would read a small range of the tensor; must be the same on all ranks."""
    sharding = tensor.info.sharding
    return not sharding.is_opaque and tensor.info.size_bytes < SMALL_RANGE_BYTES * part_count(
        sharding
    )


def _in_file_order(wanted: list[WantedTensor]) -> list[WantedTensor]:
    """The tensors in the order of their bytes in the files; the same on all ranks."""
    files = {id(tensor.file): tensor.file for tensor in wanted}
    places = {key: {name: at for at, name in enumerate(file.specs)} for key, file in files.items()}
    order = {key: number for number, key in enumerate(files)}
    return sorted(
        wanted, key=lambda tensor: (order[id(tensor.file)], places[id(tensor.file)][tensor.name])
    )


class _PieceFeed:
    """Copies a stream of pieces of any size into buffers of other sizes."""

    def __init__(self, pieces: Iterator[Tensor]) -> None:
        self._pieces, self._rest = pieces, torch.empty(0, dtype=torch.uint8, device="cpu")

    def fill_all(self, targets: Iterable[Tensor]) -> None:
        """Fill `targets` in order with the next bytes of the stream."""
        for target in targets:
            left = target
            while left.numel():
                if not self._rest.numel():
                    self._rest = next(self._pieces)
                count = min(left.numel(), self._rest.numel())
                left[:count].copy_(self._rest[:count])
                left, self._rest = left[count:], self._rest[count:]


@torch.no_grad()
def _stored_pieces(wanted: Sequence[WantedTensor]) -> Iterator[Tensor]:
    """The bytes of the stored tensors in order; each piece is valid until the next."""
    with_runs = [(tensor, whole_run(tensor.file, tensor.name)) for tensor in wanted]
    for is_plain, group in groupby(with_runs, lambda item: item[1] is not None):
        if is_plain:
            for part in read_ahead(run for _, run in group if run is not None):
                yield bytes_at(part.address, part.size_bytes)
            continue
        for tensor, _ in group:
            step, numel = max(1, _BROADCAST_BYTES // tensor.info.dtype.itemsize), tensor.info.numel
            for start in range(0, numel, step):
                yield tensor.file.read(tensor.name, start, min(start + step, numel)).view(
                    torch.uint8
                )
