"""The script for any mount, on a plain folder and on two clients of GlusterFS."""

import os
import subprocess
import sys

import pytest
from launch import run_python
from namespaces import can_mount
from network_disks import GlusterFS
from places import ROOT, python_path

CODE = "import runpy; runpy.run_module('scripts.network_disk', run_name='__main__', alter_sys=True)"


def test_a_plain_folder(tmp_path):
    words = [tmp_path, "--only", "overwrite", "read", "--loads", "5"]
    done = run_python(CODE, *words, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    overwritten, read = done.stdout.splitlines()
    assert overwritten.startswith("ok      overwrite: 8 times, the old one or the new one was read")
    assert read.startswith("ok      read: 5 loads of ")
    assert "none wrong" in read
    assert list(tmp_path.iterdir()) == []


def test_two_mounts_that_are_not_of_one_file_system(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    words = [tmp_path / "first", tmp_path / "second", "--only", "overwrite"]
    done = run_python(CODE, *words, cwd=ROOT)
    assert done.returncode == 1
    assert done.stdout.startswith("FAILED  overwrite: ")
    assert list((tmp_path / "first").iterdir()) == []


@pytest.mark.slow
@GlusterFS.needed()
@pytest.mark.skipif(not can_mount(), reason="needs namespaces of mounts")
@pytest.mark.timeout(1200)
def test_two_clients(tmp_path):
    with GlusterFS(tmp_path / "disk") as disk:
        command = [sys.executable, "-m", "scripts.network_disk", *disk.clients(2)]
        done = subprocess.run(
            [*map(str, command), "--kills", "1", "--loads", "30"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path()},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok"] * 5
    assert "2 ranks on two mounts" in done.stdout
