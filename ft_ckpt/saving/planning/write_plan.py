"""Decides which rank writes which bytes of a save.

Each rank makes the same plan from the same tensors, without exchanging anything. Writing
(`saving.write`) and a snapshot (`saving.snapshot`) both follow the plan.

With `Mode.SHARED` all ranks write into each file. For example, a header and three tensors:

    bytes:    header | A (replicated)   | gap    | B (sharded)      | C (gathered)
    written:  rank 0 | rank 0, 1, 2 ... | rank 0 | rank 0, 1, 2 ... | rank 0

A tensor that every rank holds is cut into equal chunks. A sharded tensor is cut as its shards are,
so that each rank writes the elements it holds. A tensor whose shards would give many small chunks
is gathered on one rank, which writes it. A `Cut` describes consecutive chunks of consecutive ranks.
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

# A smaller checkpoint is written by rank 0 alone, because opening its files on all ranks would take
# longer.
MIN_SHARED_BYTES = 32 << 20
# A tensor with several runs (consecutive elements of consecutive ranks, see `ranks.sharding`) is
# gathered if the chunks of a run are smaller. At 128 KB a gather is as fast.
MIN_RUN_BYTES = 256 << 10

# How the bytes of one tensor are divided among ranks: in cuts, or as one of the two constants.
TensorCuts = tuple[Cut, ...] | None
# The tensor is gathered on the writer of its file.
GATHERED: Final = None
# The ranks of this replica group write nothing, because another group has the same elements.
NO_ELEMENTS: Final[tuple[Cut, ...]] = ()


@dataclass(frozen=True, eq=False)
class FileWrites:
    """One file, and the rank that writes each of its bytes.

    Attributes:
        file: The path and layout of the file.
        entries: The tensors in file order.
        cuts: The cuts of each tensor.
        ranks: Number of ranks that write.
        writer: The rank that writes the bytes in no cut: the header, gaps between tensors, and
            gathered tensors.
    """

    file: FilePlan
    entries: tuple[Entry, ...]
    cuts: tuple[TensorCuts, ...]
    ranks: int = 1
    writer: int = 0

    @property
    def all_cuts(self) -> tuple[Cut, ...]:
        """The cuts of all tensors, in file order."""
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
        """Whether there is a tensor of which ranks do not know who holds which elements."""
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
        bytes_in_cuts = 0
        bytes_of_rank = 0
        for cut in self.all_cuts:
            bytes_in_cuts += cut.stop - cut.start
            chunk = chunk_of_rank(cut, rank)
            if chunk is not None:
                start, stop = chunk
                bytes_of_rank += stop - start
        if rank == self.writer:
            bytes_of_rank += self.file.layout.size_bytes - bytes_in_cuts
        return bytes_of_rank

    def record(self, digests: Sequence[str]) -> FileRecord:
        """Make the record of the written file.

        `digests` has for each rank the digest of the bytes that it has written.
        """
        size_bytes = self.file.layout.size_bytes
        return FileRecord(
            self.file.path, size_bytes, joined_digest(digests), self.all_cuts, len(digests)
        )


@dataclass(frozen=True, eq=False)
class WritePlan:
    """Which rank writes which bytes in one save.

    The plan is equal on all ranks, except that each rank has its own elements of the tensors.

    Attributes:
        mode: How the ranks share the writing.
        files: The files with their writers.
        ties: Pairs of tensors that rank 0 compares, because the model's config ties them.
        ranks: Number of ranks.
        can_spread: Whether every rank can gather the tensors of a file. Else only rank 0 can.
        opens_created: Whether the other ranks must open the files only after rank 0 has created all
            of them with their sizes. This is needed if several clients of a file system write: a
            client that sees a file as too short may fill its pages with zeros.
    """

    mode: Mode
    files: tuple[FileWrites, ...]
    ties: tuple[tuple[Source, Source], ...]
    ranks: int
    can_spread: bool
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

        If only rank 0 can gather the tensors, it writes all files.
        """
        writers = [0] * len(self.files)
        if self.can_spread:
            writers = assign_writers([writes.file for writes in self.files], self.ranks)
        pairs = zip(self.files, writers, strict=True)
        files = tuple(writes.by_one(writer) for writes, writer in pairs)
        return replace(self, mode=Mode.SPREAD if any(writers) else Mode.MAIN, files=files)

    def limited_to(self, mode: Mode) -> "WritePlan":
        """Return the plan limited to `mode`.

        With `Mode.SPREAD` no file has more than one writer, and with `Mode.MAIN` rank 0 writes all
        files. A plan that is already within the limit stays as it is.
        """
        if mode is Mode.MAIN:
            return self.by_rank_0()
        if mode is Mode.SPREAD and self.mode is Mode.SHARED:
            return self.by_writers()
        return self

    def in_folder(self, mode: Mode, clients: int) -> "WritePlan":
        """Return the plan for a folder.

        `mode` is the limit of its file system, see `limited_to`. `clients` is the number of clients
        of the file system among the ranks, 0 for a bucket.
        """
        return replace(self.limited_to(mode), opens_created=clients > 1)

    def bytes_of(self, rank: int) -> int:
        """Return the number of bytes that `rank` writes."""
        return sum(writes.bytes_of(rank) for writes in self.files)

    def tensors_for(self, rank: int) -> dict[int, Source]:
        """Return by key the tensors that `rank` compares, or of which it writes elements."""
        tensors: dict[int, Source] = {}

        # Rank 0 compares tied tensors. If these are sharded, it needs the elements of all ranks.
        if rank == 0 or self.mode is Mode.SHARED:
            for first, second in self.ties:
                tensors[first.key] = first
                tensors[second.key] = second

        for writes in self.files:
            if self.mode is not Mode.SHARED and rank != writes.writer:
                continue
            for entry, cuts in zip(writes.entries, writes.cuts, strict=True):
                if _writes_elements(rank, writes, cuts):
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
    writer_count = ranks if mode is Mode.SHARED else 1
    divided_files = tuple(divide_files(plan.plans, writer_count))
    writes = WritePlan(mode, divided_files, plan.ties_to_check, ranks, plan.can_spread)
    if mode is Mode.SPREAD:
        return writes.by_writers()
    if mode is Mode.MAIN:
        return writes.by_rank_0()
    bytes_in_cuts = 0
    for file_writes in divided_files:
        bytes_in_cuts += sum(cut.stop - cut.start for cut in file_writes.all_cuts)
    if config.each_rank_writes == "on" or bytes_in_cuts >= MIN_SHARED_BYTES:
        return writes
    return writes.by_rank_0()


