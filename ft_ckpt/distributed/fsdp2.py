"""Torch's distributed tensors (FSDP2, HSDP, tensor parallelism): cut over a mesh of ranks as placements say."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ft_ckpt.distributed.mesh_cutting import cutting_of
from ft_ckpt.distributed.process_groups import is_subset_of_ranks
from ft_ckpt.distributed.sharding import Mesh, MeshSharding, OpaqueSharding, Sharding
from ft_ckpt.distributed.wrapper_protocol import PendingGradient, TensorLayout, Wrapper, shaped_as_box
from ft_ckpt.errors import listing
from ft_ckpt.messages import warn


class FSDP2Wrapper(Wrapper):
    """FSDP2 and whatever else makes torch's distributed tensors; it wraps no module, but gives modules new classes."""

    packages = ("torch.distributed.",)
    attribute_prefixes = ("_fsdp_", "_is_fsdp_", "__composable")
    layout_facts = ("shape", "dtype", "requires_grad", "device_mesh", "placements")

    def describes(self, tensor: Any) -> bool:
        """Whether it is a distributed tensor."""
        return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements") and hasattr(tensor, "full_tensor")

    def layout_of(self, tensor: Any) -> TensorLayout:
        """What mesh and placements say."""
        shape, mesh, placements = tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements)
        here, are_some = tuple(mesh.get_coordinate() or ()), is_subset_of_ranks(mesh.size())
        engine, sharding = _sharding_of_layout(shape, mesh, placements, here, are_some)
        is_parameter = isinstance(tensor, nn.Parameter)
        return TensorLayout(shape, tensor.dtype, bool(tensor.requires_grad), is_parameter, engine, sharding)

    def local_part(self, tensor: Any) -> Tensor | None:
        """This rank's part."""
        with torch.no_grad():  # or torch would make a step of autograd of it
            local = tensor.to_local().detach()
        ready: Tensor = local.wait() if hasattr(local, "wait") else local  # still on its way when a collective made it
        return self._as_box(tensor, ready)

    def _as_box(self, tensor: Any, local: Tensor) -> Tensor:
        """This rank's part in the shape of its box, where the layout's view splits a dimension of the tensor."""
        if all(map(_is_simple, tensor.placements)):
            return local
        return shaped_as_box(local, self.layout_of(tensor).sharding)

    def has_data(self, tensor: Any) -> bool:
        """As torch's own kind of them tells at once: all of a model are asked."""
        return tensor._local_tensor.device.type != "meta" if type(tensor) is DTensor else super().has_data(tensor)

    def full_tensor(self, tensor: Any) -> Tensor:
        """The full tensor, as torch's own gather puts it together."""
        return tensor.detach().full_tensor()  # type: ignore[no-any-return]  # a Tensor

    def reshard_modules(self, modules: Sequence[nn.Module]) -> None:
        """As FSDP2 does it for a state dict.

        Between a forward and what follows it, the outermost parameters are whole and in the compute dtype: copies,
        with less precision than the shards.
        """
        for module in _cut_modules(modules):
            module.reshard()
        _warn_of_copies(modules)

    def user_class(self, cls: type) -> type:
        """FSDP2 gives a module a class of its own that inherits from the user's."""
        return next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))

    def pending_gradients(self, modules: Sequence[nn.Module]) -> Mapping[str, PendingGradient]:
        """FSDP2's own records of the parameters that it cuts: they keep gradients that are not yet reduced."""
        records = {id(one.sharded_param): one for group in _parameter_groups(modules) for one in group.fsdp_params}
        if not records:
            return {}
        names = {id(parameter): name for name, parameter in modules[0].named_parameters()}
        return {names[key]: _UnreducedGradient(one) for key, one in records.items() if key in names}


