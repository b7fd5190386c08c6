"""Sends whole checkpoints into storage buckets of the Hugging Face Hub, and fetches them.

A bucket takes files in batches. A batch may be applied in part, and there are no conditional
writes. So a checkpoint is sent in this order, each step in a batch of its own:

1. Write `_SENDING`, which lists the files that a killed send may leave.
2. Delete the manifest of the checkpoint that is replaced.
3. Add the new files, and delete old ones.
4. Write the new manifest.
5. Delete `_SENDING`.

The client does not send content again that the Hub has.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from huggingface_hub import BucketFile
from typing_extensions import Self

from ft_ckpt.checkpoint import OpenCheckpoint, open_checkpoint, text_identity
from ft_ckpt.checkpoint.checks import SIGNATURE_NAME, checkpoint_problems, verify
from ft_ckpt.checkpoint.commit import open_staging, recover_staging_at
from ft_ckpt.checkpoint.leases import is_mark
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest, manifest_to_json, parse_manifest
from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    ManifestError,
    NameTakenError,
    NotACheckpointError,
    TargetError,
    listing,
)
from ft_ckpt.extensions.transfer.copies import (
    CopyReport,
    PullReport,
    Signed,
    is_same_copy,
    is_there,
    manifest_at,
    new_copy_report,
    pull_cached,
    put_signature,
    refuse_occupied,
    signature_of_copy,
)
from ft_ckpt.extensions.transfer.endpoints import (
    CopyEndpoint,
    PlaceLike,
    PushOptions,
    StoreEndpoint,
    pull_report,
    refuse_damaged,
    refuse_options,
)
from ft_ckpt.extensions.transfer.hub.bucket_folder import BucketFolder
from ft_ckpt.extensions.transfer.hub.client import (
    hub_errors,
    hub_status,
    is_transient,
    progress_bars,
    with_retries,
)
from ft_ckpt.progress_bars import is_worth_showing
from ft_ckpt.schema import as_record
from ft_ckpt.storage import PREFIX
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place

_SENDING = f"{PREFIX}sending"  # a JSON list of the files of a send that has not ended
_BATCH_FAILED = (200, 422)  # statuses for a batch in which some operations failed
_ALLOWED_OPTIONS = {"state", "quiet", "private", "token"}


@dataclass(frozen=True)
class HubBucketEndpoint(CopyEndpoint):
    """A checkpoint in a storage bucket of the Hub."""

    reads_local_files = True
    folder: BucketFolder
    is_parent: bool = False

    @classmethod
    def at(cls, place: PlaceLike, token: str | None = None) -> Self:
        return cls(BucketFolder.at(str(place), token), str(place).endswith("/"))

    @classmethod
    def destination(cls, place: str | Place, options: PushOptions) -> Self:
        refuse_options(place, options, allowed=_ALLOWED_OPTIONS)
        return cls.at(place, options.token)

    @classmethod
    def source(cls, place: str | Place, token: str | None) -> Self:
        return cls.at(place, token)

    @property
    def url(self) -> str:
        return f"{self.folder.url}/" if self.is_parent else self.folder.url

    @property
    def basename(self) -> str:
        return self.folder.name

    def within(self, name: str) -> Self:
        return type(self)(self.folder.within(name))

    def copy_to(self, target: CopyEndpoint, *, overwrite: bool) -> CopyReport:
        folder = None
        if isinstance(target, StoreEndpoint):
            folder = target.place.folder.local_folder
        if folder is None:
            raise ConfigError(
                f"{target.url}: a checkpoint comes from a bucket of the Hub to a disk only; copy "
                f"{self.url} to a folder, and that folder to the other bucket"
            )
        report, _ = _fetch(self.folder, folder, overwrite=overwrite)
        return report

    def receive(
        self,
        checkpoint: OpenCheckpoint,
        manifest: Manifest,
        options: PushOptions,
        *,
        overwrite: bool = False,
    ) -> CopyReport:
        if checkpoint.is_local:
            return _send(checkpoint, self.folder, manifest, options, overwrite=overwrite)
        cached = Path(pull_cached(checkpoint, manifest).path)
        with open_checkpoint(Place(LocalStore(cached))) as local:
            report = _send(local, self.folder, local.manifest, options, overwrite=overwrite)
        return replace(report, source=checkpoint.location)

    def pull(self, folder: Path | None, *, overwrite: bool) -> PullReport:
        if folder is None:
            raise ConfigError(
                f"{self.url}: no folder to pull it into; the cache is for other buckets"
            )
        report, text = _fetch(self.folder, folder, overwrite=overwrite)
        return pull_report(report, text_identity(text.encode()))


def _send(
    checkpoint: OpenCheckpoint,
    folder: BucketFolder,
    manifest: Manifest,
    options: PushOptions,
    *,
    overwrite: bool,
) -> CopyReport:
    """Send the files of an open checkpoint on a disk that `manifest` lists.

    Files that a killed send left are replaced. After errors of the network or the server, the send
    is repeated. Raises CorruptError before anything is sent if a file differs from its digest.
    """
    start = time.monotonic()
    if manifest.delta:
        raise ConfigError(
            f"{checkpoint.location}: a delta; `ft-ckpt push` sends what it stands for"
        )
    refuse_damaged(checkpoint)
    with hub_errors(folder.url, writing=True, failed="not written"):
        send = partial(_send_once, checkpoint, folder, manifest, options, overwrite=overwrite)
        report = with_retries(send, _is_retryable)
    return replace(report, seconds=time.monotonic() - start)


def _is_retryable(error: BaseException) -> bool:
    """Check whether to try again, also after a batch that failed in part.

    A batch may fail in part if the client repeats it after a lost response, because its deletions
    then find nothing to delete.
    """
    return hub_status(error) in _BATCH_FAILED or is_transient(error)


def _send_once(
    checkpoint: OpenCheckpoint,
    folder: BucketFolder,
    manifest: Manifest,
    options: PushOptions,
    *,
    overwrite: bool,
) -> CopyReport:
    """List the bucket, send the files, and then the manifest; see the module's docstring."""
    folder.make_bucket(options.private)
    report = new_copy_report(folder.url, checkpoint.location, manifest)
    present = folder.files()
    stored = _stored_manifest(folder, present)
    is_same = is_same_copy(stored, manifest)
    if is_same and not overwrite and not _missing(present, manifest):
        if _SENDING in present:
            folder.send({}, delete=[_SENDING])
        return replace(report, is_new=False, sent_bytes=0)

    if MANIFEST_NAME in present and not overwrite and not is_same:
        advice = "use another name, or overwrite=True (--force)"
        raise NameTakenError(f"{folder.url}: exists already; {advice}")

    old_names = _older_files(folder, present, stored)
    files, manifest_text = _files_to_send(checkpoint, manifest)
    stale_names = old_names - files.keys() - {MANIFEST_NAME, _SENDING}
    with progress_bars(shown=not options.quiet and is_worth_showing(report.bytes)):
        folder.send({_SENDING: json.dumps(sorted(old_names | files.keys())).encode()})
        if MANIFEST_NAME in present:
            folder.send({}, delete=[MANIFEST_NAME])
        folder.send(files, delete=sorted(stale_names))
        absent = _missing(folder.files(), manifest)
        if absent:
            names = listing(absent, ", ")
            raise TargetError(f"{folder.url}: {names}: not in the bucket as sent; copy it again")
        folder.send({MANIFEST_NAME: manifest_text.encode()})
        folder.send({}, delete=[_SENDING])

    return report


