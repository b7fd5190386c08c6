"""Attaches stored adapters to their base: checks the base, fills all tensors, activates the active
adapters.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from ft_ckpt.checkpoint import OpenCheckpoint, PartRecord, checkpoint_around, open_checkpoint
from ft_ckpt.errors import (
    BaseMismatchError,
    CheckpointError,
    CorruptError,
    LoadError,
    listing,
    shown,
)
from ft_ckpt.extensions.foreign import compare_sums
from ft_ckpt.formats import RawFile, dtype_name, format_named
from ft_ckpt.messages import short
from ft_ckpt.model.adapters import (
    adapter_parts,
    base_name,
    base_sources,
    embedding_of,
    is_peft_model,
    peft_name,
    stored_base_names,
    why_redrawn,
)
from ft_ckpt.model.base_class import find_base_class
from ft_ckpt.model.base_model import (
    differing_tensors,
    identifying_samples,
    irreproducible,
    keeps_base,
)
from ft_ckpt.model.diffusers import model_class as diffusers_class
from ft_ckpt.model.entries import Entry
from ft_ckpt.model.folder import join_weight_files
from ft_ckpt.model.libraries import PREFIX, is_config_of_diffusers
from ft_ckpt.model.load_weights import beside_weights, weight_names
from ft_ckpt.model.pretrained import companions_here
from ft_ckpt.model.selection import View
from ft_ckpt.model.settings import adapter_settings
from ft_ckpt.ranks import ModelTensors, Source, give_memory, has_readable_elements
from ft_ckpt.storage import Place, Store, open_place, read_text

_CONFIG = "adapter_config.json"


def base_of(
    held: OpenCheckpoint,
    records: Sequence[PartRecord],
    given: Any,
    trust_remote_code: bool,
    *,
    verify: bool,
) -> nn.Module:
    """The base model for the adapters in `records`: `given` as module, folder or id, else the
    recorded base.

    Custom code of the base runs only with `trust_remote_code`; there is no prompt. A base in a
    checkpoint of ours is compared with its manifest, including all digests with `verify`.

    Raises LoadError when no base is known, it cannot be loaded, or neither its files nor the
    adapters have one of its tensors; CorruptError when its files are damaged.
    """
    if isinstance(given, nn.Module):
        return given
    record = records[0]
    recorded = record.base.id if record.base else None
    place = given if given is not None else recorded
    if place is None:
        raise LoadError(
            f"adapter {record.adapter!r}: its base was built in memory and has no id; pass base="
        )

    where = open_place(place)
    around = checkpoint_around(where) if where.is_folder else None
    if around is not None:
        with open_checkpoint(Place(around[0])) as held_base:
            if problems := held_base.find_problems(deep=verify):
                raise CorruptError(
                    f"{held_base.location}: {listing(problems)}; use another copy of the base"
                )
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
        settings = adapter_settings(Place(held.store, record.path).folder)
        base = find_base_class(str(place), record, settings, **asked)
        loading = {
            "dtype": "auto",
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
            **asked,
        }
        model, info = base.cls.from_pretrained(place, config=base.config, **loading)
    except (OSError, ValueError) as error:
        raise LoadError(
            f"adapter {record.adapter!r}: base model {str(place)!r} cannot be loaded ({error}); "
            "pass base= with a model, a folder or an id"
        ) from error
    _refuse_drawn(info, records, str(place))
    base.complete(model)
    return model  # type: ignore[no-any-return]  # transformers is not typed


def _refuse_drawn(info: Mapping[str, Any], records: Sequence[PartRecord], place: str) -> None:
    """Raise LoadError naming tensors that transformers has drawn at random and the adapters do not
    replace.

    `info`: what transformers reports of the load.
    """
    drawn = {*info["missing_keys"], *(str(item[0]) for item in info["mismatched_keys"])}
    replaced = {name for record in records for name in stored_base_names(record)}
    if lost := sorted(drawn - replaced):
        raise LoadError(
            f"{listing(lost, ', ')}: neither in the files of the base {place} nor in those of the "
            "adapter, so each load would draw other values; pass the model that the adapter was "
            "trained on with base="
        )


def attach_adapters(
    model: nn.Module,
    held: OpenCheckpoint,
    records: Sequence[PartRecord],
    *,
    check_base: bool,
    beside: bool = False,
) -> tuple[nn.Module, tuple[str, ...]]:
    """Attach the adapters in `records` to `model`, which may be a base or already carry adapters of
    these names.

    `beside`: the base is in the same checkpoint and contains the changes by its adapters'
    initialisation. Otherwise a base that the initialisation changes is compared with the recorded
    base after that change.

    Returns the model and notes for the report. Raises BaseMismatchError when sampled weights differ
    from the recorded base, LoadError naming the tensors and settings that do not fit, or the
    adapters whose base cannot be recreated.
    """
    configs = {str(record.adapter): _adapter_config(held, record, beside) for record in records}
    if drawn := listing(
        [why for name, config in configs.items() if (why := why_redrawn(name, config))]
    ):
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
            peft_model = _make_adapter(
                peft_model, str(record.adapter), configs[str(record.adapter)]
            )
    for record in records if check_base and is_remade else ():
        here = dict(base_sources(View(peft_model, ModelTensors(peft_model).sources())))
        _check_base(here, type(model).__name__, record, is_remade=True)
    with _explain_peft(held, records):
        _fill_adapters(peft_model, held, records)
    _activate_adapters(peft_model, records)
    return peft_model.eval(), notes


def _with_peft_names(record: PartRecord) -> PartRecord:
    tensors = tuple(
        replace(tensor, name=peft_name(tensor.name, tensor.file)) for tensor in record.tensors
    )
    return replace(record, tensors=tensors)


def _refuse_changed_base(
    held: OpenCheckpoint, records: Sequence[PartRecord], configs: Mapping[str, Any]
) -> None:
    """Raise LoadError for adapters whose initialisation changed the base in a way that cannot be
    repeated here.
    """
    if why := irreproducible(configs):
        raise LoadError(
            f"{why}: no base fits the adapter alone; save the model in the process that trains it, "
            "with adapter_only=False or merged=True. If the base given has the changed weights "
            "already, set init_lora_weights to true in the adapter's config"
        )
    others = [part for part in held.manifest.parts if part.kind == "adapter"]
    if len(others) == 1 or all(record.base and record.base.fingerprint for record in records):
        return  # the base is compared with the recorded one
    all_configs = {str(part.adapter): _adapter_config(held, part, beside=False) for part in others}
    if changing := [name for name, config in all_configs.items() if not keeps_base(config)]:
        raise LoadError(
            f"adapter {', '.join(changing)}: its initialisation changed the base, "
            f"and {held.store.url} has {len(others)} adapters; nothing says which of "
            "them were trained on the changed base. Copy an adapter that was trained "
            "by itself into a folder of its own"
        )


def _adapter_config(held: OpenCheckpoint, record: PartRecord, beside: bool) -> Any:
    """An adapter's config; for a base saved `beside` it, its initialisation does not change the
    base again.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    with (
        _explain_peft(held, [record]),
        companions_here(held, record, lambda name: name == _CONFIG) as folder,
    ):
        settings = adapter_settings(Place(held.store, record.path).folder)
        # The class of the method: PeftConfig would skip its handling of older versions.
        config: Any = PEFT_TYPE_TO_CONFIG_MAPPING[settings["peft_type"]].from_pretrained(
            str(folder)
        )
    config.inference_mode = True
    if beside and not keeps_base(config):
        config.init_lora_weights = True
    return config


