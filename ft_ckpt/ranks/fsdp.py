"""FSDP1 (flat parameters, cut into equal shards) and FSDP2 (DTensor).

Layouts are read from the handles of FullyShardedDataParallel and from DTensors. Only a DTensor with
a pending sum or a placement of an unknown kind is unsharded (`full_tensor`).
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ft_ckpt.errors import listing
from ft_ckpt.messages import warn
from ft_ckpt.ranks.ranks import global_rank, is_subset_of_ranks, ranks_in_order
from ft_ckpt.ranks.sharding import (
    FlatSharding,
    Mesh,
    MeshSharding,
    OpaqueSharding,
    ReplicatedSharding,
    Sharding,
    cutting_of,
)
from ft_ckpt.ranks.wrapper import TensorLayout, Wrapper, layout_like, shaped_as_box


@dataclass(frozen=True, eq=False)
class FlatParameter:
    """One original parameter inside an FSDP1 flat parameter."""

    handle: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    first: int  # index of its first element in the unsharded flat parameter
    members: Sequence[int] | None  # the ranks that it is cut over; None if each holds all of it
    # the parameter that optimizers get; None if that is the flat parameter itself
    original: Any = None

    layout = torch.strided

    @property
    def device(self) -> torch.device:
        return self.handle.flat_param.device  # type: ignore[no-any-return]  # as torch says

    def shard_buffer(self) -> Tensor:
        local: Tensor | None = getattr(self.handle.flat_param, "_local_shard", None)
        return self.handle.flat_param if local is None else local

    def sharding(self, shard: int | None = None) -> Sharding:
        """Its layout in shards of `shard` elements, by default those of the flat parameter."""
        numel = math.prod(self.shape)
        if self.members is None:
            return ReplicatedSharding((numel,))
        size = self.shard_buffer().numel() if shard is None else shard
        return FlatSharding(
            numel, self.first, size, self.members, is_subset_of_ranks(len(self.members))
        )

    def local_run(self, buffer: Tensor) -> Tensor | None:
        """This rank's elements in any `buffer` that is cut like the flat parameter, such as its
        optimizer state.
        """
        flat, sharding = buffer.detach().view(-1), self.sharding(buffer.numel())
        if not isinstance(sharding, FlatSharding):
            return flat[self.first : self.first + math.prod(self.shape)]
        span = sharding.range_in_shard(global_rank())
        return None if span is None else flat[slice(*span)]


class FSDP1Wrapper(Wrapper):
    """FullyShardedDataParallel around a module and around its layers."""

    child_key = "_fsdp_wrapped_module"
    packages = ("torch.distributed.",)
    hides_gradients = "FSDP1"
    shows_runs = True

    def wraps(self, module: nn.Module) -> bool:
        return type(module).__name__ == "FullyShardedDataParallel"  # importing the class is slow

    def hides_tensors(self, module: nn.Module) -> bool:
        return self.wraps(module)  # its parameters are in its handle's flat parameter

    def tensors_of_modules(
        self, modules: Sequence[nn.Module]
    ) -> Mapping[tuple[int, str], FlatParameter]:
        found: dict[tuple[int, str], FlatParameter] = {}
        for module in modules:
            handle = getattr(module, "_handle", None) if self.wraps(module) else None
            if handle is not None:
                found.update(_parameters_of_handle(handle))
        return found

    def describes(self, tensor: Any) -> bool:
        return isinstance(tensor, FlatParameter)

    def layout_of(self, tensor: Any) -> TensorLayout:
        return TensorLayout(
            tensor.shape, tensor.dtype, tensor.requires_grad, True, "fsdp1", tensor.sharding()
        )

    def local_part(self, tensor: Any) -> Tensor | None:
        return tensor.local_run(tensor.shard_buffer())  # type: ignore[no-any-return]  # as FlatParameter says

    def optimizer_parameter(self, tensor: Any) -> Any:
        return tensor.handle.flat_param if tensor.original is None else tensor.original

    def state_run(self, tensor: Any, state: Tensor | None) -> tuple[Sharding, Tensor | None]:
        # State of an original parameter is this rank's run; state of a flat parameter has the runs
        # of all parameters.
        if state is None or tensor.original is not None:
            return tensor.sharding(), None if state is None else state.detach().view(-1)
        return tensor.sharding(state.numel()), tensor.local_run(state)

    def drop_gradients(self, module: nn.Module) -> None:
        # gradients of parameters are views of it
        if isinstance(flat := getattr(module, "_flat_param", None), Tensor):
            flat.grad = None


def _parameters_of_handle(handle: Any) -> Iterator[tuple[tuple[int, str], FlatParameter]]:
    flat = handle.flat_param
    originals = flat._params or [None] * len(flat._param_infos)  # None with use_orig_params=False
    trainable = {id(info.module): flat.requires_grad for info in flat._param_infos}
    starts, position = [], 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            starts.append(position)
        position += numel
    members = ranks_in_order(handle.process_group) if handle.uses_sharded_strategy else None
    places = {}
    for info, shape, first, original in zip(
        flat._param_infos, flat._shapes, starts, originals, strict=True
    ):
        wants = trainable[id(info.module)] if original is None else bool(original.requires_grad)
        parameter = FlatParameter(handle, tuple(shape), flat.dtype, wants, first, members, original)
        places[id(info.module), info.param_name] = parameter
    yield from places.items()
    for shared in flat._shared_param_infos:
        yield (
            (id(shared.module), shared.param_name),
            places[id(shared.prim_module), shared.prim_param_name],
        )


class FSDP2Wrapper(Wrapper):
    """FSDP2 and all other engines that make DTensors.

    FSDP2 wraps no module, but replaces the classes of modules.
    """

    packages = ("torch.distributed.",)
    attribute_prefixes = ("_fsdp_", "_is_fsdp_", "__composable")
    layout_facts = ("shape", "dtype", "requires_grad", "device_mesh", "placements")

    def describes(self, tensor: Any) -> bool:
        return (
            hasattr(tensor, "device_mesh")
            and hasattr(tensor, "placements")
            and hasattr(tensor, "full_tensor")
        )

    def layout_of(self, tensor: Any) -> TensorLayout:
        shape, mesh, placements = tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements)
        engine, sharding = _sharding_of_layout(
            shape, mesh, placements, is_subset_of_ranks(mesh.size())
        )
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
        return (
            tensor._local_tensor.device.type != "meta"
            if type(tensor) is DTensor
            else super().has_data(tensor)
        )

    def full_tensor(self, tensor: Any) -> Tensor:
        return tensor.detach().full_tensor()  # type: ignore[no-any-return]  # a Tensor

    def reshard_modules(self, modules: Sequence[nn.Module]) -> None:
        # After a forward, the outermost parameters stay gathered: copies in the compute dtype,
        # which is less precise.
        for module in _fsdp_modules(modules):
            module.reshard()
        _warn_of_copies(modules)

    def user_class(self, cls: type) -> type:
        return next(base for base in cls.__mro__ if not issubclass(base, FSDPModule))

    def pending_gradients(self, modules: Sequence[nn.Module]) -> Mapping[str, "PendingGradient"]:
        records = {
            id(each.sharded_param): each
            for group in _parameter_groups(modules)
            for each in group.fsdp_params
        }
        if not records:
            return {}
        names = {id(parameter): name for name, parameter in modules[0].named_parameters()}
        return {
            names[key]: PendingGradient(record) for key, record in records.items() if key in names
        }


def _fsdp_modules(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]


def _parameter_groups(modules: Sequence[nn.Module]) -> list[Any]:
    """FSDP2's records of parameters that are gathered together."""
    states: list[Any] = [module._get_fsdp_state() for module in _fsdp_modules(modules)]
    groups = [
        getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group] for state in states
    ]
    return [group for of_state in groups for group in of_state if group]


