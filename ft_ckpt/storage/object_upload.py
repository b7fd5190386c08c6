"""Multipart uploads of an object of known size, in the background."""

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import obstore

from ft_ckpt.errors import CorruptError, IncompleteError
from ft_ckpt.storage.object_errors import writing_object
from ft_ckpt.storage.store import Stored

if TYPE_CHECKING:
    from ft_ckpt.storage.object_store import ObjectStore

_PART_BYTES, _MOST_PARTS = 16 << 20, 10_000  # of an upload; S3 takes no more parts than that
_STREAMS = 4  # parts of one upload that are under way at once


def size_of_parts(size_bytes: int) -> int:
    """The bytes of each part of the upload of an object, which is one request."""
    return max(_PART_BYTES, -(-size_bytes // _MOST_PARTS))


@dataclass
class RemoteWriting:
    """An upload under way: a thread takes the bytes in their order and sends them."""

    store: "ObjectStore"
    name: str
    size_bytes: int
    _ahead: dict[int, bytes] = field(default_factory=dict)  # beyond a gap
    _ready: deque[bytes] = field(default_factory=deque)
    _arrived: int = 0  # bytes without a gap
    _waiting: int = 0  # of them those that are not yet sent
    _over: bool = False
    _dropped: bool = False
    _error: BaseException | None = None
    _etag: str | None = None  # of what was sent, as the store has answered
    _change: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.part_bytes = size_of_parts(self.size_bytes)
        self._thread = threading.Thread(target=self._upload, name="ft_ckpt-upload", daemon=True)
        self._thread.start()

    def write(self, offset: int, memory: memoryview) -> None:
        """Hand bytes over, see `Writable.write`; waits while a part is waiting to be sent."""
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
            self._change.wait_for(lambda: self._waiting < self.part_bytes or self._error is not None)
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
        if found is None or found.size_bytes != self.size_bytes or self._etag not in (None, found.etag):
            where = self.store.where(self.name)
            raise CorruptError(f"{where}: not whole after its upload, or written over by another; save again")
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
            done = obstore.put(
                self.store.client,
                self.store.key(self.name),
                self._pieces(),
                use_multipart=True,
                chunk_size=self.part_bytes,
                max_concurrency=_STREAMS,
            )
            self._etag = done["e_tag"] or None  # Ceph's gateway says none
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
