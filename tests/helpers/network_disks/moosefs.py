"""MooseFS: a master, a chunk server, and clients.

A chunk server takes no loopback address, so it uses one of this machine's others.
"""

import errno
import ipaddress
import socket
from pathlib import Path

import psutil
from store_servers import free_port

from network_disks.disk import NetworkDisk

_EMPTY_METADATA = "MFSM NEW"
_EXPORTS = """
* / rw,alldirs,admin,maproot=0:0
"""
_MASTER = """
WORKING_USER = root
WORKING_GROUP = root
NICE_LEVEL = 0
DATA_PATH = {folder}/master
EXPORTS_FILENAME = {folder}/exports.cfg
TOPOLOGY_FILENAME = {folder}/topology.cfg
MATOML_LISTEN_HOST = 127.0.0.1
MATOML_LISTEN_PORT = {logger_port}
MATOCS_LISTEN_HOST = {address}
MATOCS_LISTEN_PORT = {chunk_master_port}
MATOCL_LISTEN_HOST = 127.0.0.1
MATOCL_LISTEN_PORT = {port}
"""
_CHUNK_SERVER = """
WORKING_USER = root
WORKING_GROUP = root
NICE_LEVEL = 0
DATA_PATH = {folder}/chunk-server
HDD_CONF_FILENAME = {folder}/disks.cfg
HDD_LEAVE_SPACE_DEFAULT = 1MiB
MASTER_HOST = {address}
MASTER_PORT = {chunk_master_port}
MASTER_RECONNECTION_DELAY = 1
CSSERV_LISTEN_HOST = {address}
CSSERV_LISTEN_PORT = {chunk_port}
"""


class MooseFS(NetworkDisk):
    name = "MooseFS"
    programs = ("mfsmaster", "mfschunkserver", "mfsmount", "mfssetquota")
    full_error = errno.EDQUOT

    @classmethod
    def why_absent(cls) -> str:
        reason = super().why_absent()
        if not reason and _own_address() is None:
            return f"{cls.name}: needs a network address besides loopback"
        return reason

    def prepare(self) -> None:
        self._port, self._chunk_port = free_port(), free_port()
        facts = {
            "folder": self.folder,
            "address": _own_address(),
            "port": self._port,
            "chunk_port": self._chunk_port,
            "chunk_master_port": free_port(),
            "logger_port": free_port(),
        }
        for name in ("master", "chunk-server", "chunks"):
            (self.folder / name).mkdir()
        texts = {
            "master.cfg": _MASTER,
            "chunk-server.cfg": _CHUNK_SERVER,
            "exports.cfg": _EXPORTS,
            "topology.cfg": "",
            "disks.cfg": "~{folder}/chunks\n",
            "master/metadata.mfs": _EMPTY_METADATA,
        }
        for name, text in texts.items():
            (self.folder / name).write_text(text.format(**facts))

    def begin_server(self) -> None:
        # -a: what a killed master has not written to its metadata is read from its log of changes
        self.begin_process("mfsmaster", "-f", "-a", "-c", self.folder / "master.cfg")
        self.await_listener(self._port)
        self.begin_process("mfschunkserver", "-f", "-c", self.folder / "chunk-server.cfg")

    def client_command(self, mount: Path, cache_seconds: int) -> list[object]:
        command: list[object] = ["mfsmount", "-f", "-H", "127.0.0.1", "-P", self._port]
        for kind in ("attr", "entry", "direntry", "negentry"):
            command += ["-o", f"mfs{kind}cacheto={cache_seconds}"]
        return [*command, mount]

    def limit_size(self, mount: Path, size_bytes: int) -> None:
        self.run("mfssetquota", "-S", size_bytes, mount)


def _own_address() -> str | None:
    """Return an address of this machine that is not loopback; None without one."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET:
                number = ipaddress.ip_address(address.address)
                if not number.is_loopback:
                    return str(number)
    return None
