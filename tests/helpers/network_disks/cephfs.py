"""CephFS: a monitor, a store and a metadata server, and clients through FUSE."""

import errno
import os
import uuid
from pathlib import Path

from store_servers import free_port

from network_disks.disk import NetworkDisk

_CONFIGURATION = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{port}/0
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv4 = true
auth cluster required = none
auth service required = none
auth client required = none
run dir = {folder}
admin socket = ""
pid file = {folder}/$name.pid
log file = {folder}/$name.log
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
osd crush chooseleaf type = 0
osd pool default pg num = 4
osd pool default pg autoscale mode = off
mon max pg per osd = 2000
[mon.a]
mon data = {folder}/mon
mon initial members = a
mon data avail warn = 2
mon data avail crit = 1
[osd.0]
osd data = {folder}/osd
osd objectstore = bluestore
bluestore block size = {disk_bytes}
osd memory target = 1073741824
[mds.a]
mds data = {folder}/mds
# a client that was killed: the others wait for what it may have cached
mds cap revoke eviction timeout = 3
[client]
client quota df = true
# else it mounts itself again and again, by processes that outlive it
client try dentry invalidate = true
"""
_DISK_BYTES = 8 << 30
_OWNER = ("--setuser", "root", "--setgroup", "root")


class CephFS(NetworkDisk):
    name = "CephFS"
    programs = ("ceph", "ceph-mon", "ceph-osd", "ceph-mds", "ceph-fuse", "monmaptool")
    has_cache_seconds = False
    full_error = errno.EDQUOT

    def __init__(self, folder: Path, size_bytes: int | None = None) -> None:
        # without a manager, which counts what is free, clients learn of a quota alone
        super().__init__(folder, _DISK_BYTES if size_bytes is None else size_bytes)

    def prepare(self) -> None:
        self._port, identity = free_port(), str(uuid.uuid4())
        self._disk = str(uuid.uuid4())
        for name in ("mon", "osd", "mds"):
            (self.folder / name).mkdir()
        facts = {"folder": self.folder, "port": self._port, "fsid": identity}
        text = _CONFIGURATION.format(**facts, disk_bytes=_DISK_BYTES)
        (self.folder / "ceph.conf").write_text(text)
        table = self.folder / "monmap"
        monitor = ["--fsid", identity, "--addv", "a", f"[v2:127.0.0.1:{self._port}]"]
        self.run("monmaptool", "--create", "--clobber", *monitor, table)
        self._ceph("ceph-mon", "--mkfs", "-i", "a", "--monmap", table, *_OWNER)

    def begin_server(self) -> None:
        self._begin_daemon("ceph-mon", "-i", "a")
        self.await_listener(self._port)
        is_new = not (self.folder / "osd" / "fsid").exists()
        if is_new:
            self._ceph("ceph", "osd", "new", self._disk)
            self._ceph("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", self._disk, *_OWNER)
        self._begin_daemon("ceph-osd", "-i", "0")
        if is_new:
            for pool in ("names", "contents"):
                self._ceph("ceph", "osd", "pool", "create", pool, 4)
            self._ceph("ceph", "fs", "new", "disk", "names", "contents")
        self._begin_daemon("ceph-mds", "-i", "a")
        self.await_true(lambda: "up:active" in self._ceph("ceph", "mds", "stat"), "metadata server")

    def client_command(self, mount: Path, cache_seconds: int) -> list[object]:
        return ["ceph-fuse", "-f", "-c", self.folder / "ceph.conf", mount]

    def limit_size(self, mount: Path, size_bytes: int) -> None:
        os.setxattr(mount, "ceph.quota.max_bytes", str(size_bytes).encode())

    def _ceph(self, command: str, *arguments: object) -> str:
        return self.run(command, "-c", self.folder / "ceph.conf", *arguments)

    def _begin_daemon(self, command: str, *arguments: object) -> None:
        self.begin_process(command, "-c", self.folder / "ceph.conf", *arguments, *_OWNER, "-f")
