"""Gathers the elements of tensors on one rank: rank 0, or the writer of a file.

`stream_buckets` moves chosen tensors there one bucket at a time, so that the rank holds no more
than its own shard and the bucket. Every rank computes which rank sends which elements, so only
tensor bytes are sent.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain

import torch
import xxhash
from torch import Tensor

from ft_ckpt.devices import current_device
from ft_ckpt.errors import RankError
from ft_ckpt.ranks.ranks import Ranks
from ft_ckpt.ranks.sharding import Box
from ft_ckpt.ranks.source import Source, box_memories

BUCKET_BYTES = 256 << 20  # buffer of a rank for tensors that are gathered or broadcast


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive elements of one tensor on the receiving rank, flat, valid until the next chunk is
    requested.

    They may be on that rank's accelerator.
    """

    name: str
    start: int  # index of the first element in the flattened full tensor
    data: Tensor


def stream_chunks(chosen: Sequence[Source], ranks: Ranks, to: int = 0) -> Iterator[Chunk]:
    """The elements of `chosen`, in order, as chunks on the rank `to`; nothing on the others.
    Collective.

    Every rank must exhaust it, with the same `chosen`. Beside its own shard the rank `to` holds at
    most BUCKET_BYTES, or two rows of a tensor where these are larger; an opaque tensor is gathered
    whole.
    """
    for bucket in stream_buckets(chosen, ranks, to):
        yield from bucket


