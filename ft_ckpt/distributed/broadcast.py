"""Reads stored tensors into a run: each rank its own elements, or rank 0 for all what every rank holds whole.

The second way is for storage that is slow or counts its readers; the third, for buckets, lies between: what would be
small requests of many ranks is read by rank 0, in the order of the files, and handed on. The tensors travel as one
stream of bytes, cut into buckets at places that every rank works out by itself; the byte behind each bucket tells
whether rank 0 could read on.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ft_ckpt.distributed.gather import wire_device
from ft_ckpt.distributed.ranks import Ranks, try_action
from ft_ckpt.distributed.read_shards import RowsLanding, WantedBox, WantedTensor, check_all, fill_all, readers_here
from ft_ckpt.errors import RankError
from ft_ckpt.formats.pytree import PLAIN
from ft_ckpt.formats.read_files import Landing, StraightLanding, bytes_at, whole_run
from ft_ckpt.storage.read_ahead import read_ahead

Filler = Callable[[str, Callable[[], list[WantedTensor]]], None]  # (what for, what the function gives)
_SLICE_BYTES = 16 << 20  # of a tensor that has to be read through its format
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
            step = max(1, _SLICE_BYTES // one.info.dtype.itemsize)
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
