"""Measures the caches of a network file system.

When one client changes a file, other clients may show the old state for a while, because they
cache names, sizes and contents. Here rank 0 makes one change of each kind, and the other ranks
measure the time until they see it.
"""

import errno
import os
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ft_ckpt.ranks import Ranks, Values, try_action
from ft_ckpt.storage import list_names
from ft_ckpt.storage.local import TRIAL, temporary_store

MAX_SECONDS = 65.0  # The longest cache times of NFS and of the mounts in common use are 60 s.
_SECONDS_BETWEEN_LOOKS = 0.02
_OLD, _NEW = b"old", b"new"
# Errors of a client that does not know a name yet, or that still has the file before the change.
_NOT_YET = (errno.ENOENT, errno.ESTALE)


class Change(ABC):
    """A kind of change, whose files are below the folder of the trial."""

    name: str

    def prepare(self, folder: Path) -> None:
        """Create the state before the change. Rank 0 does it before any rank looks.

        By default there is nothing before the change.
        """
        return

    @abstractmethod
    def make(self, folder: Path) -> None:
        """Make the change. Rank 0 does it after all ranks have looked once."""

    @abstractmethod
    def is_seen(self, folder: Path) -> bool:
        """Check whether this rank sees the change. An error of `_NOT_YET` counts as no."""


class _NewFile(Change):
    name = "a new file, by its name"

    def make(self, folder: Path) -> None:
        _write(folder / "created", _NEW)

    def is_seen(self, folder: Path) -> bool:
        return (folder / "created").stat().st_size > 0


class _NewListEntry(Change):
    name = "a new name in the list of a folder"

    def prepare(self, folder: Path) -> None:
        _write(folder / "list" / "first", _OLD)

    def make(self, folder: Path) -> None:
        _write(folder / "list" / "second", _NEW)

    def is_seen(self, folder: Path) -> bool:
        return "second" in list_names(folder / "list")


class _DeletedFile(Change):
    name = "that a file was deleted"

    def prepare(self, folder: Path) -> None:
        _write(folder / "deleted", _OLD)

    def make(self, folder: Path) -> None:
        (folder / "deleted").unlink()

    def is_seen(self, folder: Path) -> bool:
        try:
            (folder / "deleted").stat()
        except FileNotFoundError:
            return True
        return False


class _NewSize(Change):
    name = "the size of a file that grew"

    def prepare(self, folder: Path) -> None:
        _write(folder / "grown", _OLD)

    def make(self, folder: Path) -> None:
        _write(folder / "grown", _NEW * 4096)

    def is_seen(self, folder: Path) -> bool:
        return (folder / "grown").stat().st_size > len(_OLD)


class _NewContent(Change):
    name = "the content of a file that grew"

    def prepare(self, folder: Path) -> None:
        _write(folder / "opened", _OLD)

    def make(self, folder: Path) -> None:
        _write(folder / "opened", _NEW * 4096)

    def is_seen(self, folder: Path) -> bool:
        return len((folder / "opened").read_bytes()) > len(_OLD)


class _NewBytes(Change):
    name = "other bytes of the same size"

    def prepare(self, folder: Path) -> None:
        _write(folder / "rewritten", _OLD)

    def make(self, folder: Path) -> None:
        _write(folder / "rewritten", _NEW)

    def is_seen(self, folder: Path) -> bool:
        return (folder / "rewritten").read_bytes() == _NEW


class _ReplacedFile(Change):
    name = "a file that was replaced"

    def prepare(self, folder: Path) -> None:
        _write(folder / "replaced", _OLD)

    def make(self, folder: Path) -> None:
        _write(folder / "replacing", _NEW)
        (folder / "replacing").replace(folder / "replaced")

    def is_seen(self, folder: Path) -> bool:
        return (folder / "replaced").read_bytes() == _NEW


