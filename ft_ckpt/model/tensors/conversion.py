"""Plans the stored tensors whose names, shapes or dtypes differ from those in memory.

transformers stores some models in another form than it has them in memory. For example, it has the
experts of a layer in one tensor, and stores each expert separately. Planning needs names, shapes
and dtypes only, so transformers converts tensors on the meta device for it.
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
    """Build transformers' conversion table, which takes 60 ms, once per process.

    Called before training starts, so that the first save does not wait for it.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")


def stored_as_in_memory(module: nn.Module, sources: Mapping[str, Source]) -> bool:
    """Check whether transformers stores the tensors of this model as it has them in memory."""
    for entry in converted_entries(module, sources):
        if sources.get(entry.name) is not entry.source:
            return False
    return True


def converted_entries(module: Any, sources: Mapping[str, Source]) -> list[Entry]:
    """Return the entries of a transformers model, under the names that transformers writes.

    transformers converts placeholders on the meta device. If it returns a placeholder itself, the
    tensor was only renamed. Then the entry has it as its source. All other tensors were computed.
    Their entries have a group that computes them, one for each layer if layers can be converted
    independently.
    """
    from transformers.core_model_loading import revert_weight_conversion

    placeholders = _placeholders_for(sources)
    described = with_whole_parameters(module, placeholders)
    if _has_conversions_of_adapter(module):
        # If it is None, transformers takes the conversions of the model's class.
        vars(described)["_weight_conversions"] = None

    stored: dict[str, Tensor] = revert_weight_conversion(described, dict(placeholders))
    name_of = {id(tensor): name for name, tensor in placeholders.items()}
    computed_names = [name for name, tensor in stored.items() if id(tensor) not in name_of]
    renamed = {name_of.get(id(tensor)) for tensor in stored.values()}
    converted = {name: source for name, source in sources.items() if name not in renamed}
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
    """Make a tensor on the meta device for each name.

    Tensors of the same shape and dtype are made from one, which is faster.
    """
    empty: dict[tuple[Any, torch.dtype], Tensor] = {}
    placeholders = {}
    for name, source in sources.items():
        key = source.shape, source.dtype
        if key not in empty:
            empty[key] = torch.empty(source.shape, dtype=source.dtype, device="meta")
        placeholders[name] = empty[key].detach()  # another object for each name
    return placeholders


def _has_conversions_of_adapter(module: Any) -> bool:
    """Check whether the conversions that transformers has kept are those of an adapter.

    It keeps them when it reads an adapter into the model, and loses those of the base.
    """
    for conversion in getattr(module, "_weight_conversions", None) or ():
        if any(pattern.startswith(PREFIX) for pattern in conversion.source_patterns):
            return True
    return False


def with_whole_parameters(module: nn.Module, placeholders: Mapping[str, Tensor]) -> Any:
    """Return a shallow copy of the model whose `get_parameter` returns `placeholders`.

    transformers asks a model for the shapes of its parameters. In the model itself, a parameter can
    be inside a PEFT layer or a wrapper, or an engine has cut or flattened it.
    """
    described = shallow_copy(module)
    vars(described)["get_parameter"] = placeholders.__getitem__
    return described


@dataclass(frozen=True, eq=False)
class _RevertedConversion:
    """Computes stored tensors from tensors of the model, with transformers' `revert`.

    `names` has the name in the module of each source, by the name of the source.
    """

    module: Any
    names: Mapping[str, str]
    revert: Callable[..., dict[str, Tensor]]

    def convert(self, full: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute the stored tensors, by stored name. `full` has the unsharded sources, by name."""
        live = {self.names[name]: tensor for name, tensor in full.items()}
        return self.revert(self.module, live)


def _conversion_groups(
    module: Any,
    converted: Mapping[str, Source],
    computed_names: Iterable[str],
    revert: Callable[..., dict[str, Tensor]],
) -> dict[str, Group]:
    """Return the group that computes each of `computed_names`.

    First each layer is tried as a group of its own. If that does not give all names, because layers
    cannot be converted independently, all converted tensors are one group. Raises SelectionError if
    that does not give all names either.
    """
    layers: dict[str, list[str]] = {}
    for name in converted:
        layers.setdefault(re.sub(r"(\.\d+\.).*", r"\1", name), []).append(name)
    computed = set(computed_names)
    unattributed: set[str] = set()
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
    """Return the entries with the dtypes that they are stored in.

    `dtype` is a dtype of torch, "config" for the dtype of the model's config, or "as_is". Tensors
    that the class keeps in float32 stay so.
    """
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
    """Return steps of names whose tensors the class keeps in float32, with others in `target`."""
    steps = tuple(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if target == torch.float16:
        steps += tuple(getattr(module, "_keep_in_fp32_modules", None) or ())
    return steps
