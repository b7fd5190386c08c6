"""Describes the elements that a rank holds of a tensor: by their box, by samples, by digests."""

import ctypes
import json
import operator
from collections.abc import Mapping, Sequence

import torch
import xxhash
from torch import Tensor

from ft_ckpt.ranks.sharding import Sharding, Source, box_memories, unravel_index

# The names of a saved model's tensors in a run begin with "weights/".
WEIGHTS = "weights"


def box_key(sharding: Sharding, rank: int) -> str:
    """Return which part of the tensor `rank` holds, as text: the offsets and sizes of its box.

    For example, rows 2 and 3 of a tensor of shape (4, 5) are "[[2, 0], [2, 5]]". The result is ""
    for the whole tensor. The part must not have more than one box.
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
    for name, source in chosen.items():
        if source.numel > 0 and has_readable_elements(source):
            readable.append(name)
    readable.sort()
    step = max(1, -(-len(readable) // tensors))
    indices = {}
    for name in readable[::step]:
        numel = chosen[name].numel
        indices[name] = sorted({numel * number // elements for number in range(elements)})
    return indices


def has_readable_elements(source: Source) -> bool:
    """Check whether the elements are floating-point numbers that can be read one by one.

    The elements of quantised weights cannot: their tensors have integers, or are of a subclass that
    does not implement reading one element.
    """
    if not source.dtype.is_floating_point:
        return False
    if getattr(type(source.live), "__torch_dispatch__", None) is torch.Tensor.__torch_dispatch__:
        return True
    local = source.local
    if local is None or not local.numel():
        return True
    try:
        float(local[(0,) * local.dim()])
    except NotImplementedError:
        return False
    return True


def elements_at(source: Source, rank: int, indices: Sequence[int]) -> dict[str, float]:
    """Return those of the elements at flat `indices` that `rank` contributes, by index as text.

    `rank` must be this process.
    """
    local = source.local
    if local is None or not local.numel():
        return {}
    values = {}
    for box, memory in box_memories(source.sharding.boxes(rank), local):
        for index in indices:
            place = unravel_index(index, source.sharding.view)
            inside = tuple(map(operator.sub, place, box.offsets))
            if all(0 <= at < size for at, size in zip(inside, box.sizes, strict=True)):
                values[str(index)] = float(memory[inside])
    return values


# An accelerator digests this many words of 8 bytes at a time.
_WORDS = 1 << 24
# Odd constants, as several hash functions have them.
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
        # All values are copied to the host at once, so that this waits for the accelerator once.
        values = on_one.tolist()
        for name, value in zip(folded, values, strict=True):
            digests[name] = f"{value:x}"

    return digests


def folded_bits(tensor: Tensor) -> Tensor:
    """Return a digest of all bits of the tensor and their positions.

    The digest is one int64 on the tensor's device, where it is computed.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()  # an int64 view must begin at a multiple of 8 bytes
    bytes_in_words = data.numel() - data.numel() % 8
    words_and_rest = (
        (data[:bytes_in_words].view(torch.int64), 0),
        (data[bytes_in_words:], bytes_in_words),
    )
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for words, first in words_and_rest:
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
