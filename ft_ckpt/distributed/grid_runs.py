"""Tensors cut over a grid of ranks as runs of consecutive elements: pure arithmetic, with no look at any rank's box."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod

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
