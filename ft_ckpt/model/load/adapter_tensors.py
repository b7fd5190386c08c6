"""Copies the stored tensors of adapters into a PeftModel, and compares them with the result."""

from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.errors import LoadError, listing
from ft_ckpt.formats import dtype_name
from ft_ckpt.model.files import compare_torch_sums, join_weight_files, weight_names
from ft_ckpt.model.parts import adapter_parts
from ft_ckpt.model.tensors import PREFIX, Entry, View, peft_name
from ft_ckpt.ranks.sharding import Source, give_memory
from ft_ckpt.ranks.wrappers import ModelTensors

# The stored tensors of each adapter, by name.
StoredTensors = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class _LiveAdapters:
    """Tensors of a PeftModel.

    `entries` has the entries of each adapter by stored name. `base` has the tensors of the base,
    both by their names in the base with PEFT's prefix and by their names in the model.
    """

    entries: Mapping[str, Mapping[str, Entry]]
    base: Mapping[str, Source]


def fill_adapters(model: Any, checkpoint: OpenCheckpoint, records: Sequence[PartRecord]) -> None:
    """Copy the stored tensors into the adapters of `model` by name, and compare the result.

    Tensors that PEFT computes when it saves, such as pruned ranks, are loaded by PEFT. Raises
    LoadError naming every tensor that does not fit, or that has other values once it is loaded.
    """
    from peft import set_peft_model_state_dict

    live = _live_adapters(model)
    stored = {}
    for record in records:
        adapter = str(record.adapter)
        names = live.entries[adapter].keys()
        stored[adapter] = _stored_tensors(model, checkpoint, record, names)

    targets = _find_targets(live, checkpoint, stored)
    has_computed = False
    for adapter, tensors in stored.items():
        if tensors.keys() - targets[adapter].keys():
            has_computed = True
            set_peft_model_state_dict(model, dict(tensors), adapter_name=adapter)

    if has_computed:
        # PEFT has replaced layers whose ranks were pruned, so the tensors are looked up again.
        live = _live_adapters(model)
        targets = _find_targets(live, checkpoint, stored)

    for adapter, sources in targets.items():
        for name, source in sources.items():
            _copy_exactly(source.live, stored[adapter][name])

    _refuse_unfilled(live, checkpoint, stored, targets)


def _live_adapters(model: Any) -> _LiveAdapters:
    view = View(model, ModelTensors(model).sources())
    entries = {}
    for part in adapter_parts(view, "", "", "as_is", with_absent=False):
        entries[str(part.adapter)] = {entry.name: entry for entry in part.entries}
    base = {}
    for name, source in view.base_sources():
        base[PREFIX + name] = source
        base[source.name] = source
    return _LiveAdapters(entries, base)


def _stored_tensors(
    model: Any, checkpoint: OpenCheckpoint, record: PartRecord, expected: Set[str]
) -> dict[str, Tensor]:
    """Read the tensors of an adapter, by the names that the live adapter expects.

    An adapter of transformers 4 has the names and the single experts of that version, and PEFT
    converts them. But PEFT would also rename current names that look like older ones. So the
    tensors are converted only if some of the `expected` names are missing, and if fewer are missing
    afterwards.
    """
    files = weight_names(record)
    compare_torch_sums(checkpoint.store, files)
    tensors: dict[str, Tensor] = {}
    for file in files:
        with closing(join_weight_files(checkpoint.store, [file])) as tensor_file:
            for name, spec in tensor_file.specs.items():
                tensors[peft_name(name, file)] = tensor_file.read(name).view(spec.shape)
    missing = expected - tensors.keys()
    if not missing:
        return tensors
    converted = _converted_by_peft(model, str(record.adapter), tensors)
    still_missing = expected - converted.keys()
    return converted if len(still_missing) < len(missing) else tensors


