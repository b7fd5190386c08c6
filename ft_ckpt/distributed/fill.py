"""Fills live tensors from stored ones: each rank reads its own elements, or rank 0 reads and broadcasts.

Boxes come from the shardings of the present run, so a file written on any number of ranks can be read by any other.
Many tensors are filled in the order of their bytes, read ahead by threads, past the page cache if that is faster.
"""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, product

import torch
from torch import Tensor

from ft_ckpt.distributed.gather import wire_device
from ft_ckpt.distributed.ranks import Ranks, global_rank, try_action
from ft_ckpt.distributed.sharding import Box
from ft_ckpt.distributed.source import Source, box_memories
from ft_ckpt.errors import LoadError, RankError, listing
from ft_ckpt.formats.dtypes import dtype_name
from ft_ckpt.formats.file_io import THREADS, Landing, StraightLanding, bytes_at, copy_bytes, read_runs, whole_run
from ft_ckpt.formats.layout import TensorFile
from ft_ckpt.formats.pytree import PLAIN
from ft_ckpt.formats.tensor_file import due_proof
from ft_ckpt.storage.proofs import FileProof
from ft_ckpt.storage.read_ahead import ByteRun, new_block, read_ahead

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
        memories = [] if self.local is None or not self.local.numel() else box_memories(self.boxes, self.local)
        return [WantedBox(box, memory, view, dtype, self.file, self.name) for box, memory in memories]


def fill_all(wanted: Iterable[WantedTensor], threads: int = THREADS, direct: str = "auto") -> int:
    """Overwrite this rank's elements of each tensor with the stored ones. Returns the number of bytes.

    Needs `threads` + 2 blocks of memory beside the tensors. `direct`: as in `read_ahead`. Digests of files that are due
    are computed while reading; the caller compares them. Raises LoadError naming every tensor that is missing or of
    another shape or dtype, before anything is read; CorruptError if a file is too short or has changed.
    """
    asked = list(wanted)
    check_all(asked)
    landings: dict[ByteRun, Landing] = {}
    due: dict[int, FileProof] = {}
    wanted_bytes: Counter[int] = Counter()
    others = []
    for box in chain.from_iterable(tensor.in_boxes() for tensor in asked):
        found = _landings_of_box(box)
        if found is None:
            others.append(box)
            continue
        landings.update(found)
        proof = due_proof(box.file)
        if proof is not None:
            due.update({id(run.file): proof for run in found if run.file.size_bytes == proof.record.size_bytes})
        for run in found:
            wanted_bytes[id(run.file)] += run.size_bytes
    for file, proof in due.items():
        proof.widen_for(wanted_bytes[file])
    return read_runs(landings, threads, direct, due) + sum(_fill_box(box) for box in others)


def fill_tensor(tensor: WantedTensor) -> int:
    """As `fill_all`, for one tensor, through the reader of the file's format."""
    check_all([tensor])
    return sum(map(_fill_box, tensor.in_boxes()))


def _fill_box(box: WantedBox) -> int:
    if _is_expanded(box.local):
        return _fill_expanded(box)
    if not box.view:
        box.local.copy_(box.file.read(box.name).reshape(()))
        return box.dtype.itemsize
    return sum(_fill_rows(box, low, high) for low, high in _row_ranges(box))


def check_all(wanted: Iterable[WantedTensor]) -> None:
    """Raise LoadError naming each stored tensor that is missing or of another shape or dtype."""
    problems = [problem for tensor in wanted if (problem := _spec_problem(tensor))]
    if problems:
        raise LoadError(listing(problems))


