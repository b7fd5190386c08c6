"""DeepSpeed's AutoTP and MoE: parameters that are cut or spread without DTensor.

DeepSpeed's AutoTP and Megatron mark cut parameters with a common attribute; if it were ignored, rank 0's part would be
stored as the whole. AutoTP also describes each parameter for its universal checkpoints: the full shape, the dimension
that is cut, the sizes of the parts. A consistent description becomes a MeshSharding; other parameters are refused by
name.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ft_ckpt.distributed.ranks import global_rank, group_members, is_subset_of_ranks
from ft_ckpt.distributed.sharding import Mesh, MeshSharding, OpaqueSharding, Sharding
from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.wrapper import TensorLayout, Wrapper, layout_like, shaped_as_box

_MARK, _FACTS = "tensor_model_parallel", "ds_autotp_universal_checkpoint_meta"
_TP_WAY_OUT = "save with the engine's own means, or cut the model with transformers' DistributedConfig(tp_size=...)"


class AutoTPTensors(Wrapper):
    """Ordinary tensors with AutoTP's mark or description, in a run of several ranks."""

    shows_runs = True

    def describes(self, tensor: Any) -> bool:
        facts = getattr(tensor, _FACTS, None)
        if getattr(tensor, _MARK, False) is not True and (facts is None or facts.get("replicated")):
            return False
        return (
            dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and _part_holders(tensor) != ()
        )

    def layout_of(self, tensor: Any) -> TensorLayout:
        sharding = _sharding_of(tensor)
        facts = getattr(tensor, _FACTS, None) or {}
        shape = tuple(tensor.shape) if sharding.is_opaque else tuple(facts["original_shape"])
        return layout_like(tensor, shape, "tensor parallel", sharding)

    def local_part(self, tensor: Any) -> Tensor | None:
        return shaped_as_box(tensor.detach(), _sharding_of(tensor))

    def state_run(self, tensor: Any, state: Tensor | None) -> tuple[Sharding, Tensor | None]:
        sharding = _sharding_of(tensor)
        return sharding, None if state is None else shaped_as_box(state.detach(), sharding)


@dataclass(frozen=True)
class _DescribedCut:
    """One dimension of a view, cut into parts of given sizes."""

    view: tuple[int, ...]
    dim: int
    sizes: tuple[int, ...]
    packed: int  # number of equal tensors packed into one, each of them cut

    def part_shape(self, index: int, dims: int) -> tuple[int, ...]:
        """The shape of the `index`-th part in the engine, which keeps it in `dims` dimensions."""
        first = self.dim - (self.packed > 1)
        shape = (*self.view[:first], self.packed * self.sizes[index], *self.view[self.dim + 1 :])
        return shape if len(shape) == dims else (prod(shape[: len(shape) - dims + 1]), *shape[len(shape) - dims + 1 :])


def _part_holders(tensor: Any) -> tuple[int, ...] | None:
    """The global ranks of the parts, in order; () if one rank holds the whole tensor, None if the ranks are unknown."""
    layer = getattr(getattr(tensor, "gather_params", None), "__self__", None)
    if layer is None or not hasattr(layer, "mp_group"):
        return None
    members = () if layer.mp_group is None else group_members(layer.mp_group)
    return members if len(members) > 1 else ()


def _sharding_of(tensor: Any) -> Sharding:
    shape, facts, members = tuple(tensor.shape), getattr(tensor, _FACTS, None), _part_holders(tensor)
    found: _DescribedCut | str
    if facts is None:
        found = f"marked {_MARK} by Megatron or an engine like it, which says no more"
    elif hasattr(tensor, "ds_shape"):
        found = "cut by DeepSpeed's AutoTP, and again by ZeRO stage 3"
    elif members is None:
        found = "cut by DeepSpeed's AutoTP, which does not say over which ranks"
    else:
        found = _cut_described(facts)
    if isinstance(found, _DescribedCut):
        place = members.index(global_rank()) if members and global_rank() in members else None
        fits = members is not None and place is not None and len(found.sizes) == len(members)
        if fits and place is not None and found.part_shape(place, len(shape)) == shape:
            return _mesh_sharding(found, members or (), is_subset_of_ranks(len(members or ())))
        found = f"it is {list(shape)} on this rank, described as {found.packed} x {list(found.sizes)} of {found.view}"
    return OpaqueSharding(shape, why=f"this rank's part of a larger parameter: {found}; {_TP_WAY_OUT}")


