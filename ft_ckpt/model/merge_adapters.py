"""The part of a save that stores adapters merged into their base: one plain model.

A merged layer is a conversion group (`entries.Group`): its sources are the base's tensors and the adapters', its
products the tensors of the plain layer, computed in float32 and rounded once to the type that is stored.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor

from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.wrappers import user_class
from ft_ckpt.errors import IncompleteError, NotAnAdapterError, SelectionError
from ft_ckpt.model.adapters import active_adapters, base_view, has_adapters
from ft_ckpt.model.base_model import refuse_merged
from ft_ckpt.model.entries import Entry, Group, Part
from ft_ckpt.model.merge_choice import MergeChoice
from ft_ckpt.model.merge_layers import (
    AdaptedLayer,
    adapted_layers,
    merge_layer,
    refuse_quantised,
    refuse_unmergeable,
)
from ft_ckpt.model.selection import View, model_part

_new_keys = count(1 << 40)  # of tensors that are yet to be computed: above those of all inventories


@dataclass(frozen=True, eq=False)
class _BasePlan:
    """The base as it will be, and how its tensors come about that are not there yet, by their new keys."""

    view: View
    made: dict[int, tuple[AdaptedLayer, str]] = field(default_factory=dict)  # the layer, and the tensor's name in it
    moved: dict[int, Source] = field(default_factory=dict)  # the tensor that it is
    notes: tuple[str, ...] = ()


def merged_part(view: View, path: str, dtype: str, choice: MergeChoice) -> Part:
    """The part for the base of `view` with its adapters merged into it, as the live model computes with them.

    A tied tensor that an adapter changes in one of its places is stored once for each place. Raises NotAnAdapterError
    where there are no adapters, SelectionError naming all that cannot be merged.
    """
    if not has_adapters(view.module):
        raise NotAnAdapterError(
            f"merged: {type(view.module).__name__} has no PEFT adapter; leave merged= out to save it as it is"
        )
    refuse_merged(view.module)
    refuse_quantised(base_view(view).module)
    names = _chosen_adapters(view, choice)
    layers = adapted_layers(view, names, choice)
    refuse_unmergeable(view, names, layers)
    plan = _plan_base(base_view(view), layers)
    part = model_part(plan.view, "", path, dtype)
    entries = _merged_entries(part.entries, plan)
    used = {source.key for entry in entries for source in entry.sources}
    passed = tuple(source for source in view.sources.values() if source.key not in used)
    left = [name for name in view.module.peft_config if name not in names]
    notes = [f"adapter {', '.join(names)}: merged into {len(layers)} layers"]
    notes += [f"adapter {', '.join(left)}: not merged, left out"] if left else []
    return replace(part, entries=entries, passed=passed, notes=(*part.notes, *notes, *plan.notes))


def _chosen_adapters(view: View, choice: MergeChoice) -> list[str]:
    known = list(view.module.peft_config)
    names = list(choice.adapters) or active_adapters(view.module)
    if unknown := [name for name in names if name not in known]:
        raise SelectionError(f"adapter {', '.join(unknown)}: not on the model, which has {', '.join(known)}")
    if not names:
        raise SelectionError(f"merged: none of the adapters {', '.join(known)} is active; call set_adapter() first")
    return names


def _plan_base(base: View, layers: Sequence[AdaptedLayer]) -> _BasePlan:
    """The base with new keys for tensors that are to be computed, and for those that were tied to them."""
    places = {f"{layer.base_path}.{name}": (layer, name) for layer in layers for name in layer.base}
    plan, sources, split = _BasePlan(base), dict(base.sources), []
    tied: dict[int, list[str]] = {}
    for name, info in base.sources.items():
        tied.setdefault(info.key, []).append(name)
    for names in (some for some in tied.values() if any(name in places for name in some)):
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
    notes = tuple(f"{', '.join(names)}: tied, merged otherwise in each place, stored once each" for names in split)
    module = _untied_model(base.module) if split else base.module
    return replace(plan, view=View(module, sources, base.extra), notes=notes)


def _kind_of_merge(place: tuple[AdaptedLayer, str] | None) -> Any:
    """Equal for tensors that merging leaves equal, if they were; None where nothing says so."""
    if place is None or not isinstance(place[0].twin, (AuxiliaryTrainingWrapper, TrainableTokensLayer)):
        return place and (id(place[0]), place[1])
    layer, name = place
    return type(layer.twin), name, frozenset(source.key for source in layer.sources), tuple(layer.shares.items())


def _untied_model(module: Any) -> Any:
    """The model with a config that ties no embeddings; the live one keeps its own."""
    untied: Any = object.__new__(user_class(type(module)))
    untied.__dict__ = {**vars(module), "config": copy.deepcopy(module.config)}
    for config in _all_configs(untied.config):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    return untied


def _all_configs(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", ()):
        if (inner := getattr(config, name, None)) is not None:
            yield from _all_configs(inner)


def _merged_entries(entries: Sequence[Entry], plan: _BasePlan) -> tuple[Entry, ...]:
    """The entries, those of computed tensors with the groups that compute them."""
    units: dict[Any, list[Entry]] = {}
    for entry in entries:
        if (unit := _unit_of(entry, plan)) is not None:
            units.setdefault(unit, []).append(entry)
    groups = {unit: _merging_group(some, plan) for unit, some in units.items()}
    return tuple(_with_group(entry, plan, groups.get(_unit_of(entry, plan))) for entry in entries)


def _unit_of(entry: Entry, plan: _BasePlan) -> Any:
    """What computes the entry: a conversion, a layer, or nothing."""
    if entry.group is not None:
        is_touched = any(source.key in plan.made or source.key in plan.moved for source in entry.group.sources)
        return entry.group if is_touched else None
    return plan.made[entry.source.key][0] if entry.source is not None and entry.source.key in plan.made else None


def _with_group(entry: Entry, plan: _BasePlan, group: Group | None) -> Entry:
    if group is not None:
        return entry._replace(source=None, group=group)
    if entry.source is not None and entry.source.key in plan.moved:
        return entry._replace(source=plan.moved[entry.source.key])
    return entry


def _merging_group(entries: Sequence[Entry], plan: _BasePlan) -> Group:
    """The group of `entries` that come from one conversion, or from one layer, with merging put before it."""
    inner, dtypes = entries[0].group, {entry.name: entry.dtype for entry in entries}
    wanted = [source for source in (inner.sources if inner else (e.source for e in entries)) if source is not None]
    layers = {id(made[0]): made[0] for source in wanted if (made := plan.made.get(source.key)) is not None}
    plain = [plan.moved.get(source.key, source) for source in wanted if source.key not in plan.made]
    sources = {one.key: one for one in (*plain, *(one for layer in layers.values() for one in layer.sources))}

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
        stored = inner.convert(given) if inner else {e.name: given[e.source.name] for e in entries if e.source}
        return {name: _rounded(name, stored.pop(name), dtype) for name, dtype in dtypes.items()}

    return Group(tuple(sources.values()), merge)


def _rounded(name: str, merged: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in the type that is stored. Raises IncompleteError for NaN and infinity."""
    rounded = merged.detach().to(dtype).contiguous()
    if rounded.device.type == "meta":
        raise IncompleteError(f"{name}: merging needs a tensor that is not there; nothing is committed")
    # No NaN and no infinity leaves a sum finite, which takes a tenth of a look; float16 may overflow as it is rounded.
    probe = rounded if dtype == torch.float16 else merged.detach().sum()
    if not bool(torch.isfinite(probe).all()) and not bool(torch.isfinite(rounded).all()):
        raise IncompleteError(
            f"{name}: merging gives NaN, infinity or what {dtype} cannot hold; nothing is committed. Is the adapter "
            "sound?"
        )
    return rounded
