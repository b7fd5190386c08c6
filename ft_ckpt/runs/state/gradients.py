"""Finds, captures and restores pending gradients.

A gradient is pending if it was accumulated on this rank and no optimizer step has used it yet.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.errors import SelectionError
from ft_ckpt.ranks.wrappers import (
    drop_kept_gradients,
    hiding_gradients,
    is_distributed,
    kept_gradients,
    local_part,
    unwrap,
)

# Attribute of a gradient that an optimizer step has used. Its value is the version of the gradient
# at that step. Torch raises the version of a tensor at each write in place.
_USED = "_ft_ckpt_taken"


class StepWatch:
    """Tracks which gradients are pending.

    A post-hook of each optimizer step marks the gradients that the step has used. Gradients that
    were made or changed after that are pending.
    """

    def __init__(self) -> None:
        # Optimizer and hook by the id of the optimizer. The reference keeps the optimizer alive, so
        # that no other object gets its id.
        self._hooks: dict[int, tuple[torch.optim.Optimizer, Any]] = {}
        self._has_stepped = False
        self._step_counts: dict[int, int] = {}  # by the id of the optimizer

    @property
    def count(self) -> int:
        """The largest number of steps that one of the hooked optimizers has done."""
        return max(self._step_counts.values(), default=0)

    def watch_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Hook the optimizers that call torch's step hooks. Others cannot be tracked."""
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer) or id(optimizer) in self._hooks:
                continue
            if getattr(type(optimizer).step, "hooked", False):
                handle = optimizer.register_step_post_hook(self._mark_used)
                self._hooks[id(optimizer)] = (optimizer, handle)

    def is_unfinished(self, models: Callable[[], Iterable[nn.Module]]) -> bool:
        """Check whether gradients are pending and no step was taken since the last call."""
        has_stepped = self._has_stepped
        self._has_stepped = False
        return not has_stepped and self.is_pending(models)

    def is_pending(self, models: Callable[[], Iterable[nn.Module]]) -> bool:
        """Check whether a gradient exists that no step has used.

        Looks at the parameters of the hooked optimizers, and at the parameters of `models` whose
        gradients FSDP2 keeps unsharded.
        """
        if not self._hooks:
            return False
        for optimizer, _ in self._hooks.values():
            for gradient in _gradients_of(optimizer):
                if getattr(gradient, _USED, None) != gradient._version:
                    return True
        for model in models():
            unsharded = kept_gradients(unwrap(model))
            if any(gradient.read() is not None for gradient in unsharded.values()):
                return True
        return False

    def close(self) -> None:
        """Remove the hooks."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def _mark_used(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._has_stepped = True
        self._step_counts[id(optimizer)] = self._step_counts.get(id(optimizer), 0) + 1
        for gradient in _gradients_of(optimizer):
            setattr(gradient, _USED, gradient._version)


def pending_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's gradients of an incomplete step, by raw parameter name.

    Raises SelectionError if an engine hides gradients until the step is complete.
    """
    root = unwrap(model)
    hiding = hiding_gradients(model)
    if hiding and any(parameter.grad is not None for parameter in model.parameters()):
        raise SelectionError(
            f"gradients: accumulated by {hiding[0]} where they cannot be read; save when the "
            "optimizer has stepped, as saver.step() does, or after zero_grad()"
        )
    return dict(_accumulated_gradients(root))


def restore_gradients(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Set the gradients to `stored`, a result of `pending_gradients`.

    Parameters that are not in it get no gradient, as before the first backward.
    """
    root = unwrap(model)
    unsharded = kept_gradients(root)
    drop_kept_gradients(root)
    for name, parameter in root.named_parameters():
        parameter.grad = None
        if name in unsharded:
            unsharded[name].write(None)
        if name not in stored:
            continue
        if name in unsharded and stored[name].shape == parameter.shape:
            unsharded[name].write(stored[name].to(parameter.device))
        elif is_distributed(parameter.detach()):
            gradient = torch.zeros_like(parameter.detach())
            local = local_part(gradient)
            if local is not None:
                local.copy_(stored[name])
            parameter.grad = gradient
        else:
            parameter.grad = stored[name].to(parameter.device)


def _gradients_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def _accumulated_gradients(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each parameter that has a gradient, and this rank's elements of it."""
    unsharded = kept_gradients(root)
    for name, parameter in root.named_parameters():
        gradient = unsharded[name].read() if name in unsharded else None
        if gradient is None:
            gradient = parameter.grad
        local = None if gradient is None else local_part(gradient)
        if local is not None:
            yield name, local
