"""Merges adapters into their base: one layer at a time, on a copy, by PEFT's own merge.

A merged layer is a conversion group (`entries.Group`): its inputs are the tensors of the base and
the adapters, its outputs those of the plain layer, computed in at least float32 and rounded once to
the stored dtype.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import torch
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor

from ft_ckpt.errors import IncompleteError, NotAnAdapterError, SelectionError
from ft_ckpt.extensions.tools.merging.adapted_layers import (
    AdaptedLayer,
    adapted_layers,
    merge_layer,
)
from ft_ckpt.extensions.tools.merging.refusals import refuse_quantised, refuse_unmergeable
from ft_ckpt.formats import all_finite, is_within
from ft_ckpt.model.sidecars import nested_configs
from ft_ckpt.model.tensors import Entry, Group, MergeChoice, Part, View, model_part, refuse_merged
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import shallow_copy

# keys of computed tensors; keys of live tensors are object ids or negative
_new_keys = count(1 << 40)


class _MergedTensor(NamedTuple):
    """A tensor of a plain layer, by its name in the layer."""

    layer: AdaptedLayer
    name: str


@dataclass(frozen=True, eq=False)
class _MergedBase:
    """The base after the merge: its tensors with new keys, and where these come from."""

    view: View
    merged: dict[int, _MergedTensor] = field(default_factory=dict)  # by new key
    # by new key: the live tensor, which was tied to a merged one
    unchanged: dict[int, Source] = field(default_factory=dict)
    # names that were tied, and are merged differently in each place
    untied: tuple[tuple[str, ...], ...] = ()


def merged_part(view: View, *, dtype: str, choice: MergeChoice) -> Part:
    """Return the part for the base of `view` with its adapters merged into it.

    By default the active adapters are merged, as the live model applies them. A tied tensor that an
    adapter changes under one of its names only is stored once for each name. Raises
    NotAnAdapterError without adapters, SelectionError when an adapter is unknown or cannot be
    merged, or none is active.
    """
    if not view.has_adapters:
        raise NotAnAdapterError(
            f"merged: {type(view.module).__name__} has no PEFT adapter; leave "
            "merged= out to save it as it is"
        )
    refuse_merged(view.module)
    refuse_quantised(view.base.module)
    names = _chosen_adapters(view, choice)
    layers = adapted_layers(view, names, choice)
    refuse_unmergeable(view, names, layers)
    base = _merge_base(view.base, layers)
    part = model_part(base.view, "", "", dtype)
    _refuse_lost(base, part)
    entries = _merged_entries(part.entries, base)
    used: set[int] = set()
    for entry in entries:
        used.update(source.key for source in entry.sources)
    omitted = tuple(source for source in view.sources.values() if source.key not in used)
    notes = [f"adapter {', '.join(names)}: merged into {len(layers)} layers"]
    notes += _notes_on_rest(view, names, base)
    return replace(part, entries=entries, omitted=omitted, notes=(*part.notes, *notes))


def _notes_on_rest(view: View, names: Sequence[str], base: _MergedBase) -> list[str]:
    """Write notes on adapters that are left out, and on tensors that are not tied any more."""
    notes = []
    left_out = [name for name in view.module.peft_config if name not in names]
    if left_out:
        notes.append(f"adapter {', '.join(left_out)}: not merged, left out")
    for tied_names in base.untied:
        text = ", ".join(tied_names)
        notes.append(f"{text}: tied, merged differently in each place, stored once each")
    return notes


def _chosen_adapters(view: View, choice: MergeChoice) -> list[str]:
    on_model = list(view.module.peft_config)
    names = list(choice.adapters) or view.active_adapters
    unknown = [name for name in names if name not in on_model]
    if unknown:
        raise SelectionError(
            f"adapter {', '.join(unknown)}: not on the model, which has {', '.join(on_model)}"
        )
    if not names:
        raise SelectionError(
            f"merged: none of the adapters {', '.join(on_model)} is active; call set_adapter() "
            "first"
        )
    return names


def _refuse_lost(base: _MergedBase, part: Part) -> None:
    """Raise SelectionError for tied tensors that differ once merged: the class stores one only."""
    stored: set[int] = set()
    for entry in part.entries:
        stored.update(source.key for source in entry.sources)
    for names in base.untied:
        if any(base.view.sources[name].key not in stored for name in names):
            raise SelectionError(
                f"{', '.join(names)}: tied by the class {part.module.__class__.__name__}, and the "
                "adapter changes it under one of its names only; cannot be merged, keep it an "
                "adapter (adapter_only=True)"
            )


def _merge_base(base: View, layers: Sequence[AdaptedLayer]) -> _MergedBase:
    """Give new keys to the tensors that are merged, and to those that are tied to them."""
    merged_tensors = {}
    for layer in layers:
        for name in layer.base:
            merged_tensors[f"{layer.base_path}.{name}"] = _MergedTensor(layer, name)
    names_by_key: dict[int, list[str]] = {}
    for name, source in base.sources.items():
        names_by_key.setdefault(source.key, []).append(name)
    sources = dict(base.sources)
    merged: dict[int, _MergedTensor] = {}
    unchanged: dict[int, Source] = {}
    untied = []
    for names in names_by_key.values():
        if not any(name in merged_tensors for name in names):
            continue
        results = {_result_of_merge(merged_tensors.get(name)) for name in names}
        stays_tied = len(results) == 1
        key = next(_new_keys)
        for name in names:
            if name in merged_tensors:
                merged[key] = merged_tensors[name]
            else:
                unchanged[key] = base.sources[name]
            sources[name] = replace(base.sources[name], key=key)
            if not stays_tied:
                key = next(_new_keys)
        if not stays_tied:
            untied.append(tuple(names))
    module = _untied_model(base.module) if untied else base.module
    view = View(module, sources, base.extra)
    return _MergedBase(view, merged, unchanged, tuple(untied))


def _result_of_merge(tensor: _MergedTensor | None) -> Any:
    """Return a value that is equal for tied tensors that stay equal when merged.

    Returns None for a tensor that is not merged.
    """
    if tensor is None:
        return None
    layer, name = tensor
    if not isinstance(layer.module, (AuxiliaryTrainingWrapper, TrainableTokensLayer)):
        return id(layer), name
    keys = frozenset(source.key for source in layer.sources)
    return type(layer.module), name, keys, layer.adapters, layer.weights


def _untied_model(module: Any) -> Any:
    """Return the model with a config that ties no embeddings; the live model keeps its config."""
    untied = shallow_copy(module)
    untied.config = copy.deepcopy(module.config)
    for config in (untied.config, *nested_configs(untied.config)):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    return untied


def _merged_entries(entries: Sequence[Entry], base: _MergedBase) -> tuple[Entry, ...]:
    """Return the entries, with groups that compute the merged tensors."""
    entries_of: dict[Group | AdaptedLayer, list[Entry]] = {}
    for entry in entries:
        unit = _unit_of(entry, base)
        if unit is not None:
            entries_of.setdefault(unit, []).append(entry)
    groups = {unit: _merging_group(unit_entries, base) for unit, unit_entries in entries_of.items()}
    result = []
    for entry in entries:
        unit = _unit_of(entry, base)
        if unit is not None:
            entry = entry._replace(source=None, group=groups[unit])
        elif entry.source is not None and entry.source.key in base.unchanged:
            entry = entry._replace(source=base.unchanged[entry.source.key])
        result.append(entry)
    return tuple(result)


def _unit_of(entry: Entry, base: _MergedBase) -> Group | AdaptedLayer | None:
    """Return the conversion or layer that computes the entry, or None if merging keeps it."""
    if entry.group is not None:
        for source in entry.group.sources:
            if source.key in base.merged or source.key in base.unchanged:
                return entry.group
        return None
    if entry.source is not None and entry.source.key in base.merged:
        return base.merged[entry.source.key].layer
    return None


@dataclass(frozen=True, eq=False)
class _MergingConversion:
    """Computes the stored tensors of one conversion or layer: it merges, then converts."""

    entries: Sequence[Entry]
    inputs: Sequence[Source]  # of the conversion, or the tensors to store; with the merged keys
    layers: Sequence[AdaptedLayer]  # that compute inputs
    sources: dict[int, Source]  # the live tensors that it needs, by key
    base: _MergedBase

    def convert(self, full: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert full live tensors, by name, to the stored ones, and take them out of `full`."""
        inputs = self._merge(full)
        conversion = self.entries[0].group
        if conversion is not None:
            stored = conversion.convert(inputs)
        else:
            stored = {}
            for entry in self.entries:
                if entry.source is not None:
                    stored[entry.name] = inputs[entry.source.name]
        rounded = {}
        for entry in self.entries:
            rounded[entry.name] = _rounded(entry.name, stored.pop(entry.name), entry.dtype)
        return rounded

    def _merge(self, full: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs by name: tensors of merged layers, and live ones."""
        live = {key: full.pop(source.name) for key, source in self.sources.items()}
        merged_layers = {}
        for layer in self.layers:
            tensors = {source.key: live[source.key] for source in layer.sources}
            merged_layers[layer] = merge_layer(layer, tensors)
        inputs = {}
        for source in self.inputs:
            if source.key in self.base.merged:
                layer, name = self.base.merged[source.key]
                inputs[source.name] = merged_layers[layer][name]
            else:
                live_source = self.base.unchanged.get(source.key, source)
                inputs[source.name] = live[live_source.key]
        return inputs


def _merging_group(entries: Sequence[Entry], base: _MergedBase) -> Group:
    """Return the group that computes `entries` of one conversion or layer."""
    conversion = entries[0].group
    if conversion is not None:
        inputs = list(conversion.sources)
    else:
        inputs = [entry.source for entry in entries if entry.source is not None]
    layers: dict[AdaptedLayer, None] = {}
    sources: dict[int, Source] = {}
    for source in inputs:
        if source.key in base.merged:
            layers[base.merged[source.key].layer] = None
        else:
            live_source = base.unchanged.get(source.key, source)
            sources[live_source.key] = live_source
    for layer in layers:
        for source in layer.sources:
            sources[source.key] = source
    merging = _MergingConversion(entries, inputs, list(layers), sources, base)
    return Group(tuple(sources.values()), merging.convert)


def _rounded(name: str, merged: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the tensor to the stored dtype. Raises IncompleteError for NaN and infinity."""
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
