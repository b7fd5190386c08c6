"""How the elements of a tensor are spread over ranks (boxes, runs, flat buffers, meshes), as plain data.

One frozen, hashable class for each layout. None holds a tensor: where a rank's elements lie in memory is the business
of the tensor's owner; a `Sharding` says which elements these are.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, product
from math import prod
from typing import Protocol

MOST_RUNS = 64  # of one tensor: where slabs are cut finer, they are put together before they are written


@dataclass(frozen=True)
class Runs:
    """The next elements of a tensor in consecutive runs, each of another rank: `owner`, `owner` + 1, ..."""

    owner: int
    lead: int  # elements of the first
    chunk: int  # of each but the first and the last
    numel: int  # of all


@dataclass(frozen=True)
class _Stretch:
    """Indices along one dimension that are held alike; by whom, an index for each of some dimensions of the grid."""

    low: int
    size: int
    places: tuple[tuple[int, int], ...] = ()


def runs_over_grid(
    view: tuple[int, ...],
    grid: tuple[int, ...],
    ranks: Sequence[int],
    cuts: Iterable[tuple[int, int]],
    sizes: tuple[int, ...] = (),
) -> tuple[Runs, ...]:
    """The runs of a tensor of the shape `view`, which has elements; () where they are more than MOST_RUNS.

    `cuts` are (dimension of the view, dimension of the grid), one after the other, as torch.chunk or in parts of
    `sizes`. `ranks` fill the grid, its last dimension fastest; of replicas the first counts.
    """
    stretches = [[_Stretch(0, size)] for size in view]
    for dim, number in cuts:
        if len(stretches[dim]) * grid[number] > MOST_RUNS:
            return ()
        stretches[dim] = [part for one in stretches[dim] for part in _cut_stretch(one, number, grid[number], sizes)]
    last = max((dim for dim, some in enumerate(stretches) if len(some) > 1), default=0)
    if prod(view[:last]) * len(stretches[last] if view else ()) > MOST_RUNS:
        return ()
    rows = [[one for one in some for _ in range(one.size)] for some in stretches[:last]]  # each index by itself
    found: list[tuple[int, int]] = []  # rank, elements
    for place in product(*rows, *stretches[last:]):
        held = dict(chain.from_iterable(one.places for one in place))
        number = sum(held.get(axis, 0) * prod(grid[axis + 1 :]) for axis in range(len(grid)))
        found.append((ranks[number], prod(one.size for one in place[last:])))
    return tuple(_joined_runs(found))


def _cut_stretch(stretch: _Stretch, number: int, count: int, sizes: tuple[int, ...]) -> Iterator[_Stretch]:
    low, step = 0, -(-stretch.size // count)
    for index in range(count):
        size = sizes[index] if sizes else min(step, stretch.size - low)
        if size > 0:
            yield _Stretch(stretch.low + low, size, (*stretch.places, (number, index)))
        low += max(size, 0)


def _joined_runs(found: Sequence[tuple[int, int]]) -> Iterator[Runs]:
    """As few as say the same: ranks in their order, all but the first and the last with as many elements."""
    group: list[tuple[int, int]] = []
    for rank, numel in found:
        follows = bool(group) and rank == group[-1][0] + 1
        fits = len(group) == 1 or (len(group) > 1 and group[-1][1] == group[1][1] and numel <= group[1][1])
        if group and not (follows and fits):
            yield _run_group(group)
            group = []
        group.append((rank, numel))
    if group:
        yield _run_group(group)


def _run_group(group: list[tuple[int, int]]) -> Runs:
    lead = group[0][1]
    return Runs(group[0][0], lead, group[1][1] if len(group) > 1 else lead, sum(numel for _, numel in group))


@dataclass(frozen=True)
class Box:
    """A box cut from a tensor: `offsets` inclusive, `sizes` in elements, one of each per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Sharding(Protocol):
    """Which elements of one tensor each rank holds. Over all `owners`, each element of `view` is in exactly one box.

    Those that a rank has in several boxes lie in its memory as one row of elements, box after box.
    """

    @property
    def view(self) -> tuple[int, ...]:
        """The shape that boxes are cut from: the tensor's own, or (numel,) where it is cut flattened."""
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
        """Whether several ranks should hold the same elements of it; the same answer on every rank."""
        ...

    @property
    def is_opaque(self) -> bool:
        """Whether no boxes describe it: a collective of its engine alone gives the full tensor."""
        ...

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The elements that `rank` contributes to a gather."""
        ...

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        """The elements that `rank` has in memory, even if another rank contributes them."""
        ...

    @property
    def runs(self) -> tuple[Runs, ...]:
        """All elements in their order, where boxes are few runs of these; () where they are not, or all have them.

        They are those of this rank's group of replicas, which has `owners` where it is the one that contributes.
        """
        ...


class OneBox(ABC):
    """Of shardings under which what a rank has is one box, or nothing."""

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The elements that `rank` contributes to a gather."""
        box = self.box(rank)
        return () if box is None else (box,)

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        """The elements that `rank` has in memory, even if another rank contributes them."""
        box = self.local_box(rank)
        return () if box is None else (box,)

    @abstractmethod
    def box(self, rank: int) -> Box | None:
        """The only box of `boxes`, or None."""

    @abstractmethod
    def local_box(self, rank: int) -> Box | None:
        """The only box of `local_boxes`, or None."""


