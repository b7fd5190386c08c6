"""Makes a local folder a store, whose objects are files.

An unfinished object is a hidden file in the same folder, its draft, whose name ends with ".draft".
"""

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
    """Store of the files below `folder`. The folder need not exist yet.

    Links are followed when reading, never when deleting.

    Attributes:
        folder: the path of the folder.
        direct_bytes: objects of at least this size are written with direct I/O. None: none is.
        syncs: True if a finished object must survive a power cut. False in the stage of a save,
            because the commit syncs all files later.
        max_mode: limits the permission bits of new files. New folders are limited by `folder_mode`
            of it.
        shown: the path that messages and `parent` use instead of `folder`. None: `folder`.
    """

    folder: Path
    direct_bytes: int | None = BLOCK_BYTES
    syncs: bool = True
    max_mode: int = 0o777
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
        """Return the path of an object. Raises ConfigError if `name` leads out of the store."""
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
        """Write a small file. If it replaces a file, it gets the permissions of that."""
        path = self.path(name)
        draft = None
        if self.syncs and not create_only:
            draft = path.with_name(f"{PREFIX}{path.name.lstrip('.')}{_DRAFT}")
            # A process that was killed can have left its draft.
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
        """Create a file and allocate its space. Raises NoSpaceError when there is not enough."""
        return self._begin_file(name, size_bytes)

    def allocate(self, name: str, size_bytes: int) -> None:
        """Allocate the space of a file that several processes will write by `share`.

        Creates the file if it does not exist.
        """
        path = self.path(name)
        with explained(path):
            self.make_parents(path)
        allocate_file(path, size_bytes, self.max_mode)

    def share(self, name: str, size_bytes: int) -> LocalWriting:
        """Open a file of which other processes write other bytes. The first process creates it.

        The file is visible from the start. `finish` makes the bytes of this process durable, and
        does not check that the file is complete. `abandon` keeps the file.
        """
        return self._begin_file(name, size_bytes, self.path(name), shared=True)

    def list(self, prefix: str = "") -> list[Stored]:
        """List all files except drafts. Folders that are links are not entered."""
        top = self.path(prefix) if prefix else self.folder
        objects = []
        with _reading(self.where(prefix)):
            for path in _files_below(top):
                if _is_draft(path.name):
                    continue
                status = _regular_status(path)
                if status is not None:
                    name = path.relative_to(self.folder).as_posix()
                    objects.append(stored_file(name, status))
        return sorted(objects, key=lambda stored: stored.name)

    def list_folder(self, prefix: str = "") -> FolderListing:
        top = self.path(prefix) if prefix else self.folder
        start = f"{prefix}/" if prefix else ""
        folders: list[Folder] = []
        objects: list[Stored] = []
        with _reading(self.where(prefix)):
            for entry in list_entries(top):
                if _may_be_folder(entry):
                    identity = os.path.realpath(entry.path)
                    folders.append(Folder(entry.name, identity, entry.is_symlink()))
                    continue
                if _is_draft(entry.name):
                    continue
                status = _regular_status(entry.path)
                if status is not None:
                    objects.append(stored_file(start + entry.name, status))

        folders.sort(key=lambda folder: folder.is_link)
        return FolderListing(os.path.lexists(top), tuple(folders), tuple(objects))

    def stat(self, name: str) -> Stored | None:
        """Describe a regular file. Return None for a folder, or anything else."""
        path = self.path(name)
        with _reading(self.where(name)):
            status = _regular_status(path)
        return None if status is None else stored_file(name, status)

    def copy(self, name: str, other: str, source: Store | None = None) -> bool:
        """Make a hard link to the file under another name.

        Returns False if the file system has no hard links, if the file is a symbolic link, and if
        it gives other users more permissions than `max_mode`, because a hard link shares
        permissions.
        """
        store = self if source is None else source
        if store.local_folder is None:
            return False
        origin = store.local_folder / checked_name(name, is_name)
        path = self.path(other)
        if store.stat(name) is None:
            raise _missing(store.where(name))
        if permission_bits(origin) & ~self.max_mode & 0o077:
            return False
        draft = _draft_path(path)
        with explained(path):
            self.make_parents(path)
            try:
                os.link(origin, draft, follow_symlinks=False)
                if draft.is_symlink():
                    return False
                local_disk.move(draft, path)
            except OSError as error:
                if error.errno in local_disk.CANNOT_LINK:
                    return False
                raise
            finally:
                with contextlib.suppress(OSError):
                    local_disk.unlink(draft)

            if self.syncs:
                local_disk.sync_path(path.parent)

        return True

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, and the folders that become empty."""
        names = [checked_name(name) for name in names]
        with explained(self.folder), contextlib.suppress(FileNotFoundError):
            local_disk.delete_files(names, self.folder)
            local_disk.remove_empty_folders(names, self.folder)

    def delete_all(self) -> None:
        """Delete the folder and its contents as far as possible. Links are not followed."""
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
            _draft_path(path) if draft is None else draft,
            size_bytes,
            self.max_mode,
            direct=self.direct_bytes is not None and size_bytes >= self.direct_bytes,
            shared=shared,
            syncs=self.syncs,
            is_new=is_new,
        )

    def make_parents(self, path: Path) -> None:
        """Make the parent folders of `path`.

        The folder of the store itself is made only if the store syncs. Otherwise it is the stage of
        a save, and if that is missing, somebody has deleted it.
        """
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
    """Return where a symbolic link leads. Return None for another file and for a loop of links."""
    with contextlib.suppress(OSError, RuntimeError):
        return path.resolve() if path.is_symlink() else None
    return None


def readable_mode(path: Path, target: Path) -> int:
    """Return permission bits for a copy of `path` at `target` that give nobody new access.

    These are the bits that all files at `path` have in common. If a class of users (the group, or
    all others) cannot enter one of the folders, it gets none. The folders are those at and below
    `path`. The parent of `path` counts, too, unless `target` is below it.
    """
    top = path.resolve()
    folders = [Path(folder) for folder, _, _ in os.walk(top)]
    if not target.resolve().is_relative_to(top.parent):
        folders.append(top.parent)
    mode = 0o777
    for file in _files_at(path):
        mode &= _mode_of(file)
    for folder in folders:
        # All bits of each class that can enter the folder: 0o110 becomes 0o770.
        mode &= 0o7 * (_mode_of(folder) & 0o111)
    return mode | stat.S_IRUSR  # The owner can always read the copy.


def _files_at(path: Path) -> Iterator[Path]:
    """Yield a file itself, or all files below a folder except those that ft_ckpt hides."""
    if not path.is_dir():
        yield path
        return
    for folder, _, names in os.walk(path):
        for name in names:
            if not name.startswith(PREFIX):
                yield Path(folder, name)


def _mode_of(path: Path) -> int:
    """Return the permission bits of a file or folder. Return all bits for a link to nowhere."""
    try:
        return permission_bits(path) & 0o777
    except OSError as error:
        if error.errno not in (*ABSENT, errno.ELOOP):
            raise UnreadableError(f"{path}: cannot be read ({error}); try again") from error
        return 0o777


def make_like(store: Store, other: Store) -> None:
    """Make the folder of `store`, with at most the permissions of the folder of `other`.

    Does nothing if one of them is a bucket.
    """
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
    """Yield the store of a new folder, which is deleted with its contents after the `with` block.

    The new folder is in `folder`. None is the system's temporary folder. Only this user can read
    it. Folders that killed processes have left are deleted, too.
    """
    import tempfile  # lazily: listing does not need it

    with locked_folder(Path(folder or tempfile.gettempdir()), prefix) as temporary:
        yield LocalStore(temporary)


class _reading(damaged_input):  # noqa: N801 - reads as a statement where it is used
    """Converts the system errors of a read. A missing file becomes a MissingError.

    It is a class and not a generator. From Python 3.12 on, an error that leaves a generator stays
    in a cycle of references, and its traceback keeps the tensors of a save until the next garbage
    collection.
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


