"""Processes: who wrote a file, and whether that process has ended.

A process is identified by its number, its start, and its machine, so that another one that got the
same number later is not taken for it.
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

OWNER = r".+-\d+-[0-9a-f]{8}"  # a result of `new_owner`, also of ft_ckpt 0.1.0
_OWNER_PARTS = re.compile(
    r"(?P<start>.*)-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}", re.DOTALL
)


def new_owner() -> str:
    """Make the suffix of a new hidden name: host, machine, process, random digits.

    At most 60 bytes, in ASCII.
    """
    return f"{_host_mark()}-{_machine_mark()}-{os.getpid()}-{secrets.token_hex(4)}"


def machine_id() -> str | None:
    """Return the boot id, equal for all containers of this machine, which see each other's locks.

    None if unknown.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def is_owner_of_this_machine(owner: str) -> bool:
    """Check whether this result of `new_owner` is of a process of this machine."""
    match = _OWNER_PARTS.fullmatch(owner)
    return match is not None and match["machine"] == _machine_mark()


def is_owner_gone(owner: str) -> bool:
    """Check whether the process of this result of `new_owner` has ended; False if unknown.

    Containers of one machine have several host names, and do not see each other's processes.
    """
    match = _OWNER_PARTS.fullmatch(owner)
    if match is None or match["machine"] != _machine_mark():
        return False
    return match["start"].endswith(_host_mark()) and not _is_running(int(match["pid"]))


def process_facts() -> dict[str, Any]:
    """Return the identity of this process for `is_gone`.

    Its PID, start time, PID namespace, machine and host name.
    """
    try:
        namespace: str | None = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = None
    machine = {"host": socket.gethostname(), "machine": machine_id(), "namespace": namespace}
    return {**machine, "pid": os.getpid(), "started": _start_time(os.getpid())}


def is_gone(facts: Mapping[str, Any]) -> bool:
    """Check whether the process of these `process_facts` has ended.

    False if unknown, as for one of another machine.
    """
    pid = facts.get("pid")
    if not is_of_this_machine(facts) or not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's
        pass
    return _start_time(pid) not in (None, facts.get("started"))


def is_of_this_machine(facts: Mapping[str, Any]) -> bool:
    """Check whether these `process_facts` are of a process that this one could see.

    False if unknown.
    """
    identity = process_facts()
    same = all(facts.get(name) == identity[name] for name in ("host", "machine", "namespace"))
    return same and None not in identity.values()


def steady_seconds() -> float:
    """Return the seconds since the boot of the machine, equal for all its processes.

    They go on while it is suspended.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _start_time(pid: int) -> str | None:
    """Return a process's start time in clock ticks since boot; "" for a zombie, None if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # behind the name, which may have spaces
    return "" if fields[0] == "Z" else fields[19]


def _is_running(pid: int) -> bool:
    """Check whether there is a process of this number, which may be another user's.

    A zombie has ended.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return _start_time(pid) != ""


def _host_mark() -> str:
    """Return the host name in at most 20 characters; containers of one machine have several."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())[:20]


def _machine_mark() -> str:
    """Return a hash of the machine id, eight hex digits."""
    return f"{zlib.crc32((machine_id() or socket.gethostname()).encode()):08x}"
