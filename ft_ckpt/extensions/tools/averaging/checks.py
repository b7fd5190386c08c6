"""What sources must have in common for their average to be a model: settings, shares, bases."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ft_ckpt.checkpoint.manifest import BaseRecord
from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.model.files import (
    WeightsFolder,
    adapter_settings,
    differing_parts,
    is_irreproducible,
    quantisation_of,
)

_UNNAMED = "not named"


def refuse_quantised_sources(files: Sequence[TensorFile], names: Sequence[str]) -> None:
    """Raise SelectionError naming the sources with quantised weights."""
    quantised = []
    for name, file in zip(names, files, strict=True):
        if not isinstance(file, WeightsFolder):
            continue
        for part in file.parts:
            settings_field = quantisation_of(file.store_of(part))
            if settings_field:
                quantised.append(f"{Path(name, part.path)}: {settings_field}")
    if quantised:
        raise SelectionError(
            f"{listing(quantised)}: quantised weights have no average; dequantise the models first"
        )


def refuse_other_parts(folders: Sequence[WeightsFolder], names: Sequence[str]) -> None:
    """Raise SelectionError naming the sources with other parts than the first."""
    expected = _kinds_of_parts(folders[0])
    differing = []
    for name, folder in zip(names, folders, strict=True):
        if _kinds_of_parts(folder) != expected:
            differing.append(name)
    if differing:
        raise SelectionError(
            f"{listing(differing)}: other parts than {names[0]}; average checkpoints of one model"
        )


def _kinds_of_parts(folder: WeightsFolder) -> list[tuple[str, str]]:
    return [(part.path, part.kind) for part in folder.parts]


def differing_shares(folders: Sequence[WeightsFolder], names: Sequence[str]) -> list[str]:
    """Return sources in which parts share other tensors than in the first source."""
    expected = _shared_tensors(folders[0])
    problems = []
    for name, folder in zip(names, folders, strict=True):
        if _shared_tensors(folder) != expected:
            problems.append(f"{name}: its parts share other tensors")
    return problems


def _shared_tensors(folder: WeightsFolder) -> set[frozenset[str]]:
    if folder.manifest is None:
        return set()
    return {frozenset(group) for group in folder.manifest.shared}


def differing_part_settings(
    folders: Sequence[WeightsFolder], index: int, names: Sequence[str]
) -> list[str]:
    """Return settings of the part `index` that differ from the first source's and matter.

    A setting matters if it changes the output.
    """
    first = folders[0].parts[index]
    problems = []
    for name, folder in zip(names[1:], folders[1:], strict=True):
        differences = differing_parts(folders[0], first, folder, folder.parts[index])
        for settings_field, expected, value in differences:
            problems.append(
                f"{Path(name, first.path)}: {settings_field} is {value}, {expected} in {names[0]}"
            )
    return problems


@dataclass(frozen=True)
class _AdapterOf:
    """The adapter in a part of one source: its settings and recorded base."""

    source: str
    settings: Any
    base: BaseRecord | None
    is_alone: bool  # the source has no other part than adapters


def differing_bases(
    folders: Sequence[WeightsFolder], index: int, names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return sources whose adapter in the part `index` has another base, and notes.

    The base is compared with that of the first source. A base that is lost counts as another. Bases
    are compared by their sampled elements if all sources have them, else by name and revision.
    """
    adapters = []
    for name, folder in zip(names, folders, strict=True):
        part = folder.parts[index]
        settings = adapter_settings(folder.store_of(part))
        base = part.record.base if part.record is not None else None
        is_alone = all(part.kind == "adapter" for part in folder.parts)
        adapters.append(_AdapterOf(name, settings, base, is_alone))
    problems = []
    for adapter in adapters:
        if adapter.is_alone and is_irreproducible(adapter.settings):
            problems.append(
                f"{adapter.source}: its initialisation changed the base, which cannot be "
                "repeated and is not stored"
            )
    are_sampled = all(adapter.base and adapter.base.fingerprint for adapter in adapters)
    described = [_describe_base(adapter, are_sampled) for adapter in adapters]
    for name, base_text in zip(names, described, strict=True):
        if base_text != described[0]:
            problems.append(f"{name}: base is {base_text}, {described[0]} in {names[0]}")
    notes = []
    if described[0].startswith(_UNNAMED):
        notes.append("the adapters do not name their base; it was not compared")
    return problems, notes


def _describe_base(adapter: _AdapterOf, are_sampled: bool) -> str:
    base, settings = adapter.base, adapter.settings
    if are_sampled and base is not None:
        samples = json.dumps(base.fingerprint, sort_keys=True).encode()
        return f"one with samples {xxhash.xxh3_64_hexdigest(samples)}"
    identity = settings.get("base_model_name_or_path") or _UNNAMED
    revision = settings.get("revision") or "main"
    if base is not None:
        identity = base.id or identity
        revision = base.revision or revision
    return f"{identity} (revision {revision})"
