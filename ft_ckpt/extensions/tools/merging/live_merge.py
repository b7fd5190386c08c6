"""Plans the part of a checkpoint that stores a base model with adapters merged into it.

The plan computes nothing and leaves the live model as it is. The save computes one layer at a time,
when it writes the layer: it copies the layer's tensors to the host, lets PEFT merge the copy, and
rounds the result once to the stored dtype.

The words of `ft_ckpt.model.tensors` are used here:

- A part is one saved model of a checkpoint, as a list of entries.
- An entry is one tensor of a weight file. It is read from a source, or computed by a group.
- A source is a tensor of the live model. Sources with the same key are one tensor under several
  tied names.
- A group is a function that computes several stored tensors together from full live tensors.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

# Keys of computed tensors. Keys of live tensors are object ids or negative, so they never collide.
_new_keys = count(1 << 40)


def merged_part(view: View, *, dtype: str, choice: MergeChoice) -> Part:
    """Return the part for the base of `view` with its adapters merged into it.

    By default the active adapters are merged, as the live model applies them. If an adapter changes
    a tied tensor under one of its names only, the tensor is stored once for each name.

    Raises NotAnAdapterError without adapters. Raises SelectionError if an adapter is unknown or
    cannot be merged, or if none is active.
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
    base = _give_new_keys(view.base, layers)
    part = model_part(base.view, "", "", dtype)
    _refuse_lost_tensors(base, part)
    entries = _replace_entries(part.entries, base)
    used_keys: set[int] = set()
    for entry in entries:
        used_keys.update(source.key for source in entry.sources)
    omitted = tuple(source for source in view.sources.values() if source.key not in used_keys)
    notes = [*part.notes, f"adapter {', '.join(names)}: merged into {len(layers)} layers"]
    notes += _notes_about_the_rest(view, names, base)
    return replace(part, entries=entries, omitted=omitted, notes=tuple(notes))


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


class _LayerOutput(NamedTuple):
    """One tensor that the merge of a layer computes."""

    layer: AdaptedLayer
    name: str  # relative to the layer, such as "weight"


@dataclass(frozen=True, eq=False)
class _RekeyedBase:
    """The base model, in which each tensor that the merge replaces has a new key.

    Tensors that were tied to a replaced one have new keys, too.

    Attributes:
        view: The base with the new keys.
        outputs: The layer output that replaces a tensor, by new key.
        originals: The live source of a tensor that the merge leaves as it is, by new key.
        untied: The names of each tensor that was tied, and that is several tensors after the merge.
    """

    view: View
    outputs: Mapping[int, _LayerOutput]
    originals: Mapping[int, Source]
    untied: tuple[tuple[str, ...], ...]

    def live_source(self, source: Source) -> Source:
        """Return the source of the live model for one of `view` that the merge leaves as it is."""
        return self.originals.get(source.key, source)


def _give_new_keys(base: View, layers: Sequence[AdaptedLayer]) -> _RekeyedBase:
    """Give new keys to the tensors that the merge replaces, and to those that are tied to them.

    For example, "embed.weight" and "head.weight" are tied with key 7, and an adapter changes only
    "head". Then "embed.weight" gets a new key whose original is source 7, and "head.weight" gets
    another new key whose output is "weight" of the merged layer "head".
    """
    outputs_by_name = {}
    for layer in layers:
        for name in layer.base:
            outputs_by_name[f"{layer.base_path}.{name}"] = _LayerOutput(layer, name)

    names_by_key: dict[int, list[str]] = {}
    for name, source in base.sources.items():
        names_by_key.setdefault(source.key, []).append(name)
    sources = dict(base.sources)
    outputs: dict[int, _LayerOutput] = {}
    originals: dict[int, Source] = {}
    untied = []
    for names in names_by_key.values():
        if outputs_by_name.keys().isdisjoint(names):
            continue
        results = {_result_identity(outputs_by_name.get(name)) for name in names}
        if len(results) == 1:
            new_keys = dict.fromkeys(names, next(_new_keys))
        else:
            new_keys = {name: next(_new_keys) for name in names}
            untied.append(tuple(names))

        for name, key in new_keys.items():
            if name in outputs_by_name:
                outputs[key] = outputs_by_name[name]
            else:
                originals[key] = base.sources[name]
            sources[name] = replace(base.sources[name], key=key)

    module = _without_ties(base.module) if untied else base.module
    return _RekeyedBase(View(module, sources, base.extra), outputs, originals, tuple(untied))


