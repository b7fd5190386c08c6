"""Reads and writes objects in buckets by obstore (S3, Google, Azure and compatible services).

An object appears as a whole. It is written by one request, or appears when its multipart upload is
completed. Readers request the version that they opened, so that a read raises an error if the
object was overwritten after it was opened.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import obstore
from obstore import exceptions
from obstore.store import MemoryStore, from_url

from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    MissingError,
    NameTakenError,
    TargetError,
    UnreadableError,
)
from ft_ckpt.extensions.buckets.client_errors import (
    ABSENT,
    TAKEN,
    client_reason,
    reading_object,
    refuse_missing_bucket,
    until_whole,
    writing_object,
)
from ft_ckpt.extensions.buckets.client_options import client_options
from ft_ckpt.extensions.buckets.uploads import MultipartUpload
from ft_ckpt.messages import clean_causes
from ft_ckpt.storage import (
    Folder,
    FolderListing,
    RemoteStore,
    Store,
    Stored,
    changed_object,
    checked_name,
    missing_object,
    read_object,
    refuse_beyond,
    refuse_other_length,
)

# How much is read when an object is opened. A request takes about as long as the transfer of 1 MB.
_FIRST_BYTES = 256 << 10
_WITHOUT_ETAG = "~"  # the first character of the version of an object without ETag


@dataclass(frozen=True)
class ObjectStore(RemoteStore):
    """The objects of a bucket whose names begin with a prefix.

    Attributes:
        client: The client of the bucket.
        url: The URL, for messages.
        prefix: The prefix, which is "" or a path with a slash at its end.
    """

    # The repr of some clients raises an error.
    client: Any = field(repr=False)
    url: str
    prefix: str = ""

    @classmethod
    def from_url(cls, url: str, **options: Any) -> "ObjectStore":
        """Open the store of the bucket `url`.

        `options` are those of `obstore.store.from_url`. memory://NAME is a store in the memory of
        this process. Raises ConfigError for an invalid URL or option.
        """
        has_bucket = bool(url.partition("://")[2].strip("/"))
        if has_bucket:
            url = url.rstrip("/")
        try:
            if url.startswith("memory://"):
                return cls(MemoryStore(**options), url.rstrip("/"))
            return cls(from_url(url, **client_options(url, **options)), url)
        except (exceptions.BaseError, ValueError, TypeError) as error:
            clean_causes(error)
            raise ConfigError(
                f"{url}: no object store that can be used ({client_reason(error)})"
            ) from error

    @property
    def identity(self) -> str:
        return self.url

    @property
    def parent(self) -> "ObjectStore | None":
        if not self.prefix:
            return None
        folder = self.prefix.rstrip("/").rpartition("/")[0]
        prefix = f"{folder}/" if folder else ""
        return ObjectStore(self.client, self.url.rpartition("/")[0], prefix)

    def within(self, folder: str) -> "ObjectStore":
        return ObjectStore(self.client, self.where(folder), f"{self.prefix}{checked_name(folder)}/")

    def key(self, name: str) -> str:
        """Return the name of an object in the bucket. Raises ConfigError for an invalid name."""
        return self.prefix + checked_name(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if stop is None and not start:
            with reading_object(self.where(name)):
                return bytes(obstore.get(self.client, self.key(name)).bytes())
        return read_object(self, name, start, stop)

    def open(self, name: str) -> "RemoteObject":
        """Open an object by reading its first bytes, so that a small one takes one request."""
        try:
            with reading_object(self.where(name)):
                metadata, first_bytes = until_whole(lambda: self._first_bytes(name))
        except UnreadableError as error:
            if "range" not in str(error).lower():
                raise
            stored = self.stat(name)
            if stored is None or stored.size_bytes:
                raise
            # A request for a range of an empty object is an error.
            return RemoteObject(self, name, 0, stored.version)

        stored = self._stored(metadata)
        if len(first_bytes) != min(_FIRST_BYTES, stored.size_bytes):
            raise CorruptError(
                f"{self.where(name)}: {len(first_bytes)} of its first bytes came; read it again"
            )

        return RemoteObject(self, name, stored.size_bytes, stored.version, first_bytes)

    def write(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object in one request.

        With `create_only`, NameTakenError may be raised although this call wrote the bytes, if the
        response was lost. Where this matters, read the bytes back.
        """
        if create_only:
            self._create(name, data)
            return
        with writing_object(self.where(name)):
            obstore.put(self.client, self.key(name), data, use_multipart=False)

    def create(self, name: str, size_bytes: int) -> "MultipartUpload":
        """Begin a multipart upload in the background.

        Bytes may be written in any order. Those after a gap are kept in memory until the gap is
        filled.
        """
        checked_name(name)
        return MultipartUpload(self, name, size_bytes)

    def list(self, prefix: str = "") -> list[Stored]:
        with reading_object(self.where(prefix)):
            pages = until_whole(lambda: [*obstore.list(self.client, self._folder_key(prefix))])
        objects: list[Stored] = []
        for page in pages:
            objects += [self._stored(metadata) for metadata in page]
        return sorted(objects, key=lambda stored: stored.name)

    def list_folder(self, prefix: str = "") -> FolderListing:
        with reading_object(self.where(prefix)):
            answer = until_whole(
                lambda: obstore.list_with_delimiter(self.client, self._folder_key(prefix))
            )
        parent = f"{prefix}/" if prefix else ""
        folder_keys = [str(key).rstrip("/") for key in answer["common_prefixes"]]
        names = sorted(key.rpartition("/")[2] for key in folder_keys)
        folders = tuple(Folder(name, self.where(parent + name)) for name in names)
        objects = [self._stored(metadata) for metadata in answer["objects"]]
        objects.sort(key=lambda stored: stored.name)
        return FolderListing(bool(folders or objects), folders, tuple(objects))

    def stat(self, name: str) -> Stored | None:
        try:
            with reading_object(self.where(name)):
                return self._stored(obstore.head(self.client, self.key(name)))
        except MissingError:
            return None

    def copy(self, name: str, other: str, source: Store | None = None) -> bool:
        """Copy an object within the service. Returns False if this is not possible.

        It is not possible between two clients.
        """
        source_store: Store = self if source is None else source
        other_key = self.key(other)
        if not isinstance(source_store, ObjectStore) or source_store.client is not self.client:
            return False
        if source_store.stat(name) is None:
            raise missing_object(source_store.where(name))
        with writing_object(self.where(other)):
            try:
                obstore.copy(self.client, source_store.key(name), other_key)
            except exceptions.NotSupportedError:
                return False
        return True

    def delete(self, names: Iterable[str]) -> None:
        keys = [self.key(name) for name in names]
        with writing_object(self.url):
            try:
                until_whole(lambda: obstore.delete(self.client, keys))
            except ABSENT as error:
                # Some services stop at the first missing object, so each is deleted alone.
                refuse_missing_bucket(self.url, error)
                for key in keys:
                    with suppress(*ABSENT):
                        obstore.delete(self.client, key)

    def free_bytes(self) -> int | None:
        return None

    def where(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _first_bytes(self, name: str) -> tuple[Any, bytes]:
        options: Any = {"range": (0, _FIRST_BYTES)}
        answer = obstore.get(self.client, self.key(name), options=options)
        return answer.meta, bytes(answer.bytes())

    def _create(self, name: str, data: bytes, max_attempts: int = 3) -> None:
        """Write a new object. Raises NameTakenError if there is one of this name."""
        try:
            with writing_object(self.where(name)):
                obstore.put(self.client, self.key(name), data, mode="create", use_multipart=False)
        except TargetError as error:
            if not isinstance(error.__cause__, TAKEN):
                raise
            if self.stat(name) is not None:
                raise NameTakenError(
                    f"{self.where(name)}: exists already; nothing was written"
                ) from error
            if max_attempts == 1:
                raise
            # Another writer was first, but failed.
            self._create(name, data, max_attempts - 1)

    def _folder_key(self, folder: str) -> str | None:
        return self.key(folder) if folder else self.prefix or None

    def _stored(self, metadata: Any) -> Stored:
        """Return the description of an object from the metadata that the client returns."""
        # Listings have fractions of seconds, but HEAD responses do not.
        modified = float(int(metadata["last_modified"].timestamp()))
        etag = metadata.get("e_tag")
        # Azure's listings have the ETag without quotes, its other responses with quotes.
        if etag is not None and etag.startswith("0x"):
            etag = f'"{etag}"'
        name = metadata["path"].removeprefix(self.prefix)
        size_bytes = metadata["size"]
        version = etag or f"{_WITHOUT_ETAG}{modified}-{size_bytes}"
        return Stored(name, size_bytes, modified, version, etag)


@dataclass
class RemoteObject:
    """An open object of a bucket. `first_bytes` were read when it was opened."""

    store: ObjectStore
    name: str
    size_bytes: int
    version: str
    first_bytes: bytes = field(default=b"", repr=False)
    can_map = False

    @property
    def where(self) -> str:
        return self.store.where(self.name)

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        stop = start + len(memory)
        refuse_beyond(self, self.where, stop)
        first_bytes = self.first_bytes[start:stop]
        memory[: len(first_bytes)] = first_bytes
        if len(first_bytes) < len(memory):
            self._request_into(memory[len(first_bytes) :], start + len(first_bytes))

    def _request_into(self, memory: memoryview, start: int) -> None:
        options: Any = {"range": (start, start + len(memory))}
        has_version = not self.version.startswith(_WITHOUT_ETAG)
        if has_version:
            options["if_match"] = self.version
        with reading_object(self.where):
            answer = obstore.get(self.store.client, self.store.key(self.name), options=options)
            content = answer.bytes()
        # Some services ignore the condition, so the version is compared again.
        if has_version and answer.meta["e_tag"] != self.version:
            raise changed_object(self.where)
        refuse_other_length(self.where, start, len(content), len(memory))
        memory[:] = memoryview(content).cast("B")

    def map(self) -> None:
        return

    def check(self) -> None:
        stored = self.store.stat(self.name)
        if stored is None or stored.version != self.version:
            raise changed_object(self.where)

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""
