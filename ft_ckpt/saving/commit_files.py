"""The commit of a save on rank 0: compares the written files with the model, and makes them a
checkpoint.
"""

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ft_ckpt.checkpoint.checks import stored_bytes
from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.config import human_size
from ft_ckpt.errors import NoSpaceError, explained
from ft_ckpt.formats import format_by_suffix, format_named
from ft_ckpt.formats.safetensors import link_second_names
from ft_ckpt.messages import LOG
from ft_ckpt.ranks import Values
from ft_ckpt.saving.agree import AgreedSave
from ft_ckpt.saving.context import SaveContext
from ft_ckpt.saving.files import check_written_files
from ft_ckpt.saving.plan import SavePlan
from ft_ckpt.saving.report import SaveReport
from ft_ckpt.saving.request import SaveRequest
from ft_ckpt.saving.save_manifest import manifest_of
from ft_ckpt.saving.stage import OpenStage
from ft_ckpt.saving.write import WrittenFiles, written_records
from ft_ckpt.storage import Store
from ft_ckpt.storage.digests import FileRecord, read_record
from ft_ckpt.storage.places import Place, local_folder


def commit_files(
    stage: OpenStage,
    agreed: AgreedSave,
    written: WrittenFiles | None,
    error: BaseException | None,
    context: SaveContext,
) -> SaveReport | None:
    """Compare the written files with the model and commit them. Collective.

    `written` is None after an `error` of this rank. Returns the report; None if the disk is full
    and the settings say to make room and try again.
    """
    plan, ranks = agreed.plan, context.ranks
    target = plan.request.target
    retries = context.config.when_full != "raise"
    is_full = retries and isinstance(error, NoSpaceError)

    def commit_on_rank_0(values: Values) -> dict[str, Any] | None:
        if any(value["full"] for value in values):
            return None
        assert written is not None, "the agreement has raised the error"
        files = [*written.reused.records, *written_records(written.writes, values)]
        try:
            with explained(target):
                return _commit(stage, agreed, files, context)
        except NoSpaceError:
            if retries:
                return None
            raise

    facts: dict[str, Any] = {"full": is_full}
    if written is not None:
        facts |= written.facts
    reported = None if is_full else error
    outcome = ranks.agree("the commit of save()", facts, reported, decide=commit_on_rank_0)
    if outcome.result is None:
        return None
    fields = {**outcome.result, "notes": tuple(outcome.result["notes"])}
    seconds = time.monotonic() - context.begun
    report = SaveReport(target.location, **fields, seconds=seconds, target=target)
    if ranks.is_main:
        size = human_size(report.bytes)
        LOG.info("saved %s: %s in %.2f s", target.basename, size, report.seconds)
        for note in report.notes:
            LOG.info("%s: %s", target.basename, note)
    return report


def follow_up(request: SaveRequest, report: SaveReport) -> SaveReport:
    """What the caller does after the commit, such as pruning; the report with its handles."""
    return report if request.follow_up is None else request.follow_up(report)


def _commit(
    stage: OpenStage,
    agreed: AgreedSave,
    files: Sequence[FileRecord],
    context: SaveContext,
) -> dict[str, Any]:
    """Commit on rank 0; return fields of the report, as JSON."""
    staging, plan, request = stage.staging, agreed.plan, agreed.plan.request
    assert staging is not None, "rank 0 has the staging"
    store, compression = staging.store, context.config.compression
    files = [*files, *_link_second_names(plan, files, store)]
    for part_plan in plan.plans:
        check_written_files(part_plan, store)
    notes = [*stage.notes, *request.notes]
    if request.check is not None:
        with local_folder(Place(store)) as folder:
            notes.append(request.check(folder))
    collected: list[FileRecord] = []
    if request.collect is not None:
        collected, notes_on_missing = request.collect(store)
        notes += notes_on_missing
    if compression is not None:
        files = _compress_files(files, store, compression)
    manifest = _manifest_of(agreed, [*files, *stage.files, *collected], notes, context)
    size_bytes = stored_bytes(store, manifest)
    if request.check_lease is not None:
        request.check_lease()
    staging.commit(manifest)
    casts: Counter[str] = Counter()
    for part in manifest.parts:
        casts.update(part.casts)
    return {
        "kind": manifest.kind,
        "bytes": size_bytes,
        "tensors": sum(len(part.tensors) for part in manifest.parts),
        "casts": dict(casts),
        "notes": manifest.notes,
        "step": manifest.step,
    }


def _link_second_names(
    plan: SavePlan, files: Sequence[FileRecord], store: Store
) -> list[FileRecord]:
    """Give files the second name of their format, if it has one.

    Returns the records of the links.
    """
    links = []
    for part_plan in plan.plans:
        paths = {file.path for file in part_plan.files}
        of_part = [file for file in files if file.path in paths]
        links += link_second_names(format_named(part_plan.format), of_part, store)
    return links


def _compress_files(
    files: Sequence[FileRecord], store: Store, compression: str
) -> list[FileRecord]:
    """Compress the files in a second pass, because their sizes are unknown before.

    Returns their new records.
    """
    for file in files:
        format_by_suffix(file.path).compress_file(Place(store, file.path), compression)
    return [read_record(store, file.path) for file in files]


def _manifest_of(
    agreed: AgreedSave,
    files: Sequence[FileRecord],
    notes: Sequence[str],
    context: SaveContext,
) -> Manifest:
    plan, request, config = agreed.plan, agreed.plan.request, context.config
    is_of_run = request.run_id is not None
    return manifest_of(
        plan.plans,
        files,
        agreed.samples,
        compressed=config.compression is not None,
        bases=plan.companions.bases,
        classes=plan.companions.classes,
        notes=notes,
        kind=request.kind,
        step=request.step,
        metrics=request.metrics,
        world={"size": context.ranks.size, "engine": plan.engine},
        run_id=request.run_id,
        rankings=config.rankings,
        export=bool(request.made_from) or (is_of_run and request.extra_state is None),
        made_from=request.made_from,
    )
