"""Defines wrappers: modules around the user's modules, and attributes that engines set on these.

To add a wrapper, write a subclass of `Wrapper` that overrides the differences, and add it to the
table in `wrappers`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Wrapper:
    """One kind of wrapper module.

    Attributes:
        child_key: The name of the wrapped child in the wrapper module.
        packages: Packages whose functions the engine registers as hooks.
        function_packages: Packages of functions that the engine sets on the user's modules.
        attributes: Names of attributes that the engine sets on the user's modules.
        attribute_prefixes: Beginnings of such names.
        hides_gradients: The display name of the engine if accumulated gradients cannot be read
            under it, else None.
    """

    child_key: str | None = None
    packages: tuple[str, ...] = ()
    function_packages: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    attribute_prefixes: tuple[str, ...] = ()
    hides_gradients: str | None = None

    def wraps(self, module: nn.Module) -> bool:
        """Check whether `module` is a wrapper of this kind around its child `child_key`."""
        return False

    def keeps_weights(self, module: nn.Module) -> bool:
        """Check whether `module` has master weights, which overwrite the model at the next step."""
        return False

    def hides_tensors(self, module: nn.Module) -> bool:
        """Check whether tensors below `module` cannot be found through its submodules."""
        return False

    def tensors_of_modules(self, modules: Sequence[nn.Module]) -> Mapping[tuple[int, str], Any]:
        """Return stand-ins for parameters by (id of their module, their name in it).

        `modules` are the modules of a model, including wrappers.
        """
        return {}

    def reshard_modules(self, modules: Sequence[nn.Module]) -> None:
        """Reshard the modules that this engine shards, so that their shards can be read."""

    def broadcast_buffers(self, module: nn.Module) -> Iterable[Tensor]:
        """Return buffers that `module` broadcasts from rank 0 before the next forward."""
        return ()

    def user_class(self, cls: type) -> type:
        """Return the user's class of a module whose class the engine has replaced."""
        return cls

    def pending_gradients(self, modules: Sequence[nn.Module]) -> Mapping[str, Any]:
        """Return gradients that the engine keeps outside `.grad`, by raw parameter name.

        The engine keeps them until the step is complete. Each object has `read()` and
        `write(gradient)`, with None for no gradient. `modules` are a model and all its submodules.
        """
        return {}

    def drop_gradients(self, module: nn.Module) -> None:
        """Clear the gradients that the engine keeps for `module`."""


class AccelerateHooks(Wrapper):
    """The attributes that Accelerate's hooks set on modules."""

    attributes = ("forward",)
    attribute_prefixes = ("_hf_hook", "_old_forward")


class DataParallelWrapper(Wrapper):
    """DistributedDataParallel and DataParallel: the unchanged model under "module"."""

    child_key = "module"
    attribute_prefixes = ("_ddp_",)

    def wraps(self, module: nn.Module) -> bool:
        return isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel)

    def broadcast_buffers(self, module: nn.Module) -> Iterable[Tensor]:
        if not isinstance(module, nn.parallel.DistributedDataParallel):
            return
        if module.will_sync_module_buffers():  # type: ignore[no-untyped-call]  # torch has no type
            yield from module.modules_buffers


class CompiledWrapper(Wrapper):
    """The module that torch.compile() returns; `module.compile()` adds no wrapper."""

    child_key = "_orig_mod"
    attributes = ("_is_torch_compile", "_compile_kwargs")  # the second is Lightning's

    def wraps(self, module: nn.Module) -> bool:
        return isinstance(module, torch._dynamo.OptimizedModule)


class CheckpointedActivations(Wrapper):
    """Activation checkpointing by a wrapper around each layer."""

    child_key = "_checkpoint_wrapped_module"

    def wraps(self, module: nn.Module) -> bool:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

        return isinstance(module, ActivationWrapper)
