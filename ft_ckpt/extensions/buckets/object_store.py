"""Stores in buckets, through obstore (S3, Google, Azure and compatible services).

An object appears as a whole: by one request, or when its multipart upload is completed. Readers
request the version that they opened, so an object that is overwritten meanwhile becomes an error.
"""

import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore import exceptions
from obstore.store import MemoryStore, from_url

from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    IncompleteError,
    MissingError,
    NameTakenError,
    TargetError,
    UnreadableError,
)
from ft_ckpt.messages import clean_causes, without_secrets
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

ABSENT = (FileNotFoundError, exceptions.NotFoundError)
TAKEN = (FileExistsError, exceptions.AlreadyExistsError)
_REFUSED = ("401", "403")  # status codes of refused credentials
_CLIENT = (exceptions.BaseError, OSError, ValueError)
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")  # error codes of the services
# messages of the client
_CUT_OFF = ("response body error", "invalid list response", "invalid DeleteObjects response")
_T = TypeVar("_T")


@contextmanager
def reading_object(where: str) -> Iterator[None]:
    """Convert errors of the client in the block into those of this package.

    They become MissingError, ConfigError or UnreadableError, which also stands for another version
    of the object.
    """
    try:
        yield
    except CheckpointError:
        raise
    except _CLIENT as error:
        clean_causes(error)
        refuse_missing_bucket(where, error)
        if isinstance(error, ABSENT):
            raise missing_object(where) from error
        if isinstance(error, exceptions.PreconditionError):
            raise changed_object(where) from error
        _refuse_bad_name(where, error)
        reason = client_reason(error)
        advice = (
            "use credentials that may read there" if reason.startswith(_REFUSED) else "try again"
        )
        raise UnreadableError(f"{where}: cannot be read ({reason}); {advice}") from error


@contextmanager
def writing_object(where: str) -> Iterator[None]:
    """Convert errors of the block into ConfigError or TargetError."""
    try:
        yield
    except CheckpointError:
        raise
    except _CLIENT as error:
        clean_causes(error)
        refuse_missing_bucket(where, error)
        _refuse_bad_name(where, error)
        reason = client_reason(error)
        raise TargetError(
            f"{where}: cannot be written ({reason}); check credentials and network, or choose "
            "another place"
        ) from error


def client_reason(error: BaseException) -> str:
    """Status, code and message of the service, or the first line of the client's error.

    The rest is internal.
    """
    text = str(error)
    status = re.search(r"status code: (\d+ [A-Za-z ]+)", text)
    if status is None:
        first_line = text.split("\n", 1)[0]
        first_line = re.sub(r".* - (?=HTTP error|Received)", "", first_line)
        return f"{type(error).__name__}: {without_secrets(first_line)[:300]}"
    reason = status[1].strip()
    code = re.search(r"<Code>(.*?)</Code>", text)
    if code is not None:
        reason += f", {code[1].strip()}"
    message = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    if message is not None:
        reason += f": {without_secrets(message[1])[:300]}"
    return reason


def until_whole(request: Callable[[], _T], tries: int = 3) -> _T:
    """Repeat `request` until its response is complete: the client does not retry cut-off bodies."""
    try:
        return request()
    except exceptions.BaseError as error:
        if tries == 1 or not any(message in str(error) for message in _CUT_OFF):
            raise
    return until_whole(request, tries - 1)


def refuse_missing_bucket(where: str, error: BaseException) -> None:
    """Raise ConfigError if the bucket does not exist.

    The client raises the same error for a missing object.
    """
    if any(code in str(error) for code in _NO_BUCKET):
        raise ConfigError(f"{where}: no such bucket; create it, or correct its name") from error


def _refuse_bad_name(where: str, error: BaseException) -> None:
    if isinstance(error, exceptions.InvalidPathError) or "Could not parse path" in str(error):
        raise ConfigError(
            f"{where}: no name that an object can have ({client_reason(error)})"
        ) from error


