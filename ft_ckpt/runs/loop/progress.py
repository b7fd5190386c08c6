"""Defines `Progress`, what `CheckpointSaver.progress` and `resume` return."""

from dataclasses import dataclass, field
from pathlib import Path

from ft_ckpt.runs.state import RestoreReport


@dataclass(frozen=True)
class Progress:
    """The progress of a run, and the checkpoint it was resumed from."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Passes over the data done, as `remaining` counts them for the first loader it was called
    with.
    """
    batch: int = 0
    """Batches of this rank done in the current pass of that loader."""
    samples: int = 0
    """Samples of that loader given to all ranks together since the run began."""
    resumed_from: Path | str | None = None
    """The checkpoint, its URL if it is in a bucket; None after a fresh start."""
    report: RestoreReport = field(default_factory=RestoreReport)
    """The outcome of the resume; without items after a fresh start."""
    published: str | None = None
    """The version that was published last (`PublishReport.version`), also before the resume: the
    one that engines had when the checkpoint was saved.
    """
