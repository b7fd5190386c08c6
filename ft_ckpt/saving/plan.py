"""The plan of a save: which tensors of the live model are stored, in which files, with which
sidecar files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ft_ckpt.config import SaverConfig
from ft_ckpt.formats import format_named
from ft_ckpt.model import Part, identifying_tensors, parts_of, refuse_merged, without_own_layouts
from ft_ckpt.ranks import (
    ModelTensors,
    Ranks,
    Source,
    engine_names,
    from_state_dict,
    is_known_to_all,
    sample_elements,
)
from ft_ckpt.runs import Captured, model_sources, state_part
from ft_ckpt.saving import replicas
from ft_ckpt.saving.files import PartPlan, frozen_names, plan_part
from ft_ckpt.saving.request import SaveRequest
from ft_ckpt.saving.sidecars import Companions, companions_of

# part -> tensor -> flat index -> element
BaseSamples = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True, eq=False)
class SavePlan:
    """The parts of a checkpoint with their weight files, and the sidecar files."""

    plans: tuple[PartPlan, ...]
    engine: str
    ties_to_check: tuple[tuple[Source, Source], ...]
    is_spread: bool = True  # whether every rank can gather a file; else rank 0 alone can
    # part -> tensor -> element
    samples: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    companions: Companions = field(default_factory=Companions)


def plan_save(request: SaveRequest, ranks: Ranks, config: SaverConfig) -> SavePlan:
    """The plan for the live model as it is now. Nothing is moved or written.

    Raises SelectionError or a subclass when the model lacks what was requested, IncompleteError for
    tensors that the files would lack, CompanionError when tokenizer, config and model do not fit.
    """
    captured = request.captured or Captured(ModelTensors(request.model))
    if captured.error is not None:
        raise captured.error
    sources = model_sources(captured.found) or captured.tensors.sources()
    # Before a state dict replaces the tensors, so that all ranks plan the same files.
    frozen = frozenset(
        source.key for source in sources.values() if not source.trainable and source.is_parameter
    )
    if request.state_dict is not None:
        sources = from_state_dict(request.state_dict, sources, ranks)
    parts = _parts_to_save(request, captured, sources)
    # an export shares no files
    can_link = format_named(request.format).is_plain and request.merged is None
    reuse = config.reuse_frozen if can_link else "off"
    plans = []
    for part in parts:
        separate = frozen_names(part, frozen, reuse)
        plans.append(plan_part(part, request.max_shard_bytes, request.format, separate))
    stored = [source for part in parts for entry in part.entries for source in entry.sources]
    samples = {
        part.name: sample_elements(identifying_tensors(part), ranks.rank)
        for part in parts
        if part.base
    }
    return SavePlan(
        tuple(plans),
        engine=engine_names([*sources.values(), *captured.found.values()]),
        ties_to_check=tuple(pair for part in parts for pair in part.doubtful),
        is_spread=all(is_known_to_all(source.sharding, ranks.size) for source in stored),
        samples=samples,
        companions=companions_of(request, plans, captured.document, ranks),
    )


def _parts_to_save(
    request: SaveRequest, captured: Captured, sources: Mapping[str, Source]
) -> list[Part]:
    """The parts of the checkpoint, the state of a run among them."""
    not_tensors: dict[str, Any] = {}  # entries of the model's state dict
    # a run of an adapter has them in its state
    if not request.adapter_only or captured.state is None:
        for name, added in captured.tensors.added().items():
            if not isinstance(added.value, Tensor):
                not_tensors[name] = added.value
    parts = parts_of(
        request.model,
        sources,
        adapter_only=request.adapter_only,
        attribute=request.attribute,
        merged=request.merged,
        dtype=request.dtype,
        extra=not_tensors,
    )
    parts = without_own_layouts(parts, captured.state is not None)
    if captured.state is not None:
        parts.append(state_part(captured.state, parts, sources))
    if request.differing:
        parts = replicas.take_first_values(parts, request.differing)
        captured.document["differing"] = sorted(request.differing)
    adapted = {id(part.module): part.module for part in parts if part.kind == "adapter"}
    for module in adapted.values():
        refuse_merged(module)
    return parts
