"""Sends an object to a bucket by a multipart upload in the background.

The caller writes bytes in any order. A thread sends them in the order of the object.
"""

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import obstore

from ft_ckpt.errors import CorruptError, IncompleteError
from ft_ckpt.extensions.buckets.client_errors import writing_object
from ft_ckpt.storage import Stored

if TYPE_CHECKING:
    from ft_ckpt.extensions.buckets.object_store import ObjectStore


_PART_BYTES = 16 << 20
_MAX_PARTS = 10_000  # S3 allows no more parts in an upload
_STREAMS = 4  # how many parts of an upload are sent in parallel


def size_of_parts(size_bytes: int) -> int:
    """Return the size of each part of an upload. Each part is one request."""
    smallest_bytes = (size_bytes + _MAX_PARTS - 1) // _MAX_PARTS
    return max(_PART_BYTES, smallest_bytes)


@dataclass
class MultipartUpload:
    """An upload in progress.

    Attributes:
        _ahead: Bytes after a gap, by their offset.
        _ready: Bytes that can be sent, in order.
        _arrived: The number of bytes that were written without a gap.
        _waiting: The number of bytes in `_ready`.
        _etag: The ETag in the response of the service.
    """

    store: "ObjectStore"
    name: str
    size_bytes: int
    _ahead: dict[int, bytes] = field(default_factory=dict)
    _ready: deque[bytes] = field(default_factory=deque)
    _arrived: int = 0
    _waiting: int = 0
    _has_ended: bool = False
    _is_abandoned: bool = False
    _error: BaseException | None = None
    _etag: str | None = None
    _change: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.part_bytes = size_of_parts(self.size_bytes)
        self._thread = threading.Thread(target=self._upload, name="ft_ckpt-upload", daemon=True)
        self._thread.start()

    def write(self, offset: int, memory: memoryview) -> None:
        """Write bytes. Blocks until less than a part is waiting to be sent."""
        if offset + len(memory) > self.size_bytes:
            raise IncompleteError(
                f"{self.name}: bytes up to {offset + len(memory)}, expected {self.size_bytes}"
            )

        if not len(memory):
            return
        with self._change:
            self._ahead[offset] = bytes(memory)
            self._queue_arrived()
            self._change.notify_all()
            self._change.wait_for(
                lambda: self._waiting < self.part_bytes or self._error is not None
            )
            self._raise_failure()

    def finish(self) -> Stored:
        if self._arrived != self.size_bytes:
            self.abandon()
            raise IncompleteError(
                f"{self.name}: {self._arrived} of {self.size_bytes} bytes arrived; nothing is kept"
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
        self._is_abandoned = True
        self._end()

    def _queue_arrived(self) -> None:
        """Queue the bytes that continue those that have arrived, without a gap."""
        while self._arrived in self._ahead:
            piece = self._ahead.pop(self._arrived)
            self._ready.append(piece)
            self._arrived += len(piece)
            self._waiting += len(piece)

    def _is_upload(self, stored: Stored) -> bool:
        return stored.size_bytes == self.size_bytes and self._etag in (None, stored.etag)

    def _end(self) -> None:
        with self._change:
            self._has_ended = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _raise_failure(self) -> None:
        if self._error is not None:
            with writing_object(self.store.where(self.name)):
                raise self._error

    def _upload(self) -> None:
        client, key = self.store.client, self.store.key(self.name)
        try:
            # The client cannot send an empty stream.
            if not self.size_bytes and self._next_piece() is None:
                obstore.put(client, key, b"", use_multipart=False)
                return
            result = obstore.put(
                client,
                key,
                iter(self._next_piece, None),
                use_multipart=True,
                chunk_size=self.part_bytes,
                max_concurrency=_STREAMS,
            )
            self._etag = result["e_tag"] or None  # Ceph's gateway returns none
        except BaseException as error:  # noqa: BLE001 - raised by the next write, or by finish
            with self._change:
                self._error = None if self._is_abandoned else error
                self._change.notify_all()

    def _next_piece(self) -> bytes | None:
        """Wait for the next bytes to send, and return them, or None at the end."""
        with self._change:
            self._change.wait_for(lambda: self._ready or self._has_ended)
            if self._is_abandoned:
                # An error in the iterator makes the client abort the upload.
                raise InterruptedError("the upload is dropped")
            if not self._ready:
                return None
            piece = self._ready.popleft()
            self._waiting -= len(piece)
            self._change.notify_all()
            return piece
