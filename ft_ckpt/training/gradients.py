"""Pending gradients: what gradient accumulation has summed up on this rank since the last step."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.distributed import wrappers
from ft_ckpt.distributed.wrappers import unwrap
from ft_ckpt.errors import SelectionError

_TAKEN = "_ft_ckpt_taken"  # attribute of a gradient that a step has taken in: its version then


class StepWatch:
    """What the steps of optimizers take in: a hook after each step marks the gradients that it has used.

    Gradients that were made or changed since wait for the next step.
    """

    def __init__(self) -> None:
        self._hooks: dict[
            int, tuple[torch.optim.Optimizer, Any]
        ] = {}  # by id, which is the optimizer's while it is here
        self._has_stepped = False

    def watch_optimizers(self, optimizers: Iterable[Any]) -> None:
        """Hear of each step from now on; those that are no torch optimizers, or hide their steps, cannot be heard."""
        for one in optimizers:
            heard = isinstance(one, torch.optim.Optimizer) and getattr(type(one).step, "hooked", False)
            if heard and id(one) not in self._hooks:
                self._hooks[id(one)] = (one, one.register_step_post_hook(self._mark_taken))

    def is_unfinished(self, models: Callable[[], Iterable[nn.Module]]) -> bool:
        """Whether gradients wait for a step, and none was made since this was last asked."""
        stepped, self._has_stepped = self._has_stepped, False
        return not stepped and self.is_pending(models)

    def is_pending(self, models: Callable[[], Iterable[nn.Module]]) -> bool:
        """Whether a parameter of these optimizers, or one that FSDP2 keeps whole in what `models` gives, has a gradient
        that no step has taken in.
        """
        if not self._hooks:
            return False
        optimizers = [optimizer for optimizer, _ in self._hooks.values()]
        if any(not _is_taken(gradient) for optimizer in optimizers for gradient in _gradients_of(optimizer)):
            return True
        kept = (one for model in models() for one in wrappers.kept_gradients(unwrap(model)).values())
        return any(one.read() is not None for one in kept)

    def close(self) -> None:
        """Take the hooks off."""
        for _, handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()

    def _mark_taken(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._has_stepped = True
        for gradient in _gradients_of(optimizer):
            setattr(gradient, _TAKEN, gradient._version)


def drop_gradients(model: nn.Module) -> None:
    """Leave no gradient, as before the first backward."""
    restore_gradients(model, {})


def pending_gradients(model: nn.Module) -> dict[str, Tensor]:
    """This rank's gradients of a step that is not complete, by raw parameter name.

    Raises SelectionError under engines that keep them out of reach until the step is complete.
    """
    root = unwrap(model)
    hiding = wrappers.hiding_gradients(model)
    if hiding and any(parameter.grad is not None for parameter in model.parameters()):
        raise SelectionError(
            f"gradients: accumulated by {hiding[0]} where they cannot be read; save when the optimizer has stepped, as "
            "saver.step() does, or after zero_grad()"
        )
    return dict(_accumulated_gradients(root))


def restore_gradients(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Put back what `pending_gradients` gave; parameters that are not in it have none."""
    root = unwrap(model)
    whole = wrappers.kept_gradients(root)
    wrappers.drop_kept_gradients(root)
    for name, parameter in root.named_parameters():
        parameter.grad = None
        if name in whole:
            whole[name].write(None)
        if name not in stored:
            continue
        if name in whole and stored[name].shape == parameter.shape:
            whole[name].write(stored[name].to(parameter.device))
        elif wrappers.is_distributed(parameter.detach()):
            gradient = torch.zeros_like(parameter.detach())
            if (local := wrappers.local_part(gradient)) is not None:
                local.copy_(stored[name])
            parameter.grad = gradient
        else:
            parameter.grad = stored[name].to(parameter.device)


def _gradients_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def _is_taken(gradient: Tensor) -> bool:
    return bool(getattr(gradient, _TAKEN, None) == gradient._version)


def _accumulated_gradients(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    whole = wrappers.kept_gradients(root)
    for name, parameter in root.named_parameters():
        pending = whole[name].read() if name in whole else None
        gradient = pending if pending is not None else parameter.grad
        if gradient is not None and (local := wrappers.local_part(gradient)) is not None:
            yield name, local
