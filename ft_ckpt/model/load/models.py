"""Makes the models of a load.

A model is made without weights, and its tensors are mapped or read. Or a module of the caller is
filled. Then the adapters are attached to it.
"""

from collections.abc import Mapping
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.checkpoint.manifest import Manifest, PartRecord
from ft_ckpt.errors import LoadError, listing
from ft_ckpt.formats import format_named
from ft_ckpt.formats.files import MemoryFile
from ft_ckpt.formats.trees import PLAIN
from ft_ckpt.model.empty import (
    add_origin,
    checked_config,
    class_of_own_code,
    diffusers_class,
    empty_model,
    empty_of_config,
    is_converted,
    limit_parameters,
    listing_own,
    max_parameters,
    part_folder,
    transformers_class,
)
from ft_ckpt.model.files import (
    fetching_weights,
    open_weights,
    read_extra_values,
    read_weights,
    weight_names,
)
from ft_ckpt.model.load.attaching import attach_adapters
from ft_ckpt.model.load.base_model import load_base
from ft_ckpt.model.load.into_module import fill_module, put_tensors
from ft_ckpt.model.load.report import LoadReport, refuse_differences
from ft_ckpt.model.load.request import LoadOptions, ModelRequest
from ft_ckpt.model.tensors import is_config_of_diffusers, tensor_at
from ft_ckpt.ranks.wrappers import ModelTensors, hides_tensors, keeps_weights, wrapper_chain


def load_models(
    checkpoint: OpenCheckpoint, requests: Mapping[str, ModelRequest], options: LoadOptions
) -> tuple[dict[str, nn.Module], list[LoadReport]]:
    """Load the models of `requests`, in eval mode, by the names of the requests.

    Parameters that models shared when they were saved are shared again. Raises BaseMismatchError
    for another base. Raises LoadError naming every tensor that does not fit, if the load is strict,
    or the reason why a model cannot be built.
    """
    models = {}
    reports = []
    for name, request in requests.items():
        models[name], report = _load_model(checkpoint, request, options)
        reports.append(report)
    if options.device is not None:
        for name, model in models.items():
            models[name] = model.to(options.device)
    filled = {name for name, request in requests.items() if request.target is not None}
    _share_parameters(checkpoint.manifest, models, filled)
    return models, reports


def _load_model(
    checkpoint: OpenCheckpoint, request: ModelRequest, options: LoadOptions
) -> tuple[nn.Module, LoadReport]:
    model, report = _load_without_adapters(checkpoint, request, options)
    if not request.adapters:
        return model, report
    base_is_stored = request.record is not None
    inner = _module_for_peft(model)
    with_adapters, notes = attach_adapters(
        inner,
        checkpoint,
        request.adapters,
        check_base=options.check_base and not base_is_stored,
        base_is_stored=base_is_stored,
    )
    if with_adapters is not inner:
        model = with_adapters
    tensors = report.tensors + sum(len(record.tensors) for record in request.adapters)
    url = checkpoint.store.url
    return model, LoadReport(url, "", (), (), (), tensors, report.zero_copy, notes)


def _load_without_adapters(
    checkpoint: OpenCheckpoint, request: ModelRequest, options: LoadOptions
) -> tuple[nn.Module, LoadReport]:
    if request.record is None:
        base = request.target
        if base is None:
            base = load_base(checkpoint, request.adapters, options)
        return base, LoadReport(checkpoint.store.url, "")
    if request.target is not None:
        return request.target, _copy_into(request.target, checkpoint, request.record, options)
    return _load_pretrained(checkpoint, request.record, options)


