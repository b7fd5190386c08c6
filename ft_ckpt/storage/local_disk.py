"""Durable operations on a local file system, each safe to interrupt at any call."""

import contextlib
import errno
import functools
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath

from ft_ckpt.errors import TargetError
from ft_ckpt.messages import warn
from ft_ckpt.storage import libc
from ft_ckpt.storage.look_ups import folder_mode, is_folder, permission_bits

# Calls that change the disk, under names that tests can replace to stop the process at each of
# them.
mkdir = os.mkdir
move = os.replace
exchange_folders = libc.exchange_folders
unlink = os.unlink
chmod = os.chmod
fsync = os.fsync
# a file that is open over NFS must not fail a save
rmtree = functools.partial(shutil.rmtree, ignore_errors=True)

PREFIX = ".ft_ckpt-"  # of every hidden name inside a checkpoint
# age at which leftovers of other machines, whose owner is unknown, are abandoned
ABANDONED_SECONDS = 24 * 3600
_FEW_PATHS = 4  # for more, threads pay
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
# vfat, some mounts of FUSE and CIFS
_CANNOT_CHMOD = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
CANNOT_LINK = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
_without_modes: set[int] = set()  # devices that were warned about


def sync_path(path: Path) -> None:
    """Sync a file's bytes, or a folder's names, so that they survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_open(handle)
    finally:
        os.close(handle)


def sync_open(handle: int) -> None:
    """Sync an open file or folder. On file systems without such a call this does nothing."""
    try:
        fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def sync_all(paths: Sequence[Path]) -> None:
    """Sync all `paths`, in parallel and in no order.

    A journalling file system then commits them together.
    """
    if len(paths) <= _FEW_PATHS:
        for path in paths:
            sync_path(path)
        return
    from concurrent.futures import ThreadPoolExecutor  # lazily: `ft-ckpt ls` does not need it

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync_path, paths))


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make `folder` and its parents, each synced into its parent so that it survives a power cut.

    `mode` limits the permission bits of `folder` itself.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            mkdir(folder, mode)
        sync_path(folder.parent)


@contextlib.contextmanager
def folder_handle(folder: Path, below: str = "", *, like: Path | None = None) -> Iterator[int]:
    """Open a descriptor of the folder `below` in `folder`, without following links.

    With `like`, missing folders are made, no more open than those in `like`. Raises OSError:
    FileNotFoundError for a missing folder, NotADirectoryError when a link or a file is in the way.
    """
    handle = os.open(folder, _FOLDER)
    try:
        for step in PurePath(below).parts:
            if like is not None:
                like = like / step
                with contextlib.suppress(FileExistsError):
                    mkdir(step, permission_bits(like), dir_fd=handle)
                    sync_open(handle)
            parent, handle = handle, os.open(step, _FOLDER, dir_fd=handle)
            os.close(parent)
        yield handle
    finally:
        os.close(handle)


def move_files(paths: Iterable[str], source: Path, goal: Path, *, replace: bool = True) -> None:
    """Move those of `paths` that are in `source` to the same path in `goal`, durably.

    Links are not followed. Without `replace`, a file whose path exists in `goal` stays in `source`.
    """
    for below, names in _by_folder(paths):
        with contextlib.ExitStack() as stack:
            try:
                source_handle = stack.enter_context(folder_handle(source, below))
            except (FileNotFoundError, NotADirectoryError):
                continue
            present = [name for name in names if _is_in(source_handle, name)]
            if not present:
                continue
            goal_handle = stack.enter_context(folder_handle(goal, below, like=source))
            for name in present:
                if replace or not _is_in(goal_handle, name):
                    move(name, name, src_dir_fd=source_handle, dst_dir_fd=goal_handle)
            # after a power cut a file may exist twice, but must not be lost
            sync_open(source_handle)
            sync_open(goal_handle)


def delete_files(paths: Iterable[str], folder: Path) -> None:
    """Delete those of `paths` that are files or links in `folder`, durably.

    Links are not followed.
    """
    for below, names in _by_folder(paths):
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError),
            folder_handle(folder, below) as handle,
        ):
            for name in names:
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                    unlink(name, dir_fd=handle)
            # otherwise a power cut could restore files that no record lists any more
            sync_open(handle)


def file_stats(paths: Iterable[str], folder: Path) -> list[os.stat_result]:
    """Return the stat results of the `paths` that `delete_files` would delete from `folder`."""
    stats = []
    for below, names in _by_folder(paths):
        with contextlib.suppress(OSError), folder_handle(folder, below) as handle:
            for name in names:
                with contextlib.suppress(OSError):
                    stats.append(os.stat(name, dir_fd=handle, follow_symlinks=False))
    return stats


def remove_empty_folders(paths: Iterable[str], folder: Path) -> None:
    """Remove the folders of `paths` that are empty after moving or deleting them."""
    parents: set[PurePath] = set()
    for path in paths:
        parents.update(PurePath(path).parents)
    for parent in sorted(parents - {PurePath()}, reverse=True):  # the deepest first
        with contextlib.suppress(OSError), folder_handle(folder, str(parent.parent)) as handle:
            os.rmdir(parent.name, dir_fd=handle)


def delete_folder(folder: Path) -> None:
    """Delete `folder` and its contents without following links.

    Raises TargetError when something is left.
    """
    rmtree(folder)
    if os.path.lexists(folder):
        raise TargetError(
            f"{folder}: not deleted completely; delete it by hand if the next save does not"
        )


def _by_folder(paths: Iterable[str]) -> list[tuple[str, list[str]]]:
    names: dict[str, list[str]] = {}
    for path in sorted(paths):
        names.setdefault(str(PurePath(path).parent), []).append(PurePath(path).name)
    return sorted(names.items())


def _is_in(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def movable_pieces(source: Path, goal: Path, excluded: set[str]) -> list[str]:
    """Find the largest subtrees of `source` that can be moved into `goal` at once.

    A folder that holds an `excluded` path is divided further.
    """
    shared: set[str] = set()  # folders that hold an excluded path
    for path in excluded:
        shared.update(parent.as_posix() for parent in Path(path).parents)

    def walk(folder: str) -> Iterator[str]:
        for entry in os.scandir(source / folder):
            path = f"{folder}{entry.name}"
            is_real_folder = entry.is_dir(follow_symlinks=False)
            if is_real_folder and (path in shared or is_folder(goal / path)):
                yield from walk(f"{path}/")
            elif path not in excluded:
                yield path

    return list(walk(""))


def set_mode(path: Path, mode: int) -> None:
    """Set the permission bits of a file or folder, if its file system has permissions.

    Warns once for each device that gives others more access than `mode`.
    """
    if permission_bits(path) == mode:
        return
    try:
        chmod(path, mode)
    except OSError as error:
        if error.errno not in _CANNOT_CHMOD:
            raise
    warn_if_open(path, path.stat(), mode)


def warn_if_open(path: Path, facts: os.stat_result, mode: int) -> None:
    """Warn once for each device that gives others more access to files than `mode`."""
    is_too_open = stat.S_IMODE(facts.st_mode) & ~mode & 0o077
    if is_too_open and facts.st_dev not in _without_modes:
        _without_modes.add(facts.st_dev)
        warn(
            f"{path.parent}: its file system keeps no permissions, so others may read files closed "
            "to them; mount it with a narrower umask, or choose another path",
        )


def take_mode(path: Path, replaced: os.stat_result, max_mode: int = 0o777) -> None:
    """Give `path` the permission bits of what it replaces, limited by `max_mode`.

    See LocalStore.
    """
    if stat.S_ISDIR(replaced.st_mode):
        limit = folder_mode(max_mode) | 0o7000
        set_mode(path, replaced.st_mode & limit | stat.S_IRWXU)
    else:
        set_mode(path, replaced.st_mode & max_mode | stat.S_IRUSR)


def move_new(draft: Path, path: Path) -> None:
    """Move `draft` to `path`, which must not exist.

    By a hard link, because a rename would replace a file.

    Without hard links, an empty file takes the name first. Raises FileExistsError.
    """
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise
        # takes the name
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        move(draft, path)
    else:
        unlink(draft)
