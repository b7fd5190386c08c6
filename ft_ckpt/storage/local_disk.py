"""Changes files and folders of a local file system so that the changes survive a power cut.

Each operation is safe to interrupt between any two of its system calls. In tests, the process is
killed at each of them.
"""

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

# The calls that change the disk. Tests replace these names, to stop the process at each call.
mkdir = os.mkdir
move = os.replace
exchange_folders = libc.exchange_folders
unlink = os.unlink
chmod = os.chmod
fsync = os.fsync
# Errors are ignored, because a file that is open over NFS must not fail a save.
rmtree = functools.partial(shutil.rmtree, ignore_errors=True)

PREFIX = ".ft_ckpt-"  # every hidden name inside a checkpoint begins with it
# If nothing is known of the process that left a file or folder, it counts as ended after this time.
ABANDONED_SECONDS = 24 * 3600
# So many paths are synced without threads, because starting them takes longer.
_FEW_PATHS = 4
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
# Errors of vfat, and of some mounts of FUSE and CIFS.
_CANNOT_CHMOD = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
CANNOT_LINK = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
# The devices without permissions that this process has warned of.
_devices_without_modes: set[int] = set()


def sync_path(path: Path) -> None:
    """Sync the bytes of a file, or the names in a folder, so that they survive a power cut."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync_open(handle)
    finally:
        os.close(handle)


def sync_open(handle: int) -> None:
    """Sync an open file or folder. Does nothing on file systems that cannot sync it."""
    try:
        fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def sync_all(paths: Sequence[Path]) -> None:
    """Sync all `paths`, in parallel and in no order.

    In parallel, because a journalling file system then commits them together.
    """
    if len(paths) <= _FEW_PATHS:
        for path in paths:
            sync_path(path)
        return
    from concurrent.futures import ThreadPoolExecutor  # lazily: `ft-ckpt ls` does not need it

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync_path, paths))


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make `folder` and its parents, and sync the parent of each new folder.

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

    If `like` is given, missing folders are made, with at most the permissions of the folders of the
    same names in `like`. Raises FileNotFoundError for a missing folder, NotADirectoryError when a
    link or a file is in the way, and other OSErrors.
    """
    handle = os.open(folder, _FOLDER)
    try:
        for step in PurePath(below).parts:
            if like is not None:
                like = like / step
                with contextlib.suppress(FileExistsError):
                    mkdir(step, permission_bits(like), dir_fd=handle)
                    sync_open(handle)
            parent = handle
            handle = os.open(step, _FOLDER, dir_fd=parent)
            os.close(parent)
        yield handle
    finally:
        os.close(handle)


def move_files(paths: Iterable[str], source: Path, target: Path, *, replace: bool = True) -> None:
    """Move those of `paths` that are in the folder `source` to the same paths in `target`, durably.

    Links are not followed. If `replace` is False, a file whose path exists in `target` stays in
    `source`.
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
            target_handle = stack.enter_context(folder_handle(target, below, like=source))
            for name in present:
                if replace or not _is_in(target_handle, name):
                    move(name, name, src_dir_fd=source_handle, dst_dir_fd=target_handle)

            # After a power cut a file can be in both folders, but must not be missing in both.
            sync_open(source_handle)
            sync_open(target_handle)


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
            # Without this, a power cut could bring back files that no record lists any more.
            sync_open(handle)


def file_stats(paths: Iterable[str], folder: Path) -> list[os.stat_result]:
    """Return the stat results of those of `paths` that `delete_files` would find in `folder`."""
    stats = []
    for below, names in _by_folder(paths):
        with contextlib.suppress(OSError), folder_handle(folder, below) as handle:
            for name in names:
                with contextlib.suppress(OSError):
                    stats.append(os.stat(name, dir_fd=handle, follow_symlinks=False))
    return stats


def remove_empty_folders(paths: Iterable[str], folder: Path) -> None:
    """Remove the parent folders of `paths` in `folder` that are empty now.

    Called after the files were moved or deleted.
    """
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
    """Group paths by folder: ["a/x", "a/y"] becomes [("a", ["x", "y"])]."""
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


def movable_pieces(source: Path, target: Path, excluded: set[str]) -> list[str]:
    """Find the files and folders of `source` that can be moved into `target`, each by one rename.

    All of `source` is moved except the `excluded` paths. A folder cannot be moved as a whole if it
    holds an excluded path, or if `target` has such a folder, too. Then its contents are moved.
    """
    folders_with_excluded: set[str] = set()
    for path in excluded:
        folders_with_excluded.update(parent.as_posix() for parent in Path(path).parents)

    def walk(folder: str) -> Iterator[str]:
        for entry in os.scandir(source / folder):
            path = f"{folder}{entry.name}"
            is_real_folder = entry.is_dir(follow_symlinks=False)
            if is_real_folder and (path in folders_with_excluded or is_folder(target / path)):
                yield from walk(f"{path}/")
            elif path not in excluded:
                yield path

    return list(walk(""))


def set_mode(path: Path, mode: int) -> None:
    """Set the permission bits of a file or folder.

    If its file system cannot, and gives other users more access than `mode`, this warns once for
    each device.
    """
    if permission_bits(path) == mode:
        return
    try:
        chmod(path, mode)
    except OSError as error:
        if error.errno not in _CANNOT_CHMOD:
            raise
    warn_if_open(path, path.stat(), mode)


def warn_if_open(path: Path, status: os.stat_result, mode: int) -> None:
    """Warn once for each device that gives other users more access to a file than `mode`.

    `path` and `status` are those of the file.
    """
    is_too_open = stat.S_IMODE(status.st_mode) & ~mode & 0o077
    if is_too_open and status.st_dev not in _devices_without_modes:
        _devices_without_modes.add(status.st_dev)
        warn(
            f"{path.parent}: its file system keeps no permissions, so others may read files closed "
            "to them; mount it with a narrower umask, or choose another path",
        )


def take_mode(path: Path, replaced: os.stat_result, max_mode: int = 0o777) -> None:
    """Give `path` the permission bits of the file or folder that it will replace.

    `replaced` is the stat result of that. The bits are limited by `max_mode`, as in `LocalStore`.
    """
    if stat.S_ISDIR(replaced.st_mode):
        limit = folder_mode(max_mode) | 0o7000
        set_mode(path, replaced.st_mode & limit | stat.S_IRWXU)
    else:
        set_mode(path, replaced.st_mode & max_mode | stat.S_IRUSR)


def move_new(draft: Path, path: Path) -> None:
    """Move `draft` to `path`. Raises FileExistsError if `path` exists.

    A rename would replace an existing file. So `path` becomes a hard link to the file, and `draft`
    is deleted. If the file system has no hard links, an empty file takes the name, and the rename
    replaces that.
    """
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in CANNOT_LINK:
            raise
        # The call fails if `path` exists.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        move(draft, path)
    else:
        unlink(draft)
