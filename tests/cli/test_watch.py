"""`ft-ckpt watch`: a command measures each checkpoint once, whatever is killed."""

import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import run_python
from small_checkpoints import contents, save, save_of

import ft_ckpt
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.cli import run_command
from ft_ckpt.errors import CheckpointError, ConfigError
from ft_ckpt.storage.places import open_place

RUN = "import sys; from ft_ckpt.cli import main; main()"
# Notes that it was called, and prints the number at the end of the checkpoint's name, and a half.
SCORE = 'n=${1##*-}; echo "$n" >> "$0"; echo "some words"; echo "$n.5"'


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save_of(tmp_path / f"run/checkpoint-{step}", step=step, run_id="a")
    return tmp_path / "run"


def watch(run: Path, script: str = SCORE, metric: str = "score") -> None:
    """Measure the checkpoints of `run` with a shell script, which may note its calls in `calls`
    beside the run.
    """
    words = ["watch", str(run), "--metric", metric, "--idle", "0", "--json", "--"]
    run_command([*words, "sh", "-c", script, str(run.parent / "calls"), "{path}"])


def calls(run: Path) -> list[str]:
    log = run.parent / "calls"
    return log.read_text().split() if log.exists() else []


def scores(run: Path) -> dict[str, float]:
    return {
        info.name: info.metrics["score"]
        for info in discover(open_place(run))
        if "score" in info.metrics
    }


def test_each_is_measured_once_oldest_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watch(run)
    watch(run)
    assert calls(run) == ["1", "2", "3"]
    assert scores(run) == {"checkpoint-1": 1.5, "checkpoint-2": 2.5, "checkpoint-3": 3.5}
    output, errors = capsys.readouterr()
    assert errors == ""
    assert output.count('"score": ') == 3
    assert ft_ckpt.best(run, ("score", "max")) == run / "checkpoint-3"


def test_a_metric_of_the_save_settles_it(tmp_path: Path) -> None:
    save_of(tmp_path / "run/checkpoint-1", step=1, metrics={"score": 9.0})
    watch(tmp_path / "run")
    assert calls(tmp_path / "run") == []
    watch(tmp_path / "run", metric="other")
    assert calls(tmp_path / "run") == ["1"]
    assert ft_ckpt.best(tmp_path / "run", ("other", "max")) is not None


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("0.25", {"score": 0.25}),
        ("1e-3\n\n  \n", {"score": 1e-3}),
        ("nan", {"score": math.nan}),
        ("-inf", {"score": -math.inf}),
        (
            '{"score": 2, "eval/loss": 0.5, "note": "x", "ok": true, "more": [1]}',
            {"eval/loss": 0.5, "score": 2.0},
        ),
        ("noise\r\n7", {"score": 7.0}),
    ],
)
def test_what_a_command_may_print(tmp_path: Path, printed: str, expected: dict[str, float]) -> None:
    save(tmp_path / "run/checkpoint-1", step=1)
    watch(tmp_path / "run", f"echo x >> \"$0\"; printf '%s' '{printed}'")
    (info,) = discover(open_place(tmp_path / "run"))
    assert {name: repr(value) for name, value in info.metrics.items()} == {
        n: repr(v) for n, v in expected.items()
    }
    watch(tmp_path / "run")
    assert calls(tmp_path / "run") == ["x"]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ('echo x >> "$0"; exit 3', "exit code 3"),
        ('echo x >> "$0"; kill -9 $$', "signal 9"),
        ('echo x >> "$0"; echo fine', "last line is 'fine'"),
        ('echo x >> "$0"', "last line is ''"),
        ('echo x >> "$0"; echo \'{"loss": 1}\'', "the number 'score'"),
        ('echo x >> "$0"; echo \'{"": 1, "score": 2}\'', "metric '': expected 1 to 200 bytes"),
    ],
)
def test_a_command_that_fails_is_named_and_tried_again_by_the_next_start(
    tmp_path: Path, script: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "run/checkpoint-1", step=1)
    with pytest.raises(CheckpointError, match=reason):
        watch(tmp_path / "run", script)
    assert calls(tmp_path / "run") == ["x"]
    assert "checkpoint-1: skipped: sh -c" in capsys.readouterr().err
    assert list(tmp_path.glob("run/*/.ft_ckpt-metric-*")) == []
    watch(tmp_path / "run")
    assert scores(tmp_path / "run") == {"checkpoint-1": 1.5}


