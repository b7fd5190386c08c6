"""GlusterFS: a volume of one brick, and clients with the caches that it has by default."""

import errno
from pathlib import Path

from store_servers import free_port

from network_disks.disk import NetworkDisk

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
  option ping-timeout 10
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


class GlusterFS(NetworkDisk):
    name = "GlusterFS"
    programs = ("glusterfsd", "glusterfs")
    full_error = errno.ENOSPC

    def prepare(self) -> None:
        self._port = free_port()
        brick = self.data_folder("brick")
        (self.folder / "server.vol").write_text(_BRICK.format(brick=brick, port=self._port))

    def begin_server(self) -> None:
        volume, log = self.folder / "server.vol", self.folder / "server.log"
        self.begin_process("glusterfsd", "--no-daemon", f"--volfile={volume}", f"--log-file={log}")
        # a client that cannot connect tries again after seconds only
        self.await_listener(self._port)

    def client_command(self, mount: Path, cache_seconds: int) -> list[object]:
        volume = self.folder / f"client-{cache_seconds}.vol"
        volume.write_text(_CLIENT.format(port=self._port, cache_seconds=cache_seconds))
        kinds = ("attribute", "entry", "negative")
        caches = [f"--{kind}-timeout={cache_seconds}" for kind in kinds]
        log = f"--log-file={self.folder / mount.name}.log"
        return ["glusterfs", "--no-daemon", f"--volfile={volume}", log, *caches, mount]
