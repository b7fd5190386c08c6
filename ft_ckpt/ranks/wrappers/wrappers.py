"""Has the table of wrappers, and functions that ask each wrapper in it.

Wrappers are recognised by their modules, never by the configuration of a launcher.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ft_ckpt.extension_points import load_extension
from ft_ckpt.ranks.wrappers.fsdp1 import FSDP1Wrapper
from ft_ckpt.ranks.wrappers.fsdp2 import FSDP2Wrapper, PendingGradient
from ft_ckpt.ranks.wrappers.wrapper import (
    AccelerateHooks,
    CheckpointedActivations,
    CompiledWrapper,
    DataParallelWrapper,
    Wrapper,
)

WRAPPERS: list[Wrapper] = [
    FSDP2Wrapper(),
    FSDP1Wrapper(),
    load_extension("ft_ckpt.extensions.deepspeed.zero:DeepSpeedWrapper")(),
    AccelerateHooks(),
    DataParallelWrapper(),
    CompiledWrapper(),
    CheckpointedActivations(),
]
_ATTRIBUTES: tuple[str, ...] = ()
_ATTRIBUTE_PREFIXES: tuple[str, ...] = ()
_FUNCTION_PACKAGES: tuple[str, ...] = ()
_PACKAGES: tuple[str, ...] = ()
for _wrapper in WRAPPERS:
    _ATTRIBUTES += _wrapper.attributes
    _ATTRIBUTE_PREFIXES += _wrapper.attribute_prefixes
    _FUNCTION_PACKAGES += _wrapper.function_packages
    _PACKAGES += _wrapper.packages


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's own module inside any stack of wrappers."""
    return wrapper_chain(model)[-1]


def wrapper_chain(model: nn.Module) -> list[nn.Module]:
    """Return `model` and the module inside each wrapper, with the user's own module last."""
    chain = [model]
    while True:
        key = wrapped_key(chain[-1])
        inner = None if key is None else chain[-1]._modules[key]
        if inner is None:
            return chain
        chain.append(inner)


def wrapped_key(module: nn.Module) -> str | None:
    """Return the name of the wrapped child, which canonical names leave out.

    Return None if `module` is not a wrapper.
    """
    children = module._modules
    for wrapper in WRAPPERS:
        if wrapper.child_key in children and wrapper.wraps(module):
            return wrapper.child_key
    return None


def walk_modules(root: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield (canonical name, raw name, module) in the order of `named_modules`.

    The canonical name leaves out the steps of wrappers.
    """
    waiting = [("", "", root)]
    while waiting:
        name, raw, module = waiting.pop()
        yield name, raw, module
        children = module._modules
        if not children:
            continue
        inner = wrapped_key(module)
        prefix = f"{name}." if name else ""
        raw_prefix = f"{raw}." if raw else ""
        for key, child in reversed(children.items()):
            if child is not None:
                waiting.append((name if key == inner else prefix + key, raw_prefix + key, child))


def keeps_weights(module: nn.Module) -> bool:
    """Check whether `module` has master weights, which overwrite the model at the next step."""
    return any(wrapper.keeps_weights(module) for wrapper in WRAPPERS)


def hides_tensors(module: nn.Module) -> bool:
    """Check whether tensors below `module` cannot be found through its submodules."""
    return any(wrapper.hides_tensors(module) for wrapper in WRAPPERS)


def tensors_of_modules(modules: Sequence[nn.Module]) -> dict[int, dict[str, Any]]:
    """Return stand-ins for parameters that engines have taken, by id of the module and name.

    Wrappers must be among `modules`.
    """
    tensors: dict[int, dict[str, Any]] = {}
    for wrapper in WRAPPERS:
        for (owner, name), tensor in wrapper.tensors_of_modules(modules).items():
            tensors.setdefault(owner, {})[name] = tensor
    return tensors


def reshard_modules(modules: Sequence[nn.Module]) -> None:
    """Let engines reshard `modules`, as for a state dict."""
    for wrapper in WRAPPERS:
        wrapper.reshard_modules(modules)


def broadcast_buffers(model: nn.Module) -> frozenset[int]:
    """Return the ids of buffers that wrappers broadcast from rank 0 before the next forward."""
    ids: set[int] = set()
    for module in wrapper_chain(model):
        for wrapper in WRAPPERS:
            ids.update(map(id, wrapper.broadcast_buffers(module)))
    return frozenset(ids)


def user_class(cls: type) -> type:
    """Return the user's class of a module, even if an engine has replaced the class."""
    for wrapper in WRAPPERS:
        cls = wrapper.user_class(cls)
    return cls


def shallow_copy(module: nn.Module) -> Any:
    """Copy the module with the same tensors and children.

    The copy is of the user's class, because the class of FSDP2 needs arguments.
    """
    copied: Any = object.__new__(user_class(type(module)))
    vars(copied).update(vars(module))
    return copied


def is_engine_attribute(name: str, value: Any) -> bool:
    """Check whether a wrapper has set this attribute of a user's module."""
    origin = str(getattr(value, "__module__", ""))
    return is_engine_name(name) or origin.startswith(_FUNCTION_PACKAGES)


def is_engine_name(name: str) -> bool:
    """Check whether a wrapper sets attributes of this name on a user's module."""
    return name in _ATTRIBUTES or name.startswith(_ATTRIBUTE_PREFIXES)


def is_engine_code(module_name: str) -> bool:
    """Check whether the module of that name belongs to an engine."""
    return module_name.startswith(_PACKAGES)


def hiding_gradients(model: nn.Module) -> list[str]:
    """Return the display names of engines in `model` whose accumulated gradients are hidden."""
    names = []
    for wrapper in WRAPPERS:
        if wrapper.hides_gradients is not None and any(map(wrapper.wraps, model.modules())):
            names.append(wrapper.hides_gradients)
    return names


def kept_gradients(root: nn.Module) -> dict[str, PendingGradient]:
    """Return gradients that engines keep until a step is complete, by raw parameter name."""
    modules = [module for _, _, module in walk_modules(root)]
    gradients: dict[str, PendingGradient] = {}
    for wrapper in WRAPPERS:
        gradients.update(wrapper.pending_gradients(modules))
    return gradients


def drop_kept_gradients(root: nn.Module) -> None:
    """Clear the gradients that engines keep."""
    for module in root.modules():
        for wrapper in WRAPPERS:
            wrapper.drop_gradients(module)
