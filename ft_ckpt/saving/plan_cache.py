"""What a save has to copy so that it can be finished beside training; kept, with its plan, for the saves after it.

A plan is kept without tensors, for as long as the structure it was made of is there. Each save lends it the tensors of
its own moment: those that are in the same places of the look at the run.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ft_ckpt.config import SaverConfig, parse_size
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.samples import elements_at, picked_indices
from ft_ckpt.distributed.tensor_info import Source
from ft_ckpt.formats.registry import format_named
from ft_ckpt.model.base_model import refuse_merged
from ft_ckpt.model.entries import Entry, Part
from ft_ckpt.saving import write_shards
from ft_ckpt.saving.files import PartPlan
from ft_ckpt.saving.plan import Companions, SavePlan, SaveRequest, companions_of, make_plan
from ft_ckpt.saving.replicas import replicated_tensors
from ft_ckpt.saving.snapshot import Copies, copies_size, memory_key
from ft_ckpt.storage.digests import cut_chunks
from ft_ckpt.training.optimizers import parameter_of
from ft_ckpt.training.structure import Look, emptied, filled, is_placed, local_of


@dataclass(frozen=True, eq=False)
class Weighed:
    """A save, and what of it must be copied: `now`, or `late`, which nothing but the next optimizer step changes."""

    chosen: SavePlan
    can_wait: bool  # for a thread
    now: Mapping[Hashable, Tensor]
    late: Mapping[Hashable, Tensor]
    look: Look | None = None  # that has the tensors of the plan, which is without

    def with_copies(self, copies: Copies) -> SavePlan:
        """The plan with the copies for the live tensors; of what this rank does not write there are none."""
        look = self.look
        if look is not None:
            return _with_sources(self.chosen, look, lambda one: filled(one, look, copies.get))
        return _with_sources(self.chosen, None, lambda one: _copied(one, copies))

    def replicas(self) -> dict[str, Source]:
        """What is written and should be the same on every rank."""
        return replicated_tensors(self.as_it_is().plans)

    def as_it_is(self) -> SavePlan:
        """The plan with the live tensors, for a save that is finished before training goes on."""
        look = self.look
        return self.chosen if look is None else _with_sources(self.chosen, look, lambda one: filled(one, look))


@dataclass(frozen=True, eq=False)
class _Task:
    """What of a plan is copied when, by places in a look."""

    now: tuple[int, ...]
    late: tuple[int, ...]
    size_bytes: int  # of host memory
    is_free: bool


@dataclass(eq=False)
class _Outline:
    """A plan without tensors."""

    chosen: SavePlan
    weights: Any  # what the document of the state says of them
    samples: Mapping[
        str, Mapping[str, tuple[Source, list[int]]]
    ]  # elements looked at of an adapter's base, by its name
    task: _Task | None = None  # once it was asked for


def planned(request: SaveRequest, ranks: Ranks, config: SaverConfig) -> SavePlan:
    """What is saved, from the live tensors: chosen now, or before for the same structure. Raises what `choose` does."""
    chosen, outline = _planned(request, ranks, config)
    look = request.captured.look
    if outline is None or look is None:
        return chosen
    return _with_sources(chosen, look, lambda one: filled(one, look))


def weigh(request: SaveRequest, ranks: Ranks, config: SaverConfig, owned: Callable[[], frozenset[int]]) -> Weighed:
    """What is saved, as `planned` says, and what of it has to be copied when.

    `owned` gives the ids of the tensors that nothing but the steps of watched optimizers changes.
    """
    chosen, outline = _planned(request, ranks, config)
    look = request.captured.look
    if outline is None or look is None:
        return _weighed(chosen, request, ranks, config, owned())
    task = outline.task = outline.task or _task(chosen, request, ranks, config, look, owned())
    can_wait = task.is_free and _fits_memory(task.size_bytes, config)
    return Weighed(chosen, can_wait, _locals_at(task.now, look), _locals_at(task.late, look), look)


def _planned(request: SaveRequest, ranks: Ranks, config: SaverConfig) -> tuple[SavePlan, _Outline | None]:
    """The plan, without tensors if there is an outline of it."""
    structure, look = request.captured.structure, request.captured.look
    if structure is None or look is None or request.apart:
        return make_plan(request, ranks, config), None
    asked = _request_key(request, ranks, config)
    outline: _Outline | None = structure.made.get(asked)
    if outline is not None:
        return _again(outline, request, look, ranks), outline
    chosen = make_plan(request, ranks, config)
    outline = structure.made[asked] = _outline(chosen, request, look)
    if outline is None:
        return chosen, None
    return replace(outline.chosen, samples=chosen.samples, companions=chosen.companions), outline


def _request_key(request: SaveRequest, ranks: Ranks, config: SaverConfig) -> Hashable:
    """All that a plan depends on beside the structure."""
    attribute = request.attribute if isinstance(request.attribute, str) else tuple(request.attribute or ())
    own = (request.adapter_only, attribute, request.dtype, request.format, request.max_shard_bytes)
    how = (config.reuse_frozen, config.compression, config.each_rank_writes, config.nonfinite)
    return ("plan", ranks.rank, ranks.size, *own, *how)


def _outline(chosen: SavePlan, request: SaveRequest, look: Look) -> _Outline | None:
    """The plan without its tensors; None when they are not all in the look."""
    entries = [entry for plan in chosen.plans for entry in plan.part.entries]
    base = [source for plan in chosen.plans for source in plan.part.base.values()]
    ties = [source for pair in chosen.ties_to_check for source in pair]
    found = [*(entry.source for entry in entries if entry.source is not None), *base, *ties]
    modules = {id(module): place for place, module in enumerate(look.modules)}
    held = [plan.part.module for plan in chosen.plans if plan.part.module is not None]
    if any(entry.group is not None for entry in entries) or not all(is_placed(source, look) for source in found):
        return None
    if request.state_dict_given or not all(id(module) in modules for module in held):
        return None
    samples = {}
    for plan in chosen.plans:
        if plan.part.base:
            picked, base_of = picked_indices(plan.part.base), plan.part.base
            samples[plan.part.name] = {name: (emptied(base_of[name], look), picked[name]) for name in picked}
    bare = _with_sources(chosen, None, lambda one: emptied(one, look))
    plans = tuple(
        replace(
            plan,
            part=replace(
                plan.part,
                module=modules.get(id(plan.part.module)),
                base={name: emptied(one, look) for name, one in plan.part.base.items()},
                doubtful=(),
            ),
        )
        for plan in bare.plans
    )
    weights = request.captured.document.get("weights")
    return _Outline(replace(bare, plans=plans, samples={}, companions=Companions()), weights, samples)


def _again(outline: _Outline, request: SaveRequest, look: Look, ranks: Ranks) -> SavePlan:
    """A plan with what is of the moment: elements of an adapter's base, and all that is no tensor."""
    request.captured.document["weights"] = outline.weights
    samples = {}
    for name, picked in outline.samples.items():
        values = {
            tensor: elements_at(filled(one, look), ranks.rank, indices) for tensor, (one, indices) in picked.items()
        }
        samples[name] = {tensor: some for tensor, some in values.items() if some}
    plans = [replace(one, part=_with_module(one.part, look)) for one in outline.chosen.plans]
    for module in {id(one.part.module): one.part.module for one in plans if one.part.kind == "adapter"}.values():
        refuse_merged(module)
    return replace(outline.chosen, samples=samples, companions=companions_of(request, plans, ranks))


