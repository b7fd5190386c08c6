"""What a user asks `resume` for: a mode, or a checkpoint by its name, path or URL."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ft_ckpt.errors import ConfigError
from ft_ckpt.messages import LOG
from ft_ckpt.runs.folder import RunPlaces
from ft_ckpt.runs.loop import in_words
from ft_ckpt.storage.places import Place, open_place

MODES = ("auto", "must", "never")
_AUTO = ("latest", "newest", "last", "True", "true")


def parse_mode(checkpoint: Any) -> str | Place:
    """Parse the argument of `resume`: one of MODES, or a checkpoint's name, path, URL or place.

    Raises ConfigError.
    """
    if checkpoint is None:
        return "auto"
    if checkpoint is True or checkpoint in _AUTO:
        LOG.info(
            "resume(%r) is resume('auto'): the newest checkpoint, or a fresh start", checkpoint
        )
        return "auto"
    if checkpoint is False:
        return "never"
    if isinstance(checkpoint, Place):
        return checkpoint
    if isinstance(checkpoint, (str, Path)) and str(checkpoint):
        return str(checkpoint)
    raise ConfigError(
        f"resume(): {in_words(checkpoint)}, expected {', '.join(map(repr, MODES))}, a checkpoint's "
        "name, its path or its URL; objects of the run go by name, as model=model"
    )


@dataclass(frozen=True)
class ResumeRequest:
    """Which checkpoint to resume from, and how strictly.

    `mode` is one of `parse_mode`, looked up in the folders of the run.
    """

    mode: str | Place
    places: RunPlaces
    options: Mapping[str, Any] = field(default_factory=dict)  # client options for URLs
    deep: bool = True  # compare all digests

    @property
    def is_named(self) -> bool:
        """True if the user named one checkpoint (name, path, URL or place)."""
        return self.mode not in MODES

    @property
    def place(self) -> Place:
        """The named checkpoint: the run's own of that name, else a path.

        A name with a separator is a path.
        """
        if isinstance(self.mode, Place):
            return self.mode
        if self.places.directory is None or os.sep in self.mode:
            return self.open_path(self.mode)
        of_run = [Place(folder.folder, self.mode) for folder in reversed(self.places.folders)]
        for place in (*of_run, open_place(self.mode)):
            if folder_exists(place):
                return place
        return of_run[-1]

    def open_path(self, path: str) -> Place:
        """Open the place at a path or URL.

        Places below the named checkpoint or the run's directory share the client of these.
        """
        for place in (self.mode, self.places.directory):
            if isinstance(place, Place) and f"{path}/".startswith(f"{place.folder.url}/"):
                below = path[len(place.folder.url) + 1 :]
                return Place(place.folder, below) if below else place
        return open_place(path, **self.options)


def folder_exists(place: Place) -> bool:
    return place.folder.list_folder().exists
