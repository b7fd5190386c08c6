"""Copies a committed checkpoint between two places: whole, or not at all.

Files are digested while they are copied; the manifest is written last. Files that another
checkpoint at the destination has are hard-linked from there, and objects within one service are
copied by the service.
"""

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ft_ckpt.checkpoint import (
    EarlierCheckpoint,
    Manifest,
    OpenCheckpoint,
    Staging,
    earlier_checkpoints,
    load_manifest,
    open_checkpoint,
    open_staging_at,
    settle_staging_at,
    take_earlier,
    verify,
)
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    ManifestError,
    NameTakenError,
    NoSpaceError,
    TargetError,
)
from ft_ckpt.extensions.transfer.signatures import put_signature, read_signature
from ft_ckpt.schema import values_of
from ft_ckpt.storage import (
    SMALL_COPY_BYTES,
    FileRecord,
    Place,
    RunningDigest,
    Store,
    copy_object,
    digest_of_bytes,
    digest_of_open,
    etag_of,
    is_hub_bucket,
    open_place,
    size_problem,
    track_bytes,
)

_SMALL_AT_ONCE = 8  # small files copied in parallel; large files one at a time, in parallel parts
_EARLIER = 8  # newest checkpoints at the destination whose files are reused
# fields of a manifest that depend on the commit, not only on the content
_OF_COMMITS = {"files", "token"}
# of a file: sending smaller ones takes less time than searching for them
_WORTH_LOOKING_BYTES = 1 << 20


@dataclass(frozen=True)
class CopyReport:
    """A checkpoint that was copied, or was there already."""

    path: Path | str
    """The copy: a path, or a URL."""
    source: Path | str
    """The checkpoint that was copied: a path, or a URL."""
    is_new: bool
    """False when the same checkpoint was there already."""
    files: tuple[str, ...]
    """Paths of its files, relative to its folder."""
    bytes: int
    """Size of the files, in bytes."""
    sent_bytes: int
    """Of these, the bytes that this process read and wrote."""
    reused: tuple[str, ...]
    """Files taken from another checkpoint at the destination."""
    seconds: float
    """Duration."""


def copy(
    source: str | os.PathLike[str] | Place,
    destination: str | os.PathLike[str] | Place,
    *,
    overwrite: bool = False,
) -> CopyReport:
    """Copy the committed checkpoint `source` to `destination`; both are paths or URLs, also of
    different buckets.

    The name of the source is appended to a destination that ends in a slash. All digests are
    compared on the way, the manifest is written last. Files of 1 MiB or more that one of the newest
    checkpoints beside the destination has are not sent again: they are hard-linked and read there,
    or copied by the service. A signature is copied, see `sign`; pins and leases are not. A failed
    copy leaves no checkpoint; the next one starts from the beginning. If the same checkpoint is
    there already, nothing changes.

    From a bucket of the Hub ("hf://buckets/user/name/folder") a checkpoint is copied to a disk
    only. Into one, the files are sent in one batch, and then the manifest; with `overwrite`, there
    is no checkpoint meanwhile.

    Raises NotACheckpointError when nothing is committed at `source`, CorruptError when its files
    differ from its manifest, NameTakenError when something else is at `destination` and `overwrite`
    is False, TargetError or NoSpaceError when it cannot be written.
    """
    if is_hub_bucket(source) or is_hub_bucket(destination):
        hub_buckets = importlib.import_module("ft_ckpt.extensions.transfer.hub_buckets")
        report: CopyReport = hub_buckets.copy_checkpoint(source, destination, overwrite=overwrite)
        return report
    place = open_place(source)
    with open_checkpoint(place) as held:
        goal = destination_place(destination, place.basename)
        return copy_open(held, goal, held.manifest, overwrite=overwrite)


def destination_place(destination: str | os.PathLike[str] | Place, name: str) -> Place:
    """The place of a copy: `destination`, or `name` below it if it ends in a slash."""
    place = open_place(destination)
    inside = isinstance(destination, str) and destination.endswith("/")
    return Place(place.folder, name) if inside else place


