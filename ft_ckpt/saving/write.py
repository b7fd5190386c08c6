"""Writes the tensors of a save into its files: by every rank, by one rank per file, or by rank 0 after a gather.

Where all ranks see one disk, each writes the elements it holds into each file. Where they see one bucket, each file has
one writer, which gathers its tensors. Otherwise rank 0 writes all files.
"""

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint import prune, staging
from ft_ckpt.checkpoint.staging import Staging, stage_store
from ft_ckpt.config import SaverConfig
from ft_ckpt.distributed.agreement import Values
from ft_ckpt.distributed.gather import are_equal
from ft_ckpt.distributed.ranks import Ranks, try_action
from ft_ckpt.distributed.source import Source
from ft_ckpt.errors import CorruptError, IncompleteError, listing
from ft_ckpt.formats.file_io import FilePlan, write_file
from ft_ckpt.formats.registry import format_named
from ft_ckpt.saving import files, reuse_frozen
from ft_ckpt.saving.files import GatherWay, PartPlan, file_turns
from ft_ckpt.saving.plan import SavePlan, SaveRequest, check_configs
from ft_ckpt.saving.reuse_frozen import Offer
from ft_ckpt.schema import as_record
from ft_ckpt.storage.digests import FileRecord, chunk_of_rank, record_of
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.progress import track_bytes
from ft_ckpt.storage.read_ahead import BLOCK_BYTES
from ft_ckpt.storage.store import Store
from ft_ckpt.storage.writer import Region, Writer, WriteTuning, tuning_for

_MANIFEST_BYTES = 16 << 20  # reserved in the check of free space


@dataclass(frozen=True, eq=False)
class StagedSave:
    """A planned save; on rank 0 with a staging that holds everything except the weights."""

    plan: SavePlan
    staging: Staging | None = None
    files: tuple[FileRecord, ...] = ()  # already written
    offers: Mapping[str, Offer] = field(default_factory=dict)  # earlier files that frozen ones may equal, by path
    notes: tuple[str, ...] = ()  # on what transformers would not load


def prepare_stage(
    request: SaveRequest, plan: SavePlan, ranks: Ranks, config: SaverConfig, tries: int, changed: frozenset[str]
) -> StagedSave:
    """On rank 0 open a staging and write everything except weights into it.

    It also gets the frozen files of earlier checkpoints, except those known to have `changed`. Raises CompanionError
    for a model that its config does not describe.
    """
    if not ranks.is_main:
        return StagedSave(plan)
    contents = sorted(plan.companions.contents().items())
    notes = check_configs(plan, request)
    opened = staging.open_staging_at(
        request.target,
        saver_tuning(config).direct_bytes,
        run_id=request.run_id,
        overwrite=config.overwrite,
        max_mode=request.max_mode,
    )
    try:
        offers: dict[str, Offer] = {}  # none with nonfinite="raise", which reads the values of all tensors
        if config.reuse_frozen != "off" and config.nonfinite != "raise" and request.state_dict is None:
            shares = reuse_frozen.frozen_shares(plan.plans, ranks.size)
            shares = [share for share in shares if share.file.path not in changed]
            offers = reuse_frozen.link_candidates(shares, opened, ranks, config.each_rank_writes != "on")
        files = [file for one in plan.plans for file in one.files]
        total = sum(file.layout.size_bytes for file in files if file.path not in offers)
        prune.ensure_space(
            request.target,
            total + sum(len(content) for _, content in contents) + _MANIFEST_BYTES,
            config,
            step=request.step,
            run_id=request.run_id,
            protect=request.protect,
            tries=tries,
        )
        for path, content in contents:
            opened.store.write(path, content)
        records = tuple(record_of(path, content) for path, content in contents)
        return StagedSave(plan, opened, records, offers, notes)
    except BaseException:
        opened.discard()
        raise


def saver_tuning(config: SaverConfig) -> WriteTuning:
    return tuning_for(config.io_threads, config.direct_io, BLOCK_BYTES, config.digest == "sha256")


_PROBE = ".ft_ckpt-probe"


