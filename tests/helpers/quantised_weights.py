"""Linear layers whose weight is a tensor subclass, as quantisers make them.

It can be multiplied, and refuses every other operation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class PackedWeight(Tensor):
    """Codes of 8 bits with a scale for each row, which claims to be of a floating-point dtype."""

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> "PackedWeight":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        self.codes, self.scales = codes, scales

    def plain(self) -> Tensor:
        return self.codes.to(self.dtype) * self.scales

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares more parameters than it passes
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            weight = args[0]
            return cls(weight.codes, weight.scales, weight.dtype)
        if func not in (torch.ops.aten.mm.default, torch.ops.aten.t.default):
            raise NotImplementedError(f"PackedWeight: {func} is not implemented")
        plain = [value.plain() if isinstance(value, PackedWeight) else value for value in args]
        return func(*plain, **(kwargs or {}))


def pack_linear_layers(model: nn.Module) -> nn.Module:
    """Pack the weights in the linear layers of the model's decoder."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and "layers" in name:
            scales = layer.weight.detach().abs().amax(dim=1, keepdim=True) / 127
            codes = (layer.weight.detach() / scales).round().to(torch.int8)
            packed = PackedWeight(codes, scales, layer.weight.dtype)
            layer.weight = nn.Parameter(packed, requires_grad=False)
    return model