def readers_here() -> int:
    """Number of processes of this launch on this machine, which may read the same files."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(count) if count.isdigit() else 1


@dataclass(eq=False)
class RowsLanding:
    """Stages whole rows for a box that has part of the columns, or a tensor with gaps or another dtype."""

    local: Tensor
    mine: Box
    view: tuple[int, ...]
    dtype: torch.dtype  # stored
    low: int = 0  # rows of the box that are done
    filled: int = 0  # bytes in the stage
    stage: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def put(self, data: Tensor) -> None:
        """Collect the next bytes; whole stages go into the tensor."""
        row_bytes = math.prod(self.view[1:]) * self.dtype.itemsize
        step = max(1, _STAGE_BYTES // row_bytes)
        while data.numel():
            rows = min(step, self.mine.sizes[0] - self.low)
            if not self.stage.numel():
                # separate pages: freed at once, without fragmenting the heap
                self.stage = torch.frombuffer(new_block(rows * row_bytes), dtype=torch.uint8)
            count = min(data.numel(), rows * row_bytes - self.filled)
            copy_bytes(self.stage, self.filled, data[:count])
            data, self.filled = data[count:], self.filled + count
            if self.filled == rows * row_bytes:
                self._cut_out(self.stage[: self.filled].view(self.dtype).view(rows, *self.view[1:]))

    def _cut_out(self, rows: Tensor) -> None:
        high = self.low + rows.shape[0]
        self.local[self.low : high].copy_(_cut_columns(rows, self.mine, self.view))
        self.low, self.filled = high, 0
        if high == self.mine.sizes[0]:
            self.stage = self.stage.new_empty(0)


def _landings_of_box(box: WantedBox) -> dict[ByteRun, Landing] | None:
    """The byte ranges of this rank's box and their landings; None if filling takes more than moving bytes."""
    view, dtype = box.view, box.dtype
    local, mine, name, item = box.local, box.mine, box.name, dtype.itemsize
    run = whole_run(box.file, name)
    if run is None or type(local) not in PLAIN or _is_expanded(local) or (not view and local.dtype != dtype):
        return None
    last = max((dim for dim, size in enumerate(view) if mine.sizes[dim] != size), default=0)
    size = math.prod(mine.sizes[last:]) * item
    if local.is_contiguous() and local.dtype == dtype and (not last or size >= _LEAST_RUN_BYTES):
        starts = (run.start + start * item for start in _run_starts(mine, view, last))
        return {
            ByteRun(name, run.file, start, size): StraightLanding(local, n * size) for n, start in enumerate(starts)
        }
    row_bytes = math.prod(view[1:]) * item
    rows = ByteRun(name, run.file, run.start + mine.offsets[0] * row_bytes, mine.sizes[0] * row_bytes)
    return {rows: RowsLanding(local, mine, view, dtype)}


def _run_starts(mine: Box, view: tuple[int, ...], last: int) -> Iterable[int]:
    """The starts of the box's runs in the flattened tensor, in order; `last` is the last dimension that is cut."""
    strides = [math.prod(view[dim + 1 :]) for dim in range(len(view))]
    places = [range(low, low + size) for low, size in zip(mine.offsets[:last], mine.sizes, strict=False)]
    begin = sum(low * stride for low, stride in zip(mine.offsets[last:], strides[last:], strict=True))
    for place in product(*places):
        yield begin + sum(index * stride for index, stride in zip(place, strides, strict=False))


def _spec_problem(tensor: WantedTensor) -> str | None:
    name, spec = tensor.name, tensor.file.specs.get(tensor.name)
    if not tensor.boxes and tensor.local is not None and tensor.local.numel():
        return f"{tensor.info.name}: unknown which of its elements this rank holds ({tensor.info.engine})"
    if spec is None:
        return f"{name}: not in the checkpoint, and {tensor.info.name} needs it"
    wanted = (tensor.info.shape, dtype_name(tensor.info.dtype))
    if (spec.shape, spec.dtype) == wanted:
        return None
    return f"{name}: {spec.dtype} {list(spec.shape)} in the checkpoint, {wanted[1]} {list(wanted[0])} in this run"


def _row_ranges(box: WantedBox) -> list[tuple[int, int]]:
    """The rows of a box in runs of at most _SLICE_BYTES (or one row), counted from its first row."""
    rows, row_bytes = box.mine.sizes[0], max(1, math.prod(box.view[1:]) * box.dtype.itemsize)
    step = max(1, _SLICE_BYTES // row_bytes)
    return [(low, min(low + step, rows)) for low in range(0, rows, step)]


def _fill_rows(box: WantedBox, low: int, high: int) -> int:
    """Read rows [low, high) of the box whole, and copy its columns of them."""
    view, first = box.view, box.mine.offsets[0]
    row = math.prod(view[1:])
    data = box.file.read(box.name, (first + low) * row, (first + high) * row)
    box.local[low:high].copy_(_cut_columns(data.view(high - low, *view[1:]), box.mine, view))
    return data.nbytes


def _is_expanded(local: Tensor) -> bool:
    """Whether several elements share memory, as in a result of `expand`."""
    return any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True))


def _fill_expanded(box: WantedBox) -> int:
    """Fill each memory location once. Raises LoadError if the elements that share it differ in the file."""
    local = box.local
    fresh = torch.empty(local.shape, dtype=local.dtype)
    taken = _fill_box(replace(box, local=fresh))
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in local.stride())
    again = fresh[once].expand(local.shape).contiguous()
    if not torch.equal(again.view(-1).view(torch.uint8), fresh.view(-1).view(torch.uint8)):
        raise LoadError(f"{box.name}: elements share memory here (made by expand), and differ in the checkpoint")
    local[once].copy_(fresh[once])
    return taken


def _cut_columns(rows: Tensor, mine: Box, view: tuple[int, ...]) -> Tensor:
    """The columns of the box in whole rows."""
    for dim in range(1, len(view)):
        rows = rows.narrow(dim, mine.offsets[dim], mine.sizes[dim])
    return rows