def copy_open(
    held: OpenCheckpoint,
    goal: Place,
    manifest: Manifest,
    *,
    overwrite: bool,
    shown: bool = True,
    heed: Callable[[], None] = lambda: None,
    renews: bool = False,
    exact: bool = False,
) -> CopyReport:
    """Copy what `manifest` lists of an open checkpoint to `goal`, see `copy`.

    With `renews`, the digests of an existing copy are compared, and a damaged copy is replaced.
    `heed` is called for each piece of a file, in several threads; an error that it raises ends the
    copy. With `exact`, `manifest` is committed unchanged.
    """
    begun, size_bytes = time.monotonic(), sum(file.size_bytes for file in manifest.files)
    signed = read_signature(held.place.folder)
    exactly = None if signed is None else signed.manifest
    if not is_same_copy(exactly, manifest):  # it signs more than is copied, or an older checkpoint
        signed = exactly = None
    source, names = held.place.location, tuple(file.path for file in manifest.files)
    if is_there(goal, manifest) and (not renews or verify(goal).ok):
        settle_staging_at(goal)
        if signed is not None:
            put_signature(goal.folder, signed)
        return CopyReport(
            goal.location, source, False, names, size_bytes, 0, (), time.monotonic() - begun
        )
    may_replace = overwrite or is_same_copy(manifest_at(goal), manifest)
    if not may_replace:
        refuse_occupied(goal)
    label = f"copying {goal.basename}"
    listed = held.store if held.is_local else held.place.folder
    max_mode = Place(listed).mode_at(goal)
    with (
        _staging_at(goal, manifest, max_mode, overwrite=may_replace) as staging,
        track_bytes(size_bytes if shown else 0, label) as track,
    ):
        copying = _Copying(
            held, staging.store, _reusable_files(staging.beside, goal, manifest.files), track, heed
        )
        copying.refuse_full(manifest.files)
        records = copying.copy_all(manifest.files)
        if exactly is None or not goal.is_local:
            exactly = manifest if exact else replace(manifest, files=records, token=None)
        staging.commit(exactly)
    if signed is not None:
        put_signature(goal.folder, signed)
    reused = tuple(sorted(copying.reused))
    seconds = time.monotonic() - begun
    return CopyReport(
        goal.location, source, True, names, size_bytes, copying.sent_bytes, reused, seconds
    )


def is_there(goal: Place, manifest: Manifest) -> bool:
    """Whether the checkpoint of this manifest is at `goal`, with all files at their sizes."""
    if not is_same_copy(manifest_at(goal), manifest):
        return False
    sizes = {each.name: each.size_bytes for each in goal.folder.list()}
    return all(sizes.get(file.path) == file.size_bytes for file in manifest.files)


def manifest_at(place: Place) -> Manifest | None:
    """The manifest of the checkpoint at `place`; None if there is no readable one."""
    with suppress(ManifestError):
        return load_manifest(place.folder)
    return None


def content_identity(manifest: Manifest) -> str:
    """A digest that all copies of a checkpoint share."""
    facts = {name: value for name, value in values_of(manifest).items() if name not in _OF_COMMITS}
    return digest_of_bytes(
        repr((facts, [(file.path, *content_key(file)) for file in manifest.files])).encode()
    )


def is_same_copy(found: Manifest | None, manifest: Manifest) -> bool:
    """Whether two manifests are of copies of one checkpoint."""
    return found is not None and content_identity(found) == content_identity(manifest)


def refuse_occupied(goal: Place) -> None:
    if goal.is_object or manifest_at(goal) is not None:
        raise NameTakenError(
            f"{goal}: exists already; choose another place, or overwrite=True (--force)"
        )
    listed = goal.folder.list_folder() if goal.is_local else None
    if listed is not None and (listed.folders or listed.objects):
        raise NameTakenError(
            f"{goal}: not empty; choose another place, or overwrite=True (--force)"
        )


@contextmanager
def _staging_at(
    goal: Place, manifest: Manifest, max_mode: int, *, overwrite: bool
) -> Iterator[Staging]:
    """A staging folder for `goal`, discarded on errors; that of a killed copy is taken over by the
    next copy.
    """
    identity = f"copy of {content_identity(manifest)}"
    staging = open_staging_at(goal, run_id=identity, overwrite=overwrite, max_mode=max_mode)
    try:
        yield staging
    except BaseException:
        with suppress(CheckpointError, OSError):  # the first error matters more
            staging.discard()
        raise


