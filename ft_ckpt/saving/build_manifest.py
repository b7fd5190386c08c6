"""What a checkpoint says of itself: its manifest, from the plans and what was written."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from typing import Any

from ft_ckpt._version import __version__
from ft_ckpt.checkpoint.manifest import BaseRecord, Manifest, PartRecord
from ft_ckpt.model.base_model import base_identity, common_dtype
from ft_ckpt.model.entries import Part, lossy_casts, shared_between
from ft_ckpt.saving.files import PartPlan
from ft_ckpt.storage.digests import FileRecord

BaseSamples = Mapping[str, Mapping[str, Mapping[str, float]]]  # part -> tensor -> flat index -> element
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

    `samples` are each rank's of the bases of adapters; `bases` their records, and `classes` the names of the classes
    that are saved, by the names of the parts; `notes` are beside those of the parts, `facts` further fields of the
    manifest.
    """
    parts = [one.part for one in plans]
    return Manifest(
        parts=tuple(
            _part_record(one, _base_with_fingerprint(name, bases, samples), classes[name], compressed)
            for one in plans
            for name in [one.part.name]
        ),
        files=tuple(files),
        created=datetime.now(timezone.utc).isoformat(),
        versions=library_versions(),
        shared=shared_between(parts),
        notes=tuple(dict.fromkeys([*(note for part in parts for note in part.notes), *notes])),
        **facts,
    )


def _part_record(one: PartPlan, base: BaseRecord | None, class_name: str, compressed: bool) -> PartRecord:
    part = one.part
    tensors = (record for file in one.files for record in file.records())
    trainable = tuple(e.name for e in part.entries if e.source is not None and e.source.trainable)
    return PartRecord(
        name=part.name,
        path=part.path,
        kind=part.kind,
        format=one.format,
        class_name=class_name,
        tensors=tuple(replace(record, start=0, end=0) if compressed else record for record in tensors),
        ties=part.ties,
        trainable=trainable,
        adapter=part.adapter,
        active=part.active,
        base=base,
        casts=lossy_casts(part),
    )


def base_record(part: Part, fingerprint: Mapping[str, Any]) -> BaseRecord:
    """What an adapter part was trained on."""
    identity, revision, digest = base_identity(part.module, str(part.adapter))
    return BaseRecord(identity, revision, common_dtype(part.base.values()), digest, fingerprint)


def _base_with_fingerprint(
    name: str, bases: Mapping[str, BaseRecord], samples: Sequence[BaseSamples]
) -> BaseRecord | None:
    """The base of an adapter with its fingerprint: each rank's samples put together; None for other parts."""
    if name not in bases:
        return None
    merged: dict[str, dict[str, float]] = {}
    for own in samples:
        for tensor, values in own.get(name, {}).items():
            merged.setdefault(tensor, {}).update(values)
    return replace(bases[name], fingerprint=merged)


@cache  # reading a package's metadata takes milliseconds
def library_versions() -> dict[str, str]:
    """The versions of ft_ckpt and of the libraries that decide what is saved."""
    return {"ft_ckpt": __version__, **{name: metadata.version(name) for name in _LIBRARIES}}
