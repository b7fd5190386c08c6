"""Writes the tensors of a save into its files, as its write plan says.

The plan has one of three modes (`Mode`). With `SHARED`, each rank writes the elements that it holds
into every file. With `SPREAD`, each file has one writer, and with `MAIN` rank 0 writes all files; a
writer gathers the tensors of its files from the other ranks, one bucket at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.commit import stage_store
from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import IncompleteError, explained, listing
from ft_ckpt.formats import FilePlan, write_file
from ft_ckpt.progress_bars import track_bytes
from ft_ckpt.ranks import Ranks, Values
from ft_ckpt.ranks.moving import are_equal
from ft_ckpt.saving.agree import AgreedSave
from ft_ckpt.saving.context import SaveContext
from ft_ckpt.saving.planning import FileWrites, Mode, WritePlan
from ft_ckpt.saving.regions import Gathering, SourceView, file_buckets, write_own_bytes
from ft_ckpt.saving.reuse_frozen import ReusedFiles
from ft_ckpt.saving.stage import StagedSave, saver_tuning
from ft_ckpt.schema import as_record
from ft_ckpt.storage import Store, Writable
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.io import Region, WriterPool
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place


@dataclass(frozen=True, eq=False)
class WrittenFiles:
    """The files of a save that one rank has written.

    Attributes:
        writes: The plan of these files.
        to_exchange: What rank 0 needs from this rank to make the records of the files, as JSON; see
            `written_records`.
        reused: The files that were not written, because an earlier checkpoint has them.
    """

    writes: WritePlan
    to_exchange: Mapping[str, Any]
    reused: ReusedFiles


def write_files(
    writes: WritePlan,
    reused: ReusedFiles,
    sources: SourceView,
    staged: StagedSave,
    agreed: AgreedSave,
    context: SaveContext,
) -> WrittenFiles:
    """Write all files that are not reused.

    Collective: call it on every rank. Raises what `write_tensors` raises.
    """
    # The caller has gathered a state dict on rank 0, and may have passed {} or None on the other
    # ranks. So rank 0 writes it alone.
    if agreed.has_state_dict and not context.ranks.is_main:
        return WrittenFiles(writes, {}, reused)
    target = agreed.plan.request.target
    store = staged.store
    if store is None:
        store = store_of_rank(agreed.staging_folder, target, context.config)
    writes = writes.without(frozenset(reused.digests))
    with explained(target):
        writes = _fit_to_folder(writes, agreed.staging_folder, target, context)
        to_exchange = write_tensors(writes, sources, store, target, context.ranks, context.config)
    return WrittenFiles(writes, to_exchange, reused)


def _fit_to_folder(
    writes: WritePlan, staging_folder: str | None, target: Place, context: SaveContext
) -> WritePlan:
    """Limit the plan to what the file system of the target allows.

    For example, a file on NFS must have one writer. `staging_folder` is the staging folder of rank
    0, None in a bucket. Collective: call it on every rank.
    """
    if writes.mode is Mode.MAIN:
        return writes
    folder: Store = target.beside
    trial_folder: LocalStore | None = None
    if staging_folder is not None:
        trial_folder = LocalStore(Path(staging_folder))
        folder = LocalStore(trial_folder.folder.parent)
    sharing = context.shared_folders.sharing_of(folder, context.ranks, trial_folder)
    return writes.in_folder(sharing.mode, sharing.clients)


def write_tensors(
    writes: WritePlan,
    sources: SourceView,
    store: Store,
    target: Place,
    ranks: Ranks,
    config: SaverConfig,
) -> dict[str, Any]:
    """Move the tensors to their writers, and write them into `store`.

    Returns what `written_records` needs from this rank, as JSON: the digests of what it has written
    into each file, or the records of its own files. Collective: call it on every rank. Raises
    IncompleteError for tensors that the model's config ties and that differ, and for NaN or
    infinity if `nonfinite="raise"`.
    """
    _refuse_differing_ties(writes, sources, ranks)
    if writes.mode is not Mode.MAIN:
        _allocate_files(writes, store, ranks)
    total = writes.bytes_of(ranks.rank)
    tuning = saver_tuning(config)

    # The bar on rank 0's terminal counts the bytes that rank 0 writes. A save in the background
    # shows none.
    with track_bytes(total if ranks.shows else 0, f"saving {target.basename}") as advance:
        if writes.mode is Mode.SHARED:
            with WriterPool(tuning, advance=advance) as writer:
                digests = []
                for file in writes.files:
                    digests.append(write_own_bytes(file, store, writer, ranks, sources))
            return {"digests": digests}
        local_bytes = None if store.local_folder is None else total
        with WriterPool(tuning, local_bytes, advance) as writer:
            records = _write_whole_files(
                writes, sources, store, writer, ranks, config.nonfinite == "raise"
            )
        return {"files": [asdict(record) for record in records]}


def written_records(writes: WritePlan, written: Values) -> list[FileRecord]:
    """Make the records of all files, on rank 0.

    `written` has the result of `write_tensors` on each rank.
    """
    if writes.mode is Mode.SHARED:
        digests_by_file = zip(*(value["digests"] for value in written), strict=True)
        pairs = zip(writes.files, digests_by_file, strict=True)
        return [file.record(digests) for file, digests in pairs]
    records_by_path = {}
    for value in written:
        for fields in value.get("files", ()):
            records_by_path[fields["path"]] = as_record(fields, FileRecord)
    return [records_by_path[file.file.path] for file in writes.files]


def store_of_rank(staging_folder: str | None, target: Place, config: SaverConfig) -> Store:
    """Return the store into which a rank other than 0 writes.

    This is the `staging_folder` of rank 0. If that is None, it is the bucket of `target`.
    """
    if staging_folder is not None:
        return stage_store(Path(staging_folder), saver_tuning(config).direct_bytes)
    return target.folder


def _allocate_files(writes: WritePlan, store: Store, ranks: Ranks) -> None:
    """Create all files with their sizes, on rank 0.

    If `writes.opens_created`, the other ranks wait until rank 0 has created all files. Then it is
    collective.
    """

    def allocate() -> None:
        if ranks.is_main:
            for file in writes.files:
                store.allocate(file.file.path, file.file.layout.size_bytes)

    if writes.opens_created:
        ranks.run("the space of save()", allocate)
    else:
        allocate()


def _write_whole_files(
    writes: WritePlan,
    sources: SourceView,
    store: Store,
    writer: WriterPool,
    ranks: Ranks,
    checks_finite: bool,
) -> list[FileRecord]:
    """Write each file on one rank, which gathers its tensors; return the records of this rank.

    If `checks_finite`, raises IncompleteError for NaN or infinity.
    """
    open_file = partial(_open_for_writing, store, writes.mode)
    nonfinite: set[str] | None = set() if checks_finite else None
    gathering = Gathering(ranks, sources, nonfinite=nonfinite)
    regions = _gathered_regions(writes.files, gathering)
    own_files = [file for file in writes.files if file.writer == ranks.rank]
    records = _write_in_order(own_files, regions, writer, open_file)
    if nonfinite:
        raise IncompleteError(
            f"{listing(sorted(nonfinite), ', ')}: NaN or infinity in {len(nonfinite)} tensor(s), "
            "and nonfinite='raise'; nothing is committed, the earlier checkpoint is untouched"
        )
    return records


def _gathered_regions(
    files: Sequence[FileWrites], gathering: Gathering
) -> Iterator[tuple[str, Region]]:
    """Yield the regions of the files that this rank writes, each with the path of its file.

    A region is a piece of a file in host memory. The buckets of the writers alternate: one bucket
    moves to the first writer, one to the second, and so on, then the next bucket to the first. So
    all writers are busy. Between two regions this rank sends its elements to other writers.
    """

    def buckets_to(writer: int) -> Iterator[tuple[str, Iterator[Region]]]:
        for file in files:
            if file.writer == writer:
                for regions_of_bucket in file_buckets(file, replace(gathering, to=writer)):
                    yield file.file.path, regions_of_bucket

    writers = {file.writer for file in files}
    queues = [buckets_to(writer) for writer in sorted(writers)]
    while queues:
        for queue in tuple(queues):
            path, regions_of_bucket = next(queue, ("", None))
            if regions_of_bucket is None:
                queues.remove(queue)
                continue
            for region in regions_of_bucket:
                yield path, region


def _open_for_writing(store: Store, mode: Mode, file: FilePlan) -> Writable:
    """Open a planned file for its one writer.

    In `Mode.SPREAD` on a disk, rank 0 has already created the file with its size. So the file
    system client of rank 0 knows the names and sizes of the files that rank 0 commits. In
    `Mode.MAIN` the writer is rank 0, which creates the file here.
    """
    size_bytes = file.layout.size_bytes
    if mode is Mode.SPREAD:
        return store.share(file.path, size_bytes)
    return store.create(file.path, size_bytes)


def _write_in_order(
    files: Sequence[FileWrites],
    regions: Iterator[tuple[str, Region]],
    writer: WriterPool,
    open_file: Callable[[FilePlan], Writable],
) -> list[FileRecord]:
    """Write `files` in order, from their `regions` in the same order.

    Each region comes with the path of its file. A file without tensor bytes has no regions. All
    regions are consumed.
    """
    records = []
    groups = groupby(regions, key=itemgetter(0))
    path, group = next(groups, ("", None))
    for file in files:
        writable = open_file(file.file)
        if group is None or path != file.file.path:  # this file has no regions
            records.append(write_file(file.file, iter(()), writable, writer))
            continue
        records.append(write_file(file.file, (region for _, region in group), writable, writer))
        path, group = next(groups, ("", None))
    return records


def _refuse_differing_ties(writes: WritePlan, sources: SourceView, ranks: Ranks) -> None:
    """Raise IncompleteError on rank 0 for tensors that the config ties and whose bits differ.

    Collective: call it on every rank.
    """
    differing = []
    for first, second in writes.ties:
        if not are_equal(sources(first), sources(second), ranks):
            differing.append(f"{first.name} and {second.name}")
    if differing:
        raise IncompleteError(
            f"{', '.join(differing)}: the model's config ties them, but their values differ; call "
            "model.tie_weights(), or set config.tie_word_embeddings=False to keep both"
        )
