"""Fills live tensors from stored ones: each rank reads its own elements, or rank 0 reads and broadcasts.

Boxes are those of the present run's shardings, so a file written on any number of ranks can be read by any other. Many
tensors are filled in the order of their bytes, read ahead by threads, past the page cache where that pays.
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

_SLICE_BYTES = 64 << 20  # read at a time, so that a large block needs little memory beside itself
_STAGE_BYTES = 16 << 20  # rows that are put together before their columns are taken out
_LEAST_RUN_BYTES = 64 << 10  # shorter ones of a block cut in several dimensions are read with what lies between them


@dataclass(frozen=True, eq=False)
class WantedBox:
    """A box of a tensor to fill, from the stored one."""

    mine: Box  # in the tensor seen as `view`
    local: Tensor  # its memory
    view: tuple[int, ...]
    dtype: torch.dtype  # of what is stored
    file: TensorFile
    name: str  # in the file


@dataclass(frozen=True, eq=False)
class WantedTensor:
    """What to fill: this rank's elements of a tensor, from a stored one."""

    info: Source
    local: Tensor | None  # the elements' memory, as the `boxes` say; None for nothing
    file: TensorFile
    name: str  # in the file

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Which elements of the tensor this rank has."""
        return self.info.sharding.local_boxes(global_rank())

    def in_boxes(self) -> list[WantedBox]:
        """What this rank has, box by box; nothing where it has no element."""
        view, dtype = self.info.sharding.view, self.info.dtype
        memories = [] if self.local is None or not self.local.numel() else box_memories(self.boxes, self.local)
        return [WantedBox(box, memory, view, dtype, self.file, self.name) for box, memory in memories]


def fill_all(wanted: Iterable[WantedTensor], threads: int = THREADS, direct: str = "auto") -> int:
    """Overwrite this rank's elements of each tensor with those of the stored one; their bytes.

    Beside the tensors it needs `threads` + 2 blocks of memory. `direct`: as in `read_ahead`. Digests of files
    that are due are taken on the way; whoever calls this asks for the outcome. Raises LoadError naming everything that
    is missing or of another shape or dtype, before anything is read; CorruptError when a file is too short or has
    changed.
    """
    asked = list(wanted)
    check_all(asked)
    landings: dict[ByteRun, Landing] = {}
    due: dict[int, FileProof] = {}
    wanted_bytes: Counter[int] = Counter()
    others = []
    for one in chain.from_iterable(each.in_boxes() for each in asked):
        found = _landings_of_box(one)
        if found is None:
            others.append(one)
            continue
        landings.update(found)
        proof = due_proof(one.file)
        if proof is not None:
            due.update({id(run.file): proof for run in found if run.file.size_bytes == proof.record.size_bytes})
        for run in found:
            wanted_bytes[id(run.file)] += run.size_bytes
    for file, proof in due.items():
        proof.widen_for(wanted_bytes[file])
    return read_runs(landings, threads, direct, due) + sum(_fill_box(one) for one in others)


def fill_tensor(one: WantedTensor) -> int:
    """As `fill_all`, for one tensor and at once, through whatever the file's format needs."""
    check_all([one])
    return sum(map(_fill_box, one.in_boxes()))


def _fill_box(one: WantedBox) -> int:
    if _is_expanded(one.local):
        return _fill_expanded(one)
    if not one.view:
        one.local.copy_(one.file.read(one.name).reshape(()))
        return one.dtype.itemsize
    return sum(_fill_rows(one, low, high) for low, high in _row_ranges(one))


def check_all(wanted: Iterable[WantedTensor]) -> None:
    """Raise LoadError naming each stored tensor that is missing, or of another shape or dtype than is wanted."""
    problems = [problem for one in wanted if (problem := _spec_problem(one))]
    if problems:
        raise LoadError(listing(problems))


