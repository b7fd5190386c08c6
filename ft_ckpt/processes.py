"""Tells which process wrote a file, and whether that process has ended.

A process is identified by its number, its start time and its machine. The number alone would not
do, because a later process may get the same number.
"""

import os
import re
import secrets
import socket
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# matches a result of `new_owner`, also one of ft_ckpt 0.1.0
OWNER = r".+-\d+-[0-9a-f]{8}"
_OWNER_PARTS = re.compile(
    r"(?P<start>.*)-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}", re.DOTALL
)


def new_owner() -> str:
    """Return the suffix of a new hidden file, which names this process.

    It is host-machine-process-random, in at most 60 bytes of ASCII. For example
    "node7-1a2b3c4d-4711-90abcdef".
    """
    return f"{_host_mark()}-{_machine_mark()}-{os.getpid()}-{secrets.token_hex(4)}"


def machine_id() -> str | None:
    """Return the boot id of this machine; None if unknown.

    It is the same in all containers of the machine, which see the locks of each other.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def is_owner_of_this_machine(owner: str) -> bool:
    """Check whether a process of this machine has made `owner`, a result of `new_owner`."""
    match = _OWNER_PARTS.fullmatch(owner)
    return match is not None and match["machine"] == _machine_mark()


def is_owner_gone(owner: str) -> bool:
    """Check whether the process that made `owner` (by `new_owner`) has ended; False if unknown.

    It is unknown for another host name on the same machine: that is another container, whose
    processes this one does not see.
    """
    match = _OWNER_PARTS.fullmatch(owner)
    if match is None or match["machine"] != _machine_mark():
        return False
    return match["start"].endswith(_host_mark()) and not _is_running(int(match["pid"]))


def process_facts() -> dict[str, Any]:
    """Return the identity of this process, which another process passes to `is_gone`.

    It has the process id ("pid"), the start time, the namespace of process ids, the machine and the
    host name.
    """
    try:
        namespace: str | None = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = None
    machine = {"host": socket.gethostname(), "machine": machine_id(), "namespace": namespace}
    return {**machine, "pid": os.getpid(), "started": _start_time(os.getpid())}


def is_gone(facts: Mapping[str, Any]) -> bool:
    """Check whether the process has ended that `facts` (a result of `process_facts`) identifies.

    Returns False if this is unknown, for example for a process of another machine.
    """
    pid = facts.get("pid")
    if not is_of_this_machine(facts) or not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # a process of another user
        pass
    return _start_time(pid) not in (None, facts.get("started"))


def is_of_this_machine(facts: Mapping[str, Any]) -> bool:
    """Check whether `facts` identifies a process that this process could see; False if unknown."""
    identity = process_facts()
    same = all(facts.get(name) == identity[name] for name in ("host", "machine", "namespace"))
    return same and None not in identity.values()


def steady_seconds() -> float:
    """Return the seconds since the boot of the machine, also those while it was suspended.

    All processes of the machine get the same value.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot.

    Returns "" for a zombie, which has ended, and None if unknown.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the fields after the name, which may have spaces
    return "" if fields[0] == "Z" else fields[19]


def _is_running(pid: int) -> bool:
    """Check whether the process `pid` runs, also one of another user. A zombie does not run."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return _start_time(pid) != ""


def _host_mark() -> str:
    """Return the host name in at most 20 characters. Each container of a machine has its own."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())[:20]


def _machine_mark() -> str:
    """Return a hash of the machine id, eight hex digits."""
    return f"{zlib.crc32((machine_id() or socket.gethostname()).encode()):08x}"
