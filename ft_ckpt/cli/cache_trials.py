"""How long the clients of a network file system show what another client has changed."""

import errno
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ft_ckpt.ranks import Ranks, Values, try_action
from ft_ckpt.storage import list_names
from ft_ckpt.storage.local import TRIAL, temporary_store

MAX_SECONDS = 65.0  # the longest times of NFS and of the mounts in common use are 60 s
_SECONDS_BETWEEN_LOOKS = 0.02
_OLD, _NEW = b"old", b"new"
# errors of a name that a client does not know yet, or of the file that it had before
_NOT_YET = (errno.ENOENT, errno.ESTALE)


@dataclass(frozen=True)
class Change:
    """A change by rank 0, and how the other ranks look whether they see it."""

    name: str
    prepare: Callable[[Path], object]
    make: Callable[[Path], object]
    sees: Callable[[Path], bool]  # an error of _NOT_YET counts as False


@dataclass(frozen=True)
class CacheAge:
    """How long the slowest rank did not see a change: None for longer than MAX_SECONDS."""

    change: str
    seconds: float | None


def measure_caches(folder: Path, ranks: Ranks) -> tuple[CacheAge, ...]:
    """Measure how long ranks see old names and contents of files in `folder`.

    Collective: call it on every rank. Rank 0 changes files in a hidden folder of `folder`, and the
    other ranks, which have looked before, look for the changes. The measurement takes as long as
    the slowest cache, at most MAX_SECONDS. Raises the error of any rank on all.
    """
    with ExitStack() as stack:

        def prepare() -> str | None:
            if not ranks.is_main:
                return None
            trial_folder = stack.enter_context(temporary_store(folder, TRIAL)).folder
            for change in CHANGES:
                change.prepare(trial_folder)
            return str(trial_folder)

        prepared, error = try_action(prepare)
        agreed = ranks.agree("the trial of caches", {"folder": prepared}, error)
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
    """Return the seconds until this rank saw each change, in order."""
    seconds: dict[str, float | None] = {change.name: None for change in CHANGES}
    begun = time.monotonic()
    unseen = list(CHANGES)
    while unseen and time.monotonic() - begun < MAX_SECONDS:
        for change in list(unseen):
            if _is_seen(change, folder):
                seconds[change.name] = time.monotonic() - begun
                unseen.remove(change)
        ranks.check_peers()
        if unseen:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    return seconds


def _slowest(values: Values) -> list[float | None]:
    """Return, on rank 0, for each change the time of the rank that saw it last."""
    ages: list[float | None] = []
    for change in CHANGES:
        seconds = [value["seconds"][change.name] for value in values]
        ages.append(None if None in seconds else max(seconds))
    return ages


def _is_seen(change: Change, folder: Path) -> bool:
    try:
        return change.sees(folder)
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


def _do_nothing(folder: Path) -> None:
    """Prepare a change that needs no preparation."""


def _write_at(name: str, content: bytes, folder: Path) -> None:
    _write(folder / name, content)


def _delete_at(name: str, folder: Path) -> None:
    (folder / name).unlink()


def _is_absent(name: str, folder: Path) -> bool:
    try:
        (folder / name).stat()
    except FileNotFoundError:
        return True
    return False


def _is_listed(folder_name: str, name: str, folder: Path) -> bool:
    return name in list_names(folder / folder_name)


def _has_size_above(name: str, size_bytes: int, folder: Path) -> bool:
    return (folder / name).stat().st_size > size_bytes


def _has_content_above(name: str, size_bytes: int, folder: Path) -> bool:
    return len((folder / name).read_bytes()) > size_bytes


def _replace_file(folder: Path) -> None:
    _write(folder / "replacing", _NEW)
    (folder / "replacing").replace(folder / "replaced")


def _replace_folder(folder: Path) -> None:
    """Replace the folder as a commit does."""
    _write(folder / "stage" / "file", _NEW)
    (folder / "target").rename(folder / "aside")
    (folder / "stage").rename(folder / "target")


def _is_new(name: str, folder: Path) -> bool:
    return (folder / name).read_bytes() == _NEW


CHANGES = (
    Change(
        "a new file, by its name",
        prepare=_do_nothing,
        make=partial(_write_at, "created", _NEW),
        sees=partial(_has_size_above, "created", 0),
    ),
    Change(
        "a new name in the list of a folder",
        prepare=partial(_write_at, "list/first", _OLD),
        make=partial(_write_at, "list/second", _NEW),
        sees=partial(_is_listed, "list", "second"),
    ),
    Change(
        "the end of a deleted file",
        prepare=partial(_write_at, "deleted", _OLD),
        make=partial(_delete_at, "deleted"),
        sees=partial(_is_absent, "deleted"),
    ),
    Change(
        "the size of a file that grew",
        prepare=partial(_write_at, "grown", _OLD),
        make=partial(_write_at, "grown", _NEW * 4096),
        sees=partial(_has_size_above, "grown", len(_OLD)),
    ),
    Change(
        "its content, once opened",
        prepare=partial(_write_at, "opened", _OLD),
        make=partial(_write_at, "opened", _NEW * 4096),
        sees=partial(_has_content_above, "opened", len(_OLD)),
    ),
    Change(
        "other bytes of the same size, once opened",
        prepare=partial(_write_at, "rewritten", _OLD),
        make=partial(_write_at, "rewritten", _NEW),
        sees=partial(_is_new, "rewritten"),
    ),
    Change(
        "a file that was replaced",
        prepare=partial(_write_at, "replaced", _OLD),
        make=_replace_file,
        sees=partial(_is_new, "replaced"),
    ),
    Change(
        "a folder that was replaced",
        prepare=partial(_write_at, "target/file", _OLD),
        make=_replace_folder,
        sees=partial(_is_new, "target/file"),
    ),
)
