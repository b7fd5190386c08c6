"""Pushes checkpoints to model repositories of the Hugging Face Hub, and pulls them.

A push makes one commit, and a pull reads one commit.
"""

import glob
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from typing_extensions import Self

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.checkpoint.checks import checkpoint_problems
from ft_ckpt.checkpoint.commit import LocalStaging, open_staging, place_files
from ft_ckpt.checkpoint.manifest import (
    CARD_NAME,
    MANIFEST_NAME,
    Manifest,
    is_misleading,
    load_manifest,
    manifest_from_json,
    with_current_cards,
)
from ft_ckpt.errors import (
    ConfigError,
    CorruptError,
    ManifestError,
    MissingError,
    NameTakenError,
    TargetError,
    listing,
)
from ft_ckpt.extensions.transfer.copies import PullReport, PushReport
from ft_ckpt.extensions.transfer.endpoints import (
    Endpoint,
    OutgoingFiles,
    PushOptions,
    is_hidden,
    outgoing_files,
    refuse_damaged,
)
from ft_ckpt.extensions.transfer.hub.client import (
    hub_errors,
    is_transient,
    make_api,
    progress_bars,
    with_retries,
)
from ft_ckpt.extensions.transfer.hub.model_card import BLANK_CARD, card_facts, updated_card
from ft_ckpt.extensions.transfer.hub.place import MAIN, HubPlace, parse_place
from ft_ckpt.messages import LOG
from ft_ckpt.storage.digests import read_record
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, files_made_by, refuse_secrets

# The folder in the staging folder to which huggingface_hub downloads, with its cache files.
_DOWNLOADS = ".arriving"


@dataclass(frozen=True)
class HubEndpoint(Endpoint):
    """A checkpoint in a model repository, or in a folder of one."""

    reads_local_files = True
    place: HubPlace
    token: str | None = field(default=None, repr=False)

    @classmethod
    def destination(cls, place: str | Place, options: PushOptions) -> Self:
        refuse_secrets(options.base_id or "", "HF_TOKEN")
        return cls(parse_place(str(place), options.revision), options.token)

    @classmethod
    def source(cls, place: str | Place, token: str | None) -> Self:
        return cls(parse_place(str(place)), token)

    @property
    def url(self) -> str:
        return self.place.url

    def push(self, checkpoint: OpenCheckpoint, options: PushOptions) -> PushReport:
        start = time.monotonic()
        place = self.place
        refuse_damaged(checkpoint)
        outgoing = outgoing_files(checkpoint, state=options.state, base_id=options.base_id)
        with hub_errors(place.url, writing=True), progress_bars(shown=not options.quiet):
            api = make_api(self.token)
            if "/" not in place.repo_id:
                place = replace(place, repo_id=f"{api.whoami()['name']}/{place.repo_id}")
            commit = partial(_commit_once, api, place, checkpoint.path, outgoing, options)
            report = with_retries(commit, is_transient)
        suffix = "" if report.is_new else ", where all of it was"
        LOG.info("pushed %s to %s%s", checkpoint.path.name, report.url, suffix)
        return replace(report, seconds=time.monotonic() - start)

    def pull(self, folder: Path | None, *, overwrite: bool) -> PullReport:
        start = time.monotonic()
        place = self.place
        if folder is None:
            raise ConfigError(
                f"{place.url}: no folder to pull it into; the cache is for buckets, the "
                "Hub has one of its own"
            )

        _refuse_taken(folder, overwrite)
        with hub_errors(place.url, writing=False):
            api = make_api(self.token)
            info = api.model_info(place.repo_id, revision=place.revision)
            commit = str(info.sha)
            paths = [sibling.rfilename for sibling in info.siblings or ()]
            names = [name for name in place.names_below(paths) if not is_hidden(name)]
            if not names:
                raise MissingError(f"{place.url}: nothing in it; look at the name of the folder")
            with _staging_for(folder) as staging:
                _download_files(api, place, commit, names, staging.store)
                size_bytes = sum(stored.size_bytes for stored in staging.store.list())
                is_checkpoint = MANIFEST_NAME in names
                if is_checkpoint:
                    _put_in_place(staging, place)
                else:
                    _refuse_taken(folder, overwrite=False)
                    place_files(staging.stage, folder)

        return PullReport(
            path=folder,
            url=place.url,
            oid=commit,
            verified=is_checkpoint,
            files=tuple(names),
            bytes=size_bytes,
            seconds=time.monotonic() - start,
        )