def _make_adapter(model: Any, name: str, config: Any) -> Any:
    """The PeftModel with an adapter called `name`; its tensors are filled later."""
    from peft import PeftModel
    from peft.auto import MODEL_TYPE_TO_PEFT_MODEL_MAPPING

    if not is_peft_model(model):
        return MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, PeftModel)(
            model, config, name
        )
    if name not in model.peft_config:
        model.add_adapter(name, config)
    return model


def _fill_adapters(model: Any, held: OpenCheckpoint, records: Sequence[PartRecord]) -> None:
    """Copy the stored tensors into the adapters of `model` by name, and compare both.

    Tensors that PEFT computes when it saves, such as pruned ranks, are loaded by PEFT. Raises
    LoadError naming every tensor that does not fit, or that the live adapter has with other values.
    """
    from peft import set_peft_model_state_dict

    live = _live_adapters(model)
    stored = {}
    for record in records:
        name = str(record.adapter)
        stored[name] = _stored_tensors(model, held, record, live.entries[name].keys())
    targets = _find_targets(live, held, stored)
    computed = [name for name, tensors in stored.items() if tensors.keys() - targets[name].keys()]
    for name in computed:
        set_peft_model_state_dict(model, dict(stored[name]), adapter_name=name)
    if computed:
        live = _live_adapters(model)  # PEFT has replaced layers whose ranks were pruned
        targets = _find_targets(live, held, stored)
    for name, sources in targets.items():
        for tensor_name, source in sources.items():
            _copy_exactly(source.live, stored[name][tensor_name])
    _refuse_unfilled(live, held, stored, targets)


