"""A plan together with what only its moment has; and what must be copied so that it can be carried out beside training.

A plan is kept for as long as the facts it was made of are the same. It names tensors by key: each save finds them in
the inventory of its own moment, or in a snapshot of it.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ft_ckpt.config import SaverConfig, parse_size
from ft_ckpt.distributed.gather import moves_to
from ft_ckpt.distributed.inventory import Inventory
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.samples import elements_at
from ft_ckpt.distributed.sharding import ReplicatedSharding
from ft_ckpt.distributed.tensor_info import TensorInfo, Tensors
from ft_ckpt.distributed.wrappers import optimizer_parameter
from ft_ckpt.formats.registry import format_named
from ft_ckpt.model.base_model import refuse_merged
from ft_ckpt.model.entries import Entry, Group
from ft_ckpt.saving import write_shards
from ft_ckpt.saving.companions import Companions, companions_of
from ft_ckpt.saving.plan import SavePlan, SaveRequest, make_plan
from ft_ckpt.saving.snapshot import copies_size
from ft_ckpt.storage.digests import chunk_of_rank
from ft_ckpt.storage.store import SharedStore
from ft_ckpt.training.capture import Captured


@dataclass(frozen=True, eq=False)
class PlannedSave:
    """A plan, and what is of the moment: those who have the tensors, elements of them, and all that is no tensor."""

    plan: SavePlan
    tensors: Tensors
    samples: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)  # part -> tensor -> element
    companions: Companions = field(default_factory=Companions)


@dataclass(frozen=True)
class CopyPlan:
    """Which tensors a save in the background copies when, by key."""

    now: tuple[int, ...]
    late: tuple[int, ...]  # those that nothing but the next optimizer step changes
    size_bytes: int  # of host memory
    needs_gather: bool  # whether tensors have to move between ranks while files are written, which a thread cannot do
    gathers: tuple[tuple[int, tuple[TensorInfo, ...]], ...] = ()  # what moves ahead of that, to the rank that writes it

    def can_wait(self, config: SaverConfig) -> bool:
        """Whether the save can be left to a thread."""
        fits = config.snapshot_bytes is None or self.size_bytes <= parse_size(config.snapshot_bytes)
        return fits and not self.needs_gather


def look_at_model(model: nn.Module) -> Captured:
    """The tensors of a model by key, for a save of its weights alone; nothing decides whether they change."""
    inventory = Inventory()
    inventory.note_model(model)
    return Captured(inventory)


def plan_save(request: SaveRequest, captured: Captured, ranks: Ranks, config: SaverConfig) -> PlannedSave:
    """What is saved, planned now, or before for the same facts. Raises what `make_plan` and `companions_of` raise."""
    question = None if request.apart or request.state_dict_given else _question(request, captured, ranks, config)
    plan: SavePlan | None = None if question is None else captured.cache.find(captured.signature, question)
    tensors: Tensors = captured.inventory
    if plan is None:
        plan, tensors = make_plan(request, captured, ranks, config)
        if question is not None and _is_pure(plan, captured):
            captured.cache.keep(captured.signature, question, plan)
    return _at_this_moment(plan, tensors, request, captured, question, ranks)


def plan_copies(
    planned: PlannedSave,
    request: SaveRequest,
    captured: Captured,
    ranks: Ranks,
    config: SaverConfig,
    owned: Callable[[], frozenset[int]],
) -> CopyPlan:
    """What of a planned save has to be copied when.

    `owned` gives the ids of the tensors that nothing but the steps of watched optimizers changes.
    """
    apart = ranks.size > 1 and not isinstance(request.target.folder, SharedStore)  # each file has one writer
    asked = None if request.apart or request.state_dict_given else _question(request, captured, ranks, config)
    question = None if asked is None else ("copies", apart, asked)
    known: CopyPlan | None = None if question is None else captured.cache.find(captured.signature, question)
    if known is not None:
        return known
    ids, is_live = owned(), planned.tensors is captured.inventory
    by_writer = _by_writer(planned.plan, ranks, config) if apart else {}
    gathers = {to: tuple(info for info in infos if _has_to_come(info, to)) for to, infos in by_writer.items()}
    own = [info for info in by_writer.get(ranks.rank, ()) if not _has_to_come(info, ranks.rank)]
    infos = {info.key: info for info in (own if apart else _written_here(planned.plan, ranks))}
    held = planned.tensors.memories(infos)
    late = {key: is_live and _is_late(infos[key], captured.inventory, ids) for key in held}
    size = copies_size(held.values())
    now = tuple(key for key, is_late in late.items() if not is_late)
    size += sum(info.size_bytes for info in gathers.get(ranks.rank, ()))
    blocks = request.state_dict_given if apart else _needs_gather(planned.plan, request, ranks, config)
    later = tuple(key for key, is_late in late.items() if is_late)
    made = CopyPlan(now, later, size, blocks, tuple((to, infos) for to, infos in gathers.items() if infos))
    if question is not None and _are_known(infos.values(), captured):
        captured.cache.keep(captured.signature, question, made)
    return made


def _question(request: SaveRequest, captured: Captured, ranks: Ranks, config: SaverConfig) -> Hashable:
    """All that a plan depends on beside the facts of models and optimizers."""
    attribute = request.attribute if isinstance(request.attribute, str) else tuple(request.attribute or ())
    own = (request.adapter_only, attribute, request.dtype, request.format, request.max_shard_bytes, request.merged)
    how = (config.reuse_frozen, config.compression, config.each_rank_writes, config.nonfinite)
    return ("plan", captured.exchange, ranks.rank, ranks.size, *own, *how)


def _is_pure(plan: SavePlan, captured: Captured) -> bool:
    """Whether the plan holds no module and no code that has one, and its keys are those of all equal facts."""
    parts = [one.part for one in plan.plans]
    entries = [entry for part in parts for entry in part.entries]
    if any(entry.group is not None for entry in entries):
        return False
    infos = [*_all_infos(plan), *(info for part in parts for info in part.base.values())]
    is_live = all(part.module is None or isinstance(part.module, int) for part in parts)
    return is_live and _are_known(infos, captured)


def _are_known(infos: Iterable[TensorInfo], captured: Captured) -> bool:
    """Whether these have the same keys wherever the facts are the same."""
    return captured.signature is not None and captured.signature.covers(captured.inventory, infos)


def _at_this_moment(
    plan: SavePlan, tensors: Tensors, request: SaveRequest, captured: Captured, question: Hashable, ranks: Ranks
) -> PlannedSave:
    """The plan with what only this moment has. Raises as `companions_of`."""
    if captured.state is not None:
        captured.document["weights"] = plan.weights
        if request.apart:
            captured.document["apart"] = {name: dict(odd) for name, odd in request.apart.items()}
    samples = {}
    for one in plan.plans:
        picked = plan.sampled.get(one.part.name, {})
        values = {name: elements_at(one.part.base[name], ranks.rank, at, tensors) for name, at in picked.items()}
        samples[one.part.name] = {name: some for name, some in values.items() if some}
    modules = captured.inventory.modules
    live = [replace(p, part=replace(p.part, module=_live_module(p.part.module, modules))) for p in plan.plans]
    for module in {id(one.part.module): one.part.module for one in live if one.part.kind == "adapter"}.values():
        refuse_merged(module)
    return PlannedSave(plan, tensors, samples, companions_of(request, live, captured, question, ranks))


def _live_module(place: Any, modules: Sequence[nn.Module]) -> Any:
    """The module of the inventory; one that is not in it, and so in no kept plan, is there itself."""
    return modules[place] if isinstance(place, int) else place


def _is_late(info: TensorInfo, inventory: Inventory, owned: frozenset[int]) -> bool:
    """Whether nothing but the step of a watched optimizer changes the tensor."""
    known = info.engine in ("plain", "fsdp1", "fsdp2", "zero3", "zero")
    return known and id(optimizer_parameter(inventory.live(info.key))) in owned


def _needs_gather(plan: SavePlan, request: SaveRequest, ranks: Ranks, config: SaverConfig) -> bool:
    """Whether some tensor has to move between ranks."""
    infos = [info for one in plan.plans for entry in one.part.entries for info in entry.sources]
    if any(info.sharding.is_opaque for info in infos):
        return True
    if ranks.size == 1:
        return False
    plain = all(format_named(one.format).is_plain for one in plan.plans) and config.compression is None
    if not plain or config.each_rank_writes == "off" or config.nonfinite == "raise" or request.state_dict_given:
        return True
    if any(info.sharding.is_sharded for pair in plan.ties_to_check for info in pair):
        return True
    return any(
        entry.group is not None or (entry.source is not None and entry.source.sharding.is_sharded and cuts is None)
        for share in write_shards.divide_files(plan.plans, ranks.size)
        for entry, cuts, spec in zip(share.entries, share.cuts, share.file.layout.specs, strict=True)
        if spec.size_bytes
    )


def with_gathered(planned: PlannedSave, gathers: Iterable[tuple[int, tuple[TensorInfo, ...]]]) -> SavePlan:
    """The plan once what has to move has come to its writers: each finds it whole."""
    came = {info.key for _, infos in gathers for info in infos}
    groups: dict[Group, Group] = {}

    def whole(info: TensorInfo) -> TensorInfo:
        return replace(info, sharding=ReplicatedSharding(info.shape)) if info.key in came else info

    def renewed(entry: Entry) -> Entry:
        group = entry.group
        if group is not None and group not in groups:
            groups[group] = replace(group, sources=tuple(map(whole, group.sources)))
        source = None if entry.source is None else whole(entry.source)
        return entry._replace(source=source, group=None if group is None else groups[group])

    parts = [replace(one.part, entries=tuple(map(renewed, one.part.entries))) for one in planned.plan.plans]
    plans = tuple(replace(one, part=part) for one, part in zip(planned.plan.plans, parts, strict=True))
    ties = tuple((whole(one), whole(other)) for one, other in planned.plan.ties_to_check)
    return replace(planned.plan, plans=plans, ties_to_check=ties)


def _by_writer(plan: SavePlan, ranks: Ranks, config: SaverConfig) -> dict[int, list[TensorInfo]]:
    """The tensors that come into the files of each rank, once each, where a file has one writer."""
    files = [file for one in plan.plans for file in one.files]
    size = 1 if config.each_rank_writes == "off" else ranks.size
    writers = dict(zip((file.path for file in files), write_shards.assign_writers(files, size), strict=True))
    found: dict[int, dict[int, TensorInfo]] = {0: {info.key: info for pair in plan.ties_to_check for info in pair}}
    for one in plan.plans:
        entries = {entry.name: entry for entry in one.part.entries}
        for file in one.files:
            infos = (info for spec in file.layout.specs for info in entries[spec.name].sources)
            found.setdefault(writers[file.path], {}).update({info.key: info for info in infos})
    return {to: list(infos.values()) for to, infos in found.items()}


def _has_to_come(info: TensorInfo, to: int) -> bool:
    """Whether the rank `to` has not all of the tensor."""
    return info.sharding.is_opaque or moves_to(info, to)


def _written_here(plan: SavePlan, ranks: Ranks) -> Iterator[TensorInfo]:
    """The tensors of which this rank writes something."""
    if ranks.size == 1:
        yield from _all_infos(plan)
        return
    yield from (info for pair in plan.ties_to_check for info in pair)
    for share in write_shards.divide_files(plan.plans, ranks.size):
        for entry, cuts in zip(share.entries, share.cuts, strict=True):
            mine = ranks.leads if cuts is None else any(chunk_of_rank(cut, ranks.rank) for cut in cuts)
            yield from entry.sources if mine else ()


def _all_infos(plan: SavePlan) -> Iterator[TensorInfo]:
    yield from (info for pair in plan.ties_to_check for info in pair)
    yield from (info for one in plan.plans for entry in one.part.entries for info in entry.sources)
