"""Ensures that the disk has room for a checkpoint: raises, deletes old checkpoints, or waits."""

import time
from collections.abc import Iterable
from pathlib import Path

from ft_ckpt.checkpoint import commit
from ft_ckpt.checkpoint.prune import make_room
from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import NoSpaceError
from ft_ckpt.storage.local_store import folder_of
from ft_ckpt.storage.place import Place

POLL_SECONDS = 10.0


def ensure_space(
    target: Place,
    needed_bytes: int,
    config: SaverConfig,
    *,
    step: int | None = None,
    run_id: str | None = None,
    protect: Iterable[Place] = (),
    tries: int = 0,
) -> None:
    """Return when `target` can be written and its disk has `needed_bytes`; at once where there is no limit.

    `tries` is how often a save has filled the disk all the same. Raises NoSpaceError when there is no room and
    `config.when_full` has no more to offer, TargetError when the place cannot be written.
    """
    if target.folder.free_bytes() is None:
        return
    path = folder_of(target.folder)
    if config.when_full == "wait":
        _wait_for_space(path, needed_bytes, tries)
        return
    if tries == 0:
        try:
            commit.check_target(path, needed_bytes)
        except NoSpaceError:
            if config.when_full == "raise" or config.keep is None:
                raise
        else:
            return
    if config.keep is not None and tries < 2:
        make_room(path.parent, config.keep, step, run_id=run_id, protect=protect)
    elif tries:
        raise NoSpaceError(f"{target}: its disk was full {tries} times; make room and save again")
    commit.check_target(path, needed_bytes)


def _wait_for_space(target: Path, needed_bytes: int, tries: int) -> None:
    while True:
        if tries:  # there seemed to be room, and there was not
            time.sleep(POLL_SECONDS)
        try:
            commit.check_target(target, needed_bytes)
        except NoSpaceError:
            tries += 1
        else:
            return
