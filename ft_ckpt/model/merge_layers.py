"""Merges adapters into the layers they are on, one layer at a time, on copies: the live model is never touched.

What a merge computes is PEFT's own: a copy of its layer is given the tensors in float32 and told to merge. So every
method that PEFT can merge is merged here, and what it cannot merge is refused by name before a tensor moves.
"""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn

from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.wrappers import unwrap, walk_modules
from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.model.adapters import base_path, base_sources
from ft_ckpt.model.copy_layer import copy_layer, wide_dtype
from ft_ckpt.model.merge_choice import MergeChoice
from ft_ckpt.model.pretrained_files import is_quantised
from ft_ckpt.model.selection import View

_PEFT = str(Path(peft.__file__).parent)


@dataclass(frozen=True, eq=False)
class AdaptedLayer:
    """A layer with adapters on it, without its tensors."""

    path: str  # in the model with adapters
    base_path: str  # in the model without
    twin: nn.Module  # a copy of it whose tensors are on the meta device
    holders: Mapping[int, Tensor]  # these, by key
    shares: Mapping[str, float | None]  # of the adapters that are merged into it; None: as PEFT merges them, in order
    base: Mapping[str, Source]  # its own tensors, by name below `base_path`
    sources: tuple[Source, ...]  # what merging needs, once each


def adapted_layers(view: View, names: Sequence[str], choice: MergeChoice) -> list[AdaptedLayer]:
    """The outermost layers of the model in `view` into which some of the adapters `names` are to be merged."""
    modules: dict[str, nn.Module] = {}
    for path, _, module in walk_modules(view.module):
        modules[path] = unwrap(module)  # what is wrapped goes by the same path as what wraps it
    own: dict[int, dict[str, Source]] = {}
    for name, info in view.sources.items():
        path, _, last = name.rpartition(".")
        if path in modules:  # what state dicts list beside has a place of its own
            own.setdefault(id(modules[path]), {})[last] = info
    base, found = dict(base_sources(view)), []
    weights = dict(zip(names, choice.weights, strict=True)) if choice.weights else {}
    others = set(view.module.peft_config) - set(names)
    for path in _outermost_layers(modules):
        chosen = _adapters_on(modules[path], names if choice.adapters else None)
        if shares := {name: weights.get(name) for name in chosen}:
            used, start = _Holders(own, others), base_path(view, path)
            twin = copy_layer(modules[path], used.of_module)
            here = {n.removeprefix(f"{start}."): info for n, info in base.items() if n.startswith(f"{start}.")}
            if isinstance(twin, ModulesToSaveWrapper) and not weights:  # what is replaced need not be there
                used.drop(here.values())
            found.append(AdaptedLayer(path, start, twin, used.made, shares, here, tuple(used.sources.values())))
    return found


class _Holders:
    """Gives the modules of a layer tensors on the meta device, and notes which ones it needs."""

    def __init__(self, own: Mapping[int, Mapping[str, Source]], others: set[str]) -> None:
        self.own, self.others = own, others  # by id of the module; names of adapters that are left out
        self.made: dict[int, Tensor] = {}
        self.sources: dict[int, Source] = {}

    def of_module(self, module: nn.Module) -> dict[str, Tensor]:
        """What stands for the tensors of a module, by name."""
        found = self.own.get(id(module), {})
        for info in found.values():
            if self.others.isdisjoint(info.name.split(".")):
                self.sources.setdefault(info.key, info)
        return {name: self.made.setdefault(info.key, _holder_for(info)) for name, info in found.items()}

    def drop(self, infos: Any) -> None:
        """These are not needed."""
        for info in infos:
            self.sources.pop(info.key, None)


def _holder_for(info: Source) -> Tensor:
    empty = torch.empty(info.shape, dtype=wide_dtype(info.dtype), device="meta")
    return nn.Parameter(empty, requires_grad=False) if info.is_parameter else empty


