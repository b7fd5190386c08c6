"""Checks whether the weights of a model are quantised.

Quantised weights are packed: stored in smaller types than the model computes in.
"""

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
# The layers of bitsandbytes.
_PACKED_LAYERS = frozenset(("Linear4bit", "Linear8bitLt"))


def is_quantised(model: nn.Module, config: Any) -> bool:
    """Check whether the weights of a model are packed.

    A quantisation config alone does not say so, because a merged or dequantised model can still
    have one.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return False
    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    is_flagged = bool(getattr(model, "hf_quantizer", None) or getattr(model, "is_quantized", False))
    if is_flagged and "bitsandbytes" not in str(getattr(method, "value", method)):
        # Some methods have packed weights in tensor subclasses that report the original dtype.
        return True
    return any(has_packed_tensors(module) for module in model.modules())


def has_packed_tensors(module: nn.Module) -> bool:
    """Check whether a layer has packed weights.

    A layer of bitsandbytes is recognised by the name of its class, because FSDP can change the
    dtype of its weights. Other layers are recognised by their dtypes.
    """
    if not _PACKED_LAYERS.isdisjoint(base.__name__ for base in type(module).__mro__):
        return True
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor.ndim > 1 and tensor.dtype in _PACKED_DTYPES:
            return True
    return False
