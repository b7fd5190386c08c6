"""torch's dtypes by name, and whether values fit into them."""

from functools import cache

import torch

from ft_ckpt.errors import LoadError


@cache  # there are few, and a model has many tensors
def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name. Raises LoadError when torch has none."""
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"{name!r} is no torch dtype; the checkpoint is damaged, use another")
    return dtype


def all_finite(data: torch.Tensor) -> bool:
    """Whether no element is NaN or infinity, in any dtype; `torch.isfinite` takes few of 8 bits."""
    can_be_infinite = data.is_floating_point() or data.is_complex()
    if not can_be_infinite or data.dtype == torch.float4_e2m1fn_x2:
        return True
    values = data if data.dtype.itemsize > 1 else data.float()
    return bool(torch.isfinite(values).all())


def is_within(data: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether all elements lie within the finite range of `dtype`, so that no cast overflows.

    False for NaN. One pass without a copy, in a tenth of the time of `isinf`. After False, a full
    check finds the elements.
    """
    if not data.numel() or not (dtype.is_floating_point or dtype.is_complex):
        return True
    values = data
    if data.is_complex():
        values = torch.view_as_real(data)
    elif data.dtype.itemsize == 1:
        values = data.float()
    low, high = map(float, torch.aminmax(values))
    return max(-low, high) <= torch.finfo(dtype).max
