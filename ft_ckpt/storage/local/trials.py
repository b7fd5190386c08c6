"""Tests what a folder or bucket supports, by trying operations in a hidden folder.

Each trial tries one operation that saves or loads use. If one of `FOLDER_NEEDS` fails, nothing can
be saved. If one of `BUCKET_NEEDS` fails, saves are not safe. For the other operations, saves and
loads have a slower way.
"""

import fcntl
import mmap
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_ckpt.errors import (
    CheckpointError,
    NameTakenError,
    TargetError,
    explained,
    listing,
    reason_of,
)
from ft_ckpt.messages import warn
from ft_ckpt.processes import new_owner
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.io import ALIGNMENT, BLOCK_BYTES, new_block
from ft_ckpt.storage.local.local_store import LocalStore, temporary_store
from ft_ckpt.storage.local_disk import PREFIX
from ft_ckpt.storage.mounts import Mount, mount_of
from ft_ckpt.storage.store import Store

TRIAL = f"{PREFIX}probe-"  # prefix of the names of the hidden folders
# Each hidden folder has this file.
_FILE = "file"
_CONTENT = b"written by a trial, to be deleted" * 128
_MULTIPART_BYTES = 20 << 20  # is more than one part of an upload
_tried_mounts: set[Mount] = set()  # mounts that this process has tried without a failure


@dataclass(frozen=True)
class Ability:
    """Result of one trial. `detail` says what failed, and is empty if it works."""

    name: str
    works: bool
    detail: str


def try_place(store: Store, names: Collection[str] | None = None) -> tuple[Ability, ...]:
    """Run the trials `names` in a new hidden folder in `store`. None runs all trials.

    Raises TargetError, UnreadableError or ConfigError if the hidden folder cannot be written or
    deleted.
    """
    trials: Mapping[str, Callable[[Any], str]] = FOLDER_TRIALS
    if store.local_folder is None:
        trials = BUCKET_TRIALS
    with _trial_folder(store) as trial_store:
        folder = trial_store.local_folder or trial_store
        abilities = []
        for name, trial in trials.items():
            if names is None or name in names:
                abilities.append(_run_trial(name, trial, folder))
        return tuple(abilities)


def refuse_unfit(folder: Path) -> None:
    """Raise TargetError if nothing can be saved to the file system of `folder`.

    Local file systems are known to work. Others are tried, each once per process. Warns if `folder`
    is in a bucket that is mounted as a folder.
    """
    mount = mount_of(folder)
    if mount is None or mount.is_local or mount in _tried_mounts:
        return
    abilities = try_place(LocalStore(folder), FOLDER_NEEDS)
    failures = [f"{ability.name}: {ability.detail}" for ability in abilities if not ability.works]
    if failures:
        advice = "give its URL (s3://...) instead" if mount.is_bucket else "choose another path"
        raise TargetError(
            f"{folder}: {mount.kind} from {mount.source} cannot do what a save "
            f"needs ({listing(failures)}); {advice}"
        )

    _tried_mounts.add(mount)
    if mount.is_bucket:
        warn(mount.warning)


def is_on_bucket(folder: Path) -> bool:
    """Check whether `folder` is in a bucket that is mounted as a folder."""
    mount = mount_of(folder)
    return mount is not None and mount.is_bucket


@contextmanager
def _trial_folder(store: Store) -> Iterator[Store]:
    """Yield a new hidden folder in `store` with one file. Deletes it after the `with` block."""
    folder = store.local_folder
    if folder is not None:
        with explained(folder), temporary_store(folder, TRIAL) as local:
            (local.folder / _FILE).write_bytes(_CONTENT)
            yield local
        return
    bucket = store.within(f"{TRIAL}{new_owner()}")
    bucket.write(_FILE, _CONTENT, create_only=True)
    try:
        yield bucket
    finally:
        bucket.delete([stored.name for stored in bucket.list()])


def _run_trial(name: str, trial: Callable[[Any], str], folder: Path | Store) -> Ability:
    try:
        failure = trial(folder)
    except CheckpointError as error:
        failure = str(error)
    except OSError as error:
        failure = reason_of(error)
    return Ability(name, works=not failure, detail=failure)


