"""Damaged inputs of every kind, by the hundred: the process lives, within bounded time and memory, and errors are ours.

Run by hand: `FT_CKPT_SEED=5 pytest tests/formats/test_mutations.py`; what fails is named with its number, and
`python tests/workers/mutations.py GROUP SEED N N+1 FOLDER` is that one alone.
"""

import re
import subprocess
import sys
from collections import Counter

import pytest
from places import WORKERS
from seeds import chosen_seed

WORKER = WORKERS / "mutations.py"
SEED = str(chosen_seed())
GROUPS = re.findall(r'^    "(.+?)": ', WORKER.read_text().partition("\nGROUPS = ")[2].partition("\n}")[0], re.MULTILINE)
# The HDF5 library reads the damage, which may end the process, or take time or memory: docs/limits.md.
LIBRARY = [
    group
    for group in GROUPS
    if group.startswith(("cerebras", "keras")) or group in ("hdf5 moved", "hdf5 foreign", "hdf5 compressed")
]
OURS = [group for group in GROUPS if group not in LIBRARY]
ENDS = 3  # of processes, at which a group is given up


def campaign(groups, first, end, folder):
    """What came of each input, counted by group; and those that ended the process, or whose errors were not ours."""
    command = [sys.executable, str(WORKER), ",".join(groups), SEED, str(first), str(end), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith(("begin ", "end "))]
    pairs = [(lines[at][6:], lines[at + 1][4:]) for at in range(0, len(lines) - 1, 2)]
    told = Counter((name.partition("/")[0], found.partition(" ")[0]) for name, found in pairs)
    wrong = [f"{name}: {found}" for name, found in pairs if found.startswith("foreign")]
    last = int(lines[-1 if len(lines) % 2 else -2].rpartition("/")[2]) if lines else end
    ended = lines[-1].partition("/")[0].removeprefix("begin ") if lines else groups[0]
    if run.returncode and not (run.returncode < 0 and ended in LIBRARY):
        wrong.append(f"{lines[-1] if lines else groups}: ended with {run.returncode}\n{run.stderr[-2000:]}")
    return told, wrong, last


def check(groups, told, wrong, count):
    print(f"seed {SEED}: {dict(told)}")
    assert not wrong, (f"seed {SEED}", wrong)
    hungry = [group for group in groups if told[group, "memory"] and group not in LIBRARY]
    assert not hungry, f"seed {SEED}: refused only for want of memory"
    assert not [group for group in groups if told[group, "refused"] <= count // 20]


@pytest.mark.sample("ours")
@pytest.mark.parametrize(("groups", "count"), [(OURS, 5), (LIBRARY, 5)], ids=["ours", "library"])
def test_damaged_input_is_refused_in_so_many_words(groups, count, tmp_path):
    told, wrong, _ = campaign(groups, 0, count, tmp_path)
    check([], told, wrong, count)
    assert sum(number for (_, how), number in told.items() if how == "refused") > told.total() // 4


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_hundreds_of_damaged_inputs(group, tmp_path):
    count = 2000
    told, wrong, first = Counter(), [], 0
    while first < count and len(wrong) < ENDS:
        more, bad, last = campaign([group], first, count, tmp_path)
        told, wrong, first = told + more, wrong + bad, last + 1
    check([group], told, wrong, count)
