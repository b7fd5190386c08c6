"""Compares the written files with the model on rank 0, and commits them."""

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

    `written` is None after an `error` of this rank. Returns the report, or None if the disk is full
    and `when_full` allows another try. Collective: call it on every rank. Raises the error of any
    rank.
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
                return _commit(staged, agreed, files, context)
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
    """Run what the request wants after the commit, such as pruning; return the final report.

    An error of it is a warning, because the checkpoint is there, and the other ranks go on.
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
    manifest = _manifest_of(agreed, [*files, *staged.files, *collected], notes, context)
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
    """Link files under the second name of their format, if it has one; return the new records."""
    links = []
    for part_plan in plan.plans:
        paths = {file.path for file in part_plan.files}
        of_part = [file for file in files if file.path in paths]
        links += link_second_names(format_named(part_plan.format), of_part, store)
    return links


def _compress_files(
    files: Sequence[FileRecord], store: Store, compression: str
) -> list[FileRecord]:
    """Compress the files in place and return their new records.

    This is a second pass, because compressed sizes are unknown before.
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
        export=bool(request.made_from) or (is_of_run and request.run_state is None),
        made_from=request.made_from,
    )


_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "safetensors")


def manifest_of(
    plans: Sequence[PartPlan],
    files: Iterable[FileRecord],
    samples: Sequence[BaseSamples],
    *,
    compressed: bool,
    bases: Mapping[str, BaseRecord],
    classes: Mapping[str, str],
    notes: Sequence[str],
    **facts: Any,
) -> Manifest:
    """Make the manifest of a checkpoint from its plans and `files`.

    `samples` are the sampled elements of the adapters' bases, from each rank. `bases` and `classes`
    are base records and class names by the name of the part. `notes` are added to the notes of the
    parts, and `facts` are further fields of the manifest.
    """
    parts = [plan.part for plan in plans]
    records = []
    all_notes: list[str] = []
    for plan in plans:
        base = _base_with_fingerprint(plan.part.name, bases, samples)
        records.append(_part_record(plan, base, classes[plan.part.name], compressed))
        all_notes += plan.part.notes
    all_notes += notes
    return Manifest(
        parts=tuple(records),
        files=tuple(files),
        created=datetime.now(timezone.utc).isoformat(),
        versions=library_versions(),
        shared=_shared_between(parts),
        notes=tuple(dict.fromkeys(all_notes)),
        **facts,
    )


def _part_record(
    plan: PartPlan, base: BaseRecord | None, class_name: str, compressed: bool
) -> PartRecord:
    part = plan.part
    tensors: list[TensorRecord] = []
    for file in plan.files:
        tensors += file.records()
    if compressed:  # the plan does not know the places of compressed tensors
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
    """Return the base of an adapter with its fingerprint, or None for other parts.

    The fingerprint is merged from the samples of all ranks.
    """
    if name not in bases:
        return None
    merged: dict[str, dict[str, float]] = {}
    for of_rank in samples:
        for tensor, values in of_rank.get(name, {}).items():
            merged.setdefault(tensor, {}).update(values)
    return replace(bases[name], fingerprint=merged)


@cache  # reading a package's metadata takes milliseconds
def library_versions() -> dict[str, str]:
    """Return the versions of ft_ckpt and of the libraries that affect the saved files."""
    return {"ft_ckpt": __version__, **{name: metadata.version(name) for name in _LIBRARIES}}


def _shared_between(parts: Iterable[Part]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of "part:name" that are one tensor in several parts.

    The name is relative to the part's module. Adapters are left out, because PEFT stores their
    tensors under other names.
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
