"""Decides which rank writes which bytes of a save.

Each rank makes the same plan from the same tensors, without exchanging anything. Writing
(`saving.write`) and a snapshot (`saving.snapshot`) both follow the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Final

from ft_ckpt.config import SaverConfig
from ft_ckpt.formats import FilePlan, format_named
from ft_ckpt.model.tensors import Entry
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.saving.planning.files import PartPlan
from ft_ckpt.saving.planning.modes import Mode
from ft_ckpt.saving.planning.plan import SavePlan
from ft_ckpt.storage.digests import Cut, FileRecord, chunk_of_rank, joined_digest
from ft_ckpt.storage.io import BLOCK_BYTES

# Rank 0 writes a smaller checkpoint: opening its files on all ranks would take longer.
MIN_SHARED_BYTES = 32 << 20
# A tensor with several runs is gathered if one run is smaller: at 128 KB a gather is as fast.
MIN_RUN_BYTES = 256 << 10

# How the bytes of one tensor are divided among ranks: in cuts, or as one of the constants.
TensorCuts = tuple[Cut, ...] | None
GATHERED: Final = None  # the tensor is gathered on the writer of its file
NO_ELEMENTS: Final[tuple[Cut, ...]] = ()  # no rank of this replica group contributes elements


@dataclass(frozen=True, eq=False)
class FileWrites:
    """One file, and the rank that writes each of its bytes."""

    file: FilePlan
    entries: tuple[Entry, ...]  # in file order
    cuts: tuple[TensorCuts, ...]  # of each entry
    ranks: int = 1  # number of ranks that write
    writer: int = 0  # rank that writes the header, gaps between tensors, and all bytes in no cut

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
        """Whether elements must move to the writer although all ranks write."""
        pairs = zip(self.entries, self.cuts, strict=True)
        return any(_is_gathered(entry, cuts) for entry, cuts in pairs)

    def by_one(self, writer: int) -> "FileWrites":
        """Return the same file, written by one rank."""
        return replace(self, cuts=(GATHERED,) * len(self.entries), ranks=1, writer=writer)

    def bytes_of(self, rank: int) -> int:
        """Return the number of bytes that `rank` writes."""
        in_cuts, of_rank = 0, 0
        for cut in self.all_cuts:
            in_cuts += cut.stop - cut.start
            start, stop = chunk_of_rank(cut, rank) or (0, 0)
            of_rank += stop - start
        in_no_cut = self.file.layout.size_bytes - in_cuts
        return of_rank + (in_no_cut if rank == self.writer else 0)

    def record(self, digests: Sequence[str]) -> FileRecord:
        """Make the record of the written file, from the digest of each rank's part."""
        size_bytes = self.file.layout.size_bytes
        return FileRecord(
            self.file.path, size_bytes, joined_digest(digests), self.all_cuts, len(digests)
        )


@dataclass(frozen=True, eq=False)
class WritePlan:
    """Which rank writes which bytes in one save.

    The plan is equal on all ranks, except that each rank has its own elements of the tensors.
    """

    mode: Mode
    files: tuple[FileWrites, ...]
    ties: tuple[tuple[Source, Source], ...]  # pairs that rank 0 compares
    ranks: int
    can_spread: bool  # whether every rank can gather a file; else rank 0 alone can
    # Whether other ranks open the files after rank 0 has created all of them. If several clients of
    # a file system write, a client that sees a file as too short may fill up its pages with zeros.
    opens_created: bool = False

    def without(self, paths: frozenset[str]) -> "WritePlan":
        """Return the plan without the files at `paths`, which exist already."""
        files = tuple(writes for writes in self.files if writes.file.path not in paths)
        return replace(self, files=files)

    def by_rank_0(self) -> "WritePlan":
        """Return the plan in which rank 0 writes all files."""
        files = tuple(writes.by_one(0) for writes in self.files)
        return replace(self, mode=Mode.MAIN, files=files)

    def by_writers(self) -> "WritePlan":
        """Return the plan in which each file has one writer.

        That is rank 0 for all files if other ranks cannot gather the tensors.
        """
        writers = [0] * len(self.files)
        if self.can_spread:
            writers = assign_writers([writes.file for writes in self.files], self.ranks)
        pairs = zip(self.files, writers, strict=True)
        files = tuple(writes.by_one(writer) for writes, writer in pairs)
        return replace(self, mode=Mode.SPREAD if any(writers) else Mode.MAIN, files=files)

    def limited_to(self, mode: Mode) -> "WritePlan":
        """Return the plan in which ranks share files no more closely than `mode` allows."""
        if mode is Mode.MAIN:
            return self.by_rank_0()
        if mode is Mode.SPREAD and self.mode is Mode.SHARED:
            return self.by_writers()
        return self

    def in_folder(self, mode: Mode, clients: int) -> "WritePlan":
        """Return the plan for a folder.

        `mode` says how closely ranks may share its files; `clients` is the number of clients of its
        file system among the ranks, 0 for a bucket.
        """
        return replace(self.limited_to(mode), opens_created=clients > 1)

    def bytes_of(self, rank: int) -> int:
        """Return the number of bytes that `rank` writes."""
        return sum(writes.bytes_of(rank) for writes in self.files)

    def tensors_for(self, rank: int) -> dict[int, Source]:
        """Return by key the tensors that `rank` compares or writes a part of."""
        tensors: dict[int, Source] = {}
        # to compare sharded ties, rank 0 needs the elements of all ranks
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


