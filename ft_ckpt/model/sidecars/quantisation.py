"""Whether the weights of a model are quantised: packed into smaller types than it computes in."""

from typing import Any

import torch
from torch import nn

_PACKED_DTYPES = (
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_PACKED_LAYERS = frozenset(("Linear4bit", "Linear8bitLt"))  # of bitsandbytes


def is_quantised(model: nn.Module, config: Any) -> bool:
    """Check whether the weights are packed.

    A merged or dequantised model may still have its quantisation config.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return False
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    is_flagged = bool(getattr(model, "hf_quantizer", None) or getattr(model, "is_quantized", False))
    if is_flagged and "bitsandbytes" not in str(getattr(method, "value", method)):
        # some methods hide packed weights in tensor subclasses that report the original dtype
        return True
    return any(has_packed_tensors(module) for module in model.modules())


def has_packed_tensors(module: nn.Module) -> bool:
    """Check whether a layer has packed weights.

    A layer of bitsandbytes counts by its class name, because FSDP may change its dtype; others by
    their dtype.
    """
    if not _PACKED_LAYERS.isdisjoint(base.__name__ for base in type(module).__mro__):
        return True
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor.ndim > 1 and tensor.dtype in _PACKED_DTYPES:
            return True
    return False