def _warn_of_copies(modules: Sequence[nn.Module]) -> None:
    """Warn of tied parameters of which FSDP2 computes with two copies, although the optimizer has
    only one.

    If shards are padded, because the number of ranks does not divide the rows, torch copies a tied
    parameter for each module that it shards. The second copy is not trained and is in no state
    dict.
    """
    # Before the first forward, FSDP2 has yet to refresh its copies.
    groups = [
        group
        for group in _parameter_groups(modules)
        if getattr(group, "_reset_sharded_params", False)
    ]
    records = [record for group in groups for record in group.fsdp_params]
    tied = {
        key
        for key, count in Counter(id(record.sharded_param) for record in records).items()
        if count > 1
    }
    stale = {
        id(each.sharded_param)
        for each in records
        if id(each.sharded_param) in tied and not _is_current(each)
    }
    if stale:
        named = modules[0].named_parameters(remove_duplicate=False)
        names = [name for name, parameter in named if id(parameter) in stale]
        warn(
            f"{listing(names, ', ')}: tied, but FSDP2 computes with another copy that is not "
            "trained and not saved; let the rows divide by the ranks "
            "(resize_token_embeddings(pad_to_multiple_of=...)), or untie them",
            stacklevel=2,
        )


def _is_current(record: Any) -> bool:
    """Whether FSDP2's copy of the shard has the values of the parameter."""
    gathered, local = record._sharded_param_data, record.sharded_param._local_tensor
    return gathered.data_ptr() == local.data_ptr() or torch.equal(
        gathered[: local.numel()], local.reshape(-1)
    )


@dataclass(frozen=True)
class PendingGradient:
    """The gradient of a whole parameter that FSDP2 has not yet reduced over the ranks."""

    record: Any  # FSDP2's, of the parameter

    def read(self) -> Tensor | None:
        # the sum of earlier backward passes, or the gradient of the last one
        pending: Tensor | None = getattr(self.record, "unsharded_accumulated_grad", None)
        whole = getattr(self.record, "_unsharded_param", None)
        return whole.grad if pending is None and whole is not None else pending

    def write(self, gradient: Tensor | None) -> None:
        self.record.unsharded_accumulated_grad = gradient
        if getattr(self.record, "_unsharded_param", None) is not None:
            self.record._unsharded_param.grad = None


@lru_cache(maxsize=1024)  # a model has few shapes and many tensors
def _sharding_of_layout(
    shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], are_some: bool
) -> tuple[str, Sharding]:
    """The engine's name and the sharding.

    `are_some`: whether ranks outside of the mesh have replicas.
    """
    dims = tuple(p.dim % max(len(shape), 1) if hasattr(p, "dim") else None for p in placements)
    engine = "fsdp2" if {dim for dim in dims if dim is not None} <= {0} else "tensor parallel"
    has_replicas = any(
        p.is_replicate() and count > 1 for p, count in zip(placements, mesh.shape, strict=True)
    )
    is_replicated = has_replicas or are_some
    if not all(_is_simple(p) or type(p).__name__ == "_StridedShard" for p in placements):
        # A pending sum, or a placement of an unknown kind: torch gathers it, and nothing is read
        # into it.
        return engine, OpaqueSharding(
            shape, is_replicated and not any(p.is_partial() for p in placements)
        )
    factors = tuple(getattr(p, "split_factor", 1) for p in placements)
    cutting = cutting_of(shape, tuple(mesh.shape), dims, factors)
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
