"""`ft-ckpt check-resume`, on scripts as people write them, in processes of their own; and what it
goes by.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from launch import run_python
from places import TESTS

from ft_ckpt.cli.check import Finding, MetricRow, _compare_steps, _verdict_text
from ft_ckpt.errors import ConfigError
from ft_ckpt.runs.loop import Rehearsal, Step, read_steps, triggers
from ft_ckpt.runs.loop.triggers import Recorder

SCRIPT = TESTS / "scripts" / "rehearsed.py"


def check(folder, *arguments, limit_seconds=380):
    """`check-resume` with the system's place for scratch files moved to `folder`, where it must
    leave nothing.
    """
    code, env = "from ft_ckpt.cli import main; main()", {"TMPDIR": str(folder)}
    answer = run_python(
        code, "check-resume", *arguments, timeout=limit_seconds, env=env, cwd=folder
    )
    left = [found.name for found in folder.iterdir() if found.name.startswith("ft_ckpt-")]
    assert left == [], answer.stderr
    return answer


# A script that can be resumed


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [(), ("--nproc", 2)], ids=["one", "two"])
def test_a_good_script(tmp_path, launcher):
    """In one process, and in two."""
    answer = check(tmp_path, "--steps", 5, "--stop", 3, *launcher, "--json", SCRIPT)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert (found["equal"], found["stop"], found["first_difference"]) == (True, 3, None)
    assert [row["step"] for row in found["rows"]] == [1, 2, 3, 4, 5]
    assert all(
        row["equal"] and row["batches"] and row["through"] == row["resumed"]
        for row in found["rows"]
    )
    assert found["end"] == {"tensors": 16, "different": []}, "4 of the model, 12 of the optimizer"
    assert not (tmp_path / "runs").exists(), "its own folder for checkpoints"


# Scripts that are not the same


@pytest.mark.slow
def test_a_scheduler_that_is_not_saved(tmp_path):
    """The step after the resume is the first with the wrong learning rate, the one after it shows
    that.
    """
    answer = check(tmp_path, "--steps", 6, "--stop", 3, SCRIPT, "forgets its scheduler")
    assert answer.returncode == 1, answer.stderr
    lines = [line.split() for line in answer.stdout.splitlines()]
    before, differing = lines[1:6], lines[6]
    assert all(line[2] == line[3] for line in before if int(line[0]) < 6), answer.stdout
    assert differing[0] == "6"
    assert differing[2] != differing[3]
    assert answer.stdout.count("<- first difference") == 1
    verdict = answer.stdout.splitlines()[-1]
    assert f"from step 6 on (loss {differing[2]} and {differing[3]})" in verdict
    assert "The data was the same" in verdict
    assert "scheduler" in verdict


@pytest.mark.slow
def test_numbers_from_an_unseeded_source(tmp_path):
    answer = check(tmp_path, "--steps", 2, SCRIPT, "is unseeded")
    assert answer.returncode == 1, answer.stderr
    first, verdict = answer.stdout.splitlines()[1].split(), answer.stdout.splitlines()[-1]
    assert f"from step 1 on (loss {first[2]} and {first[3]})" in verdict
    assert "before the stop" in verdict


# Scripts that cannot be checked


@pytest.mark.sample(
    "print('trained')-made no CheckpointSaver",
    "raise RuntimeError('out of luck')-ended with exit code 1",
)
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('trained')", "made no CheckpointSaver"),
        ("from ft_ckpt import CheckpointSaver; CheckpointSaver()", "never called saver.step()"),
        ("raise RuntimeError('out of luck')", "ended with exit code 1"),
    ],
)
def test_scripts_without_a_saver_without_steps_and_with_errors(tmp_path, code, words):
    script = tmp_path / "train.py"
    script.write_text(code)
    answer = check(tmp_path, script)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert f"{script}: {words}" in answer.stderr
    assert ("RuntimeError: out of luck" in answer.stderr) == ("luck" in code)


@pytest.mark.slow
def test_a_script_that_ends_too_soon(tmp_path):
    answer = check(tmp_path, "--steps", 7, SCRIPT, "is short")
    assert answer.returncode == 2
    assert "ended after step 6, 7 are needed" in answer.stderr


@pytest.mark.slow
def test_a_script_that_is_not_resumed(tmp_path):
    answer = check(tmp_path, "--steps", 2, SCRIPT, "does not resume")
    assert answer.returncode == 2
    assert (
        "it began with step 1, though there was a checkpoint of step 1: call saver.resume()"
        in answer.stderr
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "check-resume: expected SCRIPT"),
        (["--steps", 4, "absent.py"], "absent.py: no file, expected a training script"),
        (["--steps", 4, "--stop", 4, SCRIPT], "--stop 4: expected less than --steps 4"),
        (["--nproc", 2, "--launch", "accelerate launch", SCRIPT], "expected one of them"),
        (["--launch", "no-such-launcher", SCRIPT], "no-such-launcher: No such file"),
    ],
)
def test_what_is_asked_for_must_make_sense(tmp_path, arguments, words):
    answer = check(tmp_path, *arguments)
    assert answer.returncode == 2
    assert words in answer.stderr


def test_a_launcher_is_put_before_the_script(tmp_path):
    (tmp_path / "launcher").write_text(
        f"#!{sys.executable}\nimport sys\nsys.exit(f'launched {{sys.argv[1:]}}')\n"
    )
    (tmp_path / "launcher").chmod(0o755)
    answer = check(
        tmp_path, "--launch", f"{tmp_path}/launcher --config 'a b'", SCRIPT, "--steps", 3
    )
    assert f"launched {['--config', 'a b', str(SCRIPT), '--steps', '3']}" in answer.stderr


# What it goes by


def test_without_the_variable_there_is_no_rehearsal(monkeypatch):
    monkeypatch.delenv(triggers.VARIABLE, raising=False)
    assert triggers.start_recorder() is None


@pytest.mark.parametrize("text", ["{", "[]", '{"steps": 3}'])
def test_a_variable_that_nobody_can_read(monkeypatch, text):
    monkeypatch.setenv(triggers.VARIABLE, text)
    with pytest.raises(ConfigError, match="unset it"):
        triggers.start_recorder()


@pytest.fixture
def told(tmp_path):
    return Rehearsal(str(tmp_path / "checkpoints"), str(tmp_path / "steps.jsonl"), steps=3, stop=2)


def test_steps_are_written_down_exactly_and_the_script_ends(told, tmp_path):
    saved = []
    recorder = Recorder(told)
    recorder.record_step(1, {"loss": 0.1, "nan": float("nan")}, False, True, saved.append)
    with pytest.raises(SystemExit) as ended:
        recorder.record_step(2, {"loss": torch.tensor(1 / 3)}, False, True, saved.append)
    assert (ended.value.code, saved) == (0, [None])
    third = float(torch.tensor(1 / 3)).hex()
    exact = [Step(1, {"loss": (0.1).hex(), "nan": "nan"}, None), Step(2, {"loss": third}, None)]
    assert read_steps(tmp_path / "steps.jsonl") == exact


def test_a_step_that_is_saved_is_not_saved_again_and_other_ranks_write_nothing(told, tmp_path):
    saved = []
    with pytest.raises(SystemExit):
        Recorder(told).record_step(2, {}, True, False, saved.append)
    assert saved == []
    with pytest.raises(SystemExit):
        Recorder(told).record_step(3, {}, True, False, saved.append)
    assert saved == [tmp_path / "checkpoints" / triggers.END]
    assert read_steps(tmp_path / "steps.jsonl") == []


def digest(told, *batches):
    recorder = Recorder(told)
    assert all(
        one is other for one, other in zip(recorder.watch_batches(batches), batches, strict=True)
    )
    recorder.record_step(1, {}, False, True, print)
    return read_steps(Path(told.record))[-1].batches


def test_digests_tell_batches_apart(told):
    ones = torch.ones(2, 3)
    batches = [
        {"x": ones, "y": [1, "text"]},
        {"x": ones, "y": [2, "text"]},
        {"z": ones, "y": [1, "text"]},
        {"x": ones.bfloat16(), "y": [1, "text"]},
        {"x": ones.T, "y": [1, "text"]},
        (ones.numpy(), torch.tensor(3)),
        (ones.numpy() * 2, torch.tensor(3)),
    ]
    digests = [digest(told, batch) for batch in batches]
    assert len(set(digests)) == len(batches)
    assert digests[0] == digest(told, {"x": ones.clone(), "y": [1, "text"]})
    assert digest(told, batches[0], batches[1]) not in digests, "several batches of one step"
    assert digest(told) is None


def test_rows_of_two_runs_side_by_side():
    through = [Step(1, {"loss": "0x1p+0"}, "a"), Step(2, {"loss": "0x1p+1"}, "b")]
    resumed = [Step(1, {"loss": "0x1p+0"}, "a"), Step(3, {"loss": "0x1p+1"}, "b")]
    rows = list(_compare_steps(through, resumed))
    assert [(row.step, row.is_equal) for row in rows] == [(1, True), (2, False), (3, False)]
    assert [
        row.is_equal
        for row in _compare_steps([Step(1, {}, None), Step(2, {}, None)], [Step(2, {}, None)])
    ] == [
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("row", "different", "words"),
    [
        (MetricRow(3, "loss", "0x1p+0", "0x1p+1", False), ("w",), "got other data"),
        (MetricRow(3, "loss", "0x1p+0", "0x1p+1", None), ("w",), "If the data was the same"),
        (MetricRow(3, None, None, None, False), ("w",), "from step 3 on (the batches)"),
        (MetricRow(3, "loss", "0x1p+0", "0x1p+0", None), ("w",), "though no metric does: w"),
        (MetricRow(2, "loss", "0x1p+0", "0x1p+1", True), ("w",), "before the stop"),
    ],
)
def test_the_verdict_says_where_to_look(row, different, words):
    finding = Finding(2, (row,), 4, different)
    assert not finding.is_equal
    assert words in _verdict_text(finding)


def test_weights_that_are_the_same_without_any_metric():
    finding = Finding(2, tuple(_compare_steps([Step(1, {}, None)], [Step(1, {}, None)])), 4, ())
    assert finding.is_equal
    assert "no metrics were given to saver.step()" in _verdict_text(finding)
