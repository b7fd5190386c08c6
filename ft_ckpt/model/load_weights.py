"""Opens weight files and loads their tensors into a module, strictly."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ft_ckpt.checkpoint import Manifest, PartRecord
from ft_ckpt.errors import LoadError, listing
from ft_ckpt.formats import (
    PLAIN,
    IndexedFile,
    TensorFile,
    checkpoint_format_of,
    load_object,
    read_onto,
)
from ft_ckpt.model.selection import made_by_class, put_at, tensor_at
from ft_ckpt.model.settings import EXTRA_FILE
from ft_ckpt.ranks import (
    ModelTensors,
    Source,
    WantedTensor,
    fill_all,
    keeps_weights,
    readers_here,
    source_of_tensor,
    walk_modules,
    wrapped_key,
)
from ft_ckpt.storage import Store, read_text

Weights = tuple[dict[str, Tensor], bool]  # tensors by name, and whether all are mapped


def weight_names(record: PartRecord) -> list[str]:
    """The names of a part's weight files in its checkpoint."""
    return list(dict.fromkeys(tensor.file for tensor in record.tensors))


@contextmanager
def fetching_weights(
    store: Store,
    names: Iterable[str],
    mapped: bool | str = "auto",
    device: torch.device | None = None,
) -> Iterator[Callable[[], Weights]]:
    """Read the tensors of weight files in a thread; yields a function that waits for them.

    `device`: the tensors are read onto it. Leaving the block ends the read. Raises CorruptError for
    a file with a damaged index.
    """
    opened = open_weights(store, names)
    with ThreadPoolExecutor(1, "ft_ckpt-supply") as pool, ExitStack() as stack:
        for file in opened:
            stack.callback(file.close)  # which ends the read
        yield pool.submit(_read_files, opened, mapped, device).result


def read_weights(store: Store, names: Iterable[str], mapped: bool | str = "auto") -> Weights:
    """The tensors of weight files by name, and whether all are mapped.

    `mapped`="auto" reads a file into memory if that is faster than page faults and no other process
    of the launch on this machine can share the pages. Files that cannot be mapped are always read.
    """
    return _read_files(open_weights(store, names), mapped, None)


def _read_files(
    files: Iterable[IndexedFile], mapped: bool | str, device: torch.device | None
) -> Weights:
    tensors: dict[str, Tensor] = {}
    are_mapped = device is None
    for file in files:
        if device is not None:
            tensors.update(read_onto(file, device))
            continue
        wanted = mapped is False or (
            mapped == "auto" and readers_here() == 1 and file.raw.is_cold()
        )
        # compressed files are decompressed into memory
        if (wanted or not file.raw.can_map) and not file.readers:
            are_mapped = not file.raw.read_in() and are_mapped
        are_mapped &= file.raw.can_map
        tensors.update(_file_tensors(file))
    return tensors, are_mapped


def open_weights(store: Store, names: Iterable[str]) -> list[IndexedFile]:
    """Open weight files. Raises CorruptError for a file with a damaged index."""
    return [checkpoint_format_of(name).open_file(store.open(name)) for name in names]


def _file_tensors(file: IndexedFile) -> dict[str, Tensor]:
    return {name: file.read(name).view(spec.shape) for name, spec in file.specs.items()}


def extra_beside(store: Store, record: PartRecord) -> dict[str, Any]:
    """The non-tensor values of a part's state dict. Raises CorruptError for a damaged file."""
    name = beside_weights(record, EXTRA_FILE)
    return load_object(read_text(store, name)) if store.stat(name) is not None else {}


def beside_weights(record: PartRecord, file: str) -> str:
    """The path, in the checkpoint, of a file in the folder of a part."""
    return f"{record.path}/{file}".lstrip("/")


_OneStored = TypeVar("_OneStored")


@dataclass(frozen=True)
class LoadReport:
    """The outcome of a load. A strict load raises for missing, unexpected or reshaped names."""

    path: str | Path
    """The checkpoint: its path, or its URL."""
    part: str
    """The part that was loaded; "" for the whole checkpoint."""
    missing: tuple[str, ...] = ()
    """Names in the model and not in the files."""
    unexpected: tuple[str, ...] = ()
    """Names in the files and not in the model."""
    reshaped: tuple[str, ...] = ()
    """Names of tensors whose shape in the model differs, with both shapes where known."""
    tensors: int = 0
    """Number of tensors that were loaded."""
    zero_copy: bool = False
    """Whether the parameters are mapped files (copy-on-write)."""
    notes: tuple[str, ...] = ()
    """Decisions of the load that affect the model."""