Filler = Callable[[str, Callable[[], list[WantedTensor]]], None]  # (name in errors, function that lists the tensors)
_BROADCAST_BYTES = 16 << 20  # per read of a tensor through its format
SMALL_RANGE_BYTES = 4 << 20  # smaller ranges of a rank are not worth a request to a bucket


def each_reads(_what: str, collect: Callable[[], list[WantedTensor]]) -> None:
    """Read this rank's elements of the tensors of `collect`. Not collective. Raises as `fill_all` and `collect`."""
    wanted = collect()
    check_all(wanted)
    fill_all(tensor for tensor in wanted if not _is_whole_everywhere(tensor))
    # Processes that read the same bytes share the page cache; past it, each would read the disk.
    fill_all(
        (tensor for tensor in wanted if _is_whole_everywhere(tensor)), direct="auto" if readers_here() == 1 else "off"
    )


def choose_filler(way: str, ranks: Ranks, bucket_bytes: int) -> Filler:
    """The filler for a `way` of SaverConfig.fan_out, or for "small": rank 0 reads small ranges for all ranks.

    With "small" and "broadcast" the filler is collective: all ranks must call it for the same tensors in the same
    order; an error on one rank is raised on all.
    """
    if way not in ("broadcast", "small") or ranks.size == 1:
        return each_reads
    chosen = _is_whole_everywhere if way == "broadcast" else _is_small

    def fill(what: str, collect: Callable[[], list[WantedTensor]]) -> None:
        ready, error = try_action(lambda: _BroadcastPlan(collect(), bucket_bytes, chosen))
        ranks.agree(f"reading {what}", {"tensors": "" if ready is None else ready.digest}, error, same=("tensors",))
        broadcast_tensors(ready, ranks)
        fill_all(ready.own)

    return fill


class _BroadcastPlan:
    """The tensors to fill and all memory for it, allocated first, so that no rank fails between broadcasts.

    Needs `bucket_bytes` beside the tensors. Raises as `check_all`.
    """

    def __init__(self, wanted: list[WantedTensor], bucket_bytes: int, chosen: Callable[[WantedTensor], bool]) -> None:
        check_all(wanted)
        self.common = _in_file_order([tensor for tensor in wanted if chosen(tensor)])
        self.own = [tensor for tensor in wanted if not chosen(tensor)]
        self.size_bytes = sum(tensor.info.size_bytes for tensor in self.common)
        self.bucket = torch.empty(min(bucket_bytes, self.size_bytes) + 1, dtype=torch.uint8, device=wire_device())
        self.stream = _TensorStream(self.common)

    @property
    def digest(self) -> str:
        """Equal on ranks that expect the same tensors."""
        expected = "\n".join(f"{tensor.name} {tensor.info.shape} {tensor.info.dtype}" for tensor in self.common)
        return hashlib.blake2b(expected.encode(), digest_size=8).hexdigest()


def broadcast_tensors(ready: _BroadcastPlan, ranks: Ranks) -> None:
    """Fill each rank's part of tensors that rank 0 reads. Collective, with the same tensors on all ranks.

    Raises the error of reading on rank 0, RankError on the others.
    """
    import torch.distributed as dist

    bucket, stream, total, step = ready.bucket, ready.stream, ready.size_bytes, ready.bucket.numel() - 1
    feed = _PieceFeed(_stored_pieces(ready.common)) if ranks.leads else None
    for start in range(0, total, max(step, 1)):
        size = min(step, total - start)
        error = None
        if feed is not None:
            _, error = try_action(lambda: feed.fill(bucket[:size]))  # noqa: B023 - called at once
            bucket[size] = int(error is not None)
        dist.broadcast(bucket[: size + 1], src=0)
        if error is not None:
            raise error
        if bucket[size].item():
            raise RankError("rank 0 could not read the checkpoint; its own error says why")
        stream.put(bucket[:size])
    if stream.error is not None:  # raised last, because the broadcasts needed this rank
        raise stream.error


def _is_whole_everywhere(tensor: WantedTensor) -> bool:
    """Whether every rank holds the whole tensor; the same on all ranks."""
    sharding = tensor.info.sharding
    return not sharding.is_sharded and not sharding.is_opaque


def _is_small(tensor: WantedTensor) -> bool:
    """Whether each rank would read a small range of the tensor; the same on all ranks."""
    sharding = tensor.info.sharding
    ranges = max(1, len(sharding.owners)) if sharding.is_sharded else 1
    return not sharding.is_opaque and tensor.info.size_bytes < SMALL_RANGE_BYTES * ranges


