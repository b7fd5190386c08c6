"""Files on a network file system: what a client says of them, and what follows from it."""

import errno
import os
from pathlib import Path

import pytest
from launch import run_python
from network_disks import GlusterFS

from ft_ckpt.errors import CorruptError
from ft_ckpt.storage import list_entries, list_names
from ft_ckpt.storage.io import open_local_file
from ft_ckpt.storage.local import LocalStore, locked_folder
from ft_ckpt.storage.mounts import keeps_exact_times

CONTENT = b"1" * 4096
OPEN_FILES = Path("/proc/self/fd")
needs_gluster = GlusterFS.needed()


@needs_gluster
def test_a_time_that_a_client_had_cached_is_no_change(tmp_path):
    with GlusterFS(tmp_path / "disk") as disk:
        reader, writer = disk.clients(2)
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
    with GlusterFS(tmp_path / "disk") as disk:
        reader, writer = disk.clients(2, cache_seconds=0)
        (writer / "file").write_bytes(CONTENT)
        file = open_local_file(reader / "file")
        os.truncate(writer / "file", 100)
        with pytest.raises(
            CorruptError, match="file: changed while it was open, 4096 bytes then and 100 now"
        ):
            file.check()
        file.close()


@needs_gluster
def test_a_file_that_another_client_has_replaced_is_read(tmp_path):
    """Its client knows the old file by name for a minute."""
    with GlusterFS(tmp_path / "disk") as disk:
        reader, writer = disk.clients(2, cache_seconds=60)
        for content in (b"first", b"second"):
            LocalStore(writer).unsynced.write("file", content)
            assert LocalStore(reader).read("file") == content


SWEEP = """
import sys
from pathlib import Path
from ft_ckpt.storage.local import locked_folder
with locked_folder(Path(sys.argv[1]), "trial-"):
    pass
"""


@needs_gluster
def test_a_folder_that_a_process_of_another_client_uses_stays(tmp_path):
    """A lock of a folder is not seen through another mount: the process decides.

    That of a killed one goes at once.
    """
    with GlusterFS(tmp_path / "disk") as disk:
        ours, theirs = disk.clients(2, cache_seconds=0)
        with locked_folder(ours, "trial-") as folder:
            assert run_python(SWEEP, theirs).returncode == 0
            assert (theirs / folder.name).is_dir()
        killed = run_python(
            SWEEP.replace("pass", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), theirs
        )
        assert killed.returncode < 0
        assert len(list(ours.glob("trial-*"))) == 1
        assert run_python(SWEEP, ours).returncode == 0
        assert list(ours.glob("trial-*")) == []


def test_on_a_local_disk_a_new_time_is_a_change(tmp_path):
    (tmp_path / "file").write_bytes(CONTENT)
    file = open_local_file(tmp_path / "file")
    assert keeps_exact_times(file.descriptor)
    os.utime(tmp_path / "file", ns=(0, 0))
    with pytest.raises(CorruptError, match="changed while it was open"):
        file.check()
    file.close()


@pytest.mark.parametrize("call", ["open", "fstat", "preadv", "stat", "listdir", "scandir"])
def test_a_stale_handle_is_looked_up_again(tmp_path, monkeypatch, call):
    """Another node has replaced the file or folder that the client of this one has in its cache."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(CONTENT)
    store, real, refused = LocalStore(tmp_path), getattr(os, call), []

    def stale(*args, **kwargs):
        if len(refused) < 2:  # then it finds the new one
            refused.append(args)
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(*args, **kwargs)

    descriptors = len(list(OPEN_FILES.iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, stale)
        if call == "listdir":
            names = list_names(tmp_path / "folder")
        elif call == "scandir":
            names = [entry.name for entry in list_entries(tmp_path / "folder")]
        elif call == "stat":
            names = ["file"] if store.stat("folder/file") else []
        else:
            names = ["file"] if store.read("folder/file") == CONTENT else []
    assert names == ["file"]
    assert len(refused) == 2
    assert len(list(OPEN_FILES.iterdir())) == descriptors