def _files_to_send(
    checkpoint: OpenCheckpoint, manifest: Manifest
) -> tuple[dict[str, Path | bytes], str]:
    """Return the files and the signature by path, and the text of the manifest."""
    files: dict[str, Path | bytes] = {}
    for file in manifest.files:
        files[file.path] = checkpoint.folder / file.path
    signed = signature_of_copy(checkpoint, manifest)
    if signed is None:
        return files, manifest_to_json(_as_sent(manifest))
    files[SIGNATURE_NAME] = signed.bundle.encode()
    return files, signed.text  # the signature covers every byte of this text


def _as_sent(manifest: Manifest) -> Manifest:
    """Return the manifest without fields that are true only on the disk of its files."""
    files = tuple(replace(file, linked=False, etag=None) for file in manifest.files)
    return replace(manifest, files=files, token=None)


def _stored_manifest(folder: BucketFolder, present: Mapping[str, BucketFile]) -> Manifest | None:
    """Read the manifest in the bucket. Returns None if there is no readable one."""
    if MANIFEST_NAME not in present:
        return None
    with suppress(ManifestError):
        return parse_manifest(folder.read_text(present[MANIFEST_NAME]), folder.url)
    return None


def _older_files(
    folder: BucketFolder,
    present: Mapping[str, BucketFile],
    stored: Manifest | None,
) -> set[str]:
    """Return the files of an older checkpoint or of a killed send, which may be replaced.

    Raises TargetError naming the files that belong to neither.
    """
    names = {MANIFEST_NAME, SIGNATURE_NAME}
    names.update(name for name in present if is_mark(name))
    if stored is not None:
        names.update(file.path for file in stored.files)
    if _SENDING in present:
        # A file of this name with other contents was not written by a send, and is ignored.
        with suppress(ManifestError, ValueError):
            document = json.loads(folder.read_text(present[_SENDING]))
            names.update(as_record(document, tuple[str, ...]))

    foreign = sorted(present.keys() - names)
    if foreign:
        raise TargetError(
            f"{folder.url}: {listing(foreign, ', ')}: files that belong to no checkpoint are in "
            "the way; move them, or use another name"
        )

    return names & present.keys()


