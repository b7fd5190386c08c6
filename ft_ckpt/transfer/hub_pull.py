"""Fetches a checkpoint, or what else a model repository holds, from one commit of the Hub."""

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from huggingface_hub import HfApi

from ft_ckpt.checkpoint import commit
from ft_ckpt.checkpoint.catalog import load_manifest
from ft_ckpt.checkpoint.checks import checkpoint_problems
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest
from ft_ckpt.errors import CorruptError, MissingError, NameTakenError, explained, listing
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.digests import FileRecord, digest_of
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.transfer.hub_place import HubPlace, hub_errors, make_api, parse_place
from ft_ckpt.transfer.reports import PullReport

_FILES_AT_ONCE = 8


def fetch_checkpoint(source: str, folder: Path, *, token: str | None, overwrite: bool) -> PullReport:
    """Fetch what `source` holds into `folder`, see `places.pull`."""
    begun, place = time.monotonic(), parse_place(source)
    _refuse_taken(folder, overwrite)
    with hub_errors(place.url, writing=False):
        api = make_api(token)
        info = api.model_info(place.repo_id, revision=place.revision)
        oid, paths = str(info.sha), [one.rfilename for one in info.siblings or ()]
        names = [name for name in place.names_below(paths) if not _is_hidden_name(name)]
        if not names:
            raise MissingError(f"{place.url}: nothing in it; look at the name of the folder")
        with _staging_for(folder) as stage:
            _download_files(api, place, oid, names, stage)
            manifest = _put_in_place(stage, folder, place) if MANIFEST_NAME in names else None
            if manifest is None:
                _move_foreign(stage, folder)
    size = sum((folder / name).stat().st_size for name in names)
    seconds = time.monotonic() - begun
    return PullReport(folder, place.url, oid, manifest is not None, tuple(names), size, seconds)


def read_remote(api: HfApi, repo_id: str, path: str, oid: str) -> bytes:
    """The content of one small file of a commit."""
    with tempfile.TemporaryDirectory(prefix="ft_ckpt-hub-") as folder:
        return _download_file(api, repo_id, path, oid, Path(folder)).read_bytes()


def _refuse_taken(folder: Path, overwrite: bool) -> None:
    if folder.exists() and (not folder.is_dir() or (not overwrite and any(folder.iterdir()))):
        raise NameTakenError(f"{folder}: is there already; give another folder, or overwrite=True (--force)")


def _is_hidden_name(name: str) -> bool:
    return any(step.startswith(".") for step in name.split("/"))


@contextmanager
def _staging_for(folder: Path) -> Iterator[Path]:
    """A hidden folder to fill, which is gone afterwards unless it was put in place."""
    stage = commit.open_stage(folder)
    try:
        yield stage
    finally:
        commit.discard_stage(stage)


def _download_files(api: HfApi, place: HubPlace, oid: str, names: Sequence[str], stage: Path) -> None:
    """Put the files into `stage`, all of one commit."""
    arriving = stage / ".arriving"
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        found = pool.map(lambda name: _download_file(api, place.repo_id, place.path_of(name), oid, arriving), names)
        for name, file in zip(names, found, strict=True):
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            file.rename(stage / name)
    shutil.rmtree(arriving)


def _download_file(api: HfApi, repo_id: str, path: str, oid: str, folder: Path) -> Path:
    return Path(api.hf_hub_download(repo_id, path, revision=oid, local_dir=folder))


def _put_in_place(stage: Path, folder: Path, place: HubPlace) -> Manifest:
    """Compare what was fetched with its manifest, and commit it; files beside it, such as the card, become part of it.

    Raises CorruptError when it differs, ManifestError when the manifest cannot be used.
    """
    store = LocalStore(stage)
    manifest = load_manifest(store)
    if problems := list(checkpoint_problems(store, manifest, deep=True)):
        raise CorruptError(f"{place.url}: {listing(problems)}; nothing was put in place, pull another revision")
    (stage / MANIFEST_NAME).unlink()
    manifest = replace(manifest, files=(*manifest.files, *_records_of_others(stage, manifest)))
    commit.commit_stage(stage, folder, manifest)
    return manifest


def _records_of_others(stage: Path, manifest: Manifest) -> Iterable[FileRecord]:
    listed = {file.path for file in manifest.files}
    found = sorted(path.relative_to(stage).as_posix() for path in stage.rglob("*") if path.is_file())
    return [FileRecord(p, (stage / p).stat().st_size, digest_of(stage / p)) for p in found if p not in listed]


def _move_foreign(stage: Path, folder: Path) -> None:
    """Put in place what has no manifest."""
    _refuse_taken(folder, overwrite=False)
    with explained(folder):
        local_disk.make_folder(folder)
        for entry in sorted(stage.iterdir()):
            local_disk.move(entry, folder / entry.name)
        local_disk.sync_path(folder)
