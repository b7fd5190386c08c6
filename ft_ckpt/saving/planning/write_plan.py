"""Which rank writes which bytes of a save.

Each rank makes the same plan from the same tensors, without exchanging anything. The executor
(`saving.write`) and a snapshot (`saving.snapshot`) both follow it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from ft_ckpt.config import SaverConfig
from ft_ckpt.formats import FilePlan, format_named
from ft_ckpt.model.tensors import Entry
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.saving.folder_sharing import FolderSharing, Mode
from ft_ckpt.saving.planning.files import PartPlan
from ft_ckpt.saving.planning.plan import SavePlan
from ft_ckpt.storage.digests import Cut, FileRecord, chunk_of_rank, joined_digest
from ft_ckpt.storage.io import BLOCK_BYTES

MIN_SHARED_BYTES = 32 << 20  # opening the files of a smaller checkpoint on all ranks does not pay
MIN_RUN_BYTES = 256 << 10  # of a run, where a tensor has several: at 128 KB a gather is as fast


@dataclass(frozen=True, eq=False)
class FileWrites:
    """One file, and the rank that writes each of its bytes."""

    file: FilePlan
    entries: tuple[Entry, ...]  # in file order
    # of each entry; None: gathered on `writer`; (): no rank has elements
    cuts: tuple[tuple[Cut, ...] | None, ...]
    ranks: int = 1  # that write
    writer: int = 0  # of the header, of gaps between tensors, and of what is in no cut

    @property
    def all_cuts(self) -> tuple[Cut, ...]:
        return tuple(chain.from_iterable(cuts for cuts in self.cuts if cuts))

    @property
    def needs_transfer(self) -> bool:
        """Whether tensors would have to move if rank 0 wrote the whole file."""
        for entry in self.entries:
            for source in entry.sources:
                if source.sharding.is_sharded or source.sharding.is_opaque:
                    return True
        return False

    @property
    def has_opaque(self) -> bool:
        """Whether the ranks do not know who holds which elements of a tensor."""
        for entry in self.entries:
            if any(source.sharding.is_opaque for source in entry.sources):
                return True
        return False

    @property
    def gathers(self) -> bool:
        """Whether elements must move to the writer, although all ranks write."""
        pairs = zip(self.entries, self.cuts, strict=True)
        return any(_is_gathered(entry, cuts) for entry, cuts in pairs)

    def by_one(self, writer: int) -> "FileWrites":
        """The same file, written by one rank."""
        return replace(self, cuts=(None,) * len(self.entries), ranks=1, writer=writer)

    def bytes_of(self, rank: int) -> int:
        """The number of bytes that `rank` writes."""
        in_cuts, of_rank = 0, 0
        for cut in self.all_cuts:
            in_cuts += cut.stop - cut.start
            start, stop = chunk_of_rank(cut, rank) or (0, 0)
            of_rank += stop - start
        in_no_cut = self.file.layout.size_bytes - in_cuts
        return of_rank + (in_no_cut if rank == self.writer else 0)

    def record(self, digests: Sequence[str]) -> FileRecord:
        """The record of the file that the ranks have written, from the digest of each."""
        size_bytes = self.file.layout.size_bytes
        return FileRecord(
            self.file.path, size_bytes, joined_digest(digests), self.all_cuts, len(digests)
        )


@dataclass(frozen=True, eq=False)
class WritePlan:
    """Who writes what in one save; equal on all ranks, but for the tensors behind the entries."""

    mode: Mode
    files: tuple[FileWrites, ...]
    ties: tuple[tuple[Source, Source], ...]  # pairs that rank 0 compares
    ranks: int
    can_spread: bool  # whether every rank can gather a file; else rank 0 alone can
    # whether other ranks open files only when rank 0 has created all: several clients of a file
    # system write, and one that sees a file shorter than it is may fill up its pages with zeros
    opens_created: bool = False

    def without(self, paths: frozenset[str]) -> "WritePlan":
        """The plan without some files, which exist already."""
        files = tuple(writes for writes in self.files if writes.file.path not in paths)
        return replace(self, files=files)

    def by_rank_0(self) -> "WritePlan":
        """The plan in which rank 0 writes all files."""
        files = tuple(writes.by_one(0) for writes in self.files)
        return replace(self, mode=Mode.MAIN, files=files)

    def by_writers(self) -> "WritePlan":
        """The plan in which each file has one writer: rank 0 has all that others cannot gather."""
        writers = [0] * len(self.files)
        if self.can_spread:
            writers = assign_writers([writes.file for writes in self.files], self.ranks)
        pairs = zip(self.files, writers, strict=True)
        files = tuple(writes.by_one(writer) for writes, writer in pairs)
        return replace(self, mode=Mode.SPREAD if any(writers) else Mode.MAIN, files=files)

    def limited_to(self, mode: Mode) -> "WritePlan":
        """The plan where ranks may share files no more closely than `mode` says."""
        if mode is Mode.MAIN:
            return self.by_rank_0()
        if mode is Mode.SPREAD and self.mode is Mode.SHARED:
            return self.by_writers()
        return self

    def in_folder(self, sharing: FolderSharing) -> "WritePlan":
        """The plan for a folder that ranks share in this way."""
        limited = self.limited_to(sharing.mode)
        return replace(limited, opens_created=sharing.clients > 1)

    def bytes_of(self, rank: int) -> int:
        """The number of bytes that `rank` writes."""
        return sum(writes.bytes_of(rank) for writes in self.files)

    def tensors_for(self, rank: int) -> dict[int, Source]:
        """The tensors that `rank` writes a part of or compares, by key."""
        tensors: dict[int, Source] = {}
        # a comparison of sharded ties needs the elements of all ranks
        if rank == 0 or self.mode is Mode.SHARED:
            for first, second in self.ties:
                tensors[first.key] = first
                tensors[second.key] = second
        for writes in self.files:
            if self.mode is not Mode.SHARED and rank != writes.writer:
                continue
            for entry, cuts in zip(writes.entries, writes.cuts, strict=True):
                if _has_part(rank, writes, cuts):
                    for source in entry.sources:
                        tensors[source.key] = source
        return tensors

    @property
    def moves_tensors(self) -> bool:
        """Whether elements that one rank holds may be written by another."""
        if any(writes.has_opaque for writes in self.files):
            return True
        if self.ranks == 1:
            return False
        if self.mode is not Mode.SHARED:
            return True
        for first, second in self.ties:
            if first.sharding.is_sharded or second.sharding.is_sharded:
                return True
        return any(writes.gathers for writes in self.files)


def plan_writes(plan: SavePlan, config: SaverConfig, ranks: int, state_dict: bool) -> WritePlan:
    """The plan for `ranks` ranks which all see the files of the save.

    `state_dict`: whether rank 0 was given the tensors.
    """
    mode = _choose_mode(plan, config, ranks, state_dict)
    divided = tuple(divide_files(plan.plans, ranks if mode is Mode.SHARED else 1))
    writes = WritePlan(mode, divided, plan.ties_to_check, ranks, plan.is_spread)
    if mode is Mode.SPREAD:
        return writes.by_writers()
    bytes_in_cuts = 0
    for file_writes in divided:
        bytes_in_cuts += sum(cut.stop - cut.start for cut in file_writes.all_cuts)
    pays = config.each_rank_writes == "on" or bytes_in_cuts >= MIN_SHARED_BYTES
    return writes if mode is Mode.SHARED and pays else writes.by_rank_0()


def divide_files(plans: Sequence[PartPlan], ranks: int) -> list[FileWrites]:
    """All files of `plans`, each divided between all ranks."""
    divided = []
    for plan in plans:
        entries = {entry.name: entry for entry in plan.part.entries}
        for file in plan.files:
            ordered = tuple(entries[spec.name] for spec in file.layout.specs)
            step = -(-file.layout.size_bytes // ranks)
            step += -step % BLOCK_BYTES  # so that no disk block has two writers
            cuts = tuple(
                _tensor_cuts(entry, start, step)
                for entry, start in zip(ordered, file.layout.starts, strict=True)
            )
            divided.append(FileWrites(file, ordered, cuts, ranks))
    return divided


def assign_writers(files: Sequence[FilePlan], ranks: int) -> list[int]:
    """The rank that writes each file, if each has one writer.

    The largest file comes first; bytes are balanced.

    Fewer files than ranks are spread over all ranks, because neighbouring ranks are on one machine.
    """
    sizes = [file.layout.size_bytes for file in files]
    count = min(len(files), ranks)
    loads, writers = [0] * count, [0] * len(files)
    for number in sorted(range(len(files)), key=sizes.__getitem__, reverse=True):
        slot = loads.index(min(loads))
        loads[slot] += sizes[number]
        writers[number] = slot * ranks // count
    return writers


def _choose_mode(plan: SavePlan, config: SaverConfig, ranks: int, state_dict: bool) -> Mode:
    if ranks == 1 or state_dict or config.each_rank_writes == "off":
        return Mode.MAIN
    if plan.request.target.is_local:
        is_plain = all(format_named(part.format).is_plain for part in plan.plans)
        can_share = is_plain and config.compression is None and config.nonfinite != "raise"
        return Mode.SHARED if can_share else Mode.MAIN
    size_bytes = sum(part.size_bytes for part in plan.plans)
    pays = config.each_rank_writes == "on" or size_bytes >= MIN_SHARED_BYTES
    return Mode.SPREAD if pays else Mode.MAIN


def _has_part(rank: int, writes: FileWrites, cuts: tuple[Cut, ...] | None) -> bool:
    """Whether `rank` writes a part of the tensor with these cuts."""
    if cuts is None:
        return rank == writes.writer
    return any(chunk_of_rank(cut, rank) for cut in cuts)


def _is_gathered(entry: Entry, cuts: tuple[Cut, ...] | None) -> bool:
    """Whether elements of the stored tensor must move to the writer of its file."""
    if not prod(entry.shape):
        return False
    if entry.group is not None:
        return True
    return cuts is None and entry.source is not None and entry.source.sharding.is_sharded


def _tensor_cuts(entry: Entry, start: int, step: int) -> tuple[Cut, ...] | None:
    """The cuts of one tensor at `start`; None if it must be gathered.

    `step` is each rank's share of a replicated one.

    The result is None on all ranks or on none, in every group of replicas.
    """
    source, item_bytes, numel = entry.source, entry.dtype.itemsize, prod(entry.shape)
    if source is None or source.sharding.is_opaque or not numel:
        return None
    stop, sharding = start + numel * item_bytes, source.sharding
    if not sharding.is_sharded:
        if not sharding.is_replicated or start % item_bytes:
            return None
        return (Cut(start, stop, step, step - start % step, start // step),)
    runs = sharding.runs
    if not runs or (source.shape != entry.shape and source.numel != numel):
        return None
    if len(runs) > 1 and min(run.chunk for run in runs) * item_bytes < MIN_RUN_BYTES:
        return None
    if not sharding.owners:
        return ()
    cuts = []
    end = start
    for run in runs:
        low, end = end, end + run.numel * item_bytes
        cuts.append(Cut(low, end, run.chunk * item_bytes, run.lead * item_bytes, run.owner))
    return tuple(cuts)
