"""The base of the network file systems: a server on loopback, its clients, and their processes."""

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import psutil
import pytest

MAY_MOUNT = os.geteuid() == 0 and Path("/dev/fuse").exists()
_START_SECONDS = 60
_END_SECONDS = 20
_DETACH = 2  # MNT_DETACH of umount2
_LOG_CHARACTERS = 2000
DISK = TypeVar("DISK", bound="NetworkDisk")


@dataclass(frozen=True)
class _Client:
    mount: Path
    process: "subprocess.Popen[bytes]"


class NetworkDisk(ABC):
    """One file system: its server runs while the block runs, with data and logs below `folder`.

    `size_bytes`: how much it stores; then writing fails with `full_error`. Entering skips the test
    where the programs are missing.
    """

    name: ClassVar[str]
    programs: ClassVar[tuple[str, ...]]
    # false: clients cache what the server lets them cache, and it recalls that before a change
    has_cache_seconds: ClassVar[bool] = True
    full_error: ClassVar[int]  # of a write when nothing more can be stored

    def __init__(self, folder: Path, size_bytes: int | None = None) -> None:
        self.folder, self.size_bytes = folder, size_bytes
        self._servers: list[subprocess.Popen[bytes]] = []
        self._clients: list[_Client] = []
        self._mounts: list[Path] = []  # of the server, not of a client

    @classmethod
    def why_absent(cls) -> str:
        """Return why this file system cannot run on this machine; "" if it can."""
        if not MAY_MOUNT:
            return f"{cls.name}: needs /dev/fuse and the right to mount"
        missing = [program for program in cls.programs if shutil.which(program) is None]
        return f"{cls.name}: {', '.join(missing)} not installed" if missing else ""

    @classmethod
    def needed(cls) -> pytest.MarkDecorator:
        """Return a mark that skips a test where this file system cannot run."""
        return pytest.mark.skipif(bool(cls.why_absent()), reason=cls.why_absent())

    def __enter__(self: DISK) -> DISK:
        if reason := self.why_absent():
            pytest.skip(reason)
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.prepare()
            self.start_server()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in range(len(self._clients)):
            self.unmount_client(number)
        self.stop_server(signal.SIGKILL)
        for mount in self._mounts:
            _detach(mount)

    @property
    def server_pids(self) -> list[int]:
        """The processes of the server, and their children."""
        pids = []
        for server in self._servers:
            pids += [server.pid, *(child.pid for child in _children(server.pid))]
        return pids

    def start_server(self) -> None:
        """Start the server, also after `stop_server`, with its data; return when it answers."""
        self.begin_server()

    def stop_server(self, number: int = signal.SIGTERM) -> None:
        """End the server's processes by a signal, the last one first; clients stay mounted."""
        while self._servers:
            server = self._servers.pop()
            children = _children(server.pid)
            server.send_signal(number)
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.send_signal(number)
            _end(server)
            psutil.wait_procs(children, _END_SECONDS)

    @contextmanager
    def server_away(self, number: int = signal.SIGTERM) -> Iterator[None]:
        """Stop the server, and start it again after the block."""
        self.stop_server(number)
        try:
            yield
        finally:
            self.start_server()

    def clients(self, count: int, cache_seconds: int = 1) -> list[Path]:
        """Mount `count` further clients; return their mount points.

        Each may show attributes, entries and the absence of names that are `cache_seconds` old.
        """
        return [self.mount_client(cache_seconds) for _ in range(count)]

    def mount_client(self, cache_seconds: int = 1) -> Path:
        """Mount one further client; return its mount point, see `clients`."""
        number = len(self._clients)
        mount = self.folder / f"client-{number}"
        mount.mkdir()
        command = self.client_command(mount, cache_seconds)
        process = self._begin(f"client-{number}", command)
        self._clients.append(_Client(mount, process))
        self.await_true(mount.is_mount, f"client {number}")
        if number == 0 and self.size_bytes is not None:
            self.limit_size(mount, self.size_bytes)
        # a client may be mounted before it is connected with a server that has space
        self.await_true(lambda: os.statvfs(mount).f_blocks, f"client {number}")
        return mount

    def client_pid(self, number: int) -> int:
        return self._clients[number].process.pid

    def kill_client(self, number: int) -> None:
        """Kill the process of a client, and those that it has started.

        Its mount point stays and answers ENOTCONN.
        """
        process = self._clients[number].process
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_END_SECONDS)

    def unmount_client(self, number: int) -> None:
        self.kill_client(number)
        _detach(self._clients[number].mount)

    @abstractmethod
    def prepare(self) -> None:
        """Write the settings below `folder`, once."""

    @abstractmethod
    def begin_server(self) -> None:
        """Begin the processes of the server; return when it answers."""

    @abstractmethod
    def client_command(self, mount: Path, cache_seconds: int) -> Sequence[object]:
        """Return the command of a client in the foreground."""

    def limit_size(self, mount: Path, size_bytes: int) -> None:  # noqa: B027 - a data_folder may do
        """Limit what is stored, through a client that has just been mounted at `mount`."""

    def data_folder(self, name: str) -> Path:
        """Make a folder below `folder` for the server's data, of at most `size_bytes`."""
        folder = self.folder / name
        folder.mkdir()
        if self.size_bytes is not None:
            size = f"size={self.size_bytes}"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", folder], check=True)
            self._mounts.append(folder)
        return folder

    def begin_process(self, program: str, *arguments: object) -> None:
        """Begin a process of the server, in the foreground."""
        self._servers.append(self._begin(program, [program, *arguments]))

    def run(self, *command: object) -> str:
        """Run one of the file system's commands; return its output."""
        line = [str(argument) for argument in command]
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": _START_SECONDS}
        result = subprocess.run(line, check=False, **options)
        if result.returncode:
            pytest.fail(f"{self.name}: {' '.join(line)}: {result.stdout}{result.stderr}")
        return str(result.stdout)

    def await_listener(self, port: int) -> None:
        self.await_true(lambda: _is_listening(port), f"port {port}")

    def await_true(self, is_so: Callable[[], Any], what: str) -> None:
        """Return when `is_so` raises no OSError any more and is true."""
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            with suppress(OSError):
                if is_so():
                    return
            time.sleep(0.02)
        pytest.fail(f"{self.name}: no {what} after {_START_SECONDS} s\n{self._logs()}")

    def _begin(self, name: str, command: Sequence[object]) -> "subprocess.Popen[bytes]":
        line = [str(argument) for argument in command]
        # the settings of clients of a test are not for these
        variables = os.environ.items()
        environment = {name: value for name, value in variables if not name.startswith("AWS_")}
        # its own session: a signal to the group of a test, such as Ctrl-C, would end it too early
        with (self.folder / f"{name}.out").open("ab") as output:
            return subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
            )

    def _logs(self) -> str:
        texts = []
        for log in sorted(self.folder.glob("*.out")):
            texts.append(f"{log.name}: {log.read_text(errors='replace')[-_LOG_CHARACTERS:]}")
        return "\n".join(texts)


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _children(pid: int) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return children


def _is_listening(port: int) -> bool:
    socket.create_connection(("127.0.0.1", port), timeout=1).close()
    return True


def _detach(mount: Path) -> None:
    """Unmount without a request to the server, which may be gone."""
    ctypes.CDLL(None).umount2(os.fsencode(mount), _DETACH)
