"""Waits for free space on a disk, or makes room, before a save writes to it."""

import time
from collections.abc import Callable
from pathlib import Path

from ft_ckpt.checkpoint.commit import check_target
from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import NoSpaceError
from ft_ckpt.storage.local import folder_of
from ft_ckpt.storage.places import Place

POLL_SECONDS = 10.0
_MAX_TRIES = 2  # tries of a save that may fill the disk although there was enough space


def ensure_space(
    target: Place,
    needed_bytes: int,
    config: SaverConfig,
    tries: int,
    make_room: Callable[[Place], object] | None,
) -> None:
    """Make sure that `target` can be written and that its disk has `needed_bytes` free.

    Waits for space or makes room, as `config.when_full` says; does nothing for a bucket. `tries` is
    how often this save has filled the disk already. `make_room` deletes checkpoints that the run in
    a folder may lose. Raises NoSpaceError if there is no space and `config.when_full` allows no
    further step, TargetError if `target` cannot be written.
    """
    if target.folder.free_bytes() is None:
        return
    folder = folder_of(target.folder)
    if config.when_full == "wait":
        _wait_for_space(folder, needed_bytes, tries)
        return
    if tries == 0:
        try:
            check_target(folder, needed_bytes)
        except NoSpaceError:
            if config.when_full == "raise" or make_room is None:
                raise
        else:
            return
    if make_room is not None and tries < _MAX_TRIES:
        make_room(Place(target.beside))
    elif tries:
        raise NoSpaceError(f"{target}: the disk was full {tries} times; make room and save again")
    check_target(folder, needed_bytes)


def _wait_for_space(folder: Path, needed_bytes: int, tries: int) -> None:
    while True:
        if tries:  # an earlier check found room, and the save filled the disk
            time.sleep(POLL_SECONDS)
        try:
            check_target(folder, needed_bytes)
        except NoSpaceError:
            tries += 1
        else:
            return
