"""Puts stored adapters onto their base: the right base, all their tensors, the active one active."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, checkpoint_around, open_checkpoint
from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.tensors import ModelTensors
from ft_ckpt.errors import BaseMismatchError, CorruptError, LoadError, listing
from ft_ckpt.formats.dtypes import dtype_of
from ft_ckpt.formats.registry import format_named
from ft_ckpt.model.adapters import PREFIX, adapter_parts, base_sources, is_peft_model
from ft_ckpt.model.added_rows import embedding_of
from ft_ckpt.model.base_model import differing_tensors, is_floating, keeps_base
from ft_ckpt.model.open_weights import read_tensors, weight_names
from ft_ckpt.model.pretrained import companions_here, model_class
from ft_ckpt.model.selection import View
from ft_ckpt.storage.place import Place, open_place


@dataclass(frozen=True, eq=False)
class Attached:
    """The model with its adapters, and the names that did not fit."""

    model: nn.Module
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    notes: tuple[str, ...]


def base_of(record: PartRecord, given: Any, trust_remote_code: bool, *, verify: bool) -> nn.Module:
    """The base model for an adapter: `given` as module, folder or id, else the one it was trained on.

    Code that lies with the base is run only with `trust_remote_code`; nobody is asked. A base in a checkpoint of ours
    is compared with its manifest, all its digests with `verify`.

    Raises LoadError when there is neither, or when it cannot be had; CorruptError when its files are damaged.
    """
    if isinstance(given, nn.Module):
        return given
    recorded = record.base.id if record.base else None
    place = given if given is not None else recorded
    if place is None:
        raise LoadError(f"adapter {record.adapter!r}: its base was built in memory and has no id; pass base=")

    _refuse_damaged_base(place, verify)
    revision = record.base.revision if record.base and given is None else None
    asked = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        model: nn.Module = _base_class(str(place), asked).from_pretrained(place, dtype="auto", **asked)
    except (OSError, ValueError) as error:
        raise LoadError(
            f"adapter {record.adapter!r}: base model {str(place)!r} cannot be loaded ({error}); pass base= with a "
            "model, a folder or an id"
        ) from error
    return model


def _refuse_damaged_base(place: Any, verify: bool) -> None:
    """Raise CorruptError for files of a checkpoint of ours that are not what its manifest says."""
    around = checkpoint_around(open_place(place)) if open_place(place).is_folder else None
    if around is None:
        return
    with open_checkpoint(Place(around[0]), compares=False) as held:
        if problems := held.find_problems(deep=verify):
            raise CorruptError(f"{held.location}: {listing(list(problems))}; use another copy of the base")


def attach_adapters(
    model: nn.Module, held: OpenCheckpoint, records: Sequence[PartRecord], *, check_base: bool, beside: bool = False
) -> Attached:
    """Put the adapters in `records` onto `model`, which may be a base or already carry adapters of these names.

    `beside`: the base is of the same checkpoint, so what its adapters changed of it when they were made is done. A base
    that they change now is compared when they are on it, as it was recorded.

    Raises BaseMismatchError when sampled weights show another base, LoadError naming every tensor that is missing
    or has no place.
    """
    from peft import PeftModel

    configs = {str(record.adapter): _adapter_config(held, record, beside) for record in records}
    is_remade = not all(keeps_base(config) for config in configs.values())
    check_base = check_base and not is_peft_model(model)
    notes = _prepare_base(model, held, records, check_base and not is_remade)
    peft_model: Any = model if is_peft_model(model) else None
    for record in records:
        name = str(record.adapter)
        if not format_named(record.format).read_by_transformers:  # nor by PEFT
            peft_model = _add_adapter(peft_model or model, held, record, configs[name])
            continue
        with companions_here(held, record) as folder:
            if peft_model is None:
                peft_model = PeftModel.from_pretrained(model, str(folder), adapter_name=name, config=configs[name])
            else:
                if name not in peft_model.peft_config:
                    peft_model.add_adapter(name, configs[name])
                peft_model.load_adapter(str(folder), adapter_name=name)
    for record in records if check_base and is_remade else ():
        here = dict(base_sources(View(peft_model, ModelTensors(peft_model).sources())))
        _check_base(here, type(model).__name__, record, is_remade=True)
    missing, unexpected = _place_brought(peft_model, held, records)
    problems = [f"{name}: missing in the files" for name in missing]
    problems += [f"{name}: no place in the model" for name in unexpected]
    if problems:
        raise LoadError(f"{listing(problems)}: the adapter in {held.store.url} does not fit this base")
    _activate_adapters(peft_model, records)
    return Attached(peft_model.eval(), tuple(missing), tuple(unexpected), notes)


def _adapter_config(held: OpenCheckpoint, record: PartRecord, beside: bool) -> Any:
    """An adapter's config; on a base that was saved `beside` it, which it must not change once more."""
    from peft import PeftConfig

    with companions_here(held, record, lambda name: name == "adapter_config.json") as folder:
        config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = True
    if beside and not keeps_base(config):
        config.init_lora_weights = True
    return config


