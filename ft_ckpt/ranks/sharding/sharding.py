"""How the elements of a tensor are spread over ranks (boxes, flat buffers, meshes), as plain data.

There is one frozen, hashable class for each layout. The classes refer to no tensor: a `Sharding`
says which elements a rank has, and the `Source` of a tensor gives their memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Protocol

from ft_ckpt.ranks.sharding.runs import Runs, runs_over_grid


@dataclass(frozen=True)
class Box:
    """A box cut from a tensor: `offsets` and `sizes` in elements, one for each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Sharding(Protocol):
    """Which elements of one tensor each rank holds.

    Over all `owners`, each element of `view` is in exactly one box. If a rank has several boxes,
    their elements follow each other in its memory, box after box.
    """

    @property
    def view(self) -> tuple[int, ...]:
        """The shape that boxes are cut from: the tensor's, or (numel,) where it is flattened."""
        ...

    @property
    def owners(self) -> Sequence[int]:
        """Global ranks that contribute to a gather, as far as this rank can tell."""
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
        """Whether no boxes describe the tensor, which only a collective of its engine gives."""
        ...

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """Return the elements that `rank` contributes to a gather."""
        ...

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        """Return the elements that `rank` has in memory, even if another rank contributes them."""
        ...

    @property
    def runs(self) -> tuple[Runs, ...]:
        """All elements in order, if the boxes form few runs; else ().

        The runs are () as well if every rank has all elements. The ranks in the runs are those of
        this rank's replica group, even if another group contributes the elements, and this one has
        no `owners`.
        """
        ...


@dataclass(frozen=True)
class ReplicatedSharding:
    """Every rank has the whole tensor; rank 0's is stored."""

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
    """The rank `owner` alone contributes the whole tensor to a gather; None means no rank does."""

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
    """Ranks in a grid."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]  # global ranks; the last dimension of the grid varies fastest

    @cached_property
    def places(self) -> dict[int, tuple[int, ...]]:
        """The index of each rank in the grid."""
        return {rank: unravel_index(number, self.shape) for number, rank in enumerate(self.ranks)}

    @cached_property
    def reaches(self) -> tuple[int, ...]:
        """How many ranks, from the first one on, have consecutive numbers, for each dimension."""
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

    A mesh without rank 0 holds replicas of another mesh's elements, and contributes nothing.
    """

    view: tuple[int, ...]
    mesh: Mesh
    # for each dimension of the mesh, the dimension of the view that it cuts
    cuts: tuple[int | None, ...]
    is_replicated: bool = False
    # order in which the dimensions of the mesh cut, each the parts that the one before has made; ()
    # stands for 0, 1, ...
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
        """Return the rows of each rank if consecutive ranks have consecutive rows.

        Return None if the tensor is cut more than once, or not along its first dimension, or if the
        ranks with the parts do not have consecutive numbers.
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
    """A layout that only its engine can assemble, such as a pending sum.

    Nothing can be read into such a tensor.
    """

    view: tuple[int, ...]
    is_replicated: bool = False
    why: str = ""  # the reason to refuse the tensor, if the engine cannot assemble it either
    owners = (0,)
    is_sharded = False
    is_opaque = True
    runs = ()

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return ()

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        return ()


def is_known_to_all(sharding: Sharding, world_size: int) -> bool:
    """Check whether every rank knows which ranks contribute to a gather of the tensor.

    The answer is the same on every rank. If there are several groups of shards, the ranks of the
    groups without rank 0 know the members of their own group alone.
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

    The tensor has the elements [first, first + numel) of the buffer. Members without rank 0 hold
    replicas of the shards of other members, and contribute nothing.
    """

    numel: int
    first: int
    shard: int  # elements
    # global ranks in the order of the shards, if possible as a range (see `ranks_in_order`)
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
        """Return the range [start, stop) of the elements in the shard of `rank`, or None."""
        for box in self.local_boxes(rank):
            start = self.first + box.offsets[0] - self.members.index(rank) * self.shard
            return start, start + box.sizes[0]
        return None


def _are_consecutive(members: Sequence[int]) -> bool:
    if isinstance(members, range):
        return members.step == 1
    return [*members] == [*range(members[0], members[0] + len(members))]
