"""Tests what a folder or bucket supports: by its mount, and by trying operations in a hidden folder."""

import fcntl
import mmap
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_ckpt.errors import CheckpointError, CorruptError, NameTakenError, TargetError, explained, listing, reason_of
from ft_ckpt.messages import warn
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.local_disk import PREFIX
from ft_ckpt.storage.local_store import LocalStore, temporary_store
from ft_ckpt.storage.locks import new_owner
from ft_ckpt.storage.mounts import LOCAL_FILE_SYSTEMS, MountedFrom, mount_of
from ft_ckpt.storage.read_ahead import ALIGNMENT, BLOCK_BYTES, ByteRun, new_block, read_ahead
from ft_ckpt.storage.store import Store

_TRIED_MOUNTS: set[MountedFrom] = set()  # mounts that this process has tried
TRIAL = f"{PREFIX}probe-"  # prefix of the hidden folders of trials
_FILE, _CONTENT = "file", b"written by a trial, to be deleted" * 128  # in each of them


@dataclass(frozen=True)
class Ability:
    """The outcome of one trial."""

    name: str
    works: bool
    detail: str  # "" if it works; else the observation, or the error of the system


@dataclass(frozen=True)
class StoreSpeed:
    """How fast a store is, for one process."""

    write_bytes_per_second: float
    read_bytes_per_second: float
    small_files_per_second: float
    seconds_per_look: float


def try_place(store: Store, names: Collection[str] | None = None) -> tuple[Ability, ...]:
    """Run the trials `names` (None: all) in a new hidden folder in `store`.

    Raises TargetError, UnreadableError or ConfigError if the folder cannot be written or deleted again.
    """
    trials: Mapping[str, Callable[[Any], str]] = FOLDER_TRIALS if isinstance(store, LocalStore) else BUCKET_TRIALS
    with _trial_folder(store) as room:
        place = room.folder if isinstance(room, LocalStore) else room
        return tuple(_tried(name, trial, place) for name, trial in trials.items() if names is None or name in names)


def measure_speed(store: Store, size_bytes: int) -> StoreSpeed:
    """Write and read an object of `size_bytes` and some small ones in a new hidden folder. Raises as `try_place`."""
    with _trial_folder(store) as room:
        writing = _seconds_of(lambda: _write_large(room, size_bytes))
        reading = _seconds_of(lambda: _read_large(room))
        small = _seconds_of(lambda: _write_small(room))
        looks = statistics.median(_seconds_of(lambda: room.stat("small-0")) for _ in range(_LOOKS))
    return StoreSpeed(size_bytes / writing, size_bytes / reading, _SMALL_FILES / small, looks)


def refuse_unfit(folder: Path) -> None:
    """Try, once per process, a file system that is not known to support everything that saves need.

    Warns of a bucket that is mounted as a folder. Raises TargetError where nothing can be saved.
    """
    mount = mount_of(folder)
    if mount is None or mount.kind in LOCAL_FILE_SYSTEMS or mount in _TRIED_MOUNTS:
        return
    failed = [each for each in try_place(LocalStore(folder), FOLDER_NEEDS) if not each.works]
    if failed:
        advice = "give its URL (s3://...) instead" if mount.is_bucket else "choose another path"
        details = listing([f"{each.name}: {each.detail}" for each in failed])
        raise TargetError(
            f"{folder}: {mount.kind} from {mount.source} cannot do what a save needs ({details}); {advice}"
        )
    _TRIED_MOUNTS.add(mount)
    if mount.is_bucket:
        warn(mount.warning, stacklevel=4)


def is_on_bucket(folder: Path) -> bool:
    """Whether `folder` is in a bucket that is mounted as a folder."""
    mount = mount_of(folder)
    return mount is not None and mount.is_bucket


