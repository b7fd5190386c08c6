"""A read-only view of a store as it was listed: later versions of an object are errors."""

from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn, cast

from ft_ckpt.errors import CorruptError, MissingError, TargetError
from ft_ckpt.storage.local_file import open_local_file
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.scratch import copy_object
from ft_ckpt.storage.store import (
    Folder,
    FolderListing,
    Readable,
    RemoteStore,
    Store,
    Stored,
    checked_name,
    read_object,
    read_range,
)


@dataclass
class Asked:
    """The number of range requests; approximate with several threads."""

    count: int = 0


@dataclass(eq=False)
class _CountedObject:
    """An open object whose reads are counted."""

    inner: Readable
    asked: Asked

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        self.asked.count += 1
        self.inner.read_into(memory, start)


@dataclass(frozen=True)
class ListedStore(RemoteStore):
    """The objects of `inner` that are `listed`, by name, in the versions listed; nothing can be
    written.

    A remote object is opened once, and shared: closing it releases nothing.
    """

    inner: Store
    listed: Mapping[str, Stored]
    # by `where`
    opened: dict[str, _CountedObject] = field(default_factory=dict, compare=False, repr=False)
    asked: Asked = field(default_factory=Asked, compare=False)
    # local copies, by `where`
    fetched: dict[str, Path] = field(default_factory=dict, compare=False, repr=False)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def identity(self) -> str:
        return self.inner.identity

    @property
    def parent(self) -> None:
        """None: only this folder was listed."""

    def within(self, folder: str) -> "ListedStore":
        """The listed objects below `folder`."""
        begin = f"{folder}/"
        below = {
            name.removeprefix(begin): each
            for name, each in self.listed.items()
            if name.startswith(begin)
        }
        named = {name: replace(each, name=name) for name, each in below.items()}
        return ListedStore(self.inner.within(folder), named, self.opened, self.asked, self.fetched)

    def where(self, name: str) -> str:
        return self.inner.where(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return read_object(self, name, start, stop)

    def open(self, name: str) -> Readable:
        """Open an object, or its local copy.

        Raises CorruptError when its version is not the listed one.
        """
        listed = self.stat(name)
        if listed is None:
            raise MissingError(f"{self.where(name)}: no such object")
        local_copy = self.fetched.get(self.where(name))
        if local_copy is not None:
            return open_local_file(local_copy, name)
        if (held := self.opened.get(self.where(name))) is not None:
            return cast("Readable", held)
        file = self.inner.open(name)
        if file.version != listed.version:
            file.close()
            raise CorruptError(f"{self.where(name)}: overwritten while it was read; read it again")
        if file.can_map:
            return file
        counted = self.opened[self.where(name)] = _CountedObject(file, self.asked)
        return cast("Readable", counted)

    def fetch(self, names: Iterable[str], room: LocalStore) -> None:
        """Copy objects into `room`, from which they are read afterwards.

        If it has no room for all of them, none is copied. An object that cannot be read is left to
        its reader.
        """
        missing = [
            self.listed[name]
            for name in names
            if name in self.listed and self.where(name) not in self.fetched
        ]
        free_bytes = room.free_bytes()
        if free_bytes is not None and free_bytes < sum(stored.size_bytes for stored in missing):
            return
        for stored in missing:
            with suppress(CorruptError), closing(self.open(stored.name)) as opened:
                copy_object(opened, room, stored.name)
                self.fetched[self.where(stored.name)] = room.path(stored.name)

    def list(self, prefix: str = "") -> list[Stored]:
        begin = f"{prefix}/" if prefix else ""
        below = (each for name, each in self.listed.items() if name.startswith(begin))
        return sorted(below, key=lambda each: each.name)

    def list_folder(self, prefix: str = "") -> FolderListing:
        """The folders and objects directly in the folder `prefix`."""
        begin, objects, folders = f"{prefix}/" if prefix else "", [], dict[str, Folder]()
        for each in self.list(prefix):
            step, _, deeper = each.name.removeprefix(begin).partition("/")
            if deeper:
                folders[step] = Folder(step, self.inner.within(begin + step).identity)
            else:
                objects.append(each)
        return FolderListing(bool(folders or objects), tuple(folders.values()), tuple(objects))

    def stat(self, name: str) -> Stored | None:
        return self.listed.get(checked_name(name))

    def write(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        self._refuse(name)

    def create(self, name: str, size_bytes: int) -> NoReturn:
        self._refuse(name)

    def copy(self, name: str, other: str, source: Store | None = None) -> bool:
        self._refuse(other)

    def delete(self, names: Iterable[str]) -> None:
        self._refuse(", ".join(names))

    def free_bytes(self) -> int | None:
        return 0

    def _refuse(self, name: str) -> NoReturn:
        raise TargetError(
            f"{self.where(name)}: cannot be written, the store is open for "
            "reading only; open it again"
        )


def hold_listed(store: Store) -> Store:
    """A remote `store` as it is listed now, so that later requests only read bytes; a local store
    itself.
    """
    if store.local_folder is not None:
        return store
    return ListedStore(store, {stored.name: stored for stored in store.list()})


# the latency of a request equals the transfer of about 1 MB
_BLOCK_BYTES, _MOST_BLOCKS = 256 << 10, 16


@dataclass(eq=False)
class CachedObject:
    """The open object `inner` with an LRU cache of blocks; ranges larger than a block are not
    cached.
    """

    inner: Readable
    can_map = False
    _blocks: dict[int, bytes] = field(default_factory=dict)  # by number, least recently used first
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.name, self.size_bytes, self.version = (
            self.inner.name,
            self.inner.size_bytes,
            self.inner.version,
        )

    @property
    def where(self) -> str:
        return self.inner.where

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        end = start + len(memory)
        if len(memory) > _BLOCK_BYTES or end > self.size_bytes:
            self.inner.read_into(memory, start)
            return
        for number in range(start // _BLOCK_BYTES, -(-end // _BLOCK_BYTES)):
            first = number * _BLOCK_BYTES
            low, high = max(start, first), min(end, first + _BLOCK_BYTES)
            memory[low - start : high - start] = self._block(number)[low - first : high - first]

    def map(self) -> None:
        return

    def check(self) -> None:
        self.inner.check()

    def close(self) -> None:
        self._blocks.clear()
        self.inner.close()

    def _block(self, number: int) -> bytes:
        with self._lock:
            found = self._blocks.pop(number, None)
        if found is None:
            found = read_range(self.inner, number * _BLOCK_BYTES, _BLOCK_BYTES)
        with self._lock:
            self._blocks[number] = found
            if len(self._blocks) > _MOST_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
        return found
