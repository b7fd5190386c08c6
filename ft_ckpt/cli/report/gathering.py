"""Reads what `ft-ckpt report` shows of a run, from its manifests and its newest training state."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint import hold_open
from ft_ckpt.checkpoint.catalog import CheckpointInfo, run_checkpoints
from ft_ckpt.checkpoint.checks import file_key, verify
from ft_ckpt.checkpoint.commit import STATE
from ft_ckpt.checkpoint.leases import pin_reason
from ft_ckpt.checkpoint.manifest import BaseRecord, PartRecord
from ft_ckpt.cli.report.facts import Drift, KeptCheckpoint, RunFacts, StoredModel, Training
from ft_ckpt.errors import CheckpointError, damaged_input
from ft_ckpt.extensions.tools import by_layer, compare_files
from ft_ckpt.extensions.tools.converting import open_source
from ft_ckpt.retention import Keep, keep_from_record, missed_rules, plan_pruning
from ft_ckpt.runs.folder import survey_run
from ft_ckpt.runs.state import read_document
from ft_ckpt.schedule import log_from_json
from ft_ckpt.storage.places import Place, hold_listed


def gather_facts(run: Place, metrics: Sequence[str], *, comparisons: int) -> RunFacts:
    """Read what the report shows of the run in the folder `run`.

    The weights of neighbouring checkpoints are compared for the newest `comparisons` pairs. What
    cannot be read is named in the notes of the result. Raises CheckpointError if the training state
    has invalid values.
    """
    infos = run_checkpoints(run)
    notes: list[str] = []
    document = _newest_document(infos, notes)
    with damaged_input(f"{run}: what its newest training state says of the run"):
        history = document.get("history") or {}
        saves = log_from_json(history.get("saves", ()))
        rules = keep_from_record(document.get("keep")) if document else None
        training = _training_of(document)

    run_ids: set[str] | None = None
    if document:
        run_ids = {document["run_id"], *document.get("ancestors", ())}
    fates = _Fates(run, rules, document.get("run_id"))
    checkpoints = tuple(_kept_checkpoints(infos, fates, run_ids))
    rankings: dict[str, str] = {}
    for info in infos:
        rankings.update(info.manifest.rankings)
    return RunFacts(
        run=str(run),
        checkpoints=checkpoints,
        saves=saves,
        drift=_drifts(infos, comparisons, notes),
        metrics=tuple(metrics),
        notes=tuple(notes),
        rankings=rankings,
        models=_models_of(infos),
        training=training,
        rules=rules,
    )


def _newest_document(infos: Sequence[CheckpointInfo], notes: list[str]) -> Mapping[str, Any]:
    """Return the JSON document of the newest training state that can be read, or {}.

    What cannot be read is appended to `notes`.
    """
    for info in reversed(infos):
        if not _has_state(info):
            continue
        try:
            return read_document(info.store, info.manifest)
        except CheckpointError as error:
            notes.append(str(error))
    notes.append(
        "no checkpoint has a training state, so times of saves, deleted checkpoints and the rules "
        "that keep checkpoints are unknown"
    )
    return {}


def _has_state(info: CheckpointInfo) -> bool:
    return any(part.kind == STATE for part in info.manifest.parts)


# A fingerprint is the part of a training state that a resume compares with the new run. These are
# the prefix of its entries about libraries, and entries that the report does not list as settings.
_VERSION_PREFIX = "version of "
_NO_SETTINGS = ("world size", "engine", "model")


def _training_of(document: Mapping[str, Any]) -> Training:
    if not document:
        return Training()
    settings: dict[str, str] = {}
    versions: dict[str, str] = {}
    for name, value in document["fingerprint"].items():
        if name.startswith(_VERSION_PREFIX):
            versions[name.removeprefix(_VERSION_PREFIX)] = str(value)
        elif name not in _NO_SETTINGS:
            settings[name] = str(value)

    history = document.get("history") or {}
    seconds = history.get("run_seconds")
    failures = history.get("failures")
    return Training(
        ranks=len(document["ranks"]),
        wrapper=str(document["fingerprint"].get("engine", "")),
        versions=versions,
        settings=settings,
        progress=dict(document["progress"]),
        run_seconds=None if seconds is None else float(seconds),
        failures=None if failures is None else int(failures),
    )


def _models_of(infos: Sequence[CheckpointInfo]) -> tuple[StoredModel, ...]:
    """Return the models in the newest checkpoint of the training.

    If there is none, those in the newest exported weights are returned.
    """
    # exports come first, so that the loop reaches them last
    newest_last = sorted(infos, key=lambda info: not info.manifest.export)
    for info in reversed(newest_last):
        parts = [part for part in info.manifest.parts if part.kind != STATE]
        if parts:
            return tuple(_stored_model(part) for part in parts)
    return ()


def _stored_model(part: PartRecord) -> StoredModel:
    counts = {tensor.name: math.prod(tensor.shape) for tensor in part.tensors}
    dtypes = {tensor.dtype for tensor in part.tensors}
    return StoredModel(
        name=part.name,
        kind=part.kind,
        class_name=part.class_name,
        values=sum(counts.values()),
        trainable=sum(counts.get(name, 0) for name in part.trainable),
        dtypes=tuple(sorted(dtypes)),
        base=_base_text(part.base),
    )


def _base_text(base: BaseRecord | None) -> str | None:
    if base is None:
        return None
    return base.id or f"{base.class_name} built in memory"


_IN_WORDS = {
    "newest valid": "the newest whole checkpoint",
    "newest valid with state": "the newest from which the run can resume",
    "no rule drops it": "the run keeps all checkpoints",
    "no valid one is there": "no checkpoint of the run is whole, so all stay",
    "of another run": "of another run, which this run never deletes",
    "of no run": "of no run, so no rule deletes it",
}


class _Fates:
    """Says why each checkpoint of a run stays, or that the next save deletes it.

    `rules` are the rules of the run, or None if they are unknown.
    """

    def __init__(self, run: Place, rules: Keep | None, run_id: str | None) -> None:
        survey = survey_run(run)
        self.rules = rules
        self.plan = plan_pruning(survey, rules or Keep(), run_id)
        self.survey = {checkpoint.path: checkpoint for checkpoint in survey}

    def kept_by(self, path: Path | str) -> tuple[str, ...]:
        """Return the reasons to keep a checkpoint; none if the rules are unknown."""
        return () if self.rules is None else self.plan.keep.get(path, ())

    def in_words(self, path: Path | str) -> str:
        """Return the reasons as a text for the page."""
        checkpoint = self.survey.get(path)
        if checkpoint is None:
            return "a link, which no rule deletes"
        if checkpoint.is_export:
            return "exported weights, which no rule deletes"
        if self.rules is None:
            return "unknown without a training state"
        reasons = self.plan.keep.get(path)
        if reasons is None:
            return f"the next save deletes it: {', '.join(missed_rules(checkpoint, self.rules))}"
        words = [_IN_WORDS.get(reason, reason) for reason in reasons]
        if path in self.plan.strip:
            words.append("the next save deletes its training state")
        return "; ".join(words)


def _kept_checkpoints(
    infos: Iterable[CheckpointInfo], fates: _Fates, run_ids: set[str] | None
) -> Iterable[KeptCheckpoint]:
    """Yield the checkpoints with the reasons why they stay.

    `run_ids` are the id of the run and the ids of the runs that it was resumed from. With None, all
    checkpoints count as those of the run.
    """
    seen: set[object] = set()  # the files that this or an older checkpoint has
    for info in infos:
        report = verify(info.place, deep=False)
        size_bytes = own_bytes = state_bytes = 0
        for key, file in _stored_files(info).items():
            size_bytes += file.size_bytes
            if file.is_state:
                state_bytes += file.size_bytes
            if key not in seen:
                own_bytes += file.size_bytes
                seen.add(key)

        yield KeptCheckpoint(
            name=info.name,
            step=info.manifest.step,
            created=info.manifest.created,
            kind=info.manifest.kind,
            metrics=dict(info.metrics),
            size_bytes=size_bytes,
            own_bytes=own_bytes,
            state_bytes=state_bytes,
            kept=fates.kept_by(info.path),
            fate=fates.in_words(info.path),
            pinned=pin_reason(info.place),
            problems=report.problems,
            is_export=info.manifest.export,
            is_own=run_ids is None or info.manifest.run_id in run_ids,
        )


@dataclass(frozen=True)
class _StoredFile:
    size_bytes: int
    is_state: bool  # whether it is of the training state


def _stored_files(info: CheckpointInfo) -> dict[object, _StoredFile]:
    """Return the files of a checkpoint, by a key that is equal for hard links."""
    state_folders = tuple(f"{part.path}/" for part in info.manifest.parts if part.kind == STATE)
    store = hold_listed(info.store)
    files: dict[object, _StoredFile] = {}
    for record in info.manifest.files:
        stored = store.stat(record.path)
        if stored is not None:
            is_state = record.path.startswith(state_folders)
            key = file_key(info.store, record.path)
            files[key] = _StoredFile(stored.size_bytes, is_state)
    return files


def _drifts(infos: Sequence[CheckpointInfo], count: int, notes: list[str]) -> tuple[Drift, ...]:
    """Return the changes of the layers between neighbouring checkpoints, for the newest pairs.

    At most `count` pairs are compared. Checkpoints that were made from others, such as averages,
    are left out. Exported weights are compared only if there are fewer than two checkpoints of the
    training.
    """
    saved_by_run = [info for info in infos if not info.manifest.made_from]
    compared = [info for info in saved_by_run if not info.manifest.export]
    if len(compared) < 2:
        compared = saved_by_run
    pairs = list(itertools.pairwise(compared))
    newest_pairs = pairs[-count:] if count else []
    drifts = []
    for before, after in newest_pairs:
        drift = _drift(before, after, notes)
        if drift is not None:
            drifts.append(drift)
    return tuple(drifts)


def _drift(before: CheckpointInfo, after: CheckpointInfo, notes: list[str]) -> Drift | None:
    """Compare two checkpoints; return None, and append to `notes`, if one cannot be read."""
    try:
        with ExitStack() as stack:
            places = [stack.enter_context(hold_open(info.place)) for info in (before, after)]
            file_before, file_after = (
                stack.enter_context(closing(open_source(place))) for place in places
            )
            layers = by_layer(compare_files(file_before, file_after))
            changes = {layer.name: layer.relative for layer in layers}
    except CheckpointError as error:
        notes.append(f"{before.name} and {after.name} were not compared: {error}")
        return None
    return Drift(before.name, after.name, changes)