def _refuse_taken(folder: Path, overwrite: bool) -> None:
    """Raise NameTakenError if `folder` is a file, or not empty and must not be overwritten."""
    place = Place(LocalStore(folder.parent), folder.name)
    is_taken = place.is_object
    if not is_taken and not overwrite:
        listed = place.folder.list_folder()
        is_taken = bool(listed.folders or listed.objects)
    if is_taken:
        raise NameTakenError(
            f"{folder}: exists already; choose another folder, or overwrite=True (--force)"
        )


@contextmanager
def _staging_for(folder: Path) -> Iterator[LocalStaging]:
    """Open a hidden staging folder, which is deleted at the end unless it was committed."""
    staging = open_staging(folder)
    try:
        yield staging
    finally:
        staging.discard()


def _download_files(
    api: HfApi, place: HubPlace, oid: str, names: Sequence[str], store: LocalStore
) -> None:
    """Download files of one commit into `store`."""
    downloads = store.within(_DOWNLOADS)
    patterns = [glob.escape(place.path_of(name)) for name in names]
    api.snapshot_download(
        place.repo_id, revision=oid, local_dir=downloads.folder, allow_patterns=patterns
    )
    for name in names:
        path = store.path(name)
        store.make_parents(path)
        downloads.path(place.path_of(name)).rename(path)
    downloads.delete_all()


def _put_in_place(staging: LocalStaging, place: HubPlace) -> None:
    """Compare the files with the manifest, and commit them.

    Files that it does not list, such as the card, are added to it. Raises CorruptError if files
    differ from the manifest, and ManifestError if it cannot be read.
    """
    store = staging.store
    manifest, _ = with_current_cards(store, load_manifest(store))
    problems = list(checkpoint_problems(store, manifest, deep=True))
    if problems:
        raise CorruptError(
            f"{place.url}: {listing(problems)}; nothing was put in place, pull another revision"
        )
    store.delete([MANIFEST_NAME])
    listed = {file.path for file in manifest.files}
    unlisted = [stored.name for stored in store.list() if stored.name not in listed]
    records = [read_record(store, name) for name in unlisted]
    staging.commit(replace(manifest, files=(*manifest.files, *records), number=None))


@dataclass(frozen=True)
class _Head:
    """The state of a repository before a push.

    Attributes:
        oid: The newest commit.
        names: The paths of all files in the repository.
        card: The text of the model card, if there is one.
        manifest: The manifest of the checkpoint that was pushed to the same folder before.
        notes: Sentences for the report.
    """

    oid: str
    names: frozenset[str]
    card: str | None
    manifest: Manifest | None = None
    notes: tuple[str, ...] = ()


def _commit_once(
    api: HfApi, place: HubPlace, path: Path, outgoing: OutgoingFiles, options: PushOptions
) -> PushReport:
    """Read the state of the repository, and make one commit on top of it."""
    head = _read_head(api, place, options)
    files, notes = _with_card(place, outgoing, options, head)
    stale_names = _stale_names(place, head, files, outgoing.manifest)
    adding = [CommitOperationAdd(place.path_of(name), file) for name, file in files.items()]
    deleting = [CommitOperationDelete(place.path_of(name)) for name in stale_names]
    step = outgoing.manifest.step
    message = f"Push {path.name}" if step is None else f"Push {path.name}, step {step}"
    commit = api.create_commit(
        place.repo_id,
        [*adding, *deleting],
        commit_message=options.message or message,
        revision=place.revision,
        parent_commit=head.oid,
    )
    sizes = {addition.path_in_repo: addition.upload_info.size for addition in adding}
    _check_commit(api, place, commit.oid, sizes)
    return PushReport(
        path=path,
        url=place.url,
        repo_id=place.repo_id,
        oid=commit.oid,
        commit_url=commit.commit_url,
        is_new=commit.oid != head.oid,
        files=tuple(sorted(sizes)),
        deleted=tuple(place.path_of(name) for name in stale_names),
        bytes=sum(sizes.values()),
        seconds=0.0,
        notes=(*outgoing.notes, *notes, *head.notes),
    )


