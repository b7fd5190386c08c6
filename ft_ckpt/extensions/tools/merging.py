"""Merges adapters into their base: one layer at a time, on a copy, by PEFT's own merge.

A merged layer is a conversion group (`entries.Group`): its inputs are the tensors of the base and
the adapters, its outputs those of the plain layer, computed in at least float32 and rounded once to
the stored dtype.
"""

import copy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn

from ft_ckpt.errors import IncompleteError, NotAnAdapterError, SelectionError, listing
from ft_ckpt.formats import all_finite, is_within
from ft_ckpt.model import (
    Entry,
    Group,
    MergeChoice,
    Part,
    View,
    active_adapters,
    base_path,
    base_sources,
    base_view,
    has_adapters,
    is_quantised,
    model_part,
    nested_configs,
    refuse_merged,
)
from ft_ckpt.ranks import (
    Source,
    is_engine_attribute,
    shallow_copy,
    unwrap,
    user_class,
    walk_modules,
)

_TORCH_FIELDS = frozenset(vars(nn.Module()))
# replacements for a module's own tensors, by name
Owned = Callable[[nn.Module], Mapping[str, Tensor]]


def copy_layer(
    module: nn.Module, owned: Owned, made: dict[int, nn.Module] | None = None
) -> nn.Module:
    """A copy of `module` and of all modules that it refers to, in eval mode, with the tensors that
    `owned` returns.

    Other tensors are shared if they are on the host or meta, else copied to the host. `made`:
    copies by id of the original, so that a module that occurs twice is copied once.
    """
    made = {} if made is None else made
    module = unwrap(module)
    if id(module) in made:
        return made[id(module)]
    twin: nn.Module = object.__new__(user_class(type(module)))
    nn.Module.__init__(twin)
    made[id(module)] = twin
    given = owned(module)
    for name, value in vars(module).items():
        is_patched = is_engine_attribute(name, value) or getattr(value, "__self__", None) is module
        if name not in _TORCH_FIELDS and name not in given and not is_patched:
            vars(twin)[name] = _copy_value(value, owned, made)
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else copy_layer(child, owned, made)
    for name in dict.fromkeys(
        [*module._parameters, *(name for name in given if name not in module._buffers)]
    ):
        tensor: Any = given.get(name, module._parameters.get(name))
        # `_merge_copy` finds it by identity
        is_placeholder = isinstance(tensor, nn.Parameter) and tensor.is_meta
        if tensor is not None and not is_placeholder:
            tensor = nn.Parameter(_on_host(tensor), requires_grad=False)
        twin._parameters[name] = tensor
    for name, buffer in module._buffers.items():
        twin._buffers[name] = (
            given[name] if name in given else None if buffer is None else _on_host(buffer)
        )
    return twin.eval()