def _draft_path(path: Path) -> Path:
    return path.with_name(f"{PREFIX}{secrets.token_hex(8)}{_DRAFT}")


def _may_be_folder(entry: os.DirEntry[str]) -> bool:
    """Check whether an entry is a folder, or a link that cannot be followed now.

    Such a link counts as a folder, because listing that raises the reason.
    """
    try:
        return entry.is_dir()
    except OSError:
        return True


def _is_draft(name: str) -> bool:
    return name.startswith(PREFIX) and name.endswith(_DRAFT)


def clear_old_drafts(folder: Path) -> None:
    """Delete drafts in `folder` that nobody has written to for a day.

    The processes that wrote them were killed.
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
    """List all files below a folder. Folders that are links are not entered."""
    paths: list[Path] = []
    for folder, _, names in os.walk(top, onerror=raise_unless_absent):
        paths += [Path(folder, name) for name in names]
    return paths


@retrying_stale
def _regular_status(path: str | Path) -> os.stat_result | None:
    """Return the stat result of a regular file, following links. Return None for anything else."""
    try:
        status = os.stat(path)  # noqa: PTH116 - of each file of each listing: a Path would cost more than the call
    except OSError as error:
        if error.errno in (*ABSENT, errno.ELOOP):
            return None
        raise
    return status if stat.S_ISREG(status.st_mode) else None
