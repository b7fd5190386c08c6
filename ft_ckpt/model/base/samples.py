"""Records the base of adapters, and recognises it by sampled elements.

The record of an adapter has a few elements of each of some base tensors (its fingerprint). They
differ for another model, for another precision, and after changes of most of a layer, such as a
merged adapter. A change of few elements, such as a row of an embedding, is not detected.
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

# Settings that depend on how the base was loaded. They are not part of its digest.
_SETTINGS_OF_LOADS = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "architectures",
    "use_cache",
    "vocab_size",
    # diffusers adds these only when it writes the config.
    "_diffusers_version",
    "_class_name",
}
_SAMPLED_TENSORS = 128
_SAMPLED_ELEMENTS = 4
# Tolerance for a base that is loaded in another precision, in units of the last place of the
# coarser dtype.
ULPS = 2
# Relative tolerance for decompositions, and for adapters that were merged and unmerged.
MERGED_TOLERANCE = 64 * torch.finfo(torch.float32).eps


def record_of_base(part: Part) -> BaseRecord:
    """Make the record of the base of an adapter, without its fingerprint.

    `part` is the part of the adapter. The id in the record is None if the base was built in memory.
    """
    model = model_below(part.module)
    config = getattr(model, "config", None)
    settings = part.module.peft_config[str(part.adapter)]

    # diffusers has the origin in its config, possibly as a Path.
    origin = getattr(model, "name_or_path", None) or getattr(config, "_name_or_path", None)
    base_id = settings.base_model_name_or_path
    if not base_id:
        base_id = str(origin) if origin else None
    revision = settings.revision or getattr(config, "_commit_hash", None)
    return BaseRecord(
        base_id,
        revision,
        common_dtype(identifying_tensors(part).values()),
        _digest_of_config(config),
        {},
        class_of_base(model),
        changes_of_config(model, base_id, revision),
    )


def _digest_of_config(config: Any) -> str:
    """Compute the digest of the settings of the base that do not depend on how it was loaded."""
    settings = dict(config) if isinstance(config, Mapping) else {}
    if config is not None and hasattr(config, "to_dict"):
        settings = config.to_dict()
    lasting = {key: value for key, value in settings.items() if key not in _SETTINGS_OF_LOADS}
    text = json.dumps(lasting, sort_keys=True, default=str)
    return xxhash.xxh3_128_hexdigest(text.encode())


def identifying_tensors(part: Part) -> dict[str, Source]:
    """Return the tensors of the base that identify it. These are those that `part` lacks."""
    replaced = {base_name(entry.name) for entry in part.entries}
    return {name: source for name, source in part.base.items() if name not in replaced}


def identifying_samples(record: PartRecord) -> dict[str, Mapping[str, float]]:
    """Return the recorded samples of the base, by name of the tensor.

    Tensors that the adapter replaces are left out. Earlier versions sampled those as well.
    """
    if record.base is None:
        return {}
    replaced = stored_base_names(record)
    samples = record.base.fingerprint
    return {name: values for name, values in samples.items() if name not in replaced}


def base_samples(
    model: nn.Module, rank: int, attribute: str | None = None
) -> dict[str, dict[str, float]]:
    """Sample elements of some frozen base tensors that this rank has.

    The tensors are those of adapted layers, or any frozen ones if no adapted layer has one. Returns
    {} for a model without adapters.
    """
    if not has_adapters(module_at(model, attribute or "")):
        return {}
    view = view_of(model, ModelTensors(model).sources(), attribute or "")
    frozen_sources: dict[str, Source] = {}
    adapted_sources: dict[str, Source] = {}
    for _, source in view.base_sources():
        if source.trainable:
            continue
        frozen_sources[source.name] = source
        if not set(TO_BASE).isdisjoint(source.name.split(".")):
            adapted_sources[source.name] = source
    sampled = adapted_sources if adapted_sources else frozen_sources
    return sample_elements(sampled, rank, tensors=_SAMPLED_TENSORS, elements=_SAMPLED_ELEMENTS)


def common_dtype(tensors: Iterable[Source]) -> str:
    """Return the most common dtype of the floating-point tensors, "float32" if there are none."""
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
    """Compare the base of the adapters of `model` with the samples in the records of adapters.

    The adapters are those of the submodule `attribute`, if it is given. Tensors in `stored` are not
    compared. Returns the number of compared tensors and a text for each difference.
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
    """Return the names of the sampled base tensors that differ from `record`.

    Only elements of this rank are compared. A tensor that `sources` lacks counts as different.
    `is_changed` means that the initialisation of the adapter has changed both bases, so their last
    digits can differ.
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
        if not comparison.are_equal(name, elements, source.dtype, values):
            differing.append(name)

    return differing


def differing_elements(file: TensorFile, record: PartRecord) -> tuple[int, list[str]]:
    """Compare the samples in the record of an adapter with the tensors in `file`.

    Returns the number of compared tensors and the names of those that differ. Tensors that the file
    lacks, or has quantised, are not compared.
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
        if not comparison.are_equal(name, elements, dtype, values):
            differing.append(name)

    return compared, differing


def _fit(indices: Iterable[int], numel: int) -> bool:
    return all(index < numel for index in indices)


@dataclass(frozen=True)
class _BaseComparison:
    """Compares elements of a base with those in the record of an adapter.

    Attributes:
        dtype: the dtype of the recorded base.
        adapted_paths: paths of modules, with all layers that the adapter changes.
        is_changed: True if the initialisation of the adapter changes the base, so that its last
            digits can differ.
    """

    dtype: torch.dtype
    adapted_paths: frozenset[str]
    is_changed: bool

    @staticmethod
    def with_base(record: PartRecord, is_changed: bool) -> "_BaseComparison":
        name = "float32" if record.base is None else record.base.dtype
        dtype = getattr(torch, name, torch.float32)
        return _BaseComparison(dtype, _adapted_paths(record), is_changed)

    def are_equal(
        self,
        name: str,
        elements: Mapping[str, float],
        dtype: torch.dtype,
        recorded: Mapping[str, float],
    ) -> bool:
        """Check whether elements of the tensor `name` equal the recorded ones.

        If both dtypes are equal, elements are compared exactly. Otherwise they are compared in the
        precision of the coarser dtype. So are the elements of adapted layers, because merging and
        unmerging an adapter changes the last digits.
        """
        is_adapted = name.rpartition(".")[0] in self.adapted_paths
        tolerance = 0.0
        if dtype != self.dtype or is_adapted:
            tolerance = ULPS * max(torch.finfo(dtype).eps, torch.finfo(self.dtype).eps)
        if is_adapted and self.is_changed:
            tolerance = max(tolerance, MERGED_TOLERANCE)
        return are_near(elements, recorded, tolerance, is_adapted)


def _adapted_paths(record: PartRecord) -> frozenset[str]:
    """Return the paths in the base model of all modules around the adapter's tensors.

    The adapted layers are among them. For example, a tensor "layers.0.q_proj.lora_A.weight" gives
    "layers", "layers.0", "layers.0.q_proj" and "layers.0.q_proj.lora_A".
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
    """Check whether elements differ from the recorded ones by at most `tolerance` times their size.

    A size is an absolute value. In an adapted layer, it counts as at least 1/4 of the largest one.
    """
    min_size = 1e-6
    if is_adapted:
        min_size = max(map(abs, recorded.values()), default=0.0) / 4
    for index, value in elements.items():
        expected = recorded[index]
        limit = tolerance * max(abs(expected), min_size)
        # Equal infinities are equal, but their difference is NaN.
        if value != expected and not abs(value - expected) <= limit:
            return False
    return True