def _copy_value(value: Any, owned: Owned, made: dict[int, nn.Module]) -> Any:
    if isinstance(value, nn.Module):
        return copy_layer(value, owned, made)
    if isinstance(value, Tensor):
        return _on_host(value)
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({key: _copy_value(one, owned, made) for key, one in value.items()})
        return copied
    if type(value) in (list, tuple, set):
        return type(value)(_copy_value(one, owned, made) for one in value)
    return value


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.is_meta else tensor.detach().cpu()


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: at least float32 for floating-point and complex numbers; other
    dtypes are unchanged.
    """
    is_number = dtype.is_floating_point or dtype.is_complex
    return torch.promote_types(dtype, torch.float32) if is_number else dtype


_PEFT = str(Path(peft.__file__).parent)


@dataclass(frozen=True, eq=False)
class AdaptedLayer:
    """A layer with adapters, as a copy on the meta device, and the sources of its tensors."""

    path: str  # in the model with adapters
    base_path: str  # in the base model
    twin: nn.Module  # a copy with its tensors on the meta device
    holders: Mapping[int, Tensor]  # the tensors of `twin`, by key of their source
    # weight by adapter to merge; None: PEFT merges them one after the other
    shares: Mapping[str, float | None]
    base: Mapping[str, Source]  # the tensors of the base layer, by name relative to `base_path`
    sources: tuple[Source, ...]  # all tensors that merging needs, each once


def adapted_layers(view: View, names: Sequence[str], choice: MergeChoice) -> list[AdaptedLayer]:
    """The outermost layers of the model in `view` that any of the adapters `names` is merged
    into.
    """
    modules: dict[str, nn.Module] = {}
    for path, _, module in walk_modules(view.module):
        modules[path] = unwrap(module)  # a wrapper and its module have the same path
    own: dict[int, dict[str, Source]] = {}
    for name, info in view.sources.items():
        path, _, last = name.rpartition(".")
        if path in modules:  # not for entries that hooks add to state dicts
            own.setdefault(id(modules[path]), {})[last] = info
    base, found = dict(base_sources(view)), []
    weights = dict(zip(names, choice.weights, strict=True)) if choice.weights else {}
    others = set(view.module.peft_config) - set(names)
    for path in _outermost_layers(modules):
        chosen = _adapters_on(modules[path], names if choice.adapters else None)
        if shares := {name: weights.get(name) for name in chosen}:
            used, start = _Holders(own, others), base_path(view, path)
            twin = copy_layer(modules[path], used.of_module)
            here = {
                n.removeprefix(f"{start}."): info
                for n, info in base.items()
                if n.startswith(f"{start}.")
            }
            # so its base tensors are not needed
            is_replaced = isinstance(twin, ModulesToSaveWrapper) and not weights
            unused = {info.key for info in here.values()} if is_replaced else set()
            needed = tuple(info for key, info in used.sources.items() if key not in unused)
            found.append(AdaptedLayer(path, start, twin, used.made, shares, here, needed))
    return found


class _Holders:
    """Replaces the tensors of a layer's modules by meta tensors, and records which sources the
    layer needs.
    """

    def __init__(self, own: Mapping[int, Mapping[str, Source]], others: set[str]) -> None:
        # by id of the module; names of adapters that are left out
        self.own, self.others = own, others
        self.made: dict[int, Tensor] = {}
        self.sources: dict[int, Source] = {}

    def of_module(self, module: nn.Module) -> dict[str, Tensor]:
        """The placeholders for the tensors of a module, by name."""
        found = self.own.get(id(module), {})
        for info in found.values():
            if self.others.isdisjoint(info.name.split(".")):
                self.sources.setdefault(info.key, info)
        return {
            name: self.made.setdefault(info.key, _holder_for(info)) for name, info in found.items()
        }


def _holder_for(info: Source) -> Tensor:
    empty = torch.empty(info.shape, dtype=wide_dtype(info.dtype), device="meta")
    return nn.Parameter(empty, requires_grad=False) if info.is_parameter else empty


def _outermost_layers(modules: Mapping[str, nn.Module]) -> Iterator[str]:
    above = "\0"
    for path, module in modules.items():
        if not path.startswith(above) and isinstance(
            module, (BaseTunerLayer, AuxiliaryTrainingWrapper)
        ):
            above = f"{path}."
            yield path


def _nested_layers(layer: Any) -> list[Any]:
    """A PEFT layer and the PEFT layers nested in it, because several methods may adapt one base
    layer.
    """
    chain = [layer]
    while isinstance(inner := getattr(chain[-1], "base_layer", None), BaseTunerLayer):
        chain.append(inner)
    return chain


def _adapters_on(layer: Any, names: Sequence[str] | None) -> list[str]:
    """The adapters in `names` that are on the layer; None: its active adapters."""
    found: dict[str, None] = {}
    for tuner in _nested_layers(layer):
        on_layer = tuner._get_available_adapters()
        chosen = tuner.active_adapters if names is None else names
        found |= dict.fromkeys(name for name in chosen if name in on_layer)
    return list(found)


# Refusals


def refuse_quantised(base: Any) -> None:
    """Raise SelectionError for a base whose weights are quantised."""
    if getattr(base, "config", None) is not None and is_quantised(base, base.config):
        raise SelectionError(
            f"{type(base).__name__}: its weights are quantised, and merging would quantise them "
            "once more; save the adapter with adapter_only=True, then merge it into the model that "
            "was quantised: ft_ckpt.merge(adapter, out, base=...)"
        )


def refuse_unmergeable(view: View, names: Sequence[str], layers: Sequence[AdaptedLayer]) -> None:
    """Raise SelectionError naming the reasons why the adapters `names` cannot be merged."""
    problems = [
        f"adapter {name}: {why}"
        for name in names
        if (why := _why_not(view.module.peft_config[name]))
    ]
    problems += [f"{layer.path}: {why}" for layer in layers if (why := _why_layer_not(layer))]
    problems = problems or _unused_tensors(view, names, layers)
    if problems:
        raise SelectionError(
            f"{listing(problems)}: cannot be merged; keep it an adapter (adapter_only=True), which "
            "ft_ckpt.load_model and PEFT put onto the base"
        )


def _why_not(config: Any) -> str | None:
    method = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning or config.is_adaption_prompt:
        return f"{method} acts on inputs, not on weights"
    if getattr(config, "layer_replication", None):
        return "layer_replication has one weight stand for several layers"
    return None


def _why_layer_not(layer: AdaptedLayer) -> str | None:
    for tuner in _nested_layers(layer.twin):
        if tuner.disable_adapters:
            return "its adapters are switched off (call enable_adapter_layers())"
        if isinstance(tuner, BaseTunerLayer) and type(tuner).merge is BaseTunerLayer.merge:
            return (
                f"PEFT has no merge for {type(tuner).__module__.split('.')[-2]} "
                f"({type(tuner).__name__})"
            )
    if (
        isinstance(layer.twin, AuxiliaryTrainingWrapper)
        and len(layer.shares) > 1
        and None in layer.shares.values()
    ):
        names = ", ".join(layer.shares)
        return (
            f"trained by several adapters ({names}), of which only one can replace it; give "
            "each a weight"
        )
    try:
        made = merge_layer(layer, {})
    except Exception as error:  # noqa: BLE001 - a refusal by PEFT, or an error of torch on the meta device
        last = traceback.extract_tb(error.__traceback__)[-1]
        is_refusal = last.filename.startswith(_PEFT) and str(last.line).startswith("raise")
        return f"{type(error).__name__}: {error}" if is_refusal else None
    shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
    wrong = [
        f"{n} is {shapes.get(n)}, not {one.shape}"
        for n, one in layer.base.items()
        if shapes.get(n) != one.shape
    ]
    return f"once merged, {listing(wrong, ', ')}" if wrong else None


def _unused_tensors(view: View, names: Sequence[str], layers: Sequence[AdaptedLayer]) -> list[str]:
    """Tensors of the adapters `names` that no layer uses."""
    used = {source.key for layer in layers for source in layer.sources}
    used |= {info.key for layer in layers for info in layer.base.values()}
    used |= {info.key for _, info in base_sources(view)}
    others = set(view.module.peft_config) - set(names)
    own = [name for name in view.sources if others.isdisjoint(name.split("."))]
    return [f"{name}: used by no layer" for name in own if view.sources[name].key not in used]


# Merging


def merge_layer(layer: AdaptedLayer, tensors: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """The tensors of the plain layer, by name in it, in the widest dtype among the layer's and at
    least float32.

    `tensors`, by key of their source, may be modified. Missing tensors are on the meta device. With
    weights, each adapter is merged alone, and the weighted differences from the base are summed.
    """
    floating = [holder.dtype for holder in layer.holders.values() if holder.is_floating_point()]
    dtype = reduce(torch.promote_types, floating, torch.float32)
    wide = {}
    for key, tensor in {**layer.holders, **tensors}.items():
        wide[key] = tensor.to(dtype if tensor.is_floating_point() else wide_dtype(tensor.dtype))
    if None in layer.shares.values():
        return _merge_copy(layer, wide, list(layer.shares))
    own = {name: wide[info.key] for name, info in layer.base.items()}
    total = {name: tensor.clone() for name, tensor in own.items()}
    for adapter, share in layer.shares.items():
        fresh = {key: tensor.clone() for key, tensor in wide.items()}
        merged = _merge_copy(layer, fresh, [adapter])
        for name in (name for name, tensor in own.items() if tensor.is_floating_point()):
            total[name] += (merged[name] - own[name]) * (share or 0.0)
    return total


def _merge_copy(
    layer: AdaptedLayer, tensors: Mapping[int, Tensor], adapters: list[str]
) -> dict[str, Tensor]:
    filled = {id(holder): tensors[key] for key, holder in layer.holders.items() if key in tensors}

    def fill(module: nn.Module) -> dict[str, Tensor]:
        own = {**module._parameters, **module._buffers}
        return {name: filled[id(holder)] for name, holder in own.items() if id(holder) in filled}

    with torch.no_grad():
        merged = _merge_by_peft(copy_layer(layer.twin, fill), adapters)
    return {
        **dict(merged.named_parameters(remove_duplicate=False)),
        **dict(merged.named_buffers(remove_duplicate=False)),
    }


def _merge_by_peft(twin: Any, adapters: list[str]) -> nn.Module:
    """The plain layer after PEFT has merged `adapters` into it."""
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


# keys of computed tensors; keys of live tensors are object ids or negative
_new_keys = count(1 << 40)


@dataclass(frozen=True, eq=False)
class _BasePlan:
    """The merged base, and the origins of the tensors with new keys."""

    view: View
    # (layer, tensor name in it), if merged
    made: dict[int, tuple[AdaptedLayer, str]] = field(default_factory=dict)
    # the live tensor, if it was tied to a merged one
    moved: dict[int, Source] = field(default_factory=dict)
    # names that were tied, and are merged differently in each place
    split: tuple[tuple[str, ...], ...] = ()


def merged_part(view: View, *, dtype: str, choice: MergeChoice) -> Part:
    """The part for the base of `view` with its adapters merged into it.

    By default the active adapters are merged, as the live model applies them. A tied tensor that an
    adapter changes under one of its names only is stored once for each name. Raises
    NotAnAdapterError without adapters, SelectionError when an adapter is unknown or cannot be
    merged, or none is active.
    """
    if not has_adapters(view.module):
        raise NotAnAdapterError(
            f"merged: {type(view.module).__name__} has no PEFT adapter; leave "
            "merged= out to save it as it is"
        )
    refuse_merged(view.module)
    refuse_quantised(base_view(view).module)
    names = _chosen_adapters(view, choice)
    layers = adapted_layers(view, names, choice)
    refuse_unmergeable(view, names, layers)
    plan = _plan_base(base_view(view), layers)
    part = model_part(plan.view, "", "", dtype)
    _refuse_lost(plan, part)
    entries = _merged_entries(part.entries, plan)
    used = {source.key for entry in entries for source in entry.sources}
    omitted = tuple(source for source in view.sources.values() if source.key not in used)
    left = [name for name in view.module.peft_config if name not in names]
    notes = [f"adapter {', '.join(names)}: merged into {len(layers)} layers"]
    notes += [f"adapter {', '.join(left)}: not merged, left out"] if left else []
    notes += [
        f"{', '.join(names)}: tied, merged differently in each place, stored once each"
        for names in plan.split
    ]
    return replace(part, entries=entries, omitted=omitted, notes=(*part.notes, *notes))


def _refuse_lost(plan: _BasePlan, part: Part) -> None:
    """Raise SelectionError for tensors that differ once merged, of which the class stores one
    only.
    """
    stored = {source.key for entry in part.entries for source in entry.sources}
    for names in plan.split:
        if any(plan.view.sources[name].key not in stored for name in names):
            raise SelectionError(
                f"{', '.join(names)}: tied by the class {part.module.__class__.__name__}, and the "
                "adapter changes it under one of its names only; cannot be merged, keep it an "
                "adapter (adapter_only=True)"
            )


def _chosen_adapters(view: View, choice: MergeChoice) -> list[str]:
    known = list(view.module.peft_config)
    names = list(choice.adapters) or active_adapters(view.module)
    if unknown := [name for name in names if name not in known]:
        raise SelectionError(
            f"adapter {', '.join(unknown)}: not on the model, which has {', '.join(known)}"
        )
    if not names:
        raise SelectionError(
            f"merged: none of the adapters {', '.join(known)} is active; call set_adapter() first"
        )
    return names


def _plan_base(base: View, layers: Sequence[AdaptedLayer]) -> _BasePlan:
    """Plan the merged base: new keys for merged tensors and tensors tied to them."""
    places = {f"{layer.base_path}.{name}": (layer, name) for layer in layers for name in layer.base}
    plan, sources, split = _BasePlan(base), dict(base.sources), []
    tied: dict[int, list[str]] = {}
    for name, info in base.sources.items():
        tied.setdefault(info.key, []).append(name)
    for names in (group for group in tied.values() if any(name in places for name in group)):
        kinds = {_kind_of_merge(places.get(name)) for name in names}
        shared = next(_new_keys) if len(kinds) == 1 and None not in kinds else None
        for name in names:
            key = next(_new_keys) if shared is None else shared
            sources[name] = replace(base.sources[name], key=key)
            if name in places:
                plan.made[key] = places[name]
            else:
                plan.moved[key] = base.sources[name]
        split += [] if shared is not None or len(names) == 1 else [names]
    module = _untied_model(base.module) if split else base.module
    return replace(plan, view=View(module, sources, base.extra), split=tuple(map(tuple, split)))


def _kind_of_merge(place: tuple[AdaptedLayer, str] | None) -> Any:
    """A value that is equal for tied tensors that stay equal when merged; None for a tensor that is
    not merged.
    """
    if place is None or not isinstance(
        place[0].twin, (AuxiliaryTrainingWrapper, TrainableTokensLayer)
    ):
        return place and (id(place[0]), place[1])
    layer, name = place
    return (
        type(layer.twin),
        name,
        frozenset(source.key for source in layer.sources),
        tuple(layer.shares.items()),
    )


def _untied_model(module: Any) -> Any:
    """The model with a config that ties no embeddings; the live model keeps its config."""
    untied = shallow_copy(module)
    untied.config = copy.deepcopy(module.config)
    for config in (untied.config, *nested_configs(untied.config)):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    return untied


def _merged_entries(entries: Sequence[Entry], plan: _BasePlan) -> tuple[Entry, ...]:
    """The entries, with groups that compute the merged tensors."""
    units: dict[Any, list[Entry]] = {}
    for entry in entries:
        if (unit := _unit_of(entry, plan)) is not None:
            units.setdefault(unit, []).append(entry)
    groups = {unit: _merging_group(of_unit, plan) for unit, of_unit in units.items()}
    merged = []
    for entry in entries:
        if (group := groups.get(_unit_of(entry, plan))) is not None:
            merged.append(entry._replace(source=None, group=group))
        elif entry.source is not None and entry.source.key in plan.moved:
            merged.append(entry._replace(source=plan.moved[entry.source.key]))
        else:
            merged.append(entry)
    return tuple(merged)


def _unit_of(entry: Entry, plan: _BasePlan) -> Any:
    """The conversion or layer that computes the entry; None if merging does not change it."""
    if entry.group is not None:
        is_changed = any(
            source.key in plan.made or source.key in plan.moved for source in entry.group.sources
        )
        return entry.group if is_changed else None
    return (
        plan.made[entry.source.key][0]
        if entry.source is not None and entry.source.key in plan.made
        else None
    )


def _merging_group(entries: Sequence[Entry], plan: _BasePlan) -> Group:
    """The group that computes `entries` of one conversion or layer: it merges, then converts."""
    inner, dtypes = entries[0].group, {entry.name: entry.dtype for entry in entries}
    wanted = [
        source
        for source in (inner.sources if inner else (e.source for e in entries))
        if source is not None
    ]
    layers = {
        id(made[0]): made[0] for source in wanted if (made := plan.made.get(source.key)) is not None
    }
    plain = [plan.moved.get(source.key, source) for source in wanted if source.key not in plan.made]
    sources = {
        one.key: one
        for one in (*plain, *(one for layer in layers.values() for one in layer.sources))
    }

    def merge(full: dict[str, Tensor]) -> dict[str, Tensor]:
        held = {key: full.pop(source.name) for key, source in sources.items()}
        merged = {
            place: merge_layer(layer, {source.key: held[source.key] for source in layer.sources})
            for place, layer in layers.items()
        }
        given = {}
        for source in wanted:
            if source.key in plan.made:
                layer, name = plan.made[source.key]
                given[source.name] = merged[id(layer)][name]
            else:
                given[source.name] = held[plan.moved.get(source.key, source).key]
        held.clear()
        merged.clear()
        stored = (
            inner.convert(given)
            if inner
            else {e.name: given[e.source.name] for e in entries if e.source}
        )
        return {name: _rounded(name, stored.pop(name), dtype) for name, dtype in dtypes.items()}

    return Group(tuple(sources.values()), merge)


def _rounded(name: str, merged: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in the stored dtype. Raises IncompleteError for NaN and infinity."""
    rounded = merged.detach().to(dtype).contiguous()
    if rounded.device.type == "meta":
        raise IncompleteError(
            f"{name}: merging needs a tensor that is missing; nothing is committed"
        )
    if not is_within(merged.detach(), dtype) and not all_finite(rounded):
        raise IncompleteError(
            f"{name}: merging gives NaN, infinity or values beyond {dtype}; nothing is committed. "
            "Is the adapter damaged?"
        )
    return rounded
