"""Sends whole checkpoints into storage buckets of the Hugging Face Hub, and fetches them.

A bucket takes files in batches, each of which may be applied in part, and has no conditional
writes. So the manifest that is replaced leaves first, and the new one comes last, each in a batch
of its own. Until then the file `_SENDING` lists what a killed send may have left. The client does
not send content again that the Hub has.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import BucketFile, HfApi
from huggingface_hub.errors import EntryNotFoundError

from ft_ckpt.checkpoint import (
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    SIGNATURE_NAME,
    Manifest,
    OpenCheckpoint,
    checkpoint_problems,
    is_mark,
    manifest_to_json,
    open_checkpoint,
    open_staging,
    parse_manifest,
    settle_staging_at,
    text_identity,
    verify,
)
from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    ManifestError,
    NameTakenError,
    NotACheckpointError,
    TargetError,
    listing,
)
from ft_ckpt.extensions.transfer.buckets import push_report, refuse_options
from ft_ckpt.extensions.transfer.copies import (
    CopyReport,
    destination_place,
    is_same_copy,
    is_there,
    manifest_at,
    refuse_occupied,
)
from ft_ckpt.extensions.transfer.hub_client import (
    hub_errors,
    hub_status,
    is_transient,
    make_api,
    progress_bars,
    with_retries,
)
from ft_ckpt.extensions.transfer.outgoing import (
    PullReport,
    PushOptions,
    PushReport,
    refuse_damaged,
    weights_manifest,
)
from ft_ckpt.extensions.transfer.pull_cache import pull_cached
from ft_ckpt.extensions.transfer.signatures import Signed, put_signature, read_signature
from ft_ckpt.schema import as_record
from ft_ckpt.storage import (
    HUB_BUCKETS,
    PREFIX,
    LocalStore,
    Place,
    checked_name,
    files_made_by,
    is_hub_bucket,
    is_worth_showing,
    refuse_secrets,
)

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)  # of a bucket, with its namespace
_SENDING = f"{PREFIX}sending"  # JSON list of the files of a send that has not ended
_BATCH_FAILED = (200, 422)  # statuses of a batch with operations that failed


@dataclass(frozen=True)
class _Folder:
    """A folder of a bucket; `path` is "" for the bucket itself."""

    api: HfApi
    bucket_id: str
    path: str

    @property
    def url(self) -> str:
        return f"{HUB_BUCKETS}{self._bucket_path}"

    @property
    def name(self) -> str:
        """The last component of its URL."""
        return self._bucket_path.rpartition("/")[2]

    @property
    def _bucket_path(self) -> str:
        return f"{self.bucket_id}/{self.path}" if self.path else self.bucket_id

    def path_of(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name

    def make_bucket(self, private: bool | None) -> None:
        """Make the bucket if it is missing: a private one, unless `private` is False."""
        self.api.create_bucket(self.bucket_id, private=private is not False, exist_ok=True)
        if private and not self.api.bucket_info(self.bucket_id).private:
            raise TargetError(f"{self.url}: public, expected private=True; make it private first")

    def files(self) -> dict[str, BucketFile]:
        """The files below this folder, by their names in it."""
        start = self.path_of("")
        files: dict[str, BucketFile] = {}
        with suppress(EntryNotFoundError):
            tree = self.api.list_bucket_tree(self.bucket_id, self.path or None, recursive=True)
            for entry in tree:
                if isinstance(entry, BucketFile) and entry.path.startswith(start):
                    files[entry.path.removeprefix(start)] = entry
        return files

    def send(self, files: Mapping[str, Path | bytes], delete: Iterable[str] = ()) -> None:
        """Add files by name, and delete others."""
        self.api.batch_bucket_files(
            self.bucket_id,
            add=[(content, self.path_of(name)) for name, content in files.items()],
            delete=[self.path_of(name) for name in delete],
        )

    def download(self, files: list[tuple[BucketFile, Path]]) -> None:
        """Download listed files, by their hashes."""
        self.api.download_bucket_files(self.bucket_id, list[Any](files))

    def read_text(self, file: BucketFile) -> str:
        """The text of a small file. Raises ManifestError if it is larger than a manifest may be."""
        if file.size > MANIFEST_LIMIT_BYTES:
            raise ManifestError(
                f"{HUB_BUCKETS}{self.bucket_id}/{file.path}: {file.size:,} bytes, expected at most "
                f"{MANIFEST_LIMIT_BYTES:,}; it was not written by ft_ckpt, use another checkpoint"
            )
        contents = files_made_by(lambda folder: self.download([(file, folder / "text")]))
        return contents["text"].decode("utf-8", "replace")


def _folder_at(url: str, token: str | None = None, *, within: str = "") -> _Folder:
    """The folder at hf://buckets/NAMESPACE/NAME[/folder].

    The folder `within` in it if `url` ends in a slash. Raises ConfigError for other URLs, and for
    those with a token in them.
    """
    refuse_secrets(url, "HF_TOKEN, `hf auth login` or token=")
    steps = [step for step in url[len(HUB_BUCKETS) :].split("/") if step]
    bucket_id = "/".join(steps[:2])
    if not _NAME.fullmatch(bucket_id):
        expected = f"{HUB_BUCKETS}NAMESPACE/NAME, then a folder"
        raise ConfigError(f"{url}: no bucket of the Hub; expected {expected}")
    path = "/".join([*steps[2:], within] if within and url.endswith("/") else steps[2:])
    return _Folder(make_api(token), bucket_id, checked_name(path) if path else "")


def destination_url(destination: str, options: PushOptions) -> str:
    """The URL of the destination of a push.

    Raises ConfigError if it is invalid, or for options that only repositories have.
    """
    refuse_options(destination, options, allowed={"private", "token"})
    return _folder_at(destination).url


def send_checkpoint(
    checkpoint: OpenCheckpoint, destination: str, options: PushOptions
) -> PushReport:
    """Push an open checkpoint, see `push.push`."""
    destination_url(destination, options)
    folder = _folder_at(destination, options.token, within=checkpoint.place.basename)
    manifest = checkpoint.manifest if options.state else weights_manifest(checkpoint.manifest)
    terms = _Terms(options.private, overwrite=False, shown=not options.quiet)
    return push_report(checkpoint, _send(checkpoint, folder, manifest, terms))


def fetch_checkpoint(
    source: str,
    folder: Path | None,
    *,
    token: str | None,
    overwrite: bool,
) -> PullReport:
    """Fetch the checkpoint at `source` into `folder`, see `push.pull`."""
    if folder is None:
        raise ConfigError(f"{source}: no folder to pull it into; the cache is for other buckets")
    report, text = _fetch(_folder_at(source, token), folder, overwrite=overwrite)
    return PullReport(
        path=folder,
        url=str(report.source),
        oid=text_identity(text.encode()),
        verified=True,
        files=report.files,
        bytes=report.bytes,
        seconds=report.seconds,
    )


def copy_checkpoint(
    source: str | os.PathLike[str] | Place,
    destination: str | os.PathLike[str] | Place,
    *,
    overwrite: bool,
) -> CopyReport:
    """Copy a checkpoint into a bucket of the Hub, or from there to a disk, see `copies.copy`."""
    if is_hub_bucket(source):
        folder = _folder_at(str(source))
        target = None if is_hub_bucket(destination) else destination_place(destination, folder.name)
        local_folder = None if target is None else target.folder.local_folder
        if local_folder is None:
            raise ConfigError(
                f"{destination}: a checkpoint comes from a bucket of the Hub to a disk only; copy "
                f"{source} to a folder, and that folder to the other bucket"
            )
        return _fetch(folder, local_folder, overwrite=overwrite)[0]
    with open_checkpoint(source) as checkpoint:
        folder = _folder_at(str(destination), within=checkpoint.place.basename)
        terms = _Terms(overwrite=overwrite)
        if checkpoint.is_local:
            return _send(checkpoint, folder, checkpoint.manifest, terms)
        cached = pull_cached(checkpoint, checkpoint.manifest).path
        with open_checkpoint(cached) as local:
            report = _send(local, folder, local.manifest, terms)
        return replace(report, source=checkpoint.location)


@dataclass(frozen=True)
class _Terms:
    """How a checkpoint is sent."""

    private: bool | None = None
    overwrite: bool = False
    shown: bool = True  # with progress bars


def _send(
    checkpoint: OpenCheckpoint,
    folder: _Folder,
    manifest: Manifest,
    terms: _Terms,
) -> CopyReport:
    """Send what `manifest` lists of an open checkpoint on a disk.

    What a killed send left is replaced, and errors of the network or the server are tried again.
    Raises CorruptError before anything is sent when a file differs from its digest.
    """
    begun = time.monotonic()
    if manifest.delta:
        raise ConfigError(
            f"{checkpoint.location}: a delta; `ft-ckpt push` sends what it stands for"
        )
    refuse_damaged(checkpoint)
    with hub_errors(folder.url, writing=True, failed="not written"):
        report = with_retries(partial(_send_once, checkpoint, folder, manifest, terms), _may_pass)
    return replace(report, seconds=time.monotonic() - begun)


def _may_pass(error: BaseException) -> bool:
    """Whether to try again: also after a batch that failed in part.

    The client repeats a batch without an answer, and its deletions then find nothing to delete.
    """
    return hub_status(error) in _BATCH_FAILED or is_transient(error)


def _send_once(
    checkpoint: OpenCheckpoint,
    folder: _Folder,
    manifest: Manifest,
    terms: _Terms,
) -> CopyReport:
    """Look at what is in the bucket, send the files, and then the manifest."""
    folder.make_bucket(terms.private)
    report = _new_copy(folder.url, checkpoint.location, manifest)
    present = folder.files()
    stored = _stored_manifest(folder, present)
    is_same = is_same_copy(stored, manifest)
    if is_same and not terms.overwrite and not _missing(present, manifest):
        if _SENDING in present:
            folder.send({}, delete=[_SENDING])
        return replace(report, is_new=False, sent_bytes=0)
    if MANIFEST_NAME in present and not (terms.overwrite or is_same):
        advice = "use another name, or overwrite=True (--force)"
        raise NameTakenError(f"{folder.url}: exists already; {advice}")
    older = _older_files(folder, present, stored)
    files: dict[str, Path | bytes] = {name: checkpoint.folder / name for name in report.files}
    text = manifest_to_json(_as_sent(manifest))
    signed = read_signature(checkpoint.place.folder)
    if signed is not None and is_same_copy(signed.manifest, manifest):
        files[SIGNATURE_NAME] = signed.bundle.encode()
        text = signed.text  # which the signature covers, to the byte
    stale = older - files.keys() - {MANIFEST_NAME, _SENDING}
    with progress_bars(shown=terms.shown and is_worth_showing(report.bytes)):
        folder.send({_SENDING: json.dumps(sorted(older | files.keys())).encode()})
        if MANIFEST_NAME in present:
            folder.send({}, delete=[MANIFEST_NAME])
        folder.send(files, delete=sorted(stale))
        if absent := _missing(folder.files(), manifest):
            names = listing(absent, ", ")
            raise TargetError(f"{folder.url}: {names}: not in the bucket as sent; copy it again")
        folder.send({MANIFEST_NAME: text.encode()})
        folder.send({}, delete=[_SENDING])
    return report


def _new_copy(path: Path | str, source: Path | str, manifest: Manifest) -> CopyReport:
    """The report of a copy of all files."""
    size_bytes = sum(file.size_bytes for file in manifest.files)
    return CopyReport(
        path=path,
        source=source,
        is_new=True,
        files=tuple(file.path for file in manifest.files),
        bytes=size_bytes,
        sent_bytes=size_bytes,
        reused=(),
        seconds=0.0,
    )


def _as_sent(manifest: Manifest) -> Manifest:
    """The manifest without what only the disk of its files knows."""
    files = tuple(replace(file, linked=False, etag=None) for file in manifest.files)
    return replace(manifest, files=files, token=None)


def _stored_manifest(folder: _Folder, present: Mapping[str, BucketFile]) -> Manifest | None:
    """The manifest in the bucket; None if there is no readable one."""
    if MANIFEST_NAME not in present:
        return None
    with suppress(ManifestError):
        return parse_manifest(folder.read_text(present[MANIFEST_NAME]), folder.url)
    return None


def _older_files(
    folder: _Folder,
    present: Mapping[str, BucketFile],
    stored: Manifest | None,
) -> set[str]:
    """The files of an older checkpoint or of a killed send, which the new ones replace.

    Raises TargetError naming the files that belong to neither.
    """
    names = {MANIFEST_NAME, SIGNATURE_NAME} | {name for name in present if is_mark(name)}
    if stored is not None:
        names |= {file.path for file in stored.files}
    if _SENDING in present:
        with suppress(ManifestError, ValueError):  # not written by a send
            document = json.loads(folder.read_text(present[_SENDING]))
            names |= set(as_record(document, tuple[str, ...]))
    foreign = sorted(present.keys() - names)
    if foreign:
        raise TargetError(
            f"{folder.url}: {listing(foreign, ', ')}: files that belong to no checkpoint are in "
            "the way; move them, or use another name"
        )
    return names & present.keys()


def _missing(present: Mapping[str, BucketFile], manifest: Manifest) -> list[str]:
    """The files of the manifest that are not in the bucket, or have another size."""
    names = []
    for file in manifest.files:
        entry = present.get(file.path)
        if entry is None or entry.size != file.size_bytes:
            names.append(file.path)
    return names


def _fetch(folder: _Folder, target: Path, *, overwrite: bool) -> tuple[CopyReport, str]:
    """Fetch a checkpoint to `target`, and commit it there like a save.

    Also returns the text of its manifest.
    """
    begun = time.monotonic()
    with hub_errors(folder.url, writing=False):
        report, text = _fetch_once(folder, target, overwrite=overwrite)
    return replace(report, seconds=time.monotonic() - begun), text


def _fetch_once(folder: _Folder, target: Path, *, overwrite: bool) -> tuple[CopyReport, str]:
    present = folder.files()
    if MANIFEST_NAME not in present:
        raise NotACheckpointError(
            f"{folder.url}: no {MANIFEST_NAME} in it, so no checkpoint was completed there; look "
            "at the name, or push it again"
        )
    text = folder.read_text(present[MANIFEST_NAME])
    manifest = parse_manifest(text, f"{folder.url}/{MANIFEST_NAME}")
    goal = Place(LocalStore(target))
    report = _new_copy(target, folder.url, manifest)
    if is_there(goal, manifest) and verify(goal).ok:
        settle_staging_at(goal)
        report = replace(report, is_new=False, sent_bytes=0)
    else:
        if not (overwrite or is_same_copy(manifest_at(goal), manifest)):
            refuse_occupied(goal)
        _download(folder, present, manifest, target)
    if SIGNATURE_NAME in present:
        put_signature(goal.folder, Signed(folder.read_text(present[SIGNATURE_NAME]), text))
    return report, text


def _download(
    folder: _Folder,
    present: Mapping[str, BucketFile],
    manifest: Manifest,
    target: Path,
) -> None:
    """Download the files of `manifest`, compare them with it, and commit them to `target`."""
    if absent := _missing(present, manifest):
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
        if problems := list(checkpoint_problems(store, manifest, deep=True)):
            wrong = listing(problems)
            raise CorruptError(f"{folder.url}: {wrong}; nothing was put in place, push it again")
        staging.commit(manifest)
    finally:
        staging.discard()
