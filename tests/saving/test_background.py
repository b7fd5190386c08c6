"""Saves in the background: one moment on the disk, errors that are told, one in flight, nothing
left behind.
"""

import gc
import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import models
import psutil
import pytest
import torch
import training
from launch import run_and_signal, run_python
from safetensors.torch import load_file
from small_checkpoints import contents
from torch import nn

from ft_ckpt import CheckpointSaver, Every, Keep, SaveReport, latest, verify
from ft_ckpt.checkpoint.commit import LocalStaging
from ft_ckpt.errors import CheckpointError, ConfigError, NoSpaceError
from ft_ckpt.saving import snapshot, write
from ft_ckpt.saving.planning import PendingSave


class Stamp(torch.optim.Optimizer):
    """Writes the number of the step into every parameter, and into a state tensor beside each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 1.0})
        for parameter in model.parameters():
            self.state[parameter] = {
                "moment": torch.zeros_like(parameter),
                "count": torch.zeros(()),
            }

    @torch.no_grad()
    def step(self, closure=None):
        for parameter, state in self.state.items():
            for tensor in (parameter, *state.values()):
                tensor.add_(1)


class Stamped(nn.Module):
    """Its buffer changes in every forward, half of it is frozen and changed by nobody."""

    def __init__(self, size: int = 1 << 16) -> None:
        super().__init__()
        self.layers = nn.ParameterList([torch.zeros(size + odd) for odd in range(6)])
        self.scalar = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(size))

    def forward(self) -> None:
        self.seen += 1


def stamped(folder, **settings):
    model = Stamped()
    optimizer = Stamp(model)
    saver = CheckpointSaver(None, folder, background=True, on_difference="ignore", **settings)
    saver.register(model=model, optimizer=optimizer)
    return model, optimizer, saver


def step(model, optimizer) -> None:
    model()
    optimizer.step()


def values(folder: Path) -> set[float]:
    """Every number in the checkpoint's tensors of the run."""
    files = [
        load_file(folder / "model.safetensors"),
        load_file(folder / "state" / "training.safetensors"),
    ]
    tensors = [tensor for file in files for name, tensor in file.items() if "rank-" not in name]
    assert len(tensors) == 22
    return {value for tensor in tensors for value in (float(tensor.min()), float(tensor.max()))}


