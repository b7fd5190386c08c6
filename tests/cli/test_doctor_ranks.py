"""`ft-ckpt doctor` on two ranks: one disk, disks of their own, clients of one file system."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from namespaces import can_mount
from network_disks import GlusterFS
from places import python_path
from store_servers import free_port

from ft_ckpt.errors import RankError
from ft_ckpt.ranks import launch_of_process, launched
from ft_ckpt.ranks.launched import Launch, first_name, launched_ranks

needs_mounts = pytest.mark.skipif(not can_mount(), reason="needs namespaces of mounts")
# mounts a folder or a new disk at the second path in a namespace of its own, and runs the rest
BIND = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
TMPFS = 'mount -t tmpfs none "$1" && shift && exec "$@"'
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def sharing(self) -> dict[str, Any]:
        return json.loads(self.out)["sharing"]


def doctor(*words: object, prefixes=((), ()), variables=({}, {})) -> list[Outcome]:
    """The outcome of each of two ranks, whose commands have these prefixes."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    processes = []
    for rank, (prefix, extra) in enumerate(zip(prefixes, variables, strict=True)):
        launch = extra or {"RANK": f"{rank}", "WORLD_SIZE": "2"}
        processes.append(
            subprocess.Popen(
                [*map(str, prefix), sys.executable, "-m", "ft_ckpt", "doctor", *map(str, words)],
                env={**os.environ, "PYTHONPATH": python_path(), **address, **launch},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outcomes = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        outcomes.append(Outcome(process.returncode, out, err))
    return outcomes


def in_namespace(script: str, *arguments: object) -> list[object]:
    """The prefix of a command that runs in a namespace of mounts."""
    return ["unshare", "--mount", "--propagation=private", "sh", "-c", script, "sh", *arguments]


def test_two_ranks_on_one_disk(tmp_path):
    first, second = doctor(tmp_path)
    assert (first.code, first.err, second) == (0, "", Outcome(0, "", ""))
    for line in (
        r"1 client of one file system",
        "a folder that was replaced          at once",
        "byte ranges that 2 ranks write into one file: all arrive",
        "saves: each rank writes the bytes it holds into every file (one kernel merges",
        "saves are safe here",
    ):
        assert line in first.out
    assert list(tmp_path.iterdir()) == []


@needs_mounts
def test_two_ranks_on_disks_of_their_own(tmp_path):
    prefix = in_namespace(TMPFS, tmp_path)
    first, second = doctor(tmp_path, prefixes=(prefix, prefix))
    assert (first.code, first.err, second) == (0, "", Outcome(0, "", ""))
    assert "not one file system: rank(s) 1 do not see it" in first.out
    assert "saves: rank 0 gathers all tensors and writes all files (rank(s) 1 do not" in first.out
    assert "byte ranges" not in first.out


@GlusterFS.needed()
@needs_mounts
def test_two_clients_of_one_file_system(tmp_path):
    with GlusterFS(tmp_path / "disk") as disk:
        clients, point = disk.clients(2, cache_seconds=1), tmp_path / "mount"
        point.mkdir()
        prefixes = [in_namespace(BIND, client, point) for client in clients]
        first, second = doctor(point, "--json", prefixes=prefixes)
        assert (first.code, first.err, second) == (0, "", Outcome(0, "", ""))
        sharing = first.sharing
        assert [view["client"] for view in sharing["ranks"]] == [1, 2]
        assert {view["mount"]["kind"] for view in sharing["ranks"]} == {"fuse.glusterfs"}
        facts = [sharing[name] for name in ("clients", "range_problem", "mode")]
        assert facts == [2, "", "shared"]
        seconds = {each["change"]: each["seconds"] for each in sharing["caches"]}
        assert len(seconds) == 8
        assert 0.2 < seconds["a new file, by its name"] < 20
        assert list(point.iterdir()) == []


def test_an_error_of_rank_0_is_told_by_both(tmp_path):
    first, second = doctor(tmp_path / "absent")
    assert (first.code, second.code) == (2, 2)
    assert "no such folder; make it first" in first.err
    assert re.search("rank 0.*no such folder; make it first", second.err)


def test_ranks_that_srun_starts(tmp_path):
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_ID": "7"}
    variables = [{**slurm, "SLURM_PROCID": f"{rank}"} for rank in range(2)]
    first, second = doctor(tmp_path, "--json", variables=variables)
    assert (first.code, second) == (0, Outcome(0, "", ""))
    assert first.sharing["clients"] == 1


@pytest.fixture
def environment(monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)

    def use(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return use


def test_the_launch_is_read_from_the_environment(environment):
    assert launch_of_process() is None
    environment(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0")
    assert launch_of_process() is None
    environment(SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="3", SLURM_JOB_ID="1234567")
    environment(SLURM_STEP_NODELIST="gpu[03-07,9],cpu1")
    assert launch_of_process() == Launch(3, 4, "gpu03", 15_000 + 4567)
    environment(MASTER_ADDR="node0", MASTER_PORT="29500")
    assert launch_of_process() == Launch(3, 4, "node0", 29500)
    environment(RANK="1", WORLD_SIZE="2")
    assert launch_of_process() == Launch(1, 2, "node0", 29500)
    environment(WORLD_SIZE="two")
    with pytest.raises(RankError, match="WORLD_SIZE='two' in the environment; expected a whole"):
        launch_of_process()


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1,3-4]", "n1"), ("n[007-9]-x", "n007"), ("n-1,n-2", "n-1")],
)
def test_the_first_of_a_list_of_nodes(nodes, first):
    assert first_name(nodes) == first


def test_ranks_that_do_not_reach_each_other(environment, monkeypatch):
    monkeypatch.setattr(launched, "_START_SECONDS", 1.0)
    environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{free_port()}")
    with (
        pytest.raises(RankError, match=r"rank 1 of 2: no connection .* set MASTER_ADDR"),
        launched_ranks(),
    ):
        pass
