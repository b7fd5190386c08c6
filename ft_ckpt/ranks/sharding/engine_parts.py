"""Parameters that an engine has cut or spread over ranks as ordinary tensors: refused by name.

DeepSpeed's AutoTP and Megatron mark their parts of a parameter, DeepSpeed's MoE the experts of one
rank. Without these marks rank 0's part would be stored as the whole.
"""

from typing import Any

import torch.distributed as dist

from ft_ckpt.ranks.sharding.groups import group_members, has_process_group
from ft_ckpt.ranks.sharding.sharding import OpaqueSharding
from ft_ckpt.ranks.sharding.tensor_kind import TensorKind, TensorLayout, layout_like

_PART = (
    "this rank's part of a larger parameter, cut by DeepSpeed's AutoTP or Megatron; cut the model "
    "with transformers' DistributedConfig(tp_size=...), or save with the engine's own means"
)
_EXPERT = (
    "an expert of this rank alone, spread by DeepSpeed's MoE; train with ep_size=1, or save with "
    "DeepSpeed's own engine.save_checkpoint()"
)
_UNSPREAD = (None, "ep_size_1")  # names of groups whose experts every rank has


class EngineParts(TensorKind):
    """Ordinary tensors with the marks of AutoTP, Megatron or DeepSpeed's MoE, on several ranks."""

    def describes(self, tensor: Any) -> bool:
        if not (_is_part(tensor) or _is_expert(tensor)):
            return False
        return has_process_group() and bool(dist.get_world_size() > 1)

    def layout_of(self, tensor: Any) -> TensorLayout:
        shape = tuple(tensor.shape)
        why = _EXPERT if _is_expert(tensor) else _PART
        return layout_like(tensor, shape, "parts", OpaqueSharding(shape, why=why))


def _is_part(tensor: Any) -> bool:
    facts = getattr(tensor, "ds_autotp_universal_checkpoint_meta", None)
    is_marked = getattr(tensor, "tensor_model_parallel", False) is True
    is_described = facts is not None and not facts.get("replicated")
    return (is_marked or is_described) and not _is_on_one_rank(tensor)


def _is_on_one_rank(tensor: Any) -> bool:
    """Check whether the AutoTP group of the tensor has one rank, which holds the whole tensor."""
    layer: Any = getattr(getattr(tensor, "gather_params", None), "__self__", None)
    if not hasattr(layer, "mp_group"):
        return False
    return layer.mp_group is None or len(group_members(layer.mp_group)) == 1


def _is_expert(tensor: Any) -> bool:
    return (
        getattr(tensor, "allreduce", True) is False
        and getattr(tensor, "group_name", None) not in _UNSPREAD
    )