def _task(
    chosen: SavePlan, request: SaveRequest, ranks: Ranks, config: SaverConfig, look: Look, owned: frozenset[int]
) -> _Task:
    live = _with_sources(chosen, look, lambda one: filled(one, look))
    places: dict[int, bool] = {}
    for source in _sources(live, request, ranks):
        if source.local is not None:
            places[look.places[source.key]] = _is_late(source, owned)
    size = copies_size(local_of(look.tensors[place]) for place in places)
    now = tuple(place for place, is_late in places.items() if not is_late)
    late = tuple(place for place, is_late in places.items() if is_late)
    return _Task(now, late, size, _is_free(live, request, ranks, config))


def _weighed(
    chosen: SavePlan, request: SaveRequest, ranks: Ranks, config: SaverConfig, owned: frozenset[int]
) -> Weighed:
    sources = list(_sources(chosen, request, ranks))
    tensors = _locals(sources)
    now = _locals(source for source in sources if not _is_late(source, owned))
    fits = _fits_memory(copies_size(tensors.values()), config)
    late = {name: tensor for name, tensor in tensors.items() if name not in now}
    return Weighed(chosen, fits and _is_free(chosen, request, ranks, config), now, late)


def _fits_memory(size_bytes: int, config: SaverConfig) -> bool:
    return config.snapshot_bytes is None or size_bytes <= parse_size(config.snapshot_bytes)


