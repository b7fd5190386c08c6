"""Copies of layers of a live model, in which a caller may replace tensors."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ft_ckpt.ranks.wrappers import is_engine_attribute, unwrap, user_class

_TORCH_FIELDS = frozenset(vars(nn.Module()))
# Returns replacements of a module's own tensors, by name.
Replacements = Callable[[nn.Module], Mapping[str, Tensor]]


def copy_layer(
    module: nn.Module, replacements: Replacements, copies: dict[int, nn.Module] | None = None
) -> nn.Module:
    """Return a copy, in eval mode, of `module` and of all modules that it refers to.

    `replacements` returns, for one module, the tensors that replace its own. The copy shares all
    other tensors with the original if they are on the host or on the meta device. Tensors on an
    accelerator are copied to the host. `copies` maps the id of an original to its copy, so that a
    module that occurs twice is copied once.
    """
    copies = {} if copies is None else copies
    module = unwrap(module)
    if id(module) in copies:
        return copies[id(module)]
    copied: nn.Module = object.__new__(user_class(type(module)))
    nn.Module.__init__(copied)
    copies[id(module)] = copied
    tensors = replacements(module)
    for name, value in vars(module).items():
        # A method that was patched onto the original is bound to the original.
        is_method = getattr(value, "__self__", None) is module
        is_patched = is_method or is_engine_attribute(name, value)
        if name not in _TORCH_FIELDS and name not in tensors and not is_patched:
            vars(copied)[name] = _copy_value(value, replacements, copies)

    for name, child in module._modules.items():
        child_copy = None if child is None else copy_layer(child, replacements, copies)
        copied._modules[name] = child_copy

    _copy_tensors(module, copied, tensors)
    return copied.eval()


def _copy_tensors(module: nn.Module, copied: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    names = [*module._parameters]
    for name in tensors:
        if name not in module._parameters and name not in module._buffers:
            names.append(name)

    for name in names:
        tensor: Any = tensors.get(name, module._parameters.get(name))
        # A placeholder is not wrapped, because the merge recognizes it by its identity.
        is_placeholder = isinstance(tensor, nn.Parameter) and tensor.is_meta
        if tensor is not None and not is_placeholder:
            tensor = nn.Parameter(_on_host(tensor), requires_grad=False)
        copied._parameters[name] = tensor

    for name, buffer in module._buffers.items():
        if name in tensors:
            copied._buffers[name] = tensors[name]
        else:
            copied._buffers[name] = None if buffer is None else _on_host(buffer)


def _copy_value(value: Any, replacements: Replacements, copies: dict[int, nn.Module]) -> Any:
    """Copy an attribute of a module.

    Modules are copied by `copy_layer`, and tensors are copied to the host. Dicts, lists, tuples and
    sets are copied with their items. Any other value is shared with the original.
    """
    if isinstance(value, nn.Module):
        return copy_layer(value, replacements, copies)
    if isinstance(value, Tensor):
        return _on_host(value)
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps its class, such as OrderedDict
        for key, item in value.items():
            copied[key] = _copy_value(item, replacements, copies)
        return copied
    if type(value) in (list, tuple, set):
        return type(value)(_copy_value(item, replacements, copies) for item in value)
    return value


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.is_meta else tensor.detach().cpu()
