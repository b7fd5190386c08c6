"""Folders that are mounted through FUSE: a folder of this machine, or clients of a network file
system.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from store_servers import free_port

_MAY_MOUNT = os.geteuid() == 0 and Path("/dev/fuse").exists()
needs_fuse = pytest.mark.skipif(
    not (_MAY_MOUNT and shutil.which("bindfs")), reason="bindfs and the right to mount"
)
needs_gluster = pytest.mark.skipif(
    not (_MAY_MOUNT and shutil.which("glusterfsd")), reason="GlusterFS and the right to mount"
)
_START_SECONDS = 20

# A volume of one brick, and a client of it with the caches that GlusterFS has by default.
_BRICK = """
volume posix
  type storage/posix
  option directory {brick}
end-volume
volume brick
  type features/locks
  subvolumes posix
end-volume
volume server
  type protocol/server
  option transport-type tcp
  option transport.socket.bind-address 127.0.0.1
  option transport.socket.listen-port {port}
  option auth.addr.brick.allow 127.0.0.1
  subvolumes brick
end-volume
"""
_CLIENT = """
volume client
  type protocol/client
  option transport-type tcp
  option remote-host 127.0.0.1
  option remote-port {port}
  option remote-subvolume brick
end-volume
volume write-behind
  type performance/write-behind
  subvolumes client
end-volume
volume md-cache
  type performance/md-cache
  option md-cache-timeout {cache_seconds}
  subvolumes write-behind
end-volume
"""


@contextmanager
def mounted(real: Path, mount: Path, *options: str) -> Iterator[Path]:
    """`real`, mounted at `mount` with these options of bindfs; skips the test where that is
    refused.
    """
    real.mkdir()
    mount.mkdir()
    done = subprocess.run(
        ["bindfs", *options, real, mount], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        yield mount
    finally:
        _unmount(mount)


@contextmanager
def gluster_clients(folder: Path, count: int, cache_seconds: int = 1) -> Iterator[list[Path]]:
    """The mount points of `count` clients of one GlusterFS volume below `folder`.

    A client may show attributes and entries that are `cache_seconds` old; GlusterFS's own default
    is 1.
    """
    brick = folder / "brick"
    brick.mkdir()
    port = free_port()
    facts = {"brick": brick, "port": port, "cache_seconds": cache_seconds}
    for name, text in (("server", _BRICK), ("client", _CLIENT)):
        (folder / f"{name}.vol").write_text(text.format(**facts))
    caches = [f"--{kind}-timeout={cache_seconds}" for kind in ("attribute", "entry", "negative")]
    with ExitStack() as stack:
        stack.enter_context(_running(folder, "server", "glusterfsd"))
        # a client that cannot connect tries again after seconds only
        _wait(partial(_is_listening, port))
        clients = []
        for number in range(count):
            mount = folder / f"client-{number}"
            mount.mkdir()
            stack.enter_context(_running(folder, "client", "glusterfs", *caches, str(mount)))
            stack.callback(_unmount, mount)
            _wait(mount.is_mount)
            clients.append(mount)
        yield clients


@contextmanager
def _running(folder: Path, volume: str, program: str, *arguments: str) -> Iterator[None]:
    """A process of GlusterFS in the foreground, ended by its id."""
    command = [
        program,
        "--no-daemon",
        f"--volfile={folder / volume}.vol",
        f"--log-file={folder / volume}.log",
    ]
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=_START_SECONDS)


def _unmount(mount: Path) -> None:
    subprocess.run(["umount", "-l", mount], check=True)


def _wait(until: Callable[[], object]) -> None:
    """Return when `until` raises no OSError any more and is true."""
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        with suppress(OSError):
            if until():
                return
        time.sleep(0.02)
    pytest.fail(f"GlusterFS is not there after {_START_SECONDS} s")


def _is_listening(port: int) -> bool:
    socket.create_connection(("127.0.0.1", port), timeout=1).close()
    return True