def _result_identity(output: _LayerOutput | None) -> Any:
    """Return a value that two tied names share if they are still one tensor after the merge.

    Two layers that train a tied tensor through the same `modules_to_save` copy or the same trained
    tokens have equal results. Two LoRA layers have different results. All tensors that are not
    merged have the result None.
    """
    if output is None:
        return None
    layer, name = output
    if not isinstance(layer.module, (AuxiliaryTrainingWrapper, TrainableTokensLayer)):
        return id(layer), name
    source_keys = frozenset(source.key for source in layer.sources)
    return type(layer.module), name, source_keys, layer.adapters, layer.weights


def _without_ties(module: Any) -> Any:
    """Return the model with a config that ties no embeddings; the live model keeps its config."""
    untied = shallow_copy(module)
    untied.config = copy.deepcopy(module.config)
    for config in (untied.config, *nested_configs(untied.config)):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    return untied


def _refuse_lost_tensors(base: _RekeyedBase, part: Part) -> None:
    """Raise SelectionError if names are untied by the merge, but the class stores only one of them.

    The tensors of its other names would be lost.
    """
    stored_keys: set[int] = set()
    for entry in part.entries:
        stored_keys.update(source.key for source in entry.sources)
    for names in base.untied:
        if any(base.view.sources[name].key not in stored_keys for name in names):
            raise SelectionError(
                f"{', '.join(names)}: tied by the class {part.module.__class__.__name__}, and the "
                "adapter changes it under one of its names only; cannot be merged, keep it an "
                "adapter (adapter_only=True)"
            )


def _notes_about_the_rest(view: View, names: Sequence[str], base: _RekeyedBase) -> list[str]:
    """Return lines for the report of the save: adapters left out, and tensors untied."""
    notes = []
    left_out = [name for name in view.module.peft_config if name not in names]
    if left_out:
        notes.append(f"adapter {', '.join(left_out)}: not merged, left out")
    for tied_names in base.untied:
        text = ", ".join(tied_names)
        notes.append(f"{text}: tied, merged differently in each place, stored once each")
    return notes


def _replace_entries(entries: Sequence[Entry], base: _RekeyedBase) -> tuple[Entry, ...]:
    """Return the entries with live sources, or with groups that merge layers.

    A layer's tensors are stored as they are, or the model's own conversion changes them first (for
    example, it fuses experts). All entries of a layer get one group. All entries of a conversion
    get one group, which merges the layers and then converts.
    """
    entries_by_producer: dict[Group | AdaptedLayer, list[Entry]] = {}
    for entry in entries:
        producer = _producer_of(entry, base)
        if producer is not None:
            entries_by_producer.setdefault(producer, []).append(entry)

    groups = {}
    for producer, produced_entries in entries_by_producer.items():
        groups[producer] = _group_with_merge(produced_entries, base)
    replaced = []
    for entry in entries:
        producer = _producer_of(entry, base)
        if producer is not None:
            entry = entry._replace(source=None, group=groups[producer])
        elif entry.source is not None:
            entry = entry._replace(source=base.live_source(entry.source))
        replaced.append(entry)

    return tuple(replaced)


