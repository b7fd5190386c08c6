"""Gathers the elements of tensors on one rank: rank 0, or the writer of a file.

`stream_buckets` moves chosen tensors to that rank one bucket at a time, so that the rank holds no
more than its own shard and the bucket. Every rank computes which rank sends which elements, so only
bytes of tensors are sent.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ft_ckpt.devices import current_device
from ft_ckpt.errors import RankError
from ft_ckpt.ranks.ranks import Ranks
from ft_ckpt.ranks.sharding import Box, Source, box_memories

BUCKET_BYTES = 256 << 20  # buffer of a rank for tensors that are gathered or broadcast


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive elements of one tensor on the receiving rank, flat.

    The data may be on the rank's accelerator, and is valid until the next chunk is requested.
    """

    name: str
    start: int  # index of the first element in the flattened full tensor
    data: Tensor


def stream_chunks(chosen: Sequence[Source], ranks: Ranks, to: int = 0) -> Iterator[Chunk]:
    """Yield the elements of `chosen`, in order, as chunks on the rank `to`.

    The iterator yields nothing on other ranks. Collective: every rank must exhaust it, with the
    same `chosen`. In addition to its own shard the rank `to` holds at most BUCKET_BYTES, or two
    rows of a tensor if these are larger. An opaque tensor is gathered whole.
    """
    for bucket in stream_buckets(chosen, ranks, to):
        yield from bucket


