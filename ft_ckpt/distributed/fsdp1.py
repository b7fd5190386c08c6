"""FSDP1: parameters lie one after the other in flat parameters, each cut into equal shards.

Facts are taken from the handles that FullyShardedDataParallel keeps; nothing is unsharded for it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.distributed.flat_sharding import FlatSharding
from ft_ckpt.distributed.process_groups import global_rank, is_subset_of_ranks, ranks_in_order
from ft_ckpt.distributed.sharding import ReplicatedSharding, Sharding
from ft_ckpt.distributed.wrapper_protocol import TensorLayout, Wrapper


@dataclass(frozen=True, eq=False)
class FlatParameter:
    """One original parameter inside an FSDP1 flat parameter."""

    handle: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    first: int  # index of its first element in the unsharded flat parameter
    members: Sequence[int] | None  # the ranks that it is cut over; None where each has all of it
    original: Any = None  # the parameter that optimizers are given; None where that is the flat parameter itself

    layout = torch.strided

    @property
    def device(self) -> torch.device:
        """Where its elements are."""
        return self.handle.flat_param.device  # type: ignore[no-any-return]  # as torch says

    def shard_buffer(self) -> Tensor:
        """This rank's shard of the flat parameter."""
        local: Tensor | None = getattr(self.handle.flat_param, "_local_shard", None)
        return self.handle.flat_param if local is None else local

    def sharding(self, shard: int | None = None) -> Sharding:
        """Its runs in the ranks' shards of `shard` elements, by default those of the flat parameter itself."""
        numel = math.prod(self.shape)
        if self.members is None:
            return ReplicatedSharding((numel,))
        size = self.shard_buffer().numel() if shard is None else shard
        return FlatSharding(numel, self.first, size, self.members, is_subset_of_ranks(len(self.members)))

    def local_run(self, buffer: Tensor) -> Tensor | None:
        """This rank's elements in any `buffer` that is cut like the flat parameter, such as its optimizer state."""
        flat, sharding = buffer.detach().view(-1), self.sharding(buffer.numel())
        if not isinstance(sharding, FlatSharding):
            return flat[self.first : self.first + math.prod(self.shape)]
        span = sharding.range_in_shard(global_rank())
        return None if span is None else flat[slice(*span)]


class FSDP1Wrapper(Wrapper):
    """FullyShardedDataParallel around a module and, inside, around its layers."""

    child_key = "_fsdp_wrapped_module"
    packages = ("torch.distributed.",)
    hides_gradients = "FSDP1"
    shows_runs = True

    def wraps(self, module: nn.Module) -> bool:
        """Told by the name of the class, since importing it takes long."""
        return type(module).__name__ == "FullyShardedDataParallel"

    def hides_tensors(self, module: nn.Module) -> bool:
        """The module's parameters lie in its handle's flat parameter."""
        return self.wraps(module)

    def tensors_of_modules(self, modules: Sequence[nn.Module]) -> Mapping[tuple[int, str], FlatParameter]:
        """The places of the original parameters in the flat ones."""
        found: dict[tuple[int, str], FlatParameter] = {}
        for module in modules:
            handle = getattr(module, "_handle", None) if self.wraps(module) else None
            if handle is not None:
                found.update(_parameters_of_handle(handle))
        return found

    def describes(self, tensor: Any) -> bool:
        """Whether it is a place in a flat parameter."""
        return isinstance(tensor, FlatParameter)

    def layout_of(self, tensor: Any) -> TensorLayout:
        """The run of elements in each rank's shard."""
        return TensorLayout(tensor.shape, tensor.dtype, tensor.requires_grad, True, "fsdp1", tensor.sharding())

    def local_part(self, tensor: Any) -> Tensor | None:
        """This rank's run in its shard of the flat parameter."""
        return tensor.local_run(tensor.shard_buffer())  # type: ignore[no-any-return]  # as FlatParameter says

    def optimizer_parameter(self, tensor: Any) -> Any:
        """The original parameter, or with use_orig_params=False the whole flat one."""
        return tensor.handle.flat_param if tensor.original is None else tensor.original

    def state_run(self, tensor: Any, state: Tensor | None) -> tuple[Sharding, Tensor | None]:
        """State of an original parameter is this rank's run; that of a flat parameter has runs of all in it."""
        if state is None or tensor.original is not None:
            return tensor.sharding(), None if state is None else state.detach().view(-1)
        return tensor.sharding(state.numel()), tensor.local_run(state)

    def drop_gradients(self, module: nn.Module) -> None:
        """FSDP1 shows parts of the flat parameter's gradient as those of the parameters."""
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
    for info, shape, first, original in zip(flat._param_infos, flat._shapes, starts, originals, strict=True):
        wants = trainable[id(info.module)] if original is None else bool(original.requires_grad)
        one = FlatParameter(handle, tuple(shape), flat.dtype, wants, first, members, original)
        places[id(info.module), info.param_name] = one
    yield from places.items()
    for shared in flat._shared_param_infos:
        yield (id(shared.module), shared.param_name), places[id(shared.prim_module), shared.prim_param_name]