def _missing(present: Mapping[str, BucketFile], manifest: Manifest) -> list[str]:
    """Return the files of the manifest that are not in the bucket, or have another size."""
    names = []
    for file in manifest.files:
        entry = present.get(file.path)
        if entry is None or entry.size != file.size_bytes:
            names.append(file.path)
    return names


def _fetch(folder: BucketFolder, target: Path, *, overwrite: bool) -> tuple[CopyReport, str]:
    """Fetch a checkpoint to `target`, and commit it there like a save.

    Returns the report and the text of its manifest.
    """
    start = time.monotonic()
    with hub_errors(folder.url, writing=False):
        report, text = _fetch_once(folder, target, overwrite=overwrite)
    return replace(report, seconds=time.monotonic() - start), text


def _fetch_once(folder: BucketFolder, target: Path, *, overwrite: bool) -> tuple[CopyReport, str]:
    present = folder.files()
    if MANIFEST_NAME not in present:
        raise NotACheckpointError(
            f"{folder.url}: no {MANIFEST_NAME} in it, so no checkpoint was completed there; look "
            "at the name, or push it again"
        )

    text = folder.read_text(present[MANIFEST_NAME])
    manifest = parse_manifest(text, f"{folder.url}/{MANIFEST_NAME}")
    target_place = Place(LocalStore(target))
    report = new_copy_report(target, folder.url, manifest)
    if is_there(target_place, manifest) and verify(target_place).ok:
        recover_staging_at(target_place)
        report = replace(report, is_new=False, sent_bytes=0)
    else:
        if not overwrite and not is_same_copy(manifest_at(target_place), manifest):
            refuse_occupied(target_place)
        _download(folder, present, manifest, target)

    if SIGNATURE_NAME in present:
        put_signature(target_place.folder, Signed(folder.read_text(present[SIGNATURE_NAME]), text))
    return report, text


def _download(
    folder: BucketFolder,
    present: Mapping[str, BucketFile],
    manifest: Manifest,
    target: Path,
) -> None:
    """Download the files of `manifest`, compare their digests, and commit them to `target`."""
    absent = _missing(present, manifest)
    if absent:
        names = listing(absent, ", ")
        raise CorruptError(f"{folder.url}: {names}: missing or of another size; push it again")

    paths = [file.path for file in manifest.files]
    size_bytes = sum(file.size_bytes for file in manifest.files)
    staging = open_staging(target)
    try:
        store = staging.store
        for path in paths:
            store.make_parents(store.path(path))
        with progress_bars(shown=is_worth_showing(size_bytes)):
            folder.download([(present[path], store.path(path)) for path in paths])
        problems = list(checkpoint_problems(store, manifest, deep=True))
        if problems:
            wrong = listing(problems)
            raise CorruptError(f"{folder.url}: {wrong}; nothing was put in place, push it again")
        staging.commit(manifest)
    finally:
        staging.discard()
