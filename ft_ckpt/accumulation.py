"""Gradients of a step that is not complete yet: what gradient accumulation has summed up so far on this rank."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.engines import unwrap
from ft_ckpt.errors import SelectionError
from ft_ckpt.holdings import is_dtensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """This rank's gradients of a step that is not complete, by raw parameter name.

    Raises SelectionError under engines that keep them out of reach until the step is complete.
    """
    root = unwrap(model)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise SelectionError(
            "gradients: accumulated by FSDP1 where they cannot be read; save when the optimizer has stepped, as "
            "saver.step() does"
        )
    return dict(_accumulated(root))


def restore_gradients(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Put back what `gradients` gave."""
    root = unwrap(model)
    whole = _fsdp_parameters(root)
    for name, parameter in root.named_parameters():
        if name not in stored:
            continue
        if name in whole and stored[name].shape == parameter.shape:
            whole[name].unsharded_accumulated_grad = stored[name].to(parameter.device)
        elif is_dtensor(parameter):
            gradient: Any = torch.zeros_like(parameter.detach())
            gradient.to_local().copy_(stored[name])
            parameter.grad = gradient
        else:
            parameter.grad = stored[name].to(parameter.device)


def _accumulated(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    whole = _fsdp_parameters(root)
    for name, parameter in root.named_parameters():
        inner = whole.get(name)
        unsharded = getattr(inner, "_unsharded_param", None) if inner is not None else None
        pending = getattr(inner, "unsharded_accumulated_grad", None) if inner is not None else None
        if pending is None and unsharded is not None:
            pending = unsharded.grad
        gradient: Any = pending if pending is not None else parameter.grad
        if gradient is not None:
            yield name, (gradient.to_local() if is_dtensor(gradient) else gradient).detach()


def _fsdp_parameters(root: nn.Module) -> dict[str, Any]:
    """FSDP2's own record of each parameter it cuts, which keeps gradients that are not yet reduced, by raw name."""
    from torch.distributed.fsdp import FSDPModule

    names = {id(parameter): name for name, parameter in root.named_parameters()}
    found = {}
    for module in root.modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for group in (group for group in groups if group is not None):
            found.update({names[id(p.sharded_param)]: p for p in group.fsdp_params if id(p.sharded_param) in names})
    return found
