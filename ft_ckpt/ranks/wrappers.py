"""The list of known wrappers, and functions that dispatch to them.

Wrappers are recognised by their modules and tensors, never by the configuration of a launcher. To
add one, write a module with a `Wrapper` and add it to WRAPPERS: the first wrapper that describes a
tensor handles it.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from ft_ckpt.extensions.deepspeed import DeepSpeedWrapper
from ft_ckpt.ranks.engine_parts import EngineParts
from ft_ckpt.ranks.fsdp import FSDP1Wrapper, FSDP2Wrapper, PendingGradient
from ft_ckpt.ranks.sharding import Sharding
from ft_ckpt.ranks.wrapper import (
    CheckpointedActivations,
    CompiledWrapper,
    DataParallelWrapper,
    PlainTensors,
    StandInTensors,
    TensorLayout,
    Wrapper,
)

WRAPPERS: list[Wrapper] = [
    FSDP2Wrapper(),  # first, because its check is the fastest
    FSDP1Wrapper(),
    EngineParts(),  # before ZeRO, whose stage 3 treats such a part as the whole
    DeepSpeedWrapper(),
    StandInTensors(),
    PlainTensors(),  # describes every tensor
    DataParallelWrapper(),
    CompiledWrapper(),
    CheckpointedActivations(),
]
_ATTRIBUTES = frozenset(name for wrapper in WRAPPERS for name in wrapper.attributes)
_ATTRIBUTE_PREFIXES = tuple(prefix for wrapper in WRAPPERS for prefix in wrapper.attribute_prefixes)
_FUNCTION_PACKAGES = tuple(package for wrapper in WRAPPERS for package in wrapper.function_packages)
_PACKAGES = tuple(package for wrapper in WRAPPERS for package in wrapper.packages)


# Modules


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside any stack of wrappers."""
    return wrapper_chain(model)[-1]


def wrapper_chain(model: nn.Module) -> list[nn.Module]:
    """`model` and the module inside each wrapper, the user's own module last."""
    chain = [model]
    while (key := wrapped_key(chain[-1])) is not None and (
        inner := chain[-1]._modules[key]
    ) is not None:
        chain.append(inner)
    return chain


def wrapped_key(module: nn.Module) -> str | None:
    """The name of the wrapped child, which canonical names leave out; None if `module` is not a
    wrapper.
    """
    children = module._modules
    for wrapper in WRAPPERS:
        if wrapper.child_key in children and wrapper.wraps(module):
            return wrapper.child_key
    return None


