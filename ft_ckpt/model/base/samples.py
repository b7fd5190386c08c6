"""The identity of the base of adapters: its record, and the sampled elements that recognise it.

Sampling detects another model, another precision, and changes of most of a layer, such as a merged
adapter; it misses changes of few elements, such as a row of an embedding.
"""

import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from torch import nn

from ft_ckpt.checkpoint.manifest import BaseRecord, PartRecord
from ft_ckpt.errors import listing
from ft_ckpt.formats import dtype_name
from ft_ckpt.formats.files import TensorFile
from ft_ckpt.model.base.config import changes_of_config, class_of_base
from ft_ckpt.model.tensors import (
    PREFIX,
    TO_BASE,
    Part,
    base_name,
    has_adapters,
    keeps_base,
    model_below,
    module_at,
    peft_name,
    stored_base_names,
    view_of,
)
from ft_ckpt.ranks.moving import elements_at, has_readable_elements, sample_elements
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.ranks.wrappers import ModelTensors

_PASSING_SETTINGS = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
    "use_cache",
    "vocab_size",
    # absent from the config in memory until diffusers writes it
    "_diffusers_version",
    "_class_name",
}
_SAMPLED_TENSORS, _SAMPLED_ELEMENTS = 128, 4
ULPS = 2  # tolerance in units of the coarser dtype, for a base loaded in another precision
# relative tolerance for decompositions and for adapters that were merged and unmerged
MERGED_TOLERANCE = 64 * torch.finfo(torch.float32).eps


def record_of_base(part: Part) -> BaseRecord:
    """Make the record of the base of an adapter's `part`, without its fingerprint.

    The id is None if the base was built in memory.
    """
    model = model_below(part.module)
    config = getattr(model, "config", None)
    settings = part.module.peft_config[str(part.adapter)]
    # the latter of diffusers, which keeps a Path as it is
    origin = getattr(model, "name_or_path", None) or getattr(config, "_name_or_path", None)
    identity = settings.base_model_name_or_path or (str(origin) if origin else None)
    revision = settings.revision or getattr(config, "_commit_hash", None)
    return BaseRecord(
        identity,
        revision,
        common_dtype(identifying_tensors(part).values()),
        _digest_of_config(config),
        {},
        class_of_base(model),
        changes_of_config(model, identity, revision),
    )


def _digest_of_config(config: Any) -> str:
    """Compute the digest of the settings that belong to the base, not to a load of it."""
    settings = dict(config) if isinstance(config, Mapping) else {}
    if config is not None and hasattr(config, "to_dict"):
        settings = config.to_dict()
    lasting = {key: value for key, value in settings.items() if key not in _PASSING_SETTINGS}
    text = json.dumps(lasting, sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())


def identifying_tensors(part: Part) -> dict[str, Source]:
    """Return the tensors of the base that identify it, which the adapter does not replace."""
    replaced = {base_name(entry.name) for entry in part.entries}
    return {name: source for name, source in part.base.items() if name not in replaced}


def identifying_samples(record: PartRecord) -> dict[str, Mapping[str, float]]:
    """Return the recorded samples of the base without tensors that the adapter replaces.

    Earlier versions sampled those as well.
    """
    if record.base is None:
        return {}
    replaced = stored_base_names(record)
    samples = record.base.fingerprint
    return {name: values for name, values in samples.items() if name not in replaced}


def base_samples(
    model: nn.Module, rank: int, attribute: str | None = None
) -> dict[str, dict[str, float]]:
    """Sample local elements of a few frozen base tensors: of adapted layers, else of all.

    Returns {} without adapters.
    """
    if not has_adapters(module_at(model, attribute or "")):
        return {}
    view = view_of(model, ModelTensors(model).sources(), attribute or "")
    frozen, adapted = {}, {}
    for _, source in view.base_sources():
        if source.trainable:
            continue
        frozen[source.name] = source
        if not set(TO_BASE).isdisjoint(source.name.split(".")):
            adapted[source.name] = source
    return sample_elements(
        adapted or frozen, rank, tensors=_SAMPLED_TENSORS, elements=_SAMPLED_ELEMENTS
    )


def common_dtype(tensors: Iterable[Source]) -> str:
    """Return the most common dtype of the floating-point tensors; "float32" if there are none."""
    dtypes = [source.dtype for source in tensors if source.dtype.is_floating_point]
    common = max(set(dtypes), key=dtypes.count, default=None)
    return dtype_name(common) if common else "float32"


