"""Sends checkpoints into storage buckets of the Hugging Face Hub, and makes such buckets.

A bucket takes files in batches, each of which may be applied in part, and has no conditional writes. So the files are
sent in one batch and compared by their Xet hashes with the local files; the manifest is written afterwards. A lock
object (`guards.SaveMark`) shows the send to other processes and identifies the leftovers of a killed one. Files that
are already there are not sent again.
"""

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import hf_xet

from ft_ckpt.checkpoint.catalog import next_number
from ft_ckpt.checkpoint.guards import SAVING, SaveMark, clear_spent_mark, settled_list
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest, check_paths, manifest_to_json
from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.checkpoint.staging import clear_folder
from ft_ckpt.errors import CheckpointError, ConfigError, CorruptError, NameTakenError, TargetError, listing
from ft_ckpt.storage.digests import FileRecord, digest_of_open, digest_problem, size_problem
from ft_ckpt.storage.hub_bucket import HubBucket, bucket_errors
from ft_ckpt.storage.hub_client import MOST_TRIES, hub_status, is_worth_another_look, progress_bars
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import Place
from ft_ckpt.storage.progress import is_worth_showing
from ft_ckpt.storage.store import Store
from ft_ckpt.transfer.copies import CopyReport, content_identity, is_same_copy, manifest_at
from ft_ckpt.transfer.pull_cache import pull_cached

_T = TypeVar("_T")
_PAUSE_SECONDS = 1.0
_MOST_LISTED = 10_000  # files beside the new checkpoint whose hashes are compared, to copy known content
_BATCH_FAILED = (200, 422)  # statuses of a batch in which single operations failed


def make_bucket(store: Store, private: bool | None = None) -> None:
    """Make the bucket of `store` if there is none: a private one, unless `private` is False.

    Raises TargetError if it is public and `private` is True, or if it cannot be made.
    """
    bucket = _bucket_of(store)
    is_private = _patiently(lambda _: _find_or_make(bucket, private=private is not False))
    if private and not is_private:
        raise TargetError(f"{store.url}: public, and private=True was asked for; make it private, nothing was sent")


def _find_or_make(bucket: HubBucket, *, private: bool) -> bool:
    """Make the bucket if it is missing, a private one if `private`; returns whether it is private."""
    with suppress(ConfigError), bucket_errors(bucket.url):
        return bucket.api.bucket_info(bucket.bucket_id).private
    with bucket_errors(bucket.url, writing=True):
        bucket.api.create_bucket(bucket.bucket_id, private=private, exist_ok=True)
    return private


@dataclass(frozen=True)
class _Content:
    """The checkpoint to send, and the location of its files."""

    manifest: Manifest
    hashes: dict[str, str]  # Xet hash of each file
    folder: Path | None  # with the files; None if all are in `bucket`
    bucket: str  # the source of the files, or their destination if they are in `folder`


def send_open(held: OpenCheckpoint, goal: Place, manifest: Manifest, *, overwrite: bool, shown: bool) -> CopyReport:
    """Copy what `manifest` lists of an open checkpoint to `goal` in a bucket, as `copies.copy_open` does.

    The Hub itself copies from its buckets; a checkpoint in another bucket is pulled into the cache first. An
    interrupted copy is continued: files that are there with the same content are not sent again.
    """
    begun = time.monotonic()
    if not isinstance(held.store, LocalStore) and not _is_as_committed(held, manifest):
        with open_checkpoint(pull_cached(held, manifest).path, compares=False) as local:
            report = send_open(local, goal, manifest, overwrite=overwrite, shown=shown)
        return replace(report, source=held.location, seconds=time.monotonic() - begun)
    check_paths(manifest, str(goal))
    content = _content_of(held, manifest, _bucket_of(goal.folder))
    make_bucket(goal.folder)
    report = _patiently(lambda tries: _send_once(content, goal, overwrite=overwrite, shown=shown, copies=tries == 1))
    return replace(report, source=held.location, seconds=time.monotonic() - begun)


def _is_as_committed(held: OpenCheckpoint, manifest: Manifest) -> bool:
    """Whether a checkpoint is in a bucket of the Hub, with the Xet hashes that were recorded at its commit."""
    if not isinstance(held.origin, HubBucket):
        return False
    found = {each.name: each.etag for each in held.store.list()}
    return all(file.etag is not None and found.get(file.path) == file.etag for file in manifest.files)


def _content_of(held: OpenCheckpoint, manifest: Manifest, goal: HubBucket) -> _Content:
    """The content to send. The digests of local files are compared. Raises CorruptError."""
    if isinstance(held.origin, HubBucket):
        hashes = {file.path: str(file.etag) for file in manifest.files}
        return _Content(manifest, hashes, None, held.origin.bucket_id)
    names = [file.path for file in manifest.files]
    wrong = [f"{file.path}: missing" for file in manifest.files if held.store.stat(file.path) is None]
    found: list[Any] = []
    if not wrong:
        found = hf_xet.hash_files([str(held.folder / name) for name in names])
        wrong = [line for file in manifest.files if (line := _problem_of(held, file)) is not None]
    if wrong:
        raise CorruptError(f"{held.location}: {listing(wrong)}; nothing was copied, use another checkpoint")
    hashes = {name: each.hash for name, each in zip(names, found, strict=True)}
    return _Content(manifest, hashes, held.folder, goal.bucket_id)


