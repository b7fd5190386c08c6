"""Reads a remote store as it was when it was listed.

Reading an object that was replaced later is an error, so that old and new versions do not mix.
"""

from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, cast

from ft_ckpt.errors import CorruptError, MissingError, TargetError
from ft_ckpt.storage.io import open_local_file
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places.copies import copy_object
from ft_ckpt.storage.store import (
    Folder,
    FolderListing,
    Readable,
    RemoteStore,
    Store,
    Stored,
    changed_object,
    checked_name,
    read_object,
)


@dataclass
class RequestCount:
    """Counts range requests. With several threads the count is approximate."""

    count: int = 0


@dataclass(eq=False)
class _CountedObject:
    """Open object whose reads are counted."""

    inner: Readable
    requests: RequestCount

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        self.requests.count += 1
        self.inner.read_into(memory, start)


@dataclass(frozen=True)
class ListedStore(RemoteStore):
    """Objects of the store `inner` that are `listed`, in the versions of the listing.

    Nothing can be written. A remote object is opened once, and all callers share it. Closing it
    does nothing.

    Attributes:
        inner: the store that was listed.
        listed: its objects, by name.
        opened: the open remote objects, by URL.
        requests: counts the requests of these.
        fetched: paths of local copies of objects, by URL.
    """

    inner: Store
    listed: Mapping[str, Stored]
    opened: dict[str, _CountedObject] = field(default_factory=dict, compare=False, repr=False)
    requests: RequestCount = field(default_factory=RequestCount, compare=False)
    fetched: dict[str, Path] = field(default_factory=dict, compare=False, repr=False)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def identity(self) -> str:
        return self.inner.identity

    @property
    def parent(self) -> None:
        """Always None, because only this folder was listed."""

    def within(self, folder: str) -> "ListedStore":
        """Return the listed objects below `folder` as a store."""
        start = f"{folder}/"
        listed = {}
        for path, stored in self.listed.items():
            if path.startswith(start):
                name = path.removeprefix(start)
                listed[name] = replace(stored, name=name)
        inner = self.inner.within(folder)
        return ListedStore(inner, listed, self.opened, self.requests, self.fetched)

    def where(self, name: str) -> str:
        return self.inner.where(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return read_object(self, name, start, stop)

    def open(self, name: str) -> Readable:
        """Open an object, or its local copy.

        Raises UnreadableError when its version is not the listed one.
        """
        listed = self.stat(name)
        where = self.where(name)
        if listed is None:
            raise MissingError(f"{where}: no such object")
        if where in self.fetched:
            return open_local_file(self.fetched[where], name)
        if where in self.opened:
            return cast("Readable", self.opened[where])
        file = self.inner.open(name)
        if file.version != listed.version:
            file.close()
            raise changed_object(where)

        if file.can_map:
            return file
        self.opened[where] = _CountedObject(file, self.requests)
        return cast("Readable", self.opened[where])

    def fetch(self, names: Iterable[str], folder: LocalStore) -> None:
        """Copy objects into the local `folder`. Afterwards they are read from there.

        If its disk has no space for all of them, none is copied. An object that cannot be read is
        not copied and not an error here. Reading it later raises the error.
        """
        missing = []
        for name in names:
            if name in self.listed and self.where(name) not in self.fetched:
                missing.append(self.listed[name])
        free_bytes = folder.free_bytes()
        if free_bytes is not None and free_bytes < sum(stored.size_bytes for stored in missing):
            return
        for stored in missing:
            with suppress(CorruptError), closing(self.open(stored.name)) as opened:
                copy_object(opened, folder, stored.name)
                self.fetched[self.where(stored.name)] = folder.path(stored.name)

    def list(self, prefix: str = "") -> list[Stored]:
        start = f"{prefix}/" if prefix else ""
        return [self.listed[name] for name in sorted(self.listed) if name.startswith(start)]

    def list_folder(self, prefix: str = "") -> FolderListing:
        """List the folders and objects directly in the folder `prefix`."""
        start = f"{prefix}/" if prefix else ""
        objects = []
        folders: dict[str, Folder] = {}
        for stored in self.list(prefix):
            name, _, below = stored.name.removeprefix(start).partition("/")
            if below:
                folders[name] = Folder(name, self.inner.within(start + name).identity)
            else:
                objects.append(stored)
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
    """List a remote store, and return a store that reads only the versions of this listing.

    A local store is returned unchanged.
    """
    if store.local_folder is not None:
        return store
    return ListedStore(store, {stored.name: stored for stored in store.list()})