def _module_for_peft(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers such as DDP, or `model` if an engine has its tensors."""
    chain = wrapper_chain(model)
    for wrapper in chain:
        if hides_tensors(wrapper) or keeps_weights(wrapper):
            return model
    return chain[-1]


def _load_pretrained(
    checkpoint: OpenCheckpoint, record: PartRecord, options: LoadOptions
) -> tuple[nn.Module, LoadReport]:
    """Load a model of a library from its config and weights."""
    config = checked_config(checkpoint.store, record)
    if is_config_of_diffusers(config):
        return _load_diffusers(config, checkpoint, record, options)
    cls = transformers_class(record.class_name)
    is_quantised = config.get("quantization_config") is not None
    with limit_parameters(max_parameters(record), "config.json"):
        # Only transformers itself can build quantised models and models with custom code.
        if cls is not None and not options.trust_remote_code and not is_quantised:
            loaded = _load_known_class(cls, checkpoint, record, options)
            if loaded is not None:
                return loaded
        cls = cls or class_of_own_code(config, record)
        return _load_through_transformers(cls, checkpoint, record, options)


def _load_known_class(
    cls: Any, checkpoint: OpenCheckpoint, record: PartRecord, options: LoadOptions
) -> tuple[nn.Module, LoadReport] | None:
    """Load a model whose tensors are stored as it has them in memory.

    The weights are read while the model is built. Returns None for a model that transformers must
    load itself.
    """
    store = checkpoint.store
    names = weight_names(record)
    with fetching_weights(store, names, options.mapped, options.accelerator) as fetched:
        model = empty_model(cls, checkpoint, record)
        if model is None:
            return None
        tensors, are_mapped = fetched()
        report = put_tensors(model, record, tensors, store, options.strict)
        model.tie_weights()
        return model.eval(), replace(report, zero_copy=are_mapped)


def _load_diffusers(
    config: Mapping[str, Any], checkpoint: OpenCheckpoint, record: PartRecord, options: LoadOptions
) -> tuple[nn.Module, LoadReport]:
    cls = diffusers_class(record.class_name, options.classes)
    store = checkpoint.store
    names = weight_names(record)
    with fetching_weights(store, names, options.mapped, options.accelerator) as fetched:
        with limit_parameters(max_parameters(record), "config.json"):
            model = empty_of_config(cls, config)
        model.register_to_config(_name_or_path=checkpoint.place.folder.where(record.path))
        tensors, are_mapped = fetched()
        report = put_tensors(model, record, tensors, store, options.strict)
    return model.eval(), replace(report, zero_copy=are_mapped)


def _load_through_transformers(
    cls: Any, checkpoint: OpenCheckpoint, record: PartRecord, options: LoadOptions
) -> tuple[nn.Module, LoadReport]:
    """Let transformers load a model, and check the result as strictly as that of other loads.

    transformers loads parameters and buffers, and says which are missing. Other entries of the
    state dict are restored here, by their modules.
    """
    store = checkpoint.store
    is_quantised = checked_config(store, record).get("quantization_config") is not None
    extra = read_extra_values(store, record)

    # Only transformers knows how to restore such values.
    if is_quantised and extra:
        raise LoadError(
            f"{listing(list(extra), ', ')}: non-tensor state of a quantised model cannot be "
            "restored here; resume a run with it, or load the checkpoint into the model with into="
        )

    with nullcontext() if is_quantised else listing_own(record):
        model, info = _from_pretrained(cls, checkpoint, record, options)
    unexpected = set(info["unexpected_keys"])
    added_names = [] if is_quantised else ModelTensors(model).names_added(extra)
    unread = [name for name in added_names if name in unexpected]
    if unread:
        tensors, _ = read_weights(store, weight_names(record), options.mapped)
        for name in unread:
            extra[name] = tensors[name]

    missing = {*info["missing_keys"], *added_names} - extra.keys()
    report = LoadReport(
        store.url,
        record.path,
        tuple(sorted(missing)),
        tuple(sorted((unexpected | extra.keys()) - set(added_names))),
        tuple(sorted(str(item[0]) for item in info["mismatched_keys"])),
        len(record.tensors),
        notes=("converted by transformers while loading",),
    )
    refuse_differences(report, options.strict)
    if added_names and options.strict:
        ModelTensors(model).restore_added(extra)
    elif added_names:
        values = {name: extra[name] for name in added_names if name in extra}
        model.load_state_dict(values, strict=False)

    return model.eval(), report


def _from_pretrained(
    cls: Any, checkpoint: OpenCheckpoint, record: PartRecord, options: LoadOptions
) -> tuple[Any, Any]:
    """Let transformers load the model from the folder of the part.

    Returns the model and transformers' info on the load.
    """
    import transformers

    trusts = options.trust_remote_code
    with part_folder(checkpoint, record) as folder:
        if format_named(record.format).read_by_transformers:
            model, info = cls.from_pretrained(
                folder,
                dtype="auto",
                local_files_only=True,
                output_loading_info=True,
                trust_remote_code=trusts,
            )
        else:
            # transformers cannot read the format, so it gets the tensors.
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trusts)
            tensors, _ = read_weights(checkpoint.store, weight_names(record), options.mapped)
            model, info = cls.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                dtype=config.dtype,
                output_loading_info=True,
                trust_remote_code=trusts,
            )

        add_origin(model, folder, checkpoint, record)

    return model, info


def _copy_into(
    target: nn.Module, checkpoint: OpenCheckpoint, record: PartRecord, options: LoadOptions
) -> LoadReport:
    """Overwrite the tensors of `target` with the stored ones.

    A model that transformers converts is first loaded separately, and its tensors are copied.
    """
    store = checkpoint.store
    if record.kind == "model" and is_converted(target):
        on_host = replace(options, device=None, accelerator=None)
        loaded, report = _load_pretrained(checkpoint, record, on_host)
        tensors = {}
        for name, value in loaded.state_dict().items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value
        untied = replace(record, ties=())
        filled = fill_module(target, untied, [MemoryFile(tensors)], store, options.strict)
        return replace(filled, notes=(*filled.notes, *report.notes))

    with ExitStack() as stack:
        files = open_weights(store, weight_names(record))
        for file in files:
            stack.enter_context(closing(file))
        return fill_module(target, record, files, store, options.strict)


def _share_parameters(
    manifest: Manifest, models: Mapping[str, nn.Module], filled: set[str]
) -> None:
    """Share the parameters again that parts shared when they were saved.

    The models of `filled` parts are the caller's. They keep their parameters. The models of other
    parts get those of a filled part, or else of the first part.
    """
    # For each part, the replacements of tensors by their ids.
    replacements: dict[str, dict[int, Any]] = {}
    for group in manifest.shared:
        members = []
        for member in group:
            part, _, name = member.partition(":")
            tensor = tensor_at(models[part], name) if part in models else None
            if tensor is not None and (part not in filled or type(tensor) in PLAIN):
                members.append((part, tensor))
        members.sort(key=lambda member: member[0] not in filled)
        for part, tensor in members[1:]:
            if part not in filled:
                replacements.setdefault(part, {})[id(tensor)] = members[0][1]

    for part, by_id in replacements.items():
        for module in models[part].modules():
            _replace_tensors(module._parameters, by_id)
            _replace_tensors(module._buffers, by_id)


def _replace_tensors(tensors: dict[str, Any], by_id: Mapping[int, Any]) -> None:
    for name, tensor in tensors.items():
        if id(tensor) in by_id:
            tensors[name] = by_id[id(tensor)]