_VARIABLES = {
    "s3": "AWS",
    "s3a": "AWS",
    "gs": "GOOGLE",
}  # prefix of the environment variables; Azure's for all other schemes
_CLIENT_SETTINGS = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "proxy_url",
    "timeout",
    "user_agent",
)
_ENDPOINT_OPTIONS = ("aws_endpoint_url", "aws_endpoint", "endpoint_url", "endpoint")
_ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# of one request, by the client's own clock: a part of an upload may take minutes on a slow line
_TIMEOUT = "3m"
_RETRIES = {"retry_timeout": timedelta(minutes=30)}  # ten tries, some of which may time out


def client_options(url: str, **options: Any) -> dict[str, Any]:
    """Combine defaults, environment variables and `options`; later ones override earlier ones.

    The client itself merges none of them.
    """
    prefix = _VARIABLES.get(url.partition("://")[0].lower(), "AZURE")
    client_settings = {"timeout": _TIMEOUT}
    for name in _CLIENT_SETTINGS:
        value = os.environ.get(f"{prefix}_{name.upper()}")
        if value is not None:
            client_settings[name] = value
    merged: dict[str, Any] = {}
    if prefix == "AWS" and _uses_tls(options):
        merged["unsigned_payload"] = True
    merged.update(options)
    merged["client_options"] = {**client_settings, **options.get("client_options", {})}
    merged["retry_config"] = {**_RETRIES, **options.get("retry_config", {})}
    return merged


def _uses_tls(options: dict[str, Any]) -> bool:
    """Whether the transport protects what is sent, so that bodies need no signature."""
    config = {**options, **options.get("config", {})}
    endpoints = [config[name] for name in _ENDPOINT_OPTIONS if name in config]
    endpoints += [os.environ[name] for name in _ENDPOINT_VARIABLES if name in os.environ]
    return not any(str(endpoint).startswith("http:") for endpoint in endpoints)


_PART_BYTES, _MAX_PARTS = 16 << 20, 10_000  # of an upload; the limit is S3's
_STREAMS = 4  # parts of one upload that are sent in parallel