def readers_here() -> int:
    """How many processes of this launch are on this machine, and may read the same files as this one."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(count) if count.isdigit() else 1


@dataclass(eq=False)
class RowsLanding:
    """Rows of a block that is cut in further dimensions, or has gaps in memory or another type: put together first."""

    local: Tensor
    mine: Box
    view: tuple[int, ...]
    dtype: torch.dtype  # of what is stored
    low: int = 0  # rows that are done, of the box
    filled: int = 0  # bytes of the stage
    stage: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def put(self, data: Tensor) -> None:
        """Collect the next bytes; whole stages go into the tensor."""
        row_bytes = math.prod(self.view[1:]) * self.dtype.itemsize
        step = max(1, _STAGE_BYTES // row_bytes)
        while data.numel():
            rows = min(step, self.mine.sizes[0] - self.low)
            if not self.stage.numel():
                # pages of its own: what the allocator of small things gets back in between, it may not give again
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


def _landings_of_box(one: WantedBox) -> dict[ByteRun, Landing] | None:
    """The byte ranges of this rank's box, and where each goes; None where that takes more than moving bytes."""
    view, dtype = one.view, one.dtype
    local, mine, name, item = one.local, one.mine, one.name, dtype.itemsize
    run = whole_run(one.file, name)
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
    """Where in the flattened tensor the block's runs begin, in order; `last` is the last dimension that is cut."""
    strides = [math.prod(view[dim + 1 :]) for dim in range(len(view))]
    places = [range(low, low + size) for low, size in zip(mine.offsets[:last], mine.sizes, strict=False)]
    begin = sum(low * stride for low, stride in zip(mine.offsets[last:], strides[last:], strict=True))
    for place in product(*places):
        yield begin + sum(index * stride for index, stride in zip(place, strides, strict=False))


def _spec_problem(one: WantedTensor) -> str | None:
    name, spec = one.name, one.file.specs.get(one.name)
    if not one.boxes and one.local is not None and one.local.numel():
        return f"{one.info.name}: nobody can tell which of its elements this rank has ({one.info.engine})"
    if spec is None:
        return f"{name}: not in the checkpoint, and {one.info.name} needs it"
    wanted = (one.info.shape, dtype_name(one.info.dtype))
    if (spec.shape, spec.dtype) == wanted:
        return None
    return f"{name}: {spec.dtype} {list(spec.shape)} in the checkpoint, {wanted[1]} {list(wanted[0])} in this run"


def _row_ranges(one: WantedBox) -> list[tuple[int, int]]:
    """The rows of a box in runs of at most _SLICE_BYTES (or one row), counted from its first row."""
    rows, row_bytes = one.mine.sizes[0], max(1, math.prod(one.view[1:]) * one.dtype.itemsize)
    step = max(1, _SLICE_BYTES // row_bytes)
    return [(low, min(low + step, rows)) for low in range(0, rows, step)]


def _fill_rows(one: WantedBox, low: int, high: int) -> int:
    """Rows [low, high) of the box: whole rows are read, and a box cut in other dimensions takes its columns."""
    view, first = one.view, one.mine.offsets[0]
    row = math.prod(view[1:])
    data = one.file.read(one.name, (first + low) * row, (first + high) * row)
    one.local[low:high].copy_(_cut_columns(data.view(high - low, *view[1:]), one.mine, view))
    return data.nbytes


def _is_expanded(local: Tensor) -> bool:
    """Whether one place in memory is several elements: of a tensor that `expand` made."""
    return any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True))


def _fill_expanded(one: WantedBox) -> int:
    """Each place in memory once, if all its elements are the same in the file."""
    local = one.local
    fresh = torch.empty(local.shape, dtype=local.dtype)
    taken = _fill_box(replace(one, local=fresh))
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in local.stride())
    again = fresh[once].expand(local.shape).contiguous()
    if not torch.equal(again.view(-1).view(torch.uint8), fresh.view(-1).view(torch.uint8)):
        raise LoadError(f"{one.name}: one value many times here (made by expand), and not in the checkpoint")
    local[once].copy_(fresh[once])
    return taken


