"""Finds and reads the folder of another program (Accelerate's `save_state`) to resume from.

An extension does the work. It is imported when a resume needs it.
"""

from pathlib import Path
from typing import Any, Protocol

from ft_ckpt.extension_points import load_extension
from ft_ckpt.ranks import Ranks
from ft_ckpt.runs.state import Restored, RestoreReport
from ft_ckpt.storage.places import Place

_FIND_ACCELERATE_FOLDER = "ft_ckpt.extensions.foreign.accelerate_folder:find_accelerate_folder"
_READ_ACCELERATE_FOLDER = "ft_ckpt.extensions.foreign.accelerate_folder:read_accelerate_folder"


class ForeignFolder(Protocol):
    """A folder of another program that this rank has read, and that fits the run."""

    @property
    def outcomes(self) -> tuple[Restored, ...]:
        """The items of the run that the folder lacks, each with the status "absent"."""

    def load(self, run: Any, run_id: str) -> RestoreReport:
        """Restore `run`, which continues under the id `run_id`. Raises LoadError."""


def find_foreign_folder(place: Place) -> Path | None:
    """Return the local folder, at `place` or in it, that another program saved a run in.

    Returns None if there is no such folder.
    """
    local_folder = place.folder.local_folder
    if local_folder is None:
        return None
    folder: Path | None = load_extension(_FIND_ACCELERATE_FOLDER)(local_folder)
    return folder


def read_foreign_folder(folder: Path, run: Any, ranks: Ranks) -> ForeignFolder:
    """Read a folder that `find_foreign_folder` found, and compare it with `run`.

    The run stays as it is. Raises LoadError naming damaged files, files that Accelerate would
    unpickle, and what does not fit the run.
    """
    read: ForeignFolder = load_extension(_READ_ACCELERATE_FOLDER)(folder, run, ranks)
    return read
