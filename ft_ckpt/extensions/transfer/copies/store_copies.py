"""Copies a committed checkpoint between two stores, completely or not at all.

The digests of files are computed while they are copied, and the manifest is written last. Files
that another checkpoint at the destination has are hard-linked from there. Objects within one
service are copied by the service.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.checkpoint.catalog import EarlierCheckpoint, earlier_checkpoints
from ft_ckpt.checkpoint.checks import verify
from ft_ckpt.checkpoint.commit import Staging, open_staging_at, recover_staging_at
from ft_ckpt.checkpoint.manifest import Manifest, content_identity
from ft_ckpt.errors import CheckpointError, CorruptError, NoSpaceError, TargetError
from ft_ckpt.extensions.transfer.copies.identity import (
    content_key,
    is_same_copy,
    is_there,
    manifest_at,
    refuse_occupied,
)
from ft_ckpt.extensions.transfer.copies.reports import CopyReport, new_copy_report
from ft_ckpt.extensions.transfer.copies.signatures import put_signature, signature_of_copy
from ft_ckpt.progress_bars import track_bytes
from ft_ckpt.storage import Store, etag_of
from ft_ckpt.storage.digests import FileRecord, RunningDigest, digest_of_open, size_problem
from ft_ckpt.storage.places import SMALL_COPY_BYTES, Place, copy_object

# How many small files are copied in parallel. Large files are copied one at a time, each in
# parallel pieces.
_SMALL_AT_ONCE = 8
# Files of so many of the newest checkpoints at the destination are reused.
_MAX_EARLIER = 8
# Smaller files are not reused, because sending one takes less time than searching for it.
_MIN_REUSED_BYTES = 1 << 20
# A checkpoint and a file of it, by the `content_key` of the file.
_Reusable = Mapping[tuple[str, int], tuple[EarlierCheckpoint, FileRecord]]


def copy_open(
    checkpoint: OpenCheckpoint,
    target: Place,
    manifest: Manifest,
    *,
    overwrite: bool,
    shown: bool = True,
    check_abort: Callable[[], None] = lambda: None,
    renews: bool = False,
    exact: bool = False,
) -> CopyReport:
    """Copy the files of an open checkpoint that `manifest` lists to `target`; see `copy`.

    With `renews`, the digests of an existing copy are compared, and a damaged copy is replaced.
    `check_abort` is called for each piece of a file, in several threads. An error that it raises
    ends the copy. With `exact`, `manifest` is committed unchanged. With `shown`, there is a
    progress bar.
    """
    start = time.monotonic()
    report = new_copy_report(target.location, checkpoint.place.location, manifest)
    signed = signature_of_copy(checkpoint, manifest)
    if is_there(target, manifest) and (not renews or verify(target).ok):
        recover_staging_at(target)
        report = replace(report, is_new=False, sent_bytes=0)
    else:
        may_replace = overwrite or is_same_copy(manifest_at(target), manifest)
        if not may_replace:
            refuse_occupied(target)
        with (
            _staging_at(checkpoint, target, manifest, overwrite=may_replace) as staging,
            track_bytes(report.bytes if shown else 0, f"copying {target.basename}") as track,
        ):
            reusable = _reusable_files(staging.beside, target, manifest.files)
            copies = _FileCopies(checkpoint, staging.store, reusable, track, check_abort)
            copies.check_space(manifest.files)
            records = copies.copy_all(manifest.files)
            signed_manifest = None if signed is None else signed.manifest
            if signed_manifest is not None and target.is_local:
                staging.commit(signed_manifest)  # the signature covers exactly this manifest
            elif exact:
                staging.commit(manifest)
            else:
                staging.commit(replace(manifest, files=records, token=None))
        reused = tuple(sorted(copies.reused))
        report = replace(report, sent_bytes=copies.sent_bytes, reused=reused)

    if signed is not None:
        put_signature(target.folder, signed)
    return replace(report, seconds=time.monotonic() - start)


@contextmanager
def _staging_at(
    checkpoint: OpenCheckpoint, target: Place, manifest: Manifest, *, overwrite: bool
) -> Iterator[Staging]:
    """Open a staging folder for `target`, which is discarded on errors.

    If this process is killed, the next copy of the checkpoint takes the staging folder over.
    """
    identity = f"copy of {content_identity(manifest)}"
    source = checkpoint.store if checkpoint.is_local else checkpoint.place.folder
    max_mode = Place(source).mode_at(target)
    staging = open_staging_at(target, run_id=identity, overwrite=overwrite, max_mode=max_mode)
    try:
        yield staging
    except BaseException:
        # An error of the discard must not replace the first error.
        with suppress(CheckpointError, OSError):
            staging.discard()
        raise


def _reusable_files(folder: Store, target: Place, files: Iterable[FileRecord]) -> _Reusable:
    """Return the files of other checkpoints in `folder`. Newer checkpoints come first.

    Returns {} if all `files` are too small to be reused.
    """
    if all(file.size_bytes < _MIN_REUSED_BYTES for file in files):
        return {}
    reusable: dict[tuple[str, int], tuple[EarlierCheckpoint, FileRecord]] = {}
    for earlier in earlier_checkpoints(folder, _MAX_EARLIER):
        if earlier.store.identity != target.folder.identity:
            for file in earlier.files:
                reusable.setdefault(content_key(file), (earlier, file))
    return reusable


class _FileCopies:
    """Copies the files of one checkpoint, and counts the bytes."""

    def __init__(
        self,
        checkpoint: OpenCheckpoint,
        store: Store,
        reusable: _Reusable,
        track: Callable[[int], None],
        check_abort: Callable[[], None],
    ) -> None:
        self.checkpoint = checkpoint
        self.store = store
        self.reusable = reusable
        self.track = track
        self.check_abort = check_abort
        self.reused: set[str] = set()
        self.sent_bytes = 0
        self._lock = threading.Lock()

    def check_space(self, files: Iterable[FileRecord]) -> None:
        """Raise NoSpaceError unless the destination has space for the files to send."""
        needed = sum(file.size_bytes for file in files if content_key(file) not in self.reusable)
        free = self.store.free_bytes()
        if free is not None and free < needed:
            raise NoSpaceError(
                f"{self.store.url}: {free:,} bytes free, expected at least "
                f"{needed:,}; make room there"
            )

    def copy_all(self, files: tuple[FileRecord, ...]) -> tuple[FileRecord, ...]:
        """Copy all files, and return their records at the destination, in order.

        The first error ends the copying.
        """
        small = [file for file in files if file.size_bytes <= SMALL_COPY_BYTES]
        large = [file for file in files if file.size_bytes > SMALL_COPY_BYTES]
        with ThreadPoolExecutor(_SMALL_AT_ONCE, "ft_ckpt-copy") as pool:
            records = list(pool.map(self.copy_one, small))
        # Large files are copied one by one, each by several threads.
        records += [self.copy_one(file) for file in large]
        by_path = {record.path: record for record in records}
        return tuple(by_path[file.path] for file in files)

    def copy_one(self, file: FileRecord) -> FileRecord:
        """Copy one file in the cheapest way, and return its record at the destination."""
        if self._link_reusable(file):
            return replace(file, linked=True, etag=etag_of(self.store, file.path))
        if self._copy_at_service(file):
            return replace(file, linked=False, etag=etag_of(self.store, file.path))
        return replace(file, linked=False, etag=self._send(file))

    def _link_reusable(self, file: FileRecord) -> bool:
        """Link the file from another checkpoint at the destination. Returns whether this worked."""
        source = self.reusable.get(content_key(file))
        if source is None or file.size_bytes < _MIN_REUSED_BYTES:
            return False
        # The other file may be deleted by now, or the destination may have no links.
        with suppress(CorruptError, TargetError):
            earlier, record = source
            is_linked = earlier.link_file(record, self.store, file.path)
            if is_linked and self._has_its_digest(file):
                self._count(file.size_bytes)
                with self._lock:
                    self.reused.add(file.path)
                return True
        return False

    def _has_its_digest(self, file: FileRecord) -> bool:
        """Check whether a linked file still has its digest, because a disk may have damaged it.

        A damaged file is deleted. Services check their own copies.
        """
        if self.store.local_folder is None:
            return True
        with suppress(CorruptError), closing(self.store.open(file.path)) as opened:
            if digest_of_open(opened, file) == file.digest:
                return True
        self.store.delete([file.path])
        return False

    def _copy_at_service(self, file: FileRecord) -> bool:
        """Let the service copy the object. Returns whether this worked.

        The source must have the recorded ETag before and after the copy.
        """
        origin = self.checkpoint.place.folder
        if file.etag is None or etag_of(origin, file.path) != file.etag:
            return False
        # If the object is too large for one request, or the copy is not allowed, it is sent.
        with suppress(CorruptError, TargetError):
            is_copied = self.store.copy(file.path, file.path, origin)
            if is_copied and etag_of(origin, file.path) == file.etag:
                self._count(file.size_bytes)
                return True
        return False

    def _send(self, file: FileRecord) -> str | None:
        """Read and write the file.

        Returns its ETag at the destination, or None on a disk. Raises CorruptError if its digest
        differs.
        """
        with closing(self.checkpoint.store.open(file.path)) as opened:
            if opened.size_bytes != file.size_bytes:
                raise CorruptError(
                    f"{opened.where}: {size_problem(opened.size_bytes, file.size_bytes)}"
                )

            running = RunningDigest(file.size_bytes, file.cuts, file.ranks)

            def watch(content: memoryview) -> None:
                running.update(content)
                self._count(len(content))
                with self._lock:
                    self.sent_bytes += len(content)

            stored = copy_object(opened, self.store, file.path, watch)
            opened.check()

        self._refuse_damaged(file, running.text())
        return None if stored is None else stored.etag

    def _refuse_damaged(self, file: FileRecord, digest: str) -> None:
        if digest != file.digest:
            raise CorruptError(
                f"{self.checkpoint.place.folder.where(file.path)}: digest {digest}, expected "
                f"{file.digest}: its bytes have changed; nothing was copied, use another checkpoint"
            )

    def _count(self, size_bytes: int) -> None:
        self.check_abort()
        with self._lock:
            self.track(size_bytes)
