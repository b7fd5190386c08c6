"""Attaches stored adapters to their base: checks the base, fills all tensors, activates the active adapters."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import is_dataclass, replace
from enum import Enum
from pathlib import PurePosixPath
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, checkpoint_around, open_checkpoint
from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.tensors import ModelTensors
from ft_ckpt.errors import BaseMismatchError, CheckpointError, CorruptError, LoadError, listing, shown
from ft_ckpt.formats.dtypes import dtype_name, dtype_of
from ft_ckpt.formats.registry import format_named
from ft_ckpt.formats.tensor_file import RawFile
from ft_ckpt.formats.torch_file import compare_sums
from ft_ckpt.messages import short
from ft_ckpt.model.adapters import (
    BASE_STEPS,
    PREFIX,
    adapter_parts,
    base_sources,
    embedding_of,
    is_peft_model,
    peft_name,
    why_redrawn,
)
from ft_ckpt.model.base_model import differing_tensors, irreproducible, is_floating, keeps_base
from ft_ckpt.model.diffusers import model_class as diffusers_class
from ft_ckpt.model.entries import Entry
from ft_ckpt.model.libraries import ADAPTER_FILE, is_config_of_diffusers
from ft_ckpt.model.load_weights import beside_weights, read_tensors, weight_names
from ft_ckpt.model.pretrained import companions_here, model_class
from ft_ckpt.model.selection import View
from ft_ckpt.model.settings import adapter_settings
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.store import Store, read_text

_CONFIG = "adapter_config.json"


def base_of(record: PartRecord, given: Any, trust_remote_code: bool, *, verify: bool) -> nn.Module:
    """The base model for an adapter: `given` as module, folder or id, else the recorded base.

    Custom code of the base runs only with `trust_remote_code`; there is no prompt. A base in a checkpoint of ours is
    compared with its manifest, including all digests with `verify`.

    Raises LoadError when no base is known or it cannot be loaded; CorruptError when its files are damaged.
    """
    if isinstance(given, nn.Module):
        return given
    recorded = record.base.id if record.base else None
    place = given if given is not None else recorded
    if place is None:
        raise LoadError(f"adapter {record.adapter!r}: its base was built in memory and has no id; pass base=")

    where = open_place(place)
    around = checkpoint_around(where) if where.is_folder else None
    if around is not None:
        with open_checkpoint(Place(around[0]), compares=False) as held:
            if problems := held.find_problems(deep=verify):
                raise CorruptError(f"{held.location}: {listing(list(problems))}; use another copy of the base")
    elif where.is_folder:
        names = [each.name for each in where.folder.list_folder().objects]
        if not any(name.endswith(".safetensors") for name in names):
            _compare_torch_sums(where.folder, names)
    revision = record.base.revision if record.base and given is None else None
    asked = {"revision": revision, "trust_remote_code": trust_remote_code}
    try:
        if (name := _class_in_diffusers(where)) is not None:
            dtype = getattr(torch, record.base.dtype if record.base else "float32")
            loaded: nn.Module = diffusers_class(name, {}).from_pretrained(place, torch_dtype=dtype)
            return loaded
        model: nn.Module = _base_class(str(place), asked).from_pretrained(place, dtype="auto", **asked)
    except (OSError, ValueError) as error:
        raise LoadError(
            f"adapter {record.adapter!r}: base model {str(place)!r} cannot be loaded ({error}); pass base= with a "
            "model, a folder or an id"
        ) from error
    return model


def attach_adapters(
    model: nn.Module, held: OpenCheckpoint, records: Sequence[PartRecord], *, check_base: bool, beside: bool = False
) -> tuple[nn.Module, tuple[str, ...]]:
    """Attach the adapters in `records` to `model`, which may be a base or already carry adapters of these names.

    `beside`: the base is in the same checkpoint and contains the changes by its adapters' initialisation. Otherwise
    a base that the initialisation changes is compared with the recorded base after that change.

    Returns the model and notes for the report. Raises BaseMismatchError when sampled weights differ from the recorded
    base, LoadError naming the tensors and settings that do not fit, or the adapters whose base cannot be recreated.
    """
    configs = {str(record.adapter): _adapter_config(held, record, beside) for record in records}
    if drawn := listing([why for name, config in configs.items() if (why := why_redrawn(name, config))]):
        raise LoadError(f"{held.store.url}: {drawn}; the trained adapter cannot be recreated")
    if not beside:
        _refuse_changed_base(held, records, configs)
    is_remade = not all(keeps_base(config) for config in configs.values())
    check_base = check_base and not is_peft_model(model)
    notes = _prepare_base(model, held, records, check_base and not is_remade)
    peft_model: Any = model
    records = [_with_peft_names(record) for record in records]
    for record in records:
        with _explain_peft(held, [record]):
            peft_model = _make_adapter(peft_model, str(record.adapter), configs[str(record.adapter)])
    for record in records if check_base and is_remade else ():
        here = dict(base_sources(View(peft_model, ModelTensors(peft_model).sources())))
        _check_base(here, type(model).__name__, record, is_remade=True)
    with _explain_peft(held, records):
        targets = _find_targets(View(peft_model, ModelTensors(peft_model).sources()), held, records)
        for record in records:
            _fill_adapter(peft_model, held, record)
            _copy_exactly(held, record, targets[str(record.adapter)])
    _activate_adapters(peft_model, records)
    return peft_model.eval(), notes


def _with_peft_names(record: PartRecord) -> PartRecord:
    tensors = tuple(replace(tensor, name=peft_name(tensor.name, tensor.file)) for tensor in record.tensors)
    return replace(record, tensors=tensors)


def _refuse_changed_base(held: OpenCheckpoint, records: Sequence[PartRecord], configs: Mapping[str, Any]) -> None:
    """Raise LoadError for adapters whose initialisation changed the base in a way that cannot be repeated here."""
    if why := irreproducible(configs):
        raise LoadError(
            f"{why}: no base fits the adapter alone; save the model in the process that trains it, with "
            "adapter_only=False or merged=True. If the base given has the changed weights already, set "
            "init_lora_weights to true in the adapter's config"
        )
    others = [part for part in held.manifest.parts if part.kind == "adapter"]
    if len(others) == 1 or all(record.base and record.base.fingerprint for record in records):
        return  # the base is compared with the recorded one
    all_configs = {str(part.adapter): _adapter_config(held, part, beside=False) for part in others}
    if changing := [name for name, config in all_configs.items() if not keeps_base(config)]:
        raise LoadError(
            f"adapter {', '.join(changing)}: its initialisation changed the base, and {held.store.url} has "
            f"{len(others)} adapters; nothing says which of them were trained on the changed base. Copy an adapter "
            "that was trained by itself into a folder of its own"
        )


def _adapter_config(held: OpenCheckpoint, record: PartRecord, beside: bool) -> Any:
    """An adapter's config; for a base saved `beside` it, its initialisation does not change the base again."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    with _explain_peft(held, [record]), companions_here(held, record, lambda name: name == _CONFIG) as folder:
        settings = adapter_settings(Place(held.store, record.path).folder)
        # The class of the method: PeftConfig would skip its handling of older versions.
        config: Any = PEFT_TYPE_TO_CONFIG_MAPPING[settings["peft_type"]].from_pretrained(str(folder))
    config.inference_mode = True
    if beside and not keeps_base(config):
        config.init_lora_weights = True
    return config


