"""The layers of a model that adapters are merged into, and the merge of one layer by PEFT.

A layer is copied to the meta device. To merge it, a second copy gets the tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn

from ft_ckpt.extensions.tools.merging.layer_copy import copy_layer
from ft_ckpt.model.tensors import MergeChoice, View
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import unwrap, walk_modules


@dataclass(frozen=True, eq=False)
class AdaptedLayer:
    """A layer with adapters, as a copy on the meta device, and the sources of its tensors."""

    path: str  # in the model with adapters
    base_path: str  # in the base model
    module: nn.Module  # the copy
    placeholders: Mapping[int, Tensor]  # the tensors of `module`, by key of their source
    adapters: tuple[str, ...]  # to merge
    weights: tuple[float, ...] | None  # of `adapters`; None: PEFT merges one after the other
    base: Mapping[str, Source]  # the tensors of the base layer, by name relative to `base_path`
    sources: tuple[Source, ...]  # all tensors that merging needs, once per tensor


def adapted_layers(view: View, names: Sequence[str], choice: MergeChoice) -> list[AdaptedLayer]:
    """Return the outermost layers of the model that an adapter in `names` is merged into."""
    modules: dict[str, nn.Module] = {}
    for path, _, module in walk_modules(view.module):
        modules[path] = unwrap(module)  # a wrapper and its module have the same path
    sources: dict[int, dict[str, Source]] = {}  # by id of their module, and by name in it
    for name, source in view.sources.items():
        path, _, last_name = name.rpartition(".")
        if path in modules:  # not for entries that hooks add to state dicts
            sources.setdefault(id(modules[path]), {})[last_name] = source
    base = dict(view.base_sources())
    left_out = set(view.module.peft_config) - set(names)
    weights = dict(zip(names, choice.weights, strict=True)) if choice.weights else {}
    layers = []
    for path in _outermost_layers(modules):
        adapters = _adapters_on(modules[path], names if choice.adapters else None)
        if not adapters:
            continue
        placeholders = _Placeholders(sources, left_out)
        module = copy_layer(modules[path], placeholders.of_module)
        start = view.path_in_base(path)
        layer_base = _below(start, base)
        needed = dict(placeholders.sources)
        if isinstance(module, ModulesToSaveWrapper) and not weights:
            for source in layer_base.values():  # replaced, so not needed
                needed.pop(source.key, None)
        layers.append(
            AdaptedLayer(
                path,
                start,
                module,
                placeholders.tensors,
                tuple(adapters),
                tuple(weights[name] for name in adapters) if weights else None,
                layer_base,
                tuple(needed.values()),
            )
        )
    return layers


def _below(path: str, sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return the tensors in the module at `path`, by their names in it."""
    prefix = f"{path}."
    below = {}
    for name, source in sources.items():
        if name.startswith(prefix):
            below[name.removeprefix(prefix)] = source
    return below