def size_of_parts(size_bytes: int) -> int:
    """The bytes of each part of the upload of an object, which is one request."""
    return max(_PART_BYTES, -(-size_bytes // _MAX_PARTS))


@dataclass
class RemoteWriting:
    """An upload in progress: a thread takes the bytes in order and sends them."""

    store: "ObjectStore"
    name: str
    size_bytes: int
    _ahead: dict[int, bytes] = field(default_factory=dict)  # beyond a gap
    _ready: deque[bytes] = field(default_factory=deque)
    _arrived: int = 0  # bytes without a gap
    _waiting: int = 0  # bytes in `_ready`, not yet taken by the client
    _over: bool = False
    _dropped: bool = False
    _error: BaseException | None = None
    _etag: str | None = None  # of the upload, from the response
    _change: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.part_bytes = size_of_parts(self.size_bytes)
        self._thread = threading.Thread(target=self._upload, name="ft_ckpt-upload", daemon=True)
        self._thread.start()

    def write(self, offset: int, memory: memoryview) -> None:
        """Blocks until less than a part is waiting to be sent."""
        if offset + len(memory) > self.size_bytes:
            raise IncompleteError(
                f"{self.name}: bytes up to {offset + len(memory)}, expected {self.size_bytes}"
            )
        with self._change:
            if not len(memory):
                return
            self._ahead[offset] = bytes(memory)
            while self._arrived in self._ahead:
                piece = self._ahead.pop(self._arrived)
                self._ready.append(piece)
                self._arrived += len(piece)
                self._waiting += len(piece)
            self._change.notify_all()
            self._change.wait_for(
                lambda: self._waiting < self.part_bytes or self._error is not None
            )
            self._raise_failure()

    def finish(self) -> Stored:
        arrived = self._arrived
        if arrived != self.size_bytes:
            self.abandon()
            raise IncompleteError(
                f"{self.name}: {arrived} of {self.size_bytes} bytes arrived; nothing is kept"
            )
        self._end()
        self._raise_failure()
        stored = self.store.stat(self.name)
        if stored is None or not self._is_upload(stored):
            raise CorruptError(
                f"{self.store.where(self.name)}: differs from what was uploaded: incomplete, or "
                "overwritten by another process; save again"
            )
        return stored

    def abandon(self) -> None:
        self._dropped = True
        self._end()

    def _is_upload(self, stored: Stored) -> bool:
        return stored.size_bytes == self.size_bytes and self._etag in (None, stored.etag)

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
            # an empty stream is not possible
            if not self.size_bytes and self._next_piece() is None:
                obstore.put(self.store.client, self.store.key(self.name), b"", use_multipart=False)
                return
            result = obstore.put(
                self.store.client,
                self.store.key(self.name),
                iter(self._next_piece, None),
                use_multipart=True,
                chunk_size=self.part_bytes,
                max_concurrency=_STREAMS,
            )
            self._etag = result["e_tag"] or None  # Ceph's gateway returns none
        except BaseException as error:  # noqa: BLE001 - raised by the next write, or by finish
            with self._change:
                self._error = None if self._dropped else error
                self._change.notify_all()

    def _next_piece(self) -> bytes | None:
        with self._change:
            self._change.wait_for(lambda: self._ready or self._over)
            if self._dropped:  # an error in the iterator makes the client abort the upload
                raise InterruptedError("the upload is dropped")
            if not self._ready:
                return None
            piece = self._ready.popleft()
            self._waiting -= len(piece)
            self._change.notify_all()
            return piece


_FIRST_BYTES = 256 << 10  # read when an object is opened: latency equals the transfer of about 1 MB
_MADE_UP = "~"  # prefix of the version of an object without an etag


@dataclass(frozen=True)
class ObjectStore(RemoteStore):
    """The objects of `client` below `prefix` ("" or a path with a slash at its end).

    `url` is for messages.
    """

    client: Any = field(repr=False)  # the repr of some clients panics
    url: str
    prefix: str = ""

    @classmethod
    def from_url(cls, url: str, **options: Any) -> "ObjectStore":
        """The store of the bucket `url`.

        `options` are those of `obstore.store.from_url`. Raises ConfigError.

        memory://NAME is a store in the memory of this process.
        """
        url = url.rstrip("/") if url.partition("://")[2].strip("/") else url
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
        """The name of an object in the client. Raises ConfigError for an invalid one."""
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
                facts, first_bytes = until_whole(lambda: self._first_bytes(name))
        except UnreadableError as error:
            stored = self.stat(name) if "range" in str(error).lower() else None
            if stored is None or stored.size_bytes:
                raise
            return RemoteObject(self, name, 0, stored.version)  # an empty object has no range
        stored = self._stored(facts)
        if len(first_bytes) != min(_FIRST_BYTES, stored.size_bytes):
            raise CorruptError(
                f"{self.where(name)}: {len(first_bytes)} of its first bytes came; read it again"
            )
        return RemoteObject(self, name, stored.size_bytes, stored.version, first_bytes)

    def write(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        """Write a small object in one request.

        With `create_only`, a lost response may become a NameTakenError although our bytes were
        written: read them back where that matters.
        """
        if create_only:
            self._create(name, data)
            return
        with writing_object(self.where(name)):
            obstore.put(self.client, self.key(name), data, use_multipart=False)

    def create(self, name: str, size_bytes: int) -> "RemoteWriting":
        """A multipart upload in the background.

        Bytes behind a gap are kept in memory until it is filled.
        """
        checked_name(name)
        return RemoteWriting(self, name, size_bytes)

    def list(self, prefix: str = "") -> list[Stored]:
        with reading_object(self.where(prefix)):
            pages = until_whole(lambda: [*obstore.list(self.client, self._folder_key(prefix))])
        objects: list[Stored] = []
        for page in pages:
            objects += [self._stored(facts) for facts in page]
        return sorted(objects, key=lambda stored: stored.name)

    def list_folder(self, prefix: str = "") -> FolderListing:
        with reading_object(self.where(prefix)):
            answer = until_whole(
                lambda: obstore.list_with_delimiter(self.client, self._folder_key(prefix))
            )
        start = f"{prefix}/" if prefix else ""
        folder_keys = [str(key).rstrip("/") for key in answer["common_prefixes"]]
        names = sorted(key.rpartition("/")[2] for key in folder_keys)
        folders = tuple(Folder(name, self.where(start + name)) for name in names)
        objects = [self._stored(facts) for facts in answer["objects"]]
        objects.sort(key=lambda stored: stored.name)
        return FolderListing(bool(folders or objects), folders, tuple(objects))

    def stat(self, name: str) -> Stored | None:
        try:
            with reading_object(self.where(name)):
                return self._stored(obstore.head(self.client, self.key(name)))
        except MissingError:
            return None

    def copy(self, name: str, other: str, source: Store | None = None) -> bool:
        """A copy on the server; False between two clients."""
        store: Store = self if source is None else source
        goal = self.key(other)
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
        doomed = [self.key(name) for name in names]
        with writing_object(self.url):
            try:
                until_whole(lambda: obstore.delete(self.client, doomed))
            except ABSENT as error:  # some services stop at the first missing object
                refuse_missing_bucket(self.url, error)
                for name in doomed:
                    with suppress(*ABSENT):
                        obstore.delete(self.client, name)

    def free_bytes(self) -> int | None:
        return None

    def where(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _first_bytes(self, name: str) -> tuple[Any, bytes]:
        options: Any = {"range": (0, _FIRST_BYTES)}
        answer = obstore.get(self.client, self.key(name), options=options)
        return answer.meta, bytes(answer.bytes())

    def _create(self, name: str, data: bytes, tries: int = 3) -> None:
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
            if tries == 1:
                raise
            self._create(name, data, tries - 1)  # lost against a writer that then failed

    def _folder_key(self, folder: str) -> str | None:
        return self.key(folder) if folder else self.prefix or None

    def _stored(self, facts: Any) -> Stored:
        # whole seconds, as a HEAD response gives it
        modified = float(int(facts["last_modified"].timestamp()))
        etag = facts.get("e_tag")
        # from Azure's listings; its other responses quote it
        if etag is not None and etag.startswith("0x"):
            etag = f'"{etag}"'
        name, size_bytes = facts["path"].removeprefix(self.prefix), facts["size"]
        version = etag or f"{_MADE_UP}{modified}-{size_bytes}"
        return Stored(name, size_bytes, modified, version, etag)


@dataclass
class RemoteObject:
    """An open object of a bucket."""

    store: ObjectStore
    name: str
    size_bytes: int
    version: str
    first_bytes: bytes = field(default=b"", repr=False)  # read when it was opened
    can_map = False

    @property
    def where(self) -> str:
        return self.store.where(self.name)

    def read_into(self, memory: memoryview, start: int = 0) -> None:
        stop = start + len(memory)
        refuse_beyond(self, self.where, stop)
        known_bytes = self.first_bytes[start:stop]
        memory[: len(known_bytes)] = known_bytes
        memory, start = memory[len(known_bytes) :], start + len(known_bytes)
        if not len(memory):
            return
        options: Any = {"range": (start, stop)}
        has_version = not self.version.startswith(_MADE_UP)
        if has_version:
            options["if_match"] = self.version
        with reading_object(self.where):
            answer = obstore.get(self.store.client, self.store.key(self.name), options=options)
            content = answer.bytes()
        if has_version and answer.meta["e_tag"] != self.version:  # some services ignore conditions
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
        """Nothing to release."""
