"""Finds the layers of a model that adapters change, and merges one layer by PEFT.

`adapted_layers` copies each layer to the meta device, where it takes no memory. `merge_layer`
copies such a copy once more, fills it with tensors, and lets PEFT merge it.
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
    """A layer with adapters, as a copy on the meta device, and the sources of its tensors.

    A source is a tensor of the live model. Its key identifies the tensor.

    Attributes:
        path: The path of the layer in the model with adapters.
        base_path: The path of the layer in the base model.
        module: The copy of the layer.
        placeholders: The meta tensors of `module`, by key of the source that each stands for.
        adapters: The names of the adapters to merge.
        weights: The factor of each adapter, or None: PEFT then merges one after the other.
        base: The sources of the base layer, by name relative to `base_path`.
        sources: The sources that the merge needs, once per tensor.
    """

    path: str
    base_path: str
    module: nn.Module
    placeholders: Mapping[int, Tensor]
    adapters: tuple[str, ...]
    weights: tuple[float, ...] | None
    base: Mapping[str, Source]
    sources: tuple[Source, ...]


def adapted_layers(view: View, names: Sequence[str], choice: MergeChoice) -> list[AdaptedLayer]:
    """Return the outermost layers of the model that an adapter in `names` changes.

    If `choice` names no adapters, the active adapters of each layer are merged.
    """
    modules: dict[str, nn.Module] = {}
    for path, _, module in walk_modules(view.module):
        modules[path] = unwrap(module)  # a wrapper and its module have the same path
    sources_by_module: dict[int, dict[str, Source]] = {}  # by id of the module, then by name in it
    for name, source in view.sources.items():
        path, _, last_name = name.rpartition(".")
        if path in modules:  # a hook may add entries to the state dict that belong to no module
            sources_by_module.setdefault(id(modules[path]), {})[last_name] = source

    base_sources = dict(view.base_sources())
    other_adapters = set(view.module.peft_config) - set(names)
    weights = dict(zip(names, choice.weights, strict=True)) if choice.weights else {}
    layers = []
    for path in _outermost_layers(modules):
        adapters = _adapters_on(modules[path], names if choice.adapters else None)
        if not adapters:
            continue
        placeholders = _Placeholders(sources_by_module, other_adapters)
        module = copy_layer(modules[path], placeholders.for_module)
        base_path = view.path_in_base(path)
        layer_base = _sources_below(base_path, base_sources)
        needed_sources = dict(placeholders.sources)
        if isinstance(module, ModulesToSaveWrapper) and not weights:
            # The trained copy replaces the base layer, so the tensors of the base are not read.
            for source in layer_base.values():
                needed_sources.pop(source.key, None)

        layer_weights = None
        if weights:
            layer_weights = tuple(weights[name] for name in adapters)
        layers.append(
            AdaptedLayer(
                path=path,
                base_path=base_path,
                module=module,
                placeholders=placeholders.tensors,
                adapters=tuple(adapters),
                weights=layer_weights,
                base=layer_base,
                sources=tuple(needed_sources.values()),
            )
        )

    return layers


def _outermost_layers(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the paths of PEFT layers that lie in no other PEFT layer."""
    outer_prefix = "\0"  # no path begins so
    for path, module in modules.items():  # a module comes before the modules in it
        is_layer = isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        if is_layer and not path.startswith(outer_prefix):
            outer_prefix = f"{path}."
            yield path


