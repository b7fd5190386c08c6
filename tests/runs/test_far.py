"""Nodes without a shared disk: a run is saved by rank 0 there, and resumed on all of them.

The disk of a rank is its working directory, under a path that is the same on all ranks.
"""

import importlib.util
import os
import shutil
import tempfile
import time
from functools import wraps
from pathlib import Path

import models
import pytest
import torch.distributed as dist
from exact_runs import (
    exact,
    live_model,
    optimizer_state,
    resume_run,
    same,
    save_run,
    saver_of,
    train,
)
from on_ranks import RANK, call_on_ranks, on_ranks
from wrappers import truth

from ft_ckpt import verify
from ft_ckpt.errors import CorruptError, LoadError, NoSpaceError, RankError
from ft_ckpt.runs.resume import node_copies, restore_run
from ft_ckpt.storage.local import LocalStore

HERE = Path("/proc/self/cwd")


def enter_disk(folder):
    """The disk of this rank, from now on its working directory; all ranks are on one node, with one
    scratch folder.
    """
    disk, scratch = folder / f"disk-{RANK}", folder / "scratch"
    disk.mkdir(exist_ok=True)
    scratch.mkdir(exist_ok=True)
    os.chdir(disk)
    tempfile.tempdir = str(scratch)
    return disk


def check_copies(folder):
    dist.barrier()
    assert not list((folder / "scratch").glob("ft_ckpt*")), "the copy is deleted"


def on_own_disks(test):
    """Run a test on two ranks with disks of their own."""

    @on_ranks(2)
    @wraps(test)
    def with_disks(tmp_path, **arguments):
        disk = enter_disk(tmp_path)
        test(tmp_path, **arguments)
        check_copies(tmp_path)
        if RANK and not (disk / "copied").exists():
            assert not list(disk.rglob("checkpoint-*")), "the other ranks have none"

    return with_disks


EXACT = [("ddp", "llama"), ("fsdp1", "llama"), ("fsdp2", "llama"), ("fsdp2", "lora")]


@pytest.mark.sample("fsdp2-llama")
@pytest.mark.parametrize(("wrapper", "model"), EXACT)
@on_own_disks
def test_the_next_losses_are_the_same_bits(tmp_path, wrapper, model):
    exact(wrapper, model, HERE / "run")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra"
)
@pytest.mark.parametrize(
    ("wrapper", "model"), [("zero1", "llama"), ("zero2", "llama"), ("zero3", "lora")]
)
@on_ranks(2, group_seconds=None, env={"DS_ACCELERATOR": "cpu"}, timeout=280)
def test_under_zero(tmp_path, wrapper, model):
    enter_disk(tmp_path)
    exact(wrapper, model, HERE / "run")
    check_copies(tmp_path)


def take_on_own_disks(folder, wrapper, left):
    disk = enter_disk(folder)
    if RANK == 0:
        shutil.copytree(left, disk, dirs_exist_ok=True)
    else:  # every disk has the expected values
        for file in ("truth.safetensors", "moments.safetensors"):
            shutil.copy(left / file, disk)
    resume_run(wrapper, "llama", HERE)
    check_copies(folder)
    if RANK:
        assert not list(disk.rglob("checkpoint-*")), "the other ranks have none"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "ranks", "after", "more"), [("fsdp2", 2, "fsdp1", 4), ("none", 1, "ddp", 2)]
)
def test_another_number_of_ranks_under_another_wrapper(tmp_path, before, ranks, after, more):
    left = tmp_path / "left"
    left.mkdir()
    call_on_ranks(ranks, save_run, before, "llama", left)
    call_on_ranks(more, take_on_own_disks, tmp_path, after, left)


@on_own_disks
def test_another_run_on_another_disk_is_not_resumed(tmp_path):
    """Rank 1 has checkpoints of another run, one with the same name and one with a later step: rank
    0's is resumed.
    """
    other = live_model("ddp", "llama", seed=5)
    with saver_of(other, HERE) as keeper:
        keeper.save_state(path=HERE / "checkpoint-7")
    theirs = disk_of_rank_0()
    if RANK:
        Path("copied").touch()
        shutil.copytree(theirs / "checkpoint-7", "checkpoint-2")
        shutil.move(theirs / "checkpoint-7", "checkpoint-7")
        assert verify("checkpoint-2").ok
    dist.barrier()
    resumed(left())


