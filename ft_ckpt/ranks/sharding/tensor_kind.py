"""Defines kinds of tensors: how an engine lays out the parameters and buffers of a model.

To add a kind, write a subclass of `TensorKind` and add it to `tensor_kinds`. A stand-in is an
object in the place of a parameter that is elsewhere, for example in the flat buffer of an engine.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ft_ckpt.ranks.sharding.groups import global_rank
from ft_ckpt.ranks.sharding.sharding import ReplicatedSharding, Sharding

# Attribute of a stand-in parameter: the function that returns its tensor.
_READ = "_ft_ckpt_read"


class TensorLayout(NamedTuple):
    """The layout of one tensor under its engine; `shape` is that of the full tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    is_parameter: bool
    engine: str
    sharding: Sharding


def layout_like(
    tensor: Any, shape: tuple[int, ...], engine: str, sharding: Sharding
) -> TensorLayout:
    """Return the layout of a tensor with its own attributes but the full `shape`."""
    is_parameter = isinstance(tensor, nn.Parameter)
    return TensorLayout(
        shape, tensor.dtype, bool(tensor.requires_grad), is_parameter, engine, sharding
    )


def shaped_as_box(local: Tensor, sharding: Sharding) -> Tensor:
    """View this rank's elements in the shape of its box.

    The box may have one dimension more than `local`, if the view of the sharding splits one.
    """
    boxes = sharding.local_boxes(global_rank())
    if not boxes or tuple(local.shape) == boxes[0].sizes:
        return local
    return local.view(boxes[0].sizes)


class TensorKind(ABC):
    """Tensors that one engine has laid out over the ranks.

    Attributes:
        layout_facts: Names of the attributes that determine `layout_of`, together with whether the
            tensor is a parameter; () if they are not known.
        shows_runs: Whether optimizers see an ordinary tensor that has only this rank's elements.
    """

    layout_facts: tuple[str, ...] = ()
    shows_runs = False

    @abstractmethod
    def describes(self, tensor: Any) -> bool:
        """Check whether a parameter, a buffer or a stand-in for one is of this kind."""

    @abstractmethod
    def layout_of(self, tensor: Any) -> TensorLayout:
        """Return the layout of a tensor of this kind, without moving data."""

    def layouts_of(self, tensors: Sequence[Any]) -> list[TensorLayout]:
        """Return the layout of each tensor; tensors with equal `layout_facts` share one object."""
        if not self.layout_facts:
            return [*map(self.layout_of, tensors)]
        attributes_of = attrgetter(*self.layout_facts)
        are_parameters = map(isinstance, tensors, repeat(nn.Parameter))
        layout_by_attributes: dict[Any, TensorLayout] = {}
        layouts = []
        for tensor, is_parameter in zip(tensors, are_parameters, strict=True):
            try:
                attributes = attributes_of(tensor), is_parameter
            except AttributeError:
                layouts.append(self.layout_of(tensor))
                continue
            if attributes not in layout_by_attributes:
                layout_by_attributes[attributes] = self.layout_of(tensor)
            layouts.append(layout_by_attributes[attributes])

        return layouts

    def local_part(self, tensor: Any) -> Tensor | None:
        """Return this rank's elements of a tensor of this kind, without gradient, or None.

        Moves no data.
        """
        raise AssertionError("no tensor of this kind needs it")

    def has_data(self, tensor: Any) -> bool:
        """Check whether this rank's elements of a tensor of this kind, if any, are in memory."""
        local = self.local_part(tensor)
        return local is None or local.device.type != "meta"

    def full_tensor(self, tensor: Any) -> Tensor:
        """Return the full tensor of an opaque sharding. Collective: call it on every rank."""
        raise AssertionError("no tensor of this kind needs it")

    def optimizer_parameter(self, tensor: Any) -> Any:
        """Return the object that optimizers hold for a tensor of this kind."""
        return tensor

    def state_run(self, tensor: Any, state: Tensor | None) -> tuple[Sharding, Tensor | None]:
        """Return the sharding of a tensor's optimizer state, and this rank's elements of it."""
        raise AssertionError("no tensor of this kind needs it")


class PlainTensors(TensorKind):
    """Ordinary tensors."""

    layout_facts = ("shape", "dtype", "requires_grad")

    def describes(self, tensor: Any) -> bool:
        return True

    def layout_of(self, tensor: Any) -> TensorLayout:
        shape = tuple(tensor.shape)
        return layout_like(tensor, shape, "plain", ReplicatedSharding(shape))

    def local_part(self, tensor: Any) -> Tensor | None:
        return tensor.detach()  # type: ignore[no-any-return]  # a Tensor


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
    """Make a parameter of that shape in the memory of one element.

    The parameter stands for the tensor that `read` returns.
    """
    parameter = nn.Parameter(
        torch.zeros((), dtype=dtype, device="cpu").expand(shape), requires_grad=False
    )
    setattr(parameter, _READ, read)
    return parameter


def give_memory(tensor: Tensor) -> None:
    """Allocate memory for a stand-in, without filling it; do nothing for other tensors."""
    if hasattr(tensor, _READ):
        delattr(tensor, _READ)
        tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
