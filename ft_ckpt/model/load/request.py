"""Checks the arguments of a load, opens the checkpoint, and chooses the models to load.

A request is one model to load: a model of the checkpoint with its adapters, or adapters whose base
is elsewhere. The caller can give a module that it fills.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ft_ckpt.checkpoint import OpenCheckpoint, checkpoint_around, open_checkpoint
from ft_ckpt.checkpoint.checks import SignedBy, are_transient, signature_problems
from ft_ckpt.checkpoint.manifest import PartRecord, why_no_checkpoint
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    LoadError,
    NotACheckpointError,
    UnreadableError,
    listing,
    shown,
)
from ft_ckpt.messages import did_you_mean, printable, short_repr
from ft_ckpt.model.files import refuse_delta, weight_names
from ft_ckpt.progress_bars import track_reads
from ft_ckpt.ranks.moving import is_first_process
from ft_ckpt.storage.places import Place


@dataclass(frozen=True)
class LoadOptions:
    """Checked arguments of a load that apply to all parts.

    They are those of `load_model`. `device` is where models are moved to. `accelerator` is where
    tensors are read to directly, or None for the host.
    """

    base: Any
    classes: Mapping[str, type]
    strict: bool
    check_base: bool
    trust_remote_code: bool
    verify: bool
    mapped: bool | str
    device: torch.device | None
    accelerator: torch.device | None


def check_options(
    *,
    base: Any,
    classes: Mapping[str, type] | None,
    strict: bool,
    check_base: bool,
    trust_remote_code: bool,
    verify: bool,
    mapped: bool | str,
    device: str | torch.device | None,
) -> LoadOptions:
    """Check the arguments of a load. Raises LoadError for an invalid one."""
    if mapped not in (True, False, "auto"):
        raise LoadError(f"mapped={mapped!r}: expected True, False or 'auto'")
    if not isinstance(classes, Mapping | None):
        raise LoadError(
            f"classes={short_repr(classes)}: expected a class for each name, as a mapping"
        )

    target = None
    accelerator = None
    if device is not None:
        target = _checked_device(device)
        if target.type not in ("cpu", "meta"):
            # The device of a tensor has an index. Without it, threads could use different devices.
            accelerator = torch.empty(0, device=target).device

    return LoadOptions(
        base,
        classes or {},
        strict,
        check_base,
        trust_remote_code,
        verify,
        mapped,
        target,
        accelerator,
    )


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LoadError(
            f"device={short_repr(device)}: unknown to torch; expected such as 'cpu' or 'cuda:0'"
        ) from error


@dataclass(frozen=True, eq=False)
class ModelRequest:
    """One model to load.

    Attributes:
        record: the model or module in the checkpoint. None: the checkpoint has adapters alone.
        adapters: its adapters.
        target: the module of the caller to fill, or None.
    """

    record: PartRecord | None
    adapters: tuple[PartRecord, ...]
    target: nn.Module | None

    @property
    def parts(self) -> list[PartRecord]:
        return [*self.adapters] if self.record is None else [self.record, *self.adapters]


@contextmanager
def open_to_load(place: Place, part: str | None) -> Iterator[tuple[OpenCheckpoint, str | None]]:
    """Open the checkpoint that `place` is, or is in. Yield it and the part to load.

    None for the part is all parts. Errors of libraries in the `with` block become LoadError,
    because invalid files cause them. Errors of full memory are not changed.
    """
    around = checkpoint_around(place)
    if around is None:
        raise NotACheckpointError(why_no_checkpoint(place))
    root, folder = around
    if folder and place.is_object:
        raise NotACheckpointError(why_no_checkpoint(place))
    with open_checkpoint(Place(root)) as checkpoint, _explain_errors(checkpoint):
        yield checkpoint, (folder or None) if part is None else part


@contextmanager
def _explain_errors(checkpoint: OpenCheckpoint) -> Iterator[None]:
    try:
        yield
    except (CheckpointError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = str(error) if isinstance(error, (OSError, ValueError)) else shown(error)
        if checkpoint.is_local:
            text = text.replace(str(checkpoint.folder), str(checkpoint.path))
        raise LoadError(
            f"{checkpoint.place}: no model can be made of it: {printable(text)[:2000]}"
        ) from error


def refuse_unsigned(checkpoint: OpenCheckpoint, required: SignedBy | None) -> None:
    """Raise CorruptError unless the checkpoint has the `required` signature."""
    if required is None:
        return
    folder = checkpoint.place.folder
    problems = signature_problems(folder, checkpoint.store, checkpoint.manifest, required)
    if problems:
        raise CorruptError(f"{folder.url}: {listing(problems)}; not loaded")


def refuse_damaged(checkpoint: OpenCheckpoint, options: LoadOptions) -> None:
    """Raise CorruptError if files differ from the manifest.

    If the only problems are files that cannot be read now, raises UnreadableError instead.
    """
    problems = checkpoint.find_problems(deep=options.verify)
    if not problems:
        return
    text = f"{checkpoint.store.url}: {listing(problems)}"
    if are_transient(problems):
        raise UnreadableError(f"{text}; try again")
    raise CorruptError(f"{text}; use an older checkpoint")


def show_progress(
    checkpoint: OpenCheckpoint, requests: Mapping[str, ModelRequest], options: LoadOptions
) -> AbstractContextManager[None]:
    """Show a bar on rank 0's terminal of the bytes that the load reads.

    Mapped files are read later, when they are used.
    """
    names: set[str] = set()
    for request in requests.values():
        for record in request.parts:
            names.update(weight_names(record))
    total_bytes = 0
    for file in checkpoint.manifest.files:
        if options.verify or file.path in names:
            total_bytes += file.size_bytes
    label = f"loading {checkpoint.place.basename}"
    return track_reads(total_bytes if is_first_process() else 0, label)


def choose_models(
    checkpoint: OpenCheckpoint,
    part: str | None,
    into: nn.Module | Mapping[str, nn.Module] | None,
) -> dict[str, ModelRequest]:
    """Choose the models to load, by name. If `part` is given, only that model or part.

    The training state is not among them. Raises LoadError for a delta, for an unknown part, for a
    module in `into` that fits no part or several, and for a part without a module in `into` that no
    library can build.
    """
    refuse_delta(checkpoint.manifest, checkpoint.place)
    groups = _find_groups(checkpoint, part)
    targets = _find_targets(checkpoint, list(groups), into)
    requests = {}
    for name, records in groups.items():
        adapters = tuple(record for record in records if record.kind == "adapter")
        model = next((record for record in records if record.kind != "adapter"), None)
        requests[name] = ModelRequest(model, adapters, targets.get(name))
    _refuse_modules(checkpoint, requests)
    return requests


def _find_groups(checkpoint: OpenCheckpoint, part: str | None) -> dict[str, list[PartRecord]]:
    """Group the records of parts by the folder of their model.

    A model and its adapters are one group.
    """
    records = [record for record in checkpoint.manifest.parts if record.kind != "state"]
    groups: dict[str, list[PartRecord]] = {}
    for record in records:
        groups.setdefault(_owner_folder(record), []).append(record)
    if not groups:
        raise LoadError(f"{checkpoint.store.url}: no part to load")
    if part is None:
        return groups
    if part in groups:
        return {part: groups[part]}
    matching = [record for record in records if part in (record.name, record.path)]
    if not matching:
        names = sorted({*groups, *(record.name for record in records)} - {""})
        question = did_you_mean([str(part)], names)
        advice = question or f"it has {', '.join(names) or 'one part only, leave part= out'}"
        raise LoadError(f"part {part!r}: not in {checkpoint.store.url}; {advice}")

    return {part: matching}


def _owner_folder(record: PartRecord) -> str:
    """Return the folder of the model that the record belongs to."""
    if record.kind != "adapter":
        return record.path
    tail = str(record.adapter)
    if record.path.endswith(f"adapters/{record.adapter}"):
        tail = f"adapters/{record.adapter}"
    if record.adapter == "default" and tail == "default":
        return record.path
    return record.path.removesuffix(tail).rstrip("/")


def _find_targets(
    checkpoint: OpenCheckpoint,
    names: list[str],
    into: nn.Module | Mapping[str, nn.Module] | None,
) -> dict[str, nn.Module]:
    """Return the caller's modules, by name of the model that each fills."""
    if into is None:
        return {}
    url, known_names = checkpoint.store.url, ", ".join(names)
    if isinstance(into, nn.Module):
        if len(names) > 1:
            raise LoadError(
                f"into=: {url} has the parts {known_names}, expected one; give a module by "
                f"part, into={{{names[0]!r}: module}}, or name one part with part="
            )
        return dict.fromkeys(names, into)

    is_mapping = isinstance(into, Mapping)
    if not is_mapping or not all(isinstance(module, nn.Module) for module in into.values()):
        raise LoadError(
            f"into={short_repr(into)}: expected a torch.nn.Module, or a mapping of them by part"
        )

    unknown = [name for name in into if name not in names]
    if unknown:
        expected = known_names or "one part: pass the module itself"
        raise LoadError(f"into=: {listing(unknown, ', ')}: not in {url}, which has {expected}")

    return dict(into)


def _refuse_modules(checkpoint: OpenCheckpoint, requests: Mapping[str, ModelRequest]) -> None:
    """Raise LoadError naming the plain modules for which `into` has no module to fill."""
    without_target = []
    for name, request in requests.items():
        for record in request.parts:
            if record.kind == "module" and request.target is None:
                without_target.append((name, record.class_name))

    if not without_target:
        return
    problems = []
    for name, class_name in without_target:
        part = f"part {name!r}: " if name else ""
        problems.append(f"{part}a module of the class {class_name}")

    name, class_name = without_target[0]
    example = f"into={class_name}(...)"
    if len(requests) > 1:
        example = f"into={{{name!r}: {class_name}(...)}}"
    alternative = ""
    if len(requests) > len(without_target):
        alternative = ", or name another part with part="
    raise LoadError(
        f"{checkpoint.store.url}: {listing(problems)}; a checkpoint has tensors and no code to "
        f"build it: pass a module of yours, {example}{alternative}"
    )
