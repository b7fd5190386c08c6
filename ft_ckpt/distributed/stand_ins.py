"""Parameters whose elements are computed from files whenever they are asked for, and held by nobody."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.distributed.plain import PlainTensors

_READ = "_ft_ckpt_read"


class StandInTensors(PlainTensors):
    """Parameters made by `stand_in_parameter`."""

    def describes(self, tensor: Any) -> bool:
        """Whether the tensor stands for another."""
        return hasattr(tensor, _READ)

    def local_part(self, tensor: Any) -> Tensor | None:
        """The tensor that it stands for, computed anew."""
        read: Callable[[], Tensor] = getattr(tensor, _READ)
        return read()

    def has_data(self, tensor: Any) -> bool:
        """Always, once it is asked for."""
        return True


def stand_in_parameter(shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> nn.Parameter:
    """A parameter of one element's memory that stands for what `read` gives, a tensor of that shape and type."""
    parameter = nn.Parameter(torch.zeros((), dtype=dtype).expand(shape), requires_grad=False)
    setattr(parameter, _READ, read)
    return parameter
