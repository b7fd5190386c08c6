"""Lets rank 0 read and broadcast the stored tensors whose bytes every rank needs.

A filler is a function that fills the tensors of this rank from stored ones. With one filler each
rank reads its own elements. With the others, rank 0 reads some tensors in buckets and broadcasts
each bucket; each rank copies its elements from it.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ft_ckpt.errors import RankError
from ft_ckpt.formats.files import bytes_at, whole_run
from ft_ckpt.ranks.moving import gather
from ft_ckpt.ranks.moving.fill import WantedTensor, check_all, fill_all, put_rows, readers_here
from ft_ckpt.ranks.moving.gather import bytes_as, padded_size, wire_device
from ft_ckpt.ranks.outcomes import Outcome, try_action
from ft_ckpt.ranks.ranks import Ranks
from ft_ckpt.ranks.sharding import part_count
from ft_ckpt.storage.io import read_ahead

# A tensor that is read through its format is read this much at a time.
_READ_BYTES = 16 << 20
# A smaller range of a tensor is not worth a request of its own to a bucket of an object store.
SMALL_RANGE_BYTES = 4 << 20

# Its arguments are a name for errors, and a function that lists the tensors.
Filler = Callable[[str, Callable[[], list[WantedTensor]]], None]


def each_reads(_what: str, collect: Callable[[], list[WantedTensor]]) -> None:
    """Read this rank's elements of the tensors that `collect` lists.

    Not collective. Raises what `fill_all` and `collect` raise.
    """
    tensors = collect()
    check_all(tensors)
    fill_all(tensor for tensor in tensors if not _is_whole_everywhere(tensor))
    # Processes that read the same bytes share the page cache; with direct I/O each would read the
    # disk.
    direct = "auto" if readers_here() == 1 else "off"
    fill_all((tensor for tensor in tensors if _is_whole_everywhere(tensor)), direct=direct)


def choose_filler(way: str, ranks: Ranks) -> Filler:
    """Return the filler for a value of the setting `SaverConfig.fan_out`.

    With "broadcast", rank 0 reads and broadcasts the tensors that every rank holds whole. With
    "small", it reads and broadcasts the tensors of which each rank needs a small range. Both
    fillers are collective: all ranks must call them for the same tensors in the same order. If
    listing the tensors fails on one rank, or reading fails on rank 0, an error is raised on all
    ranks. With any other value, and with one rank, each rank reads its own elements.
    """
    if way not in ("broadcast", "small") or ranks.size == 1:
        return each_reads
    is_broadcast = _is_whole_everywhere if way == "broadcast" else _is_small
    return partial(_broadcast_and_fill, is_broadcast, ranks)


def _broadcast_and_fill(
    is_broadcast: Callable[[WantedTensor], bool],
    ranks: Ranks,
    what: str,
    collect: Callable[[], list[WantedTensor]],
) -> None:
    plan, error = try_action(lambda: _BroadcastPlan(collect(), is_broadcast))
    digest = "" if plan is None else plan.digest
    ranks.agree(f"reading {what}", {"tensors": digest}, error, same=("tensors",))
    assert plan is not None, "the agreement has raised the error"
    broadcast_tensors(plan, ranks)
    fill_all(plan.read_here)


class _Rows(NamedTuple):
    """Rows [low, high) of a tensor's view, and their bytes [start, stop) in a bucket."""

    tensor: WantedTensor
    low: int
    high: int
    start: int
    stop: int


class _BroadcastPlan:
    """The tensors to fill, and the buffer for all broadcasts.

    The buffer is allocated before the first broadcast, because an error between broadcasts would
    leave the other ranks waiting. It has at most BUCKET_BYTES, or one row if a row is larger.
    Raises what `check_all` raises.

    Attributes:
        common: The tensors that rank 0 reads, in the order of their bytes in the files.
        read_here: The tensors that each rank reads itself.
        buckets: The rows of the common tensors in each broadcast.
        buffer: The memory for one bucket, and one byte more.
    """

    def __init__(
        self, tensors: list[WantedTensor], is_broadcast: Callable[[WantedTensor], bool]
    ) -> None:
        check_all(tensors)
        self.common = _in_file_order([tensor for tensor in tensors if is_broadcast(tensor)])
        self.read_here = [tensor for tensor in tensors if not is_broadcast(tensor)]
        self.buckets = _cut_into_buckets(self.common, gather.BUCKET_BYTES)
        size_bytes = max((bucket[-1].stop for bucket in self.buckets), default=0)
        # The byte after a bucket says whether rank 0 has failed to read it.
        self.buffer = torch.empty(size_bytes + 1, dtype=torch.uint8, device=wire_device())

    @property
    def digest(self) -> str:
        """A digest that is equal on ranks that expect the same tensors."""
        described = []
        for tensor in self.common:
            info = tensor.info
            described.append(str((tensor.name, info.shape, info.dtype, info.sharding.view)))
        expected = "\n".join(described)
        return hashlib.blake2b(expected.encode(), digest_size=8).hexdigest()


