"""sshfs: a folder of this machine behind an SSH server of its own."""

import errno
from pathlib import Path

from store_servers import free_port

from network_disks.disk import NetworkDisk

_SFTP_SERVER = "/usr/lib/openssh/sftp-server"
_RUN = Path("/run/sshd")  # an empty folder, without which the server does not start
_SERVER = """
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host-key
AuthorizedKeysFile {folder}/user-key.pub
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
MaxStartups 100
Subsystem sftp {sftp_server}
"""


class Sshfs(NetworkDisk):
    name = "sshfs"
    programs = ("sshfs", "/usr/sbin/sshd", "ssh-keygen", _SFTP_SERVER)
    full_error = errno.EIO  # the protocol has no word for a full disk

    def prepare(self) -> None:
        self._port = free_port()
        self._data = self.data_folder("data")
        for key in ("host-key", "user-key"):
            self.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key)
        text = _SERVER.format(port=self._port, folder=self.folder, sftp_server=_SFTP_SERVER)
        (self.folder / "sshd_config").write_text(text)
        _RUN.mkdir(exist_ok=True)

    def begin_server(self) -> None:
        self.begin_process("/usr/sbin/sshd", "-D", "-e", "-f", self.folder / "sshd_config")
        self.await_listener(self._port)

    def client_command(self, mount: Path, cache_seconds: int) -> list[object]:
        options = {
            "IdentityFile": self.folder / "user-key",
            "StrictHostKeyChecking": "no",
            "UserKnownHostsFile": "/dev/null",
            "ServerAliveInterval": 5,
            "ConnectTimeout": 5,
            "attr_timeout": cache_seconds,
            "entry_timeout": cache_seconds,
            "negative_timeout": cache_seconds,
            "dir_cache": "yes" if cache_seconds else "no",
            "dcache_timeout": cache_seconds,
        }
        command: list[object] = ["sshfs", "-f", "-F", "/dev/null", "-p", self._port]
        for option, value in options.items():
            command += ["-o", f"{option}={value}"]
        return [*command, "-o", "reconnect", f"root@127.0.0.1:{self._data}", mount]
