"""Loads a committed checkpoint as a model, strictly, without running anything it contains."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ft_ckpt.checkpoint.catalog import why_no_checkpoint
from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, checkpoint_around, open_checkpoint
from ft_ckpt.distributed.fill import readers_here
from ft_ckpt.distributed.tensors import ModelTensors
from ft_ckpt.errors import CheckpointError, CorruptError, LoadError, NotACheckpointError, listing, shown
from ft_ckpt.formats.registry import format_named
from ft_ckpt.formats.tensor_file import MemoryFile
from ft_ckpt.messages import printable
from ft_ckpt.model.attach_adapters import attach_adapters, base_of
from ft_ckpt.model.load_weights import (
    LoadReport,
    Weights,
    beside_weights,
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
from ft_ckpt.model.plain_module import build_module
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
from ft_ckpt.model.settings import MODULE_NAME
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.store import Store, read_text


@dataclass(frozen=True)
class _LoadOptions:
    """How to load, the same for every part."""

    base: Any
    into: nn.Module | None
    classes: Mapping[str, type]
    strict: bool
    check_base: bool
    trust_remote_code: bool
    verify: bool
    mapped: bool | str
    device: torch.device | None  # where tensors are read straight to; None for the host


def load_model(
    path: str | Path | Place,
    *,
    part: str | None = None,
    base: Any = None,
    into: nn.Module | None = None,
    classes: Mapping[str, type] | None = None,
    device: str | torch.device | None = None,
    strict: bool = True,
    check_base: bool = True,
    trust_remote_code: bool = False,
    verify: bool = False,
    mapped: bool | str = "auto",
    with_report: bool = False,
) -> Any:
    """The model committed at `path`: a Hugging Face model, a PeftModel on its base, or a plain module, in eval mode.

    `path` is a checkpoint or the folder of one of its parts; `part` names one as well. A checkpoint of several
    attributes gives a dict by name, parameters they shared shared again. Where the model keeps tensors as they are
    stored, files are mapped, not copied: weights that are trained further are copied as they are written, what is not
    used is not read, and the processes of a machine share one copy. `mapped`: "auto" reads large files that are mostly
    not in the page cache into memory instead, past that cache, at the disk's rate and while the model is made, where
    half of the free memory holds them and no other process of the launch shares this machine; True maps all, False
    reads all. An accelerator as `device` is read to straight, a block at a time.

    `base`: the model an adapter goes on, as module, folder or id; default is the id it was trained on, whose sampled
    weights are compared unless `check_base` is off. A folder of ours is compared with its manifest as `path` is.
    `into`: a module of yours to load a single part into, wrapped or not: its own memory is filled, block by block, so a
    load that breaks off may leave a part of the values; one that transformers stores otherwise than it is in memory
    (fused experts) is made beside it first. `classes`: classes of plain modules by name, beside those already imported.
    `trust_remote_code`: run model code that lies in the checkpoint, or with the base, as in transformers. `verify`:
    compare the digests of all files before anything is made of them; those of files below 1 MB, and the sizes and
    headers of all, are always compared. `with_report`: return (model, LoadReport).

    All files are opened at one moment, so a save that replaces the checkpoint meanwhile changes nothing. Raises
    NotACheckpointError, CorruptError when files differ from the manifest, LoadError naming every missing, unexpected
    or reshaped tensor unless `strict` is off, or saying why no model can be made of them, BaseMismatchError for the
    wrong base.
    """
    if mapped not in (True, False, "auto"):
        raise LoadError(f"mapped={mapped!r}: expected True, False or 'auto'")
    is_host = device is None or torch.device(device).type in ("cpu", "meta")
    place = None if is_host else torch.empty(0, device=device).device  # with its number: threads have their own
    options = _LoadOptions(base, into, classes or {}, strict, check_base, trust_remote_code, verify, mapped, place)
    root, wanted = _find_checkpoint(open_place(path), part)
    with open_checkpoint(Place(root), compares=False) as held, _explain_errors(root):
        model, report = _load_checkpoint(held, wanted, options, device)
    return (model, report) if with_report else model


@contextmanager
def _explain_errors(root: Store) -> Iterator[None]:
    """Raise a LoadError for errors of libraries, which the files cause; but not for want of memory."""
    try:
        yield
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = str(error) if isinstance(error, (OSError, ValueError)) else shown(error)
        raise LoadError(f"{root.url}: no model can be made of it: {printable(text)[:2000]}") from error


def _load_checkpoint(
    held: OpenCheckpoint, wanted: str | None, options: _LoadOptions, device: Any
) -> tuple[Any, LoadReport]:
    manifest, where = held.manifest, held.store.url
    groups = _group_records([part for part in manifest.parts if part.kind != "state"], wanted, where)
    names = [name for records in groups.values() for record in records for name in weight_names(record)]
    own = options.mapped is not True and readers_here() == 1
    problems = held.find_problems(deep=options.verify, keep=names, own=own)
    if problems:
        raise CorruptError(f"{where}: {listing(list(problems))}; use an older checkpoint")
    if options.into is not None and len(groups) > 1:
        raise LoadError(f"into=: {where} holds {', '.join(groups)}; name one of them with part=")
    loaded = {name: _load_group(held, records, options) for name, records in groups.items()}
    models = {name: model.to(device) if device is not None else model for name, (model, _) in loaded.items()}
    share_again(manifest, models)
    single = len(models) == 1 and (wanted is not None or "" in models)
    result = next(iter(models.values())) if single else models
    origin = held.origin.folder if isinstance(held.origin, LocalStore) else held.origin.url
    found = summary_of(origin, wanted or "", [one for _, one in loaded.values()], copied=device not in (None, "cpu"))
    return result, found


def _find_checkpoint(place: Place, part: str | None) -> tuple[Store, str | None]:
    """The checkpoint's store, and the folder of the part asked for (None: all of it)."""
    found = checkpoint_around(place)
    if found is None:
        raise NotACheckpointError(why_no_checkpoint(place.folder))
    root, below = found
    return root, (below or None) if part is None else part


