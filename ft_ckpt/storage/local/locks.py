"""Locks of hidden files and folders: they show whether the process that made one is alive.

A lock ends with its process and is visible to every process and container of the machine. Where
locks give no information (processes of other machines, file systems without locks), the age
decides.
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

DRAFTS = ".ft_ckpt-file-"  # in the names of folders for unfinished files
_lock_descriptors: dict[str, int] = {}  # by path
_change = threading.Lock()


def hold_lock(path: Path) -> bool | None:
    """Lock the file or folder `path` until `release_lock`.

    Returns False if another process has it or `path` is missing, and None if that is unknown: the
    file system has no locks, or `path` cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return False if error.errno in (errno.ENOENT, errno.ELOOP) else None
    try:
        is_locked: bool | None = lock_descriptor(descriptor) or None
        # deleted by the previous holder
        if not os.path.samestat(path.lstat(), os.fstat(descriptor)):
            is_locked = False
    except OSError:
        is_locked = False
    if not is_locked:
        os.close(descriptor)
        return is_locked
    with _change:
        _lock_descriptors[str(path)] = descriptor
    return True


def release_lock(path: Path) -> None:
    """Release the lock that was taken at `path`, even if the file was moved since.

    Does nothing if it was not held.
    """
    with _change:
        descriptor = _lock_descriptors.pop(str(path), None)
    if descriptor is not None:
        with suppress(OSError):
            # a forked process may have the same lock, and live longer
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextmanager
def holding_lock(path: Path) -> Iterator[bool | None]:
    """Hold the lock on `path` while the block runs; yields the result of `hold_lock`."""
    is_locked = hold_lock(path)
    try:
        yield is_locked
    finally:
        if is_locked:
            release_lock(path)


@contextmanager
def claim_leftover(path: Path, owner: str, seconds: float) -> Iterator[bool]:
    """Lock the leftover of `owner` at `path` while the block runs.

    Yields False when it must not be deleted. It must not while another process has it locked;
    without lock information, or if another machine made it, also until it is `seconds` old (0: at
    once). On a network file system a lock is seen through the same mount only: there a process of
    this machine must be gone, too.
    """
    with holding_lock(path) as is_locked:
        try:
            age = _age_seconds(path)
        except OSError:
            yield False
            return
        yield _has_ended(age, is_locked, _sees_locks_of(owner, path), seconds)


def _sees_locks_of(owner: str, path: Path) -> bool:
    """Check whether a lock of `owner` on `path` is seen, or the owner is known to be gone."""
    if is_on_local_disk(path):
        return is_owner_of_this_machine(owner)
    return is_owner_gone(owner)


def has_ended(path: Path, facts: Mapping[str, Any], seconds: float) -> bool:
    """Check whether the process that keeps `path` locked has ended, without taking its lock.

    `facts` are the `process_facts` that the process recorded, with the machine None if it got no
    lock. The rule is that of `claim_leftover`. Returns True for a file that does not exist, False
    for one that cannot be examined now.
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
    """Lock an open file until it is closed; False on a file system without locks.

    Raises BlockingIOError when another has the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _has_ended(age: float, is_free: bool | None, is_local: bool, seconds: float) -> bool:
    """Check whether the holder of a lock has ended.

    The holder has ended if the lock is free and this machine sees it, or if there is no lock
    information and the mark is old enough.
    """
    if is_free is False:
        return False
    # without a limit the age says nothing: another node's clock may be ahead of this one's
    return (is_free is True and is_local) or not seconds or age > seconds


def _can_lock(path: Path) -> bool | None:
    """Check that no process has a lock on the file `path`; None if unknown, as in `hold_lock`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        # shared: concurrent checks do not disturb each other
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return False if isinstance(error, BlockingIOError) else None
    finally:
        os.close(descriptor)
    return True


def _age_seconds(path: Path) -> float:
    """Return the age by the clock of this machine, which may differ from the writer's."""
    return time.time() - path.lstat().st_mtime


def make_locked_folder(path_of: Callable[[str], Path], mode: int = 0o777) -> Path:
    """Make a new folder that this process has locked.

    `path_of` gives its path from the owner's name.
    """
    while True:
        folder = path_of(new_owner())
        local_disk.mkdir(folder, mode)
        # otherwise another process has just claimed it as a leftover
        if hold_lock(folder) is not False:
            return folder


def clear_drafts(folder: Path) -> None:
    """Delete leftover draft folders anywhere in `folder`, which no other process may use.

    Raises TargetError.
    """
    for path in list(walk_tree(folder)):
        if DRAFTS in path.name and is_folder(path):
            local_disk.delete_folder(path)


@contextmanager
def locked_folder(parent: Path, start: str) -> Iterator[Path]:
    """Yield a new, locked folder in `parent`, private to this user, whose name begins with `start`.

    Deleted afterwards. Folders of the same kind whose processes were killed are deleted first.
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