def stream_buckets(
    chosen: Sequence[Source], ranks: Ranks, to: int = 0
) -> Iterator[Iterator[Chunk]]:
    """Yield for each bucket an iterator over its chunks; see `stream_chunks`.

    A bucket moves while all ranks iterate over it. All ranks must take the buckets in this order.
    """
    # half of BUCKET_BYTES receives from a rank, the other half has the full rows
    buckets = list(_cut_buckets(chosen, BUCKET_BYTES // 2, to))
    max_bytes = 0
    for bucket in buckets:
        moving = [unit for unit in bucket if moves_to(unit.info, to)]
        max_bytes = max(max_bytes, sum(padded_size(unit.size_bytes) for unit in moving))
    yield from map(_BucketCarrier(ranks, max_bytes, to).carry_bucket, buckets)


def are_equal(first: Source, second: Source, ranks: Ranks) -> bool:
    """Check whether two tensors have the same bits; return True on ranks other than 0.

    Collective: call it on every rank.
    """
    digests = []
    for info in (first, second):
        digest = xxhash.xxh3_128()
        for chunk in stream_chunks([info], ranks):
            digest.update(chunk.data.cpu().contiguous().view(torch.uint8).numpy().data)
        digests.append(digest.digest())
    return digests[0] == digests[1]


def gather_tensors(chosen: Sequence[Source], ranks: Ranks, to: int = 0) -> dict[str, Tensor]:
    """Return full copies of `chosen` by name, in the host memory of the rank `to`.

    Return {} on other ranks. Collective: call it on every rank.
    """
    full: dict[str, Tensor] = {}
    if ranks.rank == to:
        for info in chosen:
            full[info.name] = torch.empty(info.shape, dtype=info.dtype, device="cpu")
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
        """Return the boxes that `rank` contributes.

        If every rank holds the whole tensor, each rank contributes the boxes in its own memory.
        """
        sharding = self.info.sharding
        return sharding.local_boxes(rank) if _is_everywhere(self.info) else sharding.boxes(rank)

    def parts_of_rank(self, rank: int) -> list[Box]:
        """Return the boxes that `rank` contributes to these rows, in coordinates of the view."""
        parts = [self._part_of_box(box) for box in self.boxes_of_rank(rank)]
        return [part for part in parts if part is not None]

    def local_data(self, rank: int) -> list[Tensor]:
        """Return the elements of each of `parts_of_rank(rank)`, where `rank` is this process."""
        data = []
        for box, memory in box_memories(self.boxes_of_rank(rank), self.local):
            part = self._part_of_box(box)
            if part is None:
                continue
            if part.sizes:
                first = part.offsets[0] - box.offsets[0]
                memory = memory[first : first + part.sizes[0]]
            data.append(memory)
        return data

    def _part_of_box(self, box: Box) -> Box | None:
        if not box.sizes:
            return box
        low, high = max(box.offsets[0], self.low), min(box.offsets[0] + box.sizes[0], self.high)
        return Box((low, *box.offsets[1:]), (high - low, *box.sizes[1:])) if low < high else None


def moves_to(info: Source, to: int) -> bool:
    """Check whether other ranks must send elements of the tensor to the rank `to`."""
    sharding = info.sharding
    if sharding.is_opaque or _is_everywhere(info):
        return False
    return sharding.is_sharded or (bool(sharding.owners) and to not in sharding.owners)


def _is_everywhere(info: Source) -> bool:
    """Check whether every rank holds the whole tensor; shards may have replicas, too."""
    return info.sharding.is_replicated and not info.sharding.is_sharded


def _cut_buckets(chosen: Sequence[Source], limit: int, to: int) -> Iterator[list[_RowRange]]:
    """Cut the tensors at whole rows into buckets of at most `limit` bytes, or of one row.

    Tensors that move share no bucket with tensors that do not move, because the former must be cut
    the same way on all ranks.
    """
    bucket: list[_RowRange] = []
    bytes_left = limit
    for info in chosen:
        moves = moves_to(info, to)
        if bucket and not moves:
            yield bucket
            bucket, bytes_left = [], limit
        for unit in _cut_units(info, info.local, limit, moves=moves):
            if bucket and unit.size_bytes > bytes_left:
                yield bucket
                bucket, bytes_left = [], limit
            if not moves:
                yield [unit]
                continue
            bucket.append(unit)
            bytes_left -= unit.size_bytes
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
    for low in range(0, max(rows, 1), step):
        yield _RowRange(info, local, low, min(low + step, rows))


@dataclass
class _BucketCarrier:
    """Carries buckets to the rank `to` through two buffers that are allocated once and reused."""

    ranks: Ranks
    max_bytes: int  # of a bucket
    to: int = 0
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def carry_bucket(self, bucket: list[_RowRange]) -> Iterator[Chunk]:
        """Send this rank's elements of `bucket`; on the rank `to`, receive all and yield chunks."""
        moving = [unit for unit in bucket if moves_to(unit.info, self.to)]
        opaque = [unit for unit in bucket if unit.info.sharding.is_opaque]
        if self.ranks.rank != self.to:
            self._send_rows(moving, opaque)
            return
        if (moving or opaque) and self.ranks.size > 1:
            self.ranks.open_receive_slot(self._senders(moving, needs_all=bool(opaque)))
        rows = self._receive_rows(moving) if moving else {}
        for unit in bucket:
            yield Chunk(unit.info.name, unit.low * unit.row_numel, self._data_of_rows(unit, rows))

    def _senders(self, moving: Sequence[_RowRange], *, needs_all: bool) -> list[int]:
        senders = []
        for rank in range(self.ranks.size):
            sends = needs_all or any(unit.parts_of_rank(rank) for unit in moving)
            if rank != self.to and sends:
                senders.append(rank)
        return senders

    def _send_rows(self, moving: Sequence[_RowRange], opaque: Sequence[_RowRange]) -> None:
        packed = self._pack_local(moving)  # before this rank's turn, in which it must not fail
        if moving or opaque:
            self.ranks.await_receive_slot(bool(opaque) or packed is not None, self.to)
        if packed is not None:
            with _as_rank_error(f"sending tensors to rank {self.to}"):
                dist.send(packed, dst=self.to)
        for unit in opaque:
            unit.info.gather_full()  # the engine gathers it on every rank

    def _data_of_rows(self, unit: _RowRange, received: Mapping[int, Tensor]) -> Tensor:
        if unit.info.sharding.is_opaque:
            return unit.info.gather_full().reshape(-1)
        if id(unit) in received:
            return received[id(unit)].view(-1)
        local = unit.local_data(self.ranks.rank)
        if not local:  # the tensor has no owner
            return torch.empty(0, dtype=unit.info.dtype, device="cpu")
        return local[0].reshape(-1)

    def _pack_local(self, moving: Sequence[_RowRange]) -> Tensor | None:
        """Pack this rank's contributions into one buffer; return None if it has none."""
        contributions: list[Tensor] = []
        for unit in moving:
            contributions += unit.local_data(self.ranks.rank)
        if not contributions:
            return None
        size_bytes = sum(padded_size(data.nbytes) for data in contributions)
        packed = self._reuse_buffer("packed", size_bytes)
        position = 0
        for data in contributions:
            bytes_as(packed, position, data.dtype, data.shape).copy_(data)
            position += padded_size(data.nbytes)
        return packed

    def _receive_rows(self, moving: Sequence[_RowRange]) -> dict[int, Tensor]:
        """Receive the full rows of each unit, and return them by id of the unit."""
        # Full size from the start: while a reader has the last chunk, the buffer cannot be freed.
        buffer = self._reuse_buffer("rows", self.max_bytes)
        rows, position = {}, 0
        owners: set[int] = set()
        for unit in moving:
            shape = (unit.high - unit.low, *unit.info.sharding.view[1:])
            rows[id(unit)] = bytes_as(buffer, position, unit.info.dtype, shape)
            position += padded_size(unit.size_bytes)
            owners.update(unit.info.sharding.owners)
        for rank in sorted(owners):
            if rank == self.ranks.rank:
                for unit in moving:
                    pairs = zip(unit.parts_of_rank(rank), unit.local_data(rank), strict=True)
                    for part, data in pairs:
                        _paste_part(rows[id(unit)], unit, part, data)
            else:
                self._receive_from(rank, moving, rows)
        return rows

    def _receive_from(
        self, rank: int, moving: Sequence[_RowRange], rows: Mapping[int, Tensor]
    ) -> None:
        """Receive the contributions of `rank`, packed by its `_pack_local`, into `rows`."""
        parts = []
        size_bytes = 0
        for unit in moving:
            for part in unit.parts_of_rank(rank):
                parts.append((unit, part, size_bytes))
                size_bytes += padded_size(math.prod(part.sizes) * unit.info.dtype.itemsize)
        if not parts:
            return
        packed = self._reuse_buffer("packed", size_bytes)
        with _as_rank_error(f"receiving tensors of rank {rank}"):
            dist.recv(packed, src=rank)
        for unit, part, start in parts:
            data = bytes_as(packed, start, unit.info.dtype, part.sizes)
            _paste_part(rows[id(unit)], unit, part, data)

    def _reuse_buffer(self, use: str, size: int) -> Tensor:
        """Return the first `size` bytes of the buffer for `use`, which grows if necessary."""
        buffer = self.buffers.get(use)
        if buffer is None or buffer.numel() < size:
            self.buffers.pop(use, None)
            del buffer  # freed before the larger buffer is allocated
            # At least one rank's share of a full bucket, so that growth is rare: the backend may
            # keep a buffer that is no longer used.
            new_size = max(size, self.max_bytes // self.ranks.size)
            buffer = torch.empty(new_size, dtype=torch.uint8, device=wire_device())
            self.buffers[use] = buffer
        return buffer[:size]


@contextmanager
def _as_rank_error(action: str) -> Iterator[None]:
    """Raise RankError for torch's error when a peer or the network is lost."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"{action}: {error}") from error


def padded_size(size: int) -> int:
    """Round `size` up so that the next tensor in a buffer is aligned for every dtype."""
    return size + -size % 16


def _paste_part(rows: Tensor, unit: _RowRange, part: Box, data: Tensor) -> None:
    box = rows
    for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        box = box.narrow(dim, offset - (unit.low if dim == 0 else 0), size)
    box.copy_(data)


def bytes_as(flat: Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """View the bytes of `flat` from `start` on as a tensor."""
    stop = start + math.prod(shape) * dtype.itemsize
    return flat[start:stop].view(dtype).view(tuple(shape))


def wire_device() -> torch.device:
    """Return the device that the default process group sends from.

    That is the accelerator under NCCL, and else the CPU.
    """
    backend, host = str(dist.get_backend()), torch.device("cpu")
    if "gloo" in backend or "mpi" in backend:
        # `current_device` is not called: it initializes an accelerator that training may not use
        return host
    return current_device() or host
