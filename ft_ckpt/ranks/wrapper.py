"""The interface of a wrapper or engine; the defaults are those of a plain module.

To add a kind, write a subclass in its own module that overrides the differences, and add a line to
`wrappers`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ft_ckpt.ranks.ranks import global_rank
from ft_ckpt.ranks.sharding import ReplicatedSharding, Sharding


class TensorLayout(NamedTuple):
    """The layout of one tensor under its engine."""

    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype
    trainable: bool
    is_parameter: bool
    engine: str
    sharding: Sharding


def layout_like(
    tensor: Any, shape: tuple[int, ...], engine: str, sharding: Sharding
) -> TensorLayout:
    """The layout of a tensor with torch's attributes and another full `shape`."""
    is_parameter = isinstance(tensor, nn.Parameter)
    return TensorLayout(
        shape, tensor.dtype, bool(tensor.requires_grad), is_parameter, engine, sharding
    )


def shaped_as_box(local: Tensor, sharding: Sharding) -> Tensor:
    """This rank's part of a tensor in the shape of its box, where the view splits a dimension of
    the tensor.
    """
    boxes = sharding.local_boxes(global_rank())
    return (
        local if not boxes or tuple(local.shape) == boxes[0].sizes else local.view(boxes[0].sizes)
    )


class Wrapper:
    """One kind of wrapper module, or of tensors that an engine has laid out."""

    child_key: str | None = None  # the name of the wrapped child in its modules
    # prefixes of the names of modules whose functions it registers as hooks
    packages: tuple[str, ...] = ()
    # packages of functions that it sets on the user's modules
    function_packages: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()  # that it sets on the user's modules
    attribute_prefixes: tuple[str, ...] = ()
    # attributes that, with the type, determine `layout_of`; (): unknown
    layout_facts: tuple[str, ...] = ()
    # display name, if accumulated gradients cannot be read under it
    hides_gradients: str | None = None
    shows_runs = False  # whether optimizers see only this rank's elements, as an ordinary tensor

    def wraps(self, module: nn.Module) -> bool:
        """Whether `module` is a wrapper of this kind around its child `child_key`."""
        return False

    def keeps_weights(self, module: nn.Module) -> bool:
        """Whether `module` has separate master weights, which overwrite the model's at the next
        optimizer step.
        """
        return False

    def hides_tensors(self, module: nn.Module) -> bool:
        """Whether tensors below `module` cannot be found through its submodules."""
        return False

    def tensors_of_modules(self, modules: Sequence[nn.Module]) -> Mapping[tuple[int, str], Any]:
        """(id of a module, name) -> the stand-in for the parameter that the module had under that
        name.

        `modules` are those of a model, wrappers included.
        """
        return {}

    def describes(self, tensor: Any) -> bool:
        """Whether this engine lays out a parameter, a buffer or a stand-in for one."""
        return False

    def layout_of(self, tensor: Any) -> TensorLayout:
        """The layout of a tensor that it `describes`. Moves no data."""
        raise AssertionError("a tensor of another engine")

    def layouts_of(self, tensors: Sequence[Any]) -> list[TensorLayout]:
        """As `layout_of` of each; tensors with the same `layout_facts` share one."""
        if not self.layout_facts:
            return [*map(self.layout_of, tensors)]
        ask, known, found = attrgetter(*self.layout_facts), dict[Any, TensorLayout](), []
        for tensor, is_parameter in zip(
            tensors, map(isinstance, tensors, repeat(nn.Parameter)), strict=True
        ):
            try:
                facts = ask(tensor), is_parameter
            except AttributeError:
                found.append(self.layout_of(tensor))
                continue
            if facts not in known:
                known[facts] = self.layout_of(tensor)
            found.append(known[facts])
        return found

    def local_part(self, tensor: Any) -> Tensor | None:
        """This rank's elements of a tensor that it `describes`, without gradient, or None.

        Moves no data.
        """
        raise AssertionError("a tensor of another engine")

    def has_data(self, tensor: Any) -> bool:
        """Whether this rank's elements, if any, of a tensor that it `describes` are in memory."""
        local = self.local_part(tensor)
        return local is None or local.device.type != "meta"

    def full_tensor(self, tensor: Any) -> Tensor:
        """The full tensor of an opaque sharding. Collective."""
        raise AssertionError("a tensor of another engine")

    def optimizer_parameter(self, tensor: Any) -> Any:
        """The object in optimizers that stands for a tensor that it `describes`."""
        return tensor

    def state_run(self, tensor: Any, state: Tensor | None) -> tuple[Sharding, Tensor | None]:
        """The layout of optimizer state of the shape of a tensor that `shows_runs`, and this rank's
        elements of it.
        """
        raise AssertionError("a tensor of another engine")

    def reshard_modules(self, modules: Sequence[nn.Module]) -> None:
        """Reshard those of `modules` that this engine shards, so that their shards can be read."""

    def broadcast_buffers(self, module: nn.Module) -> Iterable[Tensor]:
        """Buffers that the wrapper `module` broadcasts from rank 0 before the next forward."""
        return ()

    def user_class(self, cls: type) -> type:
        """The user's class of a module whose class the engine has replaced."""
        return cls

    def pending_gradients(self, modules: Sequence[nn.Module]) -> Mapping[str, Any]:
        """Gradients that the engine keeps outside of `.grad` until the step is complete, by raw
        parameter name.

        Each has `read()` and `write(gradient)`, with None for no gradient. `modules` are a model
        and all submodules.
        """
        return {}

    def drop_gradients(self, module: nn.Module) -> None:
        """Clear the gradients that the engine keeps for `module`."""


class PlainTensors(Wrapper):
    """Ordinary tensors, and the attributes that Accelerate's hooks set on modules."""

    layout_facts = ("shape", "dtype", "requires_grad")
    attributes = ("forward",)
    attribute_prefixes = ("_hf_hook", "_old_forward")

    def describes(self, tensor: Any) -> bool:
        return True

    def layout_of(self, tensor: Any) -> TensorLayout:
        shape = tuple(tensor.shape)
        return layout_like(tensor, shape, "plain", ReplicatedSharding(shape))

    def local_part(self, tensor: Any) -> Tensor | None:
        return tensor.detach()  # type: ignore[no-any-return]  # a Tensor


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


_READ = "_ft_ckpt_read"


class StandInTensors(PlainTensors):
    """Parameters made by `stand_in_parameter`."""

    def describes(self, tensor: Any) -> bool:
        return hasattr(tensor, _READ)

    def local_part(self, tensor: Any) -> Tensor | None:
        read: Callable[[], Tensor] = getattr(tensor, _READ)
        return read()

    def has_data(self, tensor: Any) -> bool:
        return True


def stand_in_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]
) -> nn.Parameter:
    """A parameter of that shape in the memory of one element, which stands for the tensor that
    `read` returns.
    """
    parameter = nn.Parameter(
        torch.zeros((), dtype=dtype, device="cpu").expand(shape), requires_grad=False
    )
    setattr(parameter, _READ, read)
    return parameter


def give_memory(tensor: Tensor) -> None:
    """Give a stand-in memory of its own, which is not filled; other tensors have theirs."""
    if hasattr(tensor, _READ):
        delattr(tensor, _READ)
        tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