def _cut_described(facts: Mapping[str, Any]) -> _DescribedCut | str:
    """The cut that AutoTP describes, or the reason why the description is unusable."""
    conversion = facts.get("conversion") or {}
    view, dim, widths = facts.get("logical_shape"), facts.get("partition_dim"), facts.get("sub_param_shard_widths")
    sizes = widths[0] if widths else facts.get("partition_sizes")
    if conversion.get("unsupported_reason") or view is None or dim is None or not sizes:
        return f"DeepSpeed's AutoTP does not say how: {conversion.get('unsupported_reason') or 'no sizes of parts'}"
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


_ELSEWHERE, _CHILD, _ENGINE = "_ft_ckpt_elsewhere", "deepspeed_experts", "experts"
_ALONE = (None, "ep_size_1")
_WAY_OUT = "train with ep_size=1, or save with DeepSpeed's own engine.save_checkpoint()"

NamedModules = Iterable[tuple[str, str, nn.Module]]  # canonical and raw path


class SpreadExperts(Wrapper):
    """Parameters of this rank's own experts, and stand-ins for those of other ranks' experts."""

    shows_runs = True

    def describes(self, tensor: Any) -> bool:
        if stands_for_another(tensor):
            return True
        is_own = getattr(tensor, "allreduce", True) is False and getattr(tensor, "group_name", None) not in _ALONE
        return is_own and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def layout_of(self, tensor: Any) -> TensorLayout:
        own = getattr(tensor, _ELSEWHERE, None)
        sharding = _own_sharding(tensor) if own is None else own.sharding
        trained = bool((tensor if own is None else own.sibling).requires_grad)
        return TensorLayout(tuple(tensor.shape), tensor.dtype, trained, True, _ENGINE, sharding)

    def local_part(self, tensor: Any) -> Tensor | None:
        # the whole tensor is one row of the view
        return None if stands_for_another(tensor) else tensor.detach().unsqueeze(0)

    def optimizer_parameter(self, tensor: Any) -> Any:
        return sibling_here(tensor)

    def state_run(self, tensor: Any, state: Tensor | None) -> tuple[Sharding, Tensor | None]:
        is_here = state is not None and not stands_for_another(tensor)
        return self.layout_of(tensor).sharding, state.detach().unsqueeze(0) if is_here and state is not None else None

    def has_data(self, tensor: Any) -> bool:
        return stands_for_another(tensor) or tensor.device.type != "meta"


@dataclass(frozen=True, eq=False)
class _Elsewhere:
    """The description of a tensor that another rank holds."""

    sharding: Sharding
    sibling: Any  # of this rank, in the same place of its list


def stands_for_another(tensor: Any) -> bool:
    """Whether `tensor` stands for an expert's tensor on another rank."""
    return hasattr(tensor, _ELSEWHERE)


def sibling_here(tensor: Any) -> Any:
    """The tensor itself, or for a stand-in the tensor of this rank at the same position of its list."""
    return tensor.__dict__[_ELSEWHERE].sibling if stands_for_another(tensor) else tensor


def holders_of_expert(expert: Any) -> tuple[int, tuple[int, ...]]:
    """The rank that holds an expert's tensor, and all ranks of its group; only this rank without a group."""
    sharding = expert.__dict__[_ELSEWHERE].sharding if stands_for_another(expert) else _own_sharding(expert)
    if not isinstance(sharding, MeshSharding):
        return global_rank(), (global_rank(),)
    return sharding.mesh.ranks[sharding.sizes.index(1)], sharding.mesh.ranks


