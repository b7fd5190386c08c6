"""One save from the request to the commit, in steps that every caller takes: plan and stage, agree,
write, commit.

All ranks agree before a tensor moves and at the commit. The call of a background save plans it, and
agrees once more.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ft_ckpt.checkpoint import Manifest, stored_bytes
from ft_ckpt.config import SaverConfig, human_size
from ft_ckpt.errors import NoSpaceError, explained
from ft_ckpt.extensions.tools import compress_file
from ft_ckpt.formats import format_named, link_second_names
from ft_ckpt.messages import LOG
from ft_ckpt.model import kind_of
from ft_ckpt.ranks import Ranks, Values
from ft_ckpt.saving import replicas
from ft_ckpt.saving.agree import AgreedSave, agree_on_plan
from ft_ckpt.saving.files import check_written_files
from ft_ckpt.saving.plan import SavePlan, plan_save
from ft_ckpt.saving.regions import SourceView, live
from ft_ckpt.saving.report import SaveReport
from ft_ckpt.saving.request import SaveRequest
from ft_ckpt.saving.reuse_frozen import equal_files, frozen_files, place_equal_files
from ft_ckpt.saving.save_manifest import manifest_of
from ft_ckpt.saving.shared_folders import SharedFolders
from ft_ckpt.saving.stage import StagedSave, prepare_stage
from ft_ckpt.saving.write import store_of_rank, where_all_see, write_tensors, written_records
from ft_ckpt.saving.write_plan import WritePlan, plan_writes
from ft_ckpt.storage import FileRecord, Place, Store, local_folder, read_record


@dataclass(frozen=True, eq=False)
class PreparedSave:
    """What the call of a background save has done: the plan, and with a snapshot who writes it and
    its copies.
    """

    plan: SavePlan
    writes: WritePlan | None = None  # None: not all ranks could take a snapshot
    sources: SourceView = live


@dataclass(frozen=True, eq=False)
class SaveJob:
    """A save that all ranks have agreed on."""

    request: SaveRequest
    staged: StagedSave
    agreed: AgreedSave
    writes: WritePlan
    sources: SourceView
    ranks: Ranks
    config: SaverConfig

    @property
    def store(self) -> Store:
        """Where this rank writes."""
        staging = self.staged.staging
        if staging is not None:
            return staging.store
        return store_of_rank(self.agreed.stage, self.request.target, self.config)


@dataclass(frozen=True, eq=False)
class Attempt:
    """What one try of a save begins with."""

    request: SaveRequest | None
    error: BaseException | None = None  # that prevented the request
    prepared: PreparedSave | None = None
    tries: int = 0  # that ended with a full disk
    # frozen files that no earlier checkpoint has, as these tries found
    changed: frozenset[str] = frozenset()


def run_save(
    request: SaveRequest | None,
    error: BaseException | None,
    ranks: Ranks,
    config: SaverConfig,
    begun: float,
    prepared: PreparedSave | None,
    shared: SharedFolders,
) -> SaveReport:
    """Carry out `request`, or report to the other ranks the `error` that prevented it. Collective.

    `begun` is the time of the call, by `time.monotonic`; `prepared` what was done before; `shared`
    caches which folders all ranks see. Raises what `CheckpointSaver.save` raises.
    """
    outcome = _try_save(Attempt(request, error, prepared), ranks, config, begun, shared)
    while isinstance(outcome, Attempt):
        outcome = _try_save(outcome, ranks, config, begun, shared)
    return outcome


def _try_save(
    attempt: Attempt, ranks: Ranks, config: SaverConfig, begun: float, shared: SharedFolders
) -> SaveReport | Attempt:
    """One try of a save: its report, or the try that has to follow. Collective."""
    staged, error = _plan_and_stage(attempt, ranks, config)
    try:
        # Everything that can be refused is refused here, before a tensor moves: later, ranks depend
        # on each other.
        agreed = agree_on_plan("save()", attempt.request, staged, error, ranks, config)
        assert staged is not None, "the agreement has raised the error"
        if agreed.replicas_differ:
            return replace(attempt, request=agreed.request, prepared=None)
        job = _make_job(staged, agreed, attempt.prepared, ranks, config)
        reused, error = _reuse_files(job)
        written, error = _write_files(job, reused, shared, error)
        report = _commit_on_all(job, written, error, begun)
        if report is not None:
            return report
        # The disk is full, and the settings say to try again.
        changed = attempt.changed | (agreed.offers.keys() - reused.digests.keys())
        prepared = attempt.prepared or PreparedSave(staged.plan)
        return Attempt(agreed.request, None, prepared, attempt.tries + 1, changed)
    except BaseException:
        shared.forget()
        raise
    finally:
        if staged is not None and staged.staging is not None:
            staged.staging.discard()


def _plan_and_stage(
    attempt: Attempt, ranks: Ranks, config: SaverConfig
) -> tuple[StagedSave | None, BaseException | None]:
    """Plan the save unless it is planned, and open the stage on rank 0.

    Errors are returned for the next agreement.
    """
    request, prepared = attempt.request, attempt.prepared
    if request is None or attempt.error is not None:
        return None, attempt.error

    def stage() -> StagedSave:
        plan = plan_save(request, ranks, config) if prepared is None else prepared.plan
        is_snapshot = prepared is not None and prepared.writes is not None
        return prepare_stage(
            request, plan, ranks, config, attempt.tries, attempt.changed, may_gather=not is_snapshot
        )

    return ranks.attempt(explained(request.target)(stage))


def _make_job(
    staged: StagedSave,
    agreed: AgreedSave,
    prepared: PreparedSave | None,
    ranks: Ranks,
    config: SaverConfig,
) -> SaveJob:
    request = agreed.request
    writes = None if prepared is None else prepared.writes
    if writes is None:
        writes = plan_writes(
            staged.plan, request.target, config, ranks.size, state_dict=agreed.state_dict
        )
    sources = live if prepared is None else prepared.sources
    return SaveJob(request, staged, agreed, writes, sources, ranks, config)


@dataclass(frozen=True, eq=False)
class ReusedFiles:
    """The frozen files that an earlier checkpoint has."""

    digests: Mapping[str, str] = field(default_factory=dict)  # by path
    records: Sequence[FileRecord] = ()  # on rank 0, which has linked them


def _reuse_files(job: SaveJob) -> tuple[ReusedFiles, BaseException | None]:
    """Link the frozen files that equal earlier ones. Collective, if there are any to compare."""
    offers, staging = job.agreed.offers, job.staged.staging

    def reuse() -> ReusedFiles:
        frozen = frozen_files(job.staged.plan.plans, job.ranks.size)
        equal = equal_files(frozen, offers, job.ranks, job.sources)
        records = [] if staging is None else place_equal_files(frozen, equal, staging.store)
        return ReusedFiles(equal, records)

    if not offers:
        return ReusedFiles(), None
    reused, error = job.ranks.attempt(explained(job.request.target)(reuse))
    return reused or ReusedFiles(), error


@dataclass(frozen=True, eq=False)
class WrittenFiles:
    """The files of a save on one rank."""

    writes: WritePlan  # of those that were written
    facts: Mapping[str, Any]  # for `written_records` on rank 0
    linked: Sequence[FileRecord] = ()  # on rank 0: the records of those that were reused


def _write_files(
    job: SaveJob, reused: ReusedFiles, shared: SharedFolders, error: BaseException | None
) -> tuple[WrittenFiles | None, BaseException | None]:
    """Write all files that are not reused. Collective. Does nothing after an `error`."""
    target, ranks = job.request.target, job.ranks
    if error is not None:
        return None, error
    # a gather that made the dict leaves other ranks with {} or None
    if job.agreed.state_dict and not ranks.is_main:
        return WrittenFiles(job.writes, {}), None

    def write() -> WrittenFiles:
        writes = job.writes.without(frozenset(reused.digests))
        writes = where_all_see(writes, job.agreed.stage, target, shared, ranks)
        facts = write_tensors(writes, job.sources, job.store, target, ranks, job.config)
        return WrittenFiles(writes, facts, reused.records)

    return ranks.attempt(explained(target)(write))


def _commit_on_all(
    job: SaveJob, written: WrittenFiles | None, error: BaseException | None, begun: float
) -> SaveReport | None:
    """Compare the written files with the model and commit.

    Returns the report; None if the disk is full. Collective.

    A full disk is an error unless the settings say to make room and try again.
    """
    request, ranks, retries = job.request, job.ranks, job.config.when_full != "raise"
    is_full = retries and isinstance(error, NoSpaceError)

    def commit(values: Values) -> dict[str, Any] | None:
        if any(value["full"] for value in values):
            return None
        assert written is not None, "the agreement has raised the error"
        files = [*written.linked, *written_records(written.writes, values)]
        try:
            return explained(request.target)(lambda: _commit_files(job, files))()
        except NoSpaceError:
            if retries:
                return None
            raise

    facts = {"full": is_full, **(written.facts if written is not None else {})}
    saved = ranks.agree(
        "the commit of save()", facts, None if is_full else error, decide=commit
    ).result
    if saved is None:
        return None
    report = SaveReport(
        request.target.location,
        **{**saved, "notes": tuple(saved["notes"])},
        seconds=time.monotonic() - begun,
        target=request.target,
    )
    if ranks.is_main:
        LOG.info(
            "saved %s: %s in %.2f s",
            request.target.basename,
            human_size(report.bytes),
            report.seconds,
        )
        for note in report.notes:
            LOG.info("%s: %s", request.target.basename, note)
    return report


def _commit_files(job: SaveJob, files: list[FileRecord]) -> dict[str, Any]:
    """On rank 0: compare the files with the model and commit; return fields of the report, as
    JSON.
    """
    request, staged, staging = job.request, job.staged, job.staged.staging
    assert staging is not None, "rank 0 has the staging"
    store, compression = staging.store, job.config.compression
    files = files + _link_second_names(staged.plan, files, store)
    for part_plan in staged.plan.plans:
        check_written_files(part_plan, store)
    notes = [*staged.notes, *_notes_of_save(request, store)]
    handed_in, left_out = ([], []) if request.collect is None else request.collect(store)
    if compression is not None:
        files = _compress_files(files, store, compression)
    manifest = _manifest_of_job(job, [*files, *staged.files, *handed_in], [*notes, *left_out])
    size_bytes = stored_bytes(store, manifest)
    if request.check_lease is not None:
        request.check_lease()
    staging.commit(manifest)
    return {
        "kind": manifest.kind,
        "bytes": size_bytes,
        "tensors": sum(len(part.tensors) for part in manifest.parts),
        "casts": dict(sum((Counter(part.casts) for part in manifest.parts), Counter[str]())),
        "notes": manifest.notes,
        "step": manifest.step,
    }


def _link_second_names(plan: SavePlan, files: list[FileRecord], store: Store) -> list[FileRecord]:
    """Give files the second name of their format, if it has one.

    Returns the records of the links.
    """
    links = []
    for one in plan.plans:
        paths = {file.path for file in one.files}
        links += link_second_names(
            format_named(one.format), [file for file in files if file.path in paths], store
        )
    return links


def _notes_of_save(request: SaveRequest, store: Store) -> list[str]:
    """The request's notes, and those on settings that differ between ranks and on the comparison of
    outputs.
    """
    settings = replicas.differing_settings(
        {} if request.captured is None else request.captured.document
    )
    notes = [*request.notes]
    if settings:
        notes.append(replicas.difference_note(settings))
    if request.check is not None:
        with local_folder(Place(store)) as folder:
            notes.append(request.check.compare(folder))
    return notes


def _compress_files(files: list[FileRecord], store: Store, compression: str) -> list[FileRecord]:
    """Compress the files in a second pass, because their sizes are unknown before.

    Returns their new records.
    """
    for file in files:
        compress_file(Place(store, file.path), compression)
    return [read_record(store, file.path) for file in files]


def _manifest_of_job(job: SaveJob, files: list[FileRecord], notes: list[str]) -> Manifest:
    """The manifest of the files of a save."""
    request, plan = job.request, job.staged.plan
    has_state = request.captured is not None and request.captured.state is not None
    return manifest_of(
        plan.plans,
        files,
        job.agreed.samples,
        compressed=job.config.compression is not None,
        bases=plan.companions.bases,
        classes=plan.companions.classes,
        notes=notes,
        kind=kind_of(request.adapter_only, request.attribute),
        step=request.step,
        metrics=request.metrics,
        world={"size": job.ranks.size, "engine": plan.engine},
        run_id=request.run_id,
        rankings=job.config.rankings,
        export=bool(request.made_from) or (request.run_id is not None and not has_state),
        made_from=request.made_from,
    )
