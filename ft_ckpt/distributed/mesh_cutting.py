"""How placements over a mesh cut a tensor, in the order in which the cuts were made: pure arithmetic.

Torch writes two layouts as strided shards. FSDP2 over tensor parallelism on one dimension is cut from right to left:
the stride is the number of parts that were there before. Packed weights (gate and up projections in one tensor) are
cut in each of their parts alike: the stride is the number of these parts.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod


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
