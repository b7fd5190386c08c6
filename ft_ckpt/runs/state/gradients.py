"""Pending gradients: what gradient accumulation has summed on this rank since the last step."""

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

_USED = "_ft_ckpt_taken"  # attribute of a gradient that a step has used: its version then


class StepWatch:
    """Tracks pending gradients: a step post-hook marks the gradients that an optimizer has used.

    Gradients made or changed since then are pending.
    """

    def __init__(self) -> None:
        # by id of the optimizer, which is kept alive
        self._hooks: dict[int, tuple[torch.optim.Optimizer, Any]] = {}
        self._has_stepped = False
        self._counts: dict[int, int] = {}  # steps of each hooked optimizer, by its id

    @property
    def count(self) -> int:
        """Steps of the hooked optimizer that has done most of them."""
        return max(self._counts.values(), default=0)

    def watch_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Hook the optimizers that are torch's and call step hooks; others cannot be tracked."""
        for optimizer in optimizers:
            if not isinstance(optimizer, torch.optim.Optimizer) or id(optimizer) in self._hooks:
                continue
            if getattr(type(optimizer).step, "hooked", False):
                handle = optimizer.register_step_post_hook(self._mark_used)
                self._hooks[id(optimizer)] = (optimizer, handle)

    def is_unfinished(self, models: Callable[[], Iterable[nn.Module]]) -> bool:
        """Check whether gradients are pending and no step was taken since the last call."""
        stepped, self._has_stepped = self._has_stepped, False
        return not stepped and self.is_pending(models)

    def is_pending(self, models: Callable[[], Iterable[nn.Module]]) -> bool:
        """Check whether a gradient exists that no step has used.

        The parameters of the hooked optimizers are checked, and those of `models` that FSDP2 keeps
        unsharded.
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
        self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        for gradient in _gradients_of(optimizer):
            setattr(gradient, _USED, gradient._version)


def pending_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's gradients of an incomplete step, by raw parameter name.

    Raises SelectionError under engines that hide gradients until the step is complete.
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
    """Restore the gradients of `pending_gradients`.

    Other parameters get None, as before the first backward.
    """
    root = unwrap(model)
    whole = kept_gradients(root)
    drop_kept_gradients(root)
    for name, parameter in root.named_parameters():
        parameter.grad = None
        if name in whole:
            whole[name].write(None)
        if name not in stored:
            continue
        if name in whole and stored[name].shape == parameter.shape:
            whole[name].write(stored[name].to(parameter.device))
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
    unsharded = kept_gradients(root)
    for name, parameter in root.named_parameters():
        gradient = unsharded[name].read() if name in unsharded else None
        if gradient is None:
            gradient = parameter.grad
        local = None if gradient is None else local_part(gradient)
        if local is not None:
            yield name, local
