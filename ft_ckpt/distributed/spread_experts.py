"""Experts that DeepSpeed's MoE layers have spread over ranks: each rank has others, under the same local numbers.

They are one model's, so they get the numbers that they have among all, as in DeepSpeed's own checkpoints. What other
ranks have is listed here, too, as tensors that are elsewhere: all ranks list the same.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ft_ckpt.distributed.process_groups import global_rank, group_members, is_subset_of_ranks
from ft_ckpt.distributed.sharding import Mesh, MeshSharding, OpaqueSharding, Sharding
from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.wrapper_protocol import TensorLayout, Wrapper

_ELSEWHERE, _CHILD, _ENGINE = "_ft_ckpt_elsewhere", "deepspeed_experts", "experts"
_ALONE = (None, "ep_size_1")
_WAY_OUT = "train with ep_size=1, or save with DeepSpeed's own engine.save_checkpoint()"

NamedModules = Iterable[tuple[str, str, nn.Module]]  # canonical and raw path


class SpreadExperts(Wrapper):
    """Parameters of which every rank of a group has its own, and stand-ins for those of the others."""

    shows_runs = True

    def describes(self, tensor: Any) -> bool:
        """Whether DeepSpeed counts it to the experts of a group of several ranks, or it stands for one elsewhere."""
        if stands_for_another(tensor):
            return True
        is_own = getattr(tensor, "allreduce", True) is False and getattr(tensor, "group_name", None) not in _ALONE
        return is_own and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def layout_of(self, tensor: Any) -> TensorLayout:
        """The whole of it, on one rank of the group; refused where it is not told which ranks these are."""
        own = getattr(tensor, _ELSEWHERE, None)
        sharding = _own_sharding(tensor) if own is None else own.sharding
        trained = bool((tensor if own is None else own.sibling).requires_grad)
        return TensorLayout(tuple(tensor.shape), tensor.dtype, trained, True, _ENGINE, sharding)

    def local_part(self, tensor: Any) -> Tensor | None:
        """The tensor as the one row of its box; None of one that is elsewhere."""
        return None if stands_for_another(tensor) else tensor.detach().unsqueeze(0)

    def optimizer_parameter(self, tensor: Any) -> Any:
        """The parameter itself; for one elsewhere that of this rank which is in its place."""
        return sibling_here(tensor)

    def state_run(self, tensor: Any, state: Tensor | None) -> tuple[Sharding, Tensor | None]:
        """As the tensor's own."""
        is_here = state is not None and not stands_for_another(tensor)
        return self.layout_of(tensor).sharding, state.detach().unsqueeze(0) if is_here and state is not None else None

    def has_data(self, tensor: Any) -> bool:
        """What other ranks have is theirs to have."""
        return stands_for_another(tensor) or tensor.device.type != "meta"


@dataclass(frozen=True, eq=False)
class _Elsewhere:
    """What is known of a tensor that another rank has."""

    sharding: Sharding
    sibling: Any  # of this rank, in the same place of its list


def stands_for_another(tensor: Any) -> bool:
    """Whether it stands for another rank's."""
    return hasattr(tensor, _ELSEWHERE)


def sibling_here(tensor: Any) -> Any:
    """The tensor itself; for one elsewhere that of this rank which is in its place."""
    return tensor.__dict__[_ELSEWHERE].sibling if stands_for_another(tensor) else tensor


def holders_of_expert(expert: Any) -> tuple[int, tuple[int, ...]]:
    """The rank of this one's group that has an expert's tensor, and all of that group; this rank without one."""
    sharding = expert.__dict__[_ELSEWHERE].sharding if stands_for_another(expert) else _own_sharding(expert)
    if not isinstance(sharding, MeshSharding):
        return global_rank(), (global_rank(),)
    return sharding.mesh.ranks[sharding.sizes.index(1)], sharding.mesh.ranks


