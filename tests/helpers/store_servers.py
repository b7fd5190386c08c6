"""Third-party object stores, started on loopback by their commands: real servers and emulators.

Each yields the URL of an empty bucket; the environment points clients to it while the block runs.
If a command is not installed, `Absent` says what to install.
"""

import base64
import hashlib
import hmac
import os
import shutil
import socket
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from email.utils import formatdate
from pathlib import Path
from typing import Any
from unittest.mock import patch

BUCKET, KEY, SECRET = "bucket", "AKTEST", "SKTEST"
AZURE_ACCOUNT = "devstoreaccount1"  # known to everybody, with its key
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_START_SECONDS = 60.0


class Absent(Exception):  # noqa: N818 - no error, a state of this machine
    """A server is not installed."""


def free_port() -> int:
    """Return a port without a listener."""
    with closing(socket.socket()) as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


@contextmanager
def _running(command: list[Any], log: Path) -> Iterator[None]:
    """Run a process until the block ends."""
    line = [str(argument) for argument in command]
    with log.open("wb") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output, cwd=log.parent)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _need(how: str, *commands: str) -> None:
    absent = [name for name in commands if shutil.which(name) is None]
    if absent:
        raise Absent(f"{', '.join(absent)} not installed: {how}")


def _wait_for(is_up: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _START_SECONDS
    while not is_up():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} is not up after {_START_SECONDS} seconds")
        time.sleep(0.1)


def _listens(port: int) -> bool:
    with closing(socket.socket()) as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _variables(prefix: str, **settings: str) -> Iterator[None]:
    """Set the environment variables of that prefix to these alone, during the block."""
    start = f"{prefix}_"
    others = {name: value for name, value in os.environ.items() if not name.startswith(start)}
    variables = {start + name.upper(): value for name, value in settings.items()}
    with patch.dict(os.environ, {**others, **variables}, clear=True):
        yield


@contextmanager
def _s3_at(port: int, key: str = KEY, secret: str = SECRET) -> Iterator[str]:
    """Point clients to the S3 server at this port; yield the URL of a new bucket."""
    url = f"http://127.0.0.1:{port}"
    keys = {"access_key_id": key, "secret_access_key": secret, "region": "us-east-1"}
    with _variables("AWS", endpoint_url=url, allow_http="true", **keys):
        _make_s3_bucket(BUCKET)
        yield f"s3://{BUCKET}"


def _make_s3_bucket(name: str) -> None:
    """Create a bucket: obstore cannot, but it signs a request that does."""
    import obstore
    from obstore.store import from_url

    store: Any = from_url(f"s3://{name}", client_options={"allow_http": True})
    url = obstore.sign(store, "PUT", "", timedelta(minutes=1))
    urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=60).close()


@contextmanager
def running_moto(folder: Path) -> Iterator[str]:
    """Run moto, the mock of Amazon's services."""
    _need("pip install 'moto[s3]' flask flask-cors", "moto_server")
    port = free_port()
    with _running(["moto_server", "-H", "127.0.0.1", "-p", port], folder / "moto.log"):
        _wait_for(lambda: _listens(port), "moto_server")
        with _s3_at(port) as url:
            yield url


@contextmanager
def running_s3rver(folder: Path) -> Iterator[str]:
    """Run s3rver, a store that ignores conditions."""
    _need("npm install -g s3rver", "s3rver")
    port = free_port()
    (folder / "s3rver").mkdir()
    command = ["s3rver", "-d", folder / "s3rver", "-a", "127.0.0.1", "-p", port, "--silent"]
    with _running(command, folder / "s3rver.log"):
        _wait_for(lambda: _listens(port), "s3rver")
        with _s3_at(port, "S3RVER", "S3RVER") as url:
            yield url


