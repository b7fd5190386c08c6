"""When a run saves by itself, what it does on a full disk, and how ranks decide together."""

import errno
import os
import re
import shutil
import signal
import threading
import time
from decimal import Decimal
from functools import partial

import models
import numpy as np
import pytest
import torch
from launch import run_and_signal
from on_ranks import RANK, on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training import QUIET, learn, network, prepared, rows, train
from wrappers import WRAPPERS

from ft_ckpt import CheckpointSaver, Every, Keep, verify
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.errors import ConfigError, LoadError, NoSpaceError, TargetError
from ft_ckpt.saving import space
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.places import open_place

SHORT = {"enter_timeout_seconds": 30, **QUIET}


@on_ranks(2)
def test_a_signal_to_one_rank_ends_all_at_the_same_step(tmp_path):
    """Rank 1 alone gets a signal; both save the same step and exit with its code."""
    run = prepared()
    with CheckpointSaver(run.accelerator, tmp_path, every=Every(), **SHORT) as saver:
        with pytest.raises(SystemExit) as end:
            endless(run, saver)
        assert end.value.code == 143
    saved = [path.name for path in tmp_path.glob("checkpoint-*")]
    assert saved == [f"checkpoint-{saver.progress.step}"], saved
    assert saver.progress.step >= 4


def endless(run, saver):
    for step in range(100000):
        learn(run, torch.ones(2, 3))
        if step == 3 and RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        saver.step()


@pytest.mark.slow
@on_ranks(2)
def test_the_clock_of_rank_0_decides(tmp_path):
    """The ranks' clocks differ: rank 0's decides."""
    run = prepared()
    minutes = 0.02 if RANK == 0 else 100.0
    with CheckpointSaver(
        run.accelerator, tmp_path, every=Every(minutes=minutes, signals=()), **SHORT
    ) as saver:
        begun = time.monotonic()
        while time.monotonic() - begun < 6 and not any(tmp_path.glob("checkpoint-*")):
            learn(run, torch.ones(2, 3))
            saver.step()
    assert any(tmp_path.glob("checkpoint-*"))


@on_ranks(2)
def test_the_metric_of_rank_0_decides(tmp_path):
    """The ranks' losses differ: rank 0's decides."""
    run = prepared()
    with CheckpointSaver(
        run.accelerator, tmp_path, every=Every(best=("loss", "min"), signals=()), **SHORT
    ) as saver:
        reports = [saver.step({"loss": value * (1 - 2 * RANK)}) for value in (3.0, 2.0, 4.0, 1.0)]
    assert [report is not None for report in reports] == [True, True, False, True], reports


@pytest.mark.slow
@on_ranks(2)
def test_a_failure_of_one_rank_is_raised_on_all(tmp_path):
    """A failure on one rank alone is raised on all, and names that rank."""
    run = prepared()
    saver = CheckpointSaver(run.accelerator, tmp_path, **SHORT)
    saver.save_state()
    other = network() if RANK == 0 else torch.nn.Linear(2, 2)
    fresh = CheckpointSaver(None, tmp_path, **SHORT)
    with pytest.raises(LoadError, match="weights: failed: on rank 1"):
        fresh.resume(model=other, allow=["optimizer", "scheduler", "data"])


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2_accelerate"])
@on_ranks(2, alone=True)  # Accelerate stays with FSDP
def test_batches_of_an_unfinished_step(tmp_path, wrapper):
    """Saved after each batch of an accumulated step and resumed, the next losses are equal to the
    bit.
    """
    live = accumulating(wrapper, 0)
    expected = []
    with CheckpointSaver(live.accelerator, tmp_path, **SHORT) as saver:
        for number in range(10):
            expected.append(micro_step(live, number))
            saver.step()
            if number in (3, 4, 5, 6):
                saver.save_state(path=tmp_path / f"after-{number}")
    for number in (3, 4, 5, 6):
        fresh = accumulating(wrapper, 1)
        with CheckpointSaver(fresh.accelerator, tmp_path, **SHORT) as saver:
            report = saver.resume(f"after-{number}").report
            assert any(item.name == "gradients" for item in report.items) == (number != 3), report
            found = [micro_step(fresh, later) for later in range(number + 1, 10)]
            assert found == expected[number + 1 :], (number, found, expected)