def _reusable_files(
    beside: Store, goal: Place, files: Iterable[FileRecord]
) -> dict[tuple[str, int], tuple[EarlierCheckpoint, FileRecord]]:
    """Files of other checkpoints in `beside`, by (digest, bytes); {} if all of `files` are
    small.
    """
    if all(file.size_bytes < _WORTH_LOOKING_BYTES for file in files):
        return {}
    earlier = [
        one
        for one in earlier_checkpoints(beside, _EARLIER)
        if one.store.identity != goal.folder.identity
    ]
    return {content_key(file): (one, file) for one in reversed(earlier) for file in one.files}


def content_key(file: FileRecord) -> tuple[str, int]:
    """(digest, bytes)."""
    return file.digest, file.size_bytes


class _Copying:
    """One copy: source, destination, and counters."""

    def __init__(
        self,
        held: OpenCheckpoint,
        store: Store,
        reusable: dict[tuple[str, int], tuple[EarlierCheckpoint, FileRecord]],
        track: Callable[[int], None],
        heed: Callable[[], None],
    ) -> None:
        self.held, self.store, self.reusable, self.track, self.heed = (
            held,
            store,
            reusable,
            track,
            heed,
        )
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
        with ThreadPoolExecutor(_SMALL_AT_ONCE, "ft_ckpt-copy") as pool:
            done = {record.path: record for record in pool.map(self.copy_one, small)}
        # one at a time, each in several threads
        large = (file for file in files if file.path not in done)
        done |= {record.path: record for record in map(self.copy_one, large)}
        return tuple(done[file.path] for file in files)

    def copy_one(self, file: FileRecord) -> FileRecord:
        """Copy one file in the cheapest way; returns its record at the destination."""
        if self._take_reusable(file):
            return replace(file, linked=True, etag=etag_of(self.store, file.path))
        if self._copy_at_service(file):
            return replace(file, linked=False, etag=etag_of(self.store, file.path))
        return replace(file, linked=False, etag=self._send(file))

    def _take_reusable(self, file: FileRecord) -> bool:
        found = self.reusable.get(content_key(file))
        if found is None or file.size_bytes < _WORTH_LOOKING_BYTES:
            return False
        with suppress(CorruptError, TargetError):  # deleted since, or no links there
            if take_earlier(*found, self.store, file.path) and self._is_whole_here(file):
                self._count(file.size_bytes, reused=file.path)
                return True
        return False

    def _is_whole_here(self, file: FileRecord) -> bool:
        """Whether a linked file still has its digest (a disk may have lost bits).

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
        origin = self.held.place.folder
        if file.etag is None or etag_of(origin, file.path) != file.etag:
            return False
        # too large for one request, or not allowed: send it
        with suppress(CorruptError, TargetError):
            if (
                self.store.copy(file.path, file.path, origin)
                and etag_of(origin, file.path) == file.etag
            ):
                self._count(file.size_bytes)
                return True
        return False

    def _send(self, file: FileRecord) -> str | None:
        """Read and write the file; returns its ETag at the destination, if known."""
        with closing(self.held.store.open(file.path)) as opened:
            if opened.size_bytes != file.size_bytes:
                raise CorruptError(
                    f"{opened.where}: {size_problem(opened.size_bytes, file.size_bytes)}"
                )
            running = RunningDigest(file.size_bytes, file.cuts, file.ranks)

            def watch(content: memoryview) -> None:
                running.update(content)
                self._count(len(content), sent=True)

            stored = copy_object(opened, self.store, file.path, watch)
            opened.check()
        self._refuse_damaged(file, running.text())
        return None if stored is None else stored.etag

    def _refuse_damaged(self, file: FileRecord, digest: str) -> None:
        if digest != file.digest:
            raise CorruptError(
                f"{self.held.place.folder.where(file.path)}: digest {digest}, expected "
                f"{file.digest}: its bytes have changed; nothing was copied, use another checkpoint"
            )

    def _count(self, size_bytes: int, *, sent: bool = False, reused: str | None = None) -> None:
        self.heed()
        with self._lock:
            self.sent_bytes += size_bytes if sent else 0
            self.reused |= {reused} if reused else set()
            self.track(size_bytes)
