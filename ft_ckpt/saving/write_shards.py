"""Every rank writes what it holds into the one final file: no gather, no second pass.

Which bytes of a file are whose follows from its layout and from how each tensor is held, and every rank works it out
alone. What is no run of bytes (converted names), or many short ones (columns of a matrix), comes to rank 0 as ever, in
its turn.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, repeat
from math import prod

from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.formats.write_files import FilePlan
from ft_ckpt.model.entries import Entry
from ft_ckpt.saving.files import GatherWay, PartPlan, cast_regions, gathered_turns
from ft_ckpt.storage.buffers import BLOCK_BYTES
from ft_ckpt.storage.digests import Cut, FileRecord, chunk_of_rank, joined_digest
from ft_ckpt.storage.store import SharedStore
from ft_ckpt.storage.writer import Region, Writer, digest_regions, region_of

LEAST_BYTES = 32 << 20  # of a checkpoint for which it pays that all ranks open its files
LEAST_RUN_BYTES = 256 << 10  # of a tensor's, where ranks have several: at 128 KB they are level with the gather


@dataclass(frozen=True, eq=False)
class Share:
    """One file, and who writes which bytes of it."""

    file: FilePlan
    entries: tuple[Entry, ...]  # in file order
    cuts: tuple[tuple[Cut, ...] | None, ...]  # of each entry; None: it comes to rank 0; (): other ranks write it
    ranks: int = 1  # that write

    @property
    def actual_cuts(self) -> tuple[Cut, ...]:
        """The cuts there are, in file order."""
        return tuple(chain.from_iterable(cuts for cuts in self.cuts if cuts))

    @property
    def needs_transfer(self) -> bool:
        """Whether tensors would have to move if rank 0 wrote all of it."""
        shardings = [source.sharding for entry in self.entries for source in entry.sources]
        return any(sharding.is_sharded or sharding.is_opaque for sharding in shardings)

    def for_rank_0(self) -> "Share":
        """The same file if rank 0 writes all of it."""
        return replace(self, cuts=(None,) * len(self.cuts), ranks=1)


def divide_files(plans: Sequence[PartPlan], world_size: int) -> list[Share]:
    """Who writes what of every file."""
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
    """The rank that writes each of the files, where one has to write all of it: the largest first, evenly by bytes.

    Fewer files than ranks are spread over all, since neighbours are on one machine.
    """
    count = min(len(files), world_size)
    loads, writers = [0] * count, [0] * len(files)
    for number in sorted(range(len(files)), key=lambda number: -files[number].layout.size_bytes):
        slot = loads.index(min(loads))
        loads[slot] += files[number].layout.size_bytes
        writers[number] = slot * world_size // count
    return writers


def is_worth_sharing(found: Sequence[Share]) -> bool:
    """Whether other ranks than 0 have anything to write that is worth it."""
    cut = sum(cut.stop - cut.start for share in found for cut in share.actual_cuts)
    return cut >= LEAST_BYTES


def file_record(share: Share, digests: Sequence[str]) -> FileRecord:
    """The record of the file from its ranks' digests."""
    return FileRecord(
        share.file.path, share.file.layout.size_bytes, joined_digest(digests), share.actual_cuts, len(digests)
    )


def write_own_bytes(share: Share, store: SharedStore, ranks: Ranks, writer: Writer, bucket_bytes: int) -> str:
    """Write this rank's bytes of one file; their digest. Collective where tensors come to rank 0.

    Stops in the middle when another rank has failed, with NoSpaceError where that rank's disk is full, else RankError.
    """
    regions = _while_all_write(_own_regions(share, ranks, bucket_bytes), ranks, writer.tuning.block_bytes)
    with writer.fill(store.share(share.file.path, share.file.layout.size_bytes)) as file:
        for region in regions:
            file.put_region(region)
        return file.finish()


def digest_own_bytes(share: Share, ranks: Ranks, bucket_bytes: int) -> str:
    """The digest that `write_own_bytes` would give, without writing anything. Collective as that is."""
    return digest_regions(_while_all_write(_own_regions(share, ranks, bucket_bytes), ranks, BLOCK_BYTES))


def _tensor_cuts(entry: Entry, start: int, step: int) -> tuple[Cut, ...] | None:
    """The cuts of one tensor at `start`; `step` is the file's share of each rank where all have the same.

    Whether there are any is the same on all ranks, whichever group of replicas they are in.
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


def _own_regions(share: Share, ranks: Ranks, bucket_bytes: int) -> Iterator[Region]:
    """This rank's bytes of the file, in order."""
    places = list(zip(share.entries, share.cuts, share.file.layout.specs, share.file.layout.starts, strict=True))
    at = 0  # up to here, what no tensor covers is written
    for is_gathered, group in groupby(places, key=lambda place: place[1] is None):
        if is_gathered:
            moving = [(entry, start) for entry, _, spec, start in group if spec.size_bytes]
            for region in chain.from_iterable(gathered_turns(moving, GatherWay(ranks, bucket_bytes))):
                yield from _header_regions(share.file, at, region.start)
                yield region
                at = region.start + region.size_bytes
            continue
        for entry, cuts, spec, start in group:
            if ranks.leads:
                yield from _header_regions(share.file, at, start)
            at = start + spec.size_bytes
            yield from _tensor_regions(entry, cuts or (), ranks.rank)
    if ranks.leads:
        yield from _header_regions(share.file, at, share.file.layout.size_bytes)


def _while_all_write(regions: Iterable[Region], ranks: Ranks, most_bytes: int) -> Iterator[Region]:
    """The regions, in pieces of at most `most_bytes`; no more of them once another rank has failed."""
    for region in regions:
        for low in range(0, region.size_bytes, most_bytes):
            ranks.check_peers()
            size = min(most_bytes, region.size_bytes - low)
            yield Region(region.start + low, region.address + low, size, region.keeper)


def _header_regions(file: FilePlan, start: int, stop: int) -> Iterator[Region]:
    """Header and gaps: bytes of the file that are no tensor's."""
    if start < stop:
        yield region_of(start, file.layout.header[start:stop].ljust(stop - start, b"\0"))


def _tensor_regions(entry: Entry, cuts: Sequence[Cut], rank: int) -> Iterator[Region]:
    """This rank's chunks of one tensor, which lie one after the other in its memory."""
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
