"""Two ranks on two nodes save onto a network file system while ranks, clients or servers end.

Beside each campaign of tests/helpers/mount_faults.py: the earlier checkpoint is whole, an error is
raised on both ranks and names file and node, the next save works, and nobody hangs.
"""

import json
import signal

import pytest
from launch import run_python
from network_disks import NETWORK_DISKS, CephFS, GlusterFS, NetworkDisk, Sshfs
from seeds import chosen_seed

pytestmark = pytest.mark.slow
KILLS = 60
# what the clients of the stands wait for a server that does not answer, and 20 s for slow machines
LIMIT_SECONDS = 60
PROGRAM = """
import json, sys
import mount_faults
getattr(mount_faults, sys.argv[1])(*json.loads(sys.argv[2]))
"""
every_disk = pytest.mark.parametrize("kind", NETWORK_DISKS, ids=lambda kind: kind.name)
# the others wait for a server longer than a test may, see docs/limits.md
that_give_up = pytest.mark.parametrize("kind", [GlusterFS, Sshfs], ids=lambda kind: kind.name)
each_way = pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])


def counts_of(campaign: str, kind: type[NetworkDisk], *arguments: object, timeout: float) -> dict:
    """What a campaign of mount_faults.py counted."""
    if reason := kind.why_absent():
        pytest.skip(reason)
    done = run_python(PROGRAM, campaign, json.dumps([kind.__name__, *arguments]), timeout=timeout)
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    counts: dict = json.loads(done.stdout.splitlines()[-1])
    print(campaign, kind.name, counts)
    return counts


@pytest.mark.timeout(3700)
@each_way
@every_disk
def test_ranks_are_killed(kind, tmp_path, background):
    """One rank or both, at sixty moments: the run ends as if none had been killed."""
    arguments = str(tmp_path), chosen_seed(), KILLS, background
    counts = counts_of("killed", kind, *arguments, timeout=3600)
    assert counts["killed"] == KILLS
    assert counts["killed 1"] > 10
    assert counts["killed 2"] > 10


@pytest.mark.timeout(700)
@each_way
@that_give_up
def test_the_server_ends_and_comes_back(kind, tmp_path, background):
    arguments = str(tmp_path), chosen_seed(), 6, background, LIMIT_SECONDS
    assert counts_of("outages", kind, *arguments, timeout=600)["outages"] == 6


@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@that_give_up
def test_the_server_is_gone_for_good(kind, tmp_path, number):
    arguments = str(tmp_path), chosen_seed(), number, LIMIT_SECONDS
    assert counts_of("server_gone", kind, *arguments, timeout=300)["failed"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("kind", [GlusterFS, Sshfs, CephFS], ids=lambda kind: kind.name)
def test_a_client_ends(kind, tmp_path, victim):
    arguments = str(tmp_path), chosen_seed(), victim
    assert counts_of("client_killed", kind, *arguments, timeout=300)["failed"]


@pytest.mark.timeout(400)
@each_way
@pytest.mark.parametrize("kind", [GlusterFS, Sshfs, CephFS], ids=lambda kind: kind.name)
def test_the_server_is_full(kind, tmp_path, background):
    """Or its quota is used up."""
    assert counts_of("full", kind, str(tmp_path), background, timeout=300)["failed"]
