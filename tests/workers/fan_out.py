"""Resume with fan_out="broadcast": rank 0 reads the replicated tensors, and all ranks learn of an error.

A case is "same/wrapper/model" or one of the functions here.
"""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import pytest
import torch
import torch.distributed as dist
from exact_runs import TOLD, live_model, optimizer_state, same, train
from tuning import buckets_of
from wrappers import Live, truth

from ft_ckpt import CheckpointSaver
from ft_ckpt.distributed import fill
from ft_ckpt.errors import LoadError, RankError
from ft_ckpt.storage import read_ahead as reading
from ft_ckpt.training import restore, resume

BUCKET = 1 << 16  # the minimum: many buckets even for a tiny model


def saver_of(live: Live, folder: Path, **settings: Any) -> CheckpointSaver:
    saver = CheckpointSaver(live.accelerator, folder, **TOLD, **settings)
    saver.register(model=live.model, optimizer=live.optimizer)
    return saver


def left(wrapper: str, model: str, folder: Path) -> Live:
    """A run of two steps with a checkpoint in `folder`."""
    live = live_model(wrapper, model)
    with saver_of(live, folder) as saver:
        train(live, saver, 0, 2)
        saver.save_state()
    return live


def same_as_read(wrapper: str, model: str, folder: Path) -> None:
    live = left(wrapper, model, folder)
    tensors, moments = truth(live), optimizer_state(live)
    asked: list[str] = []
    count_common(asked)
    fresh = live_model(wrapper, model, seed=1)
    with saver_of(fresh, folder, fan_out="broadcast") as saver:
        progress = saver.resume("must")
        assert (progress.step, progress.report.problems) == (2, ()), progress
        same(tensors, truth(fresh))
        same(moments, optimizer_state(fresh))
        train(fresh, saver, 2, 1)
    if wrapper == "ddp":
        assert bool(asked) is (harness.RANK == 0), f"{len(asked)} tensors were read on this rank"


def count_common(asked: list[str]) -> None:
    """Note the tensors this process reads from here on."""
    for room in (fill, fill):
        real = reading.read_ahead

        def noted(runs: Any, *options: Any, real: Any = real) -> Any:
            runs = list(runs)
            asked.extend(run.name for run in runs)
            return real(runs, *options)

        room.read_ahead = noted


@harness.named
def cut_short(folder: Path) -> None:
    """Rank 0 fails in the middle of reading: every rank reports it, at once."""
    left("ddp", "llama", folder)
    if harness.RANK == 0:
        real = reading.read_ahead

        def broken(runs: Any, *options: Any) -> Any:
            for number, part in enumerate(real(runs, *options)):
                if number == 7:
                    raise OSError(5, "the disk is gone")
                yield part

        fill.read_ahead = broken
    fresh = live_model("ddp", "llama", seed=1)
    with saver_of(fresh, folder, fan_out="broadcast") as saver:
        progress = saver.resume("must", allow=True)
        first = {item.name: item for item in progress.report.items}["weights"]
        assert first.status == "failed"
        assert "the disk is gone" in first.detail, first


@harness.named
def another_model(folder: Path) -> None:
    """One rank's tensors do not fit: the others do not wait for it in a broadcast."""
    left("ddp", "llama", folder)
    fresh = live_model("ddp", "llama", seed=1)
    if harness.RANK == 1:
        real = fill.check_all
        fill.check_all = lambda wanted: real([replace(one, name="nowhere") for one in wanted])
    with saver_of(fresh, folder, fan_out="broadcast") as saver, pytest.raises(LoadError, match="nowhere: not in the"):
        saver.resume("must")


@harness.named
def gone_before_reading(folder: Path) -> None:
    """One rank fails before it reads anything: the others learn of it before their timeout."""
    left("ddp", "llama", folder)
    fresh = live_model("ddp", "llama", seed=1)
    real = resume.items_in_saved_order
    if harness.RANK == 1:
        resume.items_in_saved_order = lambda *_: 1 / 0
    kind, words = (RankError, "rank 1.*division by zero") if harness.RANK == 0 else (ZeroDivisionError, "division")
    with saver_of(fresh, folder, fan_out="broadcast") as saver, pytest.raises(kind, match=words):
        saver.resume("must")
    resume.items_in_saved_order = real
    goes_on(fresh, folder)


@harness.named
def no_memory(folder: Path) -> None:
    """One rank has no memory for its bucket: nobody enters the broadcast."""
    left("ddp", "llama", folder)
    fresh = live_model("ddp", "llama", seed=1)
    real = fill.wire_device
    fill.wire_device = lambda: real() if harness.RANK == 0 else 1 / 0
    with saver_of(fresh, folder, fan_out="broadcast") as saver, pytest.raises(LoadError, match="division by zero"):
        saver.resume("must")
    fill.wire_device = real
    goes_on(fresh, folder)


@harness.named
def fewer_readings(folder: Path) -> None:
    """One rank finds that nothing fits and does not take part in the reading: the others notice."""
    left("ddp", "llama", folder)
    fresh = live_model("ddp", "llama", seed=1)
    real = resume.restore_weights
    if harness.RANK == 1:
        resume.restore_weights = lambda *_: restore.Restored("weights", "failed", "not of this model")
    with saver_of(fresh, folder, fan_out="broadcast") as saver, pytest.raises(LoadError, match="weights: failed"):
        saver.resume("must")
    resume.restore_weights = real
    goes_on(fresh, folder)


def goes_on(live: Live, folder: Path) -> None:
    """Check that the ranks are in step again."""
    with saver_of(live, folder, fan_out="broadcast") as saver:
        assert saver.resume("must").step == 2


def case(name: str, folder: Path) -> None:
    try:
        if "/" not in name:
            harness.NAMED[name](folder)
            return
        _, wrapper, model = name.split("/")
        same_as_read(wrapper, model, folder)
    finally:
        for room in (fill, fill):
            room.read_ahead = reading.read_ahead


if __name__ == "__main__":
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with buckets_of(BUCKET):
        harness.run(case)