# a leak would be 3.4 MB with each save
def torn_free(folder: Path, saves: int, slack_bytes: int) -> None:
    """Step-1 moments with step-2 weights. Every save takes more memory."""
    model, optimizer, saver = stamped(folder)
    process, memory = psutil.Process(), []
    with saver:
        for number in range(1, saves + 1):
            step(model, optimizer)
            handle = saver.save_state(path=folder / "now")
            for _ in range(3):
                step(model, optimizer)
            assert isinstance(handle, PendingSave)
            handle.result(60)
            assert values(folder / "now") == {4.0 * number - 3}
            memory.append(process.memory_info().rss)
    assert min(memory[-10:]) - min(memory[saves // 3 : saves // 3 + 10]) < slack_bytes


def test_what_an_optimizer_waits_is_in_the_log_of_saves(tmp_path, monkeypatch):
    model, optimizer, saver = stamped(tmp_path)
    copy = snapshot._copy_by_device

    def slow_in_a_thread(*given):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)
        return copy(*given)

    monkeypatch.setattr(snapshot, "_copy_by_device", slow_in_a_thread)
    calls = []
    with saver:
        for name in ("waited-for", "next"):
            step(model, optimizer)
            saver.step()
            begun = time.monotonic()
            handle = saver.save_state(path=tmp_path / name)
            calls.append(time.monotonic() - begun)
        handle.result(60)
    first, _ = json.loads((tmp_path / "next/state/training.json").read_text())["history"]["saves"]
    assert calls[0] + 0.2 < first["stall_seconds"] < first["seconds"] + calls[0]


def test_a_save_without_a_snapshot_takes_no_wait_of_an_earlier_one(tmp_path):
    model, optimizer, saver = stamped(tmp_path)
    with saver:
        saver.save_state(path=tmp_path / "first").result(60)
        saver._pending.snapshot.waited_seconds = 1000.0
        saver.config = replace(saver.config, snapshot_bytes=1)
        step(model, optimizer)
        saver.step()
        saver.save_state(path=tmp_path / "second").result(60)
        step(model, optimizer)
        saver.step()
        saver.save_state(path=tmp_path / "third").result(60)
    _, second, _ = json.loads((tmp_path / "third/state/training.json").read_text())["history"][
        "saves"
    ]
    assert second["stall_seconds"] < 100


def test_the_default_device_of_a_script_is_not_that_of_copies(tmp_path):
    """Memory that files are written from was allocated on torch.set_default_device's: the process
    crashed.
    """

    def begun() -> tuple[nn.Module, CheckpointSaver]:
        model = models.lora(models.build("llama"))
        optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad]
        )
        saver = CheckpointSaver(directory=tmp_path / "run", background=True)
        saver.register(model=model, optimizer=optimizer)
        return model, saver

    (model, saver), (again, resuming) = begun(), begun()
    with torch.no_grad():
        for parameter in (parameter for parameter in model.parameters() if parameter.requires_grad):
            parameter.add_(1)
    # another accelerator than the model's gives errors, not crashes
    with torch.device("meta"), saver, resuming:
        saver.step(step=1)
        saver.save_state()
        saver.save(model, tmp_path / "merged", merged=True)
        assert saver.wait().notes
        resuming.resume("must")
    assert verify(tmp_path / "run" / "checkpoint-1").ok
    assert verify(tmp_path / "merged").ok
    restored = again.state_dict()
    assert all(torch.equal(restored[name], value) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_every_checkpoint_is_one_step(tmp_path):
    torn_free(tmp_path, 60, 24 << 20)


@pytest.mark.slow
def test_five_hundred_checkpoints_are_one_step_each(tmp_path):
    torn_free(tmp_path, 500, 24 << 20)


@pytest.fixture
def held(monkeypatch):
    """Copies that are not made before save() returns wait for this."""
    go, real = threading.Event(), snapshot._copy_by_device

    def copy(*arguments):
        if threading.current_thread() is not threading.main_thread():
            assert go.wait(30)
        return real(*arguments)

    monkeypatch.setattr(snapshot, "_copy_by_device", copy)
    return go


def test_the_optimizer_waits_for_the_copy_and_forward_does_not(tmp_path, held):
    model, optimizer, saver = stamped(tmp_path)
    step(model, optimizer)
    handle = saver.save_state(path=tmp_path / "one")
    model()  # the buffer's copy is there
    threading.Timer(0.2, held.set).start()
    optimizer.step()
    assert held.is_set()
    saver.close()
    assert handle.done
    assert values(tmp_path / "one") == {1.0}


def test_what_no_known_optimizer_changes_is_copied_at_once(tmp_path, held):
    model = Stamped()
    with CheckpointSaver(None, tmp_path) as saver:
        handle = saver.save(model, tmp_path / "one", background=True)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.fill_(7)
        held.set()
        handle.result(30)
    assert {
        float(tensor.max()) for tensor in load_file(tmp_path / "one" / "model.safetensors").values()
    } == {0.0}


def test_optimizers_are_given_back(tmp_path):
    _model, optimizer, saver = stamped(tmp_path)
    saver.save_state(path=tmp_path / "one")
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    saver.save_state(path=tmp_path / "two")
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    saver.close()
    assert not optimizer._optimizer_step_pre_hooks


# Failures


@pytest.fixture
def failing(monkeypatch):
    """While this is set, no file can be written."""
    broken, real = threading.Event(), write.write_file

    def write_or_fail(*arguments):
        if broken.is_set():
            raise NoSpaceError("model.safetensors: no space left")
        return real(*arguments)

    monkeypatch.setattr(write, "write_file", write_or_fail)
    return broken


CALLS = {
    "save": lambda saver, model: saver.save(model, step=9),
    "save_state": lambda saver, model: saver.save_state(),
    "wait": lambda saver, model: saver.wait(),
    "step": lambda saver, model: saver.step(),
    "close": lambda saver, model: saver.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_failure_is_raised_by_the_next_call_and_changes_nothing(tmp_path, failing, call):
    """`latest` moved, or the old checkpoint deleted, before the new one is durable; nobody is
    told.
    """
    model, _optimizer, saver = stamped(tmp_path, keep=Keep(last=1))
    saver.step(step=1)
    saver.save_state().result(30)
    before = contents(tmp_path / "checkpoint-1")
    failing.set()
    saver.step(step=2)
    handle = saver.save_state()
    with pytest.raises(NoSpaceError):
        handle.result(30)
    with pytest.raises(NoSpaceError):
        CALLS[call](saver, model)
    assert contents(tmp_path / "checkpoint-1") == before
    assert [*tmp_path.glob("[!.]*")] == [latest(tmp_path)] == [tmp_path / "checkpoint-1"]
    failing.clear()
    if call != "close":
        saver.save_state()  # told once
        saver.close()
        assert latest(tmp_path) == tmp_path / f"checkpoint-{saver.progress.step}"
        assert not (tmp_path / "checkpoint-1").exists()


def test_training_goes_on_where_failures_are_warned_of(tmp_path, failing):
    every = Every(steps=1, signals=(), best=("loss", "min"))
    _model, _optimizer, saver = stamped(tmp_path, every=every, on_failure="warn")
    failing.set()
    saver.step({"loss": 1.0})
    saver._pending.queue.join()
    failing.clear()
    with pytest.warns(UserWarning, match="no space left"):
        saver.step({"loss": 2.0})
    assert saver._run.history.best == {"loss": 2.0}  # the first never came to be
    saver.close()
    assert latest(tmp_path) == tmp_path / "checkpoint-2"


def test_an_error_of_the_program_is_not_hidden(tmp_path, failing):
    failing.set()
    _model, _optimizer, saver = stamped(tmp_path)
    with pytest.raises(KeyError), saver:  # noqa: PT012 - the error comes after the call
        saver.save_state()
        {}["of the program"]
    assert not list(tmp_path.iterdir())


# One in flight, and the end


def test_a_save_waits_for_the_one_before(tmp_path, monkeypatch):
    real, order = LocalStaging.commit, []

    def slow(staging, manifest):
        order.append(f"{staging.target.name} begins")
        threading.Event().wait(0.2)
        real(staging, manifest)
        order.append(f"{staging.target.name} ends")

    monkeypatch.setattr(LocalStaging, "commit", slow)
    model, _optimizer, saver = stamped(tmp_path)
    with saver:
        handles = [saver.save(model, tmp_path / name) for name in "ab"]
        assert handles[0].done
        report = saver.save(model, tmp_path / "c", background=False)
    assert isinstance(report, SaveReport)
    assert order == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]


def test_close_waits(tmp_path):
    _model, _optimizer, saver = stamped(tmp_path)
    saver.save_state(path=tmp_path / "one")
    saver.close()
    assert verify(tmp_path / "one").ok
    with pytest.raises(CheckpointError, match="closed"):
        saver.save_state(path=tmp_path / "two")


PROGRAM = """
import sys, os, torch
from ft_ckpt import CheckpointSaver
from ft_ckpt.checkpoint.commit import LocalStaging
folder, what = sys.argv[1:]
model = torch.nn.Linear(300, 300)
saver = CheckpointSaver(None, folder, background=True)
saver.save(model, step=1, background=False)
def hang(*_):
    print("hanging", flush=True)
    import time
    time.sleep(600)
if what == "hang":
    LocalStaging.commit = hang
if what == "fail":
    LocalStaging.commit = lambda *_: 1 / 0
saver.save(model, step=2)
"""


@pytest.mark.parametrize("what", ["end", "fail"])
def test_a_program_that_ends_has_saved_or_says_that_it_has_not(tmp_path, what):
    said = run_python(PROGRAM, tmp_path, what).stderr
    assert ("division by zero" in said) == (what == "fail")
    assert latest(tmp_path) == tmp_path / ("checkpoint-2" if what == "end" else "checkpoint-1")


def test_killed_while_a_save_is_in_flight(tmp_path):
    said = []
    ended = run_and_signal(
        PROGRAM, tmp_path, "hang", until=lambda output: said.append(output.readline())
    )
    assert (said, ended.returncode) == (["hanging\n"], -signal.SIGKILL), ended.stderr
    assert latest(tmp_path) == tmp_path / "checkpoint-1"
    assert verify(latest(tmp_path)).ok
    with CheckpointSaver(None, tmp_path, background=True) as saver:
        saver.save(nn.Linear(300, 300), step=2)
    assert latest(tmp_path) == tmp_path / "checkpoint-2"
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-2",
    ]


