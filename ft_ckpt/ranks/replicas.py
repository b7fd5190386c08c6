"""Places and samples of the elements that a rank holds of a tensor."""

import json
from collections.abc import Mapping, Sequence

import torch

from ft_ckpt.ranks.sharding import Sharding, unravel_index
from ft_ckpt.ranks.source import Source, box_memories

WEIGHTS = "weights"  # first part of the name of a tensor of the saved model


def place_of(sharding: Sharding, rank: int) -> str:
    """Offsets and sizes of the part of `rank`, at most one box, in the tensor, as JSON; "" for the
    whole tensor.
    """
    parts = [box for box in sharding.local_boxes(rank) if box.sizes != sharding.view]
    return json.dumps([parts[0].offsets, parts[0].sizes]) if parts else ""


def sample_elements(
    chosen: Mapping[str, Source], rank: int, tensors: int = 32, elements: int = 8
) -> dict[str, dict[str, float]]:
    """A few elements of `chosen` that `rank` holds, as {name: {flat index: value}}.

    They are evenly spread over the floating-point tensors: over all ranks together at most
    `tensors` x `elements` values, each from one rank. Not collective: the caller merges the results
    of the ranks.
    """
    indices = picked_indices(chosen, tensors, elements)
    return {
        name: values
        for name in indices
        if (values := elements_at(chosen[name], rank, indices[name]))
    }


def picked_indices(
    chosen: Mapping[str, Source], tensors: int = 32, elements: int = 8
) -> dict[str, list[int]]:
    """The flat indices of the elements that `sample_elements` takes, by name."""
    readable = sorted(
        name for name, info in chosen.items() if info.numel > 0 and has_readable_elements(info)
    )
    names = readable[:: max(1, -(-len(readable) // tensors))]
    return {
        name: sorted({chosen[name].numel * i // elements for i in range(elements)})
        for name in names
    }


def has_readable_elements(info: Source) -> bool:
    """Whether the elements are floating-point numbers that can be read one by one.

    Those of quantised weights cannot: their tensors are of integers, or of a subclass that does not
    implement it.
    """
    if not info.dtype.is_floating_point:
        return False
    if getattr(type(info.live), "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__:
        return True
    local = info.local
    if local is None or not local.numel():
        return True
    try:
        float(local[(0,) * local.dim()])
    except NotImplementedError:
        return False
    return True


def elements_at(info: Source, rank: int, indices: Sequence[int]) -> dict[str, float]:
    """The elements at flat `indices` that `rank`, which is this one, contributes to the tensor, by
    index.
    """
    local = info.local
    if local is None or not local.numel():
        return {}
    values = {}
    for mine, memory in box_memories(info.sharding.boxes(rank), local):
        for index in indices:
            inside = [
                at - low
                for at, low in zip(
                    unravel_index(index, info.sharding.view), mine.offsets, strict=True
                )
            ]
            if all(0 <= at < size for at, size in zip(inside, mine.sizes, strict=True)):
                values[str(index)] = float(memory[tuple(inside)])
    return values