def stream_buckets(
    chosen: Sequence[Source], ranks: Ranks, to: int = 0
) -> Iterator[Iterator[Chunk]]:
    """As `stream_chunks`, by bucket.

    A bucket moves while all ranks iterate over it, in the same order of buckets.
    """
    buckets = list(_cut_buckets(chosen, BUCKET_BYTES // 2, to))  # one half is filled from the other
    moving = ([unit for unit in bucket if moves_to(unit.info, to)] for bucket in buckets)
    most = max((sum(padded_size(unit.size_bytes) for unit in units) for units in moving), default=0)
    yield from map(_BucketCarrier(ranks, most, to).carry_bucket, buckets)


def are_equal(one: Source, other: Source, ranks: Ranks) -> bool:
    """Whether two tensors have the same bits; True on ranks other than 0. Collective."""
    digests = []
    for info in (one, other):
        digest = xxhash.xxh3_128()
        for chunk in stream_chunks([info], ranks):
            digest.update(chunk.data.cpu().contiguous().view(torch.uint8).numpy().data)
        digests.append(digest.digest())
    return digests[0] == digests[1]


def gather_tensors(chosen: Sequence[Source], ranks: Ranks, to: int = 0) -> dict[str, Tensor]:
    """Full copies of `chosen` on the host of the rank `to`, by name; `{}` elsewhere. Collective."""
    full: dict[str, Tensor] = {}
    if ranks.rank == to:
        full = {
            info.name: torch.empty(info.shape, dtype=info.dtype, device="cpu") for info in chosen
        }
    for chunk in stream_chunks(chosen, ranks, to):
        flat = full[chunk.name].view(-1)
        flat[chunk.start : chunk.start + chunk.data.numel()].copy_(chunk.data)
    return full


@dataclass(frozen=True, eq=False)
class _RowRange:
    """Rows [low, high) of one tensor's view."""

    info: Source
    local: Tensor | None  # this rank's elements
    low: int
    high: int

    @property
    def row_numel(self) -> int:
        """Elements per row."""
        return math.prod(self.info.sharding.view[1:])

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows together."""
        return (self.high - self.low) * self.row_numel * self.info.dtype.itemsize

    def boxes_of_rank(self, rank: int) -> tuple[Box, ...]:
        """The boxes that `rank` contributes; for a tensor that every rank holds whole, the boxes in
        its own memory.
        """
        sharding = self.info.sharding
        return sharding.local_boxes(rank) if _is_everywhere(self.info) else sharding.boxes(rank)

    def parts_of_rank(self, rank: int) -> list[Box]:
        """The boxes that `rank` contributes to these rows, in coordinates of the view."""
        return [
            part for box in self.boxes_of_rank(rank) if (part := self._part_of_box(box)) is not None
        ]

    def own_data(self, rank: int) -> list[Tensor]:
        """This rank's elements of each of `parts_of_rank(rank)`."""
        memories = box_memories(self.boxes_of_rank(rank), self.local)
        placed = [(box, self._part_of_box(box), memory) for box, memory in memories]
        return [
            memory[part.offsets[0] - box.offsets[0] :][: part.sizes[0]] if part.sizes else memory
            for box, part, memory in placed
            if part is not None
        ]

    def _part_of_box(self, box: Box) -> Box | None:
        if not box.sizes:
            return box
        low, high = max(box.offsets[0], self.low), min(box.offsets[0] + box.sizes[0], self.high)
        return Box((low, *box.offsets[1:]), (high - low, *box.sizes[1:])) if low < high else None


def moves_to(info: Source, to: int) -> bool:
    """Whether other ranks must send elements of the tensor to the rank `to`."""
    sharding = info.sharding
    if sharding.is_opaque or _is_everywhere(info):
        return False
    return sharding.is_sharded or (bool(sharding.owners) and to not in sharding.owners)


def _is_everywhere(info: Source) -> bool:
    """Whether every rank holds the whole tensor; shards may have replicas, too."""
    return info.sharding.is_replicated and not info.sharding.is_sharded


def _cut_buckets(chosen: Sequence[Source], limit: int, to: int) -> Iterator[list[_RowRange]]:
    """The tensors cut at whole rows into lists of units of at most `limit` bytes (or one row).

    Tensors that move must be cut the same way on all ranks, so they share no bucket with tensors
    that do not move.
    """
    bucket: list[_RowRange] = []
    room = limit
    for info in chosen:
        moves = moves_to(info, to)
        if bucket and not moves:
            yield bucket
            bucket, room = [], limit
        for unit in _cut_units(info, info.local, limit, moves=moves):
            if bucket and unit.size_bytes > room:
                yield bucket
                bucket, room = [], limit
            if not moves:
                yield [unit]
                continue
            bucket.append(unit)
            room -= unit.size_bytes
    if bucket:
        yield bucket


def _cut_units(
    info: Source, local: Tensor | None, limit: int, *, moves: bool
) -> Iterator[_RowRange]:
    view = info.sharding.view
    rows = view[0] if view else 1
    if info.sharding.is_opaque or (not moves and local is not None and local.is_contiguous()):
        yield _RowRange(info, local, 0, rows)  # nothing to stage: the tensor itself is the chunk
        return
    row_bytes = max(1, math.prod(view[1:]) * info.dtype.itemsize)
    step = max(1, limit // row_bytes)
    yield from (
        _RowRange(info, local, low, min(low + step, rows)) for low in range(0, max(rows, 1), step)
    )


@dataclass
class _BucketCarrier:
    """Carries buckets to the rank `to` through two buffers that are allocated once and reused."""

    ranks: Ranks
    most: int  # bytes of the largest bucket
    to: int = 0
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def carry_bucket(self, bucket: list[_RowRange]) -> Iterator[Chunk]:
        """Send this rank's contributions of `bucket`, or receive the others' and yield the
        chunks.
        """
        import torch.distributed as dist

        moving = [unit for unit in bucket if moves_to(unit.info, self.to)]
        together = any(unit.info.sharding.is_opaque for unit in bucket)
        if self.ranks.rank != self.to:
            packed = self._pack_own(moving)  # before its turn, because it must not fail afterwards
            if moving or together:
                self.ranks.await_receive_slot(together or packed is not None, self.to)
            if packed is not None:
                with _as_rank_error(f"sending tensors to rank {self.to}"):
                    dist.send(packed, dst=self.to)
            for unit in bucket:
                if unit.info.sharding.is_opaque:
                    unit.info.gather_full()  # the engine gathers it on every rank
            return
        if (moving or together) and self.ranks.size > 1:
            others = [rank for rank in range(self.ranks.size) if rank != self.to]
            senders = [rank for rank in others if any(unit.parts_of_rank(rank) for unit in moving)]
            self.ranks.open_receive_slot(others if together else senders)
        filled = self._receive_rows(moving) if moving else {}
        for unit in bucket:
            yield Chunk(unit.info.name, unit.low * unit.row_numel, self._data_of_rows(unit, filled))

    def _data_of_rows(self, unit: _RowRange, filled: Mapping[int, Tensor]) -> Tensor:
        if unit.info.sharding.is_opaque:
            return unit.info.gather_full().reshape(-1)
        if id(unit) in filled:
            return filled[id(unit)].view(-1)
        own = unit.own_data(self.ranks.rank)
        # has no owner
        return own[0].reshape(-1) if own else torch.empty(0, dtype=unit.info.dtype, device="cpu")

    def _pack_own(self, moving: list[_RowRange]) -> Tensor | None:
        """This rank's contributions in one buffer, or None."""
        mine = [own for unit in moving for own in unit.own_data(self.ranks.rank)]
        if not mine:
            return None
        packed = self._reuse_buffer("packed", sum(padded_size(own.nbytes) for own in mine))
        position = 0
        for own in mine:
            bytes_as(packed, position, own.dtype, own.shape).copy_(own)
            position += padded_size(own.nbytes)
        return packed

    def _receive_rows(self, moving: list[_RowRange]) -> dict[int, Tensor]:
        """The full rows of each unit, by id of the unit, in the receive buffer."""
        import torch.distributed as dist

        # full size: a reader of the last chunk keeps the buffer alive
        room = self._reuse_buffer("rows", self.most)
        rows, position = {}, 0
        for unit in moving:
            shape = (unit.high - unit.low, *unit.info.sharding.view[1:])
            rows[id(unit)] = bytes_as(room, position, unit.info.dtype, shape)
            position += padded_size(unit.size_bytes)
        owners = sorted(set(chain.from_iterable(unit.info.sharding.owners for unit in moving)))
        for rank in owners:
            if rank == self.ranks.rank:
                for unit in moving:
                    for part, own in zip(
                        unit.parts_of_rank(rank), unit.own_data(rank), strict=True
                    ):
                        _paste_part(rows[id(unit)], unit, part, own)
                continue
            parts = [(unit, part) for unit in moving for part in unit.parts_of_rank(rank)]
            if parts:
                sizes = [
                    padded_size(math.prod(part.sizes) * unit.info.dtype.itemsize)
                    for unit, part in parts
                ]
                packed = self._reuse_buffer("packed", sum(sizes))
                with _as_rank_error(f"receiving tensors of rank {rank}"):
                    dist.recv(packed, src=rank)
                for (unit, part), start in zip(parts, accumulate(sizes, initial=0), strict=False):
                    _paste_part(
                        rows[id(unit)],
                        unit,
                        part,
                        bytes_as(packed, start, unit.info.dtype, part.sizes),
                    )
        return rows

    def _reuse_buffer(self, use: str, size: int) -> Tensor:
        """The first `size` bytes of the buffer for `use`, which grows if necessary."""
        buffer = self.buffers.get(use)
        if buffer is None or buffer.numel() < size:
            self.buffers.pop(use, None)
            del buffer  # frees it before the larger one is allocated
            # At least one rank's share of a full bucket, so that growth is rare: the backend may
            # keep a buffer that is no longer used.
            usual = self.most // self.ranks.size
            buffer = self.buffers[use] = torch.empty(
                max(size, usual), dtype=torch.uint8, device=wire_device()
            )
        return buffer[:size]


@contextmanager
def _as_rank_error(action: str) -> Iterator[None]:
    """Raise RankError for torch's error when a peer or the network is lost."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"{action}: {error}") from error


def padded_size(size: int) -> int:
    """`size` rounded up so that the next tensor in a buffer is aligned for every dtype."""
    return size + -size % 16


def _paste_part(rows: Tensor, unit: _RowRange, part: Box, data: Tensor) -> None:
    box = rows
    for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        box = box.narrow(dim, offset - (unit.low if dim == 0 else 0), size)
    box.copy_(data)


def bytes_as(flat: Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The bytes of `flat` from `start` on, viewed as a tensor."""
    stop = start + math.prod(shape) * dtype.itemsize
    return flat[start:stop].view(dtype).view(tuple(shape))


def wire_device() -> torch.device:
    """The device that the default process group sends from: the accelerator under NCCL and the
    like, else the CPU.
    """
    import torch.distributed as dist

    backend, host = str(dist.get_backend()), torch.device("cpu")
    if "gloo" in backend or "mpi" in backend:
        # and asks for no accelerator, which would initialize one that training does not use
        return host
    return current_device() or host