class _ReplacedFolder(Change):
    """A folder is renamed away and another one takes its name, as in a commit."""

    name = "a folder that was replaced"

    def prepare(self, folder: Path) -> None:
        _write(folder / "target" / "file", _OLD)

    def make(self, folder: Path) -> None:
        _write(folder / "stage" / "file", _NEW)
        (folder / "target").rename(folder / "aside")
        (folder / "stage").rename(folder / "target")

    def is_seen(self, folder: Path) -> bool:
        return (folder / "target" / "file").read_bytes() == _NEW


CHANGES: tuple[Change, ...] = (
    _NewFile(),
    _NewListEntry(),
    _DeletedFile(),
    _NewSize(),
    _NewContent(),
    _NewBytes(),
    _ReplacedFile(),
    _ReplacedFolder(),
)


@dataclass(frozen=True)
class CacheAge:
    """The time in which at least one rank did not see a change.

    `seconds` is the time of the slowest rank, or None if it took longer than MAX_SECONDS.
    """

    change: str
    seconds: float | None


def measure_caches(folder: Path, ranks: Ranks) -> tuple[CacheAge, ...]:
    """Measure how long ranks see old names and contents of files in `folder`.

    Collective: call it on every rank. Rank 0 creates files in a hidden folder of `folder`. All
    ranks look at them, so that their caches are filled. Then rank 0 changes the files, and all
    ranks look until they see the changes. The measurement takes as long as the slowest cache, at
    most MAX_SECONDS. An error of one rank is raised on all.
    """
    with ExitStack() as stack:

        def prepare_changes() -> str | None:
            if not ranks.is_main:
                return None
            trial_folder = stack.enter_context(temporary_store(folder, TRIAL)).folder
            for change in CHANGES:
                change.prepare(trial_folder)
            return str(trial_folder)

        path_on_rank_0, error = try_action(prepare_changes)
        agreed = ranks.agree("the trial of caches", {"folder": path_on_rank_0}, error)
        trial_folder = Path(agreed.result["folder"])
        ranks.run("the first look at the trial of caches", partial(_fill_caches, trial_folder))
        ranks.run("the changes of the trial of caches", partial(_make_changes, trial_folder, ranks))
        seconds, error = ranks.attempt(partial(_await_changes, trial_folder, ranks))
        ages = ranks.agree(
            "the second look at the trial of caches",
            {"seconds": seconds},
            error,
            decide=_slowest,
        ).result

    named_ages = zip(CHANGES, ages, strict=True)
    return tuple(CacheAge(change.name, age) for change, age in named_ages)


def _fill_caches(folder: Path) -> None:
    for change in CHANGES:
        _is_seen(change, folder)


def _make_changes(folder: Path, ranks: Ranks) -> None:
    if ranks.is_main:
        for change in CHANGES:
            change.make(folder)


def _await_changes(folder: Path, ranks: Ranks) -> dict[str, float | None]:
    """Look until this rank sees all changes, or MAX_SECONDS are over.

    Returns for each change the seconds until it was seen, or None if it was not seen.
    """
    seconds: dict[str, float | None] = {change.name: None for change in CHANGES}
    start = time.monotonic()
    unseen = list(CHANGES)
    while unseen and time.monotonic() - start < MAX_SECONDS:
        for change in list(unseen):
            if _is_seen(change, folder):
                seconds[change.name] = time.monotonic() - start
                unseen.remove(change)
        ranks.check_peers()
        if unseen:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    return seconds


def _slowest(values: Values) -> list[float | None]:
    """Return the time of the slowest rank for each change. Rank 0 computes it for all."""
    ages: list[float | None] = []
    for change in CHANGES:
        seconds = [value["seconds"][change.name] for value in values]
        ages.append(None if None in seconds else max(seconds))
    return ages


def _is_seen(change: Change, folder: Path) -> bool:
    try:
        return change.is_seen(folder)
    except OSError as error:
        if error.errno in _NOT_YET:
            return False
        raise


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, content, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