def left():
    """Leave a run of two steps with a checkpoint on rank 0's disk; return its weights."""
    live = live_model("ddp", "llama")
    with saver_of(live, HERE) as keeper:
        train(live, keeper, 0, 2)
        keeper.save_state()
        return truth(live)


def disk_of_rank_0():
    everybody = [None, None]
    dist.all_gather_object(everybody, str(Path.cwd()))
    return Path(everybody[0])


def resumed(expected, far=True):
    fresh = live_model("ddp", "llama", seed=1)
    with saver_of(fresh, HERE) as keeper:
        progress = keeper.resume("must")
        assert (progress.step, progress.report.problems) == (2, ()), progress
        assert progress.resumed_from.name == "checkpoint-2"
        assert any("rank(s) 1 do not see" in note for note in progress.report.notes) is far, (
            progress.report
        )
        same(expected, truth(fresh))


@pytest.mark.slow
@on_own_disks
def test_folders_of_save_state(tmp_path):
    """A tmp_path of save_state on a disk that all ranks see is loaded; on disks of their own it is
    refused on all.
    """
    live = live_model("ddp", "llama")
    for step in range(2):
        live.step(models.batch(seed=step))
    live.accelerator.save_state(str(tmp_path / "theirs"))
    # each disk gets the files that its rank writes
    live.accelerator.save_state(str(HERE / "theirs"))
    expected = truth(live), optimizer_state(live)
    fresh = live_model("ddp", "llama", seed=1)
    with saver_of(fresh, HERE) as keeper:
        with pytest.raises(
            LoadError if RANK else RankError, match=r"model.safetensors: not in the folder|rank 1"
        ):
            keeper.resume(HERE / "theirs")
        progress = keeper.resume(tmp_path / "theirs")
        assert (progress.step, progress.report.problems) == (2, ()), progress
        same(expected[0], truth(fresh))
        same(expected[1], optimizer_state(fresh))


@pytest.mark.slow
@on_own_disks
def test_a_whole_copy_on_another_disk_is_read(tmp_path):
    """A whole copy on the other disk is read there; one that is damaged is not."""
    expected, theirs = left(), disk_of_rank_0()
    if RANK:
        Path("copied").touch()
        shutil.copytree(theirs / "checkpoint-2", "checkpoint-2")
    dist.barrier()
    resumed(expected, far=False)
    if RANK:
        with open("checkpoint-2/model.safetensors", "r+b") as file:  # noqa: PTH123 - r+b
            file.seek(-9, os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-9, os.SEEK_END)
            file.write(bytes([byte ^ 1]))
    dist.barrier()
    resumed(expected)


def divide_by_zero(*_):
    return 1 / 0


def have_no_room(*_):
    raise NoSpaceError("no room")


# what fails -> the rank, the function, its replacement, the errors of both ranks
FAILURES = {
    "the read of rank 0": (
        *(0, node_copies, "read_range", divide_by_zero),
        *((ZeroDivisionError, "division by zero"), (RankError, "rank 0 could not read")),
    ),
    "the room for the copy": (
        *(1, LocalStore, "create", have_no_room),
        *((NoSpaceError, "no room"), (NoSpaceError, "no room")),
    ),
    "rank 0, when it has sent all": (
        *(0, restore_run, "restore_rank_state", divide_by_zero),
        *((CorruptError, "division by zero"), (RankError, "division by zero")),
    ),
}


@pytest.mark.sample("rank 0, when it has sent all")
@pytest.mark.parametrize("what", FAILURES)
@on_own_disks
def test_a_failure_of_one_rank_is_raised_on_all_at_once(tmp_path, what):
    failing_rank, owner, name, replacement, *errors = FAILURES[what]
    live = live_model("fsdp2", "llama")
    with saver_of(live, HERE) as saver:
        train(live, saver, 0, 2)
        saver.save_state()
    error, words = errors[RANK]
    begun = time.monotonic()
    with pytest.MonkeyPatch.context() as patch, saver_of(live, HERE) as saver:
        if failing_rank == RANK:
            patch.setattr(owner, name, replacement)
        with pytest.raises(error, match=words):
            saver.resume("must")
    assert time.monotonic() - begun < 20
    dist.barrier()
    with saver_of(live, HERE) as saver:
        assert saver.resume("must").step == 2
