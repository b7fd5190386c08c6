"""The contract of the stands in tests/helpers/network_disks: what tests on them rely on."""

import errno
import os
import time

import psutil
import pytest
from network_disks import MOUNTED_BUCKETS, NETWORK_DISKS, NetworkDisk

from ft_ckpt.storage import mount_of

pytestmark = pytest.mark.slow
CONTENT = b"0123456789abcdef" * 4096
SIZE_BYTES = 64 << 20


@pytest.fixture(params=NETWORK_DISKS, ids=lambda kind: kind.name)
def kind(request):
    if reason := request.param.why_absent():
        pytest.skip(reason)
    return request.param


class TestStand:
    def test_clients_see_the_files_of_each_other(self, kind, tmp_path):
        with kind(tmp_path / "stand") as disk:
            writer, reader = disk.clients(2, cache_seconds=0)
            (writer / "folder").mkdir()
            (writer / "folder" / "file").write_bytes(CONTENT)
            assert (reader / "folder" / "file").read_bytes() == CONTENT
            (reader / "folder" / "file").rename(reader / "moved")
            assert (writer / "moved").read_bytes() == CONTENT
            assert not (writer / "folder" / "file").exists()
            assert not mount_of(writer).is_bucket

    def test_names_are_cached_for_as_long_as_asked(self, kind, tmp_path):
        if not kind.has_cache_seconds:
            pytest.skip("its server recalls what clients cache")
        with kind(tmp_path / "stand") as disk:
            (writer,) = disk.clients(1, cache_seconds=0)
            (fresh,) = disk.clients(1, cache_seconds=0)
            (old,) = disk.clients(1, cache_seconds=60)
            (writer / "file").write_bytes(CONTENT)
            sizes = [(client / "file").stat().st_size for client in (fresh, old)]
            assert sizes == [len(CONTENT), len(CONTENT)]
            with (writer / "file").open("ab") as file:
                file.write(CONTENT)
            sizes = [(client / "file").stat().st_size for client in (fresh, old)]
            assert sizes == [2 * len(CONTENT), len(CONTENT)]

    def test_its_server_stops_and_starts_with_its_files(self, kind, tmp_path):
        with kind(tmp_path / "stand") as disk:
            writer, reader = disk.clients(2, cache_seconds=0)
            (writer / "file").write_bytes(CONTENT)
            pids = disk.server_pids
            assert pids
            with disk.server_away():
                assert not any(map(is_alive, pids))
            disk.await_true(lambda: (reader / "file").read_bytes() == CONTENT, "file")
            (reader / "second").write_bytes(CONTENT)
            disk.await_true(lambda: (writer / "second").read_bytes() == CONTENT, "second file")

    def test_a_client_is_killed(self, kind, tmp_path):
        with kind(tmp_path / "stand") as disk:
            first, second = disk.clients(2, cache_seconds=0)
            with (first / "file").open("wb") as file:
                file.write(CONTENT)
                file.flush()
                os.fsync(file.fileno())
            disk.kill_client(0)
            with pytest.raises(OSError) as raised:
                (first / "file").read_bytes()
            assert raised.value.errno == errno.ENOTCONN
            assert (second / "file").read_bytes() == CONTENT

    def test_it_is_full(self, kind, tmp_path):
        with kind(tmp_path / "stand", size_bytes=SIZE_BYTES) as disk:
            (client,) = disk.clients(1, cache_seconds=0)
            assert os.statvfs(client).f_bavail * os.statvfs(client).f_frsize <= SIZE_BYTES
            with pytest.raises(OSError) as raised:
                fill(client, disk)
            assert raised.value.errno == kind.full_error

    def test_nothing_of_it_is_left(self, kind, tmp_path):
        with kind(tmp_path / "stand") as disk:
            mounts = disk.clients(2)
            pids = [*disk.server_pids, disk.client_pid(0), disk.client_pid(1)]
        assert not any(mount.is_mount() for mount in mounts)
        assert not any(map(is_alive, pids))


@pytest.mark.parametrize("kind", MOUNTED_BUCKETS, ids=lambda kind: kind.name)
def test_a_mounted_bucket(kind, tmp_path):
    with kind(tmp_path / "stand") as disk:
        writer, reader = disk.clients(2, cache_seconds=0)
        (writer / "file").write_bytes(CONTENT)
        disk.await_true(lambda: (reader / "file").read_bytes() == CONTENT, "file")
        assert mount_of(writer).is_bucket


def fill(client, disk: NetworkDisk) -> None:
    """Write more than the file system has, waiting as long as it needs to notice that."""
    for number in range(100):
        with (client / f"file-{number}").open("wb") as file:
            file.write(bytes(SIZE_BYTES // 8))
            file.flush()
            os.fsync(file.fileno())
        if number > 8:
            time.sleep(0.5)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
