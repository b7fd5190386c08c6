"""The tensors that a save in the background copies, when, and the plan that is carried out from the copies."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ft_ckpt.config import SaverConfig, parse_size
from ft_ckpt.distributed.gather import moves_to
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.sharding import ReplicatedSharding
from ft_ckpt.distributed.source import Source
from ft_ckpt.distributed.wrappers import optimizer_parameter
from ft_ckpt.formats.registry import format_named
from ft_ckpt.model.entries import Entry, Group
from ft_ckpt.saving import write_shards
from ft_ckpt.saving.plan import SavePlan
from ft_ckpt.saving.request import SaveRequest
from ft_ckpt.saving.snapshot import copies_size
from ft_ckpt.storage.digests import chunk_of_rank
from ft_ckpt.storage.store import SharedStore


@dataclass(frozen=True)
class CopyPlan:
    """The tensors that a save in the background copies, by key."""

    now: Mapping[int, Tensor]
    late: Mapping[int, Tensor]  # tensors that nothing but the next optimizer step changes
    size_bytes: int  # of host memory
    needs_gather: bool  # tensors have to move between ranks while files are written, which a thread cannot do
    gathers: tuple[tuple[int, tuple[Source, ...]], ...] = ()  # tensors that move before that, by the rank that writes

    def can_wait(self, config: SaverConfig) -> bool:
        """Whether the save can be left to a thread."""
        fits = config.snapshot_bytes is None or self.size_bytes <= parse_size(config.snapshot_bytes)
        return fits and not self.needs_gather


def plan_copies(
    plan: SavePlan, request: SaveRequest, ranks: Ranks, config: SaverConfig, owned: frozenset[int]
) -> CopyPlan:
    """The copies that `plan` needs on this rank.

    `owned` are the ids of the tensors that nothing but the steps of watched optimizers changes.
    """
    has_one_writer = ranks.size > 1 and not isinstance(request.target.folder, SharedStore)  # each file
    gathers: dict[int, tuple[Source, ...]] = {}
    if has_one_writer:
        by_writer = _by_writer(plan, ranks, config)
        gathers = {to: tuple(one for one in some if _has_to_come(one, to)) for to, some in by_writer.items()}
        written = [one for one in by_writer.get(ranks.rank, ()) if not _has_to_come(one, ranks.rank)]
    else:
        written = [*_written_here(plan, ranks)]
    sources = {source.key: source for source in written}
    held = {key: local for key, source in sources.items() if (local := source.local) is not None}
    late = {key for key in held if not request.state_dict_given and _is_late(sources[key], owned)}
    blocks = request.state_dict_given if has_one_writer else _needs_gather(plan, request, ranks, config)
    return CopyPlan(
        now={key: local for key, local in held.items() if key not in late},
        late={key: held[key] for key in held if key in late},
        size_bytes=copies_size(held.values()) + sum(one.size_bytes for one in gathers.get(ranks.rank, ())),
        needs_gather=blocks,
        gathers=tuple((to, some) for to, some in gathers.items() if some),
    )


def with_copies(plan: SavePlan, held: Mapping[int, Tensor], copies: CopyPlan) -> SavePlan:
    """The plan with the tensors `held`, by key, in place of live ones; gathered tensors are whole on their writers."""
    gathered = {source.key for _, some in copies.gathers for source in some}
    groups: dict[Group, Group] = {}

    def copied(source: Source) -> Source:
        whole = replace(source, sharding=ReplicatedSharding(source.shape)) if source.key in gathered else source
        return whole.holding(held.get(source.key))

    def renewed(entry: Entry) -> Entry:
        group = entry.group
        if group is not None and group not in groups:
            groups[group] = replace(group, sources=tuple(map(copied, group.sources)))
        source = None if entry.source is None else copied(entry.source)
        return entry._replace(source=source, group=None if group is None else groups[group])

    parts = [replace(one.part, entries=tuple(map(renewed, one.part.entries))) for one in plan.plans]
    plans = tuple(replace(one, part=part) for one, part in zip(plan.plans, parts, strict=True))
    ties = tuple((copied(one), copied(other)) for one, other in plan.ties_to_check)
    return replace(plan, plans=plans, ties_to_check=ties)


def _is_late(source: Source, owned: frozenset[int]) -> bool:
    known = source.engine in ("plain", "fsdp1", "fsdp2", "zero3", "zero")
    return known and id(optimizer_parameter(source.live)) in owned


def _needs_gather(plan: SavePlan, request: SaveRequest, ranks: Ranks, config: SaverConfig) -> bool:
    """Whether some tensor has to move between ranks."""
    sources = [source for one in plan.plans for entry in one.part.entries for source in entry.sources]
    if any(source.sharding.is_opaque for source in sources):
        return True
    if ranks.size == 1:
        return False
    plain = all(format_named(one.format).is_plain for one in plan.plans) and config.compression is None
    if not plain or config.each_rank_writes == "off" or config.nonfinite == "raise" or request.state_dict_given:
        return True
    if any(source.sharding.is_sharded for pair in plan.ties_to_check for source in pair):
        return True
    return any(
        entry.group is not None or (entry.source is not None and entry.source.sharding.is_sharded and cuts is None)
        for share in write_shards.divide_files(plan.plans, ranks.size)
        for entry, cuts, spec in zip(share.entries, share.cuts, share.file.layout.specs, strict=True)
        if spec.size_bytes
    )


def _by_writer(plan: SavePlan, ranks: Ranks, config: SaverConfig) -> dict[int, list[Source]]:
    """The tensors that come into the files of each rank, once each, where a file has one writer."""
    files = [file for one in plan.plans for file in one.files]
    size = 1 if config.each_rank_writes == "off" else ranks.size
    writers = dict(zip((file.path for file in files), write_shards.assign_writers(files, size), strict=True))
    found: dict[int, dict[int, Source]] = {0: {source.key: source for pair in plan.ties_to_check for source in pair}}
    for one in plan.plans:
        entries = {entry.name: entry for entry in one.part.entries}
        for file in one.files:
            sources = (source for spec in file.layout.specs for source in entries[spec.name].sources)
            found.setdefault(writers[file.path], {}).update({source.key: source for source in sources})
    return {to: list(sources.values()) for to, sources in found.items()}


def _has_to_come(source: Source, to: int) -> bool:
    """Whether the rank `to` has not all of the tensor."""
    return source.sharding.is_opaque or moves_to(source, to)


def _written_here(plan: SavePlan, ranks: Ranks) -> Iterator[Source]:
    """The tensors of which this rank writes something."""
    if ranks.size == 1:
        yield from _all_sources(plan)
        return
    yield from (source for pair in plan.ties_to_check for source in pair)
    for share in write_shards.divide_files(plan.plans, ranks.size):
        for entry, cuts in zip(share.entries, share.cuts, strict=True):
            mine = ranks.leads if cuts is None else any(chunk_of_rank(cut, ranks.rank) for cut in cuts)
            yield from entry.sources if mine else ()


def _all_sources(plan: SavePlan) -> Iterator[Source]:
    yield from (source for pair in plan.ties_to_check for source in pair)
    yield from (source for one in plan.plans for entry in one.part.entries for source in entry.sources)