def _in_file_order(wanted: list[WantedTensor]) -> list[WantedTensor]:
    """The tensors in the order of their bytes in the files; the same on all ranks."""
    files = {id(tensor.file): tensor.file for tensor in wanted}
    places = {key: {name: at for at, name in enumerate(file.specs)} for key, file in files.items()}
    order = {key: number for number, key in enumerate(files)}
    return sorted(wanted, key=lambda tensor: (order[id(tensor.file)], places[id(tensor.file)][tensor.name]))


class _TensorStream:
    """Splits one stream of bytes into the tensors."""

    def __init__(self, wanted: Sequence[WantedTensor]) -> None:
        self.error: BaseException | None = None
        landings = [
            (tensor.info.size_bytes, _SeveralLandings(map(_box_landing, tensor.in_boxes()))) for tensor in wanted
        ]
        self._places = iter([(size_bytes, landing) for size_bytes, landing in landings if size_bytes])
        self._left = 0
        self._landing: Landing | None = None

    def put(self, data: Tensor) -> None:
        """Store the next bytes. After an error, kept in `error`, further bytes are discarded."""
        while data.numel():
            if not self._left:
                self._left, self._landing = next(self._places)
            count = min(self._left, data.numel())
            if self._landing is not None and self.error is None:
                landing = self._landing
                _, self.error = try_action(lambda: landing.put(data[:count]))  # noqa: B023 - called at once
            data, self._left = data[count:], self._left - count


class _PieceFeed:
    """Regroups pieces of any size into buckets."""

    def __init__(self, pieces: Iterator[Tensor]) -> None:
        self._pieces, self._rest = pieces, torch.empty(0, dtype=torch.uint8)

    def fill(self, bucket: Tensor) -> None:
        """Fill `bucket` with the next bytes."""
        while bucket.numel():
            if not self._rest.numel():
                self._rest = next(self._pieces)
            count = min(bucket.numel(), self._rest.numel())
            bucket[:count].copy_(self._rest[:count])
            bucket, self._rest = bucket[count:], self._rest[count:]


@torch.no_grad()
def _stored_pieces(wanted: Sequence[WantedTensor]) -> Iterator[Tensor]:
    """The bytes of the stored tensors in order; each piece is valid until the next."""
    placed = [(tensor, whole_run(tensor.file, tensor.name)) for tensor in wanted]
    for plain, some in groupby(placed, lambda item: item[1] is not None):
        if plain:
            for part in read_ahead(run for _, run in some if run is not None):
                yield bytes_at(part.address, part.size_bytes)
            continue
        for (tensor, _), numel in ((item, item[0].info.numel) for item in some):
            step = max(1, _BROADCAST_BYTES // tensor.info.dtype.itemsize)
            for start in range(0, numel, step):
                yield tensor.file.read(tensor.name, start, min(start + step, numel)).view(torch.uint8)


class _SeveralLandings(tuple[Landing, ...]):
    """Several landings for the same bytes."""

    def put(self, data: Tensor) -> None:
        """The next bytes."""
        for landing in self:
            landing.put(data)


def _box_landing(box: WantedBox) -> Landing:
    """The landing of one box in a stream of all bytes of the tensor."""
    row_bytes = math.prod(box.view[1:]) * box.dtype.itemsize
    start, rows = (box.mine.offsets[0], box.mine.sizes[0]) if box.view else (0, 1)
    return _RangeLanding(_rows_landing(box, rows * row_bytes), start * row_bytes, (start + rows) * row_bytes)


def _rows_landing(box: WantedBox, size_bytes: int) -> Landing:
    """The landing of the rows of a box, which may have part of their columns."""
    local = box.local
    if box.mine.sizes[1:] != box.view[1:]:
        return RowsLanding(local, box.mine, box.view, box.dtype)
    if type(local) in PLAIN and local.is_contiguous() and local.dtype == box.dtype:
        return StraightLanding(local)
    return _CastLanding(local, box.dtype, torch.empty(size_bytes, dtype=torch.uint8))


@dataclass
class _RangeLanding:
    """Passes on bytes [start, stop) of a stream and discards the others."""

    inner: Landing
    start: int
    stop: int
    at: int = 0

    def put(self, data: Tensor) -> None:
        """The next bytes."""
        low, high = max(self.start - self.at, 0), min(self.stop - self.at, data.numel())
        if low < high:
            self.inner.put(data[low:high])
        self.at += data.numel()


class _CastLanding:
    """Stages a tensor whose dtype or layout differs from the stored one, then copies it by torch."""

    def __init__(self, local: Tensor, dtype: torch.dtype, stage: Tensor) -> None:
        self._local, self._dtype, self._stage, self._at = local, dtype, stage, 0

    def put(self, data: Tensor) -> None:
        """Stage the next bytes; the last ones fill the tensor."""
        self._stage[self._at : self._at + data.numel()].copy_(data)
        self._at += data.numel()
        if self._at == self._stage.numel():
            self._local.copy_(self._stage.view(self._dtype).view(self._local.shape))
