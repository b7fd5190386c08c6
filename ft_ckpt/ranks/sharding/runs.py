"""Runs: a tensor as a few consecutive pieces, each of another rank."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

MAX_RUNS = 64  # per tensor; a tensor with more is gathered before it is written


@dataclass(frozen=True)
class Runs:
    """Consecutive elements of a tensor in pieces of consecutive ranks.

    The first piece belongs to the rank `owner`, the next one to `owner` + 1, and so on.
    """

    owner: int
    lead: int  # elements of the first piece
    chunk: int  # elements of each piece except the first and the last
    numel: int  # elements of all pieces


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
    """Return the runs of a tensor of the shape `view`, which is not empty.

    `cuts` are pairs (dimension of the view, dimension of the grid), which cut in this order as
    torch.chunk does. `ranks` fill the grid, its last dimension fastest. Of replicas, the first rank
    is in the runs. Return () if there would be more than MAX_RUNS.
    """
    stretches = [[_Stretch(0, size)] for size in view]
    for dim, axis in cuts:
        if len(stretches[dim]) * grid[axis] > MAX_RUNS:
            return ()
        parts: list[_Stretch] = []
        for stretch in stretches[dim]:
            parts += _cut_stretch(stretch, axis, grid[axis])
        stretches[dim] = parts
    # Every index of a dimension before the last cut one begins new pieces.
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
    """Yield the fewest runs that describe the pairs (rank, elements).

    A run has consecutive ranks, and equal sizes between its first and last piece.
    """
    group: list[tuple[int, int]] = []
    for rank, numel in pieces:
        if group and not _continues(group, rank, numel):
            yield _run_of_group(group)
            group = []
        group.append((rank, numel))
    if group:
        yield _run_of_group(group)


def _continues(group: Sequence[tuple[int, int]], rank: int, numel: int) -> bool:
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
