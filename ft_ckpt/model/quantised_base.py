"""The base of adapters that is quantised in memory: what its weights stand for, and whether a model is what it was.

Of bitsandbytes' 4-bit and 8-bit layers. The live layers are read, and never dequantised in place.
"""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.distributed.stand_ins import stand_in_parameter
from ft_ckpt.distributed.tensors import ModelTensors
from ft_ckpt.distributed.wrappers import unwrap, user_class, walk_modules
from ft_ckpt.errors import BaseMismatchError, SelectionError, listing
from ft_ckpt.model.adapters import base_view, has_adapters
from ft_ckpt.model.plain_module import put_at, tensor_at
from ft_ckpt.model.pretrained import without_memory
from ft_ckpt.model.pretrained_files import is_quantised
from ft_ckpt.model.selection import View

_KINDS = ("Params4bit", "Int8Params")
_COMPARED = 8  # layers, spread over the model
_ALIKE = 0.99  # of a layer's codes: other kernels round some the other way; a fine-tuned model has many others


def has_quantised_base(model: nn.Module) -> bool:
    """Whether the model has adapters on weights that are quantised."""
    inside: Any = unwrap(model)
    if not has_adapters(inside):
        return False
    base = inside.get_base_model() if hasattr(inside, "get_base_model") else inside
    return getattr(base, "config", None) is not None and is_quantised(base, base.config)


class QuantisedBase:
    """The live base of a model's adapters: its quantised layers by the names that their weights have in the base."""

    def __init__(self, model: nn.Module) -> None:
        """Raises SelectionError for a model that this rank does not hold whole, and for other ways to quantise."""
        sources = ModelTensors(model).sources()
        held = {source.name: source.sharding for source in sources.values()}
        cut = [name for name, sharding in held.items() if sharding.is_sharded or not sharding.is_replicated]
        view = View(unwrap(model), sources)
        modules = {path: unwrap(module) for path, _, module in walk_modules(view.module)}
        base = base_view(view)
        self.module: Any = base.module
        known = {name: source for name, source in base.sources.items() if not source.is_added}
        self.tensors: dict[str, Tensor] = {name: source.live for name, source in known.items()}
        places = {name: modules[source.name.rpartition(".")[0]] for name, source in known.items()}
        self.layers = {n: places[n] for n, tensor in self.tensors.items() if type(tensor).__name__ in _KINDS}
        if cut or not self.layers:
            why = f"{listing(cut, ', ')}: cut over ranks" if cut else "quantised by another library than bitsandbytes"
            raise SelectionError(
                f"{type(self.module).__name__}: {why}, so its adapters are not merged here; save with "
                "adapter_only=True, then ft_ckpt.merge(adapter, out, base=...)"
            )

    def plain_config(self) -> Any:
        """The live model's config without what says that it is quantised."""
        config = copy.deepcopy(self.module.config)
        vars(config).pop("quantization_config", None)
        return config

    def dequantised(self, *, in_memory: bool) -> nn.Module:
        """A model of its own with what the weights stand for: computed when they are read, or now if `in_memory`."""
        with without_memory():
            made: Any = user_class(type(self.module))(self.plain_config())
        held: dict[int, Any] = {}  # what is tied stays so
        for name, tensor in self.tensors.items():
            empty = tensor_at(made, name)
            if empty is not None and id(tensor) not in held:
                held[id(tensor)] = self._plain_tensor(name, tuple(empty.shape), in_memory)
            if empty is not None:
                put_at(made, name, held[id(tensor)])
        return made.eval()  # type: ignore[no-any-return]  # a class of transformers

    def _plain_tensor(self, name: str, shape: tuple[int, ...], in_memory: bool) -> Tensor:
        live, dtype = self.tensors[name], self.module.dtype
        if name in self.layers and not in_memory:
            return stand_in_parameter(shape, dtype, partial(_dequantised_weight, self.layers[name], dtype))
        full = (
            _dequantised_weight(self.layers[name], dtype) if name in self.layers else live.detach().to("cpu", copy=True)
        )
        return nn.Parameter(full, requires_grad=False) if isinstance(live, nn.Parameter) else full

    def refuse_other(self, plain: nn.Module, place: str) -> None:
        """Raise BaseMismatchError naming layers that are not what quantising those of `plain` gives; some are compared.

        `place` is where `plain` comes from.
        """
        known = ModelTensors(plain).sources()
        names = list(self.layers)
        chosen = names[:: max(1, len(names) // _COMPARED)]
        wrong = []
        for name in chosen:
            full = known[name].local if name in known else None
            if full is None or not _is_quantised_from(self.layers[name], full):
                wrong.append(name)
        if wrong:
            raise BaseMismatchError(
                f"{listing(wrong, ', ')}: {len(wrong)} of {len(chosen)} layers that were compared are not those of "
                f"{place}, quantised; give the model that this one was quantised from with base=, or merge into what "
                "its weights stand for, with the errors of quantising, with dequantize=True"
            )


@torch.no_grad()
def _dequantised_weight(layer: Any, dtype: torch.dtype) -> Tensor:
    from bitsandbytes import functional

    weight = layer.weight
    if type(weight).__name__ == "Params4bit":
        full = functional.dequantize_4bit(weight.data, weight.quant_state)
    else:
        full = functional.int8_vectorwise_dequant(weight.data, _scales_of(layer).to(weight.device))
    return full.to("cpu", dtype)


@torch.no_grad()
def _is_quantised_from(layer: Any, full: Tensor) -> bool:
    """Whether quantising `full` as the layer was gives its codes, nearly all of them."""
    from bitsandbytes import functional

    weight = layer.weight
    if type(weight).__name__ == "Params4bit":
        state = weight.quant_state
        if tuple(full.shape) != tuple(state.shape):
            return False
        given = full.to(weight.device, state.dtype)
        codes = functional.quantize_4bit(given, blocksize=state.blocksize, quant_type=state.quant_type)[0]
        return _share_alike(_halves(weight.data), _halves(codes)) >= _ALIKE
    if tuple(full.shape) != tuple(weight.shape):
        return False
    codes = functional.int8_vectorwise_quant(full.to(weight.device, torch.float16))[0]
    return _share_alike(weight.data, codes) >= _ALIKE


def _halves(packed: Tensor) -> Tensor:
    """The codes, two of which are in a byte."""
    flat = packed.view(torch.uint8).flatten()
    return torch.cat([flat >> 4, flat & 15])


def _share_alike(one: Tensor, other: Tensor) -> float:
    return float((one == other).float().mean())


def _scales_of(layer: Any) -> Tensor:
    found = getattr(layer.weight, "SCB", None)
    scales: Tensor = layer.state.SCB if found is None else found
    return scales
