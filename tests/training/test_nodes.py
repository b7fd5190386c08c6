"""Nodes without a shared disk, each a process in a namespace of mounts: saved by some, gone on with by others."""

import pytest
from compare import true_model
from launch import run_cases
from namespaces import can_mount
from s3_server import running_s3

from ft_ckpt.storage.local_store import LocalStore

pytestmark = pytest.mark.skipif(not can_mount(), reason="needs namespaces of mounts, which root has")


def runs(case, shared, ranks):
    """The case on so many nodes; what is below `shared` but for the disk is seen by all."""
    found = run_cases("nodes", [case], shared / f"{case}-{ranks}", ranks, env={"SHARED": str(shared)})
    assert found == {case: ""}


def equal_to_save_pretrained(written, shared):
    """`written`: the files of a save, by name."""
    true_model("llama", shared).save_pretrained(shared / "theirs", max_shard_size=20_000)
    theirs = {each.name: each for each in LocalStore(shared / "theirs").list()}
    assert len(theirs) > 2
    for name in theirs:
        assert written[name] == (shared / "theirs" / name).read_bytes(), name


@pytest.mark.parametrize(("before", "after"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_run_in_a_bucket(tmp_path, before, after):
    pytest.importorskip("obstore")
    with running_s3() as server:
        runs("leave/bucket", tmp_path, before)
        names = server.names("run/weights/")
        equal_to_save_pretrained({name.rpartition("/")[2]: server.content(name) for name in names}, tmp_path)
        runs("take/bucket", tmp_path, after)


@pytest.mark.parametrize(("before", "after"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_run_on_the_disk_of_one_node(tmp_path, before, after):
    runs("leave/disk", tmp_path, before)
    weights = tmp_path / "weights"
    equal_to_save_pretrained({each.name: each.read_bytes() for each in weights.iterdir() if each.is_file()}, tmp_path)
    runs("take/disk", tmp_path, after)
