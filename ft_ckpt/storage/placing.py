"""Hidden folders that things are made in, beside their place; the process that makes them has their locks."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ft_ckpt.storage import local_disk, owners

PREFIX = ".ft_ckpt-"  # of every hidden name of ours inside of a checkpoint
DRAFTS = ".ft_ckpt-file-"  # in the names of folders that a file is made in
ABANDONED_SECONDS = 24 * 3600  # after which what another machine made, where we cannot ask for its owner, is nobody's


def make_locked_folder(place: Callable[[str], Path], mode: int = 0o777) -> Path:
    """Make a new folder whose lock this process holds; `place` says where, from the name of its owner."""
    while True:
        folder = place(owners.new_owner())
        local_disk.mkdir(folder, mode)
        if owners.hold_lock(folder) is not False:  # else another took it for a dead one's in that instant
            return folder


def clear_drafts(folder: Path) -> None:
    """Delete folders that a file was made in anywhere in `folder`, which is the caller's alone. Raises TargetError."""
    for path in list(local_disk.walk_tree(folder)):
        if DRAFTS in path.name and local_disk.is_folder(path):
            local_disk.delete_folder(path)


@contextlib.contextmanager
def locked_folder(parent: Path, start: str, mode: int = 0o777) -> Iterator[Path]:
    """Yield a new folder in `parent` whose name begins with `start`, and delete it after the block.

    It is locked for as long: folders of the same kind whose processes were killed are deleted first.
    """
    for name in local_disk.list_names(parent):
        if name.startswith(start) and re.fullmatch(owners.OWNER, name[len(start) :]):
            with owners.claim_leftover(parent / name, name, ABANDONED_SECONDS) as gone:
                if gone:
                    local_disk.rmtree(parent / name)
    folder = make_locked_folder(lambda owner: parent / f"{start}{owner}", mode)
    try:
        yield folder
    finally:
        local_disk.rmtree(folder)
        owners.release_lock(folder)
