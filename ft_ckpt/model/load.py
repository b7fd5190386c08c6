"""Loads a committed checkpoint as a model, strictly, without running code from it."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, overload

import torch
from torch import nn
from typing_extensions import Unpack

from ft_ckpt.checkpoint import (
    OpenCheckpoint,
    PartRecord,
    SignedBy,
    checkpoint_around,
    open_checkpoint,
    signature_problems,
    why_no_checkpoint,
)
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    LoadError,
    NotACheckpointError,
    listing,
    shown,
)
from ft_ckpt.formats import MemoryFile, format_named
from ft_ckpt.messages import did_you_mean, printable, short
from ft_ckpt.model.attaching import attach_adapters, base_of
from ft_ckpt.model.diffusers import empty_of_config, model_class as diffusers_class
from ft_ckpt.model.folder import refuse_delta
from ft_ckpt.model.libraries import is_config_of_diffusers
from ft_ckpt.model.load_weights import (
    LoadReport,
    extra_beside,
    fetching_weights,
    fill_module,
    open_weights,
    put_tensors,
    read_weights,
    refuse_differences,
    share_again,
    summary_of,
    weight_names,
)
from ft_ckpt.model.pretrained import (
    checked_config,
    class_of_own_code,
    companions_here,
    empty_model,
    is_converted,
    limit_parameters,
    listing_own,
    model_class,
    most_parameters,
    name_origin,
)
from ft_ckpt.ranks import (
    ModelTensors,
    hides_tensors,
    is_first_process,
    keeps_weights,
    wrapper_chain,
)
from ft_ckpt.storage import Place, Store, open_place, track_reads


@dataclass(frozen=True)
class _LoadOptions:
    """The arguments of a load that apply to every part."""

    base: Any
    into: nn.Module | None
    classes: Mapping[str, type]
    strict: bool
    check_base: bool
    trust_remote_code: bool
    verify: bool
    mapped: bool | str
    device: torch.device | None  # accelerator that tensors are read to directly; None: the host


# of `into`; with adapters that it lacks, a PeftModel is returned
ModelType = TypeVar("ModelType", bound=nn.Module)


class LoadArguments(TypedDict, total=False):
    """The keywords of `load_model` as type checkers see them, but for `into` and `with_report`."""

    part: str | None
    base: Any
    classes: Mapping[str, type] | None
    device: str | torch.device | None
    strict: bool
    check_base: bool
    trust_remote_code: bool
    verify: bool
    require_signature: SignedBy | None
    mapped: bool | Literal["auto"]


@overload
def load_model(
    path: str | Path | Place,
    *,
    into: ModelType,
    with_report: Literal[False] = False,
    **arguments: Unpack[LoadArguments],
) -> ModelType | Any: ...


@overload
def load_model(
    path: str | Path | Place,
    *,
    into: ModelType,
    with_report: Literal[True],
    **arguments: Unpack[LoadArguments],
) -> tuple[ModelType | Any, LoadReport]: ...


@overload
def load_model(
    path: str | Path | Place,
    *,
    into: Mapping[str, nn.Module],
    with_report: Literal[False] = False,
    **arguments: Unpack[LoadArguments],
) -> dict[str, Any]: ...


@overload
def load_model(
    path: str | Path | Place,
    *,
    into: Mapping[str, nn.Module],
    with_report: Literal[True],
    **arguments: Unpack[LoadArguments],
) -> tuple[dict[str, Any], LoadReport]: ...


@overload
def load_model(
    path: str | Path | Place,
    *,
    into: None = None,
    with_report: Literal[False] = False,
    **arguments: Unpack[LoadArguments],
) -> Any: ...


@overload
def load_model(
    path: str | Path | Place,
    *,
    into: None = None,
    with_report: Literal[True],
    **arguments: Unpack[LoadArguments],
) -> tuple[Any, LoadReport]: ...


@overload
def load_model(
    path: str | Path | Place,
    *,
    into: nn.Module | Mapping[str, nn.Module] | None = None,
    with_report: bool = False,
    **arguments: Unpack[LoadArguments],
) -> Any: ...


def load_model(
    path: str | Path | Place,
    *,
    part: str | None = None,
    base: Any = None,
    into: nn.Module | Mapping[str, nn.Module] | None = None,
    classes: Mapping[str, type] | None = None,
    device: str | torch.device | None = None,
    strict: bool = True,
    check_base: bool = True,
    trust_remote_code: bool = False,
    verify: bool = False,
    require_signature: SignedBy | None = None,
    mapped: bool | Literal["auto"] = "auto",
    with_report: bool = False,
) -> Any:
    """Load the model at `path`, in eval mode: a Hugging Face model, or a PeftModel on its base; or
    fill yours.

    `path` is a checkpoint or the folder of one of its parts; `part` also selects one by name. A
    checkpoint of several attributes gives a dict by name; parameters that they shared are shared
    again, unless both are in your modules.

    `mapped`: files are mapped, not copied, if the model keeps tensors as they are stored. A weight
    is copied when it is first written, unused weights are not read, and the processes of a machine
    share one copy. "auto" reads a large file into memory instead if most of it is not in the page
    cache, it fits in half of the free memory, and no other process of the launch is on this
    machine. The read bypasses the page cache and overlaps with building the model. True maps all
    files, False reads all. With an accelerator as `device`, tensors are read to it directly, in
    blocks. `base`: the base model of an adapter, as module, folder or id; default is the id that it
    was trained on. Its sampled weights are compared unless `check_base` is False. A base that is a
    checkpoint of ours is compared with its manifest, like `path`. `into`: your module, wrapped or
    not, to load a single part into; or a mapping of modules by part, which gives a dict by part. A
    part that is no Hugging Face model, such as a value head, needs one: a checkpoint has its
    tensors and the name of its class, not its code. The module's memory is filled block by block,
    so a failed load may leave part of the values; it keeps its mode. A model that transformers
    converts (fused experts) is first loaded separately. `classes`: your own classes of diffusers'
    models, by name. `trust_remote_code`: run model code in the checkpoint or with the base, as in
    transformers. `verify`: compare the digests of all files before they are used; digests of files
    below 1 MB and all sizes and headers are always compared. `require_signature`: check the
    signature of the checkpoint first, see `verify(signed_by=)`; not that of a base. `with_report`:
    return (model, LoadReport).

    The checkpoint decides the class of the model, which type checkers cannot know: they see Any,
    and with `into` the class of that module. `model: LlamaForCausalLM = ft_ckpt.load_model(path)`
    tells them.

    All files are opened at once, so a save that replaces the checkpoint meanwhile has no effect.
    Raises NotACheckpointError; CorruptError when files differ from the manifest or its signature;
    LoadError naming every missing, unexpected or reshaped tensor unless `strict` is False, or the
    reason why no model can be built; BaseMismatchError for another base.
    """
    if mapped not in (True, False, "auto"):
        raise LoadError(f"mapped={mapped!r}: expected True, False or 'auto'")
    if not isinstance(classes, Mapping | None):
        raise LoadError(f"classes={short(classes)}: expected a class for each name, as a mapping")
    is_host = device is None or _device_type(device) in ("cpu", "meta")
    # with its index, which differs by thread
    read_to = None if is_host else torch.empty(0, device=device).device
    options = _LoadOptions(
        base, None, classes or {}, strict, check_base, trust_remote_code, verify, mapped, read_to
    )
    root, wanted = _find_checkpoint(open_place(path), part)
    with open_checkpoint(Place(root)) as held, _explain_errors(held):
        _refuse_unsigned(held, require_signature)
        refuse_delta(held.manifest, held.place)
        groups = _find_groups(held, wanted)
        targets = _targets_of(held, groups, into)
        _refuse_modules(held, groups, targets)
        with _track_load(held, groups, options):
            _refuse_damaged(held, options)
            loaded = {}
            for name, records in groups.items():
                loaded[name] = _load_group(held, records, replace(options, into=targets.get(name)))
        models = {
            name: model.to(device) if device is not None else model
            for name, (model, _) in loaded.items()
        }
        share_again(held.manifest, models, targets)
    is_single = (
        len(models) == 1 and (wanted is not None or "" in models) and not isinstance(into, Mapping)
    )
    result = next(iter(models.values())) if is_single else models
    if not with_report:
        return result
    origin = held.place.folder.local_folder or held.place.folder.url
    reports = [report for _, report in loaded.values()]
    is_copied = device is not None and torch.device(device).type != "cpu"
    return result, summary_of(origin, wanted or "", reports, copied=is_copied)


def _device_type(device: str | torch.device) -> str:
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise LoadError(
            f"device={short(device)}: unknown to torch; expected such as 'cpu' or 'cuda:0'"
        ) from error


def _find_checkpoint(place: Place, part: str | None) -> tuple[Store, str | None]:
    """The root of the checkpoint at or around `place`, and the part to load; None for all parts."""
    found = checkpoint_around(place)
    if found is None:
        raise NotACheckpointError(why_no_checkpoint(place))
    root, inside = found
    if inside and place.is_object:
        raise NotACheckpointError(why_no_checkpoint(place))
    return root, (inside or None) if part is None else part


def _refuse_unsigned(held: OpenCheckpoint, required: SignedBy | None) -> None:
    """Raise CorruptError unless the checkpoint has the `required` signature."""
    if required is None:
        return
    problems = signature_problems(held.place.folder, held.store, held.manifest, required)
    if problems:
        raise CorruptError(f"{held.place.folder.url}: {listing(problems)}; not loaded")


def _track_load(
    held: OpenCheckpoint, groups: Mapping[str, list[PartRecord]], options: _LoadOptions
) -> AbstractContextManager[None]:
    """A bar on rank 0's terminal, of the bytes that the load reads; mapped files are read later,
    when they are used.
    """
    names = {
        name for records in groups.values() for record in records for name in weight_names(record)
    }
    sizes = [
        file.size_bytes for file in held.manifest.files if options.verify or file.path in names
    ]
    return track_reads(sum(sizes) if is_first_process() else 0, f"loading {held.place.basename}")


def _refuse_damaged(held: OpenCheckpoint, options: _LoadOptions) -> None:
    """Raise CorruptError if files differ from the manifest."""
    if problems := held.find_problems(deep=options.verify):
        raise CorruptError(f"{held.store.url}: {listing(problems)}; use an older checkpoint")


@contextmanager
def _explain_errors(held: OpenCheckpoint) -> Iterator[None]:
    """Raise LoadError for errors of libraries, which invalid files cause; out-of-memory errors pass
    unchanged.
    """
    try:
        yield
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = str(error) if isinstance(error, (OSError, ValueError)) else shown(error)
        if held.is_local:
            text = text.replace(str(held.folder), str(held.path))
        raise LoadError(
            f"{held.place}: no model can be made of it: {printable(text)[:2000]}"
        ) from error


def _find_groups(held: OpenCheckpoint, wanted: str | None) -> dict[str, list[PartRecord]]:
    """Part records grouped by model: a model and its adapters are one group.

    `wanted`: only this group or part.

    The training state is in no group. Raises LoadError if there is no group.
    """
    parts = [part for part in held.manifest.parts if part.kind != "state"]
    groups: dict[str, list[PartRecord]] = {}
    for record in parts:
        groups.setdefault(_owner_folder(record), []).append(record)
    if not groups:
        raise LoadError(f"{held.store.url}: no part to load")
    if wanted is None:
        return groups
    if wanted in groups:
        return {wanted: groups[wanted]}
    exact = [record for record in parts if wanted in (record.name, record.path)]
    if not exact:
        names = sorted({*groups, *(record.name for record in parts)} - {""})
        question = did_you_mean([str(wanted)], names)
        advice = question or f"it has {', '.join(names) or 'one part only, leave part= out'}"
        raise LoadError(f"part {wanted!r}: not in {held.store.url}; {advice}")
    return {wanted: exact}


def _targets_of(
    held: OpenCheckpoint,
    groups: Mapping[str, list[PartRecord]],
    into: nn.Module | Mapping[str, nn.Module] | None,
) -> dict[str, nn.Module]:
    """The caller's modules by part.

    Raises LoadError for a module without a part, or one for several parts.
    """
    if into is None:
        return {}
    names = ", ".join(groups)
    if isinstance(into, nn.Module):
        if len(groups) > 1:
            example = f"into={{{next(iter(groups))!r}: module}}"
            raise LoadError(
                f"into=: {held.store.url} has the parts {names}, expected one; give a module by "
                f"part, {example}, or name one part with part="
            )
        return dict.fromkeys(groups, into)
    if not isinstance(into, Mapping) or not all(
        isinstance(module, nn.Module) for module in into.values()
    ):
        raise LoadError(
            f"into={short(into)}: expected a torch.nn.Module, or a mapping of them by part"
        )
    unknown = [name for name in into if name not in groups]
    if unknown:
        expected = names or "one part: pass the module itself"
        raise LoadError(
            f"into=: {listing(unknown, ', ')}: not in {held.store.url}, which has {expected}"
        )
    return dict(into)


def _refuse_modules(
    held: OpenCheckpoint, groups: Mapping[str, list[PartRecord]], targets: Mapping[str, nn.Module]
) -> None:
    """Raise LoadError naming the parts that no library can build a model for, and that are without
    a target.
    """
    without = []
    for name, records in groups.items():
        modules = [record for record in records if record.kind == "module"]
        without += [(name, record.class_name) for record in modules if name not in targets]
    if not without:
        return
    problems = []
    for name, class_name in without:
        part = f"part {name!r}: " if name else ""
        problems.append(f"{part}a module of the class {class_name}")
    name, class_name = without[0]
    example = (
        f"into={{{name!r}: {class_name}(...)}}" if len(groups) > 1 else f"into={class_name}(...)"
    )
    others = ", or name another part with part=" if len(groups) > len(without) else ""
    raise LoadError(
        f"{held.store.url}: {listing(problems)}; a checkpoint has tensors and no code to build it: "
        f"pass a module of yours, {example}{others}"
    )


def _owner_folder(record: PartRecord) -> str:
    """The folder of the model the record belongs to."""
    if record.kind != "adapter":
        return record.path
    tail = (
        f"adapters/{record.adapter}"
        if record.path.endswith(f"adapters/{record.adapter}")
        else str(record.adapter)
    )
    if record.adapter == "default" and tail == "default":
        return record.path
    return record.path.removesuffix(tail).rstrip("/")


def _load_group(
    held: OpenCheckpoint, records: list[PartRecord], options: _LoadOptions
) -> tuple[nn.Module, LoadReport]:
    whole = next((record for record in records if record.kind != "adapter"), None)
    adapters = [record for record in records if record.kind == "adapter"]
    report = LoadReport(held.store.url, "")
    if whole is None:
        model = options.into
        if model is None:
            model = base_of(
                held, adapters, options.base, options.trust_remote_code, verify=options.verify
            )
    elif options.into is not None:
        model, report = options.into, _copy_into(options.into, held, whole, options)
    else:
        model, report = _load_pretrained(held, whole, options)
    if not adapters:
        return model, report
    check_base = options.check_base and whole is None
    inside = _carrier_in(model)
    made, notes = attach_adapters(
        inside, held, adapters, check_base=check_base, beside=whole is not None
    )
    count = report.tensors + sum(len(record.tensors) for record in adapters)
    loaded = model if made is inside else made
    return loaded, LoadReport(held.store.url, "", (), (), (), count, report.zero_copy, notes)


def _carrier_in(model: nn.Module) -> nn.Module:
    """The module for PEFT inside wrappers, such as DDP; `model` if an engine has taken its
    tensors.
    """
    chain = wrapper_chain(model)
    return model if any(hides_tensors(each) or keeps_weights(each) for each in chain) else chain[-1]


def _load_pretrained(
    held: OpenCheckpoint, record: PartRecord, options: _LoadOptions
) -> tuple[nn.Module, LoadReport]:
    store = held.store
    config = checked_config(store, record)
    if is_config_of_diffusers(config):
        return _load_diffusers(config, held, record, options)
    cls = model_class(record.class_name)
    with limit_parameters(most_parameters(record), "config.json"):
        # transformers builds quantised models and models with custom code.
        if (
            cls is not None
            and not options.trust_remote_code
            and config.get("quantization_config") is None
        ):
            with fetching_weights(
                store, weight_names(record), options.mapped, options.device
            ) as tensors:
                model = empty_model(cls, held, record)
                if model is not None:
                    stored, zero_copy = tensors()
                    report = put_tensors(model, record, stored, store, options.strict)
                    model.tie_weights()
                    return model.eval(), replace(report, zero_copy=zero_copy)
        return _through_transformers(
            cls or class_of_own_code(config, record), held, record, options
        )


def _load_diffusers(
    config: Mapping[str, Any], held: OpenCheckpoint, record: PartRecord, options: _LoadOptions
) -> tuple[nn.Module, LoadReport]:
    cls = diffusers_class(record.class_name, options.classes)
    with fetching_weights(
        held.store, weight_names(record), options.mapped, options.device
    ) as tensors:
        with limit_parameters(most_parameters(record), "config.json"):
            model = empty_of_config(cls, config)
        model.register_to_config(_name_or_path=held.place.folder.where(record.path))
        stored, zero_copy = tensors()
        report = put_tensors(model, record, stored, held.store, options.strict)
    return model.eval(), replace(report, zero_copy=zero_copy)


def _through_transformers(
    cls: Any, held: OpenCheckpoint, record: PartRecord, options: _LoadOptions
) -> tuple[nn.Module, LoadReport]:
    """Let transformers load a model, and check its loading info as strictly as other loads.

    transformers loads parameters and buffers. Other entries of the state dict are restored here, by
    their modules.
    """
    is_quantised = checked_config(held.store, record).get("quantization_config") is not None
    extra = extra_beside(held.store, record)
    if is_quantised and extra:  # only transformers knows how to restore them
        raise LoadError(
            f"{listing(list(extra), ', ')}: non-tensor state of a quantised model cannot be "
            "restored here; resume a run with it, or load the checkpoint into the model with into="
        )
    with nullcontext() if is_quantised else listing_own(record):
        model, info = _by_transformers(cls, held, record, options)
    unexpected, beside = (
        set(info["unexpected_keys"]),
        [] if is_quantised else ModelTensors(model).names_added(extra),
    )
    if not unexpected.isdisjoint(beside):
        stored = read_weights(held.store, weight_names(record), options.mapped)[0]
        extra |= {name: stored[name] for name in beside if name in unexpected}
    report = LoadReport(
        held.store.url,
        record.path,
        tuple(sorted({*info["missing_keys"], *beside} - extra.keys())),
        tuple(sorted((unexpected | extra.keys()) - set(beside))),
        tuple(sorted(str(item[0]) for item in info["mismatched_keys"])),
        len(record.tensors),
        notes=("converted by transformers while loading",),
    )
    refuse_differences(report, options.strict)
    if beside and options.strict:
        ModelTensors(model).restore_added(extra)
    elif beside:
        model.load_state_dict({name: extra[name] for name in beside if name in extra}, strict=False)
    return model.eval(), report


def _by_transformers(
    cls: Any, held: OpenCheckpoint, record: PartRecord, options: _LoadOptions
) -> tuple[Any, Any]:
    """The model that transformers makes from the part's folder, and its loading info."""
    import transformers

    asked: dict[str, Any] = {
        "output_loading_info": True,
        "trust_remote_code": options.trust_remote_code,
    }
    with companions_here(held, record) as folder:
        if format_named(record.format).read_by_transformers:
            model, info = cls.from_pretrained(folder, dtype="auto", local_files_only=True, **asked)
        else:  # transformers cannot read the format, so pass it the tensors
            config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=options.trust_remote_code
            )
            tensors = read_weights(held.store, weight_names(record), options.mapped)[0]
            model, info = cls.from_pretrained(
                None, config=config, state_dict=tensors, dtype=config.dtype, **asked
            )
        name_origin(model, folder, held, record)
    return model, info


def _copy_into(
    into: nn.Module, held: OpenCheckpoint, record: PartRecord, options: _LoadOptions
) -> LoadReport:
    """Overwrite the tensors of `into`.

    A model that transformers converts is first loaded separately.
    """
    if record.kind == "model" and is_converted(into):
        loaded, report = _load_pretrained(held, record, replace(options, into=None, device=None))
        tensors = {
            name: value
            for name, value in loaded.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        filled = fill_module(
            into, replace(record, ties=()), [MemoryFile(tensors)], held.store, options.strict
        )
        return replace(filled, notes=(*filled.notes, *report.notes))
    with ExitStack() as stack:
        files = [
            stack.enter_context(closing(file))
            for file in open_weights(held.store, weight_names(record))
        ]
        return fill_module(into, record, files, held.store, options.strict)