def _cut_modules(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    """Those that FSDP2 has given classes of its own, which are few."""
    kinds = {kind for kind in {*map(type, modules)} if issubclass(kind, FSDPModule)}
    return [one for one in modules if type(one) in kinds] if kinds else []


def _parameter_groups(modules: Sequence[nn.Module]) -> list[Any]:
    """FSDP2's records of the parameters that it gathers together."""
    states: list[Any] = [one._get_fsdp_state() for one in _cut_modules(modules)]
    groups = [getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states]
    return [group for some in groups for group in some if group]


def _warn_of_copies(modules: Sequence[nn.Module]) -> None:
    """Warn of tied parameters that FSDP2 computes with in two copies, of which the optimizer knows one.

    Where shards are padded, as rows are that do not divide by the ranks, torch makes a copy for each of the two modules
    that it has cut one by one. The other copy is trained by nobody and is in no state dict.
    """
    records = [one for group in _parameter_groups(modules) if _is_in_use(group) for one in group.fsdp_params]
    several = {key for key, count in Counter(id(one.sharded_param) for one in records).items() if count > 1}
    apart = {id(one.sharded_param) for one in records if id(one.sharded_param) in several and not _is_current(one)}
    if apart:
        named = modules[0].named_parameters(remove_duplicate=False)
        names = [name for name, parameter in named if id(parameter) in apart]
        warn(
            f"{listing(names, ', ')}: tied, but FSDP2 computes with another copy that is not trained and not saved; "
            "let the rows divide by the ranks (resize_token_embeddings(pad_to_multiple_of=...)), or untie them",
            stacklevel=2,
        )


def _is_in_use(group: Any) -> bool:
    """Whether a forward was run: before it, copies are still to be refreshed."""
    return bool(getattr(group, "_reset_sharded_params", False))


def _is_current(record: Any) -> bool:
    """Whether what FSDP2 gathers has the values of the parameter."""
    gathered, local = record._sharded_param_data, record.sharded_param._local_tensor
    return gathered.data_ptr() == local.data_ptr() or torch.equal(gathered[: local.numel()], local.reshape(-1))


@dataclass(frozen=True)
class _UnreducedGradient:
    """The gradient of a whole parameter that FSDP2 has not yet brought together from all ranks."""

    record: Any  # FSDP2's of the parameter

    def read(self) -> Tensor | None:
        """The sum of earlier backward passes, or the gradient of the one just done."""
        pending: Tensor | None = getattr(self.record, "unsharded_accumulated_grad", None)
        whole = getattr(self.record, "_unsharded_param", None)
        return whole.grad if pending is None and whole is not None else pending

    def write(self, gradient: Tensor | None) -> None:
        """As the sum of earlier passes."""
        self.record.unsharded_accumulated_grad = gradient
        if getattr(self.record, "_unsharded_param", None) is not None:
            self.record._unsharded_param.grad = None


@lru_cache(maxsize=1024)  # torch counts out every index of a cut dimension; a model has few shapes and many tensors
def _sharding_of_layout(
    shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], here: tuple[int, ...], are_some: bool
) -> tuple[str, Sharding]:
    """`here` is this rank's place in the mesh, which torch asks the mesh for; `are_some`: others hold it again."""
    dims = tuple(p.dim % max(len(shape), 1) if hasattr(p, "dim") else None for p in placements)
    engine = "fsdp2" if {dim for dim in dims if dim is not None} <= {0} else "tensor parallel"
    again = any(p.is_replicate() and count > 1 for p, count in zip(placements, mesh.shape, strict=True))
    is_replicated = again or are_some
    if not all(_is_simple(p) or type(p).__name__ == "_StridedShard" for p in placements):
        # A pending sum, or a kind that is not known: torch's own gather puts it together, and nothing is read into it.
        return engine, OpaqueSharding(shape, None, is_replicated and not any(p.is_partial() for p in placements))
    factors = tuple(getattr(p, "split_factor", 1) for p in placements)
    cutting = cutting_of(shape, tuple(mesh.shape), dims, factors)
    if cutting is None:
        return engine, OpaqueSharding(shape, None, why=_unclear_cut(placements, mesh))
    return engine, MeshSharding(cutting.view, _mesh_data(mesh), cutting.cuts, is_replicated, cutting.order)


def _unclear_cut(placements: tuple[Any, ...], mesh: Any) -> str:
    return (
        f"placements {placements} over {tuple(mesh.shape)} ranks do not tell which elements each has; let sizes divide "
        "by the ranks that cut them, or cut another dimension"
    )


def _is_simple(placement: Any) -> bool:
    return type(placement).__name__ in {"Shard", "Replicate"}


@lru_cache(maxsize=64)  # one entry for each mesh of a model, however many tensors; `mesh.mesh` makes a tensor each time
def _mesh_data(mesh: Any) -> Mesh:
    return Mesh(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