def _group_records(parts: Sequence[PartRecord], wanted: str | None, where: str) -> dict[str, list[PartRecord]]:
    """Records by the thing they make up: a model with its adapters is one."""
    groups: dict[str, list[PartRecord]] = {}
    for record in parts:
        groups.setdefault(_owner_folder(record), []).append(record)
    if wanted is None:
        return groups
    if wanted in groups:
        return {wanted: groups[wanted]}
    exact = [record for record in parts if wanted in (record.name, record.path)]
    if not exact:
        names = sorted({*groups, *(record.name for record in parts)} - {""})
        raise LoadError(
            f"part {wanted!r}: not in {where}; it has {', '.join(names) or 'one part only, leave part= out'}"
        )
    return {wanted: exact}


def _owner_folder(record: PartRecord) -> str:
    """The folder of the model the record belongs to."""
    if record.kind != "adapter":
        return record.path
    tail = f"adapters/{record.adapter}" if record.path.endswith(f"adapters/{record.adapter}") else str(record.adapter)
    if record.adapter == "default" and tail == "default":
        return record.path
    return record.path.removesuffix(tail).rstrip("/")


def _load_group(held: OpenCheckpoint, records: list[PartRecord], options: _LoadOptions) -> tuple[nn.Module, LoadReport]:
    whole = [record for record in records if record.kind != "adapter"]
    adapters = [record for record in records if record.kind == "adapter"]
    if whole and whole[0].kind == "module":
        return _load_plain(held, whole[0], options)
    model, report = (None, None) if not whole else _load_pretrained(held, whole[0], options)
    if not adapters:
        if model is None or report is None:
            raise LoadError(f"{held.store.url}: no part to load")
        return model, report
    if model is None:
        trusted, given = options.trust_remote_code, options.base
        model = options.into
        model = base_of(adapters[0], given, trusted, verify=options.verify) if model is None else model
    model, notes = attach_adapters(
        model, held, adapters, check_base=options.check_base and not whole, beside=bool(whole)
    )
    count = sum(len(record.tensors) for record in adapters) + (report.tensors if report else 0)
    zero_copy = bool(report and report.zero_copy)
    return model, LoadReport(held.store.url, "", (), (), (), count, zero_copy, notes)


def _load_plain(held: OpenCheckpoint, record: PartRecord, options: _LoadOptions) -> tuple[nn.Module, LoadReport]:
    store = held.store
    if options.into is not None:
        return options.into, _copy_tensors(options.into, record, store, options)
    with fetching_weights(store, weight_names(record), options.mapped, options.device) as tensors:
        described = json.loads(read_text(store, beside_weights(record, MODULE_NAME)))
        module = build_module(described, options.classes).eval()
        return module, _assign_tensors(module, record, store, options.strict, tensors())


