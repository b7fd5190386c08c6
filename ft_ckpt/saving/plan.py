"""The plan of a save: which tensors go into which files, and the files beside them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ft_ckpt.config import SaverConfig
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.samples import sample_elements
from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.tensors import ModelTensors, engine_names, from_state_dict
from ft_ckpt.formats.registry import format_named
from ft_ckpt.model.base_model import refuse_merged
from ft_ckpt.model.parts import parts_of
from ft_ckpt.model.selection import without_own_layouts
from ft_ckpt.saving import replicas, reuse_frozen
from ft_ckpt.saving.companions import Companions, companions_of
from ft_ckpt.saving.files import PartPlan, plan_part
from ft_ckpt.saving.request import SaveRequest
from ft_ckpt.training.capture import Captured
from ft_ckpt.training.items import model_sources
from ft_ckpt.training.state import state_part


@dataclass(frozen=True, eq=False)
class SavePlan:
    """The parts of a checkpoint with their files and tensors, and all files that hold no tensors."""

    plans: tuple[PartPlan, ...]
    engine: str
    ties_to_check: tuple[tuple[Source, Source], ...]
    samples: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)  # part -> tensor -> element
    companions: Companions = field(default_factory=Companions)


def plan_save(request: SaveRequest, ranks: Ranks, config: SaverConfig) -> SavePlan:
    """The plan for the live model as it is now. Nothing is moved or written.

    Raises SelectionError and its kin when the model does not have what was asked for, IncompleteError for tensors that
    the files would lack, CompanionError when tokenizer, config and model do not fit.
    """
    captured = request.captured or Captured(ModelTensors(request.model))
    if captured.error is not None:
        raise captured.error
    own = model_sources(captured.found) or captured.tensors.sources()
    links = format_named(request.format).is_plain and request.merged is None  # what is exported is a folder by itself
    mode = config.reuse_frozen if links else "off"
    frozen = reuse_frozen.frozen_identities(
        own
    )  # before others take their place, so that all ranks plan the same files
    if request.state_dict_given:
        own = from_state_dict(request.state_dict, own, ranks)
    parts = parts_of(
        request.model,
        own,
        adapter_only=request.adapter_only,
        attribute=request.attribute,
        merged=request.merged,
        dtype=request.dtype,
        extra=_non_tensor_state(request, captured),
    )
    parts = without_own_layouts(parts, captured.state is not None)
    if captured.state is not None:
        parts.append(state_part(captured.state, parts, own))
    if request.apart:
        parts = replicas.store_differences(parts, request.apart)
        captured.document["apart"] = {name: dict(odd) for name, odd in request.apart.items()}
    for module in {id(part.module): part.module for part in parts if part.kind == "adapter"}.values():
        refuse_merged(module)
    plans = tuple(
        plan_part(part, request.max_shard_bytes, request.format, reuse_frozen.frozen_names(part, frozen, mode))
        for part in parts
    )
    return SavePlan(
        plans,
        engine=engine_names([*own.values(), *captured.found.values()]),
        ties_to_check=tuple(pair for part in parts for pair in part.doubtful),
        samples={part.name: sample_elements(part.base, ranks.rank) for part in parts if part.base},
        companions=companions_of(request, plans, captured.document, ranks),
    )


def _non_tensor_state(request: SaveRequest, captured: Captured) -> dict[str, Any]:
    """The entries of the model's state dict that are no tensors. An adapter's run has them with its state."""
    if request.adapter_only and captured.state is not None:
        return {}
    return {name: one.value for name, one in captured.tensors.added().items() if not isinstance(one.value, Tensor)}
