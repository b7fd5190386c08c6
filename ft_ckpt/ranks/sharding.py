"""How the elements of a tensor are spread over ranks (boxes, runs, flat buffers, meshes), as plain
data.

One frozen, hashable class for each layout. None refers to a tensor: a `Sharding` says which
elements a rank has, and the tensor's `Source` gives their memory.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, product
from math import prod
from typing import Protocol

MOST_RUNS = 64  # per tensor; a tensor that is cut finer is gathered before it is written


@dataclass(frozen=True)
class Runs:
    """The next elements of a tensor in consecutive runs, each of another rank: `owner`, `owner` +
    1, ...
    """

    owner: int
    lead: int  # elements of the first
    chunk: int  # of each but the first and the last
    numel: int  # of all


@dataclass(frozen=True)
class _Stretch:
    """Consecutive indices along one dimension, all on the same ranks."""

    low: int
    size: int
    # (dimension of the grid, index along it) of these ranks
    places: tuple[tuple[int, int], ...] = ()


def runs_over_grid(
    view: tuple[int, ...],
    grid: tuple[int, ...],
    ranks: Sequence[int],
    cuts: Iterable[tuple[int, int]],
) -> tuple[Runs, ...]:
    """The runs of a tensor of the shape `view`, which is not empty; () if there are more than
    MOST_RUNS.

    `cuts` are pairs (dimension of the view, dimension of the grid), applied in order, as
    torch.chunk does. `ranks` fill the grid, its last dimension fastest; of replicas the first is
    taken.
    """
    stretches = [[_Stretch(0, size)] for size in view]
    for dim, number in cuts:
        if len(stretches[dim]) * grid[number] > MOST_RUNS:
            return ()
        stretches[dim] = [
            part for whole in stretches[dim] for part in _cut_stretch(whole, number, grid[number])
        ]
    last = max((dim for dim, parts in enumerate(stretches) if len(parts) > 1), default=0)
    if prod(view[:last]) * len(stretches[last] if view else ()) > MOST_RUNS:
        return ()
    # each index separately
    rows = [[part for part in parts for _ in range(part.size)] for parts in stretches[:last]]
    found: list[tuple[int, int]] = []  # rank, elements
    for combination in product(*rows, *stretches[last:]):
        place = dict(chain.from_iterable(stretch.places for stretch in combination))
        number = sum(place.get(axis, 0) * prod(grid[axis + 1 :]) for axis in range(len(grid)))
        found.append((ranks[number], prod(stretch.size for stretch in combination[last:])))
    return tuple(_joined_runs(found))


def _cut_stretch(stretch: _Stretch, number: int, count: int) -> Iterator[_Stretch]:
    low, step = 0, -(-stretch.size // count)
    for index in range(count):
        size = min(step, stretch.size - low)
        if size > 0:
            yield _Stretch(stretch.low + low, size, (*stretch.places, (number, index)))
        low += max(size, 0)


def _joined_runs(found: Sequence[tuple[int, int]]) -> Iterator[Runs]:
    """The fewest runs that describe (rank, elements) pairs: consecutive ranks, equal sizes between
    first and last.
    """
    group: list[tuple[int, int]] = []
    for rank, numel in found:
        follows = bool(group) and rank == group[-1][0] + 1
        fits = len(group) == 1 or (
            len(group) > 1 and group[-1][1] == group[1][1] and numel <= group[1][1]
        )
        if group and not (follows and fits):
            yield _run_group(group)
            group = []
        group.append((rank, numel))
    if group:
        yield _run_group(group)


def _run_group(group: list[tuple[int, int]]) -> Runs:
    lead = group[0][1]
    return Runs(
        group[0][0], lead, group[1][1] if len(group) > 1 else lead, sum(numel for _, numel in group)
    )


@dataclass(frozen=True)
class Box:
    """A box cut from a tensor: `offsets` inclusive, `sizes` in elements, one of each per
    dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Sharding(Protocol):
    """Which elements of one tensor each rank holds.

    Over all `owners`, each element of `view` is in exactly one box.

    The elements of a rank with several boxes lie in its memory as one row of elements, box after
    box.
    """

    @property
    def view(self) -> tuple[int, ...]:
        """The shape that boxes are cut from: the tensor's own, or (numel,) where it is cut
        flattened.
        """
        ...

    @property
    def owners(self) -> Sequence[int]:
        """Global ranks that contribute to a gather, as far as this rank can tell."""
        ...

    @property
    def is_sharded(self) -> bool:
        """Whether its engine shards it over ranks; the same on every rank."""
        ...

    @property
    def is_replicated(self) -> bool:
        """Whether several ranks should hold the same elements of it; the same answer on every
        rank.
        """
        ...

    @property
    def is_opaque(self) -> bool:
        """Whether no boxes describe it, and only a collective of its engine gives the full
        tensor.
        """
        ...

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The elements that `rank` contributes to a gather."""
        ...

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        """The elements that `rank` holds in memory, even if another rank contributes them."""
        ...

    @property
    def runs(self) -> tuple[Runs, ...]:
        """All elements in order, if the boxes form few runs; () if they do not, or if every rank
        has all elements.

        The ranks are those of this rank's replica group. Only the group that contributes has
        `owners`.
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
    """The rank `owner` alone contributes the whole tensor to a gather; with None no rank does."""

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
        numel = math.prod(self.view)
        return () if self.owner is None or not numel else (Runs(self.owner, numel, numel, numel),)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return _whole_box(self.view) if rank == self.owner else ()

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        """The whole tensor, even for a rank that holds none of it."""
        return _whole_box(self.view)


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]  # global, the last dimension of the grid varies fastest

    @cached_property
    def places(self) -> dict[int, tuple[int, ...]]:
        """The index of each rank in the grid."""
        return {rank: unravel_index(number, self.shape) for number, rank in enumerate(self.ranks)}

    @cached_property
    def reaches(self) -> tuple[int, ...]:
        """Along each dimension, how many ranks from the first one on have consecutive numbers."""
        strides = [math.prod(self.shape[number + 1 :]) for number in range(len(self.shape))]
        lines = [
            self.ranks[: size * step : step] for size, step in zip(self.shape, strides, strict=True)
        ]
        counted = [[rank - number == line[0] for number, rank in enumerate(line)] for line in lines]
        return tuple((*flags, False).index(False) for flags in counted)


