"""Copies a committed checkpoint between two stores: whole, or not at all.

Files are digested while they are copied; the manifest is written last. Files that another
checkpoint at the destination has are hard-linked from there, and objects within one service are
copied by the service.
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

_SMALL_AT_ONCE = 8  # small files copied in parallel; large files one at a time, in parallel parts
_MAX_EARLIER = 8  # newest checkpoints at the destination whose files are reused
# of a file: sending smaller ones takes less time than searching for them
_MIN_REUSED_BYTES = 1 << 20
# by (digest, bytes): a file, and the checkpoint that it is in
_Reusable = Mapping[tuple[str, int], tuple[EarlierCheckpoint, FileRecord]]


def copy_open(
    checkpoint: OpenCheckpoint,
    goal: Place,
    manifest: Manifest,
    *,
    overwrite: bool,
    shown: bool = True,
    check_abort: Callable[[], None] = lambda: None,
    renews: bool = False,
    exact: bool = False,
) -> CopyReport:
    """Copy what `manifest` lists of an open checkpoint to `goal`, see `copying.copy`.

    With `renews`, the digests of an existing copy are compared, and a damaged copy is replaced.
    `check_abort` is called for each piece of a file, in several threads; an error that it raises
    ends the copy. With `exact`, `manifest` is committed unchanged.
    """
    start = time.monotonic()
    report = new_copy_report(goal.location, checkpoint.place.location, manifest)
    signed = signature_of_copy(checkpoint, manifest)
    if is_there(goal, manifest) and (not renews or verify(goal).ok):
        recover_staging_at(goal)
        report = replace(report, is_new=False, sent_bytes=0)
    else:
        may_replace = overwrite or is_same_copy(manifest_at(goal), manifest)
        if not may_replace:
            refuse_occupied(goal)
        with (
            _staging_at(checkpoint, goal, manifest, overwrite=may_replace) as staging,
            track_bytes(report.bytes if shown else 0, f"copying {goal.basename}") as track,
        ):
            reusable = _reusable_files(staging.beside, goal, manifest.files)
            copies = _FileCopies(checkpoint, staging.store, reusable, track, check_abort)
            copies.refuse_full(manifest.files)
            records = copies.copy_all(manifest.files)
            signed_manifest = None if signed is None else signed.manifest
            if signed_manifest is not None and goal.is_local:
                staging.commit(signed_manifest)  # a signature covers exactly this one
            elif exact:
                staging.commit(manifest)
            else:
                staging.commit(replace(manifest, files=records, token=None))
        reused = tuple(sorted(copies.reused))
        report = replace(report, sent_bytes=copies.sent_bytes, reused=reused)
    if signed is not None:
        put_signature(goal.folder, signed)
    return replace(report, seconds=time.monotonic() - start)


@contextmanager
def _staging_at(
    checkpoint: OpenCheckpoint, goal: Place, manifest: Manifest, *, overwrite: bool
) -> Iterator[Staging]:
    """Open a staging folder for `goal`, which is discarded on errors.

    The next copy takes over the staging folder of a killed one.
    """
    identity = f"copy of {content_identity(manifest)}"
    source = checkpoint.store if checkpoint.is_local else checkpoint.place.folder
    max_mode = Place(source).mode_at(goal)
    staging = open_staging_at(goal, run_id=identity, overwrite=overwrite, max_mode=max_mode)
    try:
        yield staging
    except BaseException:
        with suppress(CheckpointError, OSError):  # the first error matters more
            staging.discard()
        raise


def _reusable_files(folder: Store, goal: Place, files: Iterable[FileRecord]) -> _Reusable:
    """Return files of other checkpoints in `folder`, newest first; {} if `files` are small."""
    if all(file.size_bytes < _MIN_REUSED_BYTES for file in files):
        return {}
    reusable: dict[tuple[str, int], tuple[EarlierCheckpoint, FileRecord]] = {}
    for earlier in earlier_checkpoints(folder, _MAX_EARLIER):
        if earlier.store.identity != goal.folder.identity:
            for file in earlier.files:
                reusable.setdefault(content_key(file), (earlier, file))
    return reusable


class _FileCopies:
    """Copies the files of one checkpoint, and counts them."""

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

    def refuse_full(self, files: Iterable[FileRecord]) -> None:
        """Raise NoSpaceError if the files to send do not fit."""
        needed = sum(file.size_bytes for file in files if content_key(file) not in self.reusable)
        free = self.store.free_bytes()
        if free is not None and free < needed:
            raise NoSpaceError(
                f"{self.store.url}: {free:,} bytes free, expected at least "
                f"{needed:,}; make room there"
            )

    def copy_all(self, files: tuple[FileRecord, ...]) -> tuple[FileRecord, ...]:
        """Copy all files; returns their records at the destination, in order.

        The first error ends it.
        """
        small = [file for file in files if file.size_bytes <= SMALL_COPY_BYTES]
        large = [file for file in files if file.size_bytes > SMALL_COPY_BYTES]
        with ThreadPoolExecutor(_SMALL_AT_ONCE, "ft_ckpt-copy") as pool:
            records = list(pool.map(self.copy_one, small))
        records += [self.copy_one(file) for file in large]  # one by one, each in several threads
        by_path = {record.path: record for record in records}
        return tuple(by_path[file.path] for file in files)

    def copy_one(self, file: FileRecord) -> FileRecord:
        """Copy one file in the cheapest way; returns its record at the destination."""
        if self._take_reusable(file):
            return replace(file, linked=True, etag=etag_of(self.store, file.path))
        if self._copy_at_service(file):
            return replace(file, linked=False, etag=etag_of(self.store, file.path))
        return replace(file, linked=False, etag=self._send(file))

    def _take_reusable(self, file: FileRecord) -> bool:
        source = self.reusable.get(content_key(file))
        if source is None or file.size_bytes < _MIN_REUSED_BYTES:
            return False
        with suppress(CorruptError, TargetError):  # deleted since, or no links there
            earlier, record = source
            is_linked = earlier.link_file(record, self.store, file.path)
            if is_linked and self._is_whole_here(file):
                self._count(file.size_bytes)
                with self._lock:
                    self.reused.add(file.path)
                return True
        return False

    def _is_whole_here(self, file: FileRecord) -> bool:
        """Check whether a linked file still has its digest (a disk may have lost bits).

        Services compare their own copies.
        """
        if self.store.local_folder is None:
            return True
        with suppress(CorruptError), closing(self.store.open(file.path)) as opened:
            if digest_of_open(opened, file) == file.digest:
                return True
        self.store.delete([file.path])
        return False

    def _copy_at_service(self, file: FileRecord) -> bool:
        """Copy within one service, if the object has the recorded ETag before and after."""
        origin = self.checkpoint.place.folder
        if file.etag is None or etag_of(origin, file.path) != file.etag:
            return False
        # too large for one request, or not allowed: send it
        with suppress(CorruptError, TargetError):
            is_copied = self.store.copy(file.path, file.path, origin)
            if is_copied and etag_of(origin, file.path) == file.etag:
                self._count(file.size_bytes)
                return True
        return False

    def _send(self, file: FileRecord) -> str | None:
        """Read and write the file; returns its ETag at the destination, if the store has one."""
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