@dataclass(frozen=True, eq=False)
class _LiveAdapters:
    """The tensors of a PeftModel by the names under which they are stored."""

    entries: Mapping[str, Mapping[str, Entry]]  # of each adapter
    base: Mapping[str, Source]


def _live_adapters(model: Any) -> _LiveAdapters:
    view = View(model, ModelTensors(model).sources())
    entries = {}
    for part in adapter_parts(view, "", "", "as_is", with_absent=False):
        entries[str(part.adapter)] = {entry.name: entry for entry in part.entries}
    base = {PREFIX + name: source for name, source in base_sources(view)}
    base |= {source.name: source for _, source in base_sources(view)}
    return _LiveAdapters(entries, base)


def _stored_tensors(
    model: Any, held: OpenCheckpoint, record: PartRecord, expected: Set[str]
) -> dict[str, Tensor]:
    """The tensors of an adapter in its files, under the names of the live one, if they are
    `expected`.

    An adapter of transformers 4 has names and single experts of that version, which PEFT converts.
    PEFT would also rename names of today that look like older ones, so it gets only an adapter that
    lacks names of the live one.
    """
    name, files = str(record.adapter), weight_names(record)
    _compare_torch_sums(held.store, files)
    tensors: dict[str, Tensor] = {}
    for file in files:
        with closing(join_weight_files(held.store, [file])) as opened:
            for key, spec in opened.specs.items():
                tensors[peft_name(key, file)] = opened.read(key).view(spec.shape)
    missing = expected - tensors.keys()
    if not missing:
        return tensors
    converted = _converted_by_peft(model, name, tensors)
    still_missing = expected - converted.keys()
    return converted if len(still_missing) < len(missing) else tensors


