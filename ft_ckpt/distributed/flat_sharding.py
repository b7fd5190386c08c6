"""How tensors lie in flat buffers that are cut into equal shards, whole ones and parts that were cut before."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ft_ckpt.distributed.grid_runs import Runs
from ft_ckpt.distributed.sharding import Box, OneBox


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
        """Where the elements lie in the shard of `rank`, as [start, stop); None for none."""
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
        """Those that have any elements."""
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
        """Where the elements lie in the shard of `rank`, as [start, stop); None for none."""
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
