"""The prefix of a bucket as a store, by obstore: S3, Google, Azure, and what speaks their languages. Knows no disks.

An object appears when its last byte is there: in one request, or as a multipart upload that is completed at its end.
Readers ask for the version that they opened, so that an object which is written over becomes an error.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import obstore
from obstore import exceptions

from ft_ckpt.errors import CorruptError, MissingError, TargetError, UnreadableError
from ft_ckpt.storage.object_client import make_client
from ft_ckpt.storage.object_errors import (
    ABSENT,
    TAKEN,
    changed_object,
    missing_object,
    reading_object,
    refuse_missing_bucket,
    taken_name,
    until_whole,
    writing_object,
)
from ft_ckpt.storage.object_upload import RemoteWriting
from ft_ckpt.storage.store import Folder, FolderListing, Store, Stored, checked_name

_FIRST_BYTES = 256 << 10  # that come with the opening of an object: a request takes as long as a megabyte
_MADE_UP = "~"  # begins the version of an object that the store gives none


@dataclass(frozen=True)
class ObjectStore:
    """The objects of `client` below `prefix` ("" or a path with a slash at its end); `url` names it to people."""

    client: Any = field(repr=False)  # some panic when they are shown
    url: str
    prefix: str = ""

    @classmethod
    def from_url(cls, url: str, **options: Any) -> "ObjectStore":
        """The store of the bucket `url`; `options` are those of `obstore.store.from_url`. Raises ConfigError.

        memory://NAME is a store in the memory of this process.
        """
        url = url.rstrip("/") if url.partition("://")[2].strip("/") else url
        return cls(make_client(url, **options), url.rstrip("/") if url.startswith("memory://") else url)

    @property
    def identity(self) -> str:
        """The URL."""
        return self.url

    @property
    def parent(self) -> "ObjectStore | None":
        """The store one step up in the prefix; None where there is no prefix."""
        if not self.prefix:
            return None
        above = self.prefix.rstrip("/").rpartition("/")[0]
        return ObjectStore(self.client, self.url.rpartition("/")[0], f"{above}/" if above else "")

    def within(self, folder: str) -> "ObjectStore":
        """The store of the objects below `folder`."""
        return ObjectStore(self.client, self.where(folder), f"{self.prefix}{checked_name(folder)}/")

    def key(self, name: str) -> str:
        """The name of an object in the client. Raises ConfigError for one that no store may have."""
        return self.prefix + checked_name(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of an object, see `Store.read`."""
        if stop is None and not start:
            with reading_object(self.where(name)):
                return bytes(obstore.get(self.client, self.key(name)).bytes())
        file = self.open(name)
        memory = bytearray(max(0, (file.size_bytes if stop is None else stop) - start))
        file.read_into(memoryview(memory), start)
        return bytes(memory)

    def open(self, name: str) -> "RemoteObject":
        """Open an object by its first bytes, so that all of a small one comes with one request."""
        try:
            with reading_object(self.where(name)):
                facts, first = until_whole(lambda: self._first_bytes(name))
        except UnreadableError as error:
            found = self.stat(name) if "range" in str(error).lower() else None
            if found is None or found.size_bytes:
                raise
            return RemoteObject(self, name, 0, found.version)  # in no bytes there is no range
        found = self._stored(facts)
        if len(first) != min(_FIRST_BYTES, found.size_bytes):
            raise CorruptError(f"{self.where(name)}: {len(first)} of its first bytes came; read it again")
        return RemoteObject(self, name, found.size_bytes, found.version, first)

    def write(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object in one request, see `Store.write`.

        With `create_only`, an answer that was lost may come as NameTakenError, though it is our bytes that are there:
        who has to know reads them back.
        """
        if create_only:
            self._create(name, data)
            return
        with writing_object(self.where(name)):
            obstore.put(self.client, self.key(name), data, use_multipart=False)

    def create(self, name: str, size_bytes: int) -> "RemoteWriting":
        """A multipart upload, in the background. Bytes ahead of a gap are held in memory until it is filled."""
        checked_name(name)
        return RemoteWriting(self, name, size_bytes)

    def list(self, prefix: str = "") -> list[Stored]:
        """All objects below `prefix`, see `Store.list`."""
        with reading_object(self.where(prefix)):
            found = until_whole(lambda: [*obstore.list(self.client, self._folder_key(prefix))])
        return sorted((self._stored(each) for page in found for each in page), key=lambda each: each.name)

    def list_folder(self, prefix: str = "") -> FolderListing:
        """The folders and objects directly in `prefix`, by one listing with a delimiter."""
        with reading_object(self.where(prefix)):
            found = until_whole(lambda: obstore.list_with_delimiter(self.client, self._folder_key(prefix)))
        names = sorted(str(each).rstrip("/").rsplit("/", 1)[-1] for each in found["common_prefixes"])
        folders = tuple(Folder(name, self.where(f"{prefix}/{name}" if prefix else name)) for name in names)
        objects = tuple(sorted((self._stored(each) for each in found["objects"]), key=lambda each: each.name))
        return FolderListing(bool(folders or objects), folders, objects)

    def stat(self, name: str) -> Stored | None:
        """The object, see `Store.stat`."""
        try:
            with reading_object(self.where(name)):
                return self._stored(obstore.head(self.client, self.key(name)))
        except MissingError:
            return None

    def copy(self, name: str, other: str, source: Store | None = None) -> bool:
        """A copy that the service makes by itself, see `Store.copy`; False between two of them."""
        store, goal = self if source is None else source, self.key(other)
        if not isinstance(store, ObjectStore) or store.client is not self.client:
            return False
        if store.stat(name) is None:
            raise missing_object(store.where(name))
        with writing_object(self.where(other)):
            try:
                obstore.copy(self.client, store.key(name), goal)
            except exceptions.NotSupportedError:
                return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects, as many in one request as the store takes."""
        doomed = [self.key(name) for name in names]
        with writing_object(self.url):
            try:
                until_whole(lambda: obstore.delete(self.client, doomed))
            except ABSENT as error:  # some stores say so, and stop there
                refuse_missing_bucket(self.url, error)
                for name in doomed:
                    with suppress(*ABSENT):
                        obstore.delete(self.client, name)

    def free_bytes(self) -> int | None:
        """None: buckets have no end."""
        return None

    def where(self, name: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{name}" if name else self.url

    def _first_bytes(self, name: str) -> tuple[Any, bytes]:
        asked: Any = {"range": (0, _FIRST_BYTES)}
        answer = obstore.get(self.client, self.key(name), options=asked)
        return answer.meta, bytes(answer.bytes())

    def _create(self, name: str, data: bytes, tries: int = 3) -> None:
        try:
            with writing_object(self.where(name)):
                obstore.put(self.client, self.key(name), data, mode="create", use_multipart=False)
        except TargetError as error:
            if not isinstance(error.__cause__, TAKEN):
                raise
            if self.stat(name) is not None:
                raise taken_name(self.where(name)) from error
            if tries == 1:
                raise
            self._create(name, data, tries - 1)  # another one stopped it, which came to nothing

    def _folder_key(self, folder: str) -> str | None:
        return self.key(folder) if folder else self.prefix or None

    def _stored(self, found: Any) -> Stored:
        modified = float(int(found["last_modified"].timestamp()))  # a head gives no more, a listing may
        etag = _quoted(found.get("e_tag"))
        version = etag or f"{_MADE_UP}{modified}-{found['size']}"
        return Stored(found["path"].removeprefix(self.prefix), found["size"], modified, version, etag)


@dataclass
class RemoteObject:
    """An object that was looked up."""

    store: ObjectStore
    name: str
    size_bytes: int
    version: str
    first: bytes = field(default=b"", repr=False)  # what came when it was opened
    can_map = False

    @property
    def where(self) -> str:
        """The URL."""
        return self.store.where(self.name)

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        """Read one range, of this version, see `Readable.read_into`."""
        stop = start + len(memory)
        if stop > self.size_bytes:
            raise CorruptError(
                f"{self.where}: ends at byte {self.size_bytes}, bytes up to {stop} asked for; it was cut short"
            )
        here = self.first[start:stop]
        memory[: len(here)] = here
        memory, start = memory[len(here) :], start + len(here)
        if not len(memory):
            return
        options: Any = {"range": (start, stop)}
        has_version = not self.version.startswith(_MADE_UP)
        if has_version:
            options["if_match"] = self.version
        with reading_object(self.where):
            answer = obstore.get(self.store.client, self.store.key(self.name), options=options)
            found = answer.bytes()
        if has_version and answer.meta["e_tag"] != self.version:  # some stores pass over conditions
            raise changed_object(self.where)
        if len(found) != len(memory):
            raise CorruptError(
                f"{self.where}: {len(found)} bytes came from byte {start} on, expected {len(memory)}; read it again"
            )
        memory[:] = memoryview(found).cast("B")

    def map(self) -> None:
        """None: what is far away is not mapped."""
        return

    def check(self) -> None:
        """Ask for the object's version again, see `Readable.check`."""
        found = self.store.stat(self.name)
        if found is None or found.version != self.version:
            raise changed_object(self.where)

    def close(self) -> None:
        """Nothing is held."""


def _quoted(etag: str | None) -> str | None:
    """The tag of a version as all answers but Azure's listings have it."""
    return f'"{etag}"' if etag is not None and etag.startswith("0x") else etag