@dataclass(frozen=True)
class MeshSharding:
    """A tensor cut over dimensions of a mesh, as torch.chunk does; other dimensions replicate it.

    A mesh without rank 0 holds a replica of another mesh's elements, and contributes nothing.
    """

    view: tuple[int, ...]
    mesh: Mesh
    # for each dimension of the mesh, the dimension of the view that it cuts
    cuts: tuple[int | None, ...]
    is_replicated: bool = False
    # in which the mesh's dimensions cut, each the parts of the last; (): 0, 1, ...
    order: tuple[int, ...] = ()
    is_sharded = True
    is_opaque = False

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The first rank of each replica group."""
        places = self.mesh.places
        if 0 not in places:
            return ()
        replicated = [number for number, dim in enumerate(self.cuts) if dim is None]
        return tuple(
            sorted(
                rank for rank, at in places.items() if not any(at[number] for number in replicated)
            )
        )

    @cached_property
    def _owner_set(self) -> frozenset[int]:
        return frozenset(self.owners)

    @cached_property  # many tensors have one layout
    def runs(self) -> tuple[Runs, ...]:
        sizes = zip(self.cuts, self.mesh.shape, self.mesh.reaches, strict=True)
        cut = [
            (dim, parts, reach)
            for dim, parts, reach in sizes
            if dim is not None and min(parts, self.view[dim]) > 1
        ]
        numel = math.prod(self.view)
        if not numel:
            return ()
        dim, parts, reach = cut[0] if cut else (0, 1, 1)
        rows = self.view[0] if self.view else 1
        step = -(-rows // parts)
        if len(cut) > 1 or dim or -(-rows // step) > reach:
            numbers = self.order or range(len(self.cuts))
            cuts = [
                (cut_dim, number)
                for number in numbers
                if (cut_dim := self.cuts[number]) is not None
            ]
            return runs_over_grid(self.view, self.mesh.shape, self.mesh.ranks, cuts)
        # rows over consecutive ranks: one run for any number of ranks
        return (Runs(self.mesh.ranks[0], step * (numel // rows), step * (numel // rows), numel),)

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return self.local_boxes(rank) if rank in self._owner_set else ()

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        place = self.mesh.places.get(rank)
        if place is None:
            return ()
        cuts = [*zip(self.cuts, place, self.mesh.shape, strict=True)]
        ordered = [cuts[number] for number in self.order] if self.order else cuts
        return _cut_box(
            self.view,
            tuple((dim, index, parts) for dim, index, parts in ordered if dim is not None),
        )


@dataclass(frozen=True)
class OpaqueSharding:
    """A layout that only its engine can assemble, such as a pending sum.

    Nothing can be read into it.
    """

    view: tuple[int, ...]
    is_replicated: bool = False
    why: str = ""  # the reason to refuse it, if the engine cannot assemble it either
    owners = (0,)
    is_sharded = False
    is_opaque = True
    runs = ()

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return ()

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        return ()


def is_known_to_all(sharding: Sharding, world_size: int) -> bool:
    """Whether every rank knows which ranks contribute to a gather of the tensor; the same answer on
    every rank.

    In a group of shards without rank 0, which holds replicas, ranks know their own group alone.
    """
    if isinstance(sharding, MeshSharding):
        return len(sharding.mesh.ranks) == world_size
    if isinstance(sharding, FlatSharding):
        return len(sharding.members) == world_size
    return True


def part_count(sharding: Sharding) -> int:
    """The number of parts that the tensor is cut into; the same answer on every rank."""
    if isinstance(sharding, MeshSharding):
        return math.prod(
            size
            for size, dim in zip(sharding.mesh.shape, sharding.cuts, strict=True)
            if dim is not None
        )
    if isinstance(sharding, FlatSharding) and sharding.numel:
        return (
            (sharding.first + sharding.numel - 1) // sharding.shard
            - sharding.first // sharding.shard
            + 1
        )
    return max(1, len(sharding.owners))


def unravel_index(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The multi-dimensional index of the flat `index` in an array of that `shape`."""
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
    """The box left of `shape` after cutting dimension d into n chunks and taking the i-th, as
    torch.chunk does.

    Each cut (d, i, n) is applied to the result of the one before.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, index, parts in cuts:
        step = -(-sizes[dim] // parts)
        low = min(index * step, sizes[dim])
        offsets[dim], sizes[dim] = offsets[dim] + low, min(step, sizes[dim] - low)
    return _nonempty_box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class FlatSharding:
    """A tensor at [first, first + numel) of a flat buffer that is cut into equal shards, one for
    each of `members`.

    Members without rank 0 hold replicas of other members' shards, and contribute nothing.
    """

    numel: int
    first: int
    shard: int  # elements
    # global ranks in the order of the shards; a range is searched in constant time
    members: Sequence[int]
    is_replicated: bool = False
    is_sharded = True
    is_opaque = False

    @property
    def view(self) -> tuple[int, ...]:
        return (self.numel,)

    @property
    def owners(self) -> Sequence[int]:
        """The members whose shards contain elements of it."""
        if not self.numel or 0 not in self.members:
            return ()
        return self.members[
            self.first // self.shard : (self.first + self.numel - 1) // self.shard + 1
        ]

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
        """The range [start, stop) of the elements in the shard of `rank`, or None."""
        for box in self.local_boxes(rank):
            start = self.first + box.offsets[0] - self.members.index(rank) * self.shard
            return start, start + box.sizes[0]
        return None


def _are_consecutive(members: Sequence[int]) -> bool:
    if isinstance(members, range):
        return members.step == 1
    return [*members] == [*range(members[0], members[0] + len(members))]


@dataclass(frozen=True)
class MeshCutting:
    """The view, cuts and order of a `MeshSharding`."""

    view: tuple[int, ...]
    cuts: tuple[int | None, ...]
    order: tuple[int, ...]


@lru_cache(maxsize=1024)
def cutting_of(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    dims: tuple[int | None, ...],
    factors: tuple[int, ...],
) -> MeshCutting | None:
    """The cuts of a tensor with the given `shape` over a grid `mesh`.

    `dims`: for each dimension of the mesh the tensor's dimension that it cuts, or None; `factors`:
    the split factors. None if the placements are ambiguous: a split factor that means neither
    cutting from right to left nor packed tensors, or sizes that do not divide, for which the order
    of cutting and the placements give different parts.
    """
    factors = tuple(1 if dim is None else factor for dim, factor in zip(dims, factors, strict=True))
    strided = [number for number, factor in enumerate(factors) if factor > 1]
    packed = [number for number in strided if not _is_right_to_left(number, mesh, dims, factors)]
    if packed:
        return (
            _packed_cutting(shape, mesh, dims, factors)
            if packed == strided and len(packed) == 1
            else None
        )
    order = tuple(sorted(range(len(mesh)), key=lambda number: -number)) if strided else ()
    for dim in {dims[number] for number in strided}:
        cutting = [number for number, other in enumerate(dims) if other == dim and mesh[number] > 1]
        if any(number not in strided for number in cutting[:-1]):
            return None  # from right to left in part
        if dim is None or not _orders_agree(
            shape[dim], [mesh[n] for n in cutting], [factors[n] for n in cutting]
        ):
            return None
    plain = (
        {dims[number] for number in range(len(dims)) if number not in strided}
        - {dims[n] for n in strided}
        - {None}
    )
    if order and any(list(dims).count(dim) > 1 for dim in plain):
        return None  # one dimension from right to left, another from left to right
    return MeshCutting(shape, dims, order)


def _is_right_to_left(
    number: int, mesh: tuple[int, ...], dims: tuple[int | None, ...], factors: tuple[int, ...]
) -> bool:
    """Whether the split factor is the number of parts that later dimensions of the mesh cut the
    same dimension into.
    """
    later = [other for other in range(number + 1, len(mesh)) if dims[other] == dims[number]]
    return bool(later) and factors[number] == prod(mesh[other] for other in later)


def _packed_cutting(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    dims: tuple[int | None, ...],
    factors: tuple[int, ...],
) -> MeshCutting | None:
    """The cutting of each of several tensors packed in one dimension, which the view splits into
    two dimensions.
    """
    number = next(index for index, factor in enumerate(factors) if factor > 1)
    dim, parts = dims[number], factors[number]
    if dim is None or list(dims).count(dim) > 1 or shape[dim] % parts:
        return None
    view = (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
    cuts = tuple(None if other is None else other + (other >= dim) for other in dims)
    return MeshCutting(view, cuts, ())


def _orders_agree(size: int, parts: list[int], factors: list[int]) -> bool:
    """Whether cutting from right to left gives each rank the part of the placements, read from left
    to right.
    """
    if size % prod(parts) == 0:
        return True
    by_placements: dict[tuple[int, ...], list[int]] = {(): [*range(size)]}
    for count, factor in zip(parts, factors, strict=True):
        by_placements = {
            (*place, index): [
                row for group in _chunked(rows, factor) for row in _chunked(group, count)[index]
            ]
            for place, rows in by_placements.items()
            for index in range(count)
        }
    as_cut: dict[tuple[int, ...], list[int]] = {(): [*range(size)]}
    for count in reversed(parts):
        as_cut = {
            (index, *place): chunk
            for place, rows in as_cut.items()
            for index, chunk in enumerate(_chunked(rows, count))
        }
    return by_placements == as_cut


def _chunked(rows: list[int], count: int) -> list[list[int]]:
    """The chunks of torch.chunk, with empty ones at the end."""
    step = -(-len(rows) // count)
    return [rows[index * step : (index + 1) * step] for index in range(count)]
