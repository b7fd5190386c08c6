"""Pushes a checkpoint to the Hub: one commit, on the head that was looked at, or none.

What the repository has at that moment decides what the commit deletes and what becomes of its card. If somebody else
commits meanwhile, or nobody knows whether the commit was made, all is looked at again: what is there by then is not
sent twice. Uploads and other requests are repeated by the client itself.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

from ft_ckpt.checkpoint.checks import is_misleading
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest, manifest_from_json
from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from ft_ckpt.errors import ManifestError, TargetError, listing
from ft_ckpt.messages import LOG
from ft_ckpt.storage.open_store import refuse_secrets
from ft_ckpt.transfer.hub_card import blank_text, card_facts, updated_card
from ft_ckpt.transfer.hub_place import (
    HTTP_ERROR,
    HUB_ERRORS,
    MAIN,
    HubPlace,
    hub_errors,
    hub_status,
    make_api,
    parse_place,
    progress_bars,
)
from ft_ckpt.transfer.hub_pull import read_remote
from ft_ckpt.transfer.outgoing import CARD_NAME, OutgoingFiles, outgoing_files, refuse_damaged
from ft_ckpt.transfer.reports import PushOptions, PushReport

_MOST_TRIES = 4
_PAUSE_SECONDS = 1.0
_PATHS_AT_ONCE = 500  # the Hub answers for a thousand at most


@dataclass(frozen=True)
class _Head:
    """What a repository has when it is looked at."""

    oid: str
    names: frozenset[str]  # of all files
    card: str | None
    manifest: Manifest | None  # of the checkpoint that was pushed to the same folder before
    notes: tuple[str, ...] = ()


def destination_url(destination: str, options: PushOptions) -> str:
    """The URL of the place that is pushed to. Raises ConfigError."""
    refuse_secrets(options.base_id or "", "HF_TOKEN")
    return parse_place(destination, options.revision).url


def send_checkpoint(held: OpenCheckpoint, destination: str, options: PushOptions) -> PushReport:
    """Push an open checkpoint, see `places.push`."""
    begun = time.monotonic()
    place = parse_place(destination, options.revision)
    refuse_damaged(held)
    outgoing = outgoing_files(held, state=options.state, base_id=options.base_id)
    with hub_errors(place.url, writing=True), progress_bars(shown=not options.quiet):
        api = make_api(options.token)
        if "/" not in place.repo_id:
            place = replace(place, repo_id=f"{api.whoami()['name']}/{place.repo_id}")
        tries = 0
        while True:
            tries += 1
            try:
                report = _commit_once(api, place, held.path, outgoing, options)
                break
            except HUB_ERRORS as error:
                if tries == _MOST_TRIES or not _is_worth_another_look(error):
                    raise
            time.sleep(_PAUSE_SECONDS)
    report = replace(report, seconds=time.monotonic() - begun)
    LOG.info("pushed %s to %s%s", held.path.name, report.url, "" if report.is_new else ", where all of it was")
    return report


def _commit_once(api: HfApi, place: HubPlace, path: Path, outgoing: OutgoingFiles, options: PushOptions) -> PushReport:
    """Look at the repository, and make the one commit that brings it up to date."""
    head = _look_at_head(api, place, options)
    files, notes = _with_card(place, outgoing, options, head)
    stale = _stale_names(place, head, files, outgoing.manifest)
    adding = [CommitOperationAdd(place.path_of(name), file) for name, file in files.items()]
    deleting = [CommitOperationDelete(place.path_of(name)) for name in stale]
    step = outgoing.manifest.step
    told = f"Push {path.name}" + ("" if step is None else f", step {step}")
    commit = api.create_commit(
        place.repo_id,
        [*adding, *deleting],
        commit_message=options.message or told,
        revision=place.revision,
        parent_commit=head.oid,
    )
    sizes = {one.path_in_repo: one.upload_info.size for one in adding}
    _check_arrived(api, place, commit.oid, sizes)
    return PushReport(
        path=path,
        url=place.url,
        repo_id=place.repo_id,
        oid=commit.oid,
        commit_url=commit.commit_url,
        is_new=commit.oid != head.oid,
        files=tuple(sorted(sizes)),
        deleted=tuple(place.path_of(name) for name in stale),
        bytes=sum(sizes.values()),
        seconds=0.0,
        notes=(*outgoing.notes, *notes, *head.notes),
    )


def _look_at_head(api: HfApi, place: HubPlace, options: PushOptions) -> _Head:
    """What is there; the repository and the branch are made if they are not. Raises TargetError for a public one."""
    try:
        info = api.model_info(place.repo_id, revision=place.revision)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        if isinstance(error, RepositoryNotFoundError):
            api.create_repo(place.repo_id, private=options.private, exist_ok=True)
        if place.revision != MAIN:
            api.create_branch(place.repo_id, branch=place.revision, exist_ok=True)
        info = api.model_info(place.repo_id, revision=place.revision)
    if options.private and info.private is False:
        raise TargetError(f"{place.url}: public, and private=True was asked for; make it private, nothing was pushed")
    names = frozenset(one.rfilename for one in info.siblings or ())
    card = _remote_text(api, place, info.sha, CARD_NAME, names)
    text = _remote_text(api, place, info.sha, MANIFEST_NAME, names)
    try:
        manifest = None if text is None else manifest_from_json(text, place.path_of(MANIFEST_NAME))
    except ManifestError as error:
        return _Head(str(info.sha), names, card, None, (f"an older checkpoint's manifest was replaced: {error}",))
    return _Head(str(info.sha), names, card, manifest)


def _remote_text(api: HfApi, place: HubPlace, oid: Any, name: str, names: frozenset[str]) -> str | None:
    path = place.path_of(name)
    return read_remote(api, place.repo_id, path, str(oid)).decode("utf-8", "replace") if path in names else None


def _with_card(
    place: HubPlace, outgoing: OutgoingFiles, options: PushOptions, head: _Head
) -> tuple[dict[str, Path | bytes], list[str]]:
    """The files with the card that the repository should have; in a folder of it a card is a file like others."""
    files = dict(outgoing.files)
    if place.folder:
        return files, []
    name, own = place.repo_id.split("/")[-1], outgoing.content(CARD_NAME).decode("utf-8", "replace")
    text = options.card or head.card or own or blank_text(name, outgoing.manifest)
    adapter = json.loads(outgoing.content("adapter_config.json") or b"{}")
    facts = card_facts(name, outgoing.manifest, outgoing.base_id, adapter)
    text, notes = updated_card(text, facts)
    files[CARD_NAME] = text.encode("utf-8")
    return files, notes


def _stale_names(place: HubPlace, head: _Head, files: Iterable[str], manifest: Manifest) -> list[str]:
    """Files of older checkpoints that readers would mix up with this one's, or that nobody would miss."""
    sent, older = set(files), {file.path for file in head.manifest.files} if head.manifest else set()
    beside = [name for name in place.names_below(sorted(head.names)) if name not in sent]
    return [name for name in beside if name in older or is_misleading(name, manifest)]


def _check_arrived(api: HfApi, place: HubPlace, oid: str, sizes: dict[str, int]) -> None:
    """Compare the commit with what was sent: a .gitignore there leaves files out without a word."""
    paths = list(sizes)
    found: dict[str, int] = {}
    for at in range(0, len(paths), _PATHS_AT_ONCE):
        infos = api.get_paths_info(place.repo_id, paths[at : at + _PATHS_AT_ONCE], revision=oid)
        found |= {info.path: getattr(info, "size", -1) for info in infos}
    if absent := [path for path in paths if found.get(path) != sizes[path]]:
        raise TargetError(
            f"{place.url}: {listing(absent, ', ')} not in the commit {oid[:8]} as sent; look for a .gitignore there"
        )


def _is_worth_another_look(error: BaseException) -> bool:
    """Whether others have committed meanwhile, or the Hub was not well: it may have made the commit nevertheless."""
    status = hub_status(error)
    return isinstance(error, HTTP_ERROR) if status is None else status in (409, 412) or status >= 500
