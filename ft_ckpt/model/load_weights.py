"""Puts stored tensors into a module, strictly, and reports those that do not fit."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ft_ckpt.checkpoint.manifest import Manifest, PartRecord
from ft_ckpt.distributed.inventory import inventory_of, restore_added_state
from ft_ckpt.errors import LoadError, listing
from ft_ckpt.model.open_weights import extra_beside
from ft_ckpt.model.plain_module import put_at, tensor_at
from ft_ckpt.storage.store import Store


@dataclass(frozen=True)
class LoadReport:
    """The outcome of a load. A strict one raises where a name would be missing, unexpected or reshaped."""

    path: str | Path
    """The checkpoint: its path, or its URL."""
    part: str
    """The part that was loaded; "" for the whole checkpoint."""
    missing: tuple[str, ...] = ()
    """Names in the model and not in the files."""
    unexpected: tuple[str, ...] = ()
    """Names in the files and not in the model."""
    reshaped: tuple[str, ...] = ()
    """Names of tensors with another shape in the model."""
    tensors: int = 0
    """Number of tensors that were loaded."""
    zero_copy: bool = False
    """The parameters are the mapped file; they are copied only when they are written to."""
    notes: tuple[str, ...] = ()
    """What the load decided and a reader should know."""


def put_tensors(
    module: nn.Module, record: PartRecord, tensors: dict[str, Tensor], store: Store, strict: bool, *, assign: bool
) -> LoadReport:
    """Put stored tensors into `module`, ties included: the mapped memory itself with `assign`, else its values.

    Raises LoadError naming every tensor that does not fit, if `strict`.
    """
    for kept, *aliases in record.ties:
        tensors.update({alias: tensors[kept] for alias in aliases if kept in tensors and alias not in tensors})
    inventory = inventory_of(module)
    own = inventory.infos(allow_meta=True)
    live = {name: None if source.is_added else source.shape for name, source in own.items()}
    extra = extra_beside(store, record)
    live |= dict.fromkeys(inventory.names_added((*tensors, *extra)))
    reshaped = [n for n, t in tensors.items() if live.get(n) is not None and live[n] != tuple(t.shape)]
    report = LoadReport(
        store.url,
        record.path,
        tuple(name for name in live if name not in tensors and name not in extra),
        tuple(name for name in (*tensors, *extra) if name not in live),
        tuple(f"{name}: {tuple(tensors[name].shape)} in the file, {live[name]} in the model" for name in reshaped),
        len(record.tensors),
    )
    refuse_differences(report, strict)
    fitting: dict[str, Any] = {
        name: tensor for name, tensor in tensors.items() if name in live and name not in reshaped
    }
    wants = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    fitting |= {name: value for name, value in extra.items() if name in live}
    module.load_state_dict(fitting, strict=False, assign=assign)
    if strict:
        restore_added_state(module, {name: value for name, value in fitting.items() if live[name] is None})
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(wants.get(name, parameter.requires_grad) and parameter.dtype.is_floating_point)
    for kept, *aliases in record.ties if assign else ():
        for alias in aliases:
            put_at(module, alias, tensor_at(module, kept))
    return report


def refuse_differences(report: LoadReport, strict: bool) -> None:
    """Raise LoadError naming everything that differs, if the load is to be `strict`."""
    problems = [f"{name}: missing in the files" for name in report.missing]
    problems += [f"{name}: not in the model" for name in report.unexpected]
    problems += list(report.reshaped)
    if strict and problems:
        raise LoadError(
            f"{listing(problems)}: {len(problems)} difference(s) between {report.path} and the model; load it into the "
            "class it was saved from, or pass strict=False to take what fits"
        )


def share_again(manifest: Manifest, models: Mapping[str, nn.Module]) -> None:
    """Make parameters that parts shared when they were saved one parameter again."""
    for group in manifest.shared:
        members = [member.partition(":")[::2] for member in group]
        here = [(models[part], name) for part, name in members if part in models]
        if len(here) < 2:
            continue
        first = tensor_at(*here[0])
        for module, name in here[1:]:
            if first is not None and tensor_at(module, name) is not None:
                put_at(module, name, first)


def summary_of(root: str | Path, part: str, reports: list[LoadReport], copied: bool) -> LoadReport:
    """One report of all parts of the checkpoint `root`; `copied`: no parameter is the mapped file any more."""
    first = replace(reports[0], path=root, part=part)
    for other in reports[1:]:
        first = replace(
            first,
            missing=first.missing + other.missing,
            unexpected=first.unexpected + other.unexpected,
            reshaped=first.reshaped + other.reshaped,
            tensors=first.tensors + other.tensors,
            zero_copy=first.zero_copy and other.zero_copy,
            notes=first.notes + other.notes,
        )
    return replace(first, zero_copy=first.zero_copy and not copied)
