"""Locks of hidden files and folders: show whether the process that made one still lives.

A lock ends with its process, however that ends, and every process of the machine sees it, whatever container it is in.
Where a lock says nothing (of another machine's processes, on a file system without locks) time has to.
"""

import errno
import fcntl
import os
import re
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OWNER = r".+-\d+-[0-9a-f]{8}"  # what `new_owner` makes, and ft_ckpt 0.1.0 made
_MACHINE = re.compile(r".*-(?P<machine>[0-9a-f]{8})-\d+-[0-9a-f]{8}", re.DOTALL)
_held: dict[str, int] = {}  # path -> descriptor of its lock
_change = threading.Lock()


def new_owner() -> str:
    """The suffix of a new hidden name: host, machine, process, random digits. At most 60 bytes, in ASCII."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())[:20]  # for whoever reads it; the machine tells apart
    return f"{host}-{_machine_mark()}-{os.getpid()}-{secrets.token_hex(4)}"


def machine_id() -> str | None:
    """The boot id, equal for all containers of this machine, which see each other's locks; None if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def hold_lock(path: Path) -> bool | None:
    """Lock the file or folder `path` until `release_lock`; False when another has the lock, or it is gone.

    None where locks say nothing: on a file system without them, or where it may not be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return False if error.errno in (errno.ENOENT, errno.ELOOP) else None
    try:
        mine: bool | None = lock_descriptor(descriptor) or None
        if not os.path.samestat(path.lstat(), os.fstat(descriptor)):  # deleted by whoever had the lock before
            mine = False
    except OSError:
        mine = False
    if not mine:
        os.close(descriptor)
        return mine
    with _change:
        _held[str(path)] = descriptor
    return True


def release_lock(path: Path) -> None:
    """Release the lock on `path`, wherever it was moved since; nothing happens when it was not held."""
    with _change:
        descriptor = _held.pop(str(path), None)
    if descriptor is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may have the same lock, and live longer
        except OSError:
            pass
        finally:
            os.close(descriptor)


@contextmanager
def holding_lock(path: Path) -> Iterator[bool | None]:
    """Hold the lock on `path` while the block runs; yields the answer of `hold_lock`."""
    mine = hold_lock(path)
    try:
        yield mine
    finally:
        if mine:
            release_lock(path)


@contextmanager
def claim_leftover(path: Path, owner: str, seconds: float) -> Iterator[bool]:
    """Lock the leftover of `owner` at `path` while the block runs; yields False when it has to be left alone.

    It is left alone while another process has it locked; where locks say nothing, and if another machine made it, also
    until it is `seconds` old.
    """
    with holding_lock(path) as mine:
        yield _has_ended(_age_seconds(path), mine, _is_of_here(owner), seconds)


def has_ended(path: Path, machine: str | None, seconds: float) -> bool:
    """Whether the process that locked the file `path` while it lives has ended, without taking over its lock.

    `machine` is the `machine_id` it wrote down, None where it got no lock. The rule is that of `claim_leftover`; a file
    that is not there has nobody.
    """
    age = _age_seconds(path)
    return age is None or _has_ended(age, _can_lock(path), machine is not None and machine == machine_id(), seconds)


def process_facts() -> dict[str, Any]:
    """What identifies this process for `is_gone`: PID, start time, PID namespace, machine and host name."""
    try:
        namespace: str | None = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = None
    own = {"host": socket.gethostname(), "machine": machine_id(), "namespace": namespace}
    return {**own, "pid": os.getpid(), "started": _start_time(os.getpid())}


def is_gone(facts: Mapping[str, Any]) -> bool:
    """Whether the process of these `process_facts` is known to have ended, which only its own machine can tell."""
    mine, pid = process_facts(), facts.get("pid")
    of_here = all(facts.get(name) == mine[name] for name in ("host", "machine", "namespace"))
    if not of_here or None in mine.values() or not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's
        pass
    return _start_time(pid) not in (None, facts.get("started"))


def _start_time(pid: int) -> str | None:
    """When a process began, in clock ticks since the boot; "" for a zombie, None if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return "" if fields[0] == "Z" else fields[19]


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


def _has_ended(age: float | None, is_free: bool | None, is_of_here: bool, seconds: float) -> bool:
    """The one rule: its lock is free and this machine sees its locks, or the lock says nothing and time has passed."""
    if is_free is False or age is None:
        return False
    return (is_free is True and is_of_here) or age > seconds


def _can_lock(path: Path) -> bool | None:
    """Whether nobody has a lock on the file `path`; None where locks say nothing, as in `hold_lock`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that ask are not in each other's way
    except OSError as error:
        return False if isinstance(error, BlockingIOError) else None
    finally:
        os.close(descriptor)
    return True


def _machine_mark() -> str:
    """A hash of the machine id, eight hex digits."""
    return f"{zlib.crc32((machine_id() or socket.gethostname()).encode()):08x}"


def _is_of_here(owner: str) -> bool:
    named = _MACHINE.fullmatch(owner)
    return named is not None and named["machine"] == _machine_mark()


def _age_seconds(path: Path) -> float | None:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return None
