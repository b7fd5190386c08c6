"""Copies a layer without its tensors: what it computes can then be done on other tensors, without touching the layer.

Copies are made of modules and of their plain containers. Anything else (configs, functions) is shared; hooks of engines
and of users are left behind.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.distributed.wrappers import is_engine_attribute, unwrap, user_class

_TORCH_FIELDS = frozenset(vars(nn.Module()))
Owned = Callable[[nn.Module], Mapping[str, Tensor]]  # the tensors to be put in place of a module's own, by name


def copy_layer(module: nn.Module, owned: Owned, made: dict[int, nn.Module] | None = None) -> nn.Module:
    """A copy of `module` and of all modules that it refers to, in eval mode, with the tensors that `owned` gives.

    Tensors that it does not give are shared, on the host. `made` are the copies by id of the original: a module that is
    met twice is copied once.
    """
    made = {} if made is None else made
    module = unwrap(module)
    if id(module) in made:
        return made[id(module)]
    twin: nn.Module = object.__new__(user_class(type(module)))
    nn.Module.__init__(twin)
    made[id(module)] = twin
    given = owned(module)
    for name, value in vars(module).items():
        if name not in _TORCH_FIELDS and name not in given and not _is_patched(module, name, value):
            vars(twin)[name] = _copy_value(value, owned, made)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else copy_layer(child, owned, made)
    for name in dict.fromkeys([*module._parameters, *(name for name in given if name not in module._buffers)]):
        twin._parameters[name] = _as_parameter(given.get(name, module._parameters.get(name)))
    for name, buffer in module._buffers.items():
        twin._buffers[name] = given[name] if name in given else None if buffer is None else _on_host(buffer)
    return twin.eval()


def _is_patched(module: nn.Module, name: str, value: Any) -> bool:
    """Whether the attribute is a wrapper's, or a method put over the class's own."""
    return is_engine_attribute(name, value) or getattr(value, "__self__", None) is module


def _copy_value(value: Any, owned: Owned, made: dict[int, nn.Module]) -> Any:
    if isinstance(value, nn.Module):
        return copy_layer(value, owned, made)
    if isinstance(value, Tensor):
        return _on_host(value)
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _copy_value(one, owned, made) for key, one in value.items()})
        return copied
    if type(value) in (list, tuple, set):
        return type(value)(_copy_value(one, owned, made) for one in value)
    return value


def _as_parameter(tensor: Tensor | None) -> nn.Parameter | None:
    if tensor is None or (isinstance(tensor, nn.Parameter) and tensor.is_meta):
        return tensor  # one that stands for another keeps its identity
    return nn.Parameter(_on_host(tensor), requires_grad=False)


def _on_host(tensor: Tensor) -> Tensor:
    found = tensor.detach()
    return found if found.device.type in ("cpu", "meta") else found.cpu()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type to compute in: at least float32 for floating-point numbers, others as they are."""
    is_number = dtype.is_floating_point or dtype.is_complex
    return torch.promote_types(dtype, torch.float32) if is_number else dtype
