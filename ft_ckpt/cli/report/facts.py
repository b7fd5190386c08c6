"""Records of what a report shows of a run: its checkpoints, models, saves and training."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ft_ckpt.checkpoint.manifest import parse_time
from ft_ckpt.retention import Keep
from ft_ckpt.schedule import LoggedSave


@dataclass(frozen=True)
class KeptCheckpoint:
    """One checkpoint in the folder of the run.

    Attributes:
        name: The name of its folder.
        step: The training step; None if it was saved without one.
        created: The time of the save, in ISO 8601, UTC.
        kind: The kind in its manifest.
        metrics: The metrics, by name.
        size_bytes: The size of all its files.
        own_bytes: The size of the files that no older checkpoint of the run shares.
        state_bytes: The size of its training state.
        kept: The rules of the run that keep it.
        fate: Why it is kept, or why the next save deletes it, as a text.
        pinned: The reason of the pin, which may be ""; None if it is not pinned.
        problems: What a fast verification found.
        is_export: Whether these are exported weights instead of a checkpoint of the training.
        is_own: Whether it is of the run that the report describes, and not of another run in the
            same folder.
    """

    name: str
    step: int | None
    created: str
    kind: str
    metrics: Mapping[str, float]
    size_bytes: int
    own_bytes: int
    state_bytes: int
    kept: tuple[str, ...]
    fate: str
    pinned: str | None
    problems: tuple[str, ...]
    is_export: bool = False
    is_own: bool = True

    @property
    def created_at(self) -> float | None:
        """Unix time; None if `created` is not a time."""
        moment = parse_time(self.created)
        return None if moment is None else moment.timestamp()


@dataclass(frozen=True)
class Drift:
    """The change of each layer between two checkpoints.

    A change is the norm of the difference, divided by the norm of the layer in `before`.
    """

    before: str
    after: str
    layers: Mapping[str, float]


@dataclass(frozen=True)
class StoredModel:
    """A model, a module or an adapter in the newest checkpoint.

    Attributes:
        name: The name in the checkpoint; "" for the whole model.
        kind: The kind, such as "adapter".
        class_name: The name of the model's class; "" if it is unknown.
        values: The number of elements in its tensors, which are parameters and buffers.
        trainable: The number of elements that are trained.
        dtypes: The dtypes of the tensors.
        base: The name of an adapter's base model; None for other models.
    """

    name: str
    kind: str
    class_name: str
    values: int
    trainable: int
    dtypes: tuple[str, ...]
    base: str | None


@dataclass(frozen=True)
class Training:
    """What the newest training state says of the training; empty if there is no state.

    Attributes:
        ranks: The number of ranks.
        wrapper: How the model is wrapped, such as "fsdp"; "" or "plain" if it is not.
        versions: The versions of the libraries, by name.
        settings: The settings, for example {"optimizer": "AdamW"}.
        progress: The numbers of steps, epochs and samples.
        run_seconds: The duration of the training with all restarts, until the newest save.
        failures: The number of restarts after a failure.
    """

    ranks: int | None = None
    wrapper: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    progress: Mapping[str, int] = field(default_factory=dict)
    run_seconds: float | None = None
    failures: int | None = None


@dataclass(frozen=True)
class RunFacts:
    """All that a report shows of a run.

    Attributes:
        run: The path or URL of the run's folder.
        checkpoints: The checkpoints in the folder, oldest first.
        saves: The log of saves in the newest training state.
        drift: The changes between neighbouring checkpoints.
        metrics: The names of the metrics, the most important first.
        notes: What could not be read, with the reasons.
        rankings: "min" or "max" for each metric by which the run ranks its checkpoints.
        models: The models in the newest checkpoint.
        training: What the newest training state says of the training.
        rules: The rules of the run for its checkpoints; None if no training state has them.
    """

    run: str
    checkpoints: tuple[KeptCheckpoint, ...]
    saves: tuple[LoggedSave, ...]
    drift: tuple[Drift, ...]
    metrics: tuple[str, ...]
    notes: tuple[str, ...]
    rankings: Mapping[str, str] = field(default_factory=dict)
    models: tuple[StoredModel, ...] = ()
    training: Training = field(default_factory=Training)
    rules: Keep | None = None

    @property
    def disk_bytes(self) -> int:
        """The size of all files; a file that several checkpoints share counts once."""
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
        """Return (step, value) of a metric at all saves that had it, in order of steps.

        Saves whose checkpoints were deleted are included. If both the checkpoint and the log have a
        value for a step, the one of the checkpoint is newer and is returned.
        """
        own_checkpoints = [checkpoint for checkpoint in self.checkpoints if checkpoint.is_own]
        # later records replace earlier ones of the same step
        records = [(checkpoint.step, checkpoint.metrics) for checkpoint in own_checkpoints]
        records += [(save.step, save.metrics) for save in self.saves]
        for step, checkpoint in self.saved_checkpoints.items():
            records.append((step, checkpoint.metrics))
        values = {step: metrics[name] for step, metrics in records if name in metrics}
        return sorted((step, value) for step, value in values.items() if step is not None)

    def best_checkpoint(self, name: str) -> KeptCheckpoint | None:
        """Return the best checkpoint by a metric of the rankings.

        If several are equally good, the oldest is returned. Returns None if no checkpoint has the
        metric, or if the run does not rank by it.
        """
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