# What a checkpoint is


def test_resumed_from_a_background_checkpoint_the_run_is_the_same(tmp_path):
    whole = training.whole(tmp_path / "whole")
    run, settings = training.prepared(), {"every": Every(steps=5, signals=()), **training.QUIET}
    with CheckpointSaver(run.accelerator, tmp_path / "run", background=True, **settings) as saver:
        done = training.train(run, saver, 8)
        saver.wait()
        shutil.copytree(tmp_path / "run", tmp_path / "killed")  # before the end is saved
    assert done == whole[: len(done)]
    assert latest(tmp_path / "killed") == tmp_path / "killed" / "checkpoint-5"
    assert done[:5] + training.go_on(tmp_path / "killed") == whole
    assert done + training.go_on(tmp_path / "run") == whole


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "h5"},
        {"format": "dual"},
        {"format": "h5", "compression": "gzip"},
        {"dtype": "bfloat16"},
    ],
)
def test_other_formats(tmp_path, settings):
    model, optimizer, saver = stamped(tmp_path, **settings)
    with saver:
        step(model, optimizer)
        saver.save(model, tmp_path / "now", background=False)
        saver.save(model, tmp_path / "later")
        step(model, optimizer)
    assert verify(tmp_path / "later").ok
    weights = [
        path.name for path in (tmp_path / "now").iterdir() if path.suffix in (".h5", ".safetensors")
    ]
    assert weights
    for name in weights:
        assert (tmp_path / "now" / name).read_bytes() == (tmp_path / "later" / name).read_bytes()


