"""`scripts/gpu` runs: as its user would start it, with an accelerator that is the tests' own."""

import json
import os
import subprocess
import sys

import pytest
import sealed_device
from launch import FORK_SERVER
from places import HELPERS, ROOT

START = """
import sys
if "-m" in sys.orig_argv or any(each.endswith("fork_server.py") for each in sys.orig_argv):
    # in the processes that it starts, and in what their ranks are forked from, before anything else
    import sealed_device
    sealed_device.become_accelerator()
"""

sealed = pytest.mark.skipif(bool(sealed_device.why_missing()), reason=sealed_device.why_missing())


def run_gpu(folder, *arguments):
    (folder / "sitecustomize.py").write_text(START)
    # that of these tests has no device
    own = {name: value for name, value in os.environ.items() if name != FORK_SERVER}
    command = [
        sys.executable,
        ROOT / "scripts/gpu",
        "--dry",
        "--json",
        folder / "gpu.json",
        "--folder",
        folder,
    ]
    done = subprocess.run(
        [*map(str, command), *arguments],
        cwd=folder,
        env=own | {"PYTHONPATH": os.pathsep.join(map(str, (folder, HELPERS)))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done, json.loads((folder / "gpu.json").read_text())


def ways(figures, measure):
    return {
        row["way"] for row in figures["rows"] if row["measure"] == measure and "error" not in row
    }


@pytest.mark.slow
@sealed
def test_loads_onto_the_device_are_measured(tmp_path):
    done, figures = run_gpu(tmp_path, "--only", "load")
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures["parts"]["load"].startswith("done in")
    assert figures["machine"]["gpu"] == sealed_device.KIND
    for measure in ("warm", "cold"):
        assert ways(figures, measure) >= {"ours", "ours, load", "from_pretrained"}
    assert "ours, load" in done.stdout


@sealed
def test_what_has_no_time_left_is_left_out(tmp_path):
    done, figures = run_gpu(tmp_path, "--minutes", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures["parts"] == dict.fromkeys(
        ("tests", "stall", "load", "peaks"), "left out, no time left"
    )


@sealed
def test_what_is_running_then_is_ended(tmp_path):
    done, figures = run_gpu(tmp_path, "--minutes", "0.005", "--only", "peaks")
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures["parts"]["peaks"].endswith("no time left")


@sealed
@pytest.mark.slow
def test_all_of_it(tmp_path):
    done, figures = run_gpu(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(how.startswith("done in") for how in figures["parts"].values()), figures["parts"]
    assert ways(figures, "stall") >= {
        "limit: memory copy",
        "ours",
        "torch DCP async",
        "torch DCP async, staged",
    }
    assert ways(figures, "peaks") >= {
        "save: ours",
        "save: torch DCP async",
        "load: ours",
        "load: from_pretrained",
    }
    assert "passed" in done.stdout
