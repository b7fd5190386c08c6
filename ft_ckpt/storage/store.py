"""The interfaces of a store (a local folder or the prefix of a bucket); access rights of new files.

A store contains objects by name: relative paths with forward slashes, see `is_inside`. Folders
exist implicitly, by the slashes in names. Stores raise ConfigError for an invalid name,
MissingError, CorruptError or UnreadableError on reading, TargetError, NoSpaceError or
NameTakenError on writing.
"""

import errno
import re
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    MissingError,
    UnreadableError,
    damaged_input,
)

if TYPE_CHECKING:
    from ft_ckpt.storage.io import MappedBytes

MAX_TEXT_BYTES = 256 << 20  # of a config, an index or another document


def is_name(path: object) -> bool:
    """Check for a normalised relative path (no "..", ".", empty component or NUL).

    Surrogates from dc80 to dcff stand for the bytes of a name that is not UTF-8; other surrogates
    are invalid.
    """
    if not isinstance(path, str) or re.search("[\0\ud800-\udc7f\udd00-\udfff]", path):
        return False
    return not {"", ".", ".."} & set(path.split("/"))


def is_inside(path: object) -> bool:
    """Check whether a manifest may contain `path`, a name that means the same on every system.

    Such a name has no backslash.
    """
    return is_name(path) and "\\" not in str(path)