def _read_head(api: HfApi, place: HubPlace, options: PushOptions) -> _Head:
    """Return the state of the repository. Creates it, or its branch, if it is missing.

    Raises TargetError if the repository is public and `private` is True.
    """
    try:
        info = api.model_info(place.repo_id, revision=place.revision)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        if isinstance(error, RepositoryNotFoundError):
            api.create_repo(place.repo_id, private=options.private, exist_ok=True)
        if place.revision != MAIN:
            api.create_branch(place.repo_id, branch=place.revision, exist_ok=True)
        info = api.model_info(place.repo_id, revision=place.revision)

    if options.private and info.private is False:
        raise TargetError(
            f"{place.url}: public, and private=True was asked for; make it "
            "private, nothing was pushed"
        )

    names = frozenset(sibling.rfilename for sibling in info.siblings or ())
    card = _remote_text(api, place, info.sha, CARD_NAME, names)
    text = _remote_text(api, place, info.sha, MANIFEST_NAME, names)
    head = _Head(str(info.sha), names, card)
    if text is None:
        return head
    try:
        return replace(head, manifest=manifest_from_json(text, place.path_of(MANIFEST_NAME)))
    except ManifestError as error:
        return replace(head, notes=(f"an older checkpoint's manifest was replaced: {error}",))


def _remote_text(
    api: HfApi, place: HubPlace, oid: Any, name: str, names: frozenset[str]
) -> str | None:
    path = place.path_of(name)
    if path not in names:
        return None
    download = partial(api.hf_hub_download, place.repo_id, path, revision=str(oid))
    contents = files_made_by(lambda folder: download(local_dir=folder))
    return contents[path].decode("utf-8", "replace")


def _with_card(
    place: HubPlace, outgoing: OutgoingFiles, options: PushOptions, head: _Head
) -> tuple[dict[str, Path | bytes], list[str]]:
    """Return the files with the updated card of the repository, and notes for the report.

    The card is that of the options, of the repository, of the checkpoint, or a new one. In a folder
    of the repository a card is an ordinary file.
    """
    files = dict(outgoing.files)
    if place.folder:
        return files, []
    name = place.repo_id.split("/")[-1]
    checkpoint_card = outgoing.content(CARD_NAME).decode("utf-8", "replace")
    step = outgoing.manifest.step
    content = "a model" if step is None else f"a model after step {step:,}"
    blank_card = BLANK_CARD.format(name=name, what=content)
    text = options.card or head.card or checkpoint_card or blank_card
    adapter = json.loads(outgoing.content("adapter_config.json") or b"{}")
    facts = card_facts(name, outgoing.manifest, outgoing.base_id, adapter)
    text, notes = updated_card(text, facts)
    files[CARD_NAME] = text.encode("utf-8")
    return files, notes


def _stale_names(
    place: HubPlace, head: _Head, files: Iterable[str], manifest: Manifest
) -> list[str]:
    """Return the paths of the files of older checkpoints to delete.

    These are the files in the old manifest, and those that loaders would confuse with new ones.
    """
    sent_names = set(files)
    old_names: set[str] = set()
    if head.manifest is not None:
        old_names = {file.path for file in head.manifest.files}
    stale_names = []
    for name in place.names_below(sorted(head.names)):
        is_old = name in old_names or is_misleading(name, manifest)
        if is_old and name not in sent_names:
            stale_names.append(name)
    return stale_names


def _check_commit(api: HfApi, place: HubPlace, oid: str, sizes: dict[str, int]) -> None:
    """Raise TargetError unless the commit has all files that were sent, with their sizes.

    A .gitignore in the repository drops files silently.
    """
    tree = api.list_repo_tree(place.repo_id, recursive=True, revision=oid)
    sizes_in_commit = {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
    absent = [path for path, size in sizes.items() if sizes_in_commit.get(path) != size]
    if absent:
        raise TargetError(
            f"{place.url}: {listing(absent, ', ')} not in the commit {oid[:8]} as sent; look for a "
            ".gitignore there"
        )
