"""Assigns tensors to files and writers, and yields their bytes in file order.

The plan is the same on every rank, because all ranks take part in moving the tensors.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, chain, groupby, repeat
from math import prod

import torch
from torch import Tensor

from ft_ckpt.devices import host_pieces, is_accelerator
from ft_ckpt.distributed.gather import Chunk, gather_tensors, stream_buckets
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.distributed.source import Source
from ft_ckpt.errors import IncompleteError, SelectionError, listing
from ft_ckpt.formats.dtypes import all_finite, dtype_name
from ft_ckpt.formats.file_io import FilePlan
from ft_ckpt.formats.layout import Layout, Spec
from ft_ckpt.formats.registry import DEFAULT_FORMAT, TensorFormat, format_named
from ft_ckpt.formats.shards import shard_index, split_into_files
from ft_ckpt.model.entries import Entry, Group, Part
from ft_ckpt.storage.digests import Cut, FileRecord, chunk_of_rank, joined_digest
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.read_ahead import BLOCK_BYTES
from ft_ckpt.storage.store import Store, is_utf8
from ft_ckpt.storage.writer import Region, Writer, digest_regions, region_of

_SLICE = 4 << 20  # elements converted at a time
_METADATA = {"format": "pt"}  # transformers refuses files without it


@dataclass(frozen=True, eq=False)
class PartPlan:
    """One part and its files; `index` is the text of its shard index, None with one file."""

    part: Part
    format: str
    files: tuple[FilePlan, ...]
    index_path: str
    index: str | None
    separate: frozenset[str] = frozenset()  # stored names of frozen tensors, in files of their own

    @property
    def size_bytes(self) -> int:
        return sum(file.layout.size_bytes for file in self.files)


def plan_part(
    part: Part, max_shard_bytes: int, format_name: str = DEFAULT_FORMAT, separate: frozenset[str] = frozenset()
) -> PartPlan:
    """Files for `part`, split as transformers splits them: in the model's order, up to `max_shard_bytes` or one tensor.

    The tensors named in `separate` come first and share no file with the others. An adapter has one file.

    Raises SelectionError naming tensors of a dtype or a name that the format cannot store, IncompleteError naming
    tensors that would share a name in the files.
    """
    known = format_named(format_name)
    suffix = known.suffixes[0]
    _refuse_stored_names(part)
    specs = {entry.name: Spec(entry.name, entry.shape, dtype_name(entry.dtype)) for entry in part.entries}
    folder = f"{part.path}/" if part.path else ""
    index_path = f"{folder}{part.file}{suffix}.index.json"
    shards = {f"{part.file}{suffix}": list(specs)}
    try:
        if part.kind != "adapter":  # PEFT reads one file only
            shards = split_into_files(specs, part.file, suffix, max_shard_bytes, separate)
        laid_out = {name: _lay_out_file([specs[one] for one in some], known, part) for name, some in shards.items()}
    except (SelectionError, KeyError):
        _lay_out_file(list(specs.values()), known, part)  # its error names all tensors that cannot be stored
        raise
    files = tuple(FilePlan(folder + name, layout) for name, layout in laid_out.items())
    if len(files) == 1:
        return PartPlan(part, format_name, files, index_path, None, separate)
    total = {
        "total_parameters": sum(torch.Size(entry.shape).numel() for entry in part.entries),
        "total_size": sum(spec.size_bytes for spec in specs.values()),
    }
    return PartPlan(part, format_name, files, index_path, shard_index(shards, total), separate)


def _refuse_stored_names(part: Part) -> None:
    """Raise IncompleteError for duplicate names, SelectionError for names that a file cannot contain."""
    names = [entry.name for entry in part.entries]
    known = {*names}
    if len(known) < len(names):
        twice = [name for name, count in Counter(names).items() if count > 1]
        raise IncompleteError(f"{listing(twice, ', ')}: the name of more than one tensor; rename or re-register one")
    if "__metadata__" in known or not is_utf8("".join(names)):  # one check for all names
        bad = [repr(name) for name in names if name == "__metadata__" or not is_utf8(name)]
        raise SelectionError(f"{listing(bad, ', ')}: files cannot have a tensor of this name; rename the parameter")


@dataclass(frozen=True, eq=False)
class GatherWay:
    """How tensors are gathered on the rank `to`."""

    ranks: Ranks
    to: int = 0
    nonfinite: set[str] | None = None  # collects the names of tensors with NaN or infinity there; None: no check


def file_turns(part_plan: PartPlan, file: FilePlan, way: GatherWay) -> Iterator[Iterator[Region]]:
    """The bytes of one planned file's tensors in file order, see `gathered_turns`."""
    entries = {entry.name: entry for entry in part_plan.part.entries}
    layout = file.layout
    places = [(entries[spec.name], at) for spec, at in zip(layout.specs, layout.starts, strict=True) if spec.size_bytes]
    return gathered_turns(places, way)


