"""How the elements of a tensor are spread over the ranks: plain data that every rank works out without asking.

One frozen, hashable class for each layout. None holds a tensor: where a rank's elements lie in memory is the business
of whoever has the tensor, and a `Sharding` says which elements these are.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

from ft_ckpt.distributed.grid_runs import Runs, runs_over_grid


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
        """Whether its engine cuts it over ranks; the same answer on every rank, whoever owns what."""
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
        """The one of `boxes`; None for none."""

    @abstractmethod
    def local_box(self, rank: int) -> Box | None:
        """The one of `local_boxes`; None for none."""


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
    """The rank `owner` alone speaks for the whole tensor; with None nobody has its elements."""

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
        """None: nobody contributes a box."""
        return None

    def local_box(self, rank: int) -> Box | None:
        """What this rank has in memory, which is the only one it may be asked of."""
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