def accumulating(wrapper, seed):
    live = WRAPPERS[wrapper](models.build("llama", seed))
    live.accelerator.gradient_accumulation_steps = 4
    live.accelerator.step = 0
    live.accelerator.gradient_state._set_sync_gradients(True)
    return live


def micro_step(live, number):
    with live.accelerator.accumulate(live.model):
        return live.step(models.batch(seed=31 * number + RANK))


def folders(run):
    return sorted(
        (path.name for path in run.glob("checkpoint-*")),
        key=lambda name: int(name.rpartition("-")[2]),
    )


@pytest.mark.parametrize(
    ("every", "saved"),
    [
        (
            Every(steps=5, signals=()),
            ["checkpoint-5", "checkpoint-10", "checkpoint-15", "checkpoint-18"],
        ),
        (Every(epochs=1, signals=()), ["checkpoint-6", "checkpoint-12", "checkpoint-18"]),
        (
            Every(epochs=2, steps=8, signals=()),
            ["checkpoint-8", "checkpoint-12", "checkpoint-16", "checkpoint-18"],
        ),
    ],
)
def test_steps_and_epochs(tmp_path, every, saved):
    """And the end, without which a finished run would go on from the last interval when it is
    started again.
    """
    run = prepared()
    with CheckpointSaver(run.accelerator, tmp_path, every=every, **QUIET) as saver:
        train(run, saver)
    assert folders(tmp_path) == saved


def test_folders_named_by_epoch(tmp_path):
    """What is newest, kept or resumed is told by the manifest; one of the same name takes the place
    of the last.
    """
    run = prepared()
    named = {"name_template": "epoch_{epoch}", **QUIET}
    with CheckpointSaver(
        run.accelerator, tmp_path, every=Every(steps=4, signals=()), keep=2, **named
    ) as saver:
        train(run, saver)
    steps = {path.name: read_manifest(open_place(path)).step for path in tmp_path.glob("[!.]*")}
    assert steps == {"epoch_2": 16, "epoch_3": 18}
    with CheckpointSaver(prepared().accelerator, tmp_path, **named) as saver:
        progress = saver.resume("must")
        assert (progress.resumed_from.name, progress.step) == ("epoch_3", 18)
        progress = saver.resume("epoch_2")
        assert (progress.step, progress.epoch, progress.batch) == (16, 2, 4)
        assert saver.save_state().path.name == "epoch_2"
    both = CheckpointSaver(
        prepared().accelerator, tmp_path / "both", name_template="{epoch:02}-{step}", **QUIET
    )
    assert both.save_state().path.name == "00-0"


def test_what_is_kept(tmp_path):
    run = prepared()
    keep = Keep(last=2, every_steps=6, state=Keep(last=1))
    with CheckpointSaver(
        run.accelerator, tmp_path, every=Every(steps=2, signals=()), keep=keep, **QUIET
    ) as saver:
        (tmp_path / "checkpoint-keep-me").mkdir()
        train(run, saver)
    shutil.rmtree(tmp_path / "checkpoint-keep-me")  # a folder that is not ours is deleted
    assert folders(tmp_path) == ["checkpoint-6", "checkpoint-12", "checkpoint-16", "checkpoint-18"]
    assert [name for name in folders(tmp_path) if (tmp_path / name / "state").exists()] == [
        "checkpoint-18"
    ]


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
    real, state = space.check_target, {"room": 2, "folder": None}

    def check(target, needed):
        real(target, needed)
        if needed and len(list(state["folder"].glob("checkpoint-*"))) >= state["room"]:
            raise NoSpaceError(f"{target}: full")

    monkeypatch.setattr(space, "check_target", check)
    monkeypatch.setattr(space, "POLL_SECONDS", 0.05)
    return state


def test_a_full_disk_is_an_error(tmp_path, disk):
    """The disk fills up, the run dies."""
    disk["folder"], run = tmp_path, prepared()
    saver = CheckpointSaver(run.accelerator, tmp_path, every=Every(steps=2, signals=()), **QUIET)
    with saver, pytest.raises(NoSpaceError):
        train(run, saver)
    assert folders(tmp_path) == ["checkpoint-2", "checkpoint-4"]