def _cut_columns(rows: Tensor, mine: Box, view: tuple[int, ...]) -> Tensor:
    """What the block has of whole rows."""
    for dim in range(1, len(view)):
        rows = rows.narrow(dim, mine.offsets[dim], mine.sizes[dim])
    return rows


Filler = Callable[[str, Callable[[], list[WantedTensor]]], None]  # (what for, what the function gives)
_BROADCAST_BYTES = 16 << 20  # of a tensor that has to be read through its format
SMALL_RANGE_BYTES = 4 << 20  # ranges of a rank below it are not worth a request to a bucket


def each_reads(_what: str, collect: Callable[[], list[WantedTensor]]) -> None:
    """Read this rank's elements of what `collect` gives. Not collective. Raises what `fill_all` and `collect` raise."""
    wanted = collect()
    check_all(wanted)
    fill_all(one for one in wanted if not _is_whole_everywhere(one))
    # Several processes that read the same bytes of a disk share the page cache: past it, each would read them anew.
    fill_all((one for one in wanted if _is_whole_everywhere(one)), direct="auto" if readers_here() == 1 else "off")


def choose_filler(way: str, ranks: Ranks, bucket_bytes: int) -> Filler:
    """The function that fills tensors the `way` of SaverConfig.fan_out, or "small": rank 0 reads small ranges for all.

    With this and "broadcast" it is collective: all ranks must call it for the same things in the same order; an error
    on one of them is raised on all.
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
    """The tensors that one rank wants and all memory for reading them, so that it cannot fail between broadcasts.

    It needs `bucket_bytes` beside the tensors. Raises as `check_all`.
    """

    def __init__(self, wanted: list[WantedTensor], bucket_bytes: int, chosen: Callable[[WantedTensor], bool]) -> None:
        check_all(wanted)
        self.common = _in_file_order([one for one in wanted if chosen(one)])
        self.own = [one for one in wanted if not chosen(one)]
        self.size_bytes = sum(one.info.size_bytes for one in self.common)
        self.bucket = torch.empty(min(bucket_bytes, self.size_bytes) + 1, dtype=torch.uint8, device=wire_device())
        self.stream = _TensorStream(self.common)

    @property
    def digest(self) -> str:
        """Equal on ranks that expect the same tensors."""
        told = "\n".join(f"{one.name} {one.info.shape} {one.info.dtype}" for one in self.common)
        return hashlib.blake2b(told.encode(), digest_size=8).hexdigest()


def broadcast_tensors(ready: _BroadcastPlan, ranks: Ranks) -> None:
    """Fill each rank's part of tensors with what rank 0 reads. Collective, with the same tensors everywhere.

    Raises on rank 0 what reading raised, RankError on the others.
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
    if stream.error is not None:  # told only now, since the other ranks needed this one for their broadcasts
        raise stream.error


def _is_whole_everywhere(one: WantedTensor) -> bool:
    """Whether every rank holds all of it; the same answer on every rank."""
    sharding = one.info.sharding
    return not sharding.is_sharded and not sharding.is_opaque


def _is_small(one: WantedTensor) -> bool:
    """Whether each rank would read a small range of the tensor; the same answer on every rank."""
    sharding = one.info.sharding
    ranges = max(1, len(sharding.owners)) if sharding.is_sharded else 1
    return not sharding.is_opaque and one.info.size_bytes < SMALL_RANGE_BYTES * ranges


def _in_file_order(wanted: list[WantedTensor]) -> list[WantedTensor]:
    """The tensors as they lie in their files, so that neighbours are read at once; the same order on every rank."""
    files = {id(one.file): one.file for one in wanted}
    places = {key: {name: at for at, name in enumerate(file.specs)} for key, file in files.items()}
    order = {key: number for number, key in enumerate(files)}
    return sorted(wanted, key=lambda one: (order[id(one.file)], places[id(one.file)][one.name]))