def gathered_turns(places: Sequence[tuple[Entry, int]], way: GatherWay) -> Iterator[Iterator[Region]]:
    """The bytes of tensors at their places in a file, in order, on the rank that gathers them; nothing elsewhere.

    Each turn is an iterator over what moves in one bucket. Collective: all ranks take the same turns in the same order.
    """
    starts = {entry.name: start for entry, start in places}

    def regions_of(turn: Iterator[tuple[Entry, Tensor]]) -> Iterator[Region]:
        for entry, data in turn:
            for region in cast_regions(starts[entry.name], entry, data, way.nonfinite):
                yield region
                starts[entry.name] += region.size_bytes  # where its next elements go

    return map(regions_of, _entry_turns([entry for entry, _ in places], way))


def cast_regions(start: int, entry: Entry, data: Tensor, nonfinite: set[str] | None = None) -> Iterator[Region]:
    """Flat elements of a tensor in the entry's dtype, on the host; converted ones in pieces, to save memory.

    `start` is their offset in the file; `nonfinite`, if given, gets the entry's name if NaN or infinity is stored.
    """
    if is_accelerator(data.device):
        pieces = host_pieces(data)
    else:
        is_ready = data.dtype == entry.dtype and nonfinite is None
        step = max(1, data.numel() if is_ready else _SLICE)
        pieces = (data[low : low + step] for low in range(0, data.numel(), step))
    for piece in pieces:
        part = piece.to(dtype=entry.dtype).contiguous()
        if nonfinite is not None and not all_finite(part):
            nonfinite.add(entry.name)  # as stored: a cast may overflow
        yield Region(start, part.data_ptr(), part.nbytes, part)
        start += part.nbytes


def check_written_files(part_plan: PartPlan, store: Store) -> None:
    """Read the headers of the written files back and compare them with the planned names, shapes and dtypes.

    Raises IncompleteError naming every difference.
    """
    expected = {entry.name: Spec(entry.name, entry.shape, dtype_name(entry.dtype)) for entry in part_plan.part.entries}
    found: dict[str, Spec] = {}
    for file in part_plan.files:
        with closing(format_named(part_plan.format).open_file(store.open(file.path))) as opened:
            found.update(opened.specs)
    problems = [f"{name}: in the model, not in the file" for name in expected if name not in found]
    problems += [f"{name}: in the file, not in the model" for name in found if name not in expected]
    problems += [
        f"{name}: {found[name].dtype} {found[name].shape} in the file, {spec.dtype} {spec.shape} in the model"
        for name, spec in expected.items()
        if name in found and found[name] != spec
    ]
    if problems:
        raise IncompleteError(f"{listing(problems)}; nothing is committed")


def _entry_turns(ordered: Sequence[Entry], way: GatherWay) -> Iterator[Iterator[tuple[Entry, Tensor]]]:
    """(entry, its next flat elements) in order, in the turns of `gathered_turns`.

    Consecutive entries without a conversion share buckets.
    """
    waiting: list[Entry] = []
    made: dict[Group, dict[str, Tensor]] = {}
    for entry in ordered:
        if entry.group is None:
            waiting.append(entry)
            continue
        yield from _stream_entries(waiting, way)
        waiting = []
        yield _convert_group(entry, entry.group, made, way)
    yield from _stream_entries(waiting, way)