@contextmanager
def _trial_folder(store: Store) -> Iterator[Store]:
    """A new hidden folder in `store` with one file, deleted after the block."""
    if isinstance(store, LocalStore):
        with explained(store.folder), temporary_store(store.folder, TRIAL) as local:
            (local.folder / _FILE).write_bytes(_CONTENT)
            yield local
        return
    room = store.within(f"{TRIAL}{new_owner()}")
    room.write(_FILE, _CONTENT, create_only=True)
    try:
        yield room
    finally:
        room.delete([each.name for each in room.list()])


def _tried(name: str, trial: Callable[[Any], str], place: Path | Store) -> Ability:
    try:
        wrong = trial(place)
    except CheckpointError as error:
        wrong = str(error)
    except OSError as error:
        wrong = reason_of(error)
    return Ability(name, works=not wrong, detail=wrong)


# Trials. Each returns its failure, "" for none. They share one hidden folder with a file `_FILE` in it.


def _write_blocks(room: Path) -> str:
    writing, block = LocalStore(room).create("blocks", 2 * ALIGNMENT), new_block(2 * ALIGNMENT)
    try:
        with memoryview(block) as content, content[:ALIGNMENT] as first, content[ALIGNMENT:] as second:
            writing.write(ALIGNMENT, second)
            writing.write(0, first)
        writing.finish()
    except BaseException:
        writing.abandon()
        raise
    return ""


def _rename_files(room: Path) -> str:
    (room / "new").write_bytes(b"new")
    (room / "old").write_bytes(b"old")
    local_disk.move(room / "new", room / "old")
    return "" if (room / "old").read_bytes() == b"new" else "the old file stayed"


def _rename_folders(room: Path) -> str:
    (room / "stage" / "below").mkdir(parents=True)
    (room / "stage" / "below" / "file").write_bytes(b"1")
    local_disk.move(room / "stage", room / "placed")
    return "" if (room / "placed" / "below" / "file").read_bytes() == b"1" else "not all of it came along"


def _swap_two_folders(room: Path) -> str:
    for name in ("one", "other"):
        (room / name).mkdir()
        (room / name / name).write_bytes(b"")
    local_disk.exchange_folders(room / "one", room / "other")
    return "" if (room / "one" / "other").exists() else "nothing changed"


def _hard_links(room: Path) -> str:
    os.link(room / "file", room / "link")
    return "" if (room / "link").samefile(room / "file") else "the link is another file"


def _symbolic_links(room: Path) -> str:
    (room / "symbolic").symlink_to("file")
    return "" if (room / "symbolic").samefile(room / "file") else "the link leads elsewhere"


def _permissions(room: Path) -> str:
    local_disk.chmod(room / "file", 0o600)
    found = local_disk.permission_bits(room / "file")
    return "" if found == 0o600 else f"a file that is for its owner alone has {found:o}"


def _sync_file(room: Path) -> str:
    with (room / "file").open("rb") as file:
        local_disk.fsync(file.fileno())
    return ""


def _sync_folder(room: Path) -> str:
    with local_disk.folder_handle(room) as handle:
        local_disk.fsync(handle)
    return ""


def _write_in_place(room: Path) -> str:
    for at in (b"1", b"2"):
        descriptor = os.open(room / "file", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, at * 8, int(at) * 1000)
        finally:
            os.close(descriptor)
    content = (room / "file").read_bytes()
    return "" if content[1000:1008] + content[2000:2008] == b"1" * 8 + b"2" * 8 else "other bytes were read back"


def _write_past_cache(room: Path) -> str:
    block = new_block(ALIGNMENT)
    descriptor = os.open(room / "direct", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0), 0o600)
    try:
        os.pwrite(descriptor, block, 0)
    finally:
        os.close(descriptor)
        block.close()
    return ""


def _lock_files(room: Path) -> str:
    with (room / "file").open("rb") as one, (room / "file").open("rb") as other:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return "two have the same lock"
    return ""


