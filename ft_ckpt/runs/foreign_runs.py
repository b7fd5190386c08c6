"""Folders of other programs that a run can resume from: those of Accelerate's `save_state`."""

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from ft_ckpt.ranks import Ranks
from ft_ckpt.runs.restore_report import Restored, RestoreReport
from ft_ckpt.storage import Place

_ACCELERATE = "ft_ckpt.extensions.foreign.accelerate_folder"  # imported on use


class ForeignFolder(Protocol):
    """A folder that was read on this rank and fits the run."""

    @property
    def outcomes(self) -> tuple[Restored, ...]:
        """The outcomes of items that the folder lacks."""

    def load(self, run: Any, run_id: str) -> RestoreReport:
        """Restore `run`, and continue as the run `run_id`. Raises LoadError."""


def find_foreign_folder(place: Place) -> Path | None:
    """The local folder at `place`, or in it, that another program saved a run in; None without."""
    local_folder = place.folder.local_folder
    if local_folder is None:
        return None
    folder: Path | None = import_module(_ACCELERATE).find_accelerate_folder(local_folder)
    return folder


def read_foreign_folder(folder: Path, run: Any, ranks: Ranks) -> ForeignFolder:
    """Read a folder of `find_foreign_folder` and compare it with `run`; changes nothing.

    Raises LoadError naming files that are damaged or that Accelerate would unpickle, and what does
    not fit the run.
    """
    read: ForeignFolder = import_module(_ACCELERATE).read_accelerate_folder(folder, run, ranks)
    return read