def _stream_entries(entries: Sequence[Entry], way: GatherWay) -> Iterator[Iterator[tuple[Entry, Tensor]]]:
    chosen: list[Source] = [entry.source for entry in entries if entry.source is not None]
    position, arrived = 0, 0

    def with_entries(bucket: Iterator[Chunk]) -> Iterator[tuple[Entry, Tensor]]:
        nonlocal position, arrived
        for chunk in bucket:
            yield entries[position], chunk.data
            arrived += chunk.data.numel()
            if arrived == chosen[position].numel:
                position, arrived = position + 1, 0

    return map(with_entries, stream_buckets(chosen, way.ranks, way.to))


def _convert_group(
    entry: Entry, group: Group, made: dict[Group, dict[str, Tensor]], way: GatherWay
) -> Iterator[tuple[Entry, Tensor]]:
    """The entry's tensor. Its group is gathered and converted for its first entry and freed with its last."""
    if group not in made:
        full = gather_tensors(group.sources, way.ranks, way.to)
        made[group] = group.convert(full) if way.ranks.rank == way.to else {}
    if way.ranks.rank == way.to:
        tensor = made[group].pop(entry.name)
        if tuple(tensor.shape) != entry.shape:
            raise IncompleteError(f"{entry.name}: converted to shape {tuple(tensor.shape)}, planned {entry.shape}")
        yield entry, tensor.reshape(-1)


def _lay_out_file(specs: list[Spec], known: TensorFormat, part: Part) -> Layout:
    stored = {spec.name for spec in specs} if known.holds_aliases else set()
    ties = {alias: kept for kept, *aliases in part.ties if kept in stored for alias in aliases if alias not in stored}
    return known.lay_out_file(specs, {**_METADATA, **part.metadata}, ties)


LEAST_BYTES = 32 << 20  # opening the files of a smaller checkpoint on all ranks does not pay
LEAST_RUN_BYTES = 256 << 10  # of a run, where a tensor has several: at 128 KB a gather is as fast


@dataclass(frozen=True, eq=False)
class Share:
    """One file, and the rank that writes each of its bytes."""

    file: FilePlan
    entries: tuple[Entry, ...]  # in file order
    cuts: tuple[tuple[Cut, ...] | None, ...]  # of each entry; None: gathered on rank 0; (): other ranks write it
    ranks: int = 1  # that write

    @property
    def actual_cuts(self) -> tuple[Cut, ...]:
        return tuple(chain.from_iterable(cuts for cuts in self.cuts if cuts))

    @property
    def needs_transfer(self) -> bool:
        """Whether tensors would have to move if rank 0 wrote the whole file."""
        shardings = [source.sharding for entry in self.entries for source in entry.sources]
        return any(sharding.is_sharded or sharding.is_opaque for sharding in shardings)