class SharedFolders:
    """Cache of which folders are visible to every rank; cleared after a failed save."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = {}

    def is_seen_by_all(self, folder: Store, ranks: Ranks, probed: Store | None = None) -> bool:
        """Whether all ranks see files that rank 0 creates in `folder`. Collective.

        The probe file is created there, or in `probed` below it.
        """
        if folder.url not in self._known:
            self._known[folder.url] = ranks.size == 1 or all_ranks_see(probed or folder, ranks)
        return self._known[folder.url]

    def forget(self) -> None:
        self._known.clear()


@dataclass(eq=False)
class SaveJob:
    """A save that all ranks have agreed on."""

    request: SaveRequest
    plan: SavePlan
    staging: Staging | None  # on rank 0
    stage: str | None  # rank 0's staging folder; None if it is not on a disk
    offers: Mapping[str, Offer]  # of rank 0: earlier files that frozen ones may equal, by path
    state_dict: bool  # whether rank 0 was given one
    ranks: Ranks
    config: SaverConfig
    shared: SharedFolders
    companions: tuple[FileRecord, ...] = ()  # on rank 0: the files in the stage that hold no tensors
    notes: tuple[str, ...] = ()  # of the stage
    taken: dict[str, str] = field(default_factory=dict)  # digests of the earlier files that are reused, by path
    linked: list[FileRecord] = field(default_factory=list)  # on rank 0: their records
    shares: list[files.Share] | None = None  # of files between ranks; None: each file has one writer

    @property
    def unlinked_plans(self) -> tuple[PartPlan, ...]:
        """The plans of the files that are not reused."""
        plans = self.plan.plans
        return tuple(replace(one, files=tuple(f for f in one.files if f.path not in self.taken)) for one in plans)


def write_tensors(job: SaveJob) -> dict[str, Any]:
    """Move and write the tensors. Collective. Returns the records of this rank's files or its digests, as JSON.

    Raises IncompleteError for tensors that the model's config ties and that differ.
    """
    untied = [pair for pair in job.plan.ties_to_check if not are_equal(*pair, job.ranks)]
    job.linked = _link_frozen_files(job)
    job.shares = _divide_between_ranks(job)
    if job.shares is None:
        return {"files": [asdict(record) for record in _write_whole_files(job, untied)]}
    return {"digests": _write_on_all_ranks(job, job.shares, untied)}


def written_files(job: SaveJob, written: Values) -> list[FileRecord]:
    """On rank 0: the records of all files, from the result of `write_tensors` on each rank."""
    if job.shares is not None:
        parts = zip(*(value["digests"] for value in written), strict=True)
        records = [files.file_record(share, digests) for share, digests in zip(job.shares, parts, strict=True)]
    else:
        by_path = {}
        for value in written:
            for file in value.get("files", ()):
                by_path[file["path"]] = as_record(file, FileRecord)
        records = [by_path[file.path] for one in job.unlinked_plans for file in one.files]
    return [*job.linked, *records]


def _link_frozen_files(job: SaveJob) -> list[FileRecord]:
    """Find earlier files that equal frozen ones and on rank 0 link them; return their records. Collective."""
    offers, staging = job.offers, job.staging
    if not offers:
        return []
    shares = reuse_frozen.frozen_shares(job.plan.plans, job.ranks.size)
    job.taken.update(reuse_frozen.equal_files(shares, offers, job.ranks))
    return [] if staging is None else reuse_frozen.place_equal_files(shares, job.taken, staging.store)


def _write_whole_files(job: SaveJob, untied: list[tuple[Source, Source]]) -> list[FileRecord]:
    """Write each file on one rank, which gathers its tensors; return the records of this rank's files.

    Raises IncompleteError on NaN or infinity if `nonfinite="raise"`.
    """
    ranks, config, writers = job.ranks, job.config, _choose_writers(job)
    files = [(one, file) for one in job.unlinked_plans for file in one.files]
    mine = [file for _, file in files if writers[file.path] == ranks.rank]
    nonfinite: set[str] | None = set() if config.nonfinite == "raise" else None
    way = GatherWay(job.ranks, nonfinite=nonfinite)
    store = job.request.target.folder if job.staging is None else job.staging.store
    if ranks.is_main:
        _refuse_untied(untied)
    regions = _regions_here(files, writers, way)
    total = sum(file.layout.size_bytes for file in mine)
    few = total if isinstance(store, LocalStore) else None
    with _track_writes(job, total) as advance, Writer(saver_tuning(config), few, advance) as writer:
        written = list(_write_own_files(mine, regions, lambda file, own: write_file(file, own, store, writer)))
    if nonfinite:
        raise IncompleteError(
            f"{listing(sorted(nonfinite), ', ')}: NaN or infinity in {len(nonfinite)} tensor(s), and "
            "nonfinite='raise'; nothing is committed, the earlier checkpoint is untouched"
        )
    return written


def _track_writes(job: SaveJob, own_bytes: int) -> AbstractContextManager[Callable[[int], None]]:
    """A bar on rank 0's terminal, of the bytes that rank 0 writes; none for a save in the background."""
    return track_bytes(own_bytes if job.ranks.shows else 0, f"saving {job.request.target.basename}")


def _choose_writers(job: SaveJob) -> dict[str, int]:
    """The rank that writes each file, by path: rank 0, or several ranks where all see one bucket and it pays."""
    config, target = job.config, job.request.target
    planned = [file for one in job.plan.plans for file in one.files]
    size = sum(file.layout.size_bytes for file in planned)
    alone = config.each_rank_writes == "off" or isinstance(target.folder, LocalStore)
    alone = alone or (config.each_rank_writes == "auto" and size < files.LEAST_BYTES)
    alone = alone or job.state_dict or not job.plan.is_spread
    writers = dict(zip((f.path for f in planned), files.assign_writers(planned, job.ranks.size), strict=True))
    if alone or not any(writers.values()) or not job.shared.is_seen_by_all(target.beside, job.ranks):
        return dict.fromkeys(writers, 0)
    return writers


