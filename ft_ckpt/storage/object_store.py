"""The prefix of a bucket as a store, by obstore: S3, Google, Azure, and what speaks their languages. Knows no disks.

An object appears when its last byte is there: in one request, or as a multipart upload that is completed at its end.
Readers ask for the version that they opened, so that an object which is written over becomes an error.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import obstore
from obstore import exceptions
from obstore.store import from_url

from ft_ckpt.errors import ConfigError, CorruptError, IncompleteError, MissingError
from ft_ckpt.storage.object_errors import (
    ABSENT,
    changed_object,
    client_reason,
    missing_object,
    reading_object,
    writing_object,
)
from ft_ckpt.storage.store import Folder, FolderListing, Store, Stored, checked_name

_PART_BYTES, _MOST_PARTS = 16 << 20, 10_000  # of an upload; S3 takes no more parts than that
_STREAMS = 4  # parts of one upload that are under way at once
_MADE_UP = "~"  # begins the version of an object that the store gives none


@dataclass(frozen=True)
class ObjectStore:
    """The objects of `client` below `prefix` ("" or a path with a slash at its end); `url` names it to people."""

    client: Any
    url: str
    prefix: str = ""

    @classmethod
    def from_url(cls, url: str, **options: Any) -> "ObjectStore":
        """The store at `url`; `options` are those of `obstore.store.from_url`. Raises ConfigError."""
        try:
            return cls(from_url(url, **options), url.removesuffix("/"))
        except (exceptions.BaseError, ValueError, TypeError) as error:
            raise ConfigError(f"{url}: no object store that can be used ({client_reason(error)})") from error

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
        """Look the object up; its bytes are read when they are asked for."""
        found = self.stat(name)
        if found is None:
            raise missing_object(self.where(name))
        return RemoteObject(self, name, found.size_bytes, found.version)

    def write(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object in one request, see `Store.write`.

        With `create_only`, an answer that was lost may come as NameTakenError, though it is our bytes that are there:
        who has to know reads them back.
        """
        with writing_object(self.where(name)):
            mode: Any = "create" if create_only else "overwrite"
            obstore.put(self.client, self.key(name), data, mode=mode, use_multipart=False)

    def create(self, name: str, size_bytes: int) -> "RemoteWriting":
        """A multipart upload, in the background. Bytes ahead of a gap are held in memory until it is filled."""
        checked_name(name)
        return RemoteWriting(self, name, size_bytes)

    def list(self, prefix: str = "") -> list[Stored]:
        """All objects below `prefix`, see `Store.list`."""
        with reading_object(self.where(prefix)):
            pages = obstore.list(self.client, self._folder_key(prefix))
            return sorted((self._stored(each) for page in pages for each in page), key=lambda each: each.name)

    def list_folder(self, prefix: str = "") -> FolderListing:
        """The folders and objects directly in `prefix`, by one listing with a delimiter."""
        with reading_object(self.where(prefix)):
            found = obstore.list_with_delimiter(self.client, self._folder_key(prefix))
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
                obstore.delete(self.client, doomed)
            except ABSENT:  # some stores say so, and stop there
                for name in doomed:
                    with suppress(*ABSENT):
                        obstore.delete(self.client, name)

    def free_bytes(self) -> int | None:
        """None: buckets have no end."""
        return None

    def where(self, name: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{name}" if name else self.url

    def _folder_key(self, folder: str) -> str | None:
        return self.key(folder) if folder else self.prefix or None

    def _stored(self, found: Any) -> Stored:
        modified = found["last_modified"].timestamp()
        version = found.get("e_tag") or f"{_MADE_UP}{modified}-{found['size']}"
        return Stored(found["path"].removeprefix(self.prefix), found["size"], modified, version)


@dataclass
class RemoteObject:
    """An object that was looked up."""

    store: ObjectStore
    name: str
    size_bytes: int
    version: str
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
                f"{self.store.where(self.name)}: ends at byte {self.size_bytes}, bytes up to {stop} asked for; "
                "it was cut short"
            )
        if not len(memory):
            return
        options: Any = {"range": (start, stop)}
        if not self.version.startswith(_MADE_UP):
            options["if_match"] = self.version
        with reading_object(self.store.where(self.name)):
            found = obstore.get(self.store.client, self.store.key(self.name), options=options).bytes()
        if len(found) != len(memory):
            raise CorruptError(
                f"{self.store.where(self.name)}: {len(found)} bytes came from byte {start} on, expected {len(memory)}; "
                "read it again"
            )
        memory[:] = memoryview(found).cast("B")

    def map(self) -> None:
        """None: what is far away is not mapped."""
        return

    def check(self) -> None:
        """Ask for the object's version again, see `Readable.check`."""
        found = self.store.stat(self.name)
        if found is None or found.version != self.version:
            raise changed_object(self.store.where(self.name))

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class RemoteWriting:
    """An upload under way: a thread takes the bytes in their order and sends them."""

    store: ObjectStore
    name: str
    size_bytes: int
    _ahead: dict[int, bytes] = field(default_factory=dict)  # beyond a gap
    _ready: deque[bytes] = field(default_factory=deque)
    _arrived: int = 0  # bytes without a gap
    _waiting: int = 0  # of them those that are not yet sent
    _over: bool = False
    _dropped: bool = False
    _error: BaseException | None = None
    _change: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.part_bytes = max(_PART_BYTES, -(-self.size_bytes // _MOST_PARTS))
        self._thread = threading.Thread(target=self._upload, name="ft_ckpt-upload", daemon=True)
        self._thread.start()

    def write(self, offset: int, memory: memoryview) -> None:
        """Hand bytes over, see `Writable.write`; waits while two parts are waiting to be sent."""
        if offset + len(memory) > self.size_bytes:
            raise IncompleteError(f"{self.name}: bytes up to {offset + len(memory)}, expected {self.size_bytes}")
        with self._change:
            if not len(memory):
                return
            self._ahead[offset] = bytes(memory)
            while (piece := self._ahead.pop(self._arrived, None)) is not None:
                self._ready.append(piece)
                self._arrived, self._waiting = self._arrived + len(piece), self._waiting + len(piece)
            self._change.notify_all()
            self._change.wait_for(lambda: self._waiting < 2 * self.part_bytes or self._error is not None)
            self._raise_failure()

    def finish(self) -> Stored:
        """Complete the upload, see `Writable.finish`."""
        if self._arrived != self.size_bytes:
            missing = f"{self.name}: {self._arrived} of {self.size_bytes} bytes arrived; nothing is kept"
            self.abandon()
            raise IncompleteError(missing)
        self._end()
        self._raise_failure()
        found = self.store.stat(self.name)
        if found is None or found.size_bytes != self.size_bytes:
            raise CorruptError(f"{self.store.where(self.name)}: not whole after its upload; save again")
        return found

    def abandon(self) -> None:
        """Abort the upload, see `Writable.abandon`."""
        self._dropped = True
        self._end()

    def _end(self) -> None:
        with self._change:
            self._over = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _raise_failure(self) -> None:
        if self._error is not None:
            with writing_object(self.store.where(self.name)):
                raise self._error

    def _upload(self) -> None:
        try:
            if not self.size_bytes and self._next_piece() is None:  # no stream of no bytes
                obstore.put(self.store.client, self.store.key(self.name), b"", use_multipart=False)
                return
            obstore.put(
                self.store.client,
                self.store.key(self.name),
                self._pieces(),
                use_multipart=True,
                chunk_size=self.part_bytes,
                max_concurrency=_STREAMS,
            )
        except BaseException as error:  # noqa: BLE001 - raised by the next write, or by finish
            with self._change:
                self._error = None if self._dropped else error
                self._change.notify_all()

    def _pieces(self) -> Iterator[bytes]:
        while (piece := self._next_piece()) is not None:
            yield piece

    def _next_piece(self) -> bytes | None:
        with self._change:
            self._change.wait_for(lambda: self._ready or self._over)
            if self._dropped:
                _abort()
            if not self._ready:
                return None
            piece = self._ready.popleft()
            self._waiting -= len(piece)
            self._change.notify_all()
            return piece


def _abort() -> NoReturn:
    """End the iterator of an upload by an error: the client then takes back what it has sent."""
    raise InterruptedError("the upload is dropped")
