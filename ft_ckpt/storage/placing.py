"""Files and folders that are made beside their place and then put there in one step."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from ft_ckpt.errors import TargetError
from ft_ckpt.storage import local_disk, owners
from ft_ckpt.storage.access import FREE, Access

PREFIX = ".ft_ckpt-"  # of every hidden name of ours inside of a checkpoint
ABANDONED_SECONDS = 24 * 3600  # after which what another machine made, where we cannot ask for its owner, is nobody's
_FILE = ".ft_ckpt-file-"  # in the names of folders that a file is made in
_NAME_BYTES = 150  # of a target's name in that of a hidden folder; 255 are allowed


def file_target(path: str | os.PathLike[str]) -> Path:
    """The path of a file to write, without links: one that is replaced stays where it leads to.

    Raises TargetError for a folder, and where there is no folder to write it in; ConfigError for a URL.
    """
    target = Path(os.path.realpath(local_disk.local_path(path)))
    if target.is_dir() or not target.parent.is_dir():
        raise TargetError(f"{path}: {'a folder' if target.is_dir() else 'its folder does not exist'}; name a file")
    return target


def spool_file(folder: Path | None = None) -> BinaryIO:
    """A file without a name and without a buffer, on the disk of `folder`, if given; gone when it is closed."""
    import tempfile  # here, so that listing does not pay for it

    return cast("BinaryIO", tempfile.TemporaryFile(dir=folder, buffering=0))


@contextlib.contextmanager
def replace_file(target: Path, access: Access = FREE) -> Iterator[Path]:
    """Yield a path at which the block makes a file, then move that file to `target` atomically and durably.

    The folder of `target` is made, too, where it is missing. When the block raises, nothing is left of the file and
    `target` is unchanged. The file gets the group and permissions of the one it replaces, never more than `access`.
    Raises OSError.
    """
    local_disk.make_folder(target.parent)
    with _draft_folder(target) as folder:
        file = folder / target.name
        yield file
        with contextlib.suppress(FileNotFoundError):
            local_disk.take_access(file, target.stat(), access)
        local_disk.sync_path(file)
        local_disk.move(file, target)
        local_disk.sync_path(target.parent)


def clear_drafts(folder: Path) -> None:
    """Delete drafts of `replace_file` anywhere in `folder`, which is the caller's alone. Raises TargetError."""
    for path in list(local_disk.walk_tree(folder)):
        if _FILE in path.name and local_disk.is_folder(path):
            local_disk.delete_folder(path)


def make_locked_folder(place: Callable[[str], Path], mode: int = 0o777) -> Path:
    """Make a new folder whose lock this process holds; `place` says where, from the name of its owner."""
    while True:
        folder = place(owners.new_owner())
        local_disk.mkdir(folder, mode)
        if owners.hold_lock(folder) is not False:  # else another took it for a dead one's in that instant
            return folder


@contextlib.contextmanager
def _draft_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden, locked folder beside `target` and delete it afterwards; deletes those of dead processes, too."""
    start = f".{os.fsencode(target.name)[:_NAME_BYTES].decode('utf-8', 'ignore')}{_FILE}"
    for name in local_disk.list_names(target.parent):
        if name.startswith(start):
            with owners.claim_leftover(target.parent / name, name, ABANDONED_SECONDS) as gone:
                if gone:
                    local_disk.rmtree(target.parent / name)
    folder = make_locked_folder(lambda owner: target.parent / f"{start}{owner}", 0o700)
    try:
        yield folder
    finally:
        local_disk.rmtree(folder)
        owners.release_lock(folder)