def test_one_that_fails_stops_no_other(run: Path) -> None:
    with pytest.raises(CheckpointError, match="checkpoint-2: ended with exit code 1"):
        watch(run, f'case "$1" in *-2) echo 2 >> "$0"; exit 1;; esac; {SCORE}')
    assert calls(run) == ["1", "2", "3"]
    assert scores(run) == {"checkpoint-1": 1.5, "checkpoint-3": 3.5}


def test_a_damaged_checkpoint_is_skipped_and_not_measured(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoint-2/model.safetensors").write_bytes(b"")
    (run / "checkpoint-3/ft_ckpt.json").write_text("{")
    with pytest.raises(CheckpointError, match="truncated: 0 bytes"):
        watch(run)
    assert calls(run) == ["1"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.endswith("; skipped") for line in lines)


def test_what_cannot_be_is_an_error_at_once(run: Path) -> None:
    for command in (["true"], ["no-such-program", "{path}"]):
        with pytest.raises(ConfigError):
            run_command(["watch", str(run), "--idle", "0", "--", *command])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_the_command_under_way(run: Path, number: int) -> None:
    script = f'{SCORE}; touch "$0.begun"; sleep 1; echo "$n.5"'
    command = [
        sys.executable,
        "-c",
        RUN,
        "watch",
        run,
        "--",
        "sh",
        "-c",
        script,
        run.parent / "calls",
        "{path}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (run.parent / "calls.begun").exists():
        time.sleep(0.02)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert output.startswith(f"{run / 'checkpoint-1'}: score 1.5, ")
    assert output.count("\n") == 1
    assert scores(run) == {"checkpoint-1": 1.5}


@pytest.mark.parametrize("times", [4, pytest.param(30, marks=pytest.mark.slow)])
def test_one_that_is_killed_goes_on_where_it_was(run: Path, times: int) -> None:
    """Killed at any moment; what has its metric is not measured again, and every checkpoint gets
    one.
    """
    command = [sys.executable, "-c", RUN, "watch", run, "--", "sh", "-c", f"sleep 0.05; {SCORE}"]
    for number in range(times):
        process = subprocess.Popen(
            [*command, run.parent / "calls", "{path}"], stdout=subprocess.DEVNULL
        )
        time.sleep(0.2 + 0.4 * number / times)
        process.kill()
        process.wait()
        settled = scores(run)
        before = calls(run)
        time.sleep(0.2)  # a command that outlives the watcher
        if len(settled) == 3:
            break
        assert all(before.count(name.partition("-")[2]) >= 1 for name in settled)
    watch(run)
    assert scores(run) == {"checkpoint-1": 1.5, "checkpoint-2": 2.5, "checkpoint-3": 3.5}
    called = calls(run)
    watch(run)
    assert calls(run) == called


def test_the_command(run: Path) -> None:
    before = contents(run)
    words = ["watch", run, "--metric", "loss", "--idle", "0", "--json", "--"]
    done = run_python(RUN, *words, "sh", "-c", "echo --; echo 0.5", "--flag", "{path}/config.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"loss": 0.5') == 3, done.stdout
    changed = {name for name, content in contents(run).items() if before.get(name) != content}
    assert changed == {f"checkpoint-{step}/.ft_ckpt-metric-loss" for step in (1, 2, 3)}
    listed = run_python(RUN, "ls", run)
    assert "loss" in listed.stdout.splitlines()[0]
    assert (
        run_python(RUN, "best", run, "--metric", "loss:min").stdout == f"{run / 'checkpoint-1'}\n"
    )
    assert run_python(RUN, "watch", run).returncode == 2
    assert (
        run_python(
            RUN, "watch", run, "--idle", "0", "--", "sh", "-c", "exit 1", "{path}"
        ).returncode
        == 2
    )