def _converted_by_peft(model: Any, name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # before PEFT 0.19, which converts nothing
        return tensors
    converted: dict[str, Tensor] = conversion.convert_peft_adapter_state_dict_for_transformers(
        model, model.peft_config[name], dict(tensors), adapter_name=name
    )
    return converted


def _refuse_unfilled(
    live: _LiveAdapters,
    held: OpenCheckpoint,
    stored: Mapping[str, Mapping[str, Tensor]],
    targets: Mapping[str, Mapping[str, Source]],
) -> None:
    """Raise LoadError naming the tensors of live adapters that differ from the stored ones."""
    problems = []
    for adapter, tensors in stored.items():
        values = {name: source.live for name, source in targets[adapter].items()}
        groups = dict.fromkeys(entry.group for entry in live.entries[adapter].values())
        for group in filter(None, groups):
            values |= group.convert({source.name: source.live for source in group.sources})
        for name, tensor in tensors.items():
            if not _are_equal(values[name], tensor):
                problems.append(f"{name}: other values in adapter {adapter!r} once it is loaded")
    if problems:
        raise LoadError(
            f"{listing(problems)}: expected those in {held.store.url}; use the version of PEFT "
            "that wrote the adapter"
        )


def _are_equal(live: Tensor, stored: Tensor) -> bool:
    """Whether a tensor has the stored values; NaN equals NaN."""
    values = live.detach()
    expected = stored.to(values.device, values.dtype)
    is_same = (values == expected) | (values.isnan() & expected.isnan())
    return bool(is_same.all())


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
        invalid = [
            f"{file}: {problem}"
            for file in files
            for problem in _invalid_settings(held.store, file)
        ]
        raise LoadError(
            f"{listing(invalid or files)}: PEFT cannot make the adapter in {held.store.url} "
            f"({shown(error)}); use another copy, or the version of PEFT that wrote it"
        ) from error


def _invalid_settings(store: Store, file: str) -> list[str]:
    """Invalid settings in the adapter config `file`: unknown method, undeclared type, invalid
    pattern.
    """
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
    patterns = {
        name: [value] if isinstance(value, str) else value for name, value in settings.items()
    }
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
    """The class in diffusers of the model in the folder `place`; None for another model, or no
    folder.
    """
    if not place.is_folder or place.folder.stat("config.json") is None:
        return None
    config = json.loads(read_text(place.folder, "config.json"))
    return str(config["_class_name"]) if is_config_of_diffusers(config) else None


def _prepare_base(
    model: Any, held: OpenCheckpoint, records: Sequence[PartRecord], check: bool
) -> tuple[str, ...]:
    """Compare the base with the recorded one, then resize its embeddings to the rows that the
    adapters store.
    """
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
    return (
        f"embeddings resized to {rows} rows, as the adapter in {held.location} was trained with",
    )


def _stored_rows(model: Any, records: Sequence[PartRecord]) -> int | None:
    """The number of input embedding rows that the adapters store; None if they store no
    embeddings.
    """
    layer = embedding_of(model)
    if layer is None:
        return None
    name = next((name for name, inner in model.named_modules() if inner is layer), None)
    tensors = (tensor for record in records for tensor in record.tensors if tensor.shape)
    for tensor in tensors:
        if base_name(tensor.name) == f"{name}.weight":
            return tensor.shape[0]
    return None


def _check_base(
    here: Mapping[str, Source], kind: str, record: PartRecord, *, is_remade: bool
) -> None:
    """Raise BaseMismatchError unless a base of class `kind` matches the base recorded for the
    adapter in `record`.
    """
    base, name = record.base, str(record.adapter)
    if base is None:
        return
    # If either base is quantised, the floating-point tensors decide.
    samples = identifying_samples(record)
    known = {
        name: values
        for name, values in samples.items()
        if name in here and has_readable_elements(here[name])
    }
    sampled = replace(record, base=replace(base, fingerprint=known))
    names = differing_tensors(here, sampled, is_remade=is_remade)
    if names:
        remade = (
            "; its initialisation changes the base, and gave another result here"
            if is_remade
            else ""
        )
        raise BaseMismatchError(
            f"{listing(names, ', ')}: {len(names)} of {len(known)} sampled tensors of this base "
            f"differ from the one that adapter {name!r} was trained on "
            f"({base.id or 'built in memory'}, revision {base.revision}){remade}; load it on that "
            "base, or pass check_base=False"
        )
    if samples and not known:
        raise BaseMismatchError(
            f"adapter {name!r}: none of the {len(samples)} sampled tensors of its base is in "
            f"{kind}; load it on {base.id or 'the model it was trained on'}, or pass "
            "check_base=False"
        )


def _find_targets(
    live: _LiveAdapters, held: OpenCheckpoint, stored: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, dict[str, Source]]:
    """By adapter, the live tensor of each stored one, base tensors included.

    Those that PEFT computes have none. Raises LoadError naming every tensor that is missing, has no
    target, or has another shape or kind of dtype.
    """
    everywhere = {name for tensors in stored.values() for name in tensors}
    problems: list[str] = []
    targets: dict[str, dict[str, Source]] = {}
    for adapter, tensors in stored.items():
        entries = live.entries[adapter]
        # One of the adapters has the resized embeddings.
        missing = entries.keys() - tensors.keys() - (live.base.keys() & everywhere)
        problems += [f"{name}: missing in the files" for name in sorted(missing)]
        targets[adapter] = {}
        for name, tensor in tensors.items():
            target = entries.get(name) or live.base.get(name)
            if target is None:
                problems.append(f"{name}: no place in the model")
                continue
            if tuple(tensor.shape) != target.shape or not _are_of_one_kind(
                tensor.dtype, target.dtype
            ):
                actual = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
                expected = f"{dtype_name(target.dtype)} {tuple(target.shape)}"
                problems.append(f"{name}: {actual} in the files, expected {expected}")
                continue
            source = target.source if isinstance(target, Entry) else target
            if source is not None:
                targets[adapter][name] = source
    if problems:
        raise LoadError(
            f"{listing(problems)}: the adapter in {held.store.url} does not fit this base"
        )
    return targets


def _are_of_one_kind(one: torch.dtype, other: torch.dtype) -> bool:
    is_same_float = one.is_floating_point == other.is_floating_point
    return is_same_float and one.is_complex == other.is_complex


@torch.no_grad()
def _copy_exactly(live: Tensor, stored: Tensor) -> None:
    """Overwrite a tensor, in the dtype of the stored one if its own would round."""
    give_memory(live)
    if not _holds_all(live.dtype, stored.dtype):
        live.data = live.data.to(stored.dtype)
    live.copy_(stored)


def _holds_all(live: torch.dtype, stored: torch.dtype) -> bool:
    """Whether the dtype `live` represents all values of the dtype `stored`."""
    if not stored.is_floating_point:
        return live == stored or torch.promote_types(live, stored) == live
    here, there = torch.finfo(live), torch.finfo(stored)
    return here.eps <= there.eps and here.max >= there.max and here.tiny <= there.tiny


def _activate_adapters(model: Any, records: Sequence[PartRecord]) -> None:
    active = [str(record.adapter) for record in records if record.active]
    if len(active) == 1:
        model.set_adapter(active[0])
    elif active:
        model.base_model.set_adapter(active)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
