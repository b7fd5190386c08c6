"""Digests of all bits of tensors, on the host and on accelerators, by which values are compared."""

import ctypes
from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

_WORDS = 1 << 24  # of 8 bytes, digested at a time on an accelerator
# odd, of several hash functions
_MIXING_FACTORS = (-7046029254386353131, -4417276706812531889, -8663945395140668459)


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of each tensor, hexadecimal.

    Digests of equal tensors on different kinds of devices differ.
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
    """A digest of all bits of the tensor and their positions, one int64, computed on the tensor's
    device.
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
