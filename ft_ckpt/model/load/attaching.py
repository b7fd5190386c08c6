"""Attaches stored adapters to their base.

The base is compared with the recorded one. PEFT makes the adapters, the stored tensors are copied
into them, and those that were active in the save are activated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.checkpoint.manifest import BaseRecord, PartRecord
from ft_ckpt.errors import BaseMismatchError, LoadError, listing
from ft_ckpt.model.base import differing_tensors, embedding_of, identifying_samples
from ft_ckpt.model.load.adapter_config import explain_peft_errors, read_adapter_config
from ft_ckpt.model.load.adapter_tensors import fill_adapters
from ft_ckpt.model.parts import why_redrawn
from ft_ckpt.model.tensors import (
    View,
    base_name,
    irreproducible,
    is_peft_model,
    keeps_base,
    peft_name,
)
from ft_ckpt.ranks.moving import has_readable_elements
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import ModelTensors


def attach_adapters(
    model: nn.Module,
    checkpoint: OpenCheckpoint,
    records: Sequence[PartRecord],
    *,
    check_base: bool,
    base_is_stored: bool = False,
) -> tuple[nn.Module, tuple[str, ...]]:
    """Attach the adapters in `records` to `model`.

    `model` is a base, or has adapters of these names already. `base_is_stored` means that the base
    is in the same checkpoint, with the changes by the initialisation of its adapters. If
    `check_base`, a base is compared with the recorded one. If the initialisation of the adapters
    changes the base, the comparison comes after that change.

    Returns the model and notes for the report. Raises BaseMismatchError when sampled weights differ
    from the recorded base. Raises LoadError naming the tensors and settings that do not fit, or the
    adapters whose base cannot be recreated.
    """
    configs = {}
    for record in records:
        configs[str(record.adapter)] = read_adapter_config(
            checkpoint, record, base_is_stored=base_is_stored
        )

    _refuse_redrawn(checkpoint, configs)
    if not base_is_stored:
        _refuse_changed_base(checkpoint, records, configs)
    check_base = check_base and not is_peft_model(model)
    is_changed = not all(keeps_base(config) for config in configs.values())
    if check_base and not is_changed:
        sources = ModelTensors(model).sources()
        _check_base(sources, type(model).__name__, records, is_changed=False)

    notes = _resize_embeddings(model, checkpoint, records)
    records = [_with_peft_names(record) for record in records]
    peft_model: Any = model
    for record in records:
        adapter = str(record.adapter)
        with explain_peft_errors(checkpoint, [record]):
            peft_model = _make_adapter(peft_model, adapter, configs[adapter])

    if check_base and is_changed:
        sources = dict(View(peft_model, ModelTensors(peft_model).sources()).base_sources())
        _check_base(sources, type(model).__name__, records, is_changed=True)

    with explain_peft_errors(checkpoint, records):
        fill_adapters(peft_model, checkpoint, records)
    _activate_adapters(peft_model, records)
    return peft_model.eval(), notes


def _refuse_redrawn(checkpoint: OpenCheckpoint, configs: Mapping[str, Any]) -> None:
    reasons = []
    for adapter, config in configs.items():
        reason = why_redrawn(adapter, config)
        if reason:
            reasons.append(reason)
    if reasons:
        raise LoadError(
            f"{checkpoint.store.url}: {listing(reasons)}; the trained adapter cannot be recreated"
        )


def _refuse_changed_base(
    checkpoint: OpenCheckpoint, records: Sequence[PartRecord], configs: Mapping[str, Any]
) -> None:
    """Raise LoadError for adapters whose initialisation changed the base and cannot be repeated."""
    reason = irreproducible(configs)
    if reason:
        raise LoadError(
            f"{reason}: no base fits the adapter alone; save the model in the process that trains "
            "it, with adapter_only=False or merged=True. If the base given has the changed weights "
            "already, set init_lora_weights to true in the adapter's config"
        )

    if all(record.base and record.base.fingerprint for record in records):
        return  # The comparison with the recorded base decides.
    adapters = [part for part in checkpoint.manifest.parts if part.kind == "adapter"]
    if len(adapters) == 1:
        return
    changing = []
    for record in adapters:
        config = read_adapter_config(checkpoint, record, base_is_stored=False)
        if not keeps_base(config):
            changing.append(str(record.adapter))

    if changing:
        raise LoadError(
            f"adapter {', '.join(changing)}: its initialisation changed the base, "
            f"and {checkpoint.store.url} has {len(adapters)} adapters; nothing says which of "
            "them were trained on the changed base. Copy an adapter that was trained "
            "by itself into a folder of its own"
        )


def _with_peft_names(record: PartRecord) -> PartRecord:
    tensors = []
    for tensor in record.tensors:
        tensors.append(replace(tensor, name=peft_name(tensor.name, tensor.file)))
    return replace(record, tensors=tuple(tensors))


def _make_adapter(model: Any, adapter: str, config: Any) -> Any:
    """Return the PeftModel with an adapter of this name, which is made if it is missing.

    The tensors of the adapter are filled later.
    """
    from peft import PeftModel
    from peft.auto import MODEL_TYPE_TO_PEFT_MODEL_MAPPING

    if not is_peft_model(model):
        cls = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, PeftModel)
        return cls(model, config, adapter)
    if adapter not in model.peft_config:
        model.add_adapter(adapter, config)
    return model


def _resize_embeddings(
    model: Any, checkpoint: OpenCheckpoint, records: Sequence[PartRecord]
) -> tuple[str, ...]:
    """Resize the embeddings of a base to the rows that the adapters store. Return notes on it."""
    if is_peft_model(model):
        return ()
    rows = _stored_rows(model, records)
    if rows is None or rows == model.get_input_embeddings().weight.shape[0]:
        return ()
    model.resize_token_embeddings(rows, mean_resizing=False)
    place = checkpoint.location
    return (f"embeddings resized to {rows} rows, as the adapter in {place} was trained with",)


def _stored_rows(model: Any, records: Sequence[PartRecord]) -> int | None:
    """Return the number of input embedding rows that the adapters store.

    Returns None if they store no embeddings.
    """
    embedding = embedding_of(model)
    if embedding is None:
        return None
    path = next((path for path, module in model.named_modules() if module is embedding), None)
    for record in records:
        for tensor in record.tensors:
            if tensor.shape and base_name(tensor.name) == f"{path}.weight":
                return tensor.shape[0]
    return None


def _check_base(
    sources: Mapping[str, Source],
    class_name: str,
    records: Sequence[PartRecord],
    *,
    is_changed: bool,
) -> None:
    """Raise BaseMismatchError unless a base matches the one recorded for each adapter.

    `is_changed` means that the initialisation of the adapters has changed the base.
    """
    for record in records:
        if record.base is not None:
            _check_recorded_base(sources, class_name, record, record.base, is_changed)


def _check_recorded_base(
    sources: Mapping[str, Source],
    class_name: str,
    record: PartRecord,
    base: BaseRecord,
    is_changed: bool,
) -> None:
    adapter = str(record.adapter)

    # Quantised tensors cannot be compared. So if one of both bases is quantised, only its other
    # tensors are compared.
    samples = identifying_samples(record)
    comparable = {}
    for name, values in samples.items():
        if name in sources and has_readable_elements(sources[name]):
            comparable[name] = values

    sampled = replace(record, base=replace(base, fingerprint=comparable))
    differing = differing_tensors(sources, sampled, is_changed=is_changed)
    if differing:
        change = ""
        if is_changed:
            change = "; its initialisation changes the base, and gave another result here"
        raise BaseMismatchError(
            f"{listing(differing, ', ')}: {len(differing)} of {len(comparable)} sampled tensors of "
            f"this base differ from the one that adapter {adapter!r} was trained on "
            f"({base.id or 'built in memory'}, revision {base.revision}){change}; load it on that "
            "base, or pass check_base=False"
        )

    if samples and not comparable:
        raise BaseMismatchError(
            f"adapter {adapter!r}: none of the {len(samples)} sampled tensors of its base is in "
            f"{class_name}; load it on {base.id or 'the model it was trained on'}, or pass "
            "check_base=False"
        )


def _activate_adapters(model: Any, records: Sequence[PartRecord]) -> None:
    active = [str(record.adapter) for record in records if record.active]
    if len(active) == 1:
        model.set_adapter(active[0])
    elif active:
        model.base_model.set_adapter(active)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
