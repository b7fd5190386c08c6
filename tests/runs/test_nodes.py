"""Nodes without a shared disk, processes in namespaces of mounts: saved by some, gone on with by
others.

Some have a namespace of networks, too, and see each other over virtual links alone.
"""

import json
from contextlib import ExitStack, contextmanager

import pytest
from compare import true_model
from launch import run_cases
from namespaces import can_mount
from network_disks import GlusterFS
from networks import SWITCH, in_network_of, running_cluster, why_no_cluster
from s3_server import running_s3

from ft_ckpt.storage.local import LocalStore

needs_mounts = pytest.mark.skipif(
    not can_mount(), reason="needs namespaces of mounts, which root has"
)


def runs(case, shared, ranks, nodes=(), **env):
    """The case on so many ranks; what is below `shared` but for the disk is seen by all.

    `nodes`: that they are on.
    """
    env |= {"SHARED": str(shared), "NODES": json.dumps(nodes)}
    assert run_cases("nodes", [case], shared / f"{case}-{ranks}", ranks, env=env) == {case: ""}


@contextmanager
def cluster(shared):
    """Two nodes that see each other over virtual links; the disk of the first is kept."""
    if why_no_cluster():
        pytest.skip(why_no_cluster())
    places = [shared / "disk", shared / "disk of rank 0"]
    for place in places:
        place.mkdir(exist_ok=True)
    with running_cluster(2, *places) as found:
        yield found


def equal_to_save_pretrained(written, shared):
    """`written`: the files of a save, by name."""
    true_model("llama", shared).save_pretrained(shared / "theirs", max_shard_size=20_000)
    theirs = {each.name: each for each in LocalStore(shared / "theirs").list()}
    assert len(theirs) > 2
    for name in theirs:
        assert written[name] == (shared / "theirs" / name).read_bytes(), name


@pytest.mark.slow
@needs_mounts
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_a_run_in_a_bucket(tmp_path, before, after):
    pytest.importorskip("obstore")
    with running_s3() as server:
        runs("leave/bucket", tmp_path, before)
        names = server.names("run/weights/")
        equal_to_save_pretrained(
            {name.rpartition("/")[2]: server.content(name) for name in names}, tmp_path
        )
        runs("take/bucket", tmp_path, after)


@pytest.mark.slow
@needs_mounts
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_a_run_on_the_disk_of_one_node(tmp_path, before, after):
    runs("leave/disk", tmp_path, before)
    weights = tmp_path / "weights"
    equal_to_save_pretrained(
        {each.name: each.read_bytes() for each in weights.iterdir() if each.is_file()}, tmp_path
    )
    runs("take/disk", tmp_path, after)


@GlusterFS.needed()
@needs_mounts
@pytest.mark.sample("2-1-1-")
@pytest.mark.parametrize(
    ("before", "after", "cache_seconds", "kind"),
    [(2, 1, 1, ""), (2, 4, 60, ""), (4, 2, 0, ""), (4, 2, 60, "nfs4")],
)
def test_a_run_on_a_disk_of_several_clients(tmp_path, before, after, cache_seconds, kind):
    """Each rank has its own client of one file system, which shows old attributes for a while.

    Taken for a `kind` that promises no byte ranges, each file has one writer.
    """
    with GlusterFS(tmp_path / "network-disk") as disk:
        clients = disk.clients(max(before, after) + 1, cache_seconds)
        clients_of_ranks = json.dumps([str(client) for client in clients[:-1]])
        runs("leave/shared", tmp_path, before, CLIENTS=clients_of_ranks, KIND=kind)
        for name in ("weights", "behind"):
            files = [path for path in (clients[-1] / "run" / name).iterdir() if path.is_file()]
            equal_to_save_pretrained({path.name: path.read_bytes() for path in files}, tmp_path)
        runs("take/shared", tmp_path, after, CLIENTS=clients_of_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 2), (4, 2)])
def test_a_run_over_a_network(tmp_path, before, after):
    """Ranks of two nodes, each with a network and a disk of its own: files are those of one
    process, bit for bit.
    """
    with cluster(tmp_path) as found:
        runs("leave/disk", tmp_path, before, found.nodes)
        for name in ("weights", "behind"):
            files = [each for each in (tmp_path / name).iterdir() if each.is_file()]
            equal_to_save_pretrained({each.name: each.read_bytes() for each in files}, tmp_path)
        runs("take/disk", tmp_path, after, found.nodes)


@pytest.mark.slow
def test_a_run_in_a_bucket_over_a_network(tmp_path):
    pytest.importorskip("obstore")
    with cluster(tmp_path) as found, ExitStack() as stack:
        with in_network_of(found.switch):
            server = stack.enter_context(running_s3(host=SWITCH))
        runs("leave/bucket", tmp_path, 2, found.nodes)
        names = server.names("run/weights/")
        equal_to_save_pretrained(
            {name.rpartition("/")[2]: server.content(name) for name in names}, tmp_path
        )
        runs("take/bucket", tmp_path, 4, found.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("when", ["early", "late"])
def test_the_network_goes(tmp_path, when):
    """The link of a node goes down in a save: each rank is told so, and what is there is whole."""
    with cluster(tmp_path) as found:
        runs(f"cut/{when}", tmp_path, 2, found.nodes, SECONDS="6")