def _cut_into_buckets(tensors: Sequence[WantedTensor], limit: int) -> list[list[_Rows]]:
    """Cut the tensors at whole rows into buckets of at most `limit` bytes, or of one row."""
    buckets: list[list[_Rows]] = []
    for tensor in tensors:
        view = tensor.info.sharding.view
        rows = view[0] if view else 1
        row_bytes = math.prod(view[1:]) * tensor.info.dtype.itemsize
        step = max(1, limit // max(1, row_bytes))
        for low in range(0, rows if row_bytes else 0, step):
            high = min(low + step, rows)
            size_bytes = (high - low) * row_bytes
            start = padded_size(buckets[-1][-1].stop) if buckets else limit
            if start + size_bytes > limit:
                buckets.append([])
                start = 0
            buckets[-1].append(_Rows(tensor, low, high, start, start + size_bytes))

    return buckets


def broadcast_tensors(plan: _BroadcastPlan, ranks: Ranks) -> None:
    """Fill the elements that this rank holds of the tensors that rank 0 reads.

    Collective: call it on every rank, with the same tensors. If reading fails, rank 0 raises its
    error and the other ranks raise RankError. If copying fails on a rank, only this rank raises it.
    """
    buffer = plan.buffer
    feed = _PieceFeed(_stored_pieces(plan.common)) if ranks.is_main else None
    copying = Outcome()
    for bucket in plan.buckets:
        size_bytes, reading = bucket[-1].stop, Outcome()
        if feed is not None:
            with reading.deferring_error():
                feed.fill_all(buffer[rows.start : rows.stop] for rows in bucket)
            buffer[size_bytes] = int(reading.error is not None)
        dist.broadcast(buffer[: size_bytes + 1], src=0)
        reading.raise_error()
        if buffer[size_bytes].item():
            raise RankError("rank 0 could not read the checkpoint; its own error says why")
        if copying.error is None:
            with copying.deferring_error():
                _take_from(bucket, buffer)

    # Raised after all broadcasts, because each of them needs this rank.
    copying.raise_error()


def _take_from(bucket: Sequence[_Rows], buffer: Tensor) -> None:
    """Copy this rank's elements from the buffer of a bucket."""
    for rows in bucket:
        shape = (rows.high - rows.low, *rows.tensor.info.sharding.view[1:])
        for wanted_box in rows.tensor.in_boxes():
            data = bytes_as(buffer, rows.start, wanted_box.dtype, shape)
            put_rows(wanted_box, rows.low, data)


def _is_whole_everywhere(tensor: WantedTensor) -> bool:
    """Check whether every rank holds the whole tensor; the answer is the same on all ranks."""
    sharding = tensor.info.sharding
    return not sharding.is_sharded and not sharding.is_opaque


def _is_small(tensor: WantedTensor) -> bool:
    """Check whether each rank would read a small range; the answer is the same on all ranks."""
    sharding = tensor.info.sharding
    if sharding.is_opaque:
        return False
    return tensor.info.size_bytes < SMALL_RANGE_BYTES * part_count(sharding)


def _in_file_order(tensors: list[WantedTensor]) -> list[WantedTensor]:
    """Sort the tensors by the order of their bytes in the files, which is the same on all ranks."""
    # id of a file -> name of a tensor -> (number of the file, index of the tensor in it)
    orders: dict[int, dict[str, tuple[int, int]]] = {}
    for tensor in tensors:
        if id(tensor.file) not in orders:
            number = len(orders)
            names = enumerate(tensor.file.specs)
            orders[id(tensor.file)] = {name: (number, index) for index, name in names}
    return sorted(tensors, key=lambda tensor: orders[id(tensor.file)][tensor.name])


class _PieceFeed:
    """Copies a stream of pieces of any size into buffers of other sizes."""

    def __init__(self, pieces: Iterator[Tensor]) -> None:
        self._pieces = pieces
        # The bytes of the last piece that are not copied yet.
        self._rest = torch.empty(0, dtype=torch.uint8, device="cpu")

    def fill_all(self, targets: Iterable[Tensor]) -> None:
        """Fill `targets` in order with the next bytes of the stream."""
        for target in targets:
            unfilled = target
            while unfilled.numel():
                if not self._rest.numel():
                    self._rest = next(self._pieces)
                count = min(unfilled.numel(), self._rest.numel())
                unfilled[:count].copy_(self._rest[:count])
                unfilled, self._rest = unfilled[count:], self._rest[count:]


@torch.no_grad()
def _stored_pieces(tensors: Sequence[WantedTensor]) -> Iterator[Tensor]:
    """Yield the bytes of the stored tensors in order; each piece is valid until the next."""
    with_runs = [(tensor, whole_run(tensor.file, tensor.name)) for tensor in tensors]
    for is_plain, group in groupby(with_runs, lambda item: item[1] is not None):
        if is_plain:
            for part in read_ahead(run for _, run in group if run is not None):
                yield bytes_at(part.address, part.size_bytes)
            continue
        for tensor, _ in group:
            step, numel = max(1, _READ_BYTES // tensor.info.dtype.itemsize), tensor.info.numel
            for start in range(0, numel, step):
                piece = tensor.file.read(tensor.name, start, min(start + step, numel))
                yield piece.view(torch.uint8)
