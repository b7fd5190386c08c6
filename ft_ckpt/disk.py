"""Durable steps on a local file system, each safe to stop at any call. Knows folders, not checkpoints."""

import contextlib
import ctypes
import errno
import functools
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from ft_ckpt.errors import ConfigError, CorruptError, UnreadableError, damaged_input

# The calls that change the disk, each by one name, so that a test can stop the process at every one of them.
mkdir = os.mkdir
move = os.replace
unlink = os.unlink
chmod = os.chmod
fsync = os.fsync
rmtree = functools.partial(shutil.rmtree, ignore_errors=True)  # a file held open over NFS must not fail a save

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")  # two letters or more before the colon; Path leaves one slash


def local_path(place: str | os.PathLike[str]) -> Path:
    """`place` as a path of this machine.

    Raises ConfigError for a URL ("s3://...", "hf://...", "file://..."), which would become a folder of that name.
    """
    scheme = _URL.match(os.fspath(place))
    if scheme is not None:
        advice = "leave out the scheme" if scheme[1] == "file" else "give a local folder, and copy what is committed"
        raise ConfigError(f"{os.fspath(place)}: {scheme[1]}:// is no place on this machine's disks; {advice}")
    return Path(place)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. A pipe, socket or device is refused and never waited for.

    Raises OSError, or CorruptError for what is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ENXIO:  # what a socket says
            raise
        raise CorruptError(f"{path}: not a regular file; move it away") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptError(f"{path}: not a regular file; move it away")
    return os.fdopen(descriptor, "rb")


def read_text(file: Path, limit_bytes: int) -> str:
    """The UTF-8 text of a regular file.

    Raises FileNotFoundError when it is not there, UnreadableError when it cannot be read now, CorruptError when it is
    something else, or larger than `limit_bytes`.
    """
    try:
        with damaged_input(file), open_regular(file) as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            text = stream.read(limit_bytes).decode("utf-8") if size_bytes <= limit_bytes else ""
    except UnreadableError as error:
        if error.errno == errno.ENOTDIR:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file)) from error
        raise
    if size_bytes > limit_bytes:
        raise CorruptError(f"{file}: {size_bytes:,} bytes, expected at most {limit_bytes:,}; use another copy")
    return text


def names(folder: Path) -> list[str]:
    """What is in `folder`, sorted; nothing when there is no such folder. Raises OSError."""
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def exchange(one: Path, other: Path) -> None:
    """Swap two folders in one step. Raises OSError, with ENOSYS where the C library has no such call."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), "renameat2")
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))


def sync(path: Path) -> None:
    """Return when the file's bytes, or the folder's names, would survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


def sync_all(paths: Sequence[Path]) -> None:
    """`sync` all of them, in no order, side by side: a journalling file system then commits them together."""
    from concurrent.futures import ThreadPoolExecutor  # here, so that listing does not pay for it

    with ThreadPoolExecutor(max(1, min(8, len(paths)))) as pool:
        for _ in pool.map(sync, paths):
            pass


def make_folder(folder: Path) -> None:
    """Make `folder` and its parents; each is synced into its own parent, or a power cut could take the branch."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with contextlib.suppress(FileExistsError):
            mkdir(folder)
        sync(folder.parent)


def shift(paths: Iterable[str], source: Path, goal: Path) -> None:
    """Move those of `paths` that are in `source` to the same place in `goal`, durably."""
    touched = set()
    for path in sorted(paths):
        here, there = source / path, goal / path
        if os.path.lexists(here):
            make_folder(there.parent)
            move(here, there)
            touched |= {here.parent, there.parent}
    for folder in sorted(touched):
        sync(folder)


def prune(paths: Iterable[str], folder: Path) -> None:
    """Remove the folders of `paths` that moving them away has left empty."""
    parents = {parent for path in paths for parent in Path(path).parents if parent != Path()}
    for parent in sorted(parents, reverse=True):  # the deepest first
        with contextlib.suppress(OSError):
            (folder / parent).rmdir()


def temporary_name(target: Path) -> str:
    """The name of a new hidden file beside `target`; those that processes of this host left when they died go."""
    start = f".{target.name[:100]}.ft_ckpt-{socket.gethostname()}-"
    for file in target.parent.iterdir() if target.parent.is_dir() else ():
        owner = file.name[len(start) :].partition("-")[0] if file.name.startswith(start) else ""
        if owner.isdigit() and Path("/proc/self").exists() and not Path(f"/proc/{owner}").exists():
            file.unlink(missing_ok=True)
    return f"{start}{os.getpid()}-{secrets.token_hex(4)}"


def tree(folder: Path) -> Iterator[Path]:
    """Every file and folder below `folder`, contents ahead of their folder; links are not followed."""
    for place, folders, files in os.walk(folder, topdown=False):
        yield from (Path(place) / name for name in (*files, *folders))


def pieces(source: Path, goal: Path, ours: set[str]) -> list[str]:
    """What is in `source` and not among `ours`, in pieces as large as can be moved into `goal` at once."""
    shared = {parent.as_posix() for path in ours for parent in Path(path).parents}

    def walk(folder: str) -> Iterator[str]:
        for entry in os.scandir(source / folder):
            path = f"{folder}{entry.name}"
            if entry.is_dir(follow_symlinks=False) and (path in shared or (goal / path).is_dir()):
                yield from walk(f"{path}/")
            elif path not in ours:
                yield path

    return list(walk(""))


def mode(path: Path) -> int:
    """The permission bits of `path`."""
    return stat.S_IMODE(path.stat().st_mode)


def take_access(folder: Path, other: Path) -> None:
    """Give `folder` the mode and group of `other`, as far as this process may."""
    with contextlib.suppress(OSError):
        os.chown(folder, -1, other.stat().st_gid)
    if mode(folder) != mode(other):
        chmod(folder, mode(other))


def holds_cwd(folder: Path) -> bool:
    """True when this process works in `folder`: moved and deleted, it would pull the ground from under it."""
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
    escaped = re.sub(r"[\\ \t\n]", lambda found: f"\\{ord(found[0]):03o}", str(folder))
    points = (line.split(" ")[4] for line in table.splitlines())
    return any(point == escaped or point.startswith(f"{escaped}/") for point in points)
