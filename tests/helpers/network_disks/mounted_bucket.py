"""Buckets that are mounted as folders: of moto, a mock of Amazon's services."""

import errno
import urllib.request
from pathlib import Path

from store_servers import BUCKET, KEY, SECRET, free_port

from network_disks.disk import NetworkDisk


class MountedBucket(NetworkDisk):
    """A mounted bucket, which is empty after `stop_server`: moto keeps objects in memory."""

    full_error = errno.EIO
    url = f"s3://{BUCKET}"

    def prepare(self) -> None:
        self._port = free_port()

    def begin_server(self) -> None:
        self.begin_process("moto_server", "-H", "127.0.0.1", "-p", self._port)
        self.await_listener(self._port)
        request = urllib.request.Request(f"{self._endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()

    @property
    def _endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"


class S3fs(MountedBucket):
    name = "s3fs"
    programs = ("s3fs", "moto_server")

    def client_command(self, mount: Path, cache_seconds: int) -> list[object]:
        keys = self.folder / "keys"
        keys.write_text(f"{KEY}:{SECRET}")
        keys.chmod(0o600)
        options = {
            "url": self._endpoint,
            "passwd_file": keys,
            "stat_cache_expire": cache_seconds,
            "retries": 1,
        }
        command: list[object] = ["s3fs", BUCKET, mount, "-f", "-o", "use_path_request_style"]
        for option, value in options.items():
            command += ["-o", f"{option}={value}"]
        return command


class Rclone(MountedBucket):
    name = "rclone"
    programs = ("rclone", "moto_server")

    def client_command(self, mount: Path, cache_seconds: int) -> list[object]:
        options = {
            "s3-provider": "Other",
            "s3-endpoint": self._endpoint,
            "s3-access-key-id": KEY,
            "s3-secret-access-key": SECRET,
            "config": "/dev/null",
            "cache-dir": self.folder / f"cache of {mount.name}",
            "vfs-cache-mode": "writes",
            "vfs-write-back": "0s",
            "attr-timeout": f"{cache_seconds}s",
            "dir-cache-time": f"{cache_seconds}s",
        }
        arguments = [f"--{option}={value}" for option, value in options.items()]
        return ["rclone", "mount", *arguments, f":s3:{BUCKET}", mount]
