"""Has the table of tensor kinds, and functions that ask the kind of each tensor.

The first kind in the table that describes a tensor is its kind.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from torch import Tensor

from ft_ckpt.extension_points import load_extension
from ft_ckpt.ranks.sharding import (
    EngineParts,
    PlainTensors,
    Sharding,
    StandInTensors,
    TensorKind,
    TensorLayout,
)
from ft_ckpt.ranks.wrappers.dtensors import DTensors
from ft_ckpt.ranks.wrappers.fsdp1 import FlatParameters

TENSOR_KINDS: list[TensorKind] = [
    DTensors(),  # first, because its check is the fastest
    FlatParameters(),
    EngineParts(),  # before ZeRO, whose stage 3 treats such a part as the whole
    load_extension("ft_ckpt.extensions.deepspeed.zero:PartitionedTensors")(),
    StandInTensors(),
    PlainTensors(),  # describes every tensor
]


def layout_of(tensor: Any) -> TensorLayout:
    """Return the layout of a parameter, a buffer, or a stand-in for one, without moving data."""
    return _kind_of(tensor).layout_of(tensor)


def by_kind(tensors: Iterable[Any]) -> list[tuple[TensorKind, list[Any]]]:
    """Group the tensors, in order, into runs of one kind."""
    return [(kind, [*run]) for kind, run in groupby(tensors, _kind_of)]


def layouts_of(tensors: Iterable[Any]) -> list[TensorLayout]:
    """Return the layout of each tensor; equal layouts are computed once."""
    layouts: list[TensorLayout] = []
    for kind, run in by_kind(tensors):
        layouts += kind.layouts_of(run)
    return layouts


def have_data(tensors: Iterable[Any]) -> list[bool]:
    """Check for each tensor whether this rank's elements, if any, are in memory."""
    flags: list[bool] = []
    for kind, run in by_kind(tensors):
        flags += map(kind.has_data, run)
    return flags


def local_part(tensor: Any) -> Tensor | None:
    """Return this rank's elements of a tensor, without gradient, or None. Moves no data."""
    return _kind_of(tensor).local_part(tensor)


def full_tensor(tensor: Any) -> Tensor:
    """Return the full tensor of an opaque layout. Collective: call it on every rank."""
    return _kind_of(tensor).full_tensor(tensor)


def is_distributed(tensor: Any) -> bool:
    """Check whether an engine lays out the tensor, such as a DTensor."""
    return not isinstance(_kind_of(tensor), PlainTensors)


def optimizer_parameter(tensor: Any) -> Any:
    """Return the object that optimizers hold for a parameter, or for a stand-in for one."""
    return _kind_of(tensor).optimizer_parameter(tensor)


def shows_runs(tensor: Any) -> bool:
    """Check whether optimizers see an ordinary tensor that has only this rank's elements."""
    return _kind_of(tensor).shows_runs


def state_run(tensor: Any, state: Tensor | None) -> tuple[Sharding, Tensor | None]:
    """Return the layout of optimizer state in the shape of a tensor, and this rank's elements."""
    return _kind_of(tensor).state_run(tensor, state)


def _kind_of(tensor: Any) -> TensorKind:
    for kind in TENSOR_KINDS:
        if kind.describes(tensor):
            return kind
    raise AssertionError("PlainTensors describes every tensor")
