"""The facts about a run: its checkpoints, models, saves and training, as records."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ft_ckpt.checkpoint.manifest import parse_time
from ft_ckpt.retention import Keep
from ft_ckpt.schedule import LoggedSave


@dataclass(frozen=True)
class KeptCheckpoint:
    """One checkpoint of the run that still exists."""

    name: str
    step: int | None
    created: str  # ISO 8601, UTC
    kind: str
    metrics: Mapping[str, float]
    size_bytes: int
    own_bytes: int  # of files that no older checkpoint of the run has
    state_bytes: int
    kept: tuple[str, ...]  # the rules of the run that keep it
    fate: str  # why it is kept, or why the next save deletes it
    pinned: str | None  # the reason, possibly ""; None if it is not pinned
    problems: tuple[str, ...]
    is_export: bool = False  # weights saved in the folder of the run, no checkpoint of it
    is_own: bool = True  # of the run whose log this is, not of another one in the folder

    @property
    def created_at(self) -> float | None:
        """Unix time; None if `created` is not a time."""
        moment = parse_time(self.created)
        return None if moment is None else moment.timestamp()


@dataclass(frozen=True)
class Drift:
    """Change of each layer between two checkpoints: norm of the change over the norm before it."""

    before: str
    after: str
    layers: Mapping[str, float]


@dataclass(frozen=True)
class StoredModel:
    """One part of the newest checkpoint: a model, a module or an adapter."""

    name: str  # of the part; "" for the whole model
    kind: str
    class_name: str
    values: int  # in its tensors: of parameters and buffers
    trainable: int
    dtypes: tuple[str, ...]
    base: str | None  # of an adapter


@dataclass(frozen=True)
class Training:
    """The training as described in its newest state; empty without a state."""

    ranks: int | None = None
    wrapper: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)  # "optimizer": "AdamW", ...
    progress: Mapping[str, int] = field(default_factory=dict)
    run_seconds: float | None = None  # over all restarts, until the newest save
    failures: int | None = None


@dataclass(frozen=True)
class RunFacts:
    """The checkpoints of a run, oldest first, and the log of saves in its newest training state."""

    run: str
    checkpoints: tuple[KeptCheckpoint, ...]
    saves: tuple[LoggedSave, ...]
    drift: tuple[Drift, ...]
    metrics: tuple[str, ...]  # most important first
    notes: tuple[str, ...]  # missing facts, with the reasons
    rankings: Mapping[str, str] = field(default_factory=dict)  # metric -> "min" or "max"
    models: tuple[StoredModel, ...] = ()
    training: Training = field(default_factory=Training)
    rules: Keep | None = None  # None if no training state says them

    @property
    def disk_bytes(self) -> int:
        """The bytes of all files; files that checkpoints share count once."""
        return sum(checkpoint.own_bytes for checkpoint in self.checkpoints)

    @property
    def saved_checkpoints(self) -> dict[int, KeptCheckpoint]:
        """The checkpoints that the logged saves made, by step, without exports."""
        return {
            checkpoint.step: checkpoint
            for checkpoint in self.checkpoints
            if checkpoint.is_own and not checkpoint.is_export and checkpoint.step is not None
        }

    @property
    def dropped_saves(self) -> tuple[LoggedSave, ...]:
        """The saves whose checkpoints have been deleted."""
        existing = self.saved_checkpoints
        return tuple(save for save in self.saves if save.step not in existing)

    @property
    def waited_seconds(self) -> float:
        """The time that training waited for the logged saves."""
        return sum(save.stall_seconds or 0.0 for save in self.saves)

    def metric_points(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of a metric at all saves that had it, also of deleted checkpoints.

        If checkpoint and log have a value of one step, the checkpoint's is newer.
        """
        of_run = [checkpoint for checkpoint in self.checkpoints if checkpoint.is_own]
        records = [(checkpoint.step, checkpoint.metrics) for checkpoint in of_run]
        records += [(save.step, save.metrics) for save in self.saves]
        for step, checkpoint in self.saved_checkpoints.items():
            records.append((step, checkpoint.metrics))
        values = {step: metrics[name] for step, metrics in records if name in metrics}
        return sorted((step, value) for step, value in values.items() if step is not None)

    def best_checkpoint(self, name: str) -> KeptCheckpoint | None:
        """Return the best checkpoint by a metric of the rankings; of equal ones the oldest."""
        mode = self.rankings.get(name)
        sign = 1 if mode == "min" else -1
        measured = [
            checkpoint
            for checkpoint in self.saved_checkpoints.values()
            if not math.isnan(checkpoint.metrics.get(name, math.nan))
        ]
        if mode is None or not measured:
            return None
        return min(measured, key=lambda checkpoint: sign * checkpoint.metrics[name])