# The trials of folders. Each returns a text that says what failed, or "". They share one hidden
# folder, which has the file `_FILE`.


def _write_blocks(folder: Path) -> str:
    writing = LocalStore(folder).create("blocks", 2 * ALIGNMENT)
    block = new_block(2 * ALIGNMENT)
    try:
        with memoryview(block) as content:
            writing.write(ALIGNMENT, content[ALIGNMENT:])
            writing.write(0, content[:ALIGNMENT])
        writing.finish()
    except BaseException:
        writing.abandon()
        raise
    return ""


def _rename_files(folder: Path) -> str:
    (folder / "new").write_bytes(b"new")
    (folder / "old").write_bytes(b"old")
    local_disk.move(folder / "new", folder / "old")
    return "" if (folder / "old").read_bytes() == b"new" else "the old file stayed"


def _swap_two_folders(folder: Path) -> str:
    for name in ("first", "second"):
        (folder / name).mkdir()
        (folder / name / name).write_bytes(b"")
    local_disk.exchange_folders(folder / "first", folder / "second")
    return "" if (folder / "first" / "second").exists() else "nothing changed"


def _hard_links(folder: Path) -> str:
    os.link(folder / _FILE, folder / "link")
    return "" if (folder / "link").samefile(folder / _FILE) else "the link is another file"


def _write_past_cache(folder: Path) -> str:
    block = new_block(ALIGNMENT)
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
    descriptor = os.open(folder / "direct", flags, 0o600)
    try:
        os.pwrite(descriptor, block, 0)
    finally:
        os.close(descriptor)
        block.close()
    return ""


def _lock_files(folder: Path) -> str:
    path = folder / _FILE
    with path.open("rb") as first, path.open("rb") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return "two have the same lock"
    return ""


def _map_files(folder: Path) -> str:
    path = folder / _FILE
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return "" if len(mapped) == path.stat().st_size else "its length differs"


# Without these, nothing can be saved.
FOLDER_NEEDS = {"writing a file in blocks", "rename a file over another"}
FOLDER_TRIALS: dict[str, Callable[[Path], str]] = {
    "writing a file in blocks": _write_blocks,
    "rename a file over another": _rename_files,
    "exchange two folders": _swap_two_folders,
    "hard links": _hard_links,
    "writing past the page cache": _write_past_cache,
    "locks": _lock_files,
    "mapping": _map_files,
}


# The trials of buckets, which return the same.


def _create_once(bucket: Store) -> str:
    with suppress(NameTakenError):
        bucket.write(_FILE, _CONTENT, create_only=True)
        return "the condition is ignored: a second writer replaced the first"
    return ""


def _read_ranges(bucket: Store) -> str:
    return "" if bucket.read(_FILE, 3, 7) == _CONTENT[3:7] else "other bytes came"


def _write_in_parts(bucket: Store) -> str:
    block = new_block()
    writing = bucket.create("large", _MULTIPART_BYTES)
    try:
        with memoryview(block) as content:
            for start in range(0, _MULTIPART_BYTES, BLOCK_BYTES):
                size_bytes = min(BLOCK_BYTES, _MULTIPART_BYTES - start)
                writing.write(start, content[:size_bytes])
        writing.finish()
    except BaseException:
        writing.abandon()
        raise

    stored = bucket.stat("large")
    is_whole = stored is not None and stored.size_bytes == _MULTIPART_BYTES
    return "" if is_whole else "not whole afterwards"


def _copy_at_service(bucket: Store) -> str:
    if not bucket.copy(_FILE, "copied"):
        return "refused"
    return "" if bucket.read("copied") == _CONTENT else "other bytes came"


def _list_written(bucket: Store) -> str:
    names = {stored.name for stored in bucket.list()}
    return "" if _FILE in names else "what was written is not listed"


IF_NEW = "creating what is new only"
# Without these, saves are not safe.
BUCKET_NEEDS = {IF_NEW, "reading ranges", "writing in parts", "listing at once"}
BUCKET_TRIALS: dict[str, Callable[[Store], str]] = {
    IF_NEW: _create_once,
    "reading ranges": _read_ranges,
    "writing in parts": _write_in_parts,
    "copies by the service": _copy_at_service,
    "listing at once": _list_written,
}