def plan_writes(plan: SavePlan, config: SaverConfig, ranks: int, has_state_dict: bool) -> WritePlan:
    """Plan the writes of `ranks` ranks, all of which see the files of the save.

    `has_state_dict` says whether the caller has passed the tensors on rank 0.
    """
    mode = _choose_mode(plan, config, ranks, has_state_dict)
    divided = tuple(divide_files(plan.plans, ranks if mode is Mode.SHARED else 1))
    writes = WritePlan(mode, divided, plan.ties_to_check, ranks, plan.can_spread)
    if mode is Mode.SPREAD:
        return writes.by_writers()
    bytes_in_cuts = 0
    for file_writes in divided:
        bytes_in_cuts += sum(cut.stop - cut.start for cut in file_writes.all_cuts)
    pays = config.each_rank_writes == "on" or bytes_in_cuts >= MIN_SHARED_BYTES
    return writes if mode is Mode.SHARED and pays else writes.by_rank_0()


def divide_files(plans: Sequence[PartPlan], ranks: int) -> list[FileWrites]:
    """Divide each file of `plans` among all ranks."""
    divided = []
    for plan in plans:
        entries = {entry.name: entry for entry in plan.part.entries}
        for file in plan.files:
            ordered = tuple(entries[spec.name] for spec in file.layout.specs)
            step = -(-file.layout.size_bytes // ranks)
            step += -step % BLOCK_BYTES  # so that each disk block has one writer
            cuts = tuple(
                _tensor_cuts(entry, start, step)
                for entry, start in zip(ordered, file.layout.starts, strict=True)
            )
            divided.append(FileWrites(file, ordered, cuts, ranks))
    return divided


def assign_writers(files: Sequence[FilePlan], ranks: int) -> list[int]:
    """Choose one writer for each file, so that the writers have about equally many bytes.

    Files are assigned from the largest to the smallest, each to the writer with the fewest bytes.
    If there are fewer files than ranks, the writers are spread evenly over the ranks, because
    neighbouring ranks are on one machine.
    """
    sizes = [file.layout.size_bytes for file in files]
    count = min(len(files), ranks)
    loads, writers = [0] * count, [0] * len(files)
    for number in sorted(range(len(files)), key=sizes.__getitem__, reverse=True):
        slot = loads.index(min(loads))
        loads[slot] += sizes[number]
        writers[number] = slot * ranks // count
    return writers


def _choose_mode(plan: SavePlan, config: SaverConfig, ranks: int, has_state_dict: bool) -> Mode:
    if ranks == 1 or has_state_dict or config.each_rank_writes == "off":
        return Mode.MAIN
    if plan.request.target.is_local:
        is_plain = all(format_named(part.format).is_plain for part in plan.plans)
        can_share = is_plain and config.compression is None and config.nonfinite != "raise"
        return Mode.SHARED if can_share else Mode.MAIN
    size_bytes = sum(part.size_bytes for part in plan.plans)
    pays = config.each_rank_writes == "on" or size_bytes >= MIN_SHARED_BYTES
    return Mode.SPREAD if pays else Mode.MAIN


def _has_part(rank: int, writes: FileWrites, cuts: TensorCuts) -> bool:
    """Check whether `rank` writes a part of the tensor with these cuts."""
    if cuts is GATHERED:
        return rank == writes.writer
    return any(chunk_of_rank(cut, rank) for cut in cuts)


def _is_gathered(entry: Entry, cuts: TensorCuts) -> bool:
    """Check whether elements of the stored tensor must move to the writer of its file."""
    if not prod(entry.shape):
        return False
    if entry.group is not None:
        return True
    return cuts is GATHERED and entry.source is not None and entry.source.sharding.is_sharded


def _tensor_cuts(entry: Entry, start: int, step: int) -> TensorCuts:
    """Cut the bytes of one tensor, which begin at `start` in its file.

    All ranks compute the same cuts. The result is `GATHERED` on all ranks or on none, in every
    group of replicas.

    A replicated tensor is cut where its file is: rank r writes the bytes [r * step, (r + 1) * step)
    of the file. With step = 100, a tensor in the bytes [250, 480) gives Cut(start=250, stop=480,
    chunk=100, lead=50, owner=2): rank 2 writes [250, 300), rank 3 [300, 400), rank 4 [400, 480).

    A sharded tensor has a cut for each of its runs, so that each rank writes the elements it holds.
    A float32 tensor of shape (6, 10) at 0, cut by rows over ranks 0 to 2, is one run of 20 elements
    a rank: Cut(start=0, stop=240, chunk=80, lead=80, owner=0).
    """
    source, item_bytes, numel = entry.source, entry.dtype.itemsize, prod(entry.shape)
    if source is None or source.sharding.is_opaque or not numel:
        return GATHERED
    stop, sharding = start + numel * item_bytes, source.sharding
    if not sharding.is_sharded:
        if not sharding.is_replicated or start % item_bytes:
            return GATHERED
        lead = step - start % step
        return (Cut(start=start, stop=stop, chunk=step, lead=lead, owner=start // step),)
    runs = sharding.runs
    if not runs or (source.shape != entry.shape and source.numel != numel):
        return GATHERED
    if len(runs) > 1 and min(run.chunk for run in runs) * item_bytes < MIN_RUN_BYTES:
        return GATHERED
    if not sharding.owners:
        return NO_ELEMENTS
    cuts = []
    low = start
    for run in runs:
        high = low + run.numel * item_bytes
        cuts.append(
            Cut(
                start=low,
                stop=high,
                chunk=run.chunk * item_bytes,
                lead=run.lead * item_bytes,
                owner=run.owner,
            )
        )
        low = high
    return tuple(cuts)
