"""Writes the tensors of a save into its files, as its write plan says."""

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
from ft_ckpt.saving.regions import Gathering, SourceView, file_turns, write_own_bytes
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
    """The files of a save that one rank has written."""

    writes: WritePlan  # of the files that were not reused
    facts: Mapping[str, Any]  # for `written_records` on rank 0
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
    # The caller has gathered a state dict on rank 0, which writes it alone: the other ranks may
    # have been passed {} or None.
    if agreed.has_state_dict and not context.ranks.is_main:
        return WrittenFiles(writes, {}, reused)
    target = agreed.plan.request.target
    store = staged.store
    if store is None:
        store = store_of_rank(agreed.staging_folder, target, context.config)
    writes = writes.without(frozenset(reused.digests))
    with explained(target):
        writes = _fit_to_folder(writes, agreed.staging_folder, target, context)
        facts = write_tensors(writes, sources, store, target, context.ranks, context.config)
    return WrittenFiles(writes, facts, reused)


def _fit_to_folder(
    writes: WritePlan, staging_folder: str | None, target: Place, context: SaveContext
) -> WritePlan:
    """Limit the plan to how the ranks may share files in the folder of the target.

    `staging_folder` is rank 0's, None in a bucket. Collective: call it on every rank.
    """
    if writes.mode is Mode.MAIN:
        return writes
    folder: Store = target.beside
    probed: LocalStore | None = None
    if staging_folder is not None:
        probed = LocalStore(Path(staging_folder))
        folder = LocalStore(probed.folder.parent)
    sharing = context.shared.sharing_of(folder, context.ranks, probed)
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

    Returns the facts, as JSON, that `written_records` needs from each rank. Collective: call it on
    every rank. Raises IncompleteError for tensors that the model's config ties and that differ, and
    for NaN or infinity if `nonfinite="raise"`.
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
                return {"digests": _write_shares(writes, sources, store, writer, ranks)}
        with WriterPool(tuning, None if store.local_folder is None else total, advance) as writer:
            records = _write_whole_files(
                writes, sources, store, writer, ranks, config.nonfinite == "raise"
            )
        return {"files": [asdict(record) for record in records]}


def written_records(writes: WritePlan, written: Values) -> list[FileRecord]:
    """Make the records of all files, on rank 0, from the facts of `write_tensors` on each rank."""
    if writes.mode is Mode.SHARED:
        digests_by_file = zip(*(value["digests"] for value in written), strict=True)
        pairs = zip(writes.files, digests_by_file, strict=True)
        return [file.record(digests) for file, digests in pairs]
    by_path = {}
    for value in written:
        for file in value.get("files", ()):
            by_path[file["path"]] = as_record(file, FileRecord)
    return [by_path[file.file.path] for file in writes.files]


def store_of_rank(staging_folder: str | None, target: Place, config: SaverConfig) -> Store:
    """Return the store into which a rank other than 0 writes.

    This is rank 0's `staging_folder`, or the bucket of `target` if that is None.
    """
    if staging_folder is not None:
        return stage_store(Path(staging_folder), saver_tuning(config).direct_bytes)
    return target.folder


def _allocate_files(writes: WritePlan, store: Store, ranks: Ranks) -> None:
    """Reserve the space of all files on rank 0; other ranks wait if `writes.opens_created`."""

    def allocate() -> None:
        if ranks.is_main:
            for file in writes.files:
                store.allocate(file.file.path, file.file.layout.size_bytes)

    if writes.opens_created:
        ranks.run("the space of save()", allocate)
    else:
        allocate()


def _write_shares(
    writes: WritePlan, sources: SourceView, store: Store, writer: WriterPool, ranks: Ranks
) -> list[str]:
    """Write the bytes that this rank holds, and return one digest for each file."""
    return [write_own_bytes(file, store, writer, ranks, sources) for file in writes.files]


def _write_whole_files(
    writes: WritePlan,
    sources: SourceView,
    store: Store,
    writer: WriterPool,
    ranks: Ranks,
    finite: bool,
) -> list[FileRecord]:
    """Write each file on one rank, which gathers its tensors; return this rank's records.

    If `finite`, raises IncompleteError for NaN or infinity.
    """
    open_file = partial(_open_for_writing, store, writes.mode)
    nonfinite: set[str] | None = set() if finite else None
    gathering = Gathering(ranks, sources, nonfinite=nonfinite)
    regions = _gathered_regions(writes.files, gathering)
    of_rank = [file for file in writes.files if file.writer == ranks.rank]
    records = _write_in_order(of_rank, regions, writer, open_file)
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

    Between two regions this rank sends tensors to other writers. The writers take turns, one bucket
    each, so that all of them are busy.
    """

    def turns_to(rank: int) -> Iterator[tuple[str, Iterator[Region]]]:
        for file in files:
            if file.writer == rank:
                for turn in file_turns(file, replace(gathering, to=rank)):
                    yield file.file.path, turn

    writers = {file.writer for file in files}
    queues = [turns_to(rank) for rank in sorted(writers)]
    while queues:
        for queue in tuple(queues):
            path, turn = next(queue, ("", None))
            if turn is None:
                queues.remove(queue)
                continue
            for region in turn:
                yield path, region


def _open_for_writing(store: Store, mode: Mode, file: FilePlan) -> Writable:
    """Open a planned file for its one writer.

    In `Mode.SPREAD` on a disk, rank 0 has already created the file with its size, so that the file
    system client of rank 0 knows the names and sizes of what rank 0 commits. In `Mode.MAIN` the
    writer is rank 0, which creates the file here.
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
    """Write files from their regions, which come file by file; all regions are consumed."""
    records = []
    groups = groupby(regions, key=itemgetter(0))
    path, group = next(groups, ("", None))
    for file in files:
        writable = open_file(file.file)
        if group is None or path != file.file.path:  # the file has no bytes of tensors
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