def test_or_a_warning(tmp_path, disk):
    disk["folder"], run = tmp_path, prepared()
    every = Every(steps=6, signals=())
    saver = CheckpointSaver(run.accelerator, tmp_path, every=every, on_failure="warn", **QUIET)
    with (
        saver,
        pytest.warns(UserWarning, match="step 18: the save failed, training goes on: .*full"),
    ):
        assert len(train(run, saver)) == 21
    assert folders(tmp_path) == ["checkpoint-6", "checkpoint-12"]


def test_an_error_after_the_commit_says_that_the_checkpoint_is_there(tmp_path, monkeypatch):
    """The disk fails when the new name is synced."""
    real = local_disk.fsync

    def fail_once_committed(handle):
        if (tmp_path / "checkpoint-1/ft_ckpt.json").exists():
            monkeypatch.setattr(local_disk, "fsync", real)
            raise OSError(errno.EIO, "I/O error")
        real(handle)

    monkeypatch.setattr(local_disk, "fsync", fail_once_committed)
    every = Every(steps=1, signals=())
    with CheckpointSaver(directory=tmp_path, every=every, on_failure="warn") as saver:
        saver.register(model=nn.Linear(2, 2))
        with pytest.warns(
            UserWarning, match="step 1: the save failed.* checkpoint is in place, but might not"
        ):
            saver.step()
    assert verify(tmp_path / "checkpoint-1").ok


@pytest.mark.parametrize("background", [False, True])
def test_a_push_that_cannot_begin_does_not_fail_the_save(tmp_path, monkeypatch, background):
    """At the system's limit of threads; the next save pushes."""
    real, refused = threading.Thread.start, []

    def start(thread):
        if thread.name.startswith("ft_ckpt-push") and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)

    def save(name):
        url = f"memory://pushed-{background}/{name}"
        report = saver.save(nn.Linear(2, 2), tmp_path / name, push_to_hub=url)
        report = report.result(60) if background else report
        assert verify(report.path).ok
        return report

    with CheckpointSaver(background=background) as saver:
        with pytest.warns(UserWarning, match="first: saved, but .*: can't start new thread"):
            assert save("first").push is None
        assert save("second").push.result(60).is_new
    assert len(refused) == 1


def test_or_a_reason_to_delete_first(tmp_path, disk):
    disk["folder"], run = tmp_path, prepared()
    settings = {
        "every": Every(steps=2, signals=()),
        "keep": Keep(last=2),
        "when_full": "prune",
        **QUIET,
    }
    with CheckpointSaver(run.accelerator, tmp_path, **settings) as saver:
        train(run, saver)
    assert folders(tmp_path) == ["checkpoint-16", "checkpoint-18"]


def test_or_a_reason_to_wait(tmp_path, disk):
    import threading

    disk["folder"], run = tmp_path, prepared()
    threading.Timer(1.0, lambda: disk.update(room=99)).start()
    every, begun = Every(steps=6, signals=()), time.monotonic()
    with CheckpointSaver(
        run.accelerator, tmp_path, every=every, when_full="wait", **QUIET
    ) as saver:
        train(run, saver)
    assert folders(tmp_path) == ["checkpoint-6", "checkpoint-12", "checkpoint-18"]
    assert time.monotonic() - begun > 1.0


def test_a_disk_filled_while_it_is_written_to(tmp_path, monkeypatch):
    """There was room, others took it: the save is made again once there is."""
    from ft_ckpt.storage.io import FileWriter

    real, failures = FileWriter.finish, [NoSpaceError("full"), NoSpaceError("full")]

    def finish(file):
        if failures:
            raise failures.pop()
        return real(file)

    monkeypatch.setattr(FileWriter, "finish", finish)
    monkeypatch.setattr(space, "POLL_SECONDS", 0.01)
    run = prepared()
    CheckpointSaver(run.accelerator, tmp_path, when_full="wait").save_state()
    assert (folders(tmp_path), failures) == (["checkpoint-0"], [])
    failures.append(NoSpaceError("full"))
    with pytest.raises(NoSpaceError):
        CheckpointSaver(run.accelerator, tmp_path / "other").save_state()
    assert not any((tmp_path / "other").glob("[!.]*"))


