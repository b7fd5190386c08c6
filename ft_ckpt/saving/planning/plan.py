"""Plans a save: the tensors of the live model, their files, and the sidecar files.

A part is one saved model of a checkpoint, such as the policy, its value head or an adapter. The
state of a run is a part as well. Sidecar files are the files without weights: configs, tokenizer,
adapter settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import explained
from ft_ckpt.formats import format_named
from ft_ckpt.model.base import identifying_tensors
from ft_ckpt.model.parts import parts_of
from ft_ckpt.model.tensors import Part, refuse_merged, without_own_layouts
from ft_ckpt.ranks import Ranks
from ft_ckpt.ranks.moving import sample_elements
from ft_ckpt.ranks.sharding import Source, is_known_to_all
from ft_ckpt.ranks.wrappers import ModelTensors, engine_names, from_state_dict
from ft_ckpt.saving.planning import replicas
from ft_ckpt.saving.planning.files import PartPlan, frozen_names, plan_part
from ft_ckpt.saving.planning.request import SaveRequest
from ft_ckpt.saving.planning.sidecars import Sidecars, sidecars_of

# A few elements of the adapters' base models: part -> tensor -> flat index -> element.
BaseSamples = Mapping[str, Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True, eq=False)
class SavePlan:
    """The parts of a checkpoint with their weight files, and the sidecar files.

    Attributes:
        request: The request that this plan is for.
        plans: The parts with their files.
        engine: The engines that hold the tensors, for the manifest.
        ties_to_check: Pairs of tensors that the model's config ties, but that are two tensors in
            memory. Their values must be equal.
        can_spread: Whether every rank can gather the tensors of a file. Else only rank 0 can.
        samples: Sampled elements of the adapters' base models that this rank holds.
        sidecars: The sidecar files.
    """

    request: SaveRequest
    plans: tuple[PartPlan, ...]
    engine: str
    ties_to_check: tuple[tuple[Source, Source], ...]
    can_spread: bool = True
    samples: BaseSamples = field(default_factory=dict)
    sidecars: Sidecars = field(default_factory=Sidecars)


def plan_save(request: SaveRequest, ranks: Ranks, config: SaverConfig) -> SavePlan:
    """Plan the save of the live model as it is now, without moving or writing anything.

    Raises SelectionError or a subclass if the model does not have what was requested,
    IncompleteError for tensors that would be missing in the files, CompanionError if tokenizer,
    config and model do not fit, TargetError if sidecar files cannot be made.
    """
    with explained(request.target):
        return _plan(request, ranks, config)


def _plan(request: SaveRequest, ranks: Ranks, config: SaverConfig) -> SavePlan:
    state = request.run_state
    tensors = ModelTensors(request.model) if state is None else state.tensors
    sources = tensors.sources() if state is None else state.sources

    # A state dict has no requires_grad, and rank 0 alone has one. So frozen tensors are found
    # before it replaces the live tensors: then all ranks plan the same files.
    frozen_keys = set()
    for source in sources.values():
        if source.is_parameter and not source.trainable:
            frozen_keys.add(source.key)

    if request.state_dict is not None:
        sources = from_state_dict(request.state_dict, sources, ranks)
    parts = _parts_to_save(request, tensors, sources)

    # Checkpoints can share the files of plain formats. A merged model is an export, which shares
    # none.
    can_link = format_named(request.format).is_plain and request.merge is None
    reuse_frozen = config.reuse_frozen if can_link else "off"
    all_sources = [*sources.values()]
    if state is not None:
        all_sources += state.all_sources
    plans = []
    stored_sources: list[Source] = []
    ties_to_check: list[tuple[Source, Source]] = []
    samples = {}
    for part in parts:
        separate = frozen_names(part, frozenset(frozen_keys), reuse_frozen)
        plans.append(plan_part(part, request.max_shard_bytes, request.format, separate))
        ties_to_check += part.diverged_ties
        for entry in part.entries:
            stored_sources += entry.sources
        if part.base:
            samples[part.name] = sample_elements(identifying_tensors(part), ranks.rank)

    return SavePlan(
        request,
        tuple(plans),
        engine=engine_names(all_sources),
        ties_to_check=tuple(ties_to_check),
        can_spread=all(is_known_to_all(source.sharding, ranks.size) for source in stored_sources),
        samples=samples,
        sidecars=sidecars_of(request, plans, ranks),
    )


def _parts_to_save(
    request: SaveRequest, tensors: ModelTensors, sources: Mapping[str, Source]
) -> list[Part]:
    """Return the parts of the checkpoint, including the state of a run."""
    state = request.run_state

    # Entries of the model's state dict that are no tensors. In the checkpoint of an adapter's run,
    # the state of the run has them.
    not_tensors: dict[str, Any] = {}
    if not request.adapter_only or state is None:
        for name, added in tensors.added().items():
            if not isinstance(added.value, Tensor):
                not_tensors[name] = added.value

    parts = parts_of(
        request.model,
        sources,
        adapter_only=request.adapter_only,
        attribute=request.attribute,
        merge=request.merge,
        dtype=request.dtype,
        extra=not_tensors,
    )
    parts = without_own_layouts(parts, state is not None)
    if state is not None:
        parts.append(state.make_part(parts, sources))
    if request.differing:
        parts = replicas.take_first_values(parts, request.differing)
        if state is not None:
            state.document["differing"] = sorted(request.differing)

    adapted_modules = {id(part.module): part.module for part in parts if part.kind == "adapter"}
    for module in adapted_modules.values():
        refuse_merged(module)
    return parts
