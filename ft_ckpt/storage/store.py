"""Defines the interface of a store, which is a local folder or a prefix in a bucket.

A store has objects, which are named bytes. A name is a relative path with forward slashes (see
`is_inside`). Folders exist implicitly, by the slashes in names.

Stores raise ConfigError for an invalid name. Reading raises MissingError, CorruptError or
UnreadableError. Writing raises TargetError, NoSpaceError or NameTakenError.
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

MAX_TEXT_BYTES = 256 << 20  # limit of a config, an index or another text


def is_name(path: object) -> bool:
    """Check whether `path` is a normalised relative path: no "..", ".", empty component or NUL.

    Surrogates from dc80 to dcff stand for the bytes of a name that is not UTF-8. Other surrogates
    are invalid.
    """
    if not isinstance(path, str) or re.search("[\0\ud800-\udc7f\udd00-\udfff]", path):
        return False
    return not {"", ".", ".."} & set(path.split("/"))


def is_inside(path: object) -> bool:
    """Check whether `path` is a valid name that means the same on every system.

    Only such names are allowed in manifests. They have no backslash.
    """
    return is_name(path) and "\\" not in str(path)


def is_utf8(text: str) -> bool:
    """Check whether `text` can be encoded as UTF-8, which lone surrogates cannot."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


@dataclass(frozen=True)
class Stored:
    """What a store says of one of its objects.

    Attributes:
        name: name of the object in the store.
        size_bytes: size of the object.
        modified: when it was written, in unix seconds by the clock of the store.
        version: a text that changes whenever the bytes are replaced.
        etag: the version, if the service itself assigns it.
    """

    name: str
    size_bytes: int
    modified: float
    version: str
    etag: str | None = None


@dataclass(frozen=True)
class Folder:
    """One folder of a store. Different links to a folder have the same `identity`."""

    name: str
    identity: str
    is_link: bool = False


@dataclass(frozen=True)
class FolderListing:
    """Contents of one folder, sorted by name. Folders that are links come after the others.

    In a bucket, a folder exists while it contains something.
    """

    exists: bool
    folders: tuple[Folder, ...]
    objects: tuple[Stored, ...]


class Readable(Protocol):
    """Object that is open for reading.

    Reads return the bytes that it had when it was opened, or raise an error.
    """

    name: str
    size_bytes: int
    version: str

    @property
    def where(self) -> str:
        """Path or URL of the object, for messages."""
        ...

    @property
    def can_map(self) -> bool:
        """True if its bytes can be mapped into memory. If not, each read is a remote request."""
        ...

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        """Fill `memory` with the bytes from `start` on.

        Raises CorruptError when the object ends before.
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
    """New object that is being written, and is not visible before `finish`."""

    def write(self, offset: int, memory: memoryview) -> None:
        """Write `memory` at byte `offset` of the object.

        Each byte must be written once, in any order, from any thread. `memory` can be reused as
        soon as this returns.
        """
        ...

    def finish(self) -> Stored:
        """Make the object appear under its name, durably.

        Raises IncompleteError when bytes are missing.
        """
        ...

    def abandon(self) -> None:
        """Drop the unfinished object. Raises nothing. Does nothing after `finish`."""
        ...


class Store(Protocol):
    """Local folder or prefix in a bucket, whose files or objects are named bytes.

    Stores that are not on a disk of this machine inherit from `RemoteStore`.
    """

    @property
    def url(self) -> str:
        """Path, or scheme://bucket/prefix."""
        ...

    @property
    def identity(self) -> str:
        """Canonical name of this store, which is equal for different links to it."""
        ...

    @property
    def local_folder(self) -> Path | None:
        """Folder of the store on a disk of this machine, or None for a remote store.

        Its files are renamed, linked, locked, mapped and written by several processes.
        """
        ...

    @property
    def absolute(self) -> "Store":
        """This store, independent of the working directory."""
        ...

    @property
    def unsynced(self) -> "Store":
        """This store, for files that need not survive a power cut."""
        ...

    def limited(self, max_mode: int) -> "Store":
        """Return the same store, whose new files have no permission bits beyond `max_mode`."""
        ...

    @property
    def parent(self) -> "Store | None":
        """Store that contains this folder, or None at the top."""
        ...

    def within(self, folder: str) -> "Store":
        """Return the store of the folder `folder` in this one."""
        ...

    def where(self, name: str) -> str:
        """Return the path or URL of an object, for messages."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes [start, stop) of an object. None for `stop` is its end.

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
        """Create an object of exactly `size_bytes`. When finished, it replaces one of that name."""
        ...

    def allocate(self, name: str, size_bytes: int) -> None:
        """Reserve the space of an object that several processes will write by `share`.

        A remote store reserves nothing.
        """
        ...

    def share(self, name: str, size_bytes: int) -> Writable:
        """Begin or open an object that this process writes together with others.

        On a disk, each process writes other bytes of the file, which is visible from the start. In
        a remote store, only one process can write an object, as with `create`.
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
        """Copy or link the object `name` to `other`, without reading its bytes in this process.

        `name` is an object of `source`, or of this store if that is None. Returns False if the
        store cannot do this.
        """
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, durably. Missing names are ignored."""
        ...

    def free_bytes(self) -> int | None:
        """Return how many bytes can still be written, or None if there is no limit."""
        ...


_Remote = TypeVar("_Remote", bound="RemoteStore")


class RemoteStore:
    """Base class of stores that are not on a disk of this machine.

    Their objects have no local paths and no permissions, and are durable when they are written.
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
    """Return `name` if `may_be` accepts it.

    Raises ConfigError otherwise, for example when it is absolute, empty or leads out of the store.
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
    """Raise CorruptError if a response has `size_bytes` instead of `expected` bytes."""
    if size_bytes != expected:
        raise CorruptError(
            f"{where}: {size_bytes} bytes came from byte {start} on, expected {expected}; read it "
            "again"
        )


def etag_of(store: Store, name: str) -> str | None:
    """Return the version that the service has assigned to an object.

    Returns None if the service assigns none, or if there is no such object.
    """
    stored = store.stat(name)
    return None if stored is None else stored.etag


def read_text(
    store: Store, name: str, limit_bytes: int = MAX_TEXT_BYTES, errors: str = "strict"
) -> str:
    """Read the UTF-8 text of an object. `errors` is that of `bytes.decode`.

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
        if stop is None:
            stop = file.size_bytes
        memory = bytearray(max(0, stop - start))
        file.read_into(memoryview(memory), start)
    return bytes(memory)


def read_range(file: Readable, start: int, size_bytes: int) -> bytes:
    """Read `size_bytes` bytes from `start` on, or fewer if the object ends before."""
    memory = bytearray(max(0, min(size_bytes, file.size_bytes - start)))
    file.read_into(memoryview(memory), start)
    return bytes(memory)