def divide_files(plans: Sequence[PartPlan], world_size: int) -> list[Share]:
    """The division of every file between the ranks."""
    found = []
    for plan in plans:
        entries = {entry.name: entry for entry in plan.part.entries}
        for file in plan.files:
            ordered = tuple(entries[spec.name] for spec in file.layout.specs)
            step = -(-file.layout.size_bytes // world_size)
            step += -step % BLOCK_BYTES  # so that no disk block has two writers
            cuts = map(_tensor_cuts, ordered, file.layout.starts, repeat(step))
            found.append(Share(file, ordered, tuple(cuts), world_size))
    return found


def assign_writers(files: Sequence[FilePlan], world_size: int) -> list[int]:
    """The rank that writes each file, if each has one writer: largest file first, balanced by bytes.

    Fewer files than ranks are spread over all ranks, because neighbouring ranks are on one machine.
    """
    count = min(len(files), world_size)
    loads, writers = [0] * count, [0] * len(files)
    for number in sorted(range(len(files)), key=lambda number: -files[number].layout.size_bytes):
        slot = loads.index(min(loads))
        loads[slot] += files[number].layout.size_bytes
        writers[number] = slot * world_size // count
    return writers


def file_record(share: Share, digests: Sequence[str]) -> FileRecord:
    """The record of the file from its ranks' digests."""
    return FileRecord(
        share.file.path, share.file.layout.size_bytes, joined_digest(digests), share.actual_cuts, len(digests)
    )


def write_own_bytes(share: Share, store: LocalStore, ranks: Ranks, writer: Writer) -> str:
    """Write this rank's bytes of one file and return their digest. Collective where tensors are gathered on rank 0.

    Stops when another rank has failed: with NoSpaceError if that rank's disk is full, else with RankError.
    """
    regions = _while_all_write(_own_regions(share, ranks), ranks, writer.tuning.block_bytes)
    with writer.fill(store.share(share.file.path, share.file.layout.size_bytes)) as file:
        for region in regions:
            file.put_region(region)
        return file.finish()


def digest_own_bytes(share: Share, ranks: Ranks) -> str:
    """The digest that `write_own_bytes` would return, without writing. Collective in the same way."""
    return digest_regions(_while_all_write(_own_regions(share, ranks), ranks, BLOCK_BYTES))


def _tensor_cuts(entry: Entry, start: int, step: int) -> tuple[Cut, ...] | None:
    """The cuts of one tensor at `start`; None if it must be gathered. `step` is each rank's share of a replicated one.

    The result is None on all ranks or on none, in every group of replicas.
    """
    source, item, numel = entry.source, entry.dtype.itemsize, prod(entry.shape)
    if source is None or source.sharding.is_opaque or not numel:
        return None
    stop, sharding = start + numel * item, source.sharding
    if not sharding.is_sharded:
        if not sharding.is_replicated or start % item:
            return None
        return (Cut(start, stop, step, step - start % step, start // step),)
    runs = sharding.runs
    if not runs or (source.shape != entry.shape and source.numel != numel):
        return None
    if len(runs) > 1 and min(one.chunk for one in runs) * item < LEAST_RUN_BYTES:
        return None
    if not sharding.owners:
        return ()
    if len(runs) == 1:
        return (Cut(start, stop, runs[0].chunk * item, runs[0].lead * item, runs[0].owner),)
    starts = accumulate((one.numel * item for one in runs), initial=start)
    return tuple(
        Cut(low, low + one.numel * item, one.chunk * item, one.lead * item, one.owner)
        for low, one in zip(starts, runs, strict=False)
    )


def _own_regions(share: Share, ranks: Ranks) -> Iterator[Region]:
    places = list(zip(share.entries, share.cuts, share.file.layout.specs, share.file.layout.starts, strict=True))
    at = 0  # header and gaps are written up to here
    for is_gathered, group in groupby(places, key=lambda place: place[1] is None):
        if is_gathered:
            moving = [(entry, start) for entry, _, spec, start in group if spec.size_bytes]
            for region in chain.from_iterable(gathered_turns(moving, GatherWay(ranks))):
                yield from _header_regions(share.file, at, region.start)
                yield region
                at = region.start + region.size_bytes
            continue
        for entry, cuts, spec, start in group:
            if ranks.is_main:
                yield from _header_regions(share.file, at, start)
            at = start + spec.size_bytes
            yield from _tensor_regions(entry, cuts or (), ranks.rank)
    if ranks.is_main:
        yield from _header_regions(share.file, at, share.file.layout.size_bytes)


def _while_all_write(regions: Iterable[Region], ranks: Ranks, most_bytes: int) -> Iterator[Region]:
    """The regions, in pieces of at most `most_bytes`. Raises the failure of another rank before a piece."""
    for region in regions:
        for low in range(0, region.size_bytes, most_bytes):
            ranks.check_peers()
            size = min(most_bytes, region.size_bytes - low)
            yield Region(region.start + low, region.address + low, size, region.keeper)


def _header_regions(file: FilePlan, start: int, stop: int) -> Iterator[Region]:
    """Header and gaps between tensors."""
    if start < stop:
        yield region_of(start, file.layout.header[start:stop].ljust(stop - start, b"\0"))


def _tensor_regions(entry: Entry, cuts: Sequence[Cut], rank: int) -> Iterator[Region]:
    """This rank's chunks of one tensor, which are contiguous in its memory."""
    source = entry.source
    held = None if source is None else source.local
    if source is None or held is None:
        return
    item, local = entry.dtype.itemsize, held.reshape(-1)
    chunks = [chunk for cut in cuts if (chunk := chunk_of_rank(cut, rank)) is not None]
    first = 0 if source.sharding.is_sharded or not chunks else (chunks[0][0] - cuts[0].start) // item
    for start, stop in chunks:
        count = (stop - start) // item
        yield from cast_regions(start, entry, local[first : first + count])
        first += count
