"""The manifest of a save, from its plan and the records of its files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from typing import Any

from ft_ckpt._version import __version__
from ft_ckpt.checkpoint.manifest import BaseRecord, Manifest, PartRecord
from ft_ckpt.formats import TensorRecord
from ft_ckpt.model.tensors import Part
from ft_ckpt.saving.files import PartPlan
from ft_ckpt.saving.plan import BaseSamples
from ft_ckpt.storage.digests import FileRecord

_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "safetensors")


def manifest_of(
    plans: Sequence[PartPlan],
    files: Iterable[FileRecord],
    samples: Sequence[BaseSamples],
    *,
    compressed: bool,
    bases: Mapping[str, BaseRecord],
    classes: Mapping[str, str],
    notes: Sequence[str],
    **facts: Any,
) -> Manifest:
    """The manifest of these plans and `files`.

    `samples`: sampled elements of the adapters' bases, from each rank. `bases` and `classes`: base
    records and class names by the name of the part. `notes` are added to those of the parts;
    `facts` are further fields of the manifest.
    """
    parts = [plan.part for plan in plans]
    records = []
    all_notes: list[str] = []
    for plan in plans:
        base = _base_with_fingerprint(plan.part.name, bases, samples)
        records.append(_part_record(plan, base, classes[plan.part.name], compressed))
        all_notes += plan.part.notes
    all_notes += notes
    return Manifest(
        parts=tuple(records),
        files=tuple(files),
        created=datetime.now(timezone.utc).isoformat(),
        versions=library_versions(),
        shared=_shared_between(parts),
        notes=tuple(dict.fromkeys(all_notes)),
        **facts,
    )


def _part_record(
    plan: PartPlan, base: BaseRecord | None, class_name: str, compressed: bool
) -> PartRecord:
    part = plan.part
    tensors: list[TensorRecord] = []
    for file in plan.files:
        tensors += file.records()
    if compressed:  # they have no places known beforehand
        tensors = [replace(record, start=0, end=0) for record in tensors]
    trainable = []
    for entry in part.entries:
        if entry.source is not None and entry.source.trainable:
            trainable.append(entry.name)
    return PartRecord(
        name=part.name,
        path=part.path,
        kind=part.kind,
        format=plan.format,
        class_name=class_name,
        tensors=tuple(tensors),
        ties=part.ties,
        trainable=tuple(trainable),
        adapter=part.adapter,
        active=part.active,
        base=base,
        casts=part.casts,
    )


def _base_with_fingerprint(
    name: str, bases: Mapping[str, BaseRecord], samples: Sequence[BaseSamples]
) -> BaseRecord | None:
    """The base of an adapter with its fingerprint, merged from the samples of all ranks.

    None for other parts.
    """
    if name not in bases:
        return None
    merged: dict[str, dict[str, float]] = {}
    for of_rank in samples:
        for tensor, values in of_rank.get(name, {}).items():
            merged.setdefault(tensor, {}).update(values)
    return replace(bases[name], fingerprint=merged)


@cache  # reading a package's metadata takes milliseconds
def library_versions() -> dict[str, str]:
    """The versions of ft_ckpt and of the libraries that affect the saved files."""
    return {"ft_ckpt": __version__, **{name: metadata.version(name) for name in _LIBRARIES}}


def _shared_between(parts: Iterable[Part]) -> tuple[tuple[str, ...], ...]:
    """Groups of "part:name" that are one tensor in several parts.

    `name` is relative to the part's module. Adapters are left out, because PEFT stores other names.
    """
    members_by_key: dict[int, dict[str, None]] = {}
    for part in parts:
        if part.kind == "adapter":
            continue
        prefix = f"{part.name}." if part.name else ""
        for entry in part.entries:
            for source in entry.sources:
                member = f"{part.name}:{source.name.removeprefix(prefix)}"
                members_by_key.setdefault(source.key, {})[member] = None
    groups = []
    for members in members_by_key.values():
        part_names = {member.partition(":")[0] for member in members}
        if len(part_names) > 1:
            groups.append(tuple(members))
    return tuple(groups)
