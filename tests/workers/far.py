"""A run whose ranks have separate disks: only rank 0 has its checkpoints, and every rank resumes from them.

A case is "exact/wrapper/model", "take/wrapper/model" (of the run in $LEFT, on rank 0's disk) or a function here. The
private disk of a rank is its working directory, under a path that is the same on all ranks.
"""

import os
import shutil
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import models
import pytest
import torch
import torch.distributed as dist
from resume import exact, live_model, optimizer_state, same, saver_of, take, train
from wrappers import truth

from ft_ckpt import verify
from ft_ckpt.errors import CorruptError, LoadError, NoSpaceError, RankError
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.training import node_copies, resume

HERE = Path("/proc/self/cwd")


@harness.named
def other_checkpoints(folder: Path) -> None:
    """Rank 1 has checkpoints of another run, one with the same name and one with a later step: rank 0's is resumed."""
    other = live_model("ddp", "llama", seed=5)
    with saver_of(other, HERE) as keeper:
        keeper.save_state(path=HERE / "checkpoint-7")
    theirs = disk_of_rank_0()
    if harness.RANK:
        shutil.copytree(theirs / "checkpoint-7", "checkpoint-2")
        shutil.move(theirs / "checkpoint-7", "checkpoint-7")
        assert verify("checkpoint-2").ok
    dist.barrier()
    resumed(left())


def left() -> dict[str, torch.Tensor]:
    """Leave a run of two steps with a checkpoint on rank 0's disk; return its weights."""
    live = live_model("ddp", "llama")
    with saver_of(live, HERE) as keeper:
        train(live, keeper, 0, 2)
        keeper.save_state()
        return truth(live)


def disk_of_rank_0() -> Path:
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, str(Path.cwd()))
    return Path(everybody[0])


def resumed(expected: dict[str, torch.Tensor], far: bool = True) -> None:
    fresh = live_model("ddp", "llama", seed=1)
    with saver_of(fresh, HERE) as keeper:
        progress = keeper.resume("must")
        assert (progress.step, progress.report.problems) == (2, ()), progress
        assert progress.resumed_from.name == "checkpoint-2"
        assert any("rank(s) 1 do not see" in note for note in progress.report.notes) is far, progress.report
        same(expected, truth(fresh))


@harness.named
def of_accelerate(folder: Path) -> None:
    """A folder of save_state on a disk that all ranks see is loaded; on disks of their own it is refused on all."""
    live = live_model("ddp", "llama")
    for step in range(2):
        live.step(models.batch(seed=step))
    live.accelerator.save_state(str(folder / "theirs"))
    live.accelerator.save_state(str(HERE / "theirs"))  # each disk gets the files that its rank writes
    expected = truth(live), optimizer_state(live)
    fresh = live_model("ddp", "llama", seed=1)
    with saver_of(fresh, HERE) as keeper:
        with pytest.raises(
            LoadError if harness.RANK else RankError, match=r"model.safetensors: not in the folder|rank 1"
        ):
            keeper.resume(HERE / "theirs")
        progress = keeper.resume(folder / "theirs")
        assert (progress.step, progress.report.problems) == (2, ()), progress
        same(expected[0], truth(fresh))
        same(expected[1], optimizer_state(fresh))


@harness.named
def copies(folder: Path) -> None:
    """A whole copy on the other disk is read there; one that is damaged is not."""
    expected, theirs = left(), disk_of_rank_0()
    if harness.RANK:
        shutil.copytree(theirs / "checkpoint-2", "checkpoint-2")
    dist.barrier()
    resumed(expected, far=False)
    if harness.RANK:
        with open("checkpoint-2/model.safetensors", "r+b") as file:  # noqa: PTH123 - r+b
            file.seek(-9, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-9, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
    dist.barrier()
    resumed(expected)


@harness.named
def unreadable(folder: Path) -> None:
    """A read of rank 0 fails: every rank raises at once."""
    live = live_model("fsdp2", "llama")
    with saver_of(live, HERE) as keeper:
        train(live, keeper, 0, 2)
        keeper.save_state()
    real = node_copies.read_range
    if harness.RANK == 0:
        node_copies.read_range = lambda *_: 1 / 0
    begun = time.monotonic()
    error = RankError if harness.RANK else ZeroDivisionError
    with saver_of(live, HERE) as keeper, pytest.raises(error, match=r"division by zero|rank 0 could not read"):
        keeper.resume("must")
    node_copies.read_range = real
    assert time.monotonic() - begun < 20
    with saver_of(live, HERE) as keeper:
        assert keeper.resume("must").step == 2


@harness.named
def full(folder: Path) -> None:
    """The temporary folder of a node has no room for the copy: every rank raises, before anything is sent."""
    live = live_model("fsdp2", "llama")
    with saver_of(live, HERE) as keeper:
        train(live, keeper, 0, 2)
        keeper.save_state()
    real = LocalStore.create
    if harness.RANK:
        LocalStore.create = lambda *_: (_ for _ in ()).throw(NoSpaceError("no room"))
    with saver_of(live, HERE) as keeper, pytest.raises(NoSpaceError, match="no room"):
        keeper.resume("must")
    LocalStore.create = real
    dist.barrier()
    with saver_of(live, HERE) as keeper:
        assert keeper.resume("must").step == 2


@harness.named
def leader_fails(folder: Path) -> None:
    """Rank 0 fails after it has sent the checkpoint: the others do not wait for it."""
    live = live_model("fsdp2", "llama")
    with saver_of(live, HERE) as keeper:
        train(live, keeper, 0, 2)
        keeper.save_state()
    real = resume.restore_rank_state
    kind = RankError if harness.RANK else CorruptError
    if harness.RANK == 0:
        resume.restore_rank_state = lambda *_: 1 / 0
    with saver_of(live, HERE) as keeper, pytest.raises(kind, match="division by zero"):
        keeper.resume("must")
    resume.restore_rank_state = real
    dist.barrier()
    with saver_of(live, HERE) as keeper:
        assert keeper.resume("must").step == 2


def case(name: str, folder: Path) -> None:
    private, scratch = folder / f"disk-{harness.RANK}", folder / "scratch"  # all ranks are on one node
    private.mkdir(exist_ok=True)
    scratch.mkdir(exist_ok=True)
    os.chdir(private)
    tempfile.tempdir = str(scratch)
    if "/" not in name:
        harness.NAMED[name](folder)
    elif name.startswith("exact/"):
        _, wrapper, model = name.split("/")
        exact(wrapper, model, HERE / "run")
    else:
        _, wrapper, model = name.split("/")
        left = Path(os.environ["LEFT"])
        if harness.RANK == 0:
            shutil.copytree(left, private, dirs_exist_ok=True)
        else:  # every disk has the expected values
            for file in ("truth.safetensors", "moments.safetensors"):
                shutil.copy(left / file, private)
        os.environ["LEFT"] = str(HERE)
        take(wrapper, model, folder)
    dist.barrier()
    assert not list(scratch.glob("ft_ckpt*")), "the copy is deleted"
    if harness.RANK and name not in ("other_checkpoints", "copies"):
        assert not list(private.glob("run/checkpoint-*")), "the other ranks have none"
        assert not list(private.glob("checkpoint-*")), "the other ranks have none"


if __name__ == "__main__":
    if not any("/zero" in name for name in sys.argv):
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    harness.run(case)
