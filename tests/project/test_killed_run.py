"""The picture of README.md: two real runs, and an error for each way in which they could differ."""

import os
import re
import runpy
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from places import ROOT, python_path

SCRIPT = runpy.run_path(str(ROOT / "scripts/killed_run.py"))
Life = SCRIPT["Life"]
WHOLE = Life({step: (4 / step).hex() for step in range(1, 9)}, killed=False)


def life(steps, killed=True):
    return Life({step: WHOLE.losses[step] for step in steps}, killed)


def test_equal_runs_are_said_to_be_equal(capsys):
    SCRIPT["compare"](WHOLE, [life(range(1, 6)), life(range(4, 9), killed=False)])
    assert (
        capsys.readouterr().out
        == "8 steps, killed 1 times, 2 steps made twice: all losses equal, bit for bit\n"
    )


def test_one_bit_is_a_difference():
    other = life(range(4, 9), killed=False)
    value = float.fromhex(other.losses[6])
    other.losses[6] = float.hex(value * (1 + 2**-52))
    with pytest.raises(SystemExit, match="step 6: process 2 of the killed run has loss"):
        SCRIPT["compare"](WHOLE, [life(range(1, 6)), other])


def test_a_step_that_was_left_out_is_a_difference():
    with pytest.raises(SystemExit, match=r"has not made the steps \[4\]"):
        SCRIPT["compare"](WHOLE, [life(range(1, 4)), life(range(5, 9), killed=False)])


def test_other_weights_are_a_difference(tmp_path):
    for name in ("one", "other"):
        (tmp_path / name / "final").mkdir(parents=True)
        (tmp_path / name / "final/model.safetensors").write_text(name)
    with pytest.raises(SystemExit, match="the final weights differ"):
        SCRIPT["compare_weights"](tmp_path / "one", tmp_path / "other")


def test_a_line_that_a_kill_has_cut_is_no_step(tmp_path):
    (tmp_path / "losses.jsonl").write_text('[1, "0x1p+0"]\n[2, "0x1p')
    assert SCRIPT["read_log"](tmp_path) == [(1, "0x1p+0")]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_has_both_curves_and_each_kill(theme):
    svg = SCRIPT["picture"](WHOLE, [life(range(1, 6)), life(range(4, 9), killed=False)], theme)
    points = [
        len(line.get("points").split())
        for line in ElementTree.fromstring(svg).iter()
        if line.get("points")
    ]
    assert points == [8, 5, 5]
    assert svg.count("✕") == 1
    stored = (ROOT / f"docs/images/killed-{theme}.svg").read_text(encoding="utf-8")
    kills = int(re.search(r"killed (\d+) times", stored)[1])
    assert stored.count("✕") == kills == 5


@pytest.mark.slow
def test_a_run_that_is_killed_has_the_losses_of_one_that_is_not(tmp_path):
    command = [
        sys.executable,
        "-m",
        "scripts.killed_run",
        str(tmp_path),
        "--kills",
        "2",
        "--epochs",
        "2",
    ]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "64 steps, killed 2 times" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "killed-dark.svg",
        "killed-light.svg",
    ]