class _Placeholders:
    """Replaces tensors of a layer's modules by meta tensors, and records the sources it needs."""

    def __init__(self, sources: Mapping[int, Mapping[str, Source]], left_out: set[str]) -> None:
        """Take `sources` by id of the module and name, and the adapters `left_out` by name."""
        self._all_sources, self._left_out = sources, left_out
        self.tensors: dict[int, Tensor] = {}  # by key of their source
        self.sources: dict[int, Source] = {}  # that the layer needs, by key

    def of_module(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the placeholders for the tensors of a module, by name."""
        tensors = {}
        for name, source in self._all_sources.get(id(module), {}).items():
            if self._left_out.isdisjoint(source.name.split(".")):
                self.sources.setdefault(source.key, source)
            if source.key not in self.tensors:
                self.tensors[source.key] = _placeholder(source)
            tensors[name] = self.tensors[source.key]
        return tensors


def _placeholder(source: Source) -> Tensor:
    empty = torch.empty(source.shape, dtype=wide_dtype(source.dtype), device="meta")
    return nn.Parameter(empty, requires_grad=False) if source.is_parameter else empty


def _outermost_layers(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    outer = "\0"  # before any path
    for path, module in modules.items():
        is_layer = isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        if is_layer and not path.startswith(outer):
            outer = f"{path}."
            yield path


def nested_layers(layer: Any) -> list[Any]:
    """Return a PEFT layer and the PEFT layers in it: several methods may adapt one base layer."""
    layers = [layer]
    while isinstance(getattr(layers[-1], "base_layer", None), BaseTunerLayer):
        layers.append(layers[-1].base_layer)
    return layers


def _adapters_on(layer: Any, names: Sequence[str] | None) -> list[str]:
    """Return the adapters in `names` that are on the layer; for None, its active adapters."""
    adapters: dict[str, None] = {}
    for tuner in nested_layers(layer):
        available = tuner._get_available_adapters()
        for name in tuner.active_adapters if names is None else names:
            if name in available:
                adapters[name] = None
    return list(adapters)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: at least float32 for floating-point and complex numbers.

    Other dtypes are unchanged.
    """
    is_number = dtype.is_floating_point or dtype.is_complex
    return torch.promote_types(dtype, torch.float32) if is_number else dtype


def merge_layer(layer: AdaptedLayer, tensors: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Compute the tensors of the plain layer, by name in it.

    The results have the widest dtype of the layer and at least float32. `tensors`, by key of their
    source, may be modified. Missing tensors are on the meta device. With weights, each adapter is
    merged alone, and the weighted differences from the base are summed.
    """
    all_tensors = {**layer.placeholders, **tensors}
    dtypes = [tensor.dtype for tensor in layer.placeholders.values() if tensor.is_floating_point()]
    float_dtype = reduce(torch.promote_types, dtypes, torch.float32)
    wide = {}
    for key, tensor in all_tensors.items():
        dtype = float_dtype if tensor.is_floating_point() else wide_dtype(tensor.dtype)
        wide[key] = tensor.to(dtype)
    if layer.weights is None:
        return _merge_copy(layer, wide, layer.adapters)
    base = {name: wide[source.key] for name, source in layer.base.items()}
    total = {name: tensor.clone() for name, tensor in base.items()}
    for adapter, weight in zip(layer.adapters, layer.weights, strict=True):
        copies = {key: tensor.clone() for key, tensor in wide.items()}
        merged = _merge_copy(layer, copies, (adapter,))
        for name, tensor in base.items():
            if tensor.is_floating_point():
                total[name] += (merged[name] - tensor) * weight
    return total


def _merge_copy(
    layer: AdaptedLayer, tensors: Mapping[int, Tensor], adapters: Sequence[str]
) -> dict[str, Tensor]:
    """Return the tensors of the plain layer after PEFT has merged a copy that has `tensors`."""
    by_placeholder = {}
    for key, placeholder in layer.placeholders.items():
        if key in tensors:
            by_placeholder[id(placeholder)] = tensors[key]

    def filled(module: nn.Module) -> dict[str, Tensor]:
        replacements = {}
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if id(tensor) in by_placeholder:
                replacements[name] = by_placeholder[id(tensor)]
        return replacements

    with torch.no_grad():
        plain = _merge_by_peft(copy_layer(layer.module, filled), list(adapters))
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(plain.named_buffers(remove_duplicate=False))}


def _merge_by_peft(module: Any, adapters: list[str]) -> nn.Module:
    """Return the plain layer after PEFT has merged `adapters` into it."""
    if isinstance(module, ModulesToSaveWrapper):
        module._active_adapter = adapters[0]
    if hasattr(module, "unload_and_optionally_merge_module"):
        merged: nn.Module = module.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=adapters
        )
        return merged
    for layer in reversed(nested_layers(module)):
        layer.merge(safe_merge=False, adapter_names=adapters)
    plain: nn.Module = module.get_base_layer()
    return plain
