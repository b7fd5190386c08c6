"""Parameters that engines have cut without saying so to torch: ordinary tensors, of which each rank has other elements.

DeepSpeed's AutoTP and Megatron mark them with an attribute that they agree on. Taken for replicas, rank 0's part would
be stored as the whole, so they are refused.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ft_ckpt.distributed.sharding import OpaqueSharding
from ft_ckpt.distributed.wrapper_protocol import TensorLayout, Wrapper

_MARK = "tensor_model_parallel"
_WHY = (
    "this rank's part of a larger parameter, marked tensor_model_parallel by DeepSpeed's AutoTP or Megatron; save with "
    "their own engine, or cut the model with transformers' DistributedConfig(tp_size=...)"
)


class UnspokenParts(Wrapper):
    """Ordinary tensors with the mark, where there are several ranks."""

    tensor_marks = (_MARK,)

    def describes(self, tensor: Any) -> bool:
        """Whether it is marked as cut."""
        marked = getattr(tensor, _MARK, False) is True
        return marked and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def layout_of(self, tensor: Any) -> TensorLayout:
        """One that is refused wherever it is met."""
        shape, is_parameter = tuple(tensor.shape), isinstance(tensor, nn.Parameter)
        sharding = OpaqueSharding(shape, None, why=_WHY)
        return TensorLayout(shape, tensor.dtype, bool(tensor.requires_grad), is_parameter, "tensor parallel", sharding)

    def local_part(self, tensor: Any) -> Tensor | None:
        """This rank's part."""
        return tensor.detach()  # type: ignore[no-any-return]  # a Tensor
