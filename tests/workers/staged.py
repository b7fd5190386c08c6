"""A run in a bucket with a staging folder on two ranks, which share it or have one each.

A case is a function here.
"""

import os
import shutil
import signal
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import pytest
import torch.distributed as dist
from exact_runs import exact, live_model, same, saver_of, train
from wrappers import truth

import ft_ckpt
from ft_ckpt import Every
from ft_ckpt.errors import RankError, TargetError
from ft_ckpt.extensions.transfer import uploads

BUCKET = "s3://bucket"
HERE = Path("/proc/self/cwd")


def goes_through(run: str, staging: Path, own: Path) -> None:
    """Resume exactly from the folder and, once that is lost, from the bucket."""
    exact("fsdp2", "llama", run, staging=staging)
    assert ft_ckpt.verify(f"{run}/checkpoint-2").ok
    live = live_model("fsdp2", "llama")
    with saver_of(live, run, staging=staging) as saver:
        assert saver.resume("must").resumed_from == staging / "checkpoint-2"
        train(live, saver, 2, 1)
        report = saver.save_state()
        assert (report.upload is None) == bool(harness.RANK)
        before = truth(live)
    assert ft_ckpt.latest(run) == f"{run}/checkpoint-3"
    dist.barrier()
    shutil.rmtree(own, ignore_errors=True)
    dist.barrier()
    fresh = live_model("fsdp2", "llama", seed=1)
    with saver_of(fresh, run, staging=staging) as saver:
        assert saver.resume("must").resumed_from == f"{run}/checkpoint-3"
        same(before, truth(fresh))


@harness.named
def shared(folder: Path) -> None:
    """One folder that both see."""
    goes_through(f"{BUCKET}/shared", folder / "nvme", folder / "nvme")


@harness.named
def apart(folder: Path) -> None:
    """A folder each, by one path: rank 0 has the checkpoints, and reads them for the other."""
    private = folder / f"disk-{harness.RANK}"
    private.mkdir()
    os.chdir(private)
    goes_through(f"{BUCKET}/apart", HERE / "nvme", private / "nvme")
    assert bool(list(private.glob("nvme/checkpoint-*"))) is False


@harness.named
def failing(folder: Path) -> None:
    """A failed upload is raised on both ranks when the saver is closed, and not before."""
    real, run = uploads.copy_open, f"{BUCKET}/failing"

    def refuse(*_: object, **__: object) -> None:
        raise TargetError("the bucket is full")

    live = live_model("ddp", "llama")
    saver = saver_of(live, run, staging=folder / "nvme")
    uploads.copy_open = refuse
    train(live, saver, 0, 2)
    saver.save_state()
    kind = RankError if harness.RANK else TargetError
    with pytest.raises(kind, match="checkpoint-2: not uploaded: the bucket is full"):
        saver.close()
    uploads.copy_open = real
    fresh = live_model("ddp", "llama", seed=1)
    with saver_of(fresh, run, staging=folder / "nvme") as saver:
        assert saver.resume("must").step == 2
    assert ft_ckpt.verify(f"{run}/checkpoint-2").ok


@harness.named
def signalled(folder: Path) -> None:
    """Both ranks end after the upload by rank 0."""
    real, run = uploads.copy_open, f"{BUCKET}/signalled"

    def take_time(*given: Any, **settings: Any) -> Any:
        time.sleep(1.5)
        return real(*given, **settings)

    uploads.copy_open = take_time
    live = live_model("ddp", "llama")
    with saver_of(live, run, staging=folder / "nvme", every=Every(steps=10_000)) as saver:
        train(live, saver, 0, 2)
        if harness.RANK:
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit):
            train(live, saver, 2, 10_000)
        assert ft_ckpt.latest(run) == f"{run}/checkpoint-{saver.progress.step}"
    uploads.copy_open = real


def case(name: str, folder: Path) -> None:
    harness.NAMED[name](folder)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    harness.run(case)
