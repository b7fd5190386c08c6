"""Torch's distributed tensors (FSDP2, HSDP, tensor parallelism): cut over a mesh of ranks as placements say."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.distributed.process_groups import is_subset_of_ranks
from ft_ckpt.distributed.sharding import Box, Mesh, MeshSharding, OpaqueSharding, Sharding


def is_dtensor(tensor: Any) -> bool:
    """Whether torch's distributed tensors describe it (FSDP2, tensor parallelism)."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements") and hasattr(tensor, "full_tensor")


def dtensor_local(tensor: Any) -> Tensor:
    """This rank's part of a distributed tensor."""
    with torch.no_grad():  # or torch would make a step of autograd of it
        local: Any = tensor.to_local().detach()
    return local.wait() if hasattr(local, "wait") else local  # type: ignore[no-any-return]  # on its way, of a collective


def dtensor_full(tensor: Any) -> Tensor:
    """The full tensor, as torch's own gather puts it together. Collective."""
    return tensor.detach().full_tensor()  # type: ignore[no-any-return]  # a Tensor


def dtensor_sharding(tensor: Any) -> tuple[str, Sharding]:
    """The engine's name and the sharding of a distributed tensor."""
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    here, are_some = tuple(mesh.get_coordinate() or ()), is_subset_of_ranks(mesh.size())
    return _sharding_of_layout(tuple(tensor.shape), mesh, placements, here, are_some)


@lru_cache(maxsize=1024)  # torch counts out every index of a cut dimension; a model has few shapes and many tensors
def _sharding_of_layout(
    shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], here: tuple[int, ...], are_some: bool
) -> tuple[str, Sharding]:
    """`here` is this rank's place in the mesh, which torch asks the mesh for; `are_some`: others hold it again."""
    sharded = [p.dim % max(len(shape), 1) for p in placements if p.is_shard()]
    engine = "fsdp2" if sharded in ([], [0]) else "tensor parallel"
    again = any(p.is_replicate() and count > 1 for p, count in zip(placements, mesh.shape, strict=True))
    is_replicated = (again or are_some) and not any(p.is_partial() for p in placements)
    is_plain = all(type(p).__name__ in {"Shard", "Replicate"} for p in placements)
    if not is_plain or len(set(sharded)) != len(sharded):
        # A dimension cut twice, a strided shard or a pending sum: torch's own gather puts it together.
        return engine, OpaqueSharding(shape, _box_here(shape, mesh, placements), is_replicated)
    cuts = tuple(p.dim % len(shape) if p.is_shard() else None for p in placements)
    return engine, MeshSharding(shape, _mesh_data(mesh), cuts, is_replicated)


def _box_here(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> Box | None:
    """This rank's part of a distributed tensor, for any layout torch knows; None when it is empty."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Box(tuple(offsets), tuple(sizes)) if all(sizes) and offsets is not None else None


@lru_cache(maxsize=64)  # one entry for each mesh of a model, however many tensors; `mesh.mesh` makes a tensor each time
def _mesh_data(mesh: Any) -> Mesh:
    return Mesh(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
