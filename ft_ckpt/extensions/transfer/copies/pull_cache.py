"""Keeps pulled checkpoints in a cache, which is a local folder of limited size.

Each entry of the cache is a committed checkpoint whose name has a digest of its content. Files that
several entries share are hard links. The least recently used entries are deleted first. Entries
that are leased, pinned, or were used within the hour are not deleted.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import constants

from ft_ckpt.checkpoint import OpenCheckpoint
from ft_ckpt.checkpoint.catalog import CheckpointInfo, list_checkpoints
from ft_ckpt.checkpoint.commit import delete_checkpoint
from ft_ckpt.checkpoint.manifest import Manifest, content_identity
from ft_ckpt.errors import CheckpointError, ConfigError
from ft_ckpt.extensions.transfer.copies.identity import content_key, is_there
from ft_ckpt.extensions.transfer.copies.reports import CopyReport
from ft_ckpt.extensions.transfer.copies.store_copies import copy_open
from ft_ckpt.storage import PREFIX
from ft_ckpt.storage.local import LocalStore, holding_lock
from ft_ckpt.storage.places import Place
from ft_ckpt.values import parse_size

# The environment variables with the folder and the maximum size of the cache.
_FOLDER_VARIABLE = "FT_CKPT_CACHE"
_SIZE_VARIABLE = "FT_CKPT_CACHE_SIZE"
_DEFAULT_SIZE = "200GB"
# An empty file in each entry. Its modification time is the time of the last use.
_USED = f"{PREFIX}used"
# The names of lock files begin so. The lock lets one process at a time pull a checkpoint.
_LOCK = f"{PREFIX}pull-"
_IN_USE_SECONDS = 3600.0
_POLL_SECONDS = 0.2


def cache_folder() -> Path:
    """Return the folder of the cache: FT_CKPT_CACHE, or else ft_ckpt in HF_HOME.

    Hugging Face libraries keep models in HF_HOME. Raises ConfigError without a home folder.
    """
    folder = os.environ.get(_FOLDER_VARIABLE)
    if folder:
        return Path(folder)
    home = Path(constants.HF_HOME)
    if home.parts[:1] == ("~",):
        # "~" was not expanded: HOME is not set, and the system does not list the user.
        raise ConfigError(
            f"the cache of pulled checkpoints: no home folder; set {_FOLDER_VARIABLE} or HF_HOME "
            "to a folder"
        )
    return home / "ft_ckpt"


def pull_cached(
    checkpoint: OpenCheckpoint, manifest: Manifest, *, exact: bool = False
) -> CopyReport:
    """Fetch the checkpoint into the cache if it is missing or damaged there.

    One process at a time fetches a checkpoint. Raises ConfigError for an invalid size and without a
    home folder, and otherwise what `copy` raises.
    """
    max_bytes = parse_size(os.environ.get(_SIZE_VARIABLE) or _DEFAULT_SIZE)
    cache = LocalStore(cache_folder())
    entry = Place(cache, f"{checkpoint.place.basename}-{content_identity(manifest)[-16:]}")
    with _pull_lock(cache, entry.name):
        if not is_there(entry, manifest):
            make_room_in(cache, max_bytes, manifest)
        report = copy_open(checkpoint, entry, manifest, overwrite=True, renews=True, exact=exact)
        entry.folder.write(_USED, b"")
    return report


def make_room_in(cache: LocalStore, max_bytes: int, new_manifest: Manifest) -> None:
    """Delete the least recently used entries until the cache has room for a new checkpoint.

    The cache then has at most `max_bytes` with the new checkpoint. Entries that cannot be deleted
    stay.
    """
    listed = list_checkpoints(Place(cache)).checkpoints
    infos = [info for info in listed if info.store.identity != cache.identity]
    in_use_since = time.time() - _IN_USE_SECONDS
    for oldest in sorted(infos, key=_last_use):
        if _distinct_bytes(infos, new_manifest) <= max_bytes or _last_use(oldest) > in_use_since:
            return
        with suppress(CheckpointError, OSError):
            if delete_checkpoint(cache.folder / oldest.name).dropped:
                infos.remove(oldest)


def _last_use(info: CheckpointInfo) -> float:
    stamp = info.store.stat(_USED)
    return 0.0 if stamp is None else stamp.modified


def _distinct_bytes(infos: Iterable[CheckpointInfo], new_manifest: Manifest) -> int:
    """Return the size of all files. Files with the same bytes are hard links and count once."""
    sizes: dict[tuple[str, int], int] = {}
    for manifest in [*(info.manifest for info in infos), new_manifest]:
        for file in manifest.files:
            sizes[content_key(file)] = file.size_bytes
    return sum(sizes.values())


@contextmanager
def _pull_lock(cache: LocalStore, name: str) -> Iterator[None]:
    """Hold the lock for pulling `name` while the block runs.

    On a file system without locks, the block runs without a lock.
    """
    lock = f"{_LOCK}{name}"
    while True:
        # The file is not created by way of a temporary file, which would stay if this process were
        # killed.
        cache.allocate(lock, 0)
        with holding_lock(cache.path(lock)) as is_locked:
            if is_locked is not False:
                yield
                return
        time.sleep(_POLL_SECONDS)