def differences_of_base(
    model: nn.Module,
    parts: Iterable[PartRecord],
    stored: Container[str],
    rank: int,
    attribute: str | None = None,
) -> tuple[int, list[str]]:
    """Compare the base of the adapters of `model`, or of its `attribute`, with recorded samples.

    Tensors in `stored` are not compared. Returns the number of compared tensors and the
    differences.
    """
    module: Any = module_at(model, attribute or "")
    if not has_adapters(module):
        return 0, []
    base = dict(view_of(model, ModelTensors(model).sources(), attribute or "").base_sources())
    unstored = {name: source for name, source in base.items() if source.name not in stored}
    is_changed = not all(keeps_base(config) for config in module.peft_config.values())
    compared = 0
    problems: dict[str, None] = {}
    for record in parts:
        samples = {}
        for name, values in identifying_samples(record).items():
            if name in unstored or name not in base:
                samples[name] = values
        if record.base is None or not samples:
            continue
        compared += len(samples)
        dtype = common_dtype(unstored.values())
        if dtype != record.base.dtype:
            problems[f"{dtype}, it was {record.base.dtype}"] = None
        sampled = replace(record, base=replace(record.base, fingerprint=samples))
        names = differing_tensors(unstored, sampled, rank, is_changed=is_changed)
        if names:
            count = f"{len(names)} of {len(samples)}"
            problems[f"{listing(names, ', ')}: {count} sampled tensors differ"] = None
    return compared, list(problems)


def differing_tensors(
    sources: Mapping[str, Source], record: PartRecord, rank: int = 0, *, is_changed: bool = False
) -> list[str]:
    """Name the recorded base tensors that `sources` lack, or that differ in this rank's elements.

    `is_changed` means that the initialisation of the adapter has changed both bases, so the last
    digits may differ.
    """
    if record.base is None:
        return []
    comparison = _BaseComparison.with_base(record, is_changed)
    differing = []
    for name, values in identifying_samples(record).items():
        indices = [int(index) for index in values]
        source = sources.get(name)
        if source is None or not has_readable_elements(source) or not _fit(indices, source.numel):
            differing.append(name)
            continue
        elements = elements_at(source, rank, indices)
        if not comparison.agrees(name, elements, source.dtype, values):
            differing.append(name)
    return differing


def differing_elements(file: TensorFile, record: PartRecord) -> tuple[int, list[str]]:
    """Compare a few elements of an adapter's base with the tensors in `file`.

    Returns the number of compared tensors and the names of those that differ. Tensors that the file
    lacks, or has quantised, are left out.
    """
    if record.base is None:
        return 0, []
    comparison = _BaseComparison.with_base(record, is_changed=False)
    compared = 0
    differing = []
    for name, values in identifying_samples(record).items():
        stored_name = file.ties.get(name, name)
        spec = file.specs.get(stored_name)
        if spec is None:
            continue
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if not dtype.is_floating_point:
            continue
        compared += 1
        indices = [int(index) for index in values]
        if not _fit(indices, spec.numel):
            differing.append(name)
            continue
        elements = {}
        for index in indices:
            elements[str(index)] = float(file.read(stored_name, index, index + 1))
        if not comparison.agrees(name, elements, dtype, values):
            differing.append(name)
    return compared, differing


def _fit(indices: Iterable[int], numel: int) -> bool:
    return all(index < numel for index in indices)


@dataclass(frozen=True)
class _BaseComparison:
    """Compares elements of a base with those that an adapter's record has."""

    dtype: torch.dtype  # of the recorded base
    adapted_paths: frozenset[str]
    is_changed: bool  # by the initialisation of the adapter, so the last digits may differ

    @staticmethod
    def with_base(record: PartRecord, is_changed: bool) -> "_BaseComparison":
        name = "float32" if record.base is None else record.base.dtype
        dtype = getattr(torch, name, torch.float32)
        return _BaseComparison(dtype, _adapted_paths(record), is_changed)

    def agrees(
        self,
        name: str,
        elements: Mapping[str, float],
        dtype: torch.dtype,
        recorded: Mapping[str, float],
    ) -> bool:
        """Check whether elements of a tensor equal the recorded ones in the coarser of both dtypes.

        Equal dtypes are compared exactly, except in adapted layers: merging and unmerging changes
        the last digits.
        """
        is_adapted = name.rpartition(".")[0] in self.adapted_paths
        tolerance = 0.0
        if dtype != self.dtype or is_adapted:
            tolerance = ULPS * max(torch.finfo(dtype).eps, torch.finfo(self.dtype).eps)
        if is_adapted and self.is_changed:
            tolerance = max(tolerance, MERGED_TOLERANCE)
        return are_near(elements, recorded, tolerance, is_adapted)


def _adapted_paths(record: PartRecord) -> frozenset[str]:
    """Return all prefixes of the paths of the adapter's tensors in the base model.

    The adapted layers are among them.
    """
    paths = set()
    for tensor in record.tensors:
        name = peft_name(tensor.name, tensor.file).removeprefix(PREFIX)
        steps = name.split(".")
        for depth in range(1, len(steps)):
            paths.add(".".join(steps[:depth]))
    return frozenset(paths)


def are_near(
    elements: Mapping[str, float],
    recorded: Mapping[str, float],
    tolerance: float,
    is_adapted: bool,
) -> bool:
    """Check whether elements differ by at most `tolerance` times their size.

    In an adapted layer, each size counts as at least 1/4 of the largest.
    """
    min_size = 1e-6
    if is_adapted:
        min_size = max(map(abs, recorded.values()), default=0.0) / 4
    for index, value in elements.items():
        expected = recorded[index]
        limit = tolerance * max(abs(expected), min_size)
        # infinities are equal, though their difference is NaN
        if value != expected and not abs(value - expected) <= limit:
            return False
    return True
