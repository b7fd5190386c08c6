"""Defines the source of a tensor: its name, global shape, sharding, and this rank's elements."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.ranks.sharding.sharding import Box, Sharding

# Keys of sources without an object: negative numbers, which are no ids of objects.
_unique_keys = count(-1, -1)


def unique_key() -> int:
    """Return a new key for a source."""
    return next(_unique_keys)


def _not_gathered(live: Any) -> Tensor:
    raise AssertionError(f"{type(live).__name__}: no engine gathers it")


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """One live tensor under its canonical name, with access to its elements on this rank.

    Attributes:
        key: The identity of the tensor on this rank. All names of one parameter have the same key.
        name: The canonical name, without the parts that wrappers add.
        raw_name: The name with these parts, as `named_modules` gives it.
        shape: The global shape.
        dtype: The dtype in memory.
        trainable: Whether it requires a gradient.
        is_parameter: Whether it is a parameter.
        engine: "plain", "fsdp1", "fsdp2", "tensor parallel", "zero3", "parts" or "zero".
        sharding: Which elements each rank holds.
        is_added: Whether it is an entry of the state dict that is neither parameter nor buffer.
        live: The parameter, the buffer, or the object that an engine has in its place. `key` is its
            id, and this reference keeps the id valid.
        take: Returns this rank's elements of `live`.
        gather: Returns the full tensor of `live`, if the sharding is opaque. Collective.
    """

    key: int
    name: str
    raw_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    is_parameter: bool
    engine: str
    sharding: Sharding
    is_added: bool = False
    live: Any = None
    take: Callable[[Any], Tensor | None] = lambda _: None
    gather: Callable[[Any], Tensor] = _not_gathered

    @property
    def local(self) -> Tensor | None:
        """This rank's elements, in the order of `Sharding.local_boxes` and without gradient.

        None if this rank has no elements.
        """
        return self.take(self.live)

    def gather_full(self) -> Tensor:
        """Return the full tensor of an opaque sharding. Collective: call it on every rank."""
        return self.gather(self.live)

    @property
    def numel(self) -> int:
        """Number of elements of the full tensor."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the full tensor."""
        return self.numel * self.dtype.itemsize

    def holding(self, local: Tensor | None) -> "Source":
        """Return the same tensor with `local`, such as a copy, as its elements on this rank."""
        return replace(self, take=lambda _: local)


def box_memories(boxes: Sequence[Box], local: Tensor | None) -> list[tuple[Box, Tensor]]:
    """Pair each box of a rank with its memory in the shape of the box.

    `local` is the memory of all boxes.
    """
    if local is None or not boxes:
        return []
    if len(boxes) == 1 and local.dim() == len(boxes[0].sizes):
        return [(boxes[0], local)]
    pieces = torch.split(local.view(-1), [math.prod(box.sizes) for box in boxes])
    return [(box, piece.view(box.sizes)) for box, piece in zip(boxes, pieces, strict=True)]


def held_source(
    name: str,
    raw_name: str,
    shape: tuple[int, ...],
    engine: str,
    sharding: Sharding,
    dtype: torch.dtype,
    live: Any,
) -> Source:
    """Make the source, with a new key, of a tensor that is not in a model.

    `Source.holding` sets its local elements.
    """
    return Source(
        unique_key(), name, raw_name, shape, dtype, False, False, engine, sharding, live=live
    )