def _sources_below(path: str, sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return the sources of the module at `path`, by their names in it."""
    prefix = f"{path}."
    below = {}
    for name, source in sources.items():
        if name.startswith(prefix):
            below[name.removeprefix(prefix)] = source
    return below


class _Placeholders:
    """Makes meta tensors for the modules of one layer, and records which sources the layer needs.

    Attributes:
        tensors: The placeholders, by key of the source that each stands for.
        sources: The sources that the layer needs, by key: all but those of other adapters.
    """

    def __init__(
        self, sources_by_module: Mapping[int, Mapping[str, Source]], other_adapters: set[str]
    ) -> None:
        """Take the sources of all modules, by id of the module, then by name in it."""
        self._sources_by_module, self._other_adapters = sources_by_module, other_adapters
        self.tensors: dict[int, Tensor] = {}
        self.sources: dict[int, Source] = {}

    def for_module(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the placeholders for a module's own tensors, by name."""
        placeholders = {}
        for name, source in self._sources_by_module.get(id(module), {}).items():
            if self._other_adapters.isdisjoint(source.name.split(".")):
                self.sources.setdefault(source.key, source)
            if source.key not in self.tensors:
                self.tensors[source.key] = _placeholder(source)
            placeholders[name] = self.tensors[source.key]
        return placeholders


def _placeholder(source: Source) -> Tensor:
    empty = torch.empty(source.shape, dtype=wide_dtype(source.dtype), device="meta")
    return nn.Parameter(empty, requires_grad=False) if source.is_parameter else empty


def nested_layers(layer: Any) -> list[Any]:
    """Return a PEFT layer and the PEFT layers in it, the outermost first.

    PEFT nests them if several methods adapt one base layer.
    """
    layers = [layer]
    while isinstance(getattr(layers[-1], "base_layer", None), BaseTunerLayer):
        layers.append(layers[-1].base_layer)
    return layers


def _adapters_on(layer: Any, names: Sequence[str] | None) -> list[str]:
    """Return the adapters in `names` that the layer has, or its active adapters if None."""
    adapters: dict[str, None] = {}
    for tuner in nested_layers(layer):
        available = tuner._get_available_adapters()
        for name in tuner.active_adapters if names is None else names:
            if name in available:
                adapters[name] = None
    return list(adapters)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to compute with tensors of `dtype`.

    It is at least float32, or complex64 for complex numbers. Integers and booleans keep their
    dtype.
    """
    is_number = dtype.is_floating_point or dtype.is_complex
    return torch.promote_types(dtype, torch.float32) if is_number else dtype


def merge_layer(layer: AdaptedLayer, tensors: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Compute the tensors of the layer without adapters, by name in it.

    `tensors` are by key of their source, and may be modified. A tensor that is not in `tensors` is
    on the meta device, and so is what is computed from it. Floating-point results have the widest
    dtype in the layer, at least float32.

    If the layer has weights, each adapter is merged alone. The result is then the base plus the sum
    of weight * (base with the adapter - base).
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
        with_adapter = _merge_copy(layer, copies, (adapter,))
        for name, tensor in base.items():
            if tensor.is_floating_point():
                total[name] += (with_adapter[name] - tensor) * weight

    return total


def _merge_copy(
    layer: AdaptedLayer, tensors: Mapping[int, Tensor], adapters: Sequence[str]
) -> dict[str, Tensor]:
    """Fill a copy of the layer with `tensors`, and let PEFT merge it.

    Returns the tensors of the merged layer, by name.
    """
    values_by_placeholder = {}
    for key, placeholder in layer.placeholders.items():
        if key in tensors:
            values_by_placeholder[id(placeholder)] = tensors[key]

    def values_for(module: nn.Module) -> dict[str, Tensor]:
        values = {}
        for name, placeholder in {**module._parameters, **module._buffers}.items():
            if id(placeholder) in values_by_placeholder:
                values[name] = values_by_placeholder[id(placeholder)]
        return values

    with torch.no_grad():
        base_layer = _merge_by_peft(copy_layer(layer.module, values_for), list(adapters))
    parameters = dict(base_layer.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(base_layer.named_buffers(remove_duplicate=False))}


def _merge_by_peft(module: Any, adapters: list[str]) -> nn.Module:
    """Merge `adapters` into the layer, and return the module that replaces it in the base model."""
    if isinstance(module, ModulesToSaveWrapper):
        module._active_adapter = adapters[0]
    base_layer: nn.Module
    if hasattr(module, "unload_and_optionally_merge_module"):
        base_layer = module.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=adapters
        )
        return base_layer
    for layer in reversed(nested_layers(module)):
        layer.merge(safe_merge=False, adapter_names=adapters)
    base_layer = module.get_base_layer()
    return base_layer
