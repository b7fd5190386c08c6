"""Gathers the elements of tensors on one rank: rank 0, or the writer of a file.

`stream_buckets` cuts tensors into ranges of rows, and puts consecutive ranges into buckets. One
bucket moves at a time, so the receiving rank holds no more than its own shard and the bucket. Every
rank computes which rank sends which elements. So only elements are sent, and no descriptions.
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

# A rank has a buffer of this size for tensors that are gathered or broadcast.
BUCKET_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive elements of one tensor on the receiving rank.

    Attributes:
        name: The name of the tensor.
        start: The index of the first element in the flattened full tensor.
        data: The elements in one dimension. They may be on the accelerator of the rank, and are
            valid until the next chunk is requested.
    """

    name: str
    start: int
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
    # One half of BUCKET_BYTES is for what a rank sends, the other half for the full rows.
    buckets = list(_cut_buckets(chosen, BUCKET_BYTES // 2, to))
    max_bytes = 0
    for bucket in buckets:
        moving = [row_range for row_range in bucket if moves_to(row_range.source, to)]
        max_bytes = max(max_bytes, sum(padded_size(row_range.size_bytes) for row_range in moving))
    yield from map(_BucketCarrier(ranks, max_bytes, to).carry_bucket, buckets)


def are_equal(first: Source, second: Source, ranks: Ranks) -> bool:
    """Check whether two tensors have the same bits; return True on ranks other than 0.

    Collective: call it on every rank.
    """
    digests = []
    for source in (first, second):
        digest = xxhash.xxh3_128()
        for chunk in stream_chunks([source], ranks):
            digest.update(chunk.data.cpu().contiguous().view(torch.uint8).numpy().data)
        digests.append(digest.digest())
    return digests[0] == digests[1]


def gather_tensors(chosen: Sequence[Source], ranks: Ranks, to: int = 0) -> dict[str, Tensor]:
    """Return full copies of `chosen` by name, in the host memory of the rank `to`.

    Return {} on other ranks. Collective: call it on every rank.
    """
    full: dict[str, Tensor] = {}
    if ranks.rank == to:
        for source in chosen:
            full[source.name] = torch.empty(source.shape, dtype=source.dtype, device="cpu")
    for chunk in stream_chunks(chosen, ranks, to):
        flat = full[chunk.name].view(-1)
        flat[chunk.start : chunk.start + chunk.data.numel()].copy_(chunk.data)
    return full


@dataclass(frozen=True, eq=False)
class _RowRange:
    """Rows [low, high) of the view of one tensor.

    Attributes:
        source: The tensor.
        local: The elements of the tensor that this rank holds.
        low: The first row.
        high: The row after the last one.
    """

    source: Source
    local: Tensor | None
    low: int
    high: int

    @property
    def row_numel(self) -> int:
        """Number of elements of a row."""
        return math.prod(self.source.sharding.view[1:])

    @property
    def size_bytes(self) -> int:
        """Size of all rows together."""
        return (self.high - self.low) * self.row_numel * self.source.dtype.itemsize

    def boxes_of_rank(self, rank: int) -> tuple[Box, ...]:
        """Return the boxes that `rank` contributes.

        If every rank holds the whole tensor, the receiving rank takes the elements from its own
        memory.
        """
        sharding = self.source.sharding
        return sharding.local_boxes(rank) if _is_everywhere(self.source) else sharding.boxes(rank)

    def parts_of_rank(self, rank: int) -> list[Box]:
        """Return the parts of these rows that `rank` contributes, in coordinates of the view."""
        parts = [self._part_of_box(box) for box in self.boxes_of_rank(rank)]
        return [part for part in parts if part is not None]

    def local_data(self, rank: int) -> list[Tensor]:
        """Return the elements of each of `parts_of_rank(rank)`. `rank` must be this process."""
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
        """Return the part of a box that is in these rows, or None if there is none."""
        if not box.sizes:
            return box
        low, high = max(box.offsets[0], self.low), min(box.offsets[0] + box.sizes[0], self.high)
        return Box((low, *box.offsets[1:]), (high - low, *box.sizes[1:])) if low < high else None


def moves_to(source: Source, to: int) -> bool:
    """Check whether other ranks must send elements of the tensor to the rank `to`."""
    sharding = source.sharding
    if sharding.is_opaque or _is_everywhere(source):
        return False
    return sharding.is_sharded or (bool(sharding.owners) and to not in sharding.owners)


def _is_everywhere(source: Source) -> bool:
    """Check whether every rank holds the whole tensor.

    Replicated shards do not count: no rank holds the whole tensor then.
    """
    return source.sharding.is_replicated and not source.sharding.is_sharded


def _cut_buckets(chosen: Sequence[Source], limit: int, to: int) -> Iterator[list[_RowRange]]:
    """Cut the tensors at whole rows into buckets of at most `limit` bytes, or of one row.

    All ranks must cut the tensors that move in the same way. So these share no bucket with tensors
    that do not move.
    """
    bucket: list[_RowRange] = []
    bytes_left = limit
    for source in chosen:
        moves = moves_to(source, to)
        if bucket and not moves:
            yield bucket
            bucket, bytes_left = [], limit
        for row_range in _cut_row_ranges(source, source.local, limit, moves=moves):
            if bucket and row_range.size_bytes > bytes_left:
                yield bucket
                bucket, bytes_left = [], limit
            if not moves:
                yield [row_range]
                continue
            bucket.append(row_range)
            bytes_left -= row_range.size_bytes

    if bucket:
        yield bucket


def _cut_row_ranges(
    source: Source, local: Tensor | None, limit: int, *, moves: bool
) -> Iterator[_RowRange]:
    view = source.sharding.view
    rows = view[0] if view else 1
    if source.sharding.is_opaque or (not moves and local is not None and local.is_contiguous()):
        # No buffer is needed: the tensor itself is the chunk.
        yield _RowRange(source, local, 0, rows)
        return
    row_bytes = max(1, math.prod(view[1:]) * source.dtype.itemsize)
    step = max(1, limit // row_bytes)
    for low in range(0, max(rows, 1), step):
        yield _RowRange(source, local, low, min(low + step, rows))


@dataclass
class _BucketCarrier:
    """Carries buckets to the rank `to` through two buffers that are allocated once and reused.

    On the rank `to`, the buffer "packed" gets what one rank has sent, and the buffer "rows" has the
    full rows of the bucket. The other ranks have the buffer "packed" only, for what they send.

    Attributes:
        ranks: The ranks that send and receive.
        max_bytes: The size of the largest bucket.
        to: The rank that receives.
        buffers: The buffers by name.
    """

    ranks: Ranks
    max_bytes: int
    to: int = 0
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def carry_bucket(self, bucket: list[_RowRange]) -> Iterator[Chunk]:
        """Send this rank's elements of `bucket`, or receive all elements on the rank `to`.

        Yields the chunks of the bucket on the rank `to`, nothing on other ranks.
        """
        moving = [row_range for row_range in bucket if moves_to(row_range.source, self.to)]
        opaque = [row_range for row_range in bucket if row_range.source.sharding.is_opaque]
        if self.ranks.rank != self.to:
            self._send_rows(moving, opaque)
            return

        if (moving or opaque) and self.ranks.size > 1:
            self.ranks.open_receive_slot(self._senders(moving, needs_all=bool(opaque)))
        rows = self._receive_rows(moving) if moving else {}
        for row_range in bucket:
            yield Chunk(
                row_range.source.name,
                row_range.low * row_range.row_numel,
                self._data_of_rows(row_range, rows),
            )

    def _senders(self, moving: Sequence[_RowRange], *, needs_all: bool) -> list[int]:
        senders = []
        for rank in range(self.ranks.size):
            sends = needs_all or any(row_range.parts_of_rank(rank) for row_range in moving)
            if rank != self.to and sends:
                senders.append(rank)
        return senders

    def _send_rows(self, moving: Sequence[_RowRange], opaque: Sequence[_RowRange]) -> None:
        # Packed before the receiving rank waits for this one, because packing may fail.
        packed = self._pack_local(moving)
        if moving or opaque:
            self.ranks.await_receive_slot(bool(opaque) or packed is not None, self.to)
        if packed is not None:
            with _as_rank_error(f"sending tensors to rank {self.to}"):
                dist.send(packed, dst=self.to)
        for row_range in opaque:
            # A collective of the engine gathers the tensor, in which every rank takes part.
            row_range.source.gather_full()

    def _data_of_rows(self, row_range: _RowRange, received: Mapping[int, Tensor]) -> Tensor:
        if row_range.source.sharding.is_opaque:
            return row_range.source.gather_full().reshape(-1)
        if id(row_range) in received:
            return received[id(row_range)].view(-1)
        local = row_range.local_data(self.ranks.rank)
        if not local:  # the tensor has no owner
            return torch.empty(0, dtype=row_range.source.dtype, device="cpu")
        return local[0].reshape(-1)

    def _pack_local(self, moving: Sequence[_RowRange]) -> Tensor | None:
        """Pack this rank's contributions into one buffer; return None if it has none."""
        contributions: list[Tensor] = []
        for row_range in moving:
            contributions += row_range.local_data(self.ranks.rank)
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
        """Receive the full rows of each row range, and return them by id of the row range."""
        # The buffer has its full size from the start. A larger one would be additional memory
        # later, because a reader may still have a chunk in the old one.
        buffer = self._reuse_buffer("rows", self.max_bytes)
        rows, position = {}, 0
        owners: set[int] = set()
        for row_range in moving:
            shape = (row_range.high - row_range.low, *row_range.source.sharding.view[1:])
            rows[id(row_range)] = bytes_as(buffer, position, row_range.source.dtype, shape)
            position += padded_size(row_range.size_bytes)
            owners.update(row_range.source.sharding.owners)

        for rank in sorted(owners):
            if rank == self.ranks.rank:
                for row_range in moving:
                    pairs = zip(
                        row_range.parts_of_rank(rank), row_range.local_data(rank), strict=True
                    )
                    for part, data in pairs:
                        _paste_part(rows[id(row_range)], row_range, part, data)
            else:
                self._receive_from(rank, moving, rows)

        return rows

    def _receive_from(
        self, rank: int, moving: Sequence[_RowRange], rows: Mapping[int, Tensor]
    ) -> None:
        """Receive the contributions of `rank`, packed by its `_pack_local`, into `rows`."""
        parts = []
        size_bytes = 0
        for row_range in moving:
            for part in row_range.parts_of_rank(rank):
                parts.append((row_range, part, size_bytes))
                size_bytes += padded_size(math.prod(part.sizes) * row_range.source.dtype.itemsize)

        if not parts:
            return
        packed = self._reuse_buffer("packed", size_bytes)
        with _as_rank_error(f"receiving tensors of rank {rank}"):
            dist.recv(packed, src=rank)
        for row_range, part, start in parts:
            data = bytes_as(packed, start, row_range.source.dtype, part.sizes)
            _paste_part(rows[id(row_range)], row_range, part, data)

    def _reuse_buffer(self, use: str, size: int) -> Tensor:
        """Return the first `size` bytes of the buffer for `use`, which grows if necessary."""
        buffer = self.buffers.get(use)
        if buffer is None or buffer.numel() < size:
            self.buffers.pop(use, None)
            del buffer  # freed before the larger buffer is allocated
            # The buffer has at least the share of one rank in a full bucket. So it rarely grows,
            # which matters because the backend may keep a buffer that is no longer used.
            new_size = max(size, self.max_bytes // self.ranks.size)
            buffer = torch.empty(new_size, dtype=torch.uint8, device=wire_device())
            self.buffers[use] = buffer
        return buffer[:size]


@contextmanager
def _as_rank_error(action: str) -> Iterator[None]:
    """Raise RankError instead of an error of torch: a peer or the network is lost."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"{action}: {error}") from error


def padded_size(size: int) -> int:
    """Round `size` up so that the next tensor in a buffer is aligned for every dtype."""
    return size + -size % 16


def _paste_part(rows: Tensor, row_range: _RowRange, part: Box, data: Tensor) -> None:
    """Copy `data` to its place in the full rows of a row range."""
    box = rows
    for dim, (offset, size) in enumerate(zip(part.offsets, part.sizes, strict=True)):
        box = box.narrow(dim, offset - (row_range.low if dim == 0 else 0), size)
    box.copy_(data)


def bytes_as(flat: Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """View the bytes of `flat`, from byte `start` on, as a tensor of this dtype and shape."""
    stop = start + math.prod(shape) * dtype.itemsize
    return flat[start:stop].view(dtype).view(tuple(shape))


def wire_device() -> torch.device:
    """Return the device from which the default process group sends tensors.

    That is the CPU under gloo and MPI, and the accelerator otherwise, if there is one.
    """
    backend = str(dist.get_backend())
    host = torch.device("cpu")
    if "gloo" in backend or "mpi" in backend:
        # `current_device` would initialize an accelerator, although training might not use it.
        return host
    return current_device() or host