def test_a_snapshot_larger_than_it_may_be_is_not_made(tmp_path):
    model, _optimizer, saver = stamped(tmp_path, snapshot_bytes="1MB")
    with saver:
        handle = saver.save(model, tmp_path / "one")
        assert isinstance(handle, PendingSave)
        assert handle.done
        assert handle.result() == saver.wait()
        assert isinstance(saver.save(nn.Linear(3, 3), tmp_path / "two"), PendingSave)
    with pytest.raises(ConfigError, match="snapshot_bytes"):
        CheckpointSaver(None, tmp_path, snapshot_bytes="much")


def test_a_save_for_a_signal_is_there_when_the_process_exits(tmp_path):
    _model, _optimizer, saver = stamped(tmp_path, every=Every(signals=("SIGUSR1",)))
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit):
        saver.step()
    assert latest(tmp_path) == tmp_path / "checkpoint-1"


SIZE = 1_234_567  # elements, of no other tensor


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("is_remote", [False, True], ids=["disk", "bucket"])
def test_a_closed_saver_holds_no_copies(tmp_path, no_collection, is_remote):
    """A cycle of references that a save leaves would keep them until the next collection: gigabytes
    of pinned memory.
    """
    model = nn.Linear(SIZE, 1, bias=False)
    with CheckpointSaver(background=True) as saver:
        saver.save(model, f"memory:/{tmp_path}" if is_remote else tmp_path / "saved").result()
        assert len(tensors_of_size()) > 1, "no copy was made"
    deadline = time.monotonic() + 10  # the thread returns after its result is there
    while len(tensors_of_size()) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(tensors_of_size()) == 1, "only the model's own should be left"


def tensors_of_size():
    return [
        one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.numel() == SIZE
    ]
