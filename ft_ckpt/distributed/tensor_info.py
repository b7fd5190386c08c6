"""Descriptions of tensors without the tensors, and the places that their elements are taken from when needed."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from ft_ckpt.distributed.sharding import Box, Sharding
from ft_ckpt.errors import SelectionError


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a run under its canonical name: facts alone, equal on equal models."""

    key: int  # equal for names that are one parameter; what `Tensors` are asked by
    name: str  # without wrapper parts
    raw_name: str  # as `named_modules` spells it, wrapper parts included
    shape: tuple[int, ...]  # global
    dtype: torch.dtype
    trainable: bool
    is_parameter: bool
    engine: str  # "plain", "fsdp1", "fsdp2", "zero3", "tensor parallel", "zero"
    sharding: Sharding
    is_added: bool = False  # listed by the state dict though it is no parameter and no buffer

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the full tensor."""
        return self.numel * self.dtype.itemsize


class Tensors(Protocol):
    """The elements behind `TensorInfo`s: those of a live run, or of a snapshot."""

    def local(self, key: int) -> Tensor | None:
        """This rank's elements, as `Sharding.local_boxes` says; None where it has none. Wants no gradient."""
        ...

    def memories(self, keys: Collection[int]) -> Mapping[int, Tensor]:
        """As `local`, of those of the keys that are here, in haste, to be copied: they may want a gradient."""
        ...

    def full(self, key: int) -> Tensor:
        """The full tensor of an opaque sharding. Collective."""
        ...


def _refuse_full() -> Tensor:
    raise SelectionError("a tensor of no engine was to be gathered by one; please report it")


@dataclass(frozen=True, eq=False)
class Source(TensorInfo):
    """A description together with its tensor, while optimizers are described or a run is restored; in no plan."""

    live: Any = None  # the parameter or buffer itself, kept so that its id stays its own
    local: Tensor | None = None  # this rank's elements
    gather_full: Callable[[], Tensor] = field(default=_refuse_full)  # of an opaque sharding


def local_elements(info: TensorInfo, tensors: Tensors | None) -> Tensor | None:
    """This rank's elements from `tensors`; with None from `info` itself, which must be a Source."""
    if tensors is not None:
        return tensors.local(info.key)
    return info.local if isinstance(info, Source) else None


def box_memories(boxes: Sequence[Box], local: Tensor | None) -> list[tuple[Box, Tensor]]:
    """The boxes that a rank has, each with its memory in its shape, from the memory of all of them."""
    if local is None or not boxes:
        return []
    if len(boxes) == 1 and local.dim() == len(boxes[0].sizes):
        return [(boxes[0], local)]
    pieces = torch.split(local.view(-1), [math.prod(box.sizes) for box in boxes])
    return [(box, piece.view(box.sizes)) for box, piece in zip(boxes, pieces, strict=True)]


def full_elements(info: TensorInfo, tensors: Tensors | None) -> Tensor:
    """The full tensor of an opaque sharding, as `local_elements`. Collective."""
    if tensors is not None:
        return tensors.full(info.key)
    return info.gather_full() if isinstance(info, Source) else _refuse_full()


_new_keys = count(-1, -1)  # below all that objects have


def state_source(
    owner: Source, key: str, shape: tuple[int, ...], engine: str, sharding: Sharding, live: Tensor, local: Tensor | None
) -> Source:
    """The source of a tensor "`owner`/`key`" that lies in `live`, perhaps beside others: under a key of its own."""
    name = f"{owner.name}/{key}"
    bare = Source(next(_new_keys), name, owner.raw_name, shape, live.dtype, False, False, engine, sharding)
    return replace(bare, live=live, local=local)
