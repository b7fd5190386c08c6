"""Files on a network file system: what a client says of them, and what follows from it."""

import os

import pytest
from mounted import gluster_clients, needs_gluster

from ft_ckpt.errors import CorruptError
from ft_ckpt.storage.local_file import open_local_file
from ft_ckpt.storage.mounts import keeps_exact_times

CONTENT = b"1" * 4096


@needs_gluster
def test_a_time_that_a_client_had_cached_is_no_change(tmp_path):
    with gluster_clients(tmp_path, 2) as (reader, writer):
        (writer / "file").write_bytes(CONTENT)
        (reader / "file").stat()  # fills the cache
        os.utime(writer / "file", ns=(0, 0))
        file = open_local_file(reader / "file")
        time_when_opened = os.fstat(file.descriptor).st_mtime_ns
        memory = bytearray(len(CONTENT))
        file.read_into(memoryview(memory))
        assert memory == CONTENT
        file.close()
        assert time_when_opened != 0, "the client's cache was old"


@needs_gluster
def test_a_file_that_another_client_cuts_short_is_an_error(tmp_path):
    with gluster_clients(tmp_path, 2, cache_seconds=0) as (reader, writer):
        (writer / "file").write_bytes(CONTENT)
        file = open_local_file(reader / "file")
        os.truncate(writer / "file", 100)
        with pytest.raises(CorruptError, match="file: changed while it was open, 4096 bytes then and 100 now"):
            file.check()
        file.close()


def test_on_a_local_disk_a_new_time_is_a_change(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    file = open_local_file(tmp_path / "file")
    assert keeps_exact_times(file.descriptor)
    os.utime(tmp_path / "file", ns=(0, 0))
    with pytest.raises(CorruptError, match="changed while it was open"):
        file.check()
    file.close()
