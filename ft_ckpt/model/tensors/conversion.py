"""Conversion of a model's tensors whose names, form or dtypes differ between memory and file.

Planning needs names, shapes and dtypes only: transformers converts tensors on the meta device.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.model.tensors.entries import Entry, Group, unchanged_entry
from ft_ckpt.model.tensors.libraries import PREFIX
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import shallow_copy

_CAST_DTYPES = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))


def load_conversion_table() -> None:
    """Build transformers' conversion table before training starts.

    It takes 60 ms, once per process.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")


def stored_as_in_memory(module: nn.Module, sources: Mapping[str, Source]) -> bool:
    """Check whether transformers stores this model's tensors by their names and forms in memory."""
    for entry in converted_entries(module, sources):
        if sources.get(entry.name) is not entry.source:
            return False
    return True


def converted_entries(module: Any, sources: Mapping[str, Source]) -> list[Entry]:
    """Return the entries under the names that transformers writes.

    For some architectures they differ from those in memory. The conversion runs on meta tensors: a
    tensor returned as the same object was only renamed and is streamed. The others are converted in
    groups, one per layer if the layers can be converted independently.
    """
    from transformers.core_model_loading import revert_weight_conversion

    placeholders = _placeholders_for(sources)
    described = with_whole_parameters(module, placeholders)
    if _has_conversions_of_adapter(module):
        # transformers then takes those of the model's class
        vars(described)["_weight_conversions"] = None
    stored: dict[str, Tensor] = revert_weight_conversion(described, dict(placeholders))
    name_of = {id(tensor): name for name, tensor in placeholders.items()}
    computed_names = [name for name, tensor in stored.items() if id(tensor) not in name_of]
    streamed = {name_of.get(id(tensor)) for tensor in stored.values()}
    converted = {name: source for name, source in sources.items() if name not in streamed}
    groups = _conversion_groups(described, converted, computed_names, revert_weight_conversion)
    entries = []
    for name, tensor in stored.items():
        memory_name = name_of.get(id(tensor))
        if memory_name is not None:
            entries.append(unchanged_entry(name, sources[memory_name]))
        else:
            shape, dtype = tuple(tensor.shape), tensor.dtype
            entries.append(Entry(name, shape, dtype, dtype, group=groups[name]))
    return entries


def _placeholders_for(sources: Mapping[str, Source]) -> dict[str, Tensor]:
    """Make a meta tensor for each name.

    Tensors of one shape and dtype are made from one, which is faster.
    """
    empty: dict[tuple[Any, torch.dtype], Tensor] = {}
    placeholders = {}
    for name, source in sources.items():
        key = source.shape, source.dtype
        if key not in empty:
            empty[key] = torch.empty(source.shape, dtype=source.dtype, device="meta")
        placeholders[name] = empty[key].detach()  # an object for each name
    return placeholders


def _has_conversions_of_adapter(module: Any) -> bool:
    """Check whether transformers read an adapter into the model and kept its conversions.

    Then it has lost those of the base.
    """
    for conversion in getattr(module, "_weight_conversions", None) or ():
        if any(pattern.startswith(PREFIX) for pattern in conversion.source_patterns):
            return True
    return False


def with_whole_parameters(module: nn.Module, placeholders: Mapping[str, Tensor]) -> Any:
    """Copy the model, so that it gives transformers the whole parameter of a name.

    transformers asks a model for the shapes of parameters. In the model itself one may be inside a
    PEFT layer or a wrapper, or an engine has cut or flattened it.
    """
    described = shallow_copy(module)
    vars(described)["get_parameter"] = placeholders.__getitem__
    return described


@dataclass(frozen=True, eq=False)
class _RevertedConversion:
    """Computes stored tensors from tensors of the model, by transformers."""

    module: Any
    names: Mapping[str, str]  # in the module, by name of the source
    revert: Callable[..., dict[str, Tensor]]

    def convert(self, full: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the stored tensors by name, from the full live tensors by name."""
        return self.revert(self.module, {self.names[name]: tensor for name, tensor in full.items()})


def _conversion_groups(
    module: Any,
    converted: Mapping[str, Source],
    computed_names: Iterable[str],
    revert: Callable[..., dict[str, Tensor]],
) -> dict[str, Group]:
    """Return the group that computes each stored name.

    One group for all if layers do not convert independently.
    """
    layers: dict[str, list[str]] = {}
    for name in converted:
        layers.setdefault(re.sub(r"(\.\d+\.).*", r"\1", name), []).append(name)
    computed, unattributed = set(computed_names), set[str]()
    for division in (list(layers.values()), [list(converted)]):
        groups: dict[str, Group] = {}
        for names in division:
            sources = {name: converted[name] for name in names}
            names_of_sources = {source.name: name for name, source in sources.items()}
            conversion = _RevertedConversion(module, names_of_sources, revert)
            group = Group(tuple(sources.values()), conversion.convert)
            for stored_name in group.convert(_empty_tensors(group.sources)):
                if stored_name in computed:
                    groups[stored_name] = group
        unattributed = computed - groups.keys()
        if not unattributed:
            return groups
    raise SelectionError(
        f"{listing(sorted(unattributed), ', ')}: these stored names cannot be "
        "attributed to live tensors; this transformers version converts this model in a way "
        "ft_ckpt does not know"
    )


def _empty_tensors(sources: Iterable[Source]) -> dict[str, Tensor]:
    empty = {}
    for source in sources:
        empty[source.name] = torch.empty(source.shape, dtype=source.dtype, device="meta")
    return empty


def cast_entries(entries: Sequence[Entry], module: nn.Module, dtype: str) -> tuple[Entry, ...]:
    """Cast the entries by the policy `dtype`: a dtype of torch, "config" or "as_is"."""
    target: Any = dtype
    if dtype == "config":
        target = getattr(getattr(module, "config", None), "dtype", None)
    if isinstance(target, str) and target != "as_is":
        target = getattr(torch, target)
    if target is None or dtype == "as_is":
        return tuple(entries)
    wide_steps = kept_in_float32(module, target)
    cast = []
    for entry in entries:
        is_wide = entry.dtype == torch.float32 and not set(wide_steps).isdisjoint(
            entry.name.split(".")
        )
        if entry.dtype in _CAST_DTYPES and not is_wide:
            entry = entry._replace(dtype=target)
        cast.append(entry)
    return tuple(cast)


def kept_in_float32(module: nn.Module, target: torch.dtype) -> tuple[str, ...]:
    """Return name steps of tensors that the class keeps in float32 when others are in `target`."""
    steps = tuple(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if target == torch.float16:
        steps += tuple(getattr(module, "_keep_in_fp32_modules", None) or ())
    return steps
