"""Looks up files, folders, permission bits and mounts at a path of a local file system.

A node of a network file system can have an old file in its cache, after another node has replaced
it. The system call then fails with ESTALE, and the look-ups here are repeated.
"""

import contextlib
import errno
import functools
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

from ft_ckpt.errors import CorruptError, TargetError
from ft_ckpt.storage.store import Stored

_P = ParamSpec("_P")
_T = TypeVar("_T")

_MAX_STALE_ANSWERS = 3
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
# The errors of a path at which there is nothing.
ABSENT = (errno.ENOENT, errno.ENOTDIR)


def retrying_stale(look_up: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a function that finds a file or folder by its path try again after ESTALE.

    The client of a network file system returns ESTALE when its cache has another file under the
    name than the server. For example, a save on another node has replaced the file.
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
    """Send a request for `path` that no cache answers.

    A client that caches names for a long time then forgets what it has cached of this one.
    """
    if path is not None:
        with contextlib.suppress(OSError):
            os.statvfs(path)


@retrying_stale
def regular_descriptor(path: Path) -> int:
    """Open a regular file for reading, without ever blocking, and return its descriptor.

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
    """Return the names in `folder`, sorted. Return none if there is no such folder.

    Raises OSError for a folder that cannot be listed.
    """
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - a path for each name takes twice as long
    except (FileNotFoundError, NotADirectoryError):
        return []


@retrying_stale
def list_entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of `folder`, sorted by name. Return none if there is no such folder.

    Raises OSError for a folder that cannot be listed.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def stored_file(name: str, status: os.stat_result) -> Stored:
    """Make the description of a file as an object of a store, from its stat result."""
    return Stored(name, status.st_size, status.st_mtime, file_version(status))


def file_version(status: os.stat_result) -> str:
    """Return a text that differs whenever the bytes of a file are replaced."""
    return f"{status.st_dev:x}-{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


def walk_tree(folder: Path) -> Iterator[Path]:
    """Yield every file and folder below `folder`. The contents of a folder come before the folder.

    Yields nothing if `folder` does not exist. Links are not followed. Raises OSError for a folder
    that cannot be listed.
    """
    for parent, folders, files in os.walk(folder, topdown=False, onerror=raise_unless_absent):
        for name in (*files, *folders):
            yield Path(parent) / name


def permission_bits(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def folder_mode(file_mode: int) -> int:
    """Return the permission bits of a folder for files with the bits `file_mode`.

    Users who can read the files can enter the folder. Its owner has all rights.
    """
    return file_mode | (file_mode & 0o444) >> 2 | stat.S_IRWXU


def real_path(target: Path) -> Path:
    """Resolve the links in `target`.

    A save to a link then replaces the file or folder that the link leads to, and not the link.
    Raises TargetError for a loop of links.
    """
    try:
        return Path(target).resolve()
    except RuntimeError as error:  # before Python 3.13
        raise TargetError(
            f"{target}: a loop of symbolic links ({error}); choose another path"
        ) from error


def raise_unless_absent(error: OSError) -> None:
    """Raise an error of `os.walk`, unless the folder is absent.

    Given as `onerror`, because `os.walk` otherwise leaves out folders that it cannot list.
    """
    if error.errno not in ABSENT:
        raise error


def is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def holds_cwd(folder: Path) -> bool:
    """Check whether the working directory is in `folder`. If so, `folder` must not be moved."""
    try:
        return Path.cwd().resolve().is_relative_to(folder)
    except FileNotFoundError:
        return False


def holds_mount(folder: Path) -> bool:
    """Check whether `folder` is a mount point or has one in it. If so, it cannot be moved."""
    if os.path.ismount(folder):
        return True
    try:
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return False
    escaped = re.sub(r"[\\ \t\n]", lambda match: f"\\{ord(match[0]):03o}", str(folder))
    points = (line.split(" ")[4] for line in table.splitlines())
    return any(point == escaped or point.startswith(f"{escaped}/") for point in points)