@dataclass(frozen=True, eq=False)
class _Comparison:
    """The comparison of a part's files with a module."""

    report: LoadReport
    tensors: ModelTensors
    # shapes of the module's tensors; None for other entries
    live: Mapping[str, tuple[int, ...] | None]
    fitting: tuple[str, ...]  # names of stored tensors that fit the module
    extra: Mapping[str, Any]  # non-tensor values that fit the module

    @property
    def module(self) -> nn.Module:
        """The user's module, without wrappers."""
        return self.tensors.chain[-1]


def put_tensors(
    module: nn.Module, record: PartRecord, tensors: dict[str, Tensor], store: Store, strict: bool
) -> LoadReport:
    """Make stored tensors the parameters and buffers of `module`, ties included.

    Raises LoadError naming every tensor that does not fit, if `strict`.
    """
    stored = _with_aliases(record, tensors)
    found = _compare_stored(
        module,
        record,
        {name: tuple(tensor.shape) for name, tensor in stored.items()},
        store,
        strict,
    )
    wants = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    values = {name: stored[name] for name in found.fitting} | dict(found.extra)
    module.load_state_dict(values, strict=False, assign=True)
    _restore_added(found, values, strict)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(
            wants.get(name, parameter.requires_grad) and parameter.dtype.is_floating_point
        )
    for kept, *aliases in record.ties:
        for alias in aliases:
            put_at(module, alias, tensor_at(module, kept))
    return found.report


def fill_module(
    module: nn.Module, record: PartRecord, files: Iterable[TensorFile], store: Store, strict: bool
) -> LoadReport:
    """Overwrite the parameters and buffers of `module` with the stored values, cast to their
    dtypes.

    Each rank reads its shard directly into the module's memory, a few blocks at a time. Tensors of
    modules that override loading are read into temporary tensors and then loaded. Raises LoadError
    naming every tensor that does not fit (if `strict`), is on the meta device, or would be
    overwritten by its engine; CorruptError for a damaged file, after which the module may have part
    of the values.
    """
    stored = _with_aliases(record, {name: (file, name) for file in files for name in file.specs})
    shapes = {name: file.specs[own].shape for name, (file, own) in stored.items()}
    found = _compare_stored(module, record, shapes, store, strict)
    _refuse_meta(found)
    _refuse_masters(found)
    direct = _direct_targets(found.tensors)
    wanted, indirect = [], {}
    for name in found.fitting:
        file, own = stored[name]
        dtype = getattr(torch, file.specs[own].dtype)
        target = direct.get(name) or source_of_tensor(
            name, name, torch.empty(shapes[name], dtype=dtype, device="cpu")
        )
        if name not in direct:
            indirect[name] = target.local
        wanted.append(WantedTensor(replace(target, dtype=dtype), target.local, file, own))
    fill_all(wanted, direct="auto" if readers_here() == 1 else "off")
    values = indirect | dict(found.extra)
    found.module.load_state_dict(values, strict=False)
    _restore_added(found, values, strict)
    return found.report


def _with_aliases(record: PartRecord, stored: Mapping[str, _OneStored]) -> dict[str, _OneStored]:
    """The stored tensors by name, including the aliases of tied tensors."""
    found = dict(stored)
    for kept, *aliases in record.ties:
        found |= {alias: found[kept] for alias in aliases if kept in found and alias not in found}
    return found


def _compare_stored(
    module: nn.Module,
    record: PartRecord,
    shapes: Mapping[str, tuple[int, ...]],
    store: Store,
    strict: bool,
) -> _Comparison:
    """Compare stored names and shapes with the module's.

    Raises LoadError naming all differences, if `strict`.
    """
    tensors = ModelTensors(module)
    sources = tensors.sources(allow_meta=True)
    live = {name: None if info.is_added else info.shape for name, info in sources.items()}
    extra = extra_beside(store, record)
    live |= dict.fromkeys(tensors.names_added((*shapes, *extra)))
    recomputed = made_by_class(tensors.chain[-1])
    reshaped = [
        name for name, shape in shapes.items() if live.get(name) is not None and live[name] != shape
    ]
    report = LoadReport(
        store.url,
        record.path,
        tuple(
            name
            for name in live
            if name not in shapes and name not in extra and name not in recomputed
        ),
        tuple(name for name in (*shapes, *extra) if name not in live),
        tuple(
            f"{name}: {shapes[name]} in the file, {live[name]} in the model" for name in reshaped
        ),
        len(record.tensors),
    )
    refuse_differences(report, strict)
    fitting = tuple(name for name in shapes if name in live and name not in reshaped)
    return _Comparison(
        report, tensors, live, fitting, {name: extra[name] for name in extra if name in live}
    )