@dataclass(frozen=True)
class ReplicatedSharding(OneBox):
    """Every rank has the whole tensor; rank 0's is the one that counts."""

    view: tuple[int, ...]
    is_replicated: bool = True
    owners = (0,)
    is_sharded = is_opaque = False
    runs = ()  # all have it

    def box(self, rank: int) -> Box | None:
        """The whole tensor on rank 0."""
        return _whole_box(self.view) if rank == 0 else None

    def local_box(self, rank: int) -> Box | None:
        """The whole tensor."""
        return _whole_box(self.view)


@dataclass(frozen=True)
class OwnedSharding(OneBox):
    """The rank `owner` alone stores the whole tensor; with None no rank has its elements."""

    view: tuple[int, ...]
    owner: int | None
    is_replicated: bool = False
    is_opaque = False

    @property
    def owners(self) -> tuple[int, ...]:
        """The owner, if there is one."""
        return () if self.owner is None else (self.owner,)

    @property
    def is_sharded(self) -> bool:
        """Whether it has to come to rank 0 from elsewhere."""
        return self.owner not in (0, None)

    @property
    def runs(self) -> tuple[Runs, ...]:
        """One."""
        numel = math.prod(self.view)
        return () if self.owner is None or not numel else (Runs(self.owner, numel, numel, numel),)

    def box(self, rank: int) -> Box | None:
        """The whole tensor on its owner."""
        return _whole_box(self.view) if rank == self.owner else None

    def local_box(self, rank: int) -> Box | None:
        """The whole tensor, on ranks that have any of it."""
        return _whole_box(self.view)


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]  # global, the last dimension of the grid varies fastest

    @cached_property
    def places(self) -> dict[int, tuple[int, ...]]:
        """Each rank's index in the grid."""
        return {rank: unravel_index(number, self.shape) for number, rank in enumerate(self.ranks)}

    @cached_property
    def reaches(self) -> tuple[int, ...]:
        """Along each dimension, how many ranks from the first one on are numbered one after the other."""
        strides = [math.prod(self.shape[number + 1 :]) for number in range(len(self.shape))]
        lines = [self.ranks[: size * step : step] for size, step in zip(self.shape, strides, strict=True)]
        counted = [[rank - number == line[0] for number, rank in enumerate(line)] for line in lines]
        return tuple((*one, False).index(False) for one in counted)


