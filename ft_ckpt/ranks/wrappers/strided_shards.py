"""Computes how a tensor is cut whose DTensor placements are strided shards (`_StridedShard`).

Placements say how each dimension of a mesh cuts the tensor. torch applies them from left to right.
A `_StridedShard` with a split factor f first splits its dimension into f groups, and then cuts each
group. torch has it for two uses, which its split factor tells apart:

- Cutting from right to left. FSDP2 cuts what tensor parallelism has already cut, but comes first in
  the mesh. On a mesh of 2 (FSDP) x 2 (tensor parallel) ranks, 8 rows have the placements
  (_StridedShard(0, split_factor=2), Shard(0)). Tensor parallelism has cut the rows into 0-3 and
  4-7, then FSDP2 has cut each of these in two: rank (0, 0) has rows 0-1, (1, 0) has 2-3, (0, 1)
  has 4-5 and (1, 1) has 6-7.
- Packed tensors. On a mesh of 2 ranks, 8 rows that pack two tensors of 4 rows have the placement
  (_StridedShard(0, split_factor=2),): rank 0 has rows 0-1 and 4-5, rank 1 rows 2-3 and 6-7.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod


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
    """Return the cuts of a tensor with the given `shape` over a grid `mesh`.

    `dims` has for each dimension of the mesh the tensor's dimension that it cuts, or None;
    `factors` has its split factor, 1 for a plain `Shard`. Return None if the placements do not tell
    which elements a rank has: a split factor that means neither of the two uses above, or a size
    for which cutting from right to left and the placements give different parts.
    """
    factors = tuple(1 if dim is None else factor for dim, factor in zip(dims, factors, strict=True))
    strided = [axis for axis, factor in enumerate(factors) if factor > 1]
    packed = [axis for axis in strided if not _is_right_to_left(axis, mesh, dims, factors)]
    if packed and len(strided) > 1:
        return None
    if packed:
        return _packed_cutting(shape, mesh, dims, factors)
    if not strided:
        return MeshCutting(shape, dims, ())
    strided_dims = {dims[axis] for axis in strided}
    for dim in strided_dims:
        cutting = [axis for axis, cut in enumerate(dims) if cut == dim and mesh[axis] > 1]
        if any(axis not in strided for axis in cutting[:-1]):
            return None  # some dimensions of the mesh cut from right to left, others do not
        parts = [mesh[axis] for axis in cutting]
        split_factors = [factors[axis] for axis in cutting]
        if dim is None or not _orders_agree(shape[dim], parts, split_factors):
            return None

    for dim in dims:
        if dim is not None and dim not in strided_dims and dims.count(dim) > 1:
            return None  # one dimension is cut from right to left, another from left to right

    return MeshCutting(shape, dims, tuple(reversed(range(len(mesh)))))


def _is_right_to_left(
    axis: int, mesh: tuple[int, ...], dims: tuple[int | None, ...], factors: tuple[int, ...]
) -> bool:
    """Check whether the split factor is the number of parts that later mesh dimensions cut.

    In the example of 2 x 2 ranks above, dimension 0 of the mesh has the factor 2, and dimension 1
    cuts 2 parts.
    """
    later = [mesh[other] for other in range(axis + 1, len(mesh)) if dims[other] == dims[axis]]
    return bool(later) and factors[axis] == prod(later)


def _packed_cutting(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    dims: tuple[int | None, ...],
    factors: tuple[int, ...],
) -> MeshCutting | None:
    """Return the cutting of each of several tensors that are packed in one dimension.

    For 8 rows of 3 columns with the factor 2 on 2 ranks, as above, the view is (2, 4, 3), and the
    mesh cuts its dimension 1.
    """
    axis = next(axis for axis, factor in enumerate(factors) if factor > 1)
    dim, parts = dims[axis], factors[axis]
    if dim is None or dims.count(dim) > 1 or shape[dim] % parts:
        return None
    view = (*shape[:dim], parts, shape[dim] // parts, *shape[dim + 1 :])
    cuts: list[int | None] = []
    for cut in dims:
        if cut is not None and cut >= dim:
            cuts.append(cut + 1)
        else:
            cuts.append(cut)
    return MeshCutting(view, tuple(cuts), ())


def _orders_agree(size: int, parts: list[int], factors: list[int]) -> bool:
    """Check whether cutting from right to left gives each rank the part of its placements.

    `parts` and `factors` are those of the mesh dimensions that cut a dimension of `size`. With the
    2 x 2 ranks above (parts [2, 2], factors [2, 1]) they agree for every size: of 5 rows, rank
    (0, 0) has rows 0-1, (1, 0) row 2, (0, 1) row 3, (1, 1) row 4. With 3 x 2 ranks (parts [3, 2])
    and 7 rows they do not: cutting from right to left gives row 6 to rank (2, 1), the placements
    give it to rank (2, 0).
    """
    if size % prod(parts) == 0:
        return True
    return _rows_by_placements(size, parts, factors) == _rows_from_right(size, parts)


def _rows_by_placements(
    size: int, parts: list[int], factors: list[int]
) -> dict[tuple[int, ...], list[int]]:
    """Return the rows of each rank by its place in the mesh, as the placements cut them."""
    rows_of_ranks: dict[tuple[int, ...], list[int]] = {(): list(range(size))}
    for count, factor in zip(parts, factors, strict=True):
        cut_further: dict[tuple[int, ...], list[int]] = {}
        for place, rows in rows_of_ranks.items():
            for index in range(count):
                part: list[int] = []
                for group in _chunked(rows, factor):
                    part += _chunked(group, count)[index]
                rank_place = (*place, index)
                cut_further[rank_place] = part
        rows_of_ranks = cut_further
    return rows_of_ranks


def _rows_from_right(size: int, parts: list[int]) -> dict[tuple[int, ...], list[int]]:
    """Return the rows of each rank by its place in the mesh, cut from right to left."""
    rows_of_ranks: dict[tuple[int, ...], list[int]] = {(): list(range(size))}
    for count in reversed(parts):
        cut_further: dict[tuple[int, ...], list[int]] = {}
        for place, rows in rows_of_ranks.items():
            for index, chunk in enumerate(_chunked(rows, count)):
                rank_place = (index, *place)
                cut_further[rank_place] = chunk
        rows_of_ranks = cut_further
    return rows_of_ranks


def _chunked(rows: list[int], count: int) -> list[list[int]]:
    """Cut `rows` as torch.chunk does, with empty chunks at the end."""
    step = -(-len(rows) // count)
    return [rows[index * step : (index + 1) * step] for index in range(count)]
