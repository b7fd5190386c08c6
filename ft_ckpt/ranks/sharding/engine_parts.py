"""Recognises parameters that an engine has cut into ordinary tensors, so that they are refused.

DeepSpeed's AutoTP and Megatron give each rank a part of a parameter. DeepSpeed's MoE gives each
rank some of the experts. These are ordinary tensors, but with marks. Without a look at the marks,
the part of rank 0 would be stored as the whole parameter.
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
# Names of the groups whose experts every rank has.
_WHOLE_GROUPS = (None, "ep_size_1")


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
    """Check whether the tensor is a part that AutoTP or Megatron has cut."""
    metadata = getattr(tensor, "ds_autotp_universal_checkpoint_meta", None)
    is_cut_by_megatron = getattr(tensor, "tensor_model_parallel", False) is True
    is_cut_by_autotp = metadata is not None and not metadata.get("replicated")
    return (is_cut_by_megatron or is_cut_by_autotp) and not _is_on_one_rank(tensor)


def _is_on_one_rank(tensor: Any) -> bool:
    """Check whether the AutoTP group of the tensor has one rank, which holds the whole tensor."""
    layer: Any = getattr(getattr(tensor, "gather_params", None), "__self__", None)
    if not hasattr(layer, "mp_group"):
        return False
    return layer.mp_group is None or len(group_members(layer.mp_group)) == 1


def _is_expert(tensor: Any) -> bool:
    """Check whether the tensor is of an expert that not every rank has."""
    return (
        getattr(tensor, "allreduce", True) is False
        and getattr(tensor, "group_name", None) not in _WHOLE_GROUPS
    )