@dataclass(frozen=True)
class MeshSharding(OneBox):
    """A tensor cut along dimensions over a mesh, as torch.chunk cuts or in parts of given sizes; the rest are replicas.

    A mesh without rank 0 holds again what another one holds, and contributes nothing.
    """

    view: tuple[int, ...]
    mesh: Mesh
    cuts: tuple[int | None, ...]  # for each dimension of the mesh the one of the view that it cuts
    is_replicated: bool = False
    order: tuple[int, ...] = ()  # of the mesh's dimensions: a later one cuts what earlier ones leave; as they come
    sizes: tuple[int, ...] = ()  # of the parts, over a mesh of one dimension; as torch.chunk
    is_sharded = True
    is_opaque = False

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Of replicas, the first."""
        places = self.mesh.places
        if 0 not in places:
            return ()
        again = [number for number, dim in enumerate(self.cuts) if dim is None]
        return tuple(sorted(rank for rank, at in places.items() if not any(at[number] for number in again)))

    @cached_property
    def _speakers(self) -> frozenset[int]:
        return frozenset(self.owners)

    @cached_property  # many tensors have one layout
    def runs(self) -> tuple[Runs, ...]:
        """Rows, along ranks that are numbered one after the other, of any number; else what is left in few runs."""
        sizes = zip(self.cuts, self.mesh.shape, self.mesh.reaches, strict=True)
        cut = [(dim, parts, reach) for dim, parts, reach in sizes if dim is not None and min(parts, self.view[dim]) > 1]
        numel = math.prod(self.view)
        if not numel:
            return ()
        dim, parts, reach = cut[0] if cut else (0, 1, 1)
        rows = self.view[0] if self.view else 1
        step = -(-rows // parts)
        if len(cut) > 1 or dim or self.sizes or -(-rows // step) > reach:
            numbers = self.order or range(len(self.cuts))
            cuts = [(one, number) for number in numbers if (one := self.cuts[number]) is not None]
            return runs_over_grid(self.view, self.mesh.shape, self.mesh.ranks, cuts, self.sizes)
        return (Runs(self.mesh.ranks[0], step * (numel // rows), step * (numel // rows), numel),)

    def box(self, rank: int) -> Box | None:
        """The part of `rank`, if it is the first of its replicas."""
        return self.local_box(rank) if rank in self._speakers else None

    def local_box(self, rank: int) -> Box | None:
        """The part of `rank`."""
        place = self.mesh.places.get(rank)
        if place is None:
            return None
        if self.sizes:
            return _sized_box(self.view, self.cuts[0] or 0, self.sizes, place[0])
        cuts = [*zip(self.cuts, place, self.mesh.shape, strict=True)]
        ordered = [cuts[number] for number in self.order] if self.order else cuts
        return _cut_box(self.view, tuple((dim, index, parts) for dim, index, parts in ordered if dim is not None))


@dataclass(frozen=True)
class OpaqueSharding(OneBox):
    """A layout that its engine alone can put together: a pending sum. Nothing can be read into it."""

    view: tuple[int, ...]
    here: Box | None  # what this rank has in memory
    is_replicated: bool = False
    why: str = ""  # it cannot be trusted with that either, and is to be refused
    owners = (0,)
    is_sharded = False
    is_opaque = True
    runs = ()

    def box(self, rank: int) -> Box | None:
        return None

    def local_box(self, rank: int) -> Box | None:
        """The box that this rank has in memory; known for this rank only."""
        return self.here


def unravel_index(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The place of the flat `index` in an array of that `shape`."""
    places = []
    for size in reversed(shape):
        places.append(index % size)
        index //= size
    return tuple(reversed(places))


@lru_cache(maxsize=4096)  # a model has few shapes and many tensors
def _whole_box(view: tuple[int, ...]) -> Box:
    return Box((0,) * len(view), view)


def _sized_box(shape: tuple[int, ...], dim: int, sizes: tuple[int, ...], index: int) -> Box | None:
    """The `index`-th of the parts of those sizes along a dimension."""
    offsets = tuple(sum(sizes[:index]) if number == dim else 0 for number in range(len(shape)))
    return _nonempty_box(offsets, (*shape[:dim], sizes[index], *shape[dim + 1 :]))


def _nonempty_box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Box | None:
    return Box(offsets, sizes) if all(sizes) else None


@lru_cache(maxsize=1 << 16)  # for each shape and rank
def _cut_box(shape: tuple[int, ...], cuts: tuple[tuple[int, int, int], ...]) -> Box | None:
    """The box left of `shape` after cutting dimension d into n chunks and taking the i-th, as torch.chunk does.

    Cuts come one after the other, each of what those before it left.
    """
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, index, parts in cuts:
        step = -(-sizes[dim] // parts)
        low = min(index * step, sizes[dim])
        offsets[dim], sizes[dim] = offsets[dim] + low, min(step, sizes[dim] - low)
    return _nonempty_box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True)