def _add_adapter(model: Any, held: OpenCheckpoint, record: PartRecord, config: Any) -> Any:
    """The adapter of an HDF5 file: made from its config, then filled."""
    from peft import get_peft_model, set_peft_model_state_dict

    name = str(record.adapter)
    if is_peft_model(model):
        model.add_adapter(name, config)
    else:
        model = get_peft_model(model, config, adapter_name=name)
    for file in weight_names(record):
        set_peft_model_state_dict(model, read_tensors(held.store, file), adapter_name=name)
    return model


def _base_class(place: str, asked: Mapping[str, Any]) -> Any:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(place, **asked)
    except (OSError, ValueError):
        return transformers.AutoModel  # its own error will say what is wrong with the place
    names = getattr(config, "architectures", None) or ()
    return next((cls for name in names if (cls := model_class(str(name)))), transformers.AutoModel)


def _prepare_base(model: Any, held: OpenCheckpoint, records: Sequence[PartRecord], check: bool) -> tuple[str, ...]:
    """Compare the base with the one trained on, then give it the rows that were added for the adapter."""
    if is_peft_model(model):
        return ()
    if check:
        here = ModelTensors(model).sources()
        for record in records:
            _check_base(here, type(model).__name__, record, is_remade=False)
    rows = _stored_rows(model, records)
    if rows is None or rows == model.get_input_embeddings().weight.shape[0]:
        return ()
    model.resize_token_embeddings(rows, mean_resizing=False)
    return (f"embeddings resized to {rows} rows, as the adapter in {held.store.url} was trained with",)


def _stored_rows(model: Any, records: Sequence[PartRecord]) -> int | None:
    """Rows of the input embeddings that the adapter brings with it, if it does."""
    layer = embedding_of(model)
    if layer is None:
        return None
    name = next((name for name, inner in model.named_modules() if inner is layer), None)
    wanted = {f"{PREFIX}{name}.weight", f"{PREFIX}{name}.base_layer.weight"}
    found = (t.shape[0] for record in records for t in record.tensors if t.name in wanted)
    return next(found, None)


def _check_base(here: Mapping[str, Source], kind: str, record: PartRecord, *, is_remade: bool) -> None:
    """Compare a base with the one that the adapter in `record` was trained on; `kind` is its class."""
    base, name = record.base, str(record.adapter)
    if base is None:
        return
    # quantised here or there: the tensors that stayed floating speak for it
    known = {n: values for n, values in base.fingerprint.items() if n in here and is_floating(here[n])}
    sampled = replace(record, base=replace(base, fingerprint=known))
    names = differing_tensors(here, sampled, is_remade=is_remade)
    if names:
        remade = "; its making changes the base, and did so otherwise here" if is_remade else ""
        raise BaseMismatchError(
            f"{listing(names, ', ')}: {len(names)} of {len(known)} sampled tensors of this base differ from the one "
            f"that adapter {name!r} was trained on ({base.id or 'built in memory'}, revision {base.revision})"
            f"{remade}; load it on that base, or pass check_base=False"
        )
    if base.fingerprint and not known:
        raise BaseMismatchError(
            f"adapter {name!r}: none of the {len(base.fingerprint)} sampled tensors of its base is in {kind}; "
            f"load it on {base.id or 'the model it was trained on'}, or pass check_base=False"
        )


def _place_brought(model: Any, held: OpenCheckpoint, records: Sequence[PartRecord]) -> tuple[list[str], list[str]]:
    """Names missing in files or model. What PEFT leaves alone or rounds is put in place: base tensors that came with
    the adapter, and what is stored in a type that the base is not in.
    """
    one = View(model, ModelTensors(model).sources())
    expected = {part.adapter: part.entries for part in adapter_parts(one, "", "", "as_is")}
    base = {PREFIX + name: source for name, source in base_sources(one)}
    base.update({source.name: source for _, source in base_sources(one)})
    missing: list[str] = []
    unexpected: list[str] = []
    for record in records:
        own = {entry.name: entry.source for entry in expected[record.adapter]}
        stored = {tensor.name for tensor in record.tensors}
        missing += sorted(own.keys() - stored)
        brought = stored - own.keys()
        unexpected += sorted(brought - set(base))
        places = {name: base[name] for name in brought if name in base}
        for tensor in record.tensors:
            if (source := own.get(tensor.name)) and not _holds_all(source.dtype, dtype_of(tensor.dtype)):
                places[tensor.name] = source
        _copy_brought(held, record, places)
    return missing, unexpected


def _holds_all(live: torch.dtype, stored: torch.dtype) -> bool:
    """Whether values of the type `stored` are not rounded in the type `live`."""
    return live == stored or torch.promote_types(live, stored) == live


def _copy_brought(held: OpenCheckpoint, record: PartRecord, brought: Mapping[str, Source]) -> None:
    for file in {tensor.file for tensor in record.tensors if tensor.name in brought}:
        stored = read_tensors(held.store, file)
        with torch.no_grad():
            for name in brought:
                live: Tensor = brought[name].live
                if not _holds_all(live.dtype, stored[name].dtype):
                    live.data = live.data.to(stored[name].dtype)
                live.copy_(stored[name])


def _activate_adapters(model: Any, records: Sequence[PartRecord]) -> None:
    active = [str(record.adapter) for record in records if record.active]
    if len(active) == 1:
        model.set_adapter(active[0])
    elif active:
        model.base_model.set_adapter(active)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