def _converted_by_peft(model: Any, adapter: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # before PEFT 0.19, which converts nothing
        return tensors
    config = model.peft_config[adapter]
    converted: dict[str, Tensor] = conversion.convert_peft_adapter_state_dict_for_transformers(
        model, config, dict(tensors), adapter_name=adapter
    )
    return converted


def _find_targets(
    live: _LiveAdapters, checkpoint: OpenCheckpoint, stored: StoredTensors
) -> dict[str, dict[str, Source]]:
    """Find the live tensor that each stored tensor is copied into, by adapter and stored name.

    Stored tensors of the base are among them. Tensors that PEFT computes have no live tensor.
    Raises LoadError naming every tensor that is missing, is not in the model, or has another shape
    or kind of dtype (floating-point, complex, other).
    """
    stored_names: set[str] = set()
    for tensors in stored.values():
        stored_names.update(tensors)
    stored_in_base = live.base.keys() & stored_names  # one of the adapters has them
    problems: list[str] = []
    targets: dict[str, dict[str, Source]] = {}
    for adapter, tensors in stored.items():
        entries = live.entries[adapter]
        missing = entries.keys() - tensors.keys() - stored_in_base
        problems += [f"{name}: missing in the files" for name in sorted(missing)]
        targets[adapter] = {}
        for name, tensor in tensors.items():
            target = entries.get(name) or live.base.get(name)
            if target is None:
                problems.append(f"{name}: no place in the model")
                continue
            is_of_kind = _are_of_one_kind(tensor.dtype, target.dtype)
            if tuple(tensor.shape) != target.shape or not is_of_kind:
                actual = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
                expected = f"{dtype_name(target.dtype)} {tuple(target.shape)}"
                problems.append(f"{name}: {actual} in the files, expected {expected}")
                continue
            source = target.source if isinstance(target, Entry) else target
            if source is not None:
                targets[adapter][name] = source

    if problems:
        raise LoadError(
            f"{listing(problems)}: the adapter in {checkpoint.store.url} does not fit this base"
        )

    return targets


def _are_of_one_kind(first: torch.dtype, second: torch.dtype) -> bool:
    is_same_float = first.is_floating_point == second.is_floating_point
    return is_same_float and first.is_complex == second.is_complex


@torch.no_grad()
def _copy_exactly(live: Tensor, stored: Tensor) -> None:
    """Overwrite a tensor. It gets the dtype of the stored one if its own would round the values."""
    give_memory(live)
    if not _represents_all(live.dtype, stored.dtype):
        live.data = live.data.to(stored.dtype)
    live.copy_(stored)


def _represents_all(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Check whether `dtype` can represent all values of the dtype `stored`."""
    if not stored.is_floating_point:
        return dtype == stored or torch.promote_types(dtype, stored) == dtype
    limits = torch.finfo(dtype)
    needed = torch.finfo(stored)
    is_as_precise = limits.eps <= needed.eps
    return is_as_precise and limits.max >= needed.max and limits.tiny <= needed.tiny


def _refuse_unfilled(
    live: _LiveAdapters,
    checkpoint: OpenCheckpoint,
    stored: StoredTensors,
    targets: Mapping[str, Mapping[str, Source]],
) -> None:
    """Raise LoadError naming the tensors of live adapters that differ from the stored tensors."""
    problems = []
    for adapter, tensors in stored.items():
        values = {name: source.live for name, source in targets[adapter].items()}
        groups = dict.fromkeys(entry.group for entry in live.entries[adapter].values())
        for group in groups:
            if group is not None:
                values |= group.convert({source.name: source.live for source in group.sources})
        for name, tensor in tensors.items():
            if not _are_equal(values[name], tensor):
                problems.append(f"{name}: other values in adapter {adapter!r} once it is loaded")

    if problems:
        raise LoadError(
            f"{listing(problems)}: expected those in {checkpoint.store.url}; use the version of "
            "PEFT that wrote the adapter"
        )


def _are_equal(live: Tensor, stored: Tensor) -> bool:
    """Check whether a tensor has the stored values, where NaN equals NaN."""
    values = live.detach()
    expected = stored.to(values.device, values.dtype)
    is_same = (values == expected) | (values.isnan() & expected.isnan())
    return bool(is_same.all())
