"""Gathers the facts about a run that `ft-ckpt report` shows: its saves, its checkpoints and how the model drifted."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint import catalog, pins
from ft_ckpt.checkpoint.catalog import CheckpointInfo
from ft_ckpt.checkpoint.checks import file_key
from ft_ckpt.checkpoint.delete import STATE
from ft_ckpt.checkpoint.open_checkpoint import hold_open
from ft_ckpt.checkpoint.prune import survey_run
from ft_ckpt.errors import CheckpointError, damaged_input
from ft_ckpt.files.convert import open_source
from ft_ckpt.files.diff import by_layer, compare_files
from ft_ckpt.retention import Keep, plan_pruning
from ft_ckpt.save_log import LoggedSave, log_from_json
from ft_ckpt.storage.listed_store import hold_listed
from ft_ckpt.storage.place import Place
from ft_ckpt.training.run_document import read_document


@dataclass(frozen=True)
class KeptCheckpoint:
    """One checkpoint that is there."""

    name: str
    step: int | None
    created: str  # ISO 8601, UTC
    kind: str
    metrics: Mapping[str, float]
    size_bytes: int
    own_bytes: int  # of files that no older checkpoint of the run has, too
    state_bytes: int
    kept: tuple[str, ...]  # why the rules of the run keep it
    pinned: str | None  # why, "" for no reason; None for not at all
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Drift:
    """How much each layer has changed from one checkpoint to the next: the norm of the change over that of before."""

    before: str
    after: str
    layers: Mapping[str, float]


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run: what is on the disk, oldest first, and the log that its newest state has of all saves."""

    run: str
    checkpoints: tuple[KeptCheckpoint, ...]
    saves: tuple[LoggedSave, ...]
    drift: tuple[Drift, ...]
    metrics: tuple[str, ...]  # that occur, those that say most first
    notes: tuple[str, ...]  # what could not be told, and why

    @property
    def disk_bytes(self) -> int:
        """The bytes of all files; one that several checkpoints share counts once."""
        return sum(each.own_bytes for each in self.checkpoints)

    @property
    def dropped_steps(self) -> tuple[int, ...]:
        """The steps of saves whose checkpoints are no longer there."""
        there = {each.step for each in self.checkpoints}
        return tuple(each.step for each in self.saves if each.step not in there)

    def metric_points(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric at all saves that had it, of deleted checkpoints too."""
        found = {each.step: each.metrics[name] for each in self.saves if name in each.metrics}
        found |= {
            each.step: each.metrics[name] for each in self.checkpoints if each.step is not None and name in each.metrics
        }
        return sorted(found.items())


def gather_facts(run: Path | Place, metrics: Sequence[str], *, comparisons: int) -> RunFacts:
    """The facts about the folder `run`; the newest `comparisons` pairs of neighbours are compared."""
    infos = catalog.run_checkpoints(run)
    notes: list[str] = []
    document = _newest_document(infos, notes)
    with damaged_input(f"{run}: what its newest training state says of the run"):
        kept = _kept_reasons(run, infos, document)
        saves = log_from_json((document.get("history") or {}).get("saves", ()))
    checkpoints = tuple(_kept_checkpoints(infos, kept))
    pairs = list(itertools.pairwise(info for info in infos if not info.manifest.made_from))
    drift = [_measured_drift(*pair, notes) for pair in pairs[len(pairs) - min(comparisons, len(pairs)) :]]
    measured = tuple(each for each in drift if each is not None)
    return RunFacts(str(run), checkpoints, saves, measured, tuple(metrics), tuple(notes))


def _newest_document(infos: Sequence[CheckpointInfo], notes: list[str]) -> Mapping[str, Any]:
    for info in reversed(infos):
        if any(part.kind == STATE for part in info.manifest.parts):
            try:
                return read_document(info.store, info.manifest)
            except CheckpointError as error:
                notes.append(str(error))
    notes.append("no checkpoint has a training state, so times of saves and deleted checkpoints are not known")
    return {}


def _kept_reasons(
    run: Path | Place, infos: Sequence[CheckpointInfo], document: Mapping[str, Any]
) -> dict[Path | str, tuple[str, ...]]:
    rules = document.get("keep")
    run_id = document.get("run_id")
    held = survey_run(run) if infos else []
    return dict(plan_pruning(held, _rules_from(rules), run_id).keep.items())


def _rules_from(rules: Mapping[str, Any] | None) -> Keep:
    """The rules that `dataclasses.asdict` gave, after JSON."""
    if rules is None:
        return Keep()
    best = rules["best"]
    state = rules["state"]
    return Keep(**{**rules, "best": best, "state": None if state is None else _rules_from(state)})


def _kept_checkpoints(
    infos: Iterable[CheckpointInfo], kept: Mapping[Path | str, tuple[str, ...]]
) -> Iterable[KeptCheckpoint]:
    seen: set[object] = set()
    for info in infos:
        report = catalog.verify(info.place, deep=False)
        sizes = _file_sizes(info)
        new = {key: size for key, (size, _) in sizes.items() if key not in seen}
        seen.update(new)
        yield KeptCheckpoint(
            name=info.name,
            step=info.manifest.step,
            created=info.manifest.created,
            kind=info.manifest.kind,
            metrics=dict(info.manifest.metrics),
            size_bytes=sum(size for size, _ in sizes.values()),
            own_bytes=sum(new.values()),
            state_bytes=sum(size for size, is_state in sizes.values() if is_state),
            kept=kept.get(info.path, ()),
            pinned=pins.pin_reason(info.place),
            problems=report.problems,
        )


def _file_sizes(info: CheckpointInfo) -> dict[object, tuple[int, bool]]:
    """(bytes, whether of the training state) of each file by a key that all its names share."""
    state = tuple(f"{part.path}/" for part in info.manifest.parts if part.kind == STATE)
    store = hold_listed(info.store)
    found = {file.path: store.stat(file.path) for file in info.manifest.files}
    return {
        file_key(info.store, name): (stored.size_bytes, name.startswith(state))
        for name, stored in found.items()
        if stored is not None
    }


def _measured_drift(before: CheckpointInfo, after: CheckpointInfo, notes: list[str]) -> Drift | None:
    try:
        return Drift(before.name, after.name, _layer_changes(before, after))
    except CheckpointError as error:
        notes.append(f"{before.name} and {after.name} were not compared: {error}")
        return None


def _layer_changes(before: CheckpointInfo, after: CheckpointInfo) -> dict[str, float]:
    with ExitStack() as stack:
        places = [stack.enter_context(hold_open(each.place)) for each in (before, after)]
        opened = [stack.enter_context(closing(open_source(place))) for place in places]
        return {each.name: each.relative for each in by_layer(compare_files(*opened))}