def _load_pretrained(held: OpenCheckpoint, record: PartRecord, options: _LoadOptions) -> tuple[nn.Module, LoadReport]:
    store = held.store
    if options.into is not None and is_converted(options.into):
        return options.into, _copy_converted(options.into, held, record, options)
    if options.into is not None:
        return options.into, _copy_tensors(options.into, record, store, options)
    config, cls = checked_config(store, record), model_class(record.class_name)
    with limit_parameters(most_parameters(record), "config.json"):
        # quantised models, and those of code of their own, are for transformers to make
        if cls is not None and not options.trust_remote_code and config.get("quantization_config") is None:
            with fetching_weights(store, weight_names(record), options.mapped, options.device) as tensors:
                model = empty_model(cls, held, record)
                if model is not None:
                    report = _assign_tensors(model, record, store, options.strict, tensors())
                    model.tie_weights()
                    return model.eval(), report
        return _through_transformers(cls or class_of_own_code(config, record), held, record, options)


def _through_transformers(
    cls: Any, held: OpenCheckpoint, record: PartRecord, options: _LoadOptions
) -> tuple[nn.Module, LoadReport]:
    """Let transformers load what is converted on the way in; its account of the load is held to the same strictness.

    It places parameters and buffers. What modules list beside them is given back here, as each module loads it.
    """
    is_quantised = checked_config(held.store, record).get("quantization_config") is not None
    extra = extra_beside(held.store, record)
    if is_quantised and extra:  # such a model lists what transformers alone knows to take back
        raise LoadError(
            f"{listing(list(extra), ', ')}: state of a quantised model that is no tensor cannot be given back; resume "
            "a run with it, or load the checkpoint into the model with into="
        )
    with nullcontext() if is_quantised else listing_own(record):
        model, info = _by_transformers(cls, held, record, options)
    unexpected, beside = set(info["unexpected_keys"]), [] if is_quantised else list(_beside_own(model, extra))
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


def _by_transformers(cls: Any, held: OpenCheckpoint, record: PartRecord, options: _LoadOptions) -> tuple[Any, Any]:
    """The model as transformers makes it of the part's folder, and its account."""
    import transformers

    asked: dict[str, Any] = {"output_loading_info": True, "trust_remote_code": options.trust_remote_code}
    with companions_here(held, record) as folder:
        if format_named(record.format).read_by_transformers:
            held.let_go()
            model, info = cls.from_pretrained(folder, dtype="auto", local_files_only=True, **asked)
        else:  # which transformers does not open: it gets the tensors themselves
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=options.trust_remote_code)
            tensors = read_weights(held.store, weight_names(record), options.mapped)[0]
            made = cls.from_pretrained(None, config=config, state_dict=tensors, dtype=config.dtype, **asked)
            model, info = made
        name_origin(model, folder, held, record)
    return model, info


def _beside_own(model: nn.Module, given: Iterable[str]) -> list[str]:
    """Names that the model lists beside its parameters and buffers."""
    return ModelTensors(model).names_added(given)


def _assign_tensors(module: nn.Module, record: PartRecord, store: Store, strict: bool, supplied: Weights) -> LoadReport:
    """Give `module` the stored tensors themselves."""
    return replace(put_tensors(module, record, supplied[0], store, strict), zero_copy=supplied[1])


def _copy_converted(into: nn.Module, held: OpenCheckpoint, record: PartRecord, options: _LoadOptions) -> LoadReport:
    """Give `into` the values of the model that transformers makes of what it stores otherwise: both are in memory."""
    made, report = _load_pretrained(held, record, replace(options, into=None, device=None))
    values = MemoryFile({name: one for name, one in made.state_dict().items() if isinstance(one, torch.Tensor)})
    filled = fill_module(into, replace(record, ties=()), [values], held.store, options.strict)
    return replace(filled, notes=(*filled.notes, *report.notes))


def _copy_tensors(into: nn.Module, record: PartRecord, store: Store, options: _LoadOptions) -> LoadReport:
    """Give `into` the values of the stored tensors."""
    with ExitStack() as stack:
        files = [stack.enter_context(closing(file)) for file in open_weights(store, weight_names(record))]
        return fill_module(into, record, files, store, options.strict)
