"""Puts stored tensors into a module.

`put_tensors` makes the stored tensors the parameters of an empty module. `fill_module` copies the
stored values into the memory of a module of the caller, which can be sharded.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ft_ckpt.checkpoint.manifest import PartRecord
from ft_ckpt.errors import LoadError, listing
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.formats.trees import PLAIN
from ft_ckpt.model.files import read_extra_values
from ft_ckpt.model.load.report import LoadReport, refuse_differences
from ft_ckpt.model.tensors import made_by_class, put_at, tensor_at
from ft_ckpt.ranks.moving import WantedTensor, fill_all, readers_here
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import (
    ModelTensors,
    keeps_weights,
    source_of_tensor,
    walk_modules,
    wrapped_key,
)
from ft_ckpt.storage import Store

_Stored = TypeVar("_Stored")


@dataclass(frozen=True, eq=False)
class _ModuleComparison:
    """Result of comparing a part's files with a module.

    Attributes:
        report: the names that are missing, unexpected or reshaped.
        tensors: the tensors of the module.
        live_shapes: their shapes, by name. None for other entries of the module's state dict.
        fitting_names: names of the stored tensors that fit the module.
        extra: the stored non-tensor values that fit the module, by name.
    """

    report: LoadReport
    tensors: ModelTensors
    live_shapes: Mapping[str, tuple[int, ...] | None]
    fitting_names: tuple[str, ...]
    extra: Mapping[str, Any]

    @property
    def module(self) -> nn.Module:
        """Module of the user, without wrappers."""
        return self.tensors.chain[-1]


def put_tensors(
    module: nn.Module, record: PartRecord, tensors: dict[str, Tensor], store: Store, strict: bool
) -> LoadReport:
    """Make stored tensors the parameters and buffers of `module`, and tie them as they were.

    If `strict`, raises LoadError naming every tensor that does not fit.
    """
    stored = _with_aliases(record, tensors)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    comparison = _compare_stored(module, record, shapes, store, strict)
    requires_grad = {name: param.requires_grad for name, param in module.named_parameters()}
    values: dict[str, Any] = {name: stored[name] for name in comparison.fitting_names}
    values.update(comparison.extra)
    module.load_state_dict(values, strict=False, assign=True)
    _restore_added(comparison, values, strict)
    for name, parameter in module.named_parameters():
        is_trained = requires_grad.get(name, parameter.requires_grad)
        parameter.requires_grad_(is_trained and parameter.dtype.is_floating_point)

    for stored_name, *aliases in record.ties:
        for alias in aliases:
            put_at(module, alias, tensor_at(module, stored_name))

    return comparison.report


def fill_module(
    module: nn.Module, record: PartRecord, files: Iterable[TensorFile], store: Store, strict: bool
) -> LoadReport:
    """Overwrite parameters and buffers of `module` with the stored values, cast to their dtypes.

    Each rank reads its shard directly into the module's memory, a few blocks at a time. Tensors of
    modules that override loading are read into temporary tensors and then loaded.

    Raises LoadError naming every tensor that does not fit (if `strict`), that is on the meta
    device, or that its engine would overwrite. Raises CorruptError for a damaged file. Some tensors
    of the module can have been overwritten by then.
    """
    # The file of each tensor, and its stored name there.
    stored_tensors: dict[str, tuple[TensorFile, str]] = {}
    for file in files:
        for name in file.specs:
            stored_tensors[name] = (file, name)

    stored_tensors = _with_aliases(record, stored_tensors)
    specs = {name: file.specs[stored_name] for name, (file, stored_name) in stored_tensors.items()}
    shapes = {name: spec.shape for name, spec in specs.items()}
    comparison = _compare_stored(module, record, shapes, store, strict)
    _refuse_meta(comparison)
    _refuse_masters(comparison)
    direct_targets = _direct_targets(comparison.tensors)
    requests = []
    values: dict[str, Any] = {}  # temporary tensors, for modules that override loading
    for name in comparison.fitting_names:
        file, stored_name = stored_tensors[name]
        dtype = getattr(torch, specs[name].dtype)
        target = direct_targets.get(name)
        if target is None:
            values[name] = torch.empty(shapes[name], dtype=dtype, device="cpu")
            target = source_of_tensor(name, name, values[name])
        target = replace(target, dtype=dtype)
        requests.append(WantedTensor(target, target.local, file, stored_name))

    fill_all(requests, direct="auto" if readers_here() == 1 else "off")
    values.update(comparison.extra)
    comparison.module.load_state_dict(values, strict=False)
    _restore_added(comparison, values, strict)
    return comparison.report


def _with_aliases(record: PartRecord, stored: Mapping[str, _Stored]) -> dict[str, _Stored]:
    """Return `stored` with an entry for each further name of a tied tensor."""
    by_name = dict(stored)
    for stored_name, *aliases in record.ties:
        for alias in aliases:
            if stored_name in by_name:
                by_name.setdefault(alias, by_name[stored_name])
    return by_name


def _compare_stored(
    module: nn.Module,
    record: PartRecord,
    shapes: Mapping[str, tuple[int, ...]],
    store: Store,
    strict: bool,
) -> _ModuleComparison:
    """Compare stored names and shapes with those of the module.

    If `strict`, raises LoadError naming all differences.
    """
    tensors = ModelTensors(module)
    live_shapes: dict[str, tuple[int, ...] | None] = {}
    for name, source in tensors.sources(allow_meta=True).items():
        live_shapes[name] = None if source.is_added else source.shape
    extra = read_extra_values(store, record)
    live_shapes |= dict.fromkeys(tensors.names_added((*shapes, *extra)))
    stored_names = {*shapes, *extra}
    recomputed = made_by_class(tensors.chain[-1])
    missing = []
    for name in live_shapes:
        if name not in stored_names and name not in recomputed:
            missing.append(name)

    fitting_names: list[str] = []
    reshaped: list[str] = []
    for name, shape in shapes.items():
        live_shape = live_shapes.get(name)
        if live_shape is not None and live_shape != shape:
            reshaped.append(f"{name}: {shape} in the file, {live_shape} in the model")
        elif name in live_shapes:
            fitting_names.append(name)

    report = LoadReport(
        store.url,
        record.path,
        tuple(missing),
        tuple(name for name in (*shapes, *extra) if name not in live_shapes),
        tuple(reshaped),
        len(record.tensors),
    )
    refuse_differences(report, strict)
    fitting_extra = {name: value for name, value in extra.items() if name in live_shapes}
    return _ModuleComparison(report, tensors, live_shapes, tuple(fitting_names), fitting_extra)


def _direct_targets(tensors: ModelTensors) -> dict[str, Source]:
    """Find the tensors that can be overwritten in place, without calling their modules.

    In an engine such as FSDP, these are all tensors except those with an opaque sharding.
    """
    overriding = []
    for path, _, module in walk_modules(tensors.chain[-1]):
        if not _loads_plainly(module):
            overriding.append(f"{path}." if path else "")
    prefixes = tuple(overriding)
    targets = {}
    for name, source in tensors.sources(allow_meta=True).items():
        if source.is_added or source.sharding.is_opaque:
            continue
        is_plain = type(source.live) in PLAIN and not name.startswith(prefixes)
        if is_plain or source.engine != "plain":
            targets[name] = source
    return targets


def _loads_plainly(module: nn.Module) -> bool:
    """Check whether loading a state dict only copies values into `module`."""
    if wrapped_key(module) is not None:
        return True
    if type(module)._load_from_state_dict is not nn.Module._load_from_state_dict:
        return False
    attributes = vars(module)
    has_hooks = attributes["_load_state_dict_pre_hooks"]
    return "_load_from_state_dict" not in attributes and not has_hooks


def _refuse_meta(comparison: _ModuleComparison) -> None:
    """Raise LoadError naming tensors of the module on the meta device."""
    sources = comparison.tensors.sources(allow_meta=True)
    on_meta = []
    for name in comparison.fitting_names:
        if name in sources and getattr(sources[name].live, "is_meta", False):
            on_meta.append(name)
    if on_meta:
        raise LoadError(
            f"{listing(on_meta, ', ')}: on the meta device, and into= fills the memory that is "
            "there; call to_empty(device=...) first, or leave into= out"
        )


def _refuse_masters(comparison: _ModuleComparison) -> None:
    """Raise LoadError if an optimizer has its own copy of the weights.

    The copy would overwrite the loaded weights.
    """
    sources = comparison.tensors.sources(allow_meta=True)
    partitioned = [name for name, source in sources.items() if source.engine == "zero3"]
    if partitioned or any(map(keeps_weights, comparison.tensors.chain)):
        names = listing(partitioned, ", ") or "the model"
        raise LoadError(
            f"{names}: in an engine of DeepSpeed, whose optimizer has weights of its own and "
            "overwrites the model's; load before deepspeed.initialize() or accelerator.prepare(), "
            "or resume a run"
        )


def _restore_added(comparison: _ModuleComparison, values: Mapping[str, Any], strict: bool) -> None:
    added = {name for name, shape in comparison.live_shapes.items() if shape is None}
    if strict and added:
        # Loading can have replaced tensors, so they are looked up again.
        loaded = ModelTensors(comparison.module)
        loaded.restore_added({name: value for name, value in values.items() if name in added})
