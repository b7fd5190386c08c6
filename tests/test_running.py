"""When a run saves by itself, what it does on a full disk, and how ranks decide together."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from launch import run_cases
from training import QUIET, prepared, train

from ft_ckpt import CheckpointSaver, Every, Keep, commit, room
from ft_ckpt.errors import NoSpaceError, TargetError

TOGETHER = ["one_signal", "by_the_clock", "by_a_metric", "unlike", "incomplete_ddp", "incomplete_fsdp2"]


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return run_cases("running", TOGETHER, tmp_path_factory.mktemp("together"))


@pytest.mark.parametrize("case", TOGETHER)
def test_two_ranks(together, case):
    """Pain 45: a flag that one rank reads, and ranks that leave alone."""
    assert together[case] == ""


def folders(run):
    return sorted((path.name for path in run.iterdir()), key=lambda name: int(name.rpartition("-")[2]))


@pytest.mark.parametrize(
    ("every", "saved"),
    [
        (Every(steps=5, signals=()), ["checkpoint-5", "checkpoint-10", "checkpoint-15"]),
        (Every(epochs=1, signals=()), ["checkpoint-6", "checkpoint-12", "checkpoint-18"]),
        (Every(epochs=2, steps=8, signals=()), ["checkpoint-8", "checkpoint-12", "checkpoint-16"]),
    ],
)
def test_steps_and_epochs(tmp_path, every, saved):
    run = prepared()
    with CheckpointSaver(run.accelerator, tmp_path, every=every, **QUIET) as saver:
        train(run, saver)
    assert folders(tmp_path) == saved


def test_what_is_kept(tmp_path):
    run = prepared()
    keep = Keep(last=2, every_steps=6, state=Keep(last=1))
    with CheckpointSaver(run.accelerator, tmp_path, every=Every(steps=2, signals=()), keep=keep, **QUIET) as saver:
        (tmp_path / "checkpoint-keep-me").mkdir()
        train(run, saver)
    shutil.rmtree(tmp_path / "checkpoint-keep-me")  # pain 24: a folder that is not ours is deleted
    assert folders(tmp_path) == ["checkpoint-6", "checkpoint-12", "checkpoint-16", "checkpoint-18"]
    assert [name for name in folders(tmp_path) if (tmp_path / name / "state").exists()] == ["checkpoint-18"]


def test_the_run_resumed_from_stays(tmp_path):
    run = prepared()
    settings = {"every": Every(steps=1, signals=()), "keep": Keep(last=1), **QUIET}
    with CheckpointSaver(run.accelerator, tmp_path, **settings) as saver:
        train(run, saver, 3)
    run = prepared()
    with CheckpointSaver(run.accelerator, tmp_path, **settings) as saver:
        saver.resume()
        train(run, saver, 3)
    assert folders(tmp_path) == ["checkpoint-3", "checkpoint-6"]


@pytest.fixture
def disk(monkeypatch):
    """A disk with room for a number of checkpoints in the folder that is set."""
    real, state = commit.check_target, {"room": 2, "folder": None}

    def check(target, needed):
        real(target, needed)
        if needed and len(list(state["folder"].glob("checkpoint-*"))) >= state["room"]:
            raise NoSpaceError(f"{target}: full")

    monkeypatch.setattr(commit, "check_target", check)
    monkeypatch.setattr(room, "POLL_SECONDS", 0.05)
    return state


def test_a_full_disk_is_an_error(tmp_path, disk):
    """Pain 22: the disk fills up, the run dies."""
    disk["folder"], run = tmp_path, prepared()
    saver = CheckpointSaver(run.accelerator, tmp_path, every=Every(steps=2, signals=()), **QUIET)
    with saver, pytest.raises(NoSpaceError):
        train(run, saver)
    assert folders(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_or_a_warning(tmp_path, disk):
    disk["folder"], run = tmp_path, prepared()
    every = Every(steps=6, signals=())
    saver = CheckpointSaver(run.accelerator, tmp_path, every=every, on_failure="warn", **QUIET)
    with saver, pytest.warns(UserWarning, match="step 18: no checkpoint was made, training goes on: .*full"):
        assert len(train(run, saver)) == 21
    assert folders(tmp_path) == ["checkpoint-6", "checkpoint-12"]


def test_or_a_reason_to_delete_first(tmp_path, disk):
    disk["folder"], run = tmp_path, prepared()
    settings = {"every": Every(steps=2, signals=()), "keep": Keep(last=2), "when_full": "prune", **QUIET}
    with CheckpointSaver(run.accelerator, tmp_path, **settings) as saver:
        train(run, saver)
    assert folders(tmp_path) == ["checkpoint-16", "checkpoint-18"]


def test_or_a_reason_to_wait(tmp_path, disk):
    import threading

    disk["folder"], run = tmp_path, prepared()
    threading.Timer(1.0, lambda: disk.update(room=99)).start()
    every, begun = Every(steps=6, signals=()), time.monotonic()
    with CheckpointSaver(run.accelerator, tmp_path, every=every, when_full="wait", **QUIET) as saver:
        train(run, saver)
    assert folders(tmp_path) == ["checkpoint-6", "checkpoint-12", "checkpoint-18"]
    assert time.monotonic() - begun > 1.0


def test_a_disk_filled_while_it_is_written_to(tmp_path, monkeypatch):
    """There was room, others took it: the save is made again once there is."""
    from ft_ckpt.write import DurableFile

    real, failures = DurableFile.finish, [NoSpaceError("full"), NoSpaceError("full")]

    def finish(file):
        if failures:
            raise failures.pop()
        return real(file)

    monkeypatch.setattr(DurableFile, "finish", finish)
    monkeypatch.setattr(room, "POLL_SECONDS", 0.01)
    run = prepared()
    CheckpointSaver(run.accelerator, tmp_path, when_full="wait").save_state()
    assert (folders(tmp_path), failures) == (["checkpoint-0"], [])
    failures.append(NoSpaceError("full"))
    with pytest.raises(NoSpaceError):
        CheckpointSaver(run.accelerator, tmp_path / "other").save_state()
    assert not any((tmp_path / "other").iterdir())


def test_a_metric_is_the_best_so_far(tmp_path):
    run = prepared()
    every = Every(best=("accuracy", "max"), signals=())
    with CheckpointSaver(run.accelerator, tmp_path, every=every, **QUIET) as saver:
        for value in (0.1, 0.5, 0.4, None, float("nan"), 0.6):
            saver.step({} if value is None else {"accuracy": value})
    assert folders(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-6"]


SCRIPT = """
import sys, time, torch
from training import prepared, learn, QUIET
from ft_ckpt import CheckpointSaver, Every
run = prepared()
with CheckpointSaver(run.accelerator, sys.argv[1], every=Every(), **QUIET) as saver:
    while True:
        learn(run, torch.ones(2, 3)); saver.step(); print(saver.progress.step, flush=True); time.sleep(0.01)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGUSR1", 138)])
def test_signals_save_and_exit(tmp_path, name, code):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < 5:
            pass
        process.send_signal(getattr(signal, name))
        last = int(process.stdout.read().split()[-1])
    assert process.returncode == code
    assert folders(tmp_path) == [f"checkpoint-{last + 1}"]  # saved, and exited before it was printed


def test_a_directory_that_cannot_be_written_fails_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError):
        CheckpointSaver(None, tmp_path / "file")