def is_utf8(text: str) -> bool:
    """Check whether `text` can be encoded as UTF-8, which lone surrogates cannot."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


@dataclass(frozen=True)
class Stored:
    """One object of a store."""

    name: str
    size_bytes: int
    modified: float  # unix seconds, by the clock of the store
    version: str  # differs whenever the bytes are replaced
    etag: str | None = None  # the version, if the service itself assigns it


@dataclass(frozen=True)
class Folder:
    """One folder of a store. Links to it have the same `identity`, see `within`."""

    name: str
    identity: str
    is_link: bool = False


@dataclass(frozen=True)
class FolderListing:
    """The contents of one folder, by name. Folders that are links come after the others."""

    exists: bool  # in a bucket, a folder exists while it contains something
    folders: tuple[Folder, ...]
    objects: tuple[Stored, ...]


class Readable(Protocol):
    """An object that is open for reading.

    Reads return the bytes that it had when it was opened, or raise an error.
    """

    name: str
    size_bytes: int
    version: str

    @property
    def where(self) -> str:
        """The path or URL of the object, for messages."""
        ...

    @property
    def can_map(self) -> bool:
        """Whether its bytes can be mapped; if not, each range is a remote request."""
        ...

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        """Fill `memory` with the bytes from `start` on.

        Raises CorruptError when there are not as many.
        """
        ...

    def map(self) -> "MappedBytes | None":
        """Map all bytes as private, writable memory without a copy.

        Returns None if they cannot be mapped.
        """
        ...

    def check(self) -> None:
        """Raise UnreadableError when the bytes have changed since the object was opened."""
        ...

    def close(self) -> None:
        """Release the object."""
        ...


class Writable(Protocol):
    """A new object that is being written, and is not visible before `finish`."""

    def write(self, offset: int, memory: memoryview) -> None:
        """Write `memory` at `offset`: each byte once, in any order, from any thread.

        `memory` may be reused after.
        """
        ...

    def finish(self) -> Stored:
        """Make the object appear under its name, durably.

        Raises IncompleteError when bytes are missing.
        """
        ...

    def abandon(self) -> None:
        """Drop the unfinished object. Raises nothing; after `finish` it does nothing."""
        ...


class Store(Protocol):
    """A folder of named bytes: a local one, or the prefix of a bucket.

    Stores that are not on a disk of this machine inherit from `RemoteStore`.
    """

    @property
    def url(self) -> str:
        """A path, or scheme://bucket/prefix."""
        ...

    @property
    def identity(self) -> str:
        """The canonical name of this store: equal for different links to it."""
        ...

    @property
    def local_folder(self) -> Path | None:
        """The folder of the store on a disk of this machine; None for a remote store.

        Its files are renamed, linked, locked, mapped and written by several processes.
        """
        ...

    @property
    def absolute(self) -> "Store":
        """The same store, independent of the working directory."""
        ...

    @property
    def unsynced(self) -> "Store":
        """The same store for files that need not survive a power cut."""
        ...

    def limited(self, max_mode: int) -> "Store":
        """Return the same store, whose new files have no permission bits beyond `max_mode`."""
        ...

    @property
    def parent(self) -> "Store | None":
        """The store that contains this folder; None at the top."""
        ...

    def within(self, folder: str) -> "Store":
        """Return the store of the folder `folder` in this one."""
        ...

    def where(self, name: str) -> str:
        """Return the path or URL of an object, for messages."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of an object; `stop` None is its end.

        Raises CorruptError when it is shorter.
        """
        ...

    def open(self, name: str) -> Readable:
        """Open an object for reading."""
        ...

    def write(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object atomically and durably.

        With `create_only`, raises NameTakenError when the name is taken.
        """
        ...

    def create(self, name: str, size_bytes: int) -> Writable:
        """Create an object of exactly `size_bytes`.

        When it is finished, it replaces the object of that name.
        """
        ...

    def allocate(self, name: str, size_bytes: int) -> None:
        """Reserve the space of the file that will be `share`d under this name.

        A remote store reserves nothing.
        """
        ...

    def share(self, name: str, size_bytes: int) -> Writable:
        """Begin or open the object that this process writes together with others.

        On a disk each process writes other ranges of the file, which is visible from the start. An
        object of a remote store has one writer, as one of `create`.
        """
        ...

    def list(self, prefix: str = "") -> list[Stored]:
        """List all objects in the folder `prefix` and below it, sorted by name.

        A folder that does not exist has none.
        """
        ...

    def list_folder(self, prefix: str = "") -> FolderListing:
        """List the folders and objects directly in the folder `prefix`."""
        ...

    def stat(self, name: str) -> Stored | None:
        """Describe an object without opening it; return None if it does not exist."""
        ...

    def copy(self, name: str, other: str, source: "Store | None" = None) -> bool:
        """Copy or link the object `name` (of `source`, if given) to `other` inside the service.

        Returns False if that is impossible.
        """
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, durably; missing names are ignored."""
        ...

    def free_bytes(self) -> int | None:
        """Return the bytes that can still be written; None if there is no limit."""
        ...


_Remote = TypeVar("_Remote", bound="RemoteStore")


class RemoteStore:
    """A `Store` that is not on a disk of this machine.

    It has no paths and no permissions, and all its objects are durable.
    """

    local_folder = None

    @property
    def absolute(self: _Remote) -> _Remote:
        return self

    @property
    def unsynced(self: _Remote) -> _Remote:
        return self

    def limited(self: _Remote, max_mode: int) -> _Remote:
        return self

    def allocate(self, name: str, size_bytes: int) -> None:
        return None

    def share(self: Store, name: str, size_bytes: int) -> Writable:
        return self.create(name, size_bytes)


def checked_name(name: str, may_be: Callable[[str], bool] = is_inside) -> str:
    """Return `name` if it is valid.

    Raises ConfigError when it is absolute, empty or leads out of the store.
    """
    if not may_be(name):
        raise ConfigError(
            f"{name!r}: invalid object name; expected a relative path with forward slashes, no '..'"
        )
    return name


def missing_object(where: str) -> MissingError:
    error = MissingError(f"{where}: no such object")
    error.errno = errno.ENOENT
    return error


def changed_object(where: str) -> UnreadableError:
    """Make the error for an object that was replaced after it was opened."""
    return UnreadableError(f"{where}: overwritten while it was read; read it again")


def refuse_beyond(file: Readable, where: str, stop: int) -> None:
    """Raise CorruptError if an object ends before byte `stop`."""
    if stop > file.size_bytes:
        raise CorruptError(
            f"{where}: ends at byte {file.size_bytes}, but its index describes bytes up to {stop}: "
            "truncated, use another copy"
        )


def refuse_other_length(where: str, start: int, size_bytes: int, expected: int) -> None:
    """Raise CorruptError if a response has `size_bytes` instead of the expected ones."""
    if size_bytes != expected:
        raise CorruptError(
            f"{where}: {size_bytes} bytes came from byte {start} on, expected {expected}; read it "
            "again"
        )


def etag_of(store: Store, name: str) -> str | None:
    """Return the version that the service assigned to an object.

    Returns None if the service assigns none, or there is no object.
    """
    stored = store.stat(name)
    return None if stored is None else stored.etag


def read_text(
    store: Store, name: str, limit_bytes: int = MAX_TEXT_BYTES, errors: str = "strict"
) -> str:
    """Read the UTF-8 text of an object; `errors` as for `bytes.decode`.

    Raises MissingError if the object does not exist, UnreadableError if it cannot be read now,
    CorruptError if it is not text or larger than `limit_bytes`.
    """
    with closing(store.open(name)) as file:
        if file.size_bytes > limit_bytes:
            raise CorruptError(
                f"{store.where(name)}: {file.size_bytes:,} bytes, expected at most "
                f"{limit_bytes:,}; use another copy"
            )
        content = read_range(file, 0, limit_bytes)
    with damaged_input(store.where(name)):
        return content.decode("utf-8", errors)


def read_object(store: Store, name: str, start: int, stop: int | None) -> bytes:
    """Read a range of an object as `Store.read` does, by opening the object."""
    with closing(store.open(name)) as file:
        memory = bytearray(max(0, (file.size_bytes if stop is None else stop) - start))
        file.read_into(memoryview(memory), start)
    return bytes(memory)


def read_range(file: Readable, start: int, size_bytes: int) -> bytes:
    """Read up to `size_bytes` bytes from `start` on; fewer at the end of the file."""
    memory = bytearray(max(0, min(size_bytes, file.size_bytes - start)))
    file.read_into(memoryview(memory), start)
    return bytes(memory)
