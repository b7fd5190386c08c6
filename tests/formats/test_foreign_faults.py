"""Files of other libraries that are missing, cut, exchanged, or no files: refused, or read whole; nothing hangs.

What fails is named; `python tests/workers/foreign_faults.py READER SEED 0 FOLDER` runs all trials of one reader.
"""

import re
import subprocess
import sys
from collections import Counter

import pytest
from places import WORKERS
from seeds import chosen_seed

WORKER = WORKERS / "foreign_faults.py"
READERS = re.findall(
    r'^    "(.+?)": ', WORKER.read_text().partition("\nREADERS = ")[2].partition("\n}")[0], re.MULTILINE
)


def campaign(readers, each, folder):
    """The outcomes of the trials, counted, and those that are defects."""
    command = [sys.executable, str(WORKER), ",".join(readers), str(chosen_seed()), str(each), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith(("begin ", "end "))]
    pairs = list(zip(lines[::2], lines[1::2], strict=False))
    counts = Counter(found.split()[1].rstrip(":") for _, found in pairs)
    wrong = [f"{trial}: {found}" for trial, found in pairs if found.startswith(("end foreign", "end changed"))]
    if run.returncode:
        wrong.append(f"{lines[-1] if lines else readers}: ended with {run.returncode}\n{run.stderr[-2000:]}")
    print(dict(counts))
    return counts, wrong


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_every_fault_in_every_file(reader, tmp_path):
    counts, wrong = campaign([reader], 0, tmp_path)
    if not counts and not wrong:
        pytest.skip("its library is not installed")
    assert not wrong, wrong
    assert counts["refused"]
