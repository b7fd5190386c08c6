"""Durable operations on a local file system, each safe to interrupt at any call."""

import contextlib
import errno
import functools
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import ParamSpec, TypeVar

from ft_ckpt.errors import CorruptError, TargetError
from ft_ckpt.messages import warn
from ft_ckpt.storage import libc
from ft_ckpt.storage.store import Stored

_P = ParamSpec("_P")
_T = TypeVar("_T")

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
_MAX_STALE_ANSWERS = 3
_FEW_PATHS = 4  # for more, threads pay
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
ABSENT = (errno.ENOENT, errno.ENOTDIR)
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
# vfat, some mounts of FUSE and CIFS
_CANNOT_CHMOD = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
CANNOT_LINK = {errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS}
_without_modes: set[int] = set()  # devices that were warned about


def retrying_stale(look_up: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let `look_up`, which finds a file or folder by its path, look again after ESTALE.

    The client of a network file system gives it when the name leads to another file by now than the
    one in its cache, as a save of another node has replaced it.
    """

    @functools.wraps(look_up)
    def look_again(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        answers = 0
        while True:
            answers += 1
            try:
                return look_up(*args, **kwargs)
            except OSError as error:
                if error.errno != errno.ESTALE or answers == _MAX_STALE_ANSWERS:
                    raise
                _ask_server(error.filename)

    return look_again


def _ask_server(path: str | Path | None) -> None:
    """Send a request that no cache answers.

    A client that caches names for long then forgets what it knew of this one.
    """
    if path is not None:
        with contextlib.suppress(OSError):
            os.statvfs(path)


@retrying_stale
def regular_descriptor(path: Path) -> int:
    """A descriptor of a regular file, for reading; opening never blocks.

    Raises OSError, or CorruptError for anything but a regular file.
    """
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket
            raise
        raise CorruptError(f"{path}: not a regular file; move it away") from error
    try:
        is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    if not is_regular:
        os.close(descriptor)
        raise CorruptError(f"{path}: not a regular file; move it away")
    return descriptor


@retrying_stale
def list_names(folder: Path) -> list[str]:
    """The names in `folder`, sorted; none when there is no such folder. Raises OSError."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - a path for each name takes twice as long
    except (FileNotFoundError, NotADirectoryError):
        return []


@retrying_stale
def list_entries(folder: Path) -> list[os.DirEntry[str]]:
    """The entries of `folder`, sorted by name; none when there is no such folder.

    Raises OSError.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def stored_file(name: str, facts: os.stat_result) -> Stored:
    """A file with this stat result as an object of a store."""
    return Stored(name, facts.st_size, facts.st_mtime, file_version(facts))


def file_version(facts: os.stat_result) -> str:
    """A text that differs whenever the bytes of a file are replaced."""
    return f"{facts.st_dev:x}-{facts.st_ino:x}-{facts.st_mtime_ns:x}-{facts.st_size:x}"


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
    """A descriptor of the folder `below` in `folder`, opened without following links.

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
    """The stat results of those of `paths` that `delete_files` would delete from `folder`."""
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


def walk_tree(folder: Path) -> Iterator[Path]:
    """Every file and folder below `folder`, contents before their folder; nothing if it is absent.

    Links are not followed. Raises OSError for a folder that cannot be listed.
    """
    for parent, folders, files in os.walk(folder, topdown=False, onerror=raise_unless_absent):
        for name in (*files, *folders):
            yield Path(parent) / name


def movable_pieces(source: Path, goal: Path, excluded: set[str]) -> list[str]:
    """The largest subtrees of `source` that can be moved into `goal` at once.

    Paths that are `excluded` are in none of them.
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


def permission_bits(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def folder_mode(file_mode: int) -> int:
    """The permission bits of a folder of files with `file_mode`.

    Who may read them may enter; the owner may do all.
    """
    return file_mode | (file_mode & 0o444) >> 2 | stat.S_IRWXU


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
            stacklevel=6,
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


def real_path(target: Path) -> Path:
    """`target` with links resolved, so that a link stays and its target is replaced.

    TargetError for a loop.
    """
    try:
        return Path(target).resolve()
    except RuntimeError as error:  # before Python 3.13
        raise TargetError(
            f"{target}: a loop of symbolic links ({error}); choose another path"
        ) from error


def raise_unless_absent(error: OSError) -> None:
    """For `os.walk`, which leaves out what it cannot list."""
    if error.errno not in ABSENT:
        raise error


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def holds_cwd(folder: Path) -> bool:
    """Whether the working directory is in `folder`, which then must not be moved or deleted."""
    try:
        return Path.cwd().resolve().is_relative_to(folder)
    except FileNotFoundError:
        return False


def holds_mount(folder: Path) -> bool:
    """True when `folder` is a mount point or has one in it: such folders cannot be moved."""
    if os.path.ismount(folder):
        return True
    try:
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False
    escaped = re.sub(r"[\\ \t\n]", lambda match: f"\\{ord(match[0]):03o}", str(folder))
    points = (line.split(" ")[4] for line in table.splitlines())
    return any(point == escaped or point.startswith(f"{escaped}/") for point in points)