def _direct_targets(tensors: ModelTensors) -> dict[str, Source]:
    """The tensors that can be overwritten in place, without calling their modules; in engines, all
    but opaque ones.
    """
    modules = walk_modules(tensors.chain[-1])
    overriding = tuple(
        f"{path}." if path else "" for path, _, module in modules if not _loads_plainly(module)
    )
    found = {}
    for name, source in tensors.sources(allow_meta=True).items():
        is_plain = type(source.live) in PLAIN and not name.startswith(overriding)
        if (
            not source.is_added
            and not source.sharding.is_opaque
            and (source.engine != "plain" or is_plain)
        ):
            found[name] = source
    return found


def _loads_plainly(module: nn.Module) -> bool:
    """Whether loading a state dict only copies values into `module`."""
    if wrapped_key(module) is not None:
        return True
    own = vars(module)
    is_torchs = type(module)._load_from_state_dict is nn.Module._load_from_state_dict
    return (
        is_torchs and "_load_from_state_dict" not in own and not own["_load_state_dict_pre_hooks"]
    )


def _refuse_meta(found: _Comparison) -> None:
    """Raise LoadError naming tensors of the module on the meta device."""
    sources = found.tensors.sources(allow_meta=True)
    on_meta = [
        name
        for name in found.fitting
        if name in sources and getattr(sources[name].live, "is_meta", False)
    ]
    if on_meta:
        raise LoadError(
            f"{listing(on_meta, ', ')}: on the meta device, and into= fills the memory that is "
            "there; call to_empty(device=...) first, or leave into= out"
        )


def _refuse_masters(found: _Comparison) -> None:
    """Raise LoadError if an engine's optimizer keeps its own copy of the weights and would
    overwrite them.
    """
    parts = [
        name
        for name, info in found.tensors.sources(allow_meta=True).items()
        if info.engine == "zero3"
    ]
    if parts or any(map(keeps_weights, found.tensors.chain)):
        names = listing(parts, ", ") or "the model"
        raise LoadError(
            f"{names}: in an engine of DeepSpeed, whose optimizer has weights of its own and "
            "overwrites the model's; load before deepspeed.initialize() or accelerator.prepare(), "
            "or resume a run"
        )


def _restore_added(found: _Comparison, values: Mapping[str, Any], strict: bool) -> None:
    added = {name for name, shape in found.live.items() if shape is None}
    if strict and added:
        loaded = ModelTensors(found.module)  # loading may have replaced tensors
        loaded.restore_added({name: value for name, value in values.items() if name in added})


def refuse_differences(report: LoadReport, strict: bool) -> None:
    """Raise LoadError naming everything that differs, if the load is `strict`."""
    problems = [f"{name}: missing in the files" for name in report.missing]
    problems += [f"{name}: not in the model" for name in report.unexpected]
    problems += list(report.reshaped)
    if strict and problems:
        raise LoadError(
            f"{listing(problems)}: {len(problems)} difference(s) between "
            f"{report.path} and the model; load it into the class it was saved from, "
            "or pass strict=False to take what fits"
        )


def share_again(
    manifest: Manifest, models: Mapping[str, nn.Module], filled: Collection[str]
) -> None:
    """Share parameters again that parts shared when they were saved.

    The models of `filled` parts are the caller's: they keep their parameters, and the others take
    them.
    """
    replacements: dict[str, dict[int, Any]] = {}  # part -> id of a tensor -> its replacement
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
            for tensors in (module._parameters, module._buffers):
                shared = {
                    name: by_id[id(tensor)]
                    for name, tensor in tensors.items()
                    if id(tensor) in by_id
                }
                tensors.update(shared)


def summary_of(root: str | Path, part: str, reports: list[LoadReport], copied: bool) -> LoadReport:
    """One report of all parts of the checkpoint `root`; `copied`: parameters were copied from the
    mapped files.
    """
    return LoadReport(
        root,
        part,
        missing=tuple(name for report in reports for name in report.missing),
        unexpected=tuple(name for report in reports for name in report.unexpected),
        reshaped=tuple(name for report in reports for name in report.reshaped),
        tensors=sum(report.tensors for report in reports),
        zero_copy=all(report.zero_copy for report in reports) and not copied,
        notes=tuple(note for report in reports for note in report.notes),
    )
