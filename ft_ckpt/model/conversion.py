"""Conversion of a model's tensors whose names, form or dtypes differ between memory and file.

Planning needs names, shapes and dtypes only: transformers converts tensors on the meta device.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.model.entries import Entry, Group, unchanged_entry
from ft_ckpt.model.libraries import PREFIX
from ft_ckpt.ranks import Source, shallow_copy


def load_conversion_table() -> None:
    """Build transformers' conversion table before training starts; it takes 60 ms, once per
    process.
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")


def stored_as_in_memory(module: nn.Module, names: Mapping[str, Source]) -> bool:
    """Whether transformers writes this model's tensors under the names and in the form they have in
    memory.
    """
    return all(names.get(entry.name) is entry.source for entry in converted_entries(module, names))


def converted_entries(module: Any, kept: Mapping[str, Source]) -> list[Entry]:
    """Entries under the names that transformers writes, which for some architectures differ from
    those in memory.

    The conversion runs on meta tensors: a tensor returned as the same object was only renamed and
    is streamed. The others are converted in groups, one per layer if the layers can be converted
    independently.
    """
    from transformers.core_model_loading import revert_weight_conversion

    kinds = {(s.shape, s.dtype) for s in kept.values()}
    empty = {kind: torch.empty(kind[0], dtype=kind[1], device="meta") for kind in kinds}
    # one object per name
    placeholders = {name: empty[s.shape, s.dtype].detach() for name, s in kept.items()}
    described = with_whole_parameters(module, placeholders)
    if _has_conversions_of_adapter(module):
        # transformers then takes those of the model's class
        vars(described)["_weight_conversions"] = None
    stored: dict[str, Tensor] = revert_weight_conversion(described, dict(placeholders))
    origin = {id(tensor): name for name, tensor in placeholders.items()}
    streamed = {name: origin[id(tensor)] for name, tensor in stored.items() if id(tensor) in origin}
    renamed = {*streamed.values()}
    left = [name for name in kept if name not in renamed]
    made = {name: tensor for name, tensor in stored.items() if name not in streamed}
    converted = {name: kept[name] for name in left}
    group_of = _conversion_groups(described, converted, made, revert_weight_conversion)
    return [
        unchanged_entry(name, kept[streamed[name]])
        if name in streamed
        else Entry(name, tuple(tensor.shape), tensor.dtype, tensor.dtype, group=group_of[name])
        for name, tensor in stored.items()
    ]


def _has_conversions_of_adapter(module: Any) -> bool:
    """Whether transformers read an adapter into the model, and kept that file's conversions instead
    of the base's.
    """
    conversions = getattr(module, "_weight_conversions", None) or ()
    patterns = [pattern for conversion in conversions for pattern in conversion.source_patterns]
    return any(pattern.startswith(PREFIX) for pattern in patterns)


def with_whole_parameters(module: nn.Module, placeholders: Mapping[str, Tensor]) -> Any:
    """A copy of the model that gives transformers the whole parameter of a name.

    transformers asks a model for the shapes of parameters. In the model itself one may be inside a
    PEFT layer or a wrapper, or an engine has cut or flattened it.
    """
    described = shallow_copy(module)
    vars(described)["get_parameter"] = placeholders.__getitem__
    return described


def _conversion_groups(
    module: Any,
    left: Mapping[str, Source],
    made: Mapping[str, Tensor],
    revert: Callable[..., dict[str, Tensor]],
) -> dict[str, Group]:
    """Stored name -> the group that computes it; one group for all if layers do not convert
    independently.
    """

    def make_group(names: list[str]) -> Group:
        chosen = {left[name].name: name for name in names}

        def convert_layer(full: dict[str, Tensor]) -> dict[str, Tensor]:
            return revert(module, {chosen[name]: tensor for name, tensor in full.items()})

        return Group(tuple(left[name] for name in names), convert_layer)

    layers: dict[str, list[str]] = {}
    for name in left:
        layers.setdefault(re.sub(r"(\.\d+\.).*", r"\1", name), []).append(name)
    for split in (list(layers.values()), [list(left)]):
        result: dict[str, Group] = {}
        for names in split:
            group = make_group(names)
            empty = {
                s.name: torch.empty(s.shape, dtype=s.dtype, device="meta") for s in group.sources
            }
            result |= {name: group for name in group.convert(empty) if name in made}
        if set(result) == set(made):
            return result
    raise SelectionError(
        f"{listing(sorted(set(made) ^ set(result)), ', ')}: these stored names cannot be "
        "attributed to live tensors; this transformers version converts this model in a way "
        "ft_ckpt does not know"
    )


def cast_entries(entries: Sequence[Entry], module: nn.Module, dtype: str) -> tuple[Entry, ...]:
    """The entries in the dtype of the policy `dtype`: a dtype of torch, "config" or "as_is"."""
    if dtype == "as_is":
        return tuple(entries)
    wanted: Any = (
        getattr(getattr(module, "config", None), "dtype", None) if dtype == "config" else dtype
    )
    target = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    if target is None:
        return tuple(entries)
    kept = kept_in_float32(module, target)

    def cast(entry: Entry) -> Entry:
        is_ordinary = entry.dtype in {torch.float64, torch.float32, torch.bfloat16, torch.float16}
        is_kept = entry.dtype == torch.float32 and any(
            step in entry.name.split(".") for step in kept
        )
        return entry._replace(dtype=target) if is_ordinary and not is_kept else entry

    return tuple(map(cast, entries))


def kept_in_float32(module: nn.Module, target: torch.dtype) -> tuple[str, ...]:
    """Name steps of the tensors that the model's class keeps in float32 when the rest is in
    `target`.
    """
    strict = tuple(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    half = (
        tuple(getattr(module, "_keep_in_fp32_modules", None) or ())
        if target == torch.float16
        else ()
    )
    return (*strict, *half)
