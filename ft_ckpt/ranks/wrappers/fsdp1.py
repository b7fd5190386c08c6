"""Reads the layouts of FSDP1, which puts several parameters into one flat parameter.

A flat parameter is cut into equal shards, one for each rank. The layouts are in the handles of
FullyShardedDataParallel. A `FlatParameter` here stands for one original parameter.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.ranks.sharding import (
    FlatSharding,
    ReplicatedSharding,
    Sharding,
    TensorKind,
    TensorLayout,
    global_rank,
    is_subset_of_ranks,
    ranks_in_order,
)
from ft_ckpt.ranks.wrappers.wrapper import Wrapper


@dataclass(frozen=True, eq=False)
class FlatParameter:
    """One original parameter inside a flat parameter of FSDP1.

    Attributes:
        handle: The handle of the flat parameter.
        shape: The shape of the original parameter.
        dtype: Its dtype.
        requires_grad: Whether it is trained.
        first: The index of its first element in the unsharded flat parameter.
        members: The ranks among which it is cut; None if every rank has all of it.
        original: The parameter that optimizers get; None if they get the flat parameter.
    """

    handle: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    first: int
    members: Sequence[int] | None
    original: Any = None

    layout = torch.strided

    @property
    def device(self) -> torch.device:
        return self.handle.flat_param.device  # type: ignore[no-any-return]  # as torch says

    def shard_buffer(self) -> Tensor:
        local: Tensor | None = getattr(self.handle.flat_param, "_local_shard", None)
        return self.handle.flat_param if local is None else local

    def sharding(self, shard: int | None = None) -> Sharding:
        """Return the sharding, in shards of `shard` elements.

        By default these are the shards of the flat parameter.
        """
        numel = math.prod(self.shape)
        if self.members is None:
            return ReplicatedSharding((numel,))
        size = self.shard_buffer().numel() if shard is None else shard
        return FlatSharding(
            numel, self.first, size, self.members, is_subset_of_ranks(len(self.members))
        )

    def local_run(self, buffer: Tensor) -> Tensor | None:
        """Return this rank's elements of the parameter in a `buffer`, or None if it has none.

        The buffer is a shard that is cut like the flat parameter, such as optimizer state.
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

    def wraps(self, module: nn.Module) -> bool:
        return type(module).__name__ == "FullyShardedDataParallel"  # importing the class is slow

    def hides_tensors(self, module: nn.Module) -> bool:
        return self.wraps(module)  # the parameters are in the flat parameter of the handle

    def tensors_of_modules(
        self, modules: Sequence[nn.Module]
    ) -> Mapping[tuple[int, str], FlatParameter]:
        parameters: dict[tuple[int, str], FlatParameter] = {}
        for module in modules:
            handle = getattr(module, "_handle", None) if self.wraps(module) else None
            if handle is not None:
                parameters.update(_parameters_of_handle(handle))
        return parameters

    def drop_gradients(self, module: nn.Module) -> None:
        flat = getattr(module, "_flat_param", None)
        if isinstance(flat, Tensor):
            flat.grad = None  # gradients of parameters are views of it


class FlatParameters(TensorKind):
    """Parameters inside the flat parameters of FSDP1."""

    shows_runs = True

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
        # The state of an original parameter has this rank's elements of it. The state of a flat
        # parameter has this rank's elements of all parameters.
        if state is None or tensor.original is not None:
            return tensor.sharding(), None if state is None else state.detach().view(-1)
        return tensor.sharding(state.numel()), tensor.local_run(state)


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