def _make_adapter(model: Any, name: str, config: Any) -> Any:
    """The PeftModel with an adapter called `name`; its tensors are filled later."""
    from peft import PeftModel
    from peft.auto import MODEL_TYPE_TO_PEFT_MODEL_MAPPING

    if not is_peft_model(model):
        return MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, PeftModel)(model, config, name)
    if name not in model.peft_config:
        model.add_adapter(name, config)
    return model


def _fill_adapter(model: Any, held: OpenCheckpoint, record: PartRecord) -> None:
    from peft import set_peft_model_state_dict

    name = str(record.adapter)
    _compare_torch_sums(held.store, weight_names(record))
    is_of_peft = all(PurePosixPath(file).name.startswith(ADAPTER_FILE) for file in weight_names(record))
    if is_of_peft and format_named(record.format).read_by_transformers:  # and by PEFT
        with companions_here(held, record) as folder:
            model.load_adapter(str(folder), adapter_name=name)
        return
    for file in weight_names(record):
        set_peft_model_state_dict(model, _read_adapter(held.store, file), adapter_name=name)


def _read_adapter(store: Store, file: str) -> dict[str, Tensor]:
    """The tensors of an adapter's weight file, by PEFT's names."""
    return {peft_name(name, file): tensor for name, tensor in read_tensors(store, file).items()}