def divide_files(plans: Sequence[PartPlan], ranks: int) -> list[FileWrites]:
    """Divide each file of `plans` among `ranks` ranks."""
    divided_files = []
    for plan in plans:
        entries = {entry.name: entry for entry in plan.part.entries}
        for file in plan.files:
            in_file_order = tuple(entries[spec.name] for spec in file.layout.specs)
            # The bytes of each rank are whole blocks, so that each disk block has one writer.
            step = BLOCK_BYTES * _ceil_div(file.layout.size_bytes, ranks * BLOCK_BYTES)
            cuts = []
            for entry, start in zip(in_file_order, file.layout.starts, strict=True):
                cuts.append(_tensor_cuts(entry, start, step))
            divided_files.append(FileWrites(file, in_file_order, tuple(cuts), ranks))
    return divided_files


def _ceil_div(dividend: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-dividend // divisor)


def assign_writers(files: Sequence[FilePlan], ranks: int) -> list[int]:
    """Choose one writer for each file, so that the writers have about equally many bytes.

    Files are assigned from the largest to the smallest, each to the writer with the fewest bytes.
    If there are fewer files than ranks, the writers are spread evenly over the ranks, because
    neighbouring ranks are on one machine. For example, 2 files of 8 ranks have the writers 0 and 4.
    """
    sizes = [file.layout.size_bytes for file in files]
    writer_count = min(len(files), ranks)
    bytes_of_writers = [0] * writer_count
    writers = [0] * len(files)
    for index in sorted(range(len(files)), key=sizes.__getitem__, reverse=True):
        number = bytes_of_writers.index(min(bytes_of_writers))
        bytes_of_writers[number] += sizes[index]
        writers[index] = number * ranks // writer_count
    return writers


def _choose_mode(plan: SavePlan, config: SaverConfig, ranks: int, has_state_dict: bool) -> Mode:
    """Choose the mode from the settings and the target, whose file system may still limit it."""
    if ranks == 1 or has_state_dict or config.each_rank_writes == "off":
        return Mode.MAIN
    if plan.request.target.is_local:
        is_plain = all(format_named(part.format).is_plain for part in plan.plans)
        can_share = is_plain and config.compression is None and config.nonfinite != "raise"
        return Mode.SHARED if can_share else Mode.MAIN
    # An object in a bucket has one writer, so several ranks can only write different files.
    size_bytes = sum(part.size_bytes for part in plan.plans)
    is_worthwhile = config.each_rank_writes == "on" or size_bytes >= MIN_SHARED_BYTES
    return Mode.SPREAD if is_worthwhile else Mode.MAIN


def _writes_elements(rank: int, writes: FileWrites, cuts: TensorCuts) -> bool:
    """Check whether `rank` writes elements of the tensor with these cuts."""
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

    `step` is the number of bytes of a replicated file that each rank writes. All ranks of a replica
    group compute the same cuts. The result is `GATHERED` on all ranks of all groups, or on none.

    A replicated tensor is cut where its file is: rank r writes the bytes [r * step, (r + 1) * step)
    of the file. With step = 100, a tensor in the bytes [250, 480) gives Cut(start=250, stop=480,
    chunk=100, lead=50, owner=2): rank 2 writes [250, 300), rank 3 [300, 400), rank 4 [400, 480).

    A sharded tensor has a cut for each of its runs, so that each rank writes the elements it holds.
    For example, take a float32 tensor of shape (6, 10) at offset 0, whose rows are divided among
    ranks 0 to 2. It is one run, in which each rank has 20 elements. Its cut is
    Cut(start=0, stop=240, chunk=80, lead=80, owner=0).
    """
    source = entry.source
    item_bytes = entry.dtype.itemsize
    numel = prod(entry.shape)
    if source is None or source.sharding.is_opaque or not numel:
        return GATHERED
    stop = start + numel * item_bytes
    sharding = source.sharding
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
    run_start = start
    for run in runs:
        run_stop = run_start + run.numel * item_bytes
        cuts.append(
            Cut(
                start=run_start,
                stop=run_stop,
                chunk=run.chunk * item_bytes,
                lead=run.lead * item_bytes,
                owner=run.owner,
            )
        )
        run_start = run_stop

    return tuple(cuts)
