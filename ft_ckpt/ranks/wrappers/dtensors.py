"""Reads the layouts of DTensors, which FSDP2 and tensor parallelism make.

A DTensor is gathered by `full_tensor` only if it has a pending sum, or a placement of an unknown
kind. All other DTensors are read as the elements of each rank.
"""

from functools import lru_cache
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
from ft_ckpt.ranks.wrappers.strided_shards import cutting_of


class DTensors(TensorKind):
    """DTensors, and tensors with the same attributes."""

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
        with torch.no_grad():  # so that autograd does not record `to_local`
            local = tensor.to_local().detach()
        # the result of a collective may be pending
        ready: Tensor = local.wait() if hasattr(local, "wait") else local
        if all(map(_is_simple, tensor.placements)):
            return ready
        return shaped_as_box(ready, self.layout_of(tensor).sharding)

    def has_data(self, tensor: Any) -> bool:
        # A fast path for most tensors, because this runs for all tensors of a model.
        if type(tensor) is DTensor:
            return not tensor._local_tensor.is_meta
        return super().has_data(tensor)

    def full_tensor(self, tensor: Any) -> Tensor:
        return tensor.detach().full_tensor()  # type: ignore[no-any-return]  # a Tensor


@lru_cache(maxsize=1024)  # a model has few shapes and many tensors
def _sharding_of_layout(
    shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], is_subset: bool
) -> tuple[str, Sharding]:
    """Return the engine's name and the sharding.

    `is_subset` says whether ranks outside the mesh have replicas.
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
        # A pending sum, or a placement of an unknown kind: torch gathers the tensor, and nothing
        # can be read into it.
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
