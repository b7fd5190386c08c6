"""Two ranks that train and decide together when to save: signals, clocks, metrics, and steps that are not complete."""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import models
import pytest
import torch
import torch.distributed as dist
from training import QUIET, learn, network, prepared
from wrappers import WRAPPERS, Live

from ft_ckpt import CheckpointSaver, Every
from ft_ckpt.errors import LeaseTakenError, LoadError

SHORT = {"enter_timeout_seconds": 30, **QUIET}


@harness.named
def one_signal(folder: Path) -> None:
    """Rank 1 alone gets a signal; both save the same step and exit with its code."""
    run = prepared()
    with CheckpointSaver(run.accelerator, folder, every=Every(), **SHORT) as saver:
        with pytest.raises(SystemExit) as end:
            endless(run, saver)
        assert end.value.code == 143
    saved = [path.name for path in folder.glob("checkpoint-*")]
    assert saved == [f"checkpoint-{saver.progress.step}"], saved
    assert saver.progress.step >= 4


def endless(run: Any, saver: CheckpointSaver) -> None:
    for step in range(100000):
        learn(run, torch.ones(2, 3))
        if step == 3 and harness.RANK == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        saver.step()


@harness.named
def by_the_clock(folder: Path) -> None:
    """The ranks' clocks differ: rank 0's decides."""
    run = prepared()
    minutes = 0.02 if harness.RANK == 0 else 100.0
    with CheckpointSaver(run.accelerator, folder, every=Every(minutes=minutes, signals=()), **SHORT) as saver:
        begun = time.monotonic()
        while time.monotonic() - begun < 6 and not any(folder.glob("checkpoint-*")):
            learn(run, torch.ones(2, 3))
            saver.step()
    assert any(folder.glob("checkpoint-*"))


@harness.named
def by_a_metric(folder: Path) -> None:
    """The ranks' losses differ: rank 0's decides."""
    run = prepared()
    with CheckpointSaver(run.accelerator, folder, every=Every(best=("loss", "min"), signals=()), **SHORT) as saver:
        reports = [saver.step({"loss": value * (1 - 2 * harness.RANK)}) for value in (3.0, 2.0, 4.0, 1.0)]
    assert [report is not None for report in reports] == [True, True, False, True], reports


@harness.named
def incomplete_ddp(folder: Path) -> None:
    incomplete("ddp", folder)


@harness.named
def incomplete_fsdp2(folder: Path) -> None:
    incomplete("fsdp2_accelerate", folder)


def incomplete(wrapper: str, folder: Path) -> None:
    """Saved after each batch of an accumulated step and resumed, the next losses are equal to the bit."""
    live = accumulating(wrapper, 0)
    expected = []
    with CheckpointSaver(live.accelerator, folder, **SHORT) as saver:
        for number in range(10):
            expected.append(micro_step(live, number))
            saver.step()
            if number in (3, 4, 5, 6):
                saver.save_state(path=folder / f"after-{number}")
    for number in (3, 4, 5, 6):
        fresh = accumulating(wrapper, 1)
        with CheckpointSaver(fresh.accelerator, folder, **SHORT) as saver:
            report = saver.resume(f"after-{number}").report
            assert any(item.name == "gradients" for item in report.items) == (number != 3), report
            found = [micro_step(fresh, later) for later in range(number + 1, 10)]
            assert found == expected[number + 1 :], (number, found, expected)


def accumulating(wrapper: str, seed: int) -> Live:
    live = WRAPPERS[wrapper](models.build("llama", seed))
    live.accelerator.gradient_accumulation_steps = 4
    live.accelerator.step = 0
    live.accelerator.gradient_state._set_sync_gradients(True)
    return live


def micro_step(live: Live, number: int) -> float:
    with live.accelerator.accumulate(live.model):
        return live.step(models.batch(seed=31 * number + harness.RANK))


@harness.named
def by_hand_ddp(folder: Path) -> None:
    by_hand("ddp", folder)


@harness.named
def by_hand_fsdp2(folder: Path) -> None:
    by_hand("fsdp2", folder)


@harness.named
def by_hand_fsdp2_unsynced(folder: Path) -> None:
    by_hand("fsdp2", folder, unsynced=True)


def by_hand(wrapper: str, folder: Path, *, unsynced: bool = False) -> None:
    """Without Accelerate: three batches make a step, and gradients of an unfinished one are kept."""

    def batch(live: Live, number: int) -> float:
        if unsynced:
            live.model.set_requires_gradient_sync(number % 3 == 2)
        loss = live.model(**models.batch(seed=31 * number + harness.RANK)).loss
        loss.backward()
        if number % 3 == 2:
            live.optimizer.step()
            live.optimizer.zero_grad()
        return float(loss.detach())

    def made(seed: int) -> tuple[Live, CheckpointSaver]:
        live = WRAPPERS[wrapper](models.build("llama", seed))
        saver = CheckpointSaver(None, folder, **SHORT)
        saver.register(model=live.model, optimizer=live.optimizer)
        return live, saver

    live, saver = made(0)
    expected = []
    for number in range(9):
        expected.append(batch(live, number))
        saver.step()
        if number in (3, 4, 5):
            saver.save_state(path=folder / f"after-{number}")
    assert saver.progress.step == 3, saver.progress
    for number in (3, 4, 5):
        fresh, saver = made(1)
        report = saver.resume(f"after-{number}").report
        assert any(item.name == "gradients" for item in report.items) == (number != 5), report
        assert [batch(fresh, later) for later in range(number + 1, 9)] == expected[number + 1 :], number


@harness.named
def unlike(folder: Path) -> None:
    """A failure on one rank alone is raised on all, and names that rank."""
    run = prepared()
    saver = CheckpointSaver(run.accelerator, folder, **SHORT)
    saver.save_state()
    other = network() if harness.RANK == 0 else torch.nn.Linear(2, 2)
    fresh = CheckpointSaver(None, folder, **SHORT)
    with pytest.raises(LoadError, match="weights: failed: on rank 1"):
        fresh.resume(model=other, allow=["optimizer", "scheduler", "data"])


@harness.named
def lease_taken(folder: Path) -> None:
    """Another process trains into the folder of the run: rank 0 finds it, and both ranks raise."""
    saver = CheckpointSaver(prepared().accelerator, os.environ["RUN"], **SHORT)
    for action in (saver.resume, saver.save_state):
        with pytest.raises(LeaseTakenError, match=f"process {os.environ['HOLDER']} on .* trains into it"):
            action()


@harness.named
def lease_of_the_dead(folder: Path) -> None:
    """Killed after a save, twice; each time new processes go on at once."""
    run, place = prepared(), Path(os.environ["RUN"])
    lives = len([*place.glob("checkpoint-*")])
    begun = time.monotonic()
    with CheckpointSaver(run.accelerator, place, **SHORT) as saver:
        assert saver.resume().step == lives
        assert time.monotonic() - begun < 20
        learn(run, torch.ones(2, 3))
        saver.step()
        saver.save_state()
        dist.barrier()
        if lives < 2:
            os.kill(os.getpid(), signal.SIGKILL)


def case(name: str, folder: Path) -> None:
    harness.NAMED[name](folder)


if __name__ == "__main__":
    sys.setswitchinterval(0.001)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    harness.run(case)