def walk_modules(root: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """(canonical name, raw name, module) for each of `root.named_modules(remove_duplicate=False)`,
    in its order.

    The canonical name leaves out the steps of wrappers.
    """
    waiting = [("", "", root)]
    while waiting:
        name, raw, module = waiting.pop()
        yield name, raw, module
        children = module._modules
        if children:
            inner, above, raw_above = (
                wrapped_key(module),
                f"{name}." if name else "",
                f"{raw}." if raw else "",
            )
            waiting += [
                (name if key == inner else above + key, raw_above + key, child)
                for key, child in reversed(children.items())
                if child is not None
            ]


def keeps_weights(module: nn.Module) -> bool:
    """See `Wrapper.keeps_weights`."""
    return any(wrapper.keeps_weights(module) for wrapper in WRAPPERS)


def hides_tensors(module: nn.Module) -> bool:
    """See `Wrapper.hides_tensors`."""
    return any(wrapper.hides_tensors(module) for wrapper in WRAPPERS)


def tensors_of_modules(modules: Sequence[nn.Module]) -> dict[int, dict[str, Any]]:
    """(id of a module, name) -> the stand-in for the parameter that an engine has taken from the
    module.

    Wrappers must be among `modules`.
    """
    found: dict[int, dict[str, Any]] = {}
    for wrapper in WRAPPERS:
        for (owner, name), tensor in wrapper.tensors_of_modules(modules).items():
            found.setdefault(owner, {})[name] = tensor
    return found


def reshard_modules(modules: Sequence[nn.Module]) -> None:
    """Let engines reshard `modules`, as for a state dict."""
    for wrapper in WRAPPERS:
        wrapper.reshard_modules(modules)


def broadcast_buffers(model: nn.Module) -> frozenset[int]:
    """Ids of the buffers that wrappers broadcast from rank 0 before the next forward."""
    chain = wrapper_chain(model)
    return frozenset(
        id(buffer)
        for outer in chain
        for kind in WRAPPERS
        for buffer in kind.broadcast_buffers(outer)
    )


def user_class(cls: type) -> type:
    """The user's class of a module, even if an engine has replaced it."""
    for wrapper in WRAPPERS:
        cls = wrapper.user_class(cls)
    return cls


def shallow_copy(module: nn.Module) -> Any:
    """A copy with the same tensors and children, of the user's class: FSDP2's needs arguments."""
    copied: Any = object.__new__(user_class(type(module)))
    vars(copied).update(vars(module))
    return copied


def is_engine_attribute(name: str, value: Any) -> bool:
    """Whether an attribute of a user's module was set by a wrapper."""
    origin = str(getattr(value, "__module__", ""))
    return is_engine_name(name) or origin.startswith(_FUNCTION_PACKAGES)


def is_engine_name(name: str) -> bool:
    """Whether a wrapper sets attributes of this name on a user's module."""
    return name in _ATTRIBUTES or name.startswith(_ATTRIBUTE_PREFIXES)


def is_engine_code(module_name: str) -> bool:
    """Whether the module of that name belongs to an engine."""
    return module_name.startswith(_PACKAGES)


# Tensors


def layout_of(tensor: Any) -> TensorLayout:
    """The layout of a parameter, a buffer, or a stand-in for one. Moves no data."""
    return _engine_of(tensor).layout_of(tensor)


def by_engine(tensors: Iterable[Any]) -> list[tuple[Wrapper, list[Any]]]:
    """The tensors in order, grouped into runs that one engine describes."""
    return [(wrapper, [*run]) for wrapper, run in groupby(tensors, _engine_of)]


def layouts_of(tensors: Iterable[Any]) -> list[TensorLayout]:
    """The `layout_of` each tensor; equal layouts are computed once."""
    return [layout for wrapper, run in by_engine(tensors) for layout in wrapper.layouts_of(run)]


def have_data(tensors: Iterable[Any]) -> list[bool]:
    """For each tensor, whether this rank's elements, if any, are in memory."""
    return [has for wrapper, run in by_engine(tensors) for has in map(wrapper.has_data, run)]


def local_part(tensor: Any) -> Tensor | None:
    """This rank's elements of a tensor, without gradient, or None. Moves no data."""
    return _engine_of(tensor).local_part(tensor)


def full_tensor(tensor: Any) -> Tensor:
    """The full tensor of an opaque layout. Collective."""
    return _engine_of(tensor).full_tensor(tensor)


def is_distributed(tensor: Any) -> bool:
    """Whether an engine lays out the tensor, such as a DTensor."""
    return not isinstance(_engine_of(tensor), PlainTensors)


def optimizer_parameter(tensor: Any) -> Any:
    """The object in optimizers that stands for a parameter, or for a stand-in for one."""
    return _engine_of(tensor).optimizer_parameter(tensor)


def shows_runs(tensor: Any) -> bool:
    """Whether optimizers see only this rank's elements, as an ordinary tensor."""
    return _engine_of(tensor).shows_runs


def state_run(tensor: Any, state: Tensor | None) -> tuple[Sharding, Tensor | None]:
    """The layout of optimizer state of the shape of a tensor that `shows_runs`, and this rank's
    elements of it.
    """
    return _engine_of(tensor).state_run(tensor, state)


def _engine_of(tensor: Any) -> Wrapper:
    for wrapper in WRAPPERS:
        if wrapper.describes(tensor):
            return wrapper
    raise AssertionError("PlainTensors describes every tensor")


# Gradients


def hiding_gradients(model: nn.Module) -> list[str]:
    """The display names of engines in `model` whose accumulated gradients cannot be read."""
    hiding = [wrapper for wrapper in WRAPPERS if wrapper.hides_gradients]
    return [
        str(wrapper.hides_gradients)
        for wrapper in hiding
        if any(map(wrapper.wraps, model.modules()))
    ]


def kept_gradients(root: nn.Module) -> dict[str, PendingGradient]:
    """Gradients that engines keep until a step is complete, by raw parameter name."""
    modules = [module for _, _, module in walk_modules(root)]
    return {
        name: found
        for wrapper in WRAPPERS
        for name, found in wrapper.pending_gradients(modules).items()
    }


def drop_kept_gradients(root: nn.Module) -> None:
    """Clear the gradients that engines keep."""
    for module in root.modules():
        for wrapper in WRAPPERS:
            wrapper.drop_gradients(module)
