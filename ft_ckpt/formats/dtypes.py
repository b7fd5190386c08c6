"""torch's dtypes by name."""

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
