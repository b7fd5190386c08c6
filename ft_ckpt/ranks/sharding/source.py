"""One live tensor of a run: name, global shape, sharding, and this rank's elements."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.ranks.sharding.sharding import Box, Sharding

_unique_keys = count(-1, -1)  # below all ids of objects


def unique_key() -> int:
    """Return a new key for a source."""
    return next(_unique_keys)


def _not_gathered(live: Any) -> Tensor:
    raise AssertionError(f"{type(live).__name__}: no engine gathers it")


@dataclass(frozen=True, eq=False, slots=True)
class Source:
    """One tensor under its canonical name, with access to its elements on this rank."""

    key: int  # identity on this rank, equal for all names of one parameter
    name: str  # without wrapper parts
    raw_name: str  # as `named_modules` spells it, wrapper parts included
    shape: tuple[int, ...]  # global
    dtype: torch.dtype
    trainable: bool
    is_parameter: bool
    engine: str  # "plain", "fsdp1", "fsdp2", "zero3", "parts", "zero"
    sharding: Sharding
    is_added: bool = False  # an entry of the state dict that is neither parameter nor buffer
    # the parameter, the buffer or an engine's stand-in; the reference keeps its id, `key`, valid
    live: Any = None
    take: Callable[[Any], Tensor | None] = lambda _: None  # live -> this rank's elements
    # live -> the full tensor of an opaque sharding; collective
    gather: Callable[[Any], Tensor] = _not_gathered

    @property
    def local(self) -> Tensor | None:
        """This rank's elements in `Sharding.local_boxes`, without gradient; None if it has none."""
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
