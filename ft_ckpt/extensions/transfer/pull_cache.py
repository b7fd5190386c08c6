"""The cache of pulled checkpoints: a local folder of limited size.

Each entry is a committed checkpoint, named by its content; files that several entries share are
hard links. The least recently used entries are deleted first. Entries that are leased, pinned, or
were used within the hour stay.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import constants

from ft_ckpt.checkpoint import (
    CheckpointInfo,
    Manifest,
    OpenCheckpoint,
    delete_checkpoint,
    list_checkpoints,
)
from ft_ckpt.config import parse_size
from ft_ckpt.errors import CheckpointError, ConfigError
from ft_ckpt.extensions.transfer.copies import (
    CopyReport,
    content_identity,
    content_key,
    copy_open,
    is_there,
)
from ft_ckpt.storage import PREFIX, LocalStore, Place, locks

# environment variables: its location and largest size
_FOLDER, _SIZE = "FT_CKPT_CACHE", "FT_CKPT_CACHE_SIZE"
_DEFAULT_SIZE = "200GB"
# empty file in a cached checkpoint; its modification time is that of the last use
_USED = f"{PREFIX}used"
_LOCK = f"{PREFIX}pull-"  # prefix of lock files: one process at a time pulls a checkpoint
_IN_USE_SECONDS = 3600.0
_POLL_SECONDS = 0.2


def cache_folder() -> Path:
    """The folder of the cache: FT_CKPT_CACHE, else ft_ckpt in HF_HOME, where Hugging Face libraries
    keep models.
    """
    if folder := os.environ.get(_FOLDER):
        return Path(folder)
    home = Path(constants.HF_HOME)
    if home.parts[:1] == ("~",):  # of a user that the system does not list, without HOME
        raise ConfigError(
            f"the cache of pulled checkpoints: no home folder; set {_FOLDER} or HF_HOME to a folder"
        )
    return home / "ft_ckpt"


def pull_cached(held: OpenCheckpoint, manifest: Manifest, *, exact: bool = False) -> CopyReport:
    """Fetch the checkpoint into the cache, one process at a time, if it is missing or damaged
    there.

    Raises ConfigError for an invalid size and without a home folder, and what `copies.copy` raises.
    """
    most_bytes = parse_size(os.environ.get(_SIZE) or _DEFAULT_SIZE)
    cache = LocalStore(cache_folder())
    goal = Place(cache, f"{held.place.basename}-{content_identity(manifest)[-16:]}")
    with _sole_puller(cache, goal.name):
        if not is_there(goal, manifest):
            make_room_in(cache, most_bytes, manifest)
        report = copy_open(held, goal, manifest, overwrite=True, renews=True, exact=exact)
        goal.folder.write(_USED, b"")
    return report


def make_room_in(cache: LocalStore, most_bytes: int, coming: Manifest) -> None:
    """Delete the least recently used checkpoints until the cache has at most `most_bytes`,
    including the `coming` one.

    Checkpoints that cannot be deleted stay.
    """
    infos = [
        info
        for info in list_checkpoints(cache.folder).found
        if info.store.identity != cache.identity
    ]
    new, young = (
        {content_key(file): file.size_bytes for file in coming.files},
        time.time() - _IN_USE_SECONDS,
    )
    for oldest in sorted(infos, key=_last_use):
        if _distinct_bytes(infos, new) <= most_bytes or _last_use(oldest) > young:
            return
        with suppress(CheckpointError, OSError):
            if delete_checkpoint(cache.folder / oldest.name).dropped:
                infos.remove(oldest)


def _last_use(info: CheckpointInfo) -> float:
    found = info.store.stat(_USED)
    return 0.0 if found is None else found.modified


def _distinct_bytes(infos: Iterable[CheckpointInfo], new: dict[tuple[str, int], int]) -> int:
    """Bytes of all files; files of the same content, which are hard links, count once."""
    files = {content_key(file): file.size_bytes for info in infos for file in info.manifest.files}
    return sum({**files, **new}.values())


@contextmanager
def _sole_puller(cache: LocalStore, name: str) -> Iterator[None]:
    """Hold the lock for pulling `name` while the block runs; there is none on file systems without
    locks.
    """
    lock = f"{_LOCK}{name}"
    while True:
        # not by a temporary file, which would stay if this process were killed
        cache.allocate(lock, 0)
        with locks.holding_lock(cache.path(lock)) as mine:
            if mine is not False:
                yield
                return
        time.sleep(_POLL_SECONDS)
