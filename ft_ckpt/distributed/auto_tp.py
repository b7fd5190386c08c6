"""Parameters that engines have cut without saying so to torch: ordinary tensors, of which each rank has other elements.

DeepSpeed's AutoTP and Megatron mark them with an attribute that they agree on; taken for replicas, rank 0's part would
be stored as the whole. AutoTP also describes each of them for its universal checkpoints: the shape before, the
dimension that is cut, the sizes of the parts. What this proves becomes the cutting of a mesh; all else is refused by
name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ft_ckpt.distributed.process_groups import global_rank, group_members, is_subset_of_ranks
from ft_ckpt.distributed.sharding import Mesh, MeshSharding, OpaqueSharding, Sharding
from ft_ckpt.distributed.wrapper_protocol import TensorLayout, Wrapper, shaped_as_box

_MARK, _FACTS = "tensor_model_parallel", "ds_autotp_universal_checkpoint_meta"
_WAY_OUT = "save with the engine's own means, or cut the model with transformers' DistributedConfig(tp_size=...)"


class AutoTPTensors(Wrapper):
    """Ordinary tensors with the mark or the description, where there are several ranks."""

    shows_runs = True

    def describes(self, tensor: Any) -> bool:
        """Whether it is marked or described as cut, over more than one rank."""
        facts = getattr(tensor, _FACTS, None)
        if getattr(tensor, _MARK, False) is not True and (facts is None or facts.get("replicated")):
            return False
        return (
            dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and _part_holders(tensor) != ()
        )

    def layout_of(self, tensor: Any) -> TensorLayout:
        """What its description proves; one that is refused wherever it is met where it proves nothing."""
        sharding = _sharding_of(tensor)
        facts = getattr(tensor, _FACTS, None) or {}
        shape = tuple(tensor.shape) if sharding.is_opaque else tuple(facts["original_shape"])
        is_parameter = isinstance(tensor, nn.Parameter)
        return TensorLayout(shape, tensor.dtype, bool(tensor.requires_grad), is_parameter, "tensor parallel", sharding)

    def local_part(self, tensor: Any) -> Tensor | None:
        """This rank's part, in the shape of its box."""
        return shaped_as_box(tensor.detach(), _sharding_of(tensor))

    def state_run(self, tensor: Any, state: Tensor | None) -> tuple[Sharding, Tensor | None]:
        """The same cutting."""
        sharding = _sharding_of(tensor)
        return sharding, None if state is None else shaped_as_box(state.detach(), sharding)


@dataclass(frozen=True)
class _DescribedCut:
    """One dimension of a view, cut into parts of given sizes."""

    view: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]
    packed: int  # equal tensors in one, each of them cut

    def part_shape(self, index: int, dims: int) -> tuple[int, ...]:
        """The shape of the `index`-th part as the engine keeps it, in so many dimensions."""
        first = self.dim - (self.packed > 1)
        shape = (*self.view[:first], self.packed * self.sizes[index], *self.view[self.dim + 1 :])
        return shape if len(shape) == dims else (prod(shape[: len(shape) - dims + 1]), *shape[len(shape) - dims + 1 :])


def _part_holders(tensor: Any) -> tuple[int, ...] | None:
    """The global ranks that have the parts, in their order; () where one has all of it, None where nothing tells."""
    layer = getattr(getattr(tensor, "gather_params", None), "__self__", None)
    if layer is None or not hasattr(layer, "mp_group"):
        return None
    members = () if layer.mp_group is None else group_members(layer.mp_group)
    return members if len(members) > 1 else ()


def _sharding_of(tensor: Any) -> Sharding:
    shape, facts, members = tuple(tensor.shape), getattr(tensor, _FACTS, None), _part_holders(tensor)
    is_told = members is not None and not hasattr(tensor, "ds_shape")
    found = _cut_described(facts) if facts and is_told else _why_unknown(tensor, facts)
    if isinstance(found, _DescribedCut):
        place = members.index(global_rank()) if members and global_rank() in members else None
        fits = members is not None and place is not None and len(found.sizes) == len(members)
        if fits and place is not None and found.part_shape(place, len(shape)) == shape:
            return _mesh_sharding(found, members or (), is_subset_of_ranks(len(members or ())))
        found = f"it is {list(shape)} on this rank, described as {found.packed} x {list(found.sizes)} of {found.view}"
    return OpaqueSharding(shape, None, why=f"this rank's part of a larger parameter: {found}; {_WAY_OUT}")


def _why_unknown(tensor: Any, facts: Any) -> str:
    if facts is None:
        return f"marked {_MARK} by Megatron or an engine like it, which says no more"
    if hasattr(tensor, "ds_shape"):
        return "cut by DeepSpeed's AutoTP, and again by ZeRO stage 3"
    return "cut by DeepSpeed's AutoTP, which does not say over which ranks"


def _cut_described(facts: Mapping[str, Any]) -> _DescribedCut | str:
    """The cut that AutoTP describes, or why it is none."""
    told = facts.get("conversion") or {}
    view, dim, widths = facts.get("logical_shape"), facts.get("partition_dim"), facts.get("sub_param_shard_widths")
    sizes = widths[0] if widths else facts.get("partition_sizes")
    if told.get("unsupported_reason") or view is None or dim is None or not sizes:
        return f"DeepSpeed's AutoTP does not say how: {told.get('unsupported_reason') or 'no sizes of parts'}"
    if widths and any(list(one) != list(sizes) for one in widths):
        return f"tensors of other sizes in one, parts of {[list(one) for one in widths]}"
    packed = len(widths) if widths else 1
    whole = packed * sum(sizes)
    if whole != view[dim] or prod(view) != prod(facts.get("original_shape") or ()):
        return f"{packed} x {list(sizes)} along dimension {dim} are not all of {list(view)}"
    if packed == 1:
        return _DescribedCut(tuple(view), dim, tuple(sizes), 1)
    return _DescribedCut((*view[:dim], packed, sum(sizes), *view[dim + 1 :]), dim + 1, tuple(sizes), packed)


@lru_cache(maxsize=1024)  # a model has few shapes and many tensors
def _mesh_sharding(cut: _DescribedCut, members: tuple[int, ...], are_some: bool) -> MeshSharding:
    size, count = cut.view[cut.dim], len(members)
    step = -(-size // count)
    chunked = tuple(max(min(step, size - step * index), 0) for index in range(count))
    sizes = () if chunked == cut.sizes else cut.sizes
    return MeshSharding(cut.view, Mesh((count,), members), (cut.dim,), are_some, sizes=sizes)