def _compare_torch_sums(store: Store, names: Iterable[str]) -> None:
    """Compare the checksums in torch's files, which torch itself does not. Raises CorruptError."""
    for name in names:
        if name.endswith(format_named("torch").suffixes):
            with closing(RawFile(store.open(name))) as raw:
                compare_sums(raw)


@contextmanager
def _explain_peft(held: OpenCheckpoint, records: Sequence[PartRecord]) -> Iterator[None]:
    """Raise LoadError for errors of PEFT, naming invalid settings, or else the adapter configs."""
    try:
        yield
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        files = [beside_weights(record, _CONFIG) for record in records]
        invalid = [f"{file}: {problem}" for file in files for problem in _invalid_settings(held.store, file)]
        raise LoadError(
            f"{listing(invalid or files)}: PEFT cannot make the adapter in {held.store.url} ({shown(error)}); use "
            "another copy, or the version of PEFT that wrote it"
        ) from error


def _invalid_settings(store: Store, file: str) -> list[str]:
    """Invalid settings in the adapter config `file`: unknown method, undeclared type, invalid pattern."""
    import peft
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    settings = json.loads(read_text(store, file))
    if not isinstance(settings, dict):
        return ["no JSON object"]
    kinds = {str(kind.value): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if (method := settings.get("peft_type")) not in list(kinds):
        return [f"peft_type: {short(method)}, expected a method of PEFT {peft.__version__}"]
    hints = get_type_hints(kinds[method])
    mistyped = [
        f"{name}: {short(value)}, expected {str(hints[name]).replace('typing.', '')}"
        for name, value in settings.items()
        if name in hints and not _is_of_type(value, hints[name])
    ]
    patterns = {name: [value] if isinstance(value, str) else value for name, value in settings.items()}
    return mistyped + [
        f"{name}: {short(text)} is no regular expression"
        for name, texts in patterns.items()
        if isinstance(texts, (list, dict))
        for text in texts
        if isinstance(text, str) and not _is_pattern(text)
    ]


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _is_of_type(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of an annotated type; True for unsupported annotations."""
    kind, inside = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return any(_is_of_type(value, one) for one in inside)
    if kind is Literal:
        return value in inside
    if kind in (list, tuple, set):
        return isinstance(value, list) and all(_is_of_type(one, inside[0]) for one in value)
    if kind is dict or is_dataclass(hint):
        return isinstance(value, dict)
    if hint in (int, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return value in [one.value for one in hint]
    return hint is Any or not isinstance(hint, type) or isinstance(value, hint)


def _class_in_diffusers(place: Place) -> str | None:
    """The class in diffusers of the model in the folder `place`; None for another model, or no folder."""
    if not place.is_folder or place.folder.stat("config.json") is None:
        return None
    config = json.loads(read_text(place.folder, "config.json"))
    return str(config["_class_name"]) if is_config_of_diffusers(config) else None


def _base_class(place: str, asked: Mapping[str, Any]) -> Any:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(place, **asked)
    except (OSError, ValueError):
        return transformers.AutoModel  # its error names the problem
    names = getattr(config, "architectures", None) or ()
    return next((cls for name in names if (cls := model_class(str(name)))), transformers.AutoModel)


def _prepare_base(model: Any, held: OpenCheckpoint, records: Sequence[PartRecord], check: bool) -> tuple[str, ...]:
    """Compare the base with the recorded one, then resize its embeddings to the rows that the adapters store."""
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
    return (f"embeddings resized to {rows} rows, as the adapter in {held.location} was trained with",)


def _stored_rows(model: Any, records: Sequence[PartRecord]) -> int | None:
    """The number of input embedding rows that the adapters store; None if they store no embeddings."""
    layer = embedding_of(model)
    if layer is None:
        return None
    name = next((name for name, inner in model.named_modules() if inner is layer), None)
    wanted = f"{PREFIX}{name}.weight"
    tensors = (tensor for record in records for tensor in record.tensors if tensor.shape)
    for tensor in tensors:
        if ".".join(step for step in tensor.name.split(".") if step not in BASE_STEPS) == wanted:
            return tensor.shape[0]
    return None


def _check_base(here: Mapping[str, Source], kind: str, record: PartRecord, *, is_remade: bool) -> None:
    """Raise BaseMismatchError unless a base of class `kind` matches the base recorded for the adapter in `record`."""
    base, name = record.base, str(record.adapter)
    if base is None:
        return
    # If either base is quantised, the floating-point tensors decide.
    known = {n: values for n, values in base.fingerprint.items() if n in here and is_floating(here[n])}
    sampled = replace(record, base=replace(base, fingerprint=known))
    names = differing_tensors(here, sampled, is_remade=is_remade)
    if names:
        remade = "; its initialisation changes the base, and gave another result here" if is_remade else ""
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


def _find_targets(view: View, held: OpenCheckpoint, records: Sequence[PartRecord]) -> dict[str, dict[str, Source]]:
    """By adapter, the targets of stored tensors that PEFT rounds or does not load.

    They are base tensors saved with the adapter, and tensors stored in a wider dtype than that of their target. Raises
    LoadError naming every tensor that is missing, has no target, or has another shape or kind of dtype.
    """
    expected = {part.adapter: part.entries for part in adapter_parts(view, "", "", "as_is")}
    base = {PREFIX + name: source for name, source in base_sources(view)}
    base.update({source.name: source for _, source in base_sources(view)})
    everywhere = {tensor.name for record in records for tensor in record.tensors}
    problems: list[str] = []
    targets: dict[str, dict[str, Source]] = {}
    for record in records:
        own = {entry.name: entry for entry in expected[record.adapter]}
        stored = {tensor.name for tensor in record.tensors}
        missing = own.keys() - stored - (base.keys() & everywhere)  # one of the adapters has the resized embeddings
        problems += [f"{name}: missing in the files" for name in sorted(missing)]
        targets[str(record.adapter)] = {}
        for tensor in record.tensors:
            target = own.get(tensor.name) or base.get(tensor.name)
            if target is None:
                problems.append(f"{tensor.name}: no place in the model")
                continue
            dtype, source = dtype_of(tensor.dtype), target.source if isinstance(target, Entry) else target
            kinds = {(each.is_floating_point, each.is_complex) for each in (dtype, target.dtype)}
            if tensor.shape != target.shape or len(kinds) > 1:
                wanted = f"{dtype_name(target.dtype)} {tuple(target.shape)}"
                problems.append(f"{tensor.name}: {tensor.dtype} {tensor.shape} in the files, expected {wanted}")
            elif source is not None and (tensor.name not in own or not _holds_all(source.dtype, dtype)):
                targets[str(record.adapter)][tensor.name] = source
    if problems:
        raise LoadError(f"{listing(problems)}: the adapter in {held.store.url} does not fit this base")
    return targets


def _holds_all(live: torch.dtype, stored: torch.dtype) -> bool:
    """Whether the dtype `live` represents all values of the dtype `stored`."""
    if not stored.is_floating_point:
        return live == stored or torch.promote_types(live, stored) == live
    here, there = torch.finfo(live), torch.finfo(stored)
    return here.eps <= there.eps and here.max >= there.max and here.tiny <= there.tiny


def _copy_exactly(held: OpenCheckpoint, record: PartRecord, targets: Mapping[str, Source]) -> None:
    for file in {tensor.file for tensor in record.tensors if tensor.name in targets}:
        stored = _read_adapter(held.store, file)
        with torch.no_grad():
            for name in targets.keys() & stored.keys():
                live: Tensor = targets[name].live
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
