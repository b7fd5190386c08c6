"""Damaged inputs of every kind, by the hundred: the process lives, within bounded time and memory, and errors are ours.

Run by hand: `FT_CKPT_SEED=5 pytest tests/test_mutations.py`; what fails is named with its number, and
`python tests/workers/mutations.py GROUP SEED NUMBER NUMBER+1 FOLDER` is that one alone.
"""

import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "workers" / "mutations.py"
SEED = os.environ.get("FT_CKPT_SEED", str(random.randrange(10**6)))
GROUPS = re.findall(r'^    "(.+?)": ', WORKER.read_text().partition("\nGROUPS = ")[2].partition("\n}")[0], re.MULTILINE)
SLOW = {"hdf5 moved", "hdf5 foreign", "cerebras 0.5", "cerebras 0.4"}  # each input takes processes of its own
ENDS = 3  # of processes, at which a group is given up


def campaign(group, count, folder):
    """What came of each input, counted; and the numbers of those that ended the process, or were not ours."""
    told, wrong, first = Counter(), [], 0
    while first < count and len(wrong) < ENDS:
        command = [sys.executable, str(WORKER), group, SEED, str(first), str(count), str(folder)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = run.stdout.splitlines()
        told.update(line.partition(" ")[0] for line in lines[1::2])
        wrong += [
            f"{number}: {line}"
            for number, line in zip(lines[::2], lines[1::2], strict=False)
            if line.startswith("foreign")
        ]
        first = int(lines[::2][-1]) + 1 if lines else count
        if run.returncode:
            wrong.append(f"{first - 1}: the process ended with {run.returncode}\n{run.stderr[-2000:]}")
    return told, wrong


def check(group, count, folder):
    told, wrong = campaign(group, count, folder / "place")
    print(f"{group}, seed {SEED}: {dict(told)}")
    assert not wrong, (group, f"seed {SEED}", wrong)
    assert told["refused"] > count // 10
    assert not told["memory"], f"{group}, seed {SEED}: refused only for want of memory"


@pytest.mark.parametrize("group", GROUPS)
def test_damaged_input_is_refused_in_so_many_words(group, tmp_path):
    check(group, 6 if group in SLOW else 60, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("group", GROUPS)
def test_two_thousand_damaged_inputs(group, tmp_path):
    check(group, 2000, tmp_path)