@contextmanager
def running_azurite(folder: Path) -> Iterator[str]:
    """Run azurite, Microsoft's emulator of Azure's blobs."""
    _need("npm install -g azurite", "azurite-blob")
    port = free_port()
    address = ["--blobHost", "127.0.0.1", "--blobPort", port]
    command = ["azurite-blob", "-l", folder / "azurite", *address, "--silent"]
    with _running([*command, "--skipApiVersionCheck"], folder / "azurite.log"):
        _wait_for(lambda: _listens(port), "azurite-blob")
        endpoint = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
        settings = {
            "storage_account_name": AZURE_ACCOUNT,
            "storage_account_key": AZURE_KEY,
            "storage_endpoint": endpoint,
        }
        with _variables("AZURE", allow_http="true", **settings):
            _make_container(endpoint)
            yield f"az://{BUCKET}"


def _make_container(endpoint: str) -> None:
    """Create a container, by a request with Azure's signature."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    path = f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
    kind = "application/octet-stream"
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT" + "\n" * 5 + kind + "\n" * 7 + lines + path
    mac = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Content-Type"] = kind
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(mac).decode()}"
    url = f"{endpoint}/{BUCKET}?restype=container"
    request = urllib.request.Request(url, method="PUT", headers=headers, data=b"")
    urllib.request.urlopen(request, timeout=60).close()


# Ceph

_CEPH = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}/0
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv4 = true
auth cluster required = none
auth service required = none
auth client required = none
run dir = {folder}
admin socket = {folder}/$name.asok
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
osd objectstore = memstore
memstore device bytes = {memory_bytes}
osd memory target = 1073741824
[client.rgw]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw thread pool size = 64
ms mon client mode = crc
ms client mode = crc
rgw gc obj min wait = 5
rgw gc processor period = 5
rgw gc processor max time = 5
"""
_CEPH_COMMANDS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")


@contextmanager
def running_ceph(folder: Path, memory_bytes: int = 12 << 30) -> Iterator[str]:
    """Run Ceph's gateway over one monitor and one store in memory."""
    _need("apt-get install ceph-mon ceph-osd radosgw", *_CEPH_COMMANDS)
    (folder / "mon").mkdir(parents=True)
    (folder / "osd").mkdir()
    port, mon_port, fsid = free_port(), free_port(), str(uuid.uuid4())
    facts = {"folder": folder, "port": port, "mon_port": mon_port, "fsid": fsid}
    (folder / "ceph.conf").write_text(_CEPH.format(**facts, memory_bytes=memory_bytes))
    with ExitStack() as stack:
        _start_ceph(folder, fsid, mon_port, stack)
        _wait_for(lambda: _listens(port), "radosgw")
        keys = [f"--access-key={KEY}", f"--secret-key={SECRET}"]
        user = ["user", "create", "--uid=t", "--display-name=t", *keys]
        _ceph(folder, "radosgw-admin", "-n", "client.rgw", *user)
        yield stack.enter_context(_s3_at(port))


def _start_ceph(folder: Path, fsid: str, mon_port: int, stack: ExitStack) -> None:
    """Start the monitor, the store and the gateway; `stack` ends them."""
    monitor = ["--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{mon_port}]"]
    _ceph(folder, "monmaptool", "--create", "--clobber", *monitor, folder / "monmap")
    owner = ["--setuser", "root", "--setgroup", "root"]
    _ceph(folder, "ceph-mon", "--mkfs", "-i", "a", "--monmap", folder / "monmap", *owner)
    _begin_ceph(folder, stack, "ceph-mon", "-i", "a", *owner)
    disk = str(uuid.uuid4())
    _ceph(folder, "ceph", "osd", "new", disk)
    _ceph(folder, "ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk, *owner)
    _begin_ceph(folder, stack, "ceph-osd", "-i", "0", *owner)
    _begin_ceph(folder, stack, "radosgw", "-n", "client.rgw", *owner)


def _ceph(folder: Path, command: str, *arguments: Any) -> None:
    """Run one of Ceph's commands to its end."""
    line = [str(word) for word in (command, "-c", folder / "ceph.conf", *arguments)]
    result = subprocess.run(line, capture_output=True, text=True, timeout=_START_SECONDS)
    if result.returncode:
        raise RuntimeError(f"{command}: {result.stderr[-2000:]}")


def _begin_ceph(folder: Path, stack: ExitStack, command: str, *arguments: Any) -> None:
    line = [command, "-c", folder / "ceph.conf", *arguments, "-f"]
    stack.enter_context(_running(line, folder / f"{command}.out"))
