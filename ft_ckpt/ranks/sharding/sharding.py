"""Describes how the elements of a tensor are spread over ranks: one class for each layout.

A box is a range of indices in each dimension. A rank holds its elements as boxes. For example, if
FSDP2 cuts a tensor of shape (4, 5) by rows over 2 ranks, rank 1 holds Box((2, 0), (2, 5)).

The boxes are cut from the `view` of the tensor. That is its shape, or (numel,) if the engine
flattens it.

To contribute elements means to send them when the tensor is gathered on one rank, or to write them.
If several ranks hold the same elements, one of them contributes them: its boxes are `boxes`. The
boxes in the memory of a rank are its `local_boxes`, whether it contributes them or not.

The classes are frozen and hashable, and refer to no tensor. The `Source` of a tensor has a sharding
and gives the memory of the boxes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Protocol

from ft_ckpt.ranks.sharding.runs import Runs, runs_over_grid


@dataclass(frozen=True)
class Box:
    """A box cut from a tensor: `offsets` and `sizes` in elements, one of each per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Sharding(Protocol):
    """Which elements of one tensor each rank holds.

    Over all `owners`, each element of `view` is in exactly one box. If a rank has several boxes,
    their elements follow each other in its memory, box after box.
    """

    @property
    def view(self) -> tuple[int, ...]:
        """The shape from which boxes are cut: the tensor's, or (numel,) if it is flattened."""
        ...

    @property
    def owners(self) -> Sequence[int]:
        """Global ranks that contribute elements, as far as this rank knows."""
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether the engine shards the tensor over ranks; the same on every rank."""
        ...

    @property
    def is_replicated(self) -> bool:
        """Whether several ranks should hold the same elements; the same on every rank."""
        ...

    @property
    def is_opaque(self) -> bool:
        """Whether no boxes describe the tensor. Only a collective of its engine can gather it."""
        ...

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """Return the elements that `rank` contributes."""
        ...

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        """Return the elements that `rank` has in memory, even if another rank contributes them."""
        ...

    @property
    def runs(self) -> tuple[Runs, ...]:
        """All elements in order as a few runs (see `Runs`), or ().

        They are () if there would be too many runs, or if every rank has all elements. The ranks in
        the runs are those of the replica group of this rank. That holds even if another group
        contributes the elements, so that this one has no `owners`.
        """
        ...


@dataclass(frozen=True)
class ReplicatedSharding:
    """Every rank has the whole tensor; that of rank 0 is stored."""

    view: tuple[int, ...]
    is_replicated: bool = True
    owners = (0,)
    is_sharded = is_opaque = False
    runs = ()

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return _whole_box(self.view) if rank == 0 else ()

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        return _whole_box(self.view)


@dataclass(frozen=True)
class OwnedSharding:
    """Only the rank `owner` contributes the whole tensor. None means that no rank does."""

    view: tuple[int, ...]
    owner: int | None
    is_replicated: bool = False
    is_opaque = False

    @property
    def owners(self) -> tuple[int, ...]:
        return () if self.owner is None else (self.owner,)

    @property
    def is_sharded(self) -> bool:
        return self.owner not in (0, None)

    @property
    def runs(self) -> tuple[Runs, ...]:
        numel = prod(self.view)
        return () if self.owner is None or not numel else (Runs(self.owner, numel, numel, numel),)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return _whole_box(self.view) if rank == self.owner else ()

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        """Return a box of the whole tensor, even for a rank that holds no element."""
        return _whole_box(self.view)


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid.

    Attributes:
        shape: The shape of the grid.
        ranks: The global ranks that fill it; the last dimension varies fastest.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @cached_property
    def places(self) -> dict[int, tuple[int, ...]]:
        """The index of each rank in the grid."""
        return {rank: unravel_index(number, self.shape) for number, rank in enumerate(self.ranks)}

    @cached_property
    def reaches(self) -> tuple[int, ...]:
        """How many ranks along each dimension have consecutive numbers, from the first one on.

        For example, in a grid of shape (2, 2) with the ranks 0, 1, 2, 3, they are (1, 2): the first
        column has the ranks 0 and 2, the first row has 0 and 1.
        """
        reaches = []
        for dim, size in enumerate(self.shape):
            stride = prod(self.shape[dim + 1 :])
            line = self.ranks[: size * stride : stride]
            reach = 0
            while reach < size and line[reach] == line[0] + reach:
                reach += 1
            reaches.append(reach)
        return tuple(reaches)


@dataclass(frozen=True)
class MeshSharding:
    """A tensor that some dimensions of a mesh cut, as torch.chunk does, and the others replicate.

    A mesh without rank 0 holds replicas of the elements of another mesh, and contributes nothing.

    Attributes:
        view: The shape that is cut.
        mesh: The ranks.
        cuts: For each dimension of the mesh, the dimension of the view that it cuts; None if it
            replicates.
        is_replicated: Whether several ranks should hold the same elements.
        order: The order in which the dimensions of the mesh cut. Each one cuts the parts that the
            one before has made. () means 0, 1, ...
    """

    view: tuple[int, ...]
    mesh: Mesh
    cuts: tuple[int | None, ...]
    is_replicated: bool = False
    order: tuple[int, ...] = ()
    is_sharded = True
    is_opaque = False

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The first rank of each replica group."""
        places = self.mesh.places
        if 0 not in places:
            return ()
        replicated = [axis for axis, dim in enumerate(self.cuts) if dim is None]
        owners = []
        for rank, place in places.items():
            if not any(place[axis] for axis in replicated):
                owners.append(rank)
        return tuple(sorted(owners))

    @cached_property
    def _owner_set(self) -> frozenset[int]:
        return frozenset(self.owners)

    @cached_property  # many tensors have one layout
    def runs(self) -> tuple[Runs, ...]:
        numel = prod(self.view)
        if not numel:
            return ()
        rows = self.view[0] if self.view else 1
        rows_per_rank = self._rows_over_consecutive_ranks(rows)
        if rows_per_rank is not None:  # one run for any number of ranks
            chunk = rows_per_rank * (numel // rows)
            return (Runs(self.mesh.ranks[0], chunk, chunk, numel),)

        cuts = []
        for axis in self.order or range(len(self.cuts)):
            dim = self.cuts[axis]
            if dim is not None:
                cuts.append((dim, axis))

        return runs_over_grid(self.view, self.mesh.shape, self.mesh.ranks, cuts)

    def _rows_over_consecutive_ranks(self, rows: int) -> int | None:
        """Return the number of rows of each rank, if consecutive ranks have consecutive rows.

        Returns None if the tensor is cut more than once, or not along its first dimension, or if
        the ranks with the parts do not have consecutive numbers.
        """
        cut_axes = []
        for axis, dim in enumerate(self.cuts):
            if dim is not None and min(self.mesh.shape[axis], self.view[dim]) > 1:
                cut_axes.append(axis)
        if not cut_axes:
            return rows
        axis = cut_axes[0]
        if len(cut_axes) > 1 or self.cuts[axis] != 0:
            return None
        rows_per_rank = -(-rows // self.mesh.shape[axis])
        ranks_with_rows = -(-rows // rows_per_rank)
        return rows_per_rank if ranks_with_rows <= self.mesh.reaches[axis] else None

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return self.local_boxes(rank) if rank in self._owner_set else ()

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        place = self.mesh.places.get(rank)
        if place is None:
            return ()
        cuts = []
        for axis in self.order or range(len(self.cuts)):
            dim = self.cuts[axis]
            if dim is not None:
                cuts.append((dim, place[axis], self.mesh.shape[axis]))
        return _cut_box(self.view, tuple(cuts))


@dataclass(frozen=True)
class OpaqueSharding:
    """A layout that only the engine of the tensor can gather, such as a pending sum.

    Nothing can be read into such a tensor.

    Attributes:
        view: The shape of the tensor.
        is_replicated: Whether several ranks should hold the same elements.
        why: The reason to refuse the tensor, if its engine cannot gather it either; else "".
    """

    view: tuple[int, ...]
    is_replicated: bool = False
    why: str = ""
    owners = (0,)
    is_sharded = False
    is_opaque = True
    runs = ()

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return ()

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        return ()


def is_known_to_all(sharding: Sharding, world_size: int) -> bool:
    """Check whether every rank knows which ranks contribute elements of the tensor.

    The answer is the same on every rank. If there are several groups that each have all shards, the
    ranks of a group without rank 0 know only the members of their own group.
    """
    if isinstance(sharding, MeshSharding):
        return len(sharding.mesh.ranks) == world_size
    if isinstance(sharding, FlatSharding):
        return len(sharding.members) == world_size
    return True


def part_count(sharding: Sharding) -> int:
    """Return the number of parts that the tensor is cut into; the same on every rank."""
    if isinstance(sharding, MeshSharding):
        sizes = zip(sharding.mesh.shape, sharding.cuts, strict=True)
        return prod(size for size, dim in sizes if dim is not None)
    if isinstance(sharding, FlatSharding) and sharding.numel:
        return len(sharding.shard_numbers)
    return max(1, len(sharding.owners))


def unravel_index(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the multi-dimensional index of the flat `index` in an array of that `shape`."""
    places = []
    for size in reversed(shape):
        places.append(index % size)
        index //= size
    return tuple(reversed(places))


@lru_cache(maxsize=4096)  # a model has few shapes and many tensors
def _whole_box(view: tuple[int, ...]) -> tuple[Box, ...]:
    return (Box((0,) * len(view), view),)


def _nonempty_box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[Box, ...]:
    return (Box(offsets, sizes),) if all(sizes) else ()


@lru_cache(maxsize=1 << 16)  # for each shape and rank
def _cut_box(shape: tuple[int, ...], cuts: tuple[tuple[int, int, int], ...]) -> tuple[Box, ...]:
    """Cut `shape` as torch.chunk does: (d, i, n) takes the i-th of n chunks along dimension d.

    Each cut is applied to the result of the cut before.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, index, parts in cuts:
        step = -(-sizes[dim] // parts)
        low = min(index * step, sizes[dim])
        offsets[dim], sizes[dim] = offsets[dim] + low, min(step, sizes[dim] - low)
    return _nonempty_box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class FlatSharding:
    """A tensor in a flat buffer that is cut into equal shards, one for each of `members`.

    The tensor has the elements [first, first + numel) of the buffer. For example, with shards of 10
    elements, a tensor with first=5 and numel=12 has 5 elements in shard 0 and 7 in shard 1. Members
    without rank 0 hold replicas of the shards of other members, and contribute nothing.

    Attributes:
        numel: Number of elements of the tensor.
        first: Index of its first element in the buffer.
        shard: Number of elements of a shard.
        members: Global ranks in the order of the shards, as a range if possible (see
            `ranks_in_order`).
        is_replicated: Whether several ranks should hold the same elements.
    """

    numel: int
    first: int
    shard: int
    members: Sequence[int]
    is_replicated: bool = False
    is_sharded = True
    is_opaque = False

    @property
    def view(self) -> tuple[int, ...]:
        return (self.numel,)

    @property
    def owners(self) -> Sequence[int]:
        """The members whose shards contain elements of the tensor."""
        if not self.numel or 0 not in self.members:
            return ()
        numbers = self.shard_numbers
        return self.members[numbers.start : numbers.stop]

    @property
    def shard_numbers(self) -> range:
        """The shards that contain elements of the tensor, which is not empty."""
        last = self.first + self.numel - 1
        return range(self.first // self.shard, last // self.shard + 1)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return self.local_boxes(rank) if 0 in self.members else ()

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        if rank not in self.members:
            return ()
        index = self.members.index(rank)
        start = max(index * self.shard, self.first) - self.first
        stop = min((index + 1) * self.shard, self.first + self.numel) - self.first
        return (Box((start,), (stop - start,)),) if stop > start else ()

    @property
    def runs(self) -> tuple[Runs, ...]:
        if not self.numel or not _are_consecutive(self.members):
            return ()
        lead = min(self.numel, self.shard - self.first % self.shard)
        rest = self.numel - lead
        chunk = self.shard if rest > self.shard else max(lead, rest)
        return (Runs(self.members[self.first // self.shard], lead, chunk, self.numel),)

    def range_in_shard(self, rank: int) -> tuple[int, int] | None:
        """Return the range [start, stop) of the tensor's elements in the shard of `rank`.

        Returns None if the shard has none of them.
        """
        for box in self.local_boxes(rank):
            start = self.first + box.offsets[0] - self.members.index(rank) * self.shard
            return start, start + box.sizes[0]
        return None


def _are_consecutive(members: Sequence[int]) -> bool:
    if isinstance(members, range):
        return members.step == 1
    return [*members] == [*range(members[0], members[0] + len(members))]
