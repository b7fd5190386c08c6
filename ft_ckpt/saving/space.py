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
# A save that has filled the disk this often fails, although there seemed to be enough space.
_MAX_FULL_COUNT = 2


def ensure_space(
    target: Place,
    needed_bytes: int,
    config: SaverConfig,
    full_count: int,
    make_room: Callable[[Place], object] | None,
) -> None:
    """Make sure that `target` can be written and that its disk has `needed_bytes` free.

    `config.when_full` says whether this waits for space or makes room. For a bucket this does
    nothing. `full_count` is how often this save has filled the disk already. `make_room` deletes
    checkpoints in the folder that it is called with, as far as the retention of the run allows.
    Raises NoSpaceError if there is no space and `config.when_full` allows no further step,
    TargetError if `target` cannot be written.
    """
    if target.folder.free_bytes() is None:
        return
    folder = folder_of(target.folder)
    if config.when_full == "wait":
        _wait_for_space(folder, needed_bytes, full_count)
        return

    if full_count == 0:
        try:
            check_target(folder, needed_bytes)
        except NoSpaceError:
            if config.when_full == "raise" or make_room is None:
                raise
        else:
            return

    if make_room is not None and full_count < _MAX_FULL_COUNT:
        make_room(Place(target.beside))
    elif full_count:
        raise NoSpaceError(
            f"{target}: the disk was full {full_count} times; make room and save again"
        )

    check_target(folder, needed_bytes)


def _wait_for_space(folder: Path, needed_bytes: int, full_count: int) -> None:
    # If this save has filled the disk, the check may still pass: so it waits before the first one.
    must_wait = full_count > 0
    while True:
        if must_wait:
            time.sleep(POLL_SECONDS)
        try:
            check_target(folder, needed_bytes)
        except NoSpaceError:
            must_wait = True
        else:
            return
