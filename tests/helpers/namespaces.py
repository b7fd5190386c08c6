"""Processes with mounts of their own, as on nodes: a private disk, or a client of a shared one."""

import ctypes
import os
import socket
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NEW_MOUNTS, _NEW_HOST_NAME = 0x20000, 0x4000000
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_DETACH = 2


def can_mount() -> bool:
    """Check whether this user may create mount namespaces and mount in them."""
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def take_disk(place: Path, kept: Path | None = None) -> None:
    """Give this process, which must have one thread, a private disk at `place`.

    It is a tmpfs, or the folder `kept` by a bind mount.
    """
    place.mkdir(parents=True, exist_ok=True)
    _take_mounts()
    if kept is None:
        libc = ctypes.CDLL(None, use_errno=True)
        _check(libc.mount(b"none", os.fsencode(place), b"tmpfs", 0, None))
    else:
        kept.mkdir(parents=True, exist_ok=True)
        _bind(kept, place)


@contextmanager
def on_node(number: int, client: Path, place: Path) -> Iterator[None]:
    """Put the calling thread on the node of that number, which has the folder `client` at `place`.

    Threads that it starts in the block or later are there, too. Other threads of this process stay
    where they are. A process stays on its first node, whose machine id is its own, and may take
    other clients there.
    """
    _enter_node(number, place.parent)
    place.mkdir(exist_ok=True)
    _bind(client, place)
    try:
        yield
    finally:
        _check(ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(place), _DETACH))


@cache
def _enter_node(number: int, folder: Path) -> None:
    _take_mounts()
    identity = folder / f"boot id of node {number}"
    identity.write_text(f"{uuid.uuid5(uuid.NAMESPACE_DNS, str(identity))}\n")
    take_machine_id(identity)


def take_machine_id(identity: Path) -> None:
    """Show the boot id in the file `identity` to this process, as on another machine.

    The process must have mounts of its own.
    """
    _bind(identity, _BOOT_ID)


def take_host_name(name: str) -> None:
    """Give this process a host name of its own, as on another machine."""
    _check(ctypes.CDLL(None, use_errno=True).unshare(_NEW_HOST_NAME))
    socket.sethostname(name)


def _take_mounts() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_NEW_MOUNTS))
    _check(libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None))


def _bind(path: Path, place: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.mount(os.fsencode(path), os.fsencode(place), None, _BIND, None))


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), "namespaces of mounts")
