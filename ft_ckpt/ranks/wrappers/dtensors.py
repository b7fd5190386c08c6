"""DTensors, which FSDP2 and other engines make.

Only a DTensor with a pending sum or a placement of an unknown kind is unsharded (`full_tensor`).
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ft_ckpt.ranks.sharding import (
    Mesh,
    MeshSharding,
    OpaqueSharding,
    Sharding,
    TensorKind,
    TensorLayout,
    is_subset_of_ranks,
    layout_like,
    shaped_as_box,
)


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
            return None  # from right to left in part
        parts = [mesh[axis] for axis in cutting]
        split_factors = [factors[axis] for axis in cutting]
        if dim is None or not _orders_agree(shape[dim], parts, split_factors):
            return None
    for dim in dims:
        if dim is not None and dim not in strided_dims and dims.count(dim) > 1:
            return None  # one dimension from right to left, another from left to right
    return MeshCutting(shape, dims, tuple(reversed(range(len(mesh)))))


def _is_right_to_left(
    axis: int, mesh: tuple[int, ...], dims: tuple[int | None, ...], factors: tuple[int, ...]
) -> bool:
    """Whether the split factor is the number of parts that later mesh dimensions cut."""
    later = [mesh[other] for other in range(axis + 1, len(mesh)) if dims[other] == dims[axis]]
    return bool(later) and factors[axis] == prod(later)


def _packed_cutting(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    dims: tuple[int | None, ...],
    factors: tuple[int, ...],
) -> MeshCutting | None:
    """The cutting of each of several tensors that are packed in one dimension."""
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
    """Whether cutting from right to left gives each rank the same part as from left to right."""
    if size % prod(parts) == 0:
        return True
    return _rows_by_placements(size, parts, factors) == _rows_from_right(size, parts)


def _rows_by_placements(
    size: int, parts: list[int], factors: list[int]
) -> dict[tuple[int, ...], list[int]]:
    """The rows of each rank, by its place in the mesh, as the split factors of placements say."""
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
    """The rows of each rank, by its place in the mesh, cut from right to left."""
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
    """The chunks of torch.chunk, with empty ones at the end."""
    step = -(-len(rows) // count)
    return [rows[index * step : (index + 1) * step] for index in range(count)]


class DTensors(TensorKind):
    """DTensors, and their subclasses by duck typing."""

    layout_facts = ("shape", "dtype", "requires_grad", "device_mesh", "placements")

    def describes(self, tensor: Any) -> bool:
        return (
            hasattr(tensor, "device_mesh")
            and hasattr(tensor, "placements")
            and hasattr(tensor, "full_tensor")
        )

    def layout_of(self, tensor: Any) -> TensorLayout:
        shape, mesh, placements = tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements)
        is_subset = is_subset_of_ranks(mesh.size())
        engine, sharding = _sharding_of_layout(shape, mesh, placements, is_subset)
        return layout_like(tensor, shape, engine, sharding)

    def local_part(self, tensor: Any) -> Tensor | None:
        with torch.no_grad():  # else autograd would record `to_local`
            local = tensor.to_local().detach()
        # the result of a collective may be pending
        ready: Tensor = local.wait() if hasattr(local, "wait") else local
        if all(map(_is_simple, tensor.placements)):
            return ready
        return shaped_as_box(ready, self.layout_of(tensor).sharding)

    def has_data(self, tensor: Any) -> bool:
        # The first branch is a fast path: this runs for all tensors of a model.
        if type(tensor) is DTensor:
            return not tensor._local_tensor.is_meta
        return super().has_data(tensor)

    def full_tensor(self, tensor: Any) -> Tensor:
        return tensor.detach().full_tensor()  # type: ignore[no-any-return]  # a Tensor


@lru_cache(maxsize=1024)  # a model has few shapes and many tensors
def _sharding_of_layout(
    shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], is_subset: bool
) -> tuple[str, Sharding]:
    """The engine's name and the sharding.

    `is_subset`: whether ranks outside of the mesh have replicas.
    """
    dims: list[int | None] = []
    for placement in placements:
        has_dim = hasattr(placement, "dim")
        dims.append(placement.dim % max(len(shape), 1) if has_dim else None)
    cuts_rows_only = {*dims} <= {0, None}
    engine = "fsdp2" if cuts_rows_only else "tensor parallel"
    is_replicated = is_subset
    for placement, size in zip(placements, mesh.shape, strict=True):
        if placement.is_replicate() and size > 1:
            is_replicated = True
    if not all(_is_simple(p) or type(p).__name__ == "_StridedShard" for p in placements):
        # A pending sum, or a placement of an unknown kind: torch gathers it, and nothing is read
        # into it.
        is_sum = any(placement.is_partial() for placement in placements)
        return engine, OpaqueSharding(shape, is_replicated and not is_sum)
    factors = tuple(getattr(placement, "split_factor", 1) for placement in placements)
    cutting = cutting_of(shape, tuple(mesh.shape), tuple(dims), factors)
    if cutting is None:
        why = (
            f"placements {placements} over {tuple(mesh.shape)} ranks do not tell which elements "
            "each has; let sizes divide by the ranks that cut them, or cut another dimension"
        )
        return engine, OpaqueSharding(shape, why=why)
    return engine, MeshSharding(
        cutting.view, _mesh_data(mesh), cutting.cuts, is_replicated, cutting.order
    )


def _is_simple(placement: Any) -> bool:
    return type(placement).__name__ in {"Shard", "Replicate"}


@lru_cache(maxsize=64)  # `mesh.mesh` makes a tensor at each call
def _mesh_data(mesh: Any) -> Mesh:
    return Mesh(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
