"""Processes with a private disk: a mount namespace for each, as on nodes without a shared disk."""

import ctypes
import os
import socket
import subprocess
from pathlib import Path

_BOOT_ID = b"/proc/sys/kernel/random/boot_id"
_NEW_MOUNTS, _NEW_HOST_NAME = 0x20000, 0x4000000
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18


def can_mount() -> bool:
    """True if this user may create mount namespaces and mount in them."""
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def take_disk(place: Path, kept: Path | None = None) -> None:
    """Give this process, which must have one thread, a private disk at `place`: a tmpfs, or `kept`
    by a bind mount.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    place.mkdir(parents=True, exist_ok=True)
    _check(libc.unshare(_NEW_MOUNTS))
    _check(libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None))
    if kept is None:
        _check(libc.mount(b"none", os.fsencode(place), b"tmpfs", 0, None))
    else:
        kept.mkdir(parents=True, exist_ok=True)
        _check(libc.mount(os.fsencode(kept), os.fsencode(place), None, _BIND, None))


def take_machine_id(identity: Path) -> None:
    """Show the boot id in the file `identity` to this process, which has mounts of its own: as on
    another machine.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.mount(os.fsencode(identity), _BOOT_ID, None, _BIND, None))


def take_host_name(name: str) -> None:
    """Give this process a host name of its own, as on another machine."""
    _check(ctypes.CDLL(None, use_errno=True).unshare(_NEW_HOST_NAME))
    socket.sethostname(name)


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), "namespaces of mounts")
