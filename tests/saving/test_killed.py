"""Killed at any moment, a run goes on as if it had not been."""

import pytest
from launch import run_python
from seeds import chosen_seed

SCRIPT = """
import random, sys
from pathlib import Path
from killed_trainings import train_with_kills, losses, check_folder
folder, ranks, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
assert train_with_kills(folder / "whole", ranks, random.Random(0), 0.0, 0) == 0
chances, done, runs = random.Random(seed), 0, 0
while done < kills:
    run = folder / f"run-{runs}"
    done += train_with_kills(run, ranks, chances, 0.5 * ranks + 0.3, kills - done)
    check_folder(run)
    for rank in range(ranks):
        assert losses(run, rank) == losses(folder / "whole", rank), run
    runs += 1
print("killed", done, "in", runs)
"""


def killed(folder, ranks, kills):
    seed = chosen_seed()
    done = run_python(SCRIPT, folder, ranks, kills, seed, timeout=1200)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr[-4000:]}"
    assert f"killed {kills} in" in done.stdout


@pytest.mark.sample("1-4")
@pytest.mark.parametrize(("ranks", "kills"), [(1, 4), (2, 4)])
def test_killed_while_it_saves_at_every_step(tmp_path, ranks, kills):
    killed(tmp_path, ranks, kills)


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_two_hundred_times(tmp_path, ranks):
    killed(tmp_path, ranks, 200)
