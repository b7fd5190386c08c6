"""Places and samples of the elements that a rank holds of a tensor."""

import json
import operator
from collections.abc import Mapping, Sequence

import torch

from ft_ckpt.ranks.sharding import Sharding, unravel_index
from ft_ckpt.ranks.source import Source, box_memories

WEIGHTS = "weights"  # first part of the name of a tensor of the saved model


def place_of(sharding: Sharding, rank: int) -> str:
    """Offsets and sizes of the part of `rank`, at most one box, in the tensor, as JSON.

    "" for the whole tensor.
    """
    for box in sharding.local_boxes(rank):
        if box.sizes != sharding.view:
            return json.dumps([box.offsets, box.sizes])
    return ""


def sample_elements(
    chosen: Mapping[str, Source], rank: int, tensors: int = 32, elements: int = 8
) -> dict[str, dict[str, float]]:
    """A few elements of `chosen` that `rank` holds, as {name: {flat index: value}}.

    They are evenly spread over the floating-point tensors: over all ranks together at most
    `tensors` x `elements` values, each from one rank. Not collective: the caller merges the results
    of the ranks.
    """
    samples = {}
    for name, indices in picked_indices(chosen, tensors, elements).items():
        values = elements_at(chosen[name], rank, indices)
        if values:
            samples[name] = values
    return samples


def picked_indices(
    chosen: Mapping[str, Source], tensors: int = 32, elements: int = 8
) -> dict[str, list[int]]:
    """The flat indices of the elements that `sample_elements` takes, by name."""
    readable = []
    for name, info in chosen.items():
        if info.numel > 0 and has_readable_elements(info):
            readable.append(name)
    readable.sort()
    step = max(1, -(-len(readable) // tensors))
    indices = {}
    for name in readable[::step]:
        numel = chosen[name].numel
        indices[name] = sorted({numel * number // elements for number in range(elements)})
    return indices


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
    for box, memory in box_memories(info.sharding.boxes(rank), local):
        for index in indices:
            place = unravel_index(index, info.sharding.view)
            inside = tuple(map(operator.sub, place, box.offsets))
            if all(0 <= at < size for at, size in zip(inside, box.sizes, strict=True)):
                values[str(index)] = float(memory[inside])
    return values