def _map_files(room: Path) -> str:
    with (room / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return "" if len(mapped) == (room / "file").stat().st_size else "its length differs"


def _create_new_only(room: Path) -> str:
    with suppress(FileExistsError):
        os.close(os.open(room / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        return "a file that is there was created anew"
    return ""


def _case_of_names(room: Path) -> str:
    return "File and file are one" if (room / "FILE").exists() else ""


FOLDER_NEEDS = {"writing a file in blocks", "rename a file over another"}  # nothing can be saved without these
FOLDER_TRIALS: dict[str, Callable[[Path], str]] = {
    "writing a file in blocks": _write_blocks,
    "rename a file over another": _rename_files,
    "rename a folder": _rename_folders,
    "exchange two folders": _swap_two_folders,
    "hard links": _hard_links,
    "symbolic links": _symbolic_links,
    "permissions": _permissions,
    "sync of files": _sync_file,
    "sync of folders": _sync_folder,
    "writing in place": _write_in_place,
    "writing past the page cache": _write_past_cache,
    "locks": _lock_files,
    "mapping": _map_files,
    "creating what is new only": _create_new_only,
    "names in upper and lower case": _case_of_names,
}


_MULTIPART_BYTES = 20 << 20  # more than one part of an upload
_SMALL_FILES, _SMALL_BYTES, _LOOKS = 20, 4096, 10


def _create_once(room: Store) -> str:
    with suppress(NameTakenError):
        room.write(_FILE, _CONTENT, create_only=True)
        return "the condition is ignored: a second writer replaced the first"
    return ""


def _refuse_changed(room: Store) -> str:
    room.write("changed", b"before")
    with closing(room.open("changed")) as opened:
        room.write("changed", b"behind")
        content = bytearray(6)
        with suppress(CorruptError):
            opened.read_into(memoryview(content))
    return "an overwritten object was read without an error" if content == b"behind" else ""


def _read_ranges(room: Store) -> str:
    return "" if room.read(_FILE, 3, 7) == _CONTENT[3:7] else "other bytes came"


def _write_in_parts(room: Store) -> str:
    _write_large(room, _MULTIPART_BYTES)
    found = room.stat("large")
    return "" if found is not None and found.size_bytes == _MULTIPART_BYTES else "not whole afterwards"


def _copy_there(room: Store) -> str:
    if not room.copy(_FILE, "copied"):
        return "refused"
    return "" if room.read("copied") == _CONTENT else "other bytes came"


def _list_written(room: Store) -> str:
    return "" if _FILE in {each.name for each in room.list()} else "what was written is not listed"


def _see_clock(room: Store) -> str:
    found = room.stat(_FILE)
    offset = 0.0 if found is None else abs(found.modified - time.time())
    return "" if offset < 60 else f"{offset:.0f} s apart from this machine's"


IF_NEW = "creating what is new only"
BUCKET_NEEDS = {IF_NEW, "reading ranges", "writing in parts", "listing at once"}  # saves are not safe without these
BUCKET_TRIALS: dict[str, Callable[[Store], str]] = {
    IF_NEW: _create_once,
    "noticing what was written over": _refuse_changed,
    "reading ranges": _read_ranges,
    "writing in parts": _write_in_parts,
    "copies by the service": _copy_there,
    "listing at once": _list_written,
    "the clock": _see_clock,
}


def _write_large(room: Store, size_bytes: int) -> None:
    block, writing = new_block(), room.create("large", size_bytes)
    try:
        with memoryview(block) as content:
            for at in range(0, size_bytes, BLOCK_BYTES):
                with content[: min(BLOCK_BYTES, size_bytes - at)] as part:
                    writing.write(at, part)
        writing.finish()
    except BaseException:
        writing.abandon()
        raise


def _write_small(room: Store) -> None:
    for at in range(_SMALL_FILES):
        room.write(f"small-{at}", b"1" * _SMALL_BYTES)


def _read_large(room: Store) -> None:
    with closing(room.open("large")) as file:
        for _ in read_ahead([ByteRun("large", file, 0, file.size_bytes)], 4, direct="on"):
            pass


def _seconds_of(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return max(1e-9, time.perf_counter() - begun)
