"""Describes a sharded tensor as runs: consecutive elements in pieces of consecutive ranks.

For example, 10 rows of 3 elements are cut over ranks 0 to 3, as torch.chunk does:

    rows:   0 1 2 | 3 4 5 | 6 7 8 | 9
    rank:     0   |   1   |   2   | 3

This is one run, Runs(owner=0, lead=9, chunk=9, numel=30). If the same tensor is cut by columns, it
has ten runs: each row is a run with one element of each rank.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

# A tensor with more runs is gathered before it is written.
MAX_RUNS = 64


@dataclass(frozen=True)
class Runs:
    """Consecutive elements of a tensor in pieces of consecutive ranks.

    Attributes:
        owner: The rank of the first piece. The next piece belongs to `owner` + 1, and so on.
        lead: Number of elements of the first piece.
        chunk: Number of elements of each piece except the first and the last.
        numel: Number of elements of all pieces.
    """

    owner: int
    lead: int
    chunk: int
    numel: int


@dataclass(frozen=True)
class _Stretch:
    """Consecutive indices along one dimension of a tensor that the same ranks hold.

    Attributes:
        low: The first index.
        size: The number of indices.
        places: Which ranks hold them: pairs of a dimension of the grid and an index along it.
    """

    low: int
    size: int
    places: tuple[tuple[int, int], ...] = ()


def runs_over_grid(
    view: tuple[int, ...],
    grid: tuple[int, ...],
    ranks: Sequence[int],
    cuts: Iterable[tuple[int, int]],
) -> tuple[Runs, ...]:
    """Return the runs of a tensor of the shape `view`, which is not empty.

    `cuts` are pairs of a dimension of the view and the dimension of the grid that cuts it, in the
    order of cutting. Each cuts as torch.chunk does. `ranks` fill the grid; its last dimension
    varies fastest. If several ranks hold the same elements, the first of them is in the runs.
    Returns () if there would be more than MAX_RUNS.
    """
    stretches = [[_Stretch(0, size)] for size in view]
    for dim, axis in cuts:
        if len(stretches[dim]) * grid[axis] > MAX_RUNS:
            return ()
        parts: list[_Stretch] = []
        for stretch in stretches[dim]:
            parts += _cut_stretch(stretch, axis, grid[axis])
        stretches[dim] = parts

    # `last` is the last dimension that is cut. Each index of a dimension before it begins new
    # pieces.
    last = 0
    for dim, parts in enumerate(stretches):
        if len(parts) > 1:
            last = dim

    count_in_last = len(stretches[last]) if view else 0
    if prod(view[:last]) * count_in_last > MAX_RUNS:
        return ()
    rows = [_single_indices(parts) for parts in stretches[:last]]
    pieces: list[tuple[int, int]] = []  # rank, elements
    for combination in product(*rows, *stretches[last:]):
        place: dict[int, int] = {}
        for stretch in combination:
            place.update(stretch.places)
        number = 0  # of the rank in the grid
        for axis, size in enumerate(grid):
            number = number * size + place.get(axis, 0)
        pieces.append((ranks[number], prod(stretch.size for stretch in combination[last:])))

    return tuple(_joined_runs(pieces))


def _single_indices(parts: Iterable[_Stretch]) -> list[_Stretch]:
    """Repeat each stretch as often as it has indices."""
    repeated: list[_Stretch] = []
    for stretch in parts:
        repeated += [stretch] * stretch.size
    return repeated


def _cut_stretch(stretch: _Stretch, axis: int, count: int) -> Iterator[_Stretch]:
    low, step = 0, -(-stretch.size // count)
    for index in range(count):
        size = min(step, stretch.size - low)
        if size > 0:
            yield _Stretch(stretch.low + low, size, (*stretch.places, (axis, index)))
        low += max(size, 0)


def _joined_runs(pieces: Sequence[tuple[int, int]]) -> Iterator[Runs]:
    """Yield the fewest runs that describe the pieces: pairs (rank, number of elements)."""
    group: list[tuple[int, int]] = []
    for rank, numel in pieces:
        if group and not _continues(group, rank, numel):
            yield _run_of_group(group)
            group = []
        group.append((rank, numel))
    if group:
        yield _run_of_group(group)


def _continues(group: Sequence[tuple[int, int]], rank: int, numel: int) -> bool:
    """Check whether a piece continues the run of the pieces in `group`.

    A run has consecutive ranks. Its pieces have equal sizes, except for the first and the last.
    """
    last_rank, last_numel = group[-1]
    if rank != last_rank + 1:
        return False
    if len(group) == 1:
        return True
    chunk = group[1][1]
    return last_numel == chunk and numel <= chunk


def _run_of_group(group: Sequence[tuple[int, int]]) -> Runs:
    owner, lead = group[0]
    chunk = group[1][1] if len(group) > 1 else lead
    return Runs(owner, lead, chunk, sum(numel for _, numel in group))