class FlatSharding(OneBox):
    """A tensor at [first, first + numel) of a flat buffer that is cut into equal shards, one for each of `members`.

    Members without rank 0 hold again what others hold, and contribute nothing, unless no others have it.
    """

    numel: int
    first: int
    shard: int  # elements
    members: Sequence[int]  # global ranks in the order of the shards; a range needs no look at each of them
    is_replicated: bool = False
    is_only: bool = False  # no other ranks have it
    is_sharded = True
    is_opaque = False

    @property
    def view(self) -> tuple[int, ...]:
        """All elements in a row."""
        return (self.numel,)

    @property
    def owners(self) -> Sequence[int]:
        """The members whose shards have elements of it."""
        if not self.numel or not self._contributes:
            return ()
        return self.members[self.first // self.shard : (self.first + self.numel - 1) // self.shard + 1]

    def box(self, rank: int) -> Box | None:
        """The run of elements in the shard of `rank`."""
        return self.local_box(rank) if self._contributes else None

    @property
    def _contributes(self) -> bool:
        return self.is_only or 0 in self.members

    def local_box(self, rank: int) -> Box | None:
        """The same, in any group of members."""
        if rank not in self.members:
            return None
        return _run_in_shard(self.numel, self.first, self.shard, self.members.index(rank))

    @property
    def runs(self) -> tuple[Runs, ...]:
        """What each of the members has, if they are numbered one after the other."""
        if not self.numel or not _are_consecutive(self.members):
            return ()
        lead = min(self.numel, self.shard - self.first % self.shard)
        rest = self.numel - lead
        chunk = self.shard if rest > self.shard else max(lead, rest)
        return (Runs(self.members[self.first // self.shard], lead, chunk, self.numel),)

    def range_in_shard(self, rank: int) -> tuple[int, int] | None:
        """The range [start, stop) of the elements in the shard of `rank`, or None."""
        box = self.local_box(rank)
        if box is None:
            return None
        start = self.first + box.offsets[0] - self.members.index(rank) * self.shard
        return start, start + box.sizes[0]


@dataclass(frozen=True)
class PartRunsSharding:
    """A tensor cut into boxes, each of which lies in a flat buffer of ranks that no other box has.

    So lies the state of layers that tensor parallelism has cut, where ZeRO cuts it again among those with the same
    part.
    """

    view: tuple[int, ...]
    parts: tuple[tuple[Box, FlatSharding], ...]
    is_replicated = is_opaque = False
    is_sharded = True
    runs = ()  # rank 0 puts the pieces of rows together

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The ranks that have elements."""
        return tuple(sorted(rank for _, cut in self.parts for rank in cut.owners))

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The run of elements of `rank` in its part, as boxes in their order in memory."""
        return self.local_boxes(rank)

    def local_boxes(self, rank: int) -> tuple[Box, ...]:
        """The same."""
        for part, cut in self.parts:
            run = cut.local_box(rank)
            if run is not None:
                return _placed_boxes(part, run.offsets[0], run.offsets[0] + run.sizes[0])
        return ()

    def range_in_shard(self, rank: int) -> tuple[int, int] | None:
        """The range [start, stop) of the elements in the shard of `rank`, or None."""
        return next((cut.range_in_shard(rank) for _, cut in self.parts if rank in cut.members), None)


@lru_cache(maxsize=1 << 14)  # a model has few shapes, and layers alike
def _placed_boxes(part: Box, start: int, stop: int) -> tuple[Box, ...]:
    """The elements [start, stop) of a flattened part, as boxes of the whole tensor."""
    return tuple(
        Box(tuple(low + at for low, at in zip(part.offsets, box.offsets, strict=True)), box.sizes)
        for box in boxes_of_run(part.sizes, start, stop)
    )


def boxes_of_run(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements [start, stop) of a flattened array of `sizes`, one dimension or more, as few boxes, in order."""
    inner = math.prod(sizes[1:])
    head = min(stop, start + -start % inner)
    rows = (stop - head) // inner
    tail = head + rows * inner
    yield from _boxes_in_row(sizes, start, head)
    if rows:
        yield Box((head // inner, *(0 for _ in sizes[1:])), (rows, *sizes[1:]))
    yield from _boxes_in_row(sizes, tail, stop)


def _boxes_in_row(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements [start, stop), which are all in one row and not all of it."""
    row = start // math.prod(sizes[1:])
    if start < stop:
        first = row * math.prod(sizes[1:])
        for box in boxes_of_run(sizes[1:], start - first, stop - first):
            yield Box((row, *box.offsets), (1, *box.sizes))


def _are_consecutive(members: Sequence[int]) -> bool:
    """Whether they are numbered one after the other."""
    if isinstance(members, range):
        return members.step == 1
    return [*members] == [*range(members[0], members[0] + len(members))]


def _run_in_shard(numel: int, first: int, shard: int, index: int) -> Box | None:
    """The elements of [first, first + numel) that lie in the shard at `index`, counted from `first`."""
    start = max(index * shard, first) - first
    stop = min((index + 1) * shard, first + numel) - first
    return Box((start,), (stop - start,)) if stop > start else None


@dataclass(frozen=True)
class MeshCutting:
    """The shape that is cut, and which of its dimensions each dimension of the mesh cuts, in which order."""

    view: tuple[int, ...]
    cuts: tuple[int | None, ...]
    order: tuple[int, ...]  # of the mesh's dimensions; () as they come


@lru_cache(maxsize=1024)
def cutting_of(
    shape: tuple[int, ...], mesh: tuple[int, ...], dims: tuple[int | None, ...], factors: tuple[int, ...]
) -> MeshCutting | None:
    """The cuts of a tensor: for each dimension of the mesh the one that it cuts (None: none), and its split factor.

    None where it cannot be told who has what: a stride that is neither of the two kinds, or sizes that do not divide,
    where the order in which they were cut and the placements say different things.
    """
    factors = tuple(1 if dim is None else factor for dim, factor in zip(dims, factors, strict=True))
    strided = [number for number, factor in enumerate(factors) if factor > 1]
    packed = [number for number in strided if not _is_right_to_left(number, mesh, dims, factors)]
    if packed:
        return _packed_cutting(shape, mesh, dims, factors) if packed == strided and len(packed) == 1 else None
    order = tuple(sorted(range(len(mesh)), key=lambda number: -number)) if strided else ()
    for dim in {dims[number] for number in strided}:
        cutting = [number for number, one in enumerate(dims) if one == dim and mesh[number] > 1]
        if any(number not in strided for number in cutting[:-1]):
            return None  # from right to left in part
        if dim is None or not _says_the_same(shape[dim], [mesh[one] for one in cutting], [factors[n] for n in cutting]):
            return None
    plain = {dims[number] for number in range(len(dims)) if number not in strided} - {dims[n] for n in strided} - {None}
    if order and any(list(dims).count(dim) > 1 for dim in plain):
        return None  # one dimension from right to left, another from left to right
    return MeshCutting(shape, dims, order)


def _is_right_to_left(
    number: int, mesh: tuple[int, ...], dims: tuple[int | None, ...], factors: tuple[int, ...]
) -> bool:
    """Whether the stride counts the parts that later dimensions of the mesh had made of the same dimension."""
    later = [other for other in range(number + 1, len(mesh)) if dims[other] == dims[number]]
    return bool(later) and factors[number] == prod(mesh[other] for other in later)


def _packed_cutting(
    shape: tuple[int, ...], mesh: tuple[int, ...], dims: tuple[int | None, ...], factors: tuple[int, ...]
) -> MeshCutting | None:
    """One dimension split into its packed parts, the second of the two cut."""
    number = next(one for one, factor in enumerate(factors) if factor > 1)
    dim, parts = dims[number], factors[number]
    if dim is None or list(dims).count(dim) > 1 or shape[dim] % parts:
        return None
    view = (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
    cuts = tuple(None if one is None else one + (one >= dim) for one in dims)
    return MeshCutting(view, cuts, ())


def _says_the_same(size: int, parts: list[int], factors: list[int]) -> bool:
    """Whether cutting from right to left gives all ranks what the placements say, read from left to right."""
    if size % prod(parts) == 0:
        return True
    by_placements: dict[tuple[int, ...], list[int]] = {(): [*range(size)]}
    for count, factor in zip(parts, factors, strict=True):
        by_placements = {
            (*place, index): [row for group in _chunked(rows, factor) for row in _chunked(group, count)[index]]
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
    """As torch.chunk, with empty ones at the end."""
    step = -(-len(rows) // count)
    return [rows[index * step : (index + 1) * step] for index in range(count)]
