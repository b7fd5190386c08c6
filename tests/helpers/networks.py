"""Nodes of a cluster on one switch, each with namespaces of the network and of mounts.

Needs root or a user namespace.
"""

import ctypes
import os
import shlex
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LINK, SWITCH = "eth0", "10.77.0.254"
_NEW_NETWORK = 0x40000000
_KINDS = ("user", "net", "mnt")  # in joining order: the first gives the right to join the others
_ALONE = (("-n", "-m"), ("-U", "-r", "-n", "-m"))  # as root, and as anybody


@dataclass(frozen=True)
class Cluster:
    """The ids of processes that keep the namespaces alive: of the switch, and of each node."""

    switch: int  # connects all nodes
    nodes: tuple[int, ...]


def address_of(node: int) -> str:
    """Return the address of a node among the others."""
    return f"10.77.0.{node + 1}"


@cache
def why_no_cluster() -> str:
    """Return why this user cannot run a cluster; "" if it is possible."""
    try:
        with running_cluster(1, Path("/mnt")):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"needs namespaces of networks and mounts, and virtual links: {error}"


@contextmanager
def running_cluster(size: int, disk: Path, kept: Path | None = None) -> Iterator[Cluster]:
    """Run `size` nodes, each with a private tmpfs at `disk`.

    The first has the folder `kept` there instead, if it is given.
    """
    with ExitStack() as stack:
        switch = stack.enter_context(_keeper(["unshare", *_rights()]))
        _run_in(switch, "ip link set lo up && ip link add sw type bridge")
        _run_in(switch, f"ip addr add {SWITCH}/24 dev sw && ip link set sw up")
        nodes = []
        for number in range(size):
            node = stack.enter_context(_keeper([*_entering(switch), "unshare", "-n", "-m"]))
            _run_in(switch, f"ip link add node{number} type veth peer name {LINK} netns {node}")
            _run_in(switch, f"ip link set node{number} master sw up")
            _run_in(node, f"ip link set lo up && ip addr add {address_of(number)}/24 dev {LINK}")
            _run_in(node, f"ip link set {LINK} up")
            source = ["-t", "tmpfs", "none"]
            if kept is not None and number == 0:
                source = ["--bind", str(kept)]
            _run_in(node, shlex.join(["mount", *source, str(disk)]))
            nodes.append(node)
        yield Cluster(switch, tuple(nodes))


def join_node(keeper: int) -> None:
    """Move this process, which must have one thread, into the node of the process `keeper`."""
    folder, files = Path.cwd(), []
    for kind in _KINDS:
        path = f"/proc/{keeper}/ns/{kind}"
        if Path(path).readlink() != Path(f"/proc/self/ns/{kind}").readlink():
            # open all of them first: a path may be unreachable after a join
            files.append(os.open(path, os.O_RDONLY))
    for file in files:
        _join(file, 0)
        os.close(file)
    os.chdir(folder)


@contextmanager
def in_network_of(keeper: int) -> Iterator[None]:
    """Create this thread's sockets in the network of the process `keeper` during the block.

    Needs root.
    """
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    other = os.open(f"/proc/{keeper}/ns/net", os.O_RDONLY)
    _join(other, _NEW_NETWORK)
    try:
        yield
    finally:
        _join(own, _NEW_NETWORK)
        os.close(own)
        os.close(other)


def cut_link() -> None:
    """Cut the network link of the node that this process is on."""
    subprocess.run(["ip", "link", "set", LINK, "down"], check=True)


def _join(file: int, kind: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for _ in range(100):
        if not libc.setns(file, kind):
            return
        time.sleep(0.01)  # a thread that has ended may still be counted
    raise OSError(ctypes.get_errno(), "setns")


@cache
def _rights() -> tuple[str, ...]:
    """Return the options of `unshare` that work for this user. Raises OSError if none do."""
    for rights in _ALONE:
        command = ["unshare", *rights, "true"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return rights
    raise OSError("unshare is not permitted")


@contextmanager
def _keeper(command: Sequence[str]) -> Iterator[int]:
    """Run an idle process in the namespaces that `command` creates; it ends with this one."""
    idle, pipe = [*command, "sh", "-c", "echo ready; exec cat"], subprocess.PIPE
    with subprocess.Popen(idle, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if process.stdout.readline() != b"ready\n":
            raise OSError(process.stderr.read().decode())
        try:
            yield process.pid
        finally:
            process.kill()


def _entering(keeper: int) -> list[str]:
    """Return the command that runs another one in the namespaces of the process `keeper`."""
    is_own = Path(f"/proc/{keeper}/ns/user").readlink() == Path("/proc/self/ns/user").readlink()
    user = [] if is_own else ["-U", "--preserve-credentials"]
    return ["nsenter", "-t", str(keeper), *user, "-n", "-m"]


def _run_in(keeper: int, script: str) -> None:
    subprocess.run([*_entering(keeper), "sh", "-c", script], check=True, capture_output=True)
