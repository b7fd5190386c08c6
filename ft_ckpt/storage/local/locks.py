"""Locks hidden files and folders, so that others see whether the process that made them is alive.

A lock (flock) ends with its process, and all processes and containers of the machine see it.
Processes on other machines do not see it, and some file systems have no locks. There the age of the
file or folder decides whether its process has ended.
"""

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ft_ckpt.processes import (
    OWNER,
    is_gone,
    is_owner_gone,
    is_owner_of_this_machine,
    machine_id,
    new_owner,
)
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.look_ups import is_folder, list_names, walk_tree
from ft_ckpt.storage.mounts import is_on_local_disk

DRAFTS = ".ft_ckpt-file-"  # is part of the names of folders for unfinished files
_lock_descriptors: dict[str, int] = {}  # open descriptors of the locked files, by path
_descriptors_lock = threading.Lock()


def hold_lock(path: Path) -> bool | None:
    """Lock the file or folder `path` until `release_lock`.

    Returns True if this process has the lock now. Returns False if another process has it, or if
    `path` is missing. Returns None if that is unknown, because the file system has no locks or
    `path` cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return False if error.errno in (errno.ENOENT, errno.ELOOP) else None

    try:
        is_locked: bool | None = None
        if lock_descriptor(descriptor):
            is_locked = True
        # The previous holder can have deleted the file, and another file can be at the path now.
        if not os.path.samestat(path.lstat(), os.fstat(descriptor)):
            is_locked = False
    except OSError:
        is_locked = False

    if not is_locked:
        os.close(descriptor)
        return is_locked

    with _descriptors_lock:
        _lock_descriptors[str(path)] = descriptor
    return True


def release_lock(path: Path) -> None:
    """Release the lock that was taken at `path`, even if the file was moved since.

    Does nothing if it was not held.
    """
    with _descriptors_lock:
        descriptor = _lock_descriptors.pop(str(path), None)
    if descriptor is not None:
        with suppress(OSError):
            # Closing is not enough: a forked process can have the same lock, and live longer.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextmanager
def holding_lock(path: Path) -> Iterator[bool | None]:
    """Hold the lock on `path` during the `with` block. Yields the result of `hold_lock`."""
    is_locked = hold_lock(path)
    try:
        yield is_locked
    finally:
        if is_locked:
            release_lock(path)


@contextmanager
def claim_leftover(path: Path, owner: str, seconds: float) -> Iterator[bool]:
    """Lock the file or folder at `path` that `owner` has left, and yield whether it can be deleted.

    The lock is held during the `with` block. These rules decide, in this order:

    - If another process has the lock, the answer is False.
    - If the lock is free, and this process would see a lock of the owner, the answer is True. On a
      local disk it would see it if the owner ran on this machine. On a network file system a lock
      is seen through the same mount only, so there the owner must be known to have ended.
    - Otherwise nothing is known of the owner, and the age decides. The answer is True if `path` is
      older than `seconds`, or if `seconds` is 0.
    """
    with holding_lock(path) as is_locked:
        try:
            age = _age_seconds(path)
        except OSError:
            yield False
            return
        yield _has_ended(age, is_locked, _sees_locks_of(owner, path), seconds)


def _sees_locks_of(owner: str, path: Path) -> bool:
    """Check whether this process would see a lock of `owner` on `path`, or knows that it ended."""
    if is_on_local_disk(path):
        return is_owner_of_this_machine(owner)
    return is_owner_gone(owner)


def has_ended(path: Path, facts: Mapping[str, Any], seconds: float) -> bool:
    """Check whether the process that keeps `path` locked has ended, without taking its lock.

    `facts` is what the process has recorded of itself (`process_facts`). Its "machine" is None if
    the process got no lock. The rules are those of `claim_leftover`. Returns True for a file that
    does not exist, False for one that cannot be examined now.
    """
    try:
        age = _age_seconds(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    machine = facts.get("machine")
    is_of_this_machine = machine is not None and machine == machine_id()
    sees_lock = is_of_this_machine and is_on_local_disk(path)
    return _has_ended(age, _can_lock(path), sees_lock or is_gone(facts), seconds)


def lock_descriptor(descriptor: int) -> bool:
    """Lock an open file until it is closed. Return False on a file system without locks.

    Raises BlockingIOError when another process has the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _has_ended(age: float, is_free: bool | None, sees_lock: bool, seconds: float) -> bool:
    """Apply the rules of `claim_leftover`.

    `age` is in seconds. `is_free` is None if it is unknown whether the lock is free. `sees_lock` is
    True if this process would see the owner's lock.
    """
    if is_free is False:
        return False
    if is_free is True and sees_lock:
        return True
    # Without a limit the age is not looked at. It can be negative, because the clock of another
    # node can be ahead of this one's.
    return not seconds or age > seconds


def _can_lock(path: Path) -> bool | None:
    """Check that no process has a lock on the file `path`. None is unknown, as in `hold_lock`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # The lock is a shared one, so that concurrent checks do not disturb each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return False if isinstance(error, BlockingIOError) else None
    finally:
        os.close(descriptor)
    return True


def _age_seconds(path: Path) -> float:
    """Return the age by the clock of this machine, which can differ from the writer's clock."""
    return time.time() - path.lstat().st_mtime


def make_locked_folder(path_of: Callable[[str], Path], mode: int = 0o777) -> Path:
    """Make a new folder that this process has locked.

    `path_of` returns its path from the name of the owner, which is new at each try.
    """
    while True:
        folder = path_of(new_owner())
        local_disk.mkdir(folder, mode)
        # Before the lock was taken, another process can have claimed the folder as a leftover.
        if hold_lock(folder) is not False:
            return folder


def clear_drafts(folder: Path) -> None:
    """Delete the folders of unfinished files anywhere in `folder`.

    No other process must use `folder`. Raises TargetError when something is left.
    """
    for path in list(walk_tree(folder)):
        if DRAFTS in path.name and is_folder(path):
            local_disk.delete_folder(path)


@contextmanager
def locked_folder(parent: Path, start: str) -> Iterator[Path]:
    """Yield a new, locked folder in `parent`, whose name begins with `start`.

    Only this user can read it. It is deleted after the `with` block. Folders with such names whose
    processes were killed are deleted first.
    """
    for name in list_names(parent):
        if name.startswith(start) and re.fullmatch(OWNER, name[len(start) :]):
            with claim_leftover(parent / name, name, local_disk.ABANDONED_SECONDS) as is_abandoned:
                if is_abandoned:
                    local_disk.rmtree(parent / name)
    folder = make_locked_folder(lambda owner: parent / f"{start}{owner}", 0o700)
    try:
        yield folder
    finally:
        local_disk.rmtree(folder)
        release_lock(folder)