def _is_late(source: Source, owned: frozenset[int]) -> bool:
    """Whether nothing but the step of a watched optimizer changes the tensor."""
    return id(parameter_of(source)) in owned and source.engine in ("plain", "fsdp1", "fsdp2", "zero3", "zero")


def _is_free(chosen: SavePlan, request: SaveRequest, ranks: Ranks, config: SaverConfig) -> bool:
    """Whether no tensor has to move between ranks."""
    sources = [source for entry in _planned_entries(chosen) for source in entry.sources]
    if any(source.sharding.is_opaque for source in sources):
        return False
    if ranks.size == 1:
        return True
    plain = all(format_named(one.format).is_plain for one in chosen.plans) and config.compression is None
    if not plain or config.each_rank_writes == "off" or config.nonfinite == "raise" or request.state_dict_given:
        return False
    if any(source.sharding.is_sharded for pair in chosen.ties_to_check for source in pair):
        return False
    return not any(
        entry.group is not None or (entry.source is not None and entry.source.sharding.is_sharded and cut is None)
        for share in _shares(chosen, ranks)
        for entry, cut, spec in zip(share.entries, share.cuts, share.file.layout.specs, strict=True)
        if spec.size_bytes
    )


def _shares(chosen: SavePlan, ranks: Ranks) -> list[write_shards.Share]:
    return write_shards.divide_files(chosen.plans, ranks.size)


def _sources(chosen: SavePlan, request: SaveRequest, ranks: Ranks) -> Iterator[Source]:
    """The sources of which this rank writes something."""
    yield from (source for pair in chosen.ties_to_check for source in pair)
    if ranks.size == 1:
        yield from (source for entry in _planned_entries(chosen) for source in entry.sources)
        return
    for share in _shares(chosen, ranks):
        for entry, cut in zip(share.entries, share.cuts, strict=True):
            mine = ranks.leads if cut is None else any(owner == ranks.rank for _, _, owner in cut_chunks(cut))
            yield from entry.sources if mine else ()


def _locals(sources: Iterable[Source]) -> dict[Hashable, Tensor]:
    """What this rank has of them, each once."""
    found = (source.local for source in sources)
    return {memory_key(tensor): tensor for tensor in found if tensor is not None}


def _locals_at(places: Iterable[int], look: Look) -> dict[Hashable, Tensor]:
    return {place: local_of(look.tensors[place]) for place in places}


def _planned_entries(chosen: SavePlan) -> Iterator[Entry]:
    return (entry for plan in chosen.plans for entry in plan.part.entries)


def _copied(source: Source, copies: Copies) -> Source:
    local = source.local
    mine = None if local is None else copies.get(memory_key(local), local)
    return replace(source, local=mine)


def _with_module(part: Part, look: Look) -> Part:
    """The part with the module of `look` for its place."""
    return part if part.module is None else replace(part, module=look.modules[part.module])


def _with_sources(chosen: SavePlan, look: Look | None, change: Callable[[Source], Source]) -> SavePlan:
    """The same plans with other sources, and the modules of `look` for their places."""
    groups: dict[int, Any] = {}

    def entry(one: Entry) -> Entry:
        if one.group is not None:  # shared between entries: computed once
            groups.setdefault(id(one.group), replace(one.group, sources=tuple(map(change, one.group.sources))))
            return replace(one, group=groups[id(one.group)])
        if one.source is None:
            return one
        return Entry(one.name, one.shape, one.dtype, one.memory_dtype, change(one.source))

    def plan(one: PartPlan) -> PartPlan:
        part = replace(one.part, entries=tuple(map(entry, one.part.entries)))
        return replace(one, part=part if look is None else _with_module(part, look))

    ties = tuple((change(one), change(other)) for one, other in chosen.ties_to_check)
    return replace(chosen, plans=tuple(map(plan, chosen.plans)), ties_to_check=ties)
