"""Places, samples and digests of the elements that a rank holds of a tensor."""

import ctypes
import json
import operator
from collections.abc import Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from ft_ckpt.ranks.sharding import Sharding, Source, box_memories, unravel_index

WEIGHTS = "weights"  # first part of the name of a tensor of the saved model


def place_of(sharding: Sharding, rank: int) -> str:
    """Return the place of the part of `rank` in the tensor: its offsets and sizes, as JSON.

    The part is at most one box. Return "" for the whole tensor.
    """
    for box in sharding.local_boxes(rank):
        if box.sizes != sharding.view:
            return json.dumps([box.offsets, box.sizes])
    return ""


def sample_elements(
    chosen: Mapping[str, Source], rank: int, tensors: int = 32, elements: int = 8
) -> dict[str, dict[str, float]]:
    """Return a few elements of `chosen` that `rank` holds, as {name: {flat index: value}}.

    The elements are evenly spread over the floating-point tensors. All ranks together return at
    most `tensors` x `elements` values, each from one rank. Not collective: the caller merges the
    results of the ranks.
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
    """Return by name the flat indices of the elements that `sample_elements` reads."""
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
    """Check whether the elements are floating-point numbers that can be read one by one.

    The elements of quantised weights cannot: their tensors have integers, or are of a subclass that
    does not implement reading one element.
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
    """Return by index the elements at flat `indices` that `rank`, of this process, contributes."""
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


_WORDS = 1 << 24  # words of 8 bytes that an accelerator digests at a time
# odd constants of several hash functions
_MIXING_FACTORS = (-7046029254386353131, -4417276706812531889, -8663945395140668459)


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the digest of each tensor, in hexadecimal digits.

    The digests of equal tensors differ if one is on the CPU and one on an accelerator.
    """
    digests = {}
    folded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.is_cpu:
            digests[name] = _digest_on_host(tensor)
        else:
            folded[name] = folded_bits(tensor)
    if folded:
        device = next(iter(folded.values())).device
        on_one = torch.stack([value.to(device) for value in folded.values()])
        values = on_one.tolist()  # one wait for all tensors
        for name, value in zip(folded, values, strict=True):
            digests[name] = f"{value:x}"
    return digests


def folded_bits(tensor: Tensor) -> Tensor:
    """Return a digest of all bits of the tensor and their positions.

    The digest is one int64 on the tensor's device, where it is computed.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    data = data.clone() if data.storage_offset() % 8 else data
    whole = data.numel() - data.numel() % 8
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for words, first in ((data[:whole].view(torch.int64), 0), (data[whole:], whole)):
        for low in range(0, words.numel(), _WORDS):
            piece = words[low : low + _WORDS].to(torch.int64)
            places = torch.arange(first + low, first + low + piece.numel(), device=data.device)
            mixed = _mix_bits(piece ^ (places * _MIXING_FACTORS[0]), _MIXING_FACTORS[1])
            total += _mix_bits(mixed, _MIXING_FACTORS[2]).sum()  # which wraps
    return total


def _mix_bits(words: Tensor, factor: int) -> Tensor:
    """Multiply, then xor-shift: the product does not carry high bits downwards."""
    words = words * factor
    return words ^ ((words >> 32) & 0xFFFFFFFF)


def _digest_on_host(tensor: Tensor) -> str:
    data = tensor.detach().contiguous()
    return xxhash.xxh3_128_hexdigest(
        (ctypes.c_char * data.nbytes).from_address(data.data_ptr()) if data.nbytes else b""
    )