def test_a_metric_is_the_best_so_far(tmp_path):
    run = prepared()
    every = Every(best=("accuracy", "max"), signals=())
    with CheckpointSaver(run.accelerator, tmp_path, every=every, **QUIET) as saver:
        for value in (0.1, 0.5, 0.4, None, float("nan"), 0.6):
            saver.step({} if value is None else {"accuracy": value})
    assert folders(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-6"]


SCRIPT = """
import signal, sys, time, torch
# a shell's jobs in the background ignore it
signal.signal(signal.SIGINT, signal.default_int_handler)
from training import prepared, learn, QUIET
from ft_ckpt import CheckpointSaver, Every
run = prepared()
with CheckpointSaver(run.accelerator, sys.argv[1], every=Every(), **QUIET) as saver:
    while True:
        learn(run, torch.ones(2, 3))
        saver.step()
        print(saver.progress.step, flush=True)
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("name", "code"),
    [("SIGTERM", 143), ("SIGINT", 130), pytest.param("SIGUSR1", 138, marks=pytest.mark.slow)],
)
def test_signals_save_and_exit(tmp_path, name, code):
    seen = []

    def until(said):
        while not seen or seen[-1] < 5:
            seen.append(int(said.readline()))

    ended = run_and_signal(SCRIPT, tmp_path, until=until, number=getattr(signal, name))
    last = [*seen, *map(int, ended.stdout.split())][-1]
    assert ended.returncode == code, ended.stderr
    # saved, and exited before it was printed
    assert folders(tmp_path) == [f"checkpoint-{last + 1}"]


def test_a_directory_that_cannot_be_written_fails_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError):
        CheckpointSaver(None, tmp_path / "file")


def run_of(folder, **settings):
    """A saver with a model and an optimizer, and a loader of six batches."""
    torch.manual_seed(0)
    model = network()
    saver = CheckpointSaver(None, folder, **QUIET, **settings)
    saver.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.1))
    return saver, DataLoader(TensorDataset(rows()), batch_size=2)


def batches(saver, loader, epochs=2):
    done = 0
    for (inputs,) in saver.remaining(loader, epochs=epochs):
        one(saver, inputs)
        done += 1
    return done


def one(saver, inputs):
    optimizer = saver._run.objects.registered["optimizer"]
    saver._run.model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    saver.step()


def test_a_finished_run_that_is_started_again_does_nothing(tmp_path, caplog):
    """It trained on from the last interval, or all over again: no state was saved at its end."""
    saver, loader = run_of(tmp_path, every=Every(steps=5, signals=()))
    assert batches(saver, loader) == 12
    # though nobody closed it
    assert folders(tmp_path) == ["checkpoint-5", "checkpoint-10", "checkpoint-12"]
    saver, loader = run_of(tmp_path, every=Every(steps=5, signals=()))
    with saver, caplog.at_level("INFO", "ft_ckpt"):
        assert saver.resume().step == 12
        assert batches(saver, loader) == 0
    assert "the run is finished: 2 of 2 epochs are done" in caplog.text
    assert folders(tmp_path) == ["checkpoint-5", "checkpoint-10", "checkpoint-12"]


def closed(saver):
    saver.close()


def left(saver):
    with saver:
        pass


def interrupted(saver):
    with pytest.raises(KeyboardInterrupt), saver:
        raise KeyboardInterrupt


def closed_on_the_way_out(saver):
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        saver.close()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("end", "saved"),
    [(closed, True), (left, True), (interrupted, False), (closed_on_the_way_out, False)],
)
def test_the_last_step_is_saved_at_the_end_unless_something_went_wrong(
    tmp_path, end, saved, background
):
    saver, _ = run_of(tmp_path, every=Every(steps=2, signals=()), background=background)
    for _ in range(3):
        one(saver, rows())
    end(saver)
    assert folders(tmp_path) == ["checkpoint-2", "checkpoint-3"][: 1 + saved]
    saver.close()  # again is nothing


def test_nothing_is_saved_at_the_end_of_what_saves_by_hand_or_did_not_train(tmp_path):
    for settings in ({}, {"every": Every(steps=2, signals=())}):
        with run_of(tmp_path, **settings)[0] as saver:
            if not settings:
                one(saver, rows())
    assert folders(tmp_path) == []


def fractions():
    return {
        "a": torch.tensor(0.5),
        "b": np.float32(0.25),
        "c": Decimal("1.5"),
        "d": True,
        "e": np.array([3]),
    }


def test_metrics_may_be_whatever_is_one_number(tmp_path):
    """The first save ended in json's TypeError, past on_failure="warn"."""
    saver, _ = run_of(tmp_path, every=Every(steps=1, best=("a", "max"), signals=()))
    live = torch.tensor(0.5)
    saver.step({**fractions(), "a": live})
    live.fill_(7)
    saver.save_state(path=tmp_path / "state", metrics=fractions())
    saver.save(saver._run.model, tmp_path / "weights", metrics=fractions())
    for name in ("checkpoint-1", "state", "weights"):
        found = read_manifest(open_place(tmp_path / name)).metrics
        assert found == {"a": 0.5, "b": 0.25, "c": 1.5, "d": 1.0, "e": 3.0}


@pytest.mark.parametrize("value", [None, "0.5", torch.zeros(2), np.zeros((1, 2)), [1.0], 1j])
def test_what_is_no_number_is_named(tmp_path, value):
    saver, _ = run_of(tmp_path, every=Every(steps=1, signals=()), on_failure="warn")
    for call in (saver.step, lambda metrics: saver.save_state(metrics=metrics)):
        with pytest.raises(ConfigError, match=f"metrics: worst is a {type(value).__name__}"):
            call({"loss": 1.0, "worst": value})
        for wrong in (0.5, 0.0, []):
            with pytest.raises(
                ConfigError,
                match=rf"metrics={re.escape(repr(wrong))}: expected a name and a number",
            ):
                call(wrong)
    assert folders(tmp_path) == []


def test_steps_are_whole_numbers(tmp_path):
    """A step of 7.0 was committed, and no resume could read the checkpoint; NumPy's ended in json's
    TypeError.
    """
    saver, _ = run_of(tmp_path)
    for wrong in (7.0, True, -2, "9", torch.tensor(7)):
        for call in (saver.step, partial(saver.save, saver._run.model)):
            with pytest.raises(ConfigError, match=r"step=.*: expected a non-negative integer"):
                call(step=wrong)
    assert folders(tmp_path) == []
    one(saver, rows())
    saver.step(step=np.int64(7))
    saver.save_state()
    saver.save(saver._run.model, step=np.int64(8))
    assert run_of(tmp_path)[0].resume("must").step == 7
    assert folders(tmp_path) == ["checkpoint-7", "checkpoint-8"]


def test_weights_after_a_roll_back_have_no_metrics_of_the_step_before_it(tmp_path):
    saver, _ = run_of(tmp_path, every=Every(steps=1, signals=()))
    for loss in (1.0, 2.0):
        saver.step({"loss": loss})
    saver.resume("checkpoint-1")
    saver.save(saver._run.model, tmp_path / "weights")
    found = read_manifest(open_place(tmp_path / "weights"))
    assert (found.step, found.metrics) == (1, {})


@pytest.mark.parametrize("background", [False, True])
def test_inference_mode_around_a_save_and_a_resume(tmp_path, background):
    """Memory made in it cannot be written to outside: later saves and the next step failed."""
    saver, _ = run_of(tmp_path, background=background)
    one(saver, rows())
    with torch.inference_mode():
        saver.save_state()
    one(saver, rows())
    saver.save_state()
    saver.wait()
    fresh, _ = run_of(tmp_path)
    with torch.inference_mode():
        fresh.resume("must")
    for each in (saver, fresh):
        torch.manual_seed(1)
        one(each, rows())
    for mine, other in zip(
        saver._run.model.parameters(), fresh._run.model.parameters(), strict=True
    ):
        assert torch.equal(mine, other)
