"""What a user asks `resume` for: a mode, or a checkpoint by its name, path or URL.

A place is a folder on a disk or a prefix in a bucket.
"""

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
# what users of other libraries pass for "auto"
_NAMES_OF_AUTO = ("latest", "newest", "last", "True", "true")


def parse_mode(checkpoint: Any) -> str | Place:
    """Convert the argument of `resume` to one of MODES, or to a checkpoint's name, path or URL.

    A place stays a place. Raises ConfigError for anything else.
    """
    if checkpoint is None:
        return "auto"
    if checkpoint is True or checkpoint in _NAMES_OF_AUTO:
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
    """Which checkpoint to resume from, and how strictly it is compared.

    Attributes:
        mode: A result of `parse_mode`.
        places: The folders of the run, in which the checkpoint is looked up.
        options: Options of the clients for URLs, as for `open_place`.
        deep: Whether all digests are compared.
    """

    mode: str | Place
    places: RunPlaces
    options: Mapping[str, Any] = field(default_factory=dict)
    deep: bool = True

    @property
    def is_named(self) -> bool:
        """True if the user named one checkpoint (name, path, URL or place)."""
        return self.mode not in MODES

    @property
    def place(self) -> Place:
        """The place of the checkpoint that the user named.

        A name without a separator is looked up in the folders of the run, the upload folder first.
        If no such folder exists there, the name is taken for a path. If nothing exists at all, the
        place is the one in the run's directory.
        """
        if isinstance(self.mode, Place):
            return self.mode
        if self.places.directory is None or os.sep in self.mode:
            return self.open_path(self.mode)
        in_run = [Place(folder.folder, self.mode) for folder in reversed(self.places.folders)]
        for place in (*in_run, open_place(self.mode)):
            if folder_exists(place):
                return place
        return in_run[-1]

    def open_path(self, path: str) -> Place:
        """Open the place at a path or URL.

        If it is below the named checkpoint or below the run's directory, it uses the same client.
        """
        for place in (self.mode, self.places.directory):
            if isinstance(place, Place) and f"{path}/".startswith(f"{place.folder.url}/"):
                below = path[len(place.folder.url) + 1 :]
                return Place(place.folder, below) if below else place
        return open_place(path, **self.options)


def folder_exists(place: Place) -> bool:
    return place.folder.list_folder().exists
