"""The facts about a run that `ft-ckpt report` shows, from its manifests and its newest state."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint import hold_open
from ft_ckpt.checkpoint.catalog import CheckpointInfo, run_checkpoints
from ft_ckpt.checkpoint.checks import file_key, verify
from ft_ckpt.checkpoint.commit import STATE
from ft_ckpt.checkpoint.leases import pin_reason
from ft_ckpt.checkpoint.manifest import PartRecord
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
    """The facts about the folder `run`.

    The newest `comparisons` pairs of neighbouring checkpoints are compared.
    """
    infos = run_checkpoints(run)
    notes: list[str] = []
    document = _newest_document(infos, notes)
    with damaged_input(f"{run}: what its newest training state says of the run"):
        history = document.get("history") or {}
        saves = log_from_json(history.get("saves", ()))
        rules = keep_from_record(document.get("keep")) if document else None
        training = _training_of(document)
    run_ids = {document["run_id"], *document.get("ancestors", ())} if document else None
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
    for info in reversed(infos):
        if any(part.kind == STATE for part in info.manifest.parts):
            try:
                return read_document(info.store, info.manifest)
            except CheckpointError as error:
                notes.append(str(error))
    notes.append(
        "no checkpoint has a training state, so times of saves, deleted checkpoints and the rules "
        "that keep checkpoints are unknown"
    )
    return {}


_SHOWN_APART = ("world size", "engine", "model")


def _training_of(document: Mapping[str, Any]) -> Training:
    if not document:
        return Training()
    settings, versions = {}, {}
    for name, value in document["fingerprint"].items():
        library = name.removeprefix("version of ")
        if library != name:
            versions[library] = str(value)
        elif name not in _SHOWN_APART:
            settings[name] = str(value)
    history = document.get("history") or {}
    seconds, failures = history.get("run_seconds"), history.get("failures")
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
    """The parts of the newest checkpoint of training; of the newest export if there is no other."""
    newest_last = sorted(infos, key=lambda info: not info.manifest.export)
    for info in reversed(newest_last):
        parts = [part for part in info.manifest.parts if part.kind != STATE]
        if parts:
            return tuple(_stored_model(part) for part in parts)
    return ()


def _stored_model(part: PartRecord) -> StoredModel:
    base = part.base
    counts = {tensor.name: math.prod(tensor.shape) for tensor in part.tensors}
    return StoredModel(
        name=part.name,
        kind=part.kind,
        class_name=part.class_name,
        values=sum(counts.values()),
        trainable=sum(counts.get(name, 0) for name in part.trainable),
        dtypes=tuple(sorted({tensor.dtype for tensor in part.tensors})),
        base=None if base is None else base.id or f"{base.class_name} built in memory",
    )


_IN_WORDS = {
    "newest valid": "the newest whole checkpoint",
    "newest valid with state": "the newest from which the run can resume",
    "no rule drops it": "the run keeps all checkpoints",
    "no valid one is there": "no checkpoint of the run is whole, so all stay",
    "of another run": "of another run, which this run never deletes",
    "of no run": "of no run, so no rule deletes it",
}


class _Fates:
    """Why each checkpoint of a run stays, or goes; `rules` are None if they are unknown."""

    def __init__(self, run: Place, rules: Keep | None, run_id: str | None) -> None:
        survey = survey_run(run)
        self.rules = rules
        self.plan = plan_pruning(survey, rules or Keep(), run_id)
        self.survey = {checkpoint.path: checkpoint for checkpoint in survey}

    def kept_by(self, path: Path | str) -> tuple[str, ...]:
        return () if self.rules is None else self.plan.keep.get(path, ())

    def in_words(self, path: Path | str) -> str:
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
    """`run_ids` are the run's and those it was resumed from; None: each checkpoint is its own."""
    seen: set[object] = set()
    for info in infos:
        report = verify(info.place, deep=False)
        sizes = _file_sizes(info)
        new = {key: size for key, (size, _) in sizes.items() if key not in seen}
        seen.update(new)
        yield KeptCheckpoint(
            name=info.name,
            step=info.manifest.step,
            created=info.manifest.created,
            kind=info.manifest.kind,
            metrics=dict(info.metrics),
            size_bytes=sum(size for size, _ in sizes.values()),
            own_bytes=sum(new.values()),
            state_bytes=sum(size for size, is_state in sizes.values() if is_state),
            kept=fates.kept_by(info.path),
            fate=fates.in_words(info.path),
            pinned=pin_reason(info.place),
            problems=report.problems,
            is_export=info.manifest.export,
            is_own=run_ids is None or info.manifest.run_id in run_ids,
        )


def _file_sizes(info: CheckpointInfo) -> dict[object, tuple[int, bool]]:
    """(bytes, whether it is of the training state) of each file, by a key equal for hard links."""
    state = tuple(f"{part.path}/" for part in info.manifest.parts if part.kind == STATE)
    store = hold_listed(info.store)
    sizes: dict[object, tuple[int, bool]] = {}
    for file in info.manifest.files:
        stored = store.stat(file.path)
        if stored is not None:
            is_state = file.path.startswith(state)
            sizes[file_key(info.store, file.path)] = (stored.size_bytes, is_state)
    return sizes


def _drifts(infos: Sequence[CheckpointInfo], count: int, notes: list[str]) -> tuple[Drift, ...]:
    """The changes between the newest `count` pairs of neighbours that training saved."""
    saved = [info for info in infos if not info.manifest.made_from]
    resumable = [info for info in saved if not info.manifest.export]
    pairs = list(itertools.pairwise(resumable if len(resumable) > 1 else saved))
    newest_pairs = pairs[len(pairs) - min(count, len(pairs)) :]
    drifts = [_drift(before, after, notes) for before, after in newest_pairs]
    return tuple(drift for drift in drifts if drift is not None)


def _drift(before: CheckpointInfo, after: CheckpointInfo, notes: list[str]) -> Drift | None:
    try:
        with ExitStack() as stack:
            places = [stack.enter_context(hold_open(info.place)) for info in (before, after)]
            opened = [stack.enter_context(closing(open_source(place))) for place in places]
            layers = by_layer(compare_files(*opened))
            changes = {layer.name: layer.relative for layer in layers}
    except CheckpointError as error:
        notes.append(f"{before.name} and {after.name} were not compared: {error}")
        return None
    return Drift(before.name, after.name, changes)
