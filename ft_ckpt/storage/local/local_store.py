"""A local folder as a store. Objects are files; unfinished ones are hidden drafts next to them."""

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from ft_ckpt.errors import ConfigError, MissingError, UnreadableError, damaged_input, explained
from ft_ckpt.messages import clean_causes
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.io import BLOCK_BYTES, LocalFile, LocalWriting, allocate_file, create_file
from ft_ckpt.storage.local.locks import locked_folder
from ft_ckpt.storage.local_disk import PREFIX
from ft_ckpt.storage.look_ups import (
    ABSENT,
    folder_mode,
    list_entries,
    list_names,
    permission_bits,
    raise_unless_absent,
    regular_descriptor,
    retrying_stale,
    stored_file,
)
from ft_ckpt.storage.store import (
    Folder,
    FolderListing,
    Readable,
    Store,
    Stored,
    checked_name,
    is_name,
    read_object,
)

_DRAFT = ".draft"


@dataclass(frozen=True)
class LocalStore:
    """The files below `folder`, which need not exist yet.

    Links are followed when reading, never when deleting.
    """

    folder: Path
    # new objects from this size on go past the page cache; None: none does
    direct_bytes: int | None = BLOCK_BYTES
    # whether objects survive a power cut at once; in a stage, the commit syncs all files
    syncs: bool = True
    # no new file has permission bits beyond these, no new folder beyond `folder_mode` of them
    max_mode: int = 0o777
    # the path in messages, whose parent is searched for other folders; None: `folder`
    shown: Path | None = None

    @property
    def url(self) -> str:
        return str(self.shown or self.folder)

    @property
    def identity(self) -> str:
        return os.path.realpath(self.folder)

    @property
    def local_folder(self) -> Path:
        return self.folder

    @property
    def absolute(self) -> "LocalStore":
        shown = None if self.shown is None else self.shown.absolute()
        return replace(self, folder=self.folder.absolute(), shown=shown)

    @property
    def unsynced(self) -> "LocalStore":
        return replace(self, syncs=False)

    def limited(self, max_mode: int) -> "LocalStore":
        return replace(self, max_mode=self.max_mode & max_mode)

    @property
    def parent(self) -> "LocalStore | None":
        path = Path(self.url).absolute()
        return None if path == path.parent else LocalStore(path.parent)

    def within(self, folder: str) -> "LocalStore":
        name = checked_name(folder, is_name)
        shown = None if self.shown is None else self.shown / name
        return replace(self, folder=self.folder / name, shown=shown)

    def where(self, name: str) -> str:
        return str(Path(self.url, name))

    def path(self, name: str) -> Path:
        """Return the path of an object; any file name is allowed.

        Raises ConfigError for a name that leads out of the store.
        """
        return self.folder / checked_name(name, is_name)

    @retrying_stale
    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return read_object(self, name, start, stop)

    def open(self, name: str) -> Readable:
        """Open a file for reading. Raises CorruptError for anything but a regular file."""
        path = self.path(name)
        with _reading(self.where(name)):
            return LocalFile(name, Path(self.where(name)), regular_descriptor(path))

    def write(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small file; one that replaces another keeps its permissions."""
        path, draft = self.path(name), None
        if self.syncs and not create_only:
            draft = path.with_name(f"{PREFIX}{path.name.lstrip('.')}{_DRAFT}")
            # that of a killed process
            with explained(path), contextlib.suppress(FileNotFoundError):
                local_disk.unlink(draft)
        writing = self._begin_file(name, len(data), draft, is_new=create_only)
        try:
            writing.write(0, memoryview(data))
            writing.finish()
        except BaseException:
            writing.abandon()
            raise

    def create(self, name: str, size_bytes: int) -> LocalWriting:
        """Create a file and allocate its space at once. Raises NoSpaceError when there is none."""
        return self._begin_file(name, size_bytes)

    def allocate(self, name: str, size_bytes: int) -> None:
        """Allocate the space of the file that will be `share`d under this name.

        Creates it if it does not exist.
        """
        path = self.path(name)
        with explained(path):
            self.make_parents(path)
        allocate_file(path, size_bytes, self.max_mode)

    def share(self, name: str, size_bytes: int) -> LocalWriting:
        """Open a file of which other processes write other ranges; the first process creates it.

        The file is visible from the start. `finish` makes the bytes of this process durable and
        does not check that all bytes were written; `abandon` keeps the file.
        """
        return self._begin_file(name, size_bytes, self.path(name), shared=True)

    def list(self, prefix: str = "") -> list[Stored]:
        """List all files without drafts; folders that are links are not entered."""
        top = self.path(prefix) if prefix else self.folder
        objects = []
        with _reading(self.where(prefix)):
            for path in _files_below(top):
                facts = None if _is_draft(path.name) else _regular(path)
                if facts is not None:
                    name = path.relative_to(self.folder).as_posix()
                    objects.append(stored_file(name, facts))
        return sorted(objects, key=lambda stored: stored.name)

    def list_folder(self, prefix: str = "") -> FolderListing:
        top = self.path(prefix) if prefix else self.folder
        start = f"{prefix}/" if prefix else ""
        folders, objects = [], []
        with _reading(self.where(prefix)):
            for entry in list_entries(top):
                if _may_be_folder(entry):
                    identity = os.path.realpath(entry.path)
                    folders.append(Folder(entry.name, identity, entry.is_symlink()))
                    continue
                facts = None if _is_draft(entry.name) else _regular(entry.path)
                if facts is not None:
                    objects.append(stored_file(start + entry.name, facts))
        folders.sort(key=lambda folder: folder.is_link)
        return FolderListing(os.path.lexists(top), tuple(folders), tuple(objects))

    def stat(self, name: str) -> Stored | None:
        """Describe a regular file; return None for a folder, or anything else."""
        path = self.path(name)
        with _reading(self.where(name)):
            facts = _regular(path)
        return None if facts is None else stored_file(name, facts)

    def copy(self, name: str, other: str, source: Store | None = None) -> bool:
        """Link the file under another name.

        Returns False also for a link, and for a file with more permissions for other users than
        `max_mode`.
        """
        store = self if source is None else source
        if store.local_folder is None:
            return False
        origin = store.local_folder / checked_name(name, is_name)
        goal = self.path(other)
        if store.stat(name) is None:
            raise _missing(store.where(name))
        if permission_bits(origin) & ~self.max_mode & 0o077:
            return False
        draft = _draft_name(goal)
        with explained(goal):
            self.make_parents(goal)
            try:
                os.link(origin, draft, follow_symlinks=False)
                if draft.is_symlink():
                    return False
                local_disk.move(draft, goal)
            except OSError as error:
                if error.errno in local_disk.CANNOT_LINK:
                    return False
                raise
            finally:
                with contextlib.suppress(OSError):
                    local_disk.unlink(draft)
            if self.syncs:
                local_disk.sync_path(goal.parent)
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, and the folders that become empty."""
        names = [checked_name(name) for name in names]
        with explained(self.folder), contextlib.suppress(FileNotFoundError):
            local_disk.delete_files(names, self.folder)
            local_disk.remove_empty_folders(names, self.folder)

    def delete_all(self) -> None:
        """Delete the folder and its contents as far as possible; links are not followed."""
        local_disk.rmtree(self.folder)

    def free_bytes(self) -> int | None:
        """Return this user's free bytes on the device of the folder or its nearest parent."""
        with explained(self.folder):
            folder = self.folder.absolute()
            while not folder.exists():
                folder = folder.parent
            device = os.statvfs(folder)
        return device.f_bavail * device.f_frsize

    def _begin_file(
        self,
        name: str,
        size_bytes: int,
        draft: Path | None = None,
        *,
        shared: bool = False,
        is_new: bool = False,
    ) -> LocalWriting:
        path = self.path(name)
        with explained(path):
            self.make_parents(path)
        return create_file(
            name,
            path,
            draft or _draft_name(path),
            size_bytes,
            self.max_mode,
            direct=self.direct_bytes is not None and size_bytes >= self.direct_bytes,
            shared=shared,
            syncs=self.syncs,
            is_new=is_new,
        )

    def make_parents(self, path: Path) -> None:
        """Make the parent folders of `path`, but not a stage, which may have been deleted."""
        if self.syncs:
            local_disk.make_folder(self.folder)
        for name in reversed(path.relative_to(self.folder).parents[:-1]):
            folder = self.folder / name
            if not folder.is_dir():
                mode = folder_mode(self.max_mode)
                if self.syncs:
                    local_disk.make_folder(folder, mode)
                else:
                    folder.mkdir(mode, exist_ok=True)


def folder_of(store: Store) -> Path:
    """Return the local path of a store's folder.

    Raises ConfigError when the store is not a local folder.
    """
    if store.local_folder is None:
        raise ConfigError(f"{store.url}: not on this machine's disks; give a local folder")
    return store.local_folder


def linked_path(path: Path) -> Path | None:
    """Return the destination of a symbolic link; None for another file and for a loop of links."""
    with contextlib.suppress(OSError, RuntimeError):
        return path.resolve() if path.is_symlink() else None
    return None


def readable_mode(path: Path, goal: Path) -> int:
    """Return the permission bits that all files at `path` have in common.

    A class of users that may not enter their folders has none. The folders are those at and below
    `path`, and its parent unless `goal` is below the parent.
    """
    top = path.resolve()
    folders = [Path(folder) for folder, _, _ in os.walk(top)]
    if not goal.resolve().is_relative_to(top.parent):
        folders.append(top.parent)
    mode = 0o777
    for file in _files_at(path):
        mode &= _mode_of(file)
    for folder in folders:
        mode &= 0o7 * (_mode_of(folder) & 0o111)  # the classes that may enter
    return mode | stat.S_IRUSR  # its owner may always read it


def _files_at(path: Path) -> Iterator[Path]:
    """Yield a file, or all files below a folder except marks."""
    if not path.is_dir():
        yield path
        return
    for folder, _, names in os.walk(path):
        for name in names:
            if not name.startswith(PREFIX):
                yield Path(folder, name)


def _mode_of(path: Path) -> int:
    """Return the permission bits of a file or folder; all bits for a link that leads nowhere."""
    try:
        return permission_bits(path) & 0o777
    except OSError as error:
        if error.errno not in (*ABSENT, errno.ELOOP):
            raise UnreadableError(f"{path}: cannot be read ({error}); try again") from error
        return 0o777


def make_like(store: Store, other: Store) -> None:
    """Make the folder of `store`, no more open than the one of `other`; does nothing in buckets."""
    folder, pattern = store.local_folder, other.local_folder
    if folder is not None and pattern is not None:
        with explained(folder):
            mode = permission_bits(pattern) | stat.S_IRWXU
            local_disk.make_folder(folder.parent)
            local_disk.make_folder(folder, mode)


@contextlib.contextmanager
def temporary_store(
    folder: str | Path | None = None, prefix: str = "ft_ckpt-copy-"
) -> Iterator[LocalStore]:
    """Yield a new folder that is deleted with its contents after the block.

    The folder lies in `folder`; None is the system's temporary folder. Only this user can read it.
    Leftovers of killed processes are deleted too.
    """
    import tempfile  # lazily: listing does not need it

    with locked_folder(Path(folder or tempfile.gettempdir()), prefix) as temporary:
        yield LocalStore(temporary)


class _reading(damaged_input):  # noqa: N801 - reads as a statement where it is used
    """Convert system errors of a read; a missing file becomes MissingError.

    It is a class because an error that leaves a generator stays in a cycle of references, from
    Python 3.12 on. Its traceback then keeps the tensors of a save until the next collection.
    """

    __slots__ = ()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if isinstance(error, OSError) and error.errno in ABSENT:
            clean_causes(error)
            raise _missing(str(self.source)) from error
        super().__exit__(kind, error, at)


def _missing(where: str) -> MissingError:
    error = MissingError(f"{where}: no such file")
    error.errno = errno.ENOENT
    return error


def _draft_name(path: Path) -> Path:
    return path.with_name(f"{PREFIX}{secrets.token_hex(8)}{_DRAFT}")


def _may_be_folder(entry: os.DirEntry[str]) -> bool:
    """Check for a folder, or a link that cannot be followed now.

    Reading that link will raise the reason.
    """
    try:
        return entry.is_dir()
    except OSError:
        return True


def _is_draft(name: str) -> bool:
    return name.startswith(PREFIX) and name.endswith(_DRAFT)


def clear_old_drafts(folder: Path) -> None:
    """Delete unfinished files in `folder` that nobody has written to for a day.

    Their processes were killed.
    """
    abandoned_at = time.time() - local_disk.ABANDONED_SECONDS
    with damaged_input(folder):
        drafts = [folder / name for name in list_names(folder) if _is_draft(name)]
    for draft in drafts:
        with contextlib.suppress(OSError):
            if draft.lstat().st_mtime < abandoned_at:
                local_disk.unlink(draft)


@retrying_stale
def _files_below(top: Path) -> list[Path]:
    """List all files below a folder; folders that are links are not entered."""
    paths: list[Path] = []
    for folder, _, names in os.walk(top, onerror=raise_unless_absent):
        paths += [Path(folder, name) for name in names]
    return paths


@retrying_stale
def _regular(path: str | Path) -> os.stat_result | None:
    """Return the stat result of a regular file, through links; None for anything else."""
    try:
        facts = os.stat(path)  # noqa: PTH116 - of each file of each listing: a Path would cost more than the call
    except OSError as error:
        if error.errno in (*ABSENT, errno.ELOOP):
            return None
        raise
    return facts if stat.S_ISREG(facts.st_mode) else None
