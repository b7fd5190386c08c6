"""Fetches a checkpoint, or what else a model repository holds, from one commit of the Hub."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from huggingface_hub import HfApi

from ft_ckpt.checkpoint.catalog import load_manifest
from ft_ckpt.checkpoint.checks import checkpoint_problems
from ft_ckpt.checkpoint.commit import place_files
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest
from ft_ckpt.checkpoint.staging import LocalStaging, open_staging
from ft_ckpt.errors import ConfigError, CorruptError, MissingError, NameTakenError, listing
from ft_ckpt.storage.digests import read_record
from ft_ckpt.storage.local_copy import copy_object
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.place import open_place
from ft_ckpt.storage.scratch import files_made_by
from ft_ckpt.storage.store import Store
from ft_ckpt.transfer.hub_place import HubPlace, hub_errors, make_api, parse_place
from ft_ckpt.transfer.reports import PullReport

_ARRIVING = ".arriving"  # in the stage: what the library has fetched, beside notes of its own
_FILES_AT_ONCE = 8


def fetch_checkpoint(source: str, folder: Path | None, *, token: str | None, overwrite: bool) -> PullReport:
    """Fetch what `source` holds into `folder`, see `places.pull`."""
    begun, place = time.monotonic(), parse_place(source)
    if folder is None:
        raise ConfigError(f"{source}: no folder to pull it into; the cache is for buckets, the Hub has one of its own")
    _refuse_taken(folder, overwrite)
    with hub_errors(place.url, writing=False):
        api = make_api(token)
        info = api.model_info(place.repo_id, revision=place.revision)
        oid, paths = str(info.sha), [one.rfilename for one in info.siblings or ()]
        names = [name for name in place.names_below(paths) if not _is_hidden_name(name)]
        if not names:
            raise MissingError(f"{place.url}: nothing in it; look at the name of the folder")
        with _staging_for(folder) as staging:
            _download_files(api, place, oid, names, staging.store)
            size = sum(each.size_bytes for each in staging.store.list())
            manifest = _put_in_place(staging, place) if MANIFEST_NAME in names else None
            if manifest is None:
                _refuse_taken(folder, overwrite=False)
                place_files(staging.stage, folder)
    seconds = time.monotonic() - begun
    return PullReport(folder, place.url, oid, manifest is not None, tuple(names), size, seconds)


def read_remote(api: HfApi, repo_id: str, path: str, oid: str) -> bytes:
    """The content of one small file of a commit."""
    return files_made_by(partial(_download_file, api, repo_id, path, oid))[path]


def _refuse_taken(folder: Path, overwrite: bool) -> None:
    place = open_place(folder)
    found = None if place.is_object else place.folder.list_folder()
    if found is None or (not overwrite and (found.folders or found.objects)):
        raise NameTakenError(f"{folder}: is there already; give another folder, or overwrite=True (--force)")


def _is_hidden_name(name: str) -> bool:
    return any(step.startswith(".") for step in name.split("/"))


@contextmanager
def _staging_for(folder: Path) -> Iterator[LocalStaging]:
    """A hidden folder to fill, which is gone afterwards unless it was put in place."""
    staging = open_staging(folder)
    try:
        yield staging
    finally:
        staging.discard()


def _download_files(api: HfApi, place: HubPlace, oid: str, names: Sequence[str], store: LocalStore) -> None:
    """Put the files into `store`, all of one commit."""
    arriving = store.within(_ARRIVING)
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        paths = map(place.path_of, names)
        list(pool.map(lambda path: _download_file(api, place.repo_id, path, oid, arriving.folder), paths))
    _take_over(arriving, list(map(place.path_of, names)), store, names)
    arriving.delete_all()


def _download_file(api: HfApi, repo_id: str, path: str, oid: str, folder: Path) -> None:
    api.hf_hub_download(repo_id, path, revision=oid, local_dir=folder)


def _take_over(source: Store, names: Sequence[str], store: Store, others: Sequence[str]) -> None:
    """Give the files `names` the names `others` in `store`, too; without links they are copied."""
    for name, other in zip(names, others, strict=True):
        if not store.copy(name, other, source):
            with closing(source.open(name)) as file:
                copy_object(file, store, other)


def _put_in_place(staging: LocalStaging, place: HubPlace) -> Manifest:
    """Compare what was fetched with its manifest, and commit it; files beside it, such as the card, become part of it.

    Raises CorruptError when it differs, ManifestError when the manifest cannot be used.
    """
    store = staging.store
    manifest = load_manifest(store)
    if problems := list(checkpoint_problems(store, manifest, deep=True)):
        raise CorruptError(f"{place.url}: {listing(problems)}; nothing was put in place, pull another revision")
    store.delete([MANIFEST_NAME])
    listed = {file.path for file in manifest.files}
    others = [read_record(store, each.name) for each in store.list() if each.name not in listed]
    manifest = replace(manifest, files=(*manifest.files, *others), number=None)
    staging.commit(manifest)
    return manifest
