"""The interfaces of a store: a local folder or the prefix of a bucket; access rights of new files.

A store holds objects under names: relative paths with forward slashes, see `is_inside`. Folders exist as far as
names have slashes. All errors are ours: ConfigError for a name that the store cannot have, MissingError, CorruptError
or UnreadableError while reading, TargetError, NoSpaceError or NameTakenError while writing.
"""

import re
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ft_ckpt.errors import ConfigError, CorruptError, damaged_input

if TYPE_CHECKING:
    from ft_ckpt.storage.local_file import MappedBytes

import stat
from dataclasses import replace


def is_name(path: object) -> bool:
    """True for a relative path in its plainest form (no "..", ".", empty step or NUL) that can be a name.

    Surrogates from dc80 to dcff stand for the bytes of a name that is not UTF-8, other ones for nothing.
    """
    if not isinstance(path, str) or re.search("[\0\ud800-\udc7f\udd00-\udfff]", path):
        return False
    return not {"", ".", ".."} & set(path.split("/"))


def is_inside(path: object) -> bool:
    """Whether a file may name `path`: a name that means the same on every system, so without a backslash."""
    return is_name(path) and "\\" not in str(path)


def is_utf8(text: str) -> bool:
    """True when `text` survives UTF-8: it has no lone halves of surrogate pairs."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


MOST_TEXT_BYTES = 256 << 20  # of a config, an index or another document that is read whole


@dataclass(frozen=True)
class Stored:
    """One object of a store."""

    name: str
    size_bytes: int
    modified: float  # unix seconds, by the clock of the store
    version: str  # another one whenever the bytes are replaced
    etag: str | None = None  # the version, if it is one that the store itself gives and keeps


@dataclass(frozen=True)
class Folder:
    """One folder of a store; all names of one folder (links to it) have the `identity` of its store, see `within`."""

    name: str
    identity: str
    is_link: bool = False


@dataclass(frozen=True)
class FolderListing:
    """The contents of one folder, by name; folders that are links come after the others."""

    exists: bool  # in a bucket, folders are there when something is in them
    folders: tuple[Folder, ...]
    objects: tuple[Stored, ...]


class Readable(Protocol):
    """An object that is open for reading: always the bytes of the moment it was opened at, or an error."""

    name: str
    size_bytes: int
    version: str

    @property
    def where(self) -> str:
        """The object as people write it, for messages."""
        ...

    @property
    def can_map(self) -> bool:
        """Whether its bytes can be mapped; else every range is read from afar."""
        ...

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        """Fill `memory` with the bytes from `start` on. Raises CorruptError when there are not as many."""
        ...

    def map(self) -> "MappedBytes | None":
        """All bytes without a copy, as memory whose changes reach nobody; None where the system gives no mapping."""
        ...

    def check(self) -> None:
        """Raise CorruptError when the bytes have changed since the object was opened."""
        ...

    def close(self) -> None:
        """Release the object."""
        ...


class Writable(Protocol):
    """A new object that is being written; nobody sees it before `finish`."""

    def write(self, offset: int, memory: memoryview) -> None:
        """Write `memory` at `offset`: each byte once, in any order, from any thread. `memory` may be reused after."""
        ...

    def finish(self) -> Stored:
        """Make the object appear under its name, durably. Raises IncompleteError when bytes are missing."""
        ...

    def abandon(self) -> None:
        """Drop the object; nothing of it stays. Raises nothing, also after `finish`, which it does not undo."""
        ...


class Store(Protocol):
    """A folder of named bytes: a local one, or the prefix of a bucket."""

    @property
    def url(self) -> str:
        """The place as people write it: a path, or scheme://bucket/prefix."""
        ...

    @property
    def identity(self) -> str:
        """The one name of this store: equal for two that are reached by different links."""
        ...

    @property
    def parent(self) -> "Store | None":
        """The store that this one is a folder of; None at the top."""
        ...

    def within(self, folder: str) -> "Store":
        """The store of what is below `folder`."""
        ...

    def where(self, name: str) -> str:
        """An object as people write it, for messages."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of an object; `stop` None is its end. Raises CorruptError when it is shorter."""
        ...

    def open(self, name: str) -> Readable:
        """Open an object for reading."""
        ...

    def write(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object atomically and durably. With `create_only`, NameTakenError when the name is taken."""
        ...

    def create(self, name: str, size_bytes: int) -> Writable:
        """A new object of exactly `size_bytes`, which replaces the one of that name when it is finished."""
        ...

    def list(self, prefix: str = "") -> list[Stored]:
        """All objects in the folder `prefix` and below it, by name; none when there is no such folder."""
        ...

    def list_folder(self, prefix: str = "") -> FolderListing:
        """The folders and objects directly in the folder `prefix`, where there is one."""
        ...

    def stat(self, name: str) -> Stored | None:
        """The object, unopened; None when there is none."""
        ...

    def copy(self, name: str, other: str, source: "Store | None" = None) -> bool:
        """Give the bytes of `name` the name `other`, too, without moving them here; False where that is impossible.

        With a `source`, `name` is an object of that store.
        """
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, durably; names that are not there are passed over."""
        ...

    def free_bytes(self) -> int | None:
        """Bytes that can still be written; None where there is no limit."""
        ...


@runtime_checkable
class SharedStore(Store, Protocol):
    """A store in which several processes may write ranges of one object, in place."""

    def allocate(self, name: str, size_bytes: int) -> None:
        """Take the space for the object that is `share`d under this name, which is made where it is not there."""
        ...

    def share(self, name: str, size_bytes: int) -> Writable:
        """A way for this process into an object that others write other ranges of; the first to come makes it.

        It has its name from the start. `finish` makes the bytes of one process durable and cannot know whether all have
        come; `abandon` leaves the object there.
        """
        ...


def checked_name(name: str, may_be: Callable[[str], bool] = is_inside) -> str:
    """`name`, if a store may have it. Raises ConfigError when it is absolute, empty or leads out of the store."""
    if not may_be(name):
        raise ConfigError(f"{name!r}: no name of an object; expected a relative path with forward slashes, no '..'")
    return name


def etag_of(store: Store, name: str) -> str | None:
    """The version that the store itself gives an object; None where it gives none, or there is no object."""
    found = store.stat(name)
    return None if found is None else found.etag


def read_text(store: Store, name: str, limit_bytes: int = MOST_TEXT_BYTES, errors: str = "strict") -> str:
    """The UTF-8 text of an object; `errors` as for `bytes.decode`.

    Raises MissingError when it is not there, UnreadableError when it cannot be read now, CorruptError when it is
    something else, or larger than `limit_bytes`.
    """
    with closing(store.open(name)) as file:
        if file.size_bytes > limit_bytes:
            found = f"{store.where(name)}: {file.size_bytes:,} bytes, expected at most {limit_bytes:,}"
            raise CorruptError(f"{found}; use another copy")
        content = read_range(file, 0, limit_bytes)
    with damaged_input(store.where(name)):
        return content.decode("utf-8", errors)


def read_range(file: Readable, start: int, size_bytes: int) -> bytes:
    """Up to `size_bytes` from byte `start` on: as many as there are."""
    memory = bytearray(max(0, min(size_bytes, file.size_bytes - start)))
    file.read_into(memoryview(memory), start)
    return bytes(memory)


@dataclass(frozen=True)
class Access:
    """The most that the permission bits of new files and folders may be; the umask takes more of them away.

    The bits for the group are about `group`: in another one they go no further than those for everybody.
    """

    file_bits: int = 0o777
    folder_bits: int = 0o777
    group: int | None = None  # None: whatever the group

    def __and__(self, other: "Access") -> "Access":
        """The access to something made of both."""
        group = other.group if self.group is None else self.group
        one, two = self.in_group(group), other.in_group(group)
        return Access(one.file_bits & two.file_bits, one.folder_bits & two.folder_bits, group)

    def in_group(self, group: int | None) -> "Access":
        """The same in another group."""
        if self.group in (None, group):
            return self
        return Access(_for_anyone(self.file_bits), _for_anyone(self.folder_bits), group)

    @property
    def for_file(self) -> "Access":
        """The same for a file that leaves the folder: only those may read it who may enter that."""
        inside = sum(0o7 << shift for shift in (0, 3, 6) if self.folder_bits >> shift & 1)
        return replace(self, file_bits=self.file_bits & inside | stat.S_IRUSR)


FREE = Access()  # the umask alone decides


def file_access(mode: int, group: int) -> Access:
    """The access to a file; its owner may always read it."""
    return Access(mode & 0o777 | stat.S_IRUSR, 0o777, group)


def folder_access(mode: int, group: int) -> Access:
    """The access to a folder, whatever files are in it."""
    return Access(0o777, mode & 0o777, group)


def _for_anyone(bits: int) -> int:
    """The bits if group and others are different people: what both may do."""
    both = bits >> 3 & bits & 0o7
    return bits & ~0o077 | both << 3 | both