def _producer_of(entry: Entry, base: _RekeyedBase) -> Group | AdaptedLayer | None:
    """Return the conversion or the layer that computes the entry.

    Returns None for a live tensor, and for a conversion that takes no tensor with a new key.
    """
    if entry.group is not None:
        for source in entry.group.sources:
            if source.key in base.outputs or source.key in base.originals:
                return entry.group
        return None
    if entry.source is not None and entry.source.key in base.outputs:
        return base.outputs[entry.source.key].layer
    return None


def _group_with_merge(entries: Sequence[Entry], base: _RekeyedBase) -> Group:
    """Return the group that computes `entries`, all of one conversion or one layer."""
    conversion = entries[0].group
    if conversion is not None:
        inputs = list(conversion.sources)
    else:
        inputs = [entry.source for entry in entries if entry.source is not None]

    layers: dict[AdaptedLayer, None] = {}
    live_sources: dict[int, Source] = {}
    for source in inputs:
        if source.key in base.outputs:
            layers[base.outputs[source.key].layer] = None
        else:
            live_source = base.live_source(source)
            live_sources[live_source.key] = live_source

    for layer in layers:
        for source in layer.sources:
            live_sources[source.key] = source

    step = _MergeStep(entries, inputs, list(layers), live_sources, base)
    return Group(tuple(live_sources.values()), step.compute)


@dataclass(frozen=True, eq=False)
class _MergeStep:
    """Computes the tensors of `entries`: merges layers, then applies the model's conversion.

    Attributes:
        entries: The entries of one conversion, or of one layer that needs no conversion.
        inputs: The inputs of the conversion, with the new keys. Without a conversion, these are the
            tensors to store.
        layers: The layers whose merge computes inputs.
        live_sources: All live tensors that the step needs, by key.
        base: The base to which the new keys belong.
    """

    entries: Sequence[Entry]
    inputs: Sequence[Source]
    layers: Sequence[AdaptedLayer]
    live_sources: Mapping[int, Source]
    base: _RekeyedBase

    def compute(self, live_tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the stored tensors, by stored name, from full live tensors, by name.

        Removes the live tensors from the dict, so that they can be freed. Raises IncompleteError
        for a tensor that cannot be stored; see `_round_to`.
        """
        inputs = self._merge(live_tensors)
        conversion = self.entries[0].group
        if conversion is not None:
            wide = conversion.convert(inputs)
        else:
            wide = {}
            for entry in self.entries:
                if entry.source is not None:
                    wide[entry.name] = inputs[entry.source.name]
        rounded = {}
        for entry in self.entries:
            rounded[entry.name] = _round_to(entry.dtype, wide.pop(entry.name), entry.name)
        return rounded

    def _merge(self, live_tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs by name: outputs of merged layers, and live tensors."""
        live = {}
        for key, source in self.live_sources.items():
            live[key] = live_tensors.pop(source.name)
        layer_outputs = {}
        for layer in self.layers:
            layer_tensors = {source.key: live[source.key] for source in layer.sources}
            layer_outputs[layer] = merge_layer(layer, layer_tensors)

        inputs = {}
        for source in self.inputs:
            if source.key in self.base.outputs:
                layer, name = self.base.outputs[source.key]
                inputs[source.name] = layer_outputs[layer][name]
            else:
                inputs[source.name] = live[self.base.live_source(source).key]

        return inputs


def _round_to(dtype: torch.dtype, tensor: Tensor, name: str) -> Tensor:
    """Round `tensor` to the stored dtype.

    Raises IncompleteError for NaN, infinity and values beyond the dtype, and for a tensor on the
    meta device, which means that an input was missing.
    """
    rounded = tensor.detach().to(dtype).contiguous()
    if rounded.device.type == "meta":
        raise IncompleteError(
            f"{name}: merging needs a tensor that is missing; nothing is committed"
        )
    if not is_within(tensor.detach(), dtype) and not all_finite(rounded):
        raise IncompleteError(
            f"{name}: merging gives NaN, infinity or values beyond {dtype}; nothing is committed. "
            "Is the adapter damaged?"
        )
    return rounded