def number_experts(found: dict[str, Source], modules: NamedModules) -> dict[str, Source]:
    """`found` with experts numbered over all ranks, and with stand-ins for the experts of other ranks.

    Experts outside of a layer of DeepSpeed, whose numbers are unknown, get a layout that is refused.
    """
    if not any(info.engine == _ENGINE for info in found.values()):
        return found
    layers: dict[str, tuple[str, int]] = {}  # common prefix of the names of all experts -> raw prefix, experts here
    for name, raw, module in modules:
        if type(module).__module__.startswith("deepspeed.moe.") and _CHILD in module._modules:
            prefix, raw_prefix = (f"{path}.{_CHILD}." if path else f"{_CHILD}." for path in (name, raw))
            layers[prefix] = raw_prefix, len(list(module.get_submodule(_CHILD).children()))
    numbered: dict[str, Source] = {}
    for name, info in found.items():
        prefix = next((prefix for prefix in layers if name.startswith(prefix)), "")
        if not prefix:
            is_unknown = info.engine == _ENGINE and not isinstance(info.sharding, OpaqueSharding)
            refused = OpaqueSharding(info.shape, why=_why_refused("numbers unknown"))
            numbered[name] = replace(info, sharding=refused) if is_unknown else info
        elif name not in numbered:
            own = {name: source for name, source in found.items() if name.startswith(prefix)}
            numbered |= {source.name: source for source in _all_experts(own, prefix, *layers[prefix])}
    return numbered


def _all_experts(own: Mapping[str, Source], prefix: str, raw_prefix: str, local: int) -> Iterator[Source]:
    """The tensors of all experts of a layer, in numerical order, from `own`, the tensors of this rank's experts.

    `local`: number of experts on each rank.
    """
    cut = next(iter(own.values())).sharding
    if not isinstance(cut, MeshSharding):
        yield from own.values()  # their group is unknown: refused
        return
    here = cut.mesh.ranks.index(global_rank())
    for number in range(local * len(cut.mesh.ranks)):
        holder, place = divmod(number, local)
        for name, info in own.items():
            at, _, rest = name.removeprefix(prefix).partition(".")
            if int(at) == place:
                source = info if holder == here else _of_other_rank(info, cut.mesh.ranks, holder)
                yield replace(source, name=f"{prefix}{number}.{rest}", raw_name=f"{raw_prefix}{number}.{rest}")


def _of_other_rank(info: Source, members: tuple[int, ...], holder: int) -> Source:
    """The tensor of another rank's expert that corresponds to `info`."""
    sharding = _sharding_of_member(info.shape, members, holder)
    stand_in = torch.empty(info.shape, dtype=info.dtype, device="meta")
    setattr(stand_in, _ELSEWHERE, _Elsewhere(sharding, info.live))
    return replace(info, key=id(stand_in), live=stand_in, sharding=sharding)


def _own_sharding(tensor: Any) -> Sharding:
    groups: Any = sys.modules.get("deepspeed.utils.groups")  # imported by the code that made these layers
    shape, known = tuple(tensor.shape), {} if groups is None else groups._get_expert_parallel_group_dict()
    if hasattr(tensor, "ds_shape") or tensor.group_name not in known:
        return OpaqueSharding(shape, why=_why_refused(tensor.group_name))
    members = group_members(known[tensor.group_name])
    return _sharding_of_member(shape, members, members.index(global_rank()))


def _why_refused(group: str) -> str:
    return f"experts of this rank alone ({group}); other ranks hold others under the same names; {_WAY_OUT}"


@lru_cache(maxsize=1024)  # a model has few shapes and many experts
def _sharding_of_member(shape: tuple[int, ...], members: tuple[int, ...], holder: int) -> MeshSharding:
    """A whole tensor on one of the members, as the only row of a view; the other members hold no row."""
    sizes = tuple(int(number == holder) for number in range(len(members)))
    return MeshSharding((1, *shape), Mesh((len(members),), members), (0,), is_subset_of_ranks(len(members)), (), sizes)