def _send_once(content: _Content, goal: Place, *, overwrite: bool, shown: bool, copies: bool) -> CopyReport:
    """List the destination, send the missing files, and commit."""
    store, manifest = _bucket_of(goal.folder), content.manifest
    names = tuple(file.path for file in manifest.files)
    size_bytes = sum(file.size_bytes for file in manifest.files)
    found = manifest_at(goal)
    same = is_same_copy(found, manifest)
    if same and not _differing(store, content):
        clear_spent_mark(store)
        return CopyReport(goal.location, "", False, names, size_bytes, 0, (), 0.0)
    if not (overwrite or same) and (found is not None or goal.is_object):
        raise NameTakenError(f"{goal}: exists already; choose another place, or overwrite=True (--force)")
    shown = shown and is_worth_showing(size_bytes)
    mark = SaveMark(store, run_id=f"copy of {content_identity(manifest)}")
    mark.take_after_look()
    try:
        listed = settled_list(store, SAVING)
        there = {each.name for each in listed if content.hashes.get(each.name) == each.etag}
        clear_folder(store, listed, mark, overwrite=overwrite or same, keep=there)
    except BaseException:
        mark.release()
        raise
    try:
        sent, reused = _send_files(content, goal, there, shown=shown, copies=copies)
        _commit(content, goal, mark)
    except BaseException:
        mark.stop()  # the lock object stays: the next call continues
        raise
    mark.release()
    sent_bytes = sum(file.size_bytes for file in manifest.files if file.path in sent)
    return CopyReport(goal.location, "", True, names, size_bytes, sent_bytes, tuple(sorted(reused)), 0.0)


def _send_files(
    content: _Content, goal: Place, there: set[str], *, shown: bool, copies: bool
) -> tuple[set[str], set[str]]:
    """Send the files that are not `there` in one batch; returns those that were sent, and those that were copied."""
    store, folder = _bucket_of(goal.folder), content.folder
    missing = {name: hashed for name, hashed in content.hashes.items() if name not in there}
    copied = set(missing)
    if folder is not None:
        known = _bucket_of(goal.beside).known_hashes(_MOST_LISTED) if copies and missing else set()
        sizes = {file.path: file.size_bytes for file in content.manifest.files}
        copied = {name for name, hashed in missing.items() if hashed in known and sizes[name]}
    sent = missing.keys() - copied
    with bucket_errors(str(goal), writing=True), progress_bars(shown=shown):
        store.send(
            {name: folder / name for name in sorted(sent) if folder is not None},
            {name: (content.bucket, missing[name]) for name in sorted(copied)},
        )
    return sent, copied


def _commit(content: _Content, goal: Place, mark: SaveMark) -> None:
    """Compare the files in the bucket with the sent ones, and write the manifest; compare again afterwards.

    Raises TargetError if another sender has replaced files or the lock object. Readers refuse such a mixture, because
    the manifest has the hashes.
    """
    store, manifest = _bucket_of(goal.folder), content.manifest
    if wrong := _differing(store, content):
        raise TargetError(f"{goal}: {listing(wrong, ', ')}: not in the bucket as sent; copy it again")
    if manifest.step is None and manifest.number is None:
        manifest = replace(manifest, number=next_number(store, _bucket_of(goal.beside)))
    records = tuple(replace(file, linked=False, etag=content.hashes[file.path]) for file in manifest.files)
    text = manifest_to_json(replace(manifest, files=records, token=mark.token)).encode()
    mark.check()
    store.write(MANIFEST_NAME, text)
    if store.read(MANIFEST_NAME) != text or (wrong := _differing(store, content)):
        raise TargetError(f"{goal}: another process writes there, too; let it end, verify, and copy again")


def _differing(store: HubBucket, content: _Content) -> list[str]:
    """The files that are missing in the bucket, or have other content there."""
    found = {each.name: each.etag for each in store.list()}
    return [name for name, hashed in content.hashes.items() if found.get(name) != hashed]


def _problem_of(held: OpenCheckpoint, file: FileRecord) -> str | None:
    with closing(held.store.open(file.path)) as opened:
        if opened.size_bytes != file.size_bytes:
            return f"{file.path}: {size_problem(opened.size_bytes, file.size_bytes)}"
        return digest_problem(file, digest_of_open(opened, file))


def _patiently(ask: Callable[[int], _T]) -> _T:
    """Call `ask` with the number of the try, from 1; retry after temporary errors. Returns its result."""
    tries = 0
    while True:
        tries += 1
        try:
            return ask(tries)
        except CheckpointError as error:
            if tries == MOST_TRIES or not _is_passing(error):
                raise
        time.sleep(_PAUSE_SECONDS)


def _is_passing(error: BaseException) -> bool:
    """Whether the cause of an error of ft_ckpt may be temporary."""
    cause = error.__cause__
    return cause is not None and (hub_status(cause) in _BATCH_FAILED or is_worth_another_look(cause))


def _bucket_of(store: Store) -> HubBucket:
    if not isinstance(store, HubBucket):
        raise ConfigError(f"{store.url}: no bucket of the Hub")
    return store
