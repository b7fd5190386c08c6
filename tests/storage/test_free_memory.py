"""Memory that can be had, on a machine and in a container."""

from pathlib import Path

import pytest

from ft_ckpt.storage.io.whole_files import available_bytes, group_bytes


def group(folder, names, limit, taken, cached):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, taken), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(
        f"anon 1\ninactive_file {cached}\ntotal_inactive_file {cached}\n"
    )


SECOND, FIRST = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


def left(tmp_path, text):
    (tmp_path / "own").write_text(text)
    return sorted(group_bytes(tmp_path / "own", tmp_path / "fs"))


def test_groups_and_those_that_they_are_in(tmp_path):
    group(tmp_path / "fs" / "a", SECOND, 1000, 900, 50)
    group(tmp_path / "fs" / "a" / "b", SECOND, "max", 700, 0)
    group(tmp_path / "fs" / "a" / "b" / "c", SECOND, 800, 300, 100)
    assert left(tmp_path, "0::/a/b/c\n") == [150, 600]


def test_the_first_version(tmp_path):
    group(tmp_path / "fs" / "memory", FIRST, 1 << 62, 5, 0)
    group(tmp_path / "fs" / "memory" / "job", FIRST, 100, 90, 30)
    assert left(tmp_path, "4:cpu,cpuacct:/job\n3:memory:/job\n0::/\n") == [40, (1 << 62) - 5]


def test_a_container_whose_path_is_that_outside(tmp_path):
    group(tmp_path / "fs", SECOND, 100, 30, 0)
    assert left(tmp_path, "0::/kubepods/pod/one\n") == [70]


@pytest.mark.parametrize("text", ["", "nonsense\n", "0::/not/there\n", "1:memory:/x\n"])
def test_what_cannot_be_read_sets_no_limit(tmp_path, text):
    assert left(tmp_path, text) == []
    assert list(group_bytes(tmp_path / "none", tmp_path / "fs")) == []


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="needs Linux")
def test_this_machine():
    assert 1 << 20 < available_bytes() < 1 << 50