def number_experts(found: dict[str, Source], modules: NamedModules) -> dict[str, Source]:
    """`found` with the experts under their numbers among all, those of other ranks too.

    Spread tensors that are in no layer which says their numbers get a layout that is refused.
    """
    if not any(info.engine == _ENGINE for info in found.values()):
        return found
    layers = [_ExpertLayer(name, raw, module) for name, raw, module in modules if _holds_experts(module)]
    numbered: dict[str, Source] = {}
    done: set[str] = set()
    for name, info in found.items():
        layer = next((one for one in layers if name.startswith(one.prefix)), None)
        if layer is None:
            numbered[name] = info if info.engine != _ENGINE else replace(info, sharding=_refused(info))
        elif layer.prefix not in done:
            done.add(layer.prefix)
            own = {one: facts for one, facts in found.items() if one.startswith(layer.prefix)}
            numbered |= {one.name: one for one in layer.list_all(own)}
    return numbered


@dataclass(frozen=True, eq=False)
class _ExpertLayer:
    """The module that holds the experts of this rank in a list."""

    name: str
    raw: str
    module: nn.Module

    @property
    def prefix(self) -> str:
        """What the names of all experts' tensors begin with."""
        return f"{self.name}.{_CHILD}." if self.name else f"{_CHILD}."

    def list_all(self, own: Mapping[str, Source]) -> Iterator[Source]:
        """The tensors of all experts, this rank's `own` among them, in the order of their numbers."""
        local, cut = len(list(self.module.get_submodule(_CHILD).children())), next(iter(own.values())).sharding
        if not isinstance(cut, MeshSharding):
            yield from own.values()  # of a group that is not known: refused
            return
        raw_prefix = f"{self.raw}.{_CHILD}." if self.raw else f"{_CHILD}."
        here = cut.mesh.ranks.index(global_rank())
        for number in range(local * len(cut.mesh.ranks)):
            holder, place = divmod(number, local)
            for name, info in own.items():
                at, _, rest = name.removeprefix(self.prefix).partition(".")
                if int(at) == place:
                    one = info if holder == here else _of_other_rank(info, cut.mesh.ranks, holder)
                    yield replace(one, name=f"{self.prefix}{number}.{rest}", raw_name=f"{raw_prefix}{number}.{rest}")


def _holds_experts(module: nn.Module) -> bool:
    return type(module).__module__.startswith("deepspeed.moe.") and _CHILD in module._modules


def _of_other_rank(info: Source, members: tuple[int, ...], holder: int) -> Source:
    """The tensor of another rank's expert that is like `info`."""
    sharding = _sharding_of_member(info.shape, tuple(members), holder)
    stand_in = torch.empty(info.shape, dtype=info.dtype, device="meta")
    setattr(stand_in, _ELSEWHERE, _Elsewhere(sharding, info.live))
    return replace(info, key=id(stand_in), live=stand_in, sharding=sharding)


def _own_sharding(tensor: Any) -> Sharding:
    groups: Any = sys.modules.get("deepspeed.utils.groups")  # imported by whoever made these layers
    shape, known = tuple(tensor.shape), {} if groups is None else groups._get_expert_parallel_group_dict()
    if hasattr(tensor, "ds_shape") or tensor.group_name not in known:
        return OpaqueSharding(shape, None, why=_why_refused(tensor.group_name))
    members = group_members(known[tensor.group_name])
    return _sharding_of_member(shape, members, members.index(global_rank()))


def _refused(info: Source) -> Sharding:
    known = isinstance(info.sharding, OpaqueSharding)
    return info.sharding if known else OpaqueSharding(info.shape, None, why=_why_refused("numbers unknown"))


def _why_refused(group: str) -> str:
    return f"experts of this rank alone ({group}); other ranks hold others under the same names; {_WAY_OUT}"


@lru_cache(maxsize=1024)  # a model has few shapes and many experts
def _sharding_of_member(shape: tuple[int, ...], members: tuple[int, ...], holder: int) -> MeshSharding:
    """All of a tensor on one of the members: the one row of a view that the others have none of."""
    sizes = tuple(int(number == holder) for number in range(len(members)))
    return MeshSharding((1, *shape), Mesh((len(members),), members), (0,), is_subset_of_ranks(len(members)), (), sizes)