def _outermost_layers(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    above = "\0"
    for path, module in modules.items():
        if not path.startswith(above) and isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            above = f"{path}."
            yield path


def _nested_layers(layer: Any) -> list[Any]:
    """A layer of PEFT's and those directly below it, as one layer may have several methods on it."""
    chain = [layer]
    while isinstance(inner := getattr(chain[-1], "base_layer", None), BaseTunerLayer):
        chain.append(inner)
    return chain


def _adapters_on(layer: Any, names: Sequence[str] | None) -> list[str]:
    """Those of `names` that are on the layer; with None those that are active there."""
    found: dict[str, None] = {}
    for one in _nested_layers(layer):
        there = one._get_available_adapters()
        found |= dict.fromkeys(name for name in (one.active_adapters if names is None else names) if name in there)
    return list(found)


# Refusals


def refuse_quantised(base: Any) -> None:
    """Raise SelectionError for a base whose weights are quantised."""
    if getattr(base, "config", None) is not None and is_quantised(base, base.config):
        raise SelectionError(
            f"{type(base).__name__}: its weights are quantised, and merging would quantise them once more; merge into "
            "the model that was quantised: save with adapter_only=True, then ft_ckpt.merge(adapter, out, base=...)"
        )


def refuse_unmergeable(view: View, names: Sequence[str], layers: Sequence[AdaptedLayer]) -> None:
    """Raise SelectionError naming everything that keeps the adapters `names` from being merged."""
    problems = [f"adapter {name}: {why}" for name in names if (why := _why_not(view.module.peft_config[name]))]
    problems += [f"{layer.path}: {why}" for layer in layers if (why := _why_layer_not(layer))]
    problems = problems or _unused_tensors(view, names, layers)
    if problems:
        raise SelectionError(
            f"{listing(problems)}: cannot be merged; keep it an adapter (adapter_only=True), which ft_ckpt.load_model "
            "and PEFT put onto the base"
        )


def _why_not(config: Any) -> str | None:
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning or config.is_adaption_prompt:
        return f"{method} acts on inputs, not on weights"
    if getattr(config, "layer_replication", None):
        return "layer_replication has one weight stand for several layers"
    return None


def _why_layer_not(layer: AdaptedLayer) -> str | None:
    for one in _nested_layers(layer.twin):
        if one.disable_adapters:
            return "its adapters are switched off (call enable_adapter_layers())"
        if isinstance(one, BaseTunerLayer) and type(one).merge is BaseTunerLayer.merge:
            return f"PEFT has no merge for {type(one).__module__.split('.')[-2]} ({type(one).__name__})"
    if isinstance(layer.twin, AuxiliaryTrainingWrapper) and len(layer.shares) > 1 and None in layer.shares.values():
        names = ", ".join(layer.shares)
        return f"trained by several adapters ({names}), of which one alone can replace it; give each a weight"
    try:
        made = merge_layer(layer, {})
    except Exception as error:  # noqa: BLE001 - whatever PEFT raises is its answer
        return f"{type(error).__name__}: {error}" if _is_refusal(error) else None
    shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
    wrong = [f"{n} is {shapes.get(n)}, not {one.shape}" for n, one in layer.base.items() if shapes.get(n) != one.shape]
    return f"once merged, {listing(wrong, ', ')}" if wrong else None


def _is_refusal(error: Exception) -> bool:
    """Whether PEFT raised it, not torch for want of data."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(_PEFT) and str(last.line).startswith("raise")


def _unused_tensors(view: View, names: Sequence[str], layers: Sequence[AdaptedLayer]) -> list[str]:
    """Tensors of the adapters `names` that no layer takes in."""
    used = {source.key for layer in layers for source in layer.sources}
    used |= {info.key for layer in layers for info in layer.base.values()}
    used |= {info.key for _, info in base_sources(view)}
    others = set(view.module.peft_config) - set(names)
    own = [name for name in view.sources if others.isdisjoint(name.split("."))]
    return [f"{name}: no layer takes it in" for name in own if view.sources[name].key not in used]


# Merging


def merge_layer(layer: AdaptedLayer, tensors: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """The tensors of the plain layer, by name below it, at least float32. What is given, by key, may be overwritten.

    What is not given is on the meta device. With weights, each adapter is merged by itself, and the differences from
    the base are added up.
    """
    wide = {key: tensor.to(wide_dtype(tensor.dtype)) for key, tensor in tensors.items()}
    if None in layer.shares.values():
        return _merge_copy(layer, wide, list(layer.shares))
    own = {name: wide.get(info.key, layer.holders[info.key]) for name, info in layer.base.items()}
    total = {name: tensor.clone() for name, tensor in own.items()}
    for adapter, share in layer.shares.items():
        fresh = {key: tensor.clone() for key, tensor in wide.items()}
        merged = _merge_copy(layer, fresh, [adapter])
        for name in (name for name, tensor in own.items() if tensor.is_floating_point()):
            total[name] += (merged[name] - own[name]) * (share or 0.0)
    return total


def _merge_copy(layer: AdaptedLayer, tensors: Mapping[int, Tensor], adapters: list[str]) -> dict[str, Tensor]:
    filled = {id(holder): tensors[key] for key, holder in layer.holders.items() if key in tensors}

    def fill(module: nn.Module) -> dict[str, Tensor]:
        own = {**module._parameters, **module._buffers}
        return {name: filled[id(holder)] for name, holder in own.items() if id(holder) in filled}

    with torch.no_grad():
        merged = _told_to_merge(copy_layer(layer.twin, fill), adapters)
    return {
        **dict(merged.named_parameters(remove_duplicate=False)),
        **dict(merged.named_buffers(remove_duplicate=False)),
    }


def _told_to_merge(twin: Any, adapters: list[str]) -> nn.Module:
    """The plain layer, once PEFT has merged `adapters` into it."""
    if isinstance(twin, ModulesToSaveWrapper):
        twin._active_adapter = adapters[0]
    if hasattr(twin, "unload_and_optionally_merge_module"):
        merged: nn.Module = twin.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=adapters
        )
        return merged
    for one in reversed(_nested_layers(twin)):
        one.merge(safe_merge=False, adapter_names=adapters)
    plain: nn.Module = twin.get_base_layer()
    return plain