class _TensorStream:
    """The tensors as one stream of bytes on its way into them."""

    def __init__(self, wanted: Sequence[WantedTensor]) -> None:
        self.error: BaseException | None = None
        landings = [(one.info.size_bytes, _SeveralLandings(map(_box_landing, one.in_boxes()))) for one in wanted]
        self._places = iter([(size_bytes, landing) for size_bytes, landing in landings if size_bytes])
        self._left = 0
        self._landing: Landing | None = None

    def put(self, data: Tensor) -> None:
        """Store the next bytes. The first error is kept in `error`, and further data discarded."""
        while data.numel():
            if not self._left:
                self._left, self._landing = next(self._places)
            count = min(self._left, data.numel())
            if self._landing is not None and self.error is None:
                landing = self._landing
                _, self.error = try_action(lambda: landing.put(data[:count]))  # noqa: B023 - called at once
            data, self._left = data[count:], self._left - count


class _PieceFeed:
    """Pieces of any size, given out as buckets."""

    def __init__(self, pieces: Iterator[Tensor]) -> None:
        self._pieces, self._rest = pieces, torch.empty(0, dtype=torch.uint8)

    def fill(self, bucket: Tensor) -> None:
        """Fill all of `bucket` with what comes next."""
        while bucket.numel():
            if not self._rest.numel():
                self._rest = next(self._pieces)
            count = min(bucket.numel(), self._rest.numel())
            bucket[:count].copy_(self._rest[:count])
            bucket, self._rest = bucket[count:], self._rest[count:]


@torch.no_grad()
def _stored_pieces(wanted: Sequence[WantedTensor]) -> Iterator[Tensor]:
    """The bytes of the stored tensors in order, each piece alive until the next is asked for."""
    placed = [(one, whole_run(one.file, one.name)) for one in wanted]
    for plain, some in groupby(placed, lambda item: item[1] is not None):
        if plain:
            for part in read_ahead(run for _, run in some if run is not None):
                yield bytes_at(part.address, part.size_bytes)
            continue
        for (one, _), numel in ((item, item[0].info.numel) for item in some):
            step = max(1, _BROADCAST_BYTES // one.info.dtype.itemsize)
            for start in range(0, numel, step):
                yield one.file.read(one.name, start, min(start + step, numel)).view(torch.uint8)


class _SeveralLandings(tuple[Landing, ...]):
    """Places that each take what is theirs of the same bytes."""

    def put(self, data: Tensor) -> None:
        """The next bytes."""
        for landing in self:
            landing.put(data)


def _box_landing(one: WantedBox) -> Landing:
    """The place in this rank's memory of one box of a tensor, all of whose bytes come by."""
    row_bytes = math.prod(one.view[1:]) * one.dtype.itemsize
    start, rows = (one.mine.offsets[0], one.mine.sizes[0]) if one.view else (0, 1)
    return _RangeLanding(_rows_landing(one, rows * row_bytes), start * row_bytes, (start + rows) * row_bytes)


def _rows_landing(one: WantedBox, size_bytes: int) -> Landing:
    """The place of the rows of a box, of which it may have columns."""
    local = one.local
    if one.mine.sizes[1:] != one.view[1:]:
        return RowsLanding(local, one.mine, one.view, one.dtype)
    if type(local) in PLAIN and local.is_contiguous() and local.dtype == one.dtype:
        return StraightLanding(local)
    return _CastLanding(local, one.dtype, torch.empty(size_bytes, dtype=torch.uint8))


@dataclass
class _RangeLanding:
    """Takes bytes [start, stop) of those that come by, and passes over the others."""

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
    """A tensor in another dtype or layout than the stored one: collected first, then copied by torch."""

    def __init__(self, local: Tensor, dtype: torch.dtype, stage: Tensor) -> None:
        self._local, self._dtype, self._stage, self._at = local, dtype, stage, 0

    def put(self, data: Tensor) -> None:
        """The next bytes; with the last ones the tensor is filled."""
        self._stage[self._at : self._at + data.numel()].copy_(data)
        self._at += data.numel()
        if self._at == self._stage.numel():
            self._local.copy_(self._stage.view(self._dtype).view(self._local.shape))
