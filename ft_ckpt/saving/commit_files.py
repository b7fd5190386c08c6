"""Compares the written files with the model on rank 0, and commits them.

The ranks agree before the commit: each rank tells how its writing has ended, and an error of one
rank is raised on all ranks. Rank 0 then makes the records of the files, checks the files, and
commits them with their manifest.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from typing import Any

from ft_ckpt._version import __version__
from ft_ckpt.checkpoint.checks import stored_bytes
from ft_ckpt.checkpoint.manifest import BaseRecord, Manifest, PartRecord
from ft_ckpt.errors import NoSpaceError, explained
from ft_ckpt.formats import TensorRecord, format_by_suffix, format_named
from ft_ckpt.formats.safetensors import link_second_names
from ft_ckpt.messages import LOG, warn
from ft_ckpt.model.tensors import Part
from ft_ckpt.ranks import Values
from ft_ckpt.saving.agree import AgreedSave
from ft_ckpt.saving.context import SaveContext
from ft_ckpt.saving.planning import (
    BaseSamples,
    PartPlan,
    SavePlan,
    SaveReport,
    SaveRequest,
    check_written_files,
)
from ft_ckpt.saving.stage import StagedSave
from ft_ckpt.saving.write import WrittenFiles, written_records
from ft_ckpt.storage import Store
from ft_ckpt.storage.digests import FileRecord, read_record
from ft_ckpt.storage.places import Place, local_folder
from ft_ckpt.values import human_size


def commit_files(
    staged: StagedSave,
    agreed: AgreedSave,
    written: WrittenFiles | None,
    error: BaseException | None,
    context: SaveContext,
) -> SaveReport | None:
    """Compare the written files with the model and commit them.

    `written` is None if this rank has failed with `error`. Returns the report, or None if the disk
    is full and the setting `when_full` allows another attempt. Collective: call it on every rank.
    Raises the error of any rank.
    """
    plan, ranks = agreed.plan, context.ranks
    target = plan.request.target
    retries = context.config.when_full != "raise"
    is_full = retries and isinstance(error, NoSpaceError)

    def commit_on_rank_0(values: Values) -> dict[str, Any] | None:
        """Return the fields of the report, or None if the save must be tried again."""
        if any(value["full"] for value in values):
            return None
        assert written is not None, "the agreement has raised the error"
        files = [*written.reused.records, *written_records(written.writes, values)]
        try:
            with explained(target):
                return _commit(staged, agreed, files, context)
        except NoSpaceError:
            if retries:
                return None
            raise

    value: dict[str, Any] = {"full": is_full}
    if written is not None:
        value |= written.to_exchange

    # A full disk that allows another attempt is no error of the agreement.
    reported_error = None if is_full else error
    agreement = ranks.agree("the commit of save()", value, reported_error, decide=commit_on_rank_0)
    if agreement.result is None:
        return None
    fields = {**agreement.result, "notes": tuple(agreement.result["notes"])}
    seconds = time.monotonic() - context.begun
    report = SaveReport(target.location, **fields, seconds=seconds, target=target)
    if ranks.is_main:
        size = human_size(report.bytes)
        LOG.info("saved %s: %s in %.2f s", target.basename, size, report.seconds)
        for note in report.notes:
            LOG.info("%s: %s", target.basename, note)

    return report


def follow_up(request: SaveRequest, report: SaveReport) -> SaveReport:
    """Run the request's steps after the commit, such as pruning; return the final report.

    If a step fails, the error becomes a warning: the checkpoint is committed, and the other ranks
    go on.
    """
    if request.follow_up is None:
        return report
    try:
        return request.follow_up(report)
    except Exception as error:  # noqa: BLE001 - of pruning, uploads and pushes, of any kind
        problem = f"{type(error).__name__}: {error}"
        warn(f"{report.path}: saved, but not all that follows a save was done: {problem}")
        return report


def _commit(
    staged: StagedSave,
    agreed: AgreedSave,
    files: Sequence[FileRecord],
    context: SaveContext,
) -> dict[str, Any]:
    """Commit on rank 0; return the fields of the report, as JSON."""
    staging, plan, request = staged.staging, agreed.plan, agreed.plan.request
    assert staging is not None, "rank 0 has the staging"
    store, compression = staging.store, context.config.compression
    files = [*files, *_link_second_names(plan, files, store)]
    for part_plan in plan.plans:
        check_written_files(part_plan, store)

    # Notes are messages about this save, for its report and the manifest.
    notes = [*staged.notes, *request.notes]
    if request.check is not None:
        with local_folder(Place(store)) as folder:
            notes.append(request.check(folder))

    collected: list[FileRecord] = []
    if request.collect is not None:
        collected, notes_on_missing = request.collect(store)
        notes += notes_on_missing

    if compression is not None:
        files = _compress_files(files, store, compression)
    manifest = _make_manifest(agreed, [*files, *staged.files, *collected], notes, context)
    size_bytes = stored_bytes(store, manifest)

    # Last: if another process has taken over the run's directory, nothing must be committed.
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
    """Link each file under the second name of its format, if the format has one.

    Returns the records of the links.
    """
    links = []
    for part_plan in plan.plans:
        paths = {file.path for file in part_plan.files}
        files_of_part = [file for file in files if file.path in paths]
        links += link_second_names(format_named(part_plan.format), files_of_part, store)
    return links


def _compress_files(
    files: Sequence[FileRecord], store: Store, compression: str
) -> list[FileRecord]:
    """Compress the files in place and return their new records.

    This is a second pass over the files. They are laid out before they are written, and the size of
    a compressed tensor is not known before.
    """
    for file in files:
        format_by_suffix(file.path).compress_file(Place(store, file.path), compression)
    return [read_record(store, file.path) for file in files]


def _make_manifest(
    agreed: AgreedSave,
    files: Sequence[FileRecord],
    notes: Sequence[str],
    context: SaveContext,
) -> Manifest:
    """Make the manifest of the checkpoint.

    `notes` are added to the notes of its parts; a note is recorded once.
    """
    plan, request, config = agreed.plan, agreed.plan.request, context.config
    sidecars = plan.sidecars
    is_compressed = config.compression is not None
    records = []
    all_notes: list[str] = []
    for part_plan in plan.plans:
        name = part_plan.part.name
        base = _base_with_fingerprint(name, sidecars.bases, agreed.samples)
        records.append(_part_record(part_plan, base, sidecars.classes[name], is_compressed))
        all_notes += part_plan.part.notes

    all_notes += notes

    # An export of a run has its model without the state of the run.
    is_export_of_run = request.run_id is not None and request.run_state is None
    return Manifest(
        parts=tuple(records),
        files=tuple(files),
        created=datetime.now(timezone.utc).isoformat(),
        versions=library_versions(),
        shared=_shared_between(part_plan.part for part_plan in plan.plans),
        notes=tuple(dict.fromkeys(all_notes)),
        kind=request.kind,
        step=request.step,
        metrics=request.metrics,
        world={"size": context.ranks.size, "engine": plan.engine},
        run_id=request.run_id,
        rankings=config.rankings,
        export=bool(request.made_from) or is_export_of_run,
        made_from=request.made_from,
    )


def _part_record(
    plan: PartPlan, base: BaseRecord | None, class_name: str, is_compressed: bool
) -> PartRecord:
    part = plan.part
    tensors: list[TensorRecord] = []
    for file in plan.files:
        tensors += file.records()
    if is_compressed:  # the plan has the offsets of uncompressed tensors
        tensors = [replace(record, start=0, end=0) for record in tensors]
    trainable = []
    for entry in part.entries:
        if entry.source is not None and entry.source.trainable:
            trainable.append(entry.name)

    return PartRecord(
        name=part.name,
        path=part.path,
        kind=part.kind,
        format=plan.format,
        class_name=class_name,
        tensors=tuple(tensors),
        ties=part.ties,
        trainable=tuple(trainable),
        adapter=part.adapter,
        active=part.active,
        base=base,
        casts=part.casts,
    )


def _base_with_fingerprint(
    name: str, bases: Mapping[str, BaseRecord], samples: Sequence[BaseSamples]
) -> BaseRecord | None:
    """Return the base model of the adapter `name` with its fingerprint, or None for other parts.

    The fingerprint has a few elements of the base model. Each rank has sampled elements that it
    holds; here the samples of all ranks are merged.
    """
    if name not in bases:
        return None
    fingerprint: dict[str, dict[str, float]] = {}
    for samples_of_rank in samples:
        for tensor, values in samples_of_rank.get(name, {}).items():
            fingerprint.setdefault(tensor, {}).update(values)
    return replace(bases[name], fingerprint=fingerprint)


_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "safetensors")


@cache  # reading a package's metadata takes milliseconds
def library_versions() -> dict[str, str]:
    """Return the versions of ft_ckpt and of the libraries that affect the saved files."""
    return {"ft_ckpt": __version__, **{name: metadata.version(name) for name in _LIBRARIES}}


def _shared_between(parts: Iterable[Part]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names that are one tensor in several parts.

    A name is "part:name", where the second name is relative to the part's module. For example,
    ("policy:lm_head.weight", "value:model.lm_head.weight"). Adapters are left out, because PEFT
    stores their tensors under other names.
    """
    members_by_key: dict[int, dict[str, None]] = {}
    for part in parts:
        if part.kind == "adapter":
            continue
        prefix = f"{part.name}." if part.name else ""
        for entry in part.entries:
            for source in entry.sources:
                member = f"{part.name}:{source.name.removeprefix(prefix)}"
                members_by_key.setdefault(source.key, {})[member] = None

    groups = []
    for members in members_by_key.values():
        part_names = {member.partition(":")[0] for member in members}
        if len(part_names) > 1:
            groups.append(tuple(members))

    return tuple(groups)
