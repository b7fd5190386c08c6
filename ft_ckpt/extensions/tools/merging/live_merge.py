"""Plans the part of a checkpoint that stores a base model with adapters merged into it.

The plan computes nothing and leaves the live model as it is. The save computes one layer at a time,
when it writes the layer: it copies the layer's tensors to the host, lets PEFT merge the copy, and
rounds the result once to the stored dtype.

Four words of `ft_ckpt.model.tensors` are used here:

- A part is one saved model of a checkpoint, as a list of entries.
- An entry is one tensor of a weight file.
- A source is a tensor of the live model. An entry that is stored as it is has a source.
- A group is a function that computes the tensors of several entries from several sources. For
  example, a model's own group fuses the weights of its experts. It is called a conversion here.

The plan starts from the entries of the base model, as if it had no adapters. Then it replaces each
entry that a merge changes: the entry gets a new group, which merges the layers that the entry needs
and then applies the model's conversion, if there is one. `rekeyed_base` marks the tensors that a
merge changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ft_ckpt.errors import IncompleteError, NotAnAdapterError, SelectionError
from ft_ckpt.extensions.tools.merging.adapted_layers import (
    AdaptedLayer,
    adapted_layers,
    merge_layer,
)
from ft_ckpt.extensions.tools.merging.refusals import refuse_quantised, refuse_unmergeable
from ft_ckpt.extensions.tools.merging.rekeyed_base import RekeyedBase, give_new_keys
from ft_ckpt.formats import all_finite, is_within
from ft_ckpt.model.tensors import Entry, Group, MergeChoice, Part, View, model_part, refuse_merged
from ft_ckpt.ranks.sharding import Source


def merged_part(view: View, *, dtype: str, choice: MergeChoice) -> Part:
    """Return the part for the base of `view` with its adapters merged into it.

    By default the active adapters are merged, as the live model applies them. If an adapter changes
    a tied tensor under one of its names only, the tensor is stored once for each name.

    Args:
        view: The live model with adapters, and its tensors.
        dtype: The setting `dtype` of the saver, such as "as_is" or "bfloat16".
        choice: The adapters to merge, and their weights.

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

    base = give_new_keys(view.base, layers)
    part = model_part(base.view, name="", path="", dtype=dtype)
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
    """Return the names of the adapters in `choice`, or of the active ones if it names none."""
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


def _refuse_lost_tensors(base: RekeyedBase, part: Part) -> None:
    """Raise SelectionError if the merge unties tensors, but the class stores only one of them.

    The merge gives the names different tensors. A class that always ties these names has only one
    of them in its files, so the other tensors would be lost.
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


def _notes_about_the_rest(view: View, names: Sequence[str], base: RekeyedBase) -> list[str]:
    """Return lines for the report of the save: adapters left out, and tensors untied."""
    notes = []
    left_out = [name for name in view.module.peft_config if name not in names]
    if left_out:
        notes.append(f"adapter {', '.join(left_out)}: not merged, left out")
    for tied_names in base.untied:
        text = ", ".join(tied_names)
        notes.append(f"{text}: tied, merged differently in each place, stored once each")
    return notes


def _replace_entries(entries: Sequence[Entry], base: RekeyedBase) -> tuple[Entry, ...]:
    """Return the entries with live sources, or with new groups that merge layers.

    There is one new group for each merged layer that is stored as it is, and one for each
    conversion that needs a merged layer. All entries of the layer or the conversion share it.
    """
    entries_to_compute: dict[Group | AdaptedLayer, list[Entry]] = {}
    for entry in entries:
        computed_by = _conversion_or_layer(entry, base)
        if computed_by is not None:
            entries_to_compute.setdefault(computed_by, []).append(entry)

    new_groups = {}
    for computed_by, its_entries in entries_to_compute.items():
        new_groups[computed_by] = _new_group(its_entries, base)

    new_entries = []
    for entry in entries:
        computed_by = _conversion_or_layer(entry, base)
        if computed_by is not None:
            entry = entry._replace(source=None, group=new_groups[computed_by])
        elif entry.source is not None:
            entry = entry._replace(source=base.live_source(entry.source))
        new_entries.append(entry)
    return tuple(new_entries)


def _conversion_or_layer(entry: Entry, base: RekeyedBase) -> Group | AdaptedLayer | None:
    """Return the conversion or the merged layer that computes the entry.

    Returns None if the entry can stay as it is: it is a live tensor, or a conversion computes it
    from tensors that all have their old keys.
    """
    if entry.group is not None:
        if any(base.has_new_key(source) for source in entry.group.sources):
            return entry.group
        return None
    if entry.source is not None and entry.source.key in base.outputs:
        return base.outputs[entry.source.key].layer
    return None


def _new_group(entries: Sequence[Entry], base: RekeyedBase) -> Group:
    """Return the group that computes `entries`, which are all of one conversion or of one layer."""
    conversion = entries[0].group
    if conversion is not None:
        inputs = list(conversion.sources)
    else:
        inputs = [entry.source for entry in entries if entry.source is not None]

    layers: dict[AdaptedLayer, None] = {}  # used as a set that keeps the order
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

    computation = _Computation(entries, inputs, list(layers), live_sources, base)
    return Group(tuple(live_sources.values()), computation.compute)


@dataclass(frozen=True, eq=False)
class _Computation:
    """The function of a new group: it merges layers, then applies the model's conversion.

    Attributes:
        entries: The entries to compute. They are of one conversion, or of one layer that needs no
            conversion.
        inputs: The inputs of the conversion, with the new keys. Without a conversion, these are the
            tensors to store.
        layers: The layers to merge for `inputs`.
        live_sources: All live tensors that are needed, by key.
        base: The base model with the new keys.
    """

    entries: Sequence[Entry]
    inputs: Sequence[Source]
    layers: Sequence[AdaptedLayer]
    live_sources: Mapping[int, Source]
    base: RekeyedBase

    def compute(self, live_tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the stored tensors, by stored name, from full live tensors, by name.

        Removes the live tensors from the dict, so that they can be freed. Raises IncompleteError
        for a tensor that cannot be stored; see `_round_to`.
        """
        inputs = self._merge(live_tensors)

        conversion = self.entries[0].group
        if conversion is not None:
            unrounded = conversion.convert(inputs)
        else:
            unrounded = {}
            for entry in self.entries:
                if entry.source is not None:
                    unrounded[entry.name] = inputs[entry.source.name]

        rounded = {}
        for entry in self.entries:
            rounded[entry.name] = _round_to(entry.dtype, unrounded.pop(entry.name), entry.name)
        return rounded

    def _merge(self, live_tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of `self.inputs` by name, after the layers are merged."""
        live = {}
        for key, source in self.live_sources.items():
            live[key] = live_tensors.pop(source.name)

        merged_tensors = {}
        for layer in self.layers:
            layer_tensors = {source.key: live[source.key] for source in layer.sources}
            merged_tensors[layer] = merge_layer(layer, layer_tensors)

        inputs = {}
        for source in self.inputs:
            if source.key in self.base.outputs:
                output = self.base.outputs[source.key]
                inputs[source.name] = merged_tensors[output.layer][output.name]
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
