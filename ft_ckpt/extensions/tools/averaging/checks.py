"""Finds differences between sources because of which their average would not be a model.

A part of a folder is one saved model or one adapter. Parts may share tensors, such as a policy and
a value head that have one encoder.
"""

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


def differing_shared_tensors(folders: Sequence[WeightsFolder], names: Sequence[str]) -> list[str]:
    """Return a problem for each source whose parts share other tensors than the first source's."""
    expected = _shared_tensors(folders[0])
    problems = []
    for name, folder in zip(names, folders, strict=True):
        if _shared_tensors(folder) != expected:
            problems.append(f"{name}: its parts share other tensors")
    return problems


def _shared_tensors(folder: WeightsFolder) -> set[frozenset[str]]:
    """Return the groups of names, such as "policy:embed.weight", that are one tensor."""
    if folder.manifest is None:
        return set()
    return {frozenset(group) for group in folder.manifest.shared}


def differing_part_settings(
    folders: Sequence[WeightsFolder], index: int, names: Sequence[str]
) -> list[str]:
    """Return a problem for each setting of the part `index` that differs from the first source.

    Only settings that change the output of the model are compared.
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
class _SourceAdapter:
    """The adapter in a part of one source: its config and recorded base."""

    source: str
    settings: Any
    base: BaseRecord | None
    has_only_adapters: bool  # the source has adapters, and no base


def differing_bases(
    folders: Sequence[WeightsFolder], index: int, names: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Compare the bases of the adapters in the part `index` with that of the first source.

    Returns problems, and notes for the report. Bases are compared by their sampled elements if all
    sources have them, and by name and revision otherwise. It is a problem, too, if the
    initialisation of an adapter changed the base and the changed base is not stored.
    """
    adapters = []
    for name, folder in zip(names, folders, strict=True):
        part = folder.parts[index]
        settings = adapter_settings(folder.store_of(part))
        base = None if part.record is None else part.record.base
        has_only_adapters = all(part.kind == "adapter" for part in folder.parts)
        adapters.append(_SourceAdapter(name, settings, base, has_only_adapters))

    problems = []
    for adapter in adapters:
        if adapter.has_only_adapters and is_irreproducible(adapter.settings):
            problems.append(
                f"{adapter.source}: its initialisation changed the base, which cannot be "
                "repeated and is not stored"
            )

    are_sampled = all(adapter.base and adapter.base.fingerprint for adapter in adapters)
    base_texts = [_describe_base(adapter, are_sampled) for adapter in adapters]
    for name, base_text in zip(names, base_texts, strict=True):
        if base_text != base_texts[0]:
            problems.append(f"{name}: base is {base_text}, {base_texts[0]} in {names[0]}")

    notes = []
    if base_texts[0].startswith(_UNNAMED):
        notes.append("the adapters do not name their base; it was not compared")
    return problems, notes


def _describe_base(adapter: _SourceAdapter, are_sampled: bool) -> str:
    """Return a text that is equal for equal bases."""
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
