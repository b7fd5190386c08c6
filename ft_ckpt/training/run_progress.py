"""How far a run is, as scripts are told it."""

from dataclasses import dataclass, field
from pathlib import Path

from ft_ckpt.training.resume import RestoreReport


@dataclass(frozen=True)
class Progress:
    """How far a run is, and what it was resumed from."""

    step: int = 0
    """Steps of the optimizer that are done."""
    epoch: int = 0
    """Passes over the data that are done, as `remaining` counts them for the loader it was first asked for."""
    batch: int = 0
    """Batches of this rank that are done in the current pass of that loader."""
    samples: int = 0
    """Samples of that loader that all ranks together have been given since the run began."""
    resumed_from: Path | str | None = None
    """The checkpoint, its URL where it is in a bucket; None when the run began afresh."""
    report: RestoreReport = field(default_factory=RestoreReport)
    """The outcome of the resume; without items when the run began afresh."""