def _regions_here(
    files: Sequence[tuple[PartPlan, FilePlan]], writers: Mapping[str, int], way: GatherWay
) -> Iterator[tuple[str, Region]]:
    """The regions of the files that this rank writes, with their paths; in between it sends tensors to other writers.

    Writers take turns, one bucket each, so that all of them are busy.
    """

    def turns_to(rank: int) -> Iterator[tuple[str, Iterator[Region]]]:
        for one, file in files:
            if writers[file.path] == rank:
                yield from ((file.path, turn) for turn in file_turns(one, file, replace(way, to=rank)))

    queues = [turns_to(rank) for rank in sorted({writers[file.path] for _, file in files})]
    while queues:
        for queue in tuple(queues):
            path, turn = next(queue, ("", None))
            if turn is None:
                queues.remove(queue)
            else:
                yield from ((path, region) for region in turn)


def _write_own_files(
    mine: Sequence[FilePlan],
    regions: Iterator[tuple[str, Region]],
    write: Callable[[FilePlan, Iterator[Region]], FileRecord],
) -> Iterator[FileRecord]:
    """Write files from their regions, which arrive file by file; all regions are consumed."""
    groups = groupby(regions, key=itemgetter(0))
    path, group = next(groups, ("", None))
    for file in mine:
        if group is None or path != file.path:  # it holds no tensor bytes
            yield write(file, iter(()))
            continue
        yield write(file, (region for _, region in group))
        path, group = next(groups, ("", None))


def _divide_between_ranks(job: SaveJob) -> list[files.Share] | None:
    """The division of files between ranks, if it pays and all see the stage; None: one writer per file. Collective."""
    config = job.config
    plain = all(format_named(one.format).is_plain for one in job.plan.plans) and config.compression is None
    if job.ranks.size == 1 or config.each_rank_writes == "off" or not plain or config.nonfinite == "raise":
        return None
    stage = job.stage
    if stage is None or job.state_dict:
        return None
    shares = files.divide_files(job.unlinked_plans, job.ranks.size)
    own_bytes = sum(cut.stop - cut.start for share in shares for cut in share.actual_cuts)
    if config.each_rank_writes == "auto" and own_bytes < files.LEAST_BYTES:
        return None
    probed = LocalStore(Path(stage))
    return shares if job.shared.is_seen_by_all(LocalStore(probed.folder.parent), job.ranks, probed=probed) else None


def all_ranks_see(store: Store, ranks: Ranks) -> bool:
    """Whether all ranks see files that rank 0 creates in `store`, tested with a probe file. Collective.

    Raises the error of rank 0 on all ranks if it cannot write there.
    """
    token = uuid.uuid4().hex
    name = f"{_PROBE}-{token}"
    _, error = try_action(lambda: store.write(name, token.encode()) if ranks.is_main else None)
    probe = ranks.agree("the files of save()", {"folder": store.url, "name": name, "token": token}, error).result
    there = LocalStore(Path(probe["folder"])) if isinstance(store, LocalStore) else store

    def look() -> dict[str, bool]:
        try:
            return {"sees": there.read(probe["name"]) == probe["token"].encode()}
        except CorruptError:  # absent, or another file
            return {"sees": False}

    seen, error = try_action(look)
    try:
        all_see = ranks.agree(
            "the look at the files of save()", seen, error, decide=lambda views: all(v["sees"] for v in views)
        )
    finally:
        if ranks.is_main:
            store.delete([name])
    return bool(all_see.result)


def _write_on_all_ranks(job: SaveJob, shares: list[files.Share], untied: list[tuple[Source, Source]]) -> list[str]:
    """Write the bytes that this rank holds; return their digests, one for each file."""
    ranks, tuning = job.ranks, saver_tuning(job.config)
    store = stage_store(Path(str(job.stage)), tuning.direct_bytes)
    _refuse_untied(untied)
    if ranks.is_main:  # reserves the space of all files before a byte is written
        for share in shares:
            store.allocate(share.file.path, share.file.layout.size_bytes)
    own_bytes = sum(share.file.layout.size_bytes for share in shares)  # of rank 0, which writes what is in no cut
    for cut in (cut for share in shares for cut in share.actual_cuts):
        start, stop = chunk_of_rank(cut, 0) or (0, 0)
        own_bytes -= cut.stop - cut.start - (stop - start)
    with _track_writes(job, own_bytes) as advance, Writer(tuning, advance=advance) as writer:
        return [files.write_own_bytes(share, store, ranks, writer) for share in shares]


def _refuse_untied(pairs: list[tuple[Source, Source]]) -> None:
    if pairs:
        names = ", ".join(f"{one.name} and {other.name}" for one, other in pairs)
        raise IncompleteError(
            f"{names}: the model's config ties them, but their values differ; call model.tie_weights(), or set "
            "config.tie_word_embeddings=False to keep both"
        )
