"""Every rank writes its own bytes: the files are those that rank 0 alone would have written."""

import errno
import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import faults
import harness  # first: it arms the stack dump
import models
import pytest
import torch
import torch.distributed as dist
from faulty_stores import unseen_files
from tuning import blocks_of
from wrappers import WRAPPERS, Live

from ft_ckpt import CheckpointSaver, latest, verify
from ft_ckpt.checkpoint.catalog import read_manifest
from ft_ckpt.distributed import gather
from ft_ckpt.errors import NoSpaceError, RankError
from ft_ckpt.saving import files, write
from ft_ckpt.storage import writer
from ft_ckpt.storage.local_store import LocalStore

SHORT = {"enter_timeout_seconds": 60, "on_difference": "ignore", "io_threads": 2}


def live_model(wrapper: str, model: str) -> Live:
    torch.compiler.set_stance("force_eager")
    live = WRAPPERS[wrapper](models.build(model))
    live.step(models.batch(seed=harness.RANK))
    return live


def same_files(wrapper: str, model: str, folder: Path, **settings: Any) -> None:
    """Shards of tensors this small are gathered on rank 0 unless they are rows; or written in runs of any length."""
    ways = {"usual": files.LEAST_RUN_BYTES, **({"in_runs": 1} if "tensor" in wrapper else {})}
    for place, least in ways.items():
        files.LEAST_RUN_BYTES, usual = least, files.LEAST_RUN_BYTES
        same_files_of_a_run(wrapper, model, folder / place, **settings)
        files.LEAST_RUN_BYTES = usual


def same_files_of_a_run(wrapper: str, model: str, folder: Path, **settings: Any) -> None:
    live = live_model(wrapper, model)
    for name, each in (("one", "off"), ("all", "on")):
        with CheckpointSaver(live.accelerator, folder, each_rank_writes=each, **SHORT, **settings) as saver:
            saver.register(model=live.model, optimizer=live.optimizer)
            saver.save(live.model, folder / name, dtype=settings.get("dtype"))
            saver.save_state(path=folder / f"{name}-state", adapter_only=False)
    dist.barrier()
    if harness.RANK:
        return
    for name in ("", "-state"):
        one, every = folder / f"one{name}", folder / f"all{name}"
        files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
        assert files == sorted(path.relative_to(every) for path in every.rglob("*.safetensors"))
        for file in files:
            assert (one / file).read_bytes() == (every / file).read_bytes(), file
        assert verify(every).ok, verify(every)
        records = {file.path: file for file in read_manifest(every).files}
        columns = next((one for one in read_manifest(every).parts[0].tensors if "o_proj" in one.name), None)
        if columns is not None and not name and folder.name == "in_runs":
            pieces = [cut for cut in records["model.safetensors"].cuts if columns.start <= cut.start < columns.end]
            assert len(pieces) >= columns.shape[0] - 1, "a run of each rank in each row; neighbours may be joined"
        assert records["model.safetensors"].cuts or (folder.name == "usual" and "tensor" in wrapper), records
        assert records["model.safetensors"].digest.startswith("xxh3-128-of-ranks:")
        assert not list(every.rglob(".ft_ckpt-probe*"))
    flipped(folder / "all" / "model.safetensors")
    assert not verify(folder / "all").ok


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@harness.named
def not_shared(folder: Path) -> None:
    """Rank 1 does not see rank 0's files: rank 0 writes everything."""
    live = live_model("fsdp2", "qwen3")
    saver = CheckpointSaver(live.accelerator, folder, each_rank_writes="on", **SHORT)
    with unseen_files(write._PROBE) if harness.RANK else nullcontext():
        saver.save(live.model, folder / "saved")
    assert verify(folder / "saved").ok
    assert not any(file.cuts for file in read_manifest(folder / "saved").files)


def full_or_slow(full: bool, slow_seconds: float) -> None:
    """Act as a full disk, or as a slow one."""
    if full:
        raise OSError(errno.ENOSPC, "No space left on device")
    time.sleep(slow_seconds)


def full_disk(wrapper: str, model: str, rank: int, each: str, folder: Path) -> None:
    """One rank's disk fills up: the others stop, all raise the same error, nothing is committed, old files stay."""
    live = live_model(wrapper, model)
    saver = CheckpointSaver(live.accelerator, folder, each_rank_writes=each, **SHORT)
    with blocks_of(1 << 16), faults.writes() as whole:
        saver.save(live.model, step=1)
    with (
        blocks_of(1 << 16),
        faults.writes(lambda: full_or_slow(rank == harness.RANK, 0.1)) as written,
        pytest.raises(NoSpaceError, match="No space left on device"),
    ):
        saver.save(live.model, step=2)
    if model == "wide" and rank != harness.RANK:
        assert sum(written) < sum(whole) / 2, f"{sum(written)} of {sum(whole)} bytes were written all the same"
    dist.barrier()
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    assert verify(latest(folder)).ok
    dist.barrier()
    saver.save(live.model, step=2)
    assert verify(folder / "checkpoint-2").ok


@harness.named
def shared_out(folder: Path) -> None:
    """Replicated parameters, cut in smaller blocks than usual: the other rank stops as well."""
    files.BLOCK_BYTES, usual = 4096, files.BLOCK_BYTES
    try:
        full_disk("ddp", "wide", 0, "on", folder)
    finally:
        files.BLOCK_BYTES = usual


@harness.named
def waits_for_room(folder: Path) -> None:
    """A disk that was full for a while on one rank: all ranks retry."""
    live = live_model("fsdp2", "qwen3")
    saver = CheckpointSaver(live.accelerator, folder, each_rank_writes="on", when_full="wait", **SHORT)
    real, tries = LocalStore.allocate, []

    def allocate(*args: Any) -> None:
        tries.append(args)
        if len(tries) == 1:
            raise NoSpaceError("no room for the file yet")
        real(*args)

    LocalStore.allocate = allocate
    try:
        saver.save(live.model, folder / "saved")
    finally:
        LocalStore.allocate = real
    assert bool(tries) is (harness.RANK == 0)
    assert verify(folder / "saved").ok


@harness.named
def nothing_to_send(folder: Path) -> None:
    """A rank fails before it sends its part: rank 0 does not wait for that."""
    live = live_model("fsdp2", "qwen3")
    saver = CheckpointSaver(live.accelerator, folder, each_rank_writes="off", **SHORT)
    real = gather._BucketCarrier._pack_own
    gather._BucketCarrier._pack_own = lambda *args: 1 / 0
    try:
        with pytest.raises(RankError if harness.RANK == 0 else ZeroDivisionError, match="division by zero"):
            saver.save(live.model, folder / "saved")
    finally:
        gather._BucketCarrier._pack_own = real
    dist.barrier()
    assert not any(folder.iterdir()), list(folder.iterdir())


@harness.named
def broken_rank(folder: Path) -> None:
    live = live_model("ddp", "qwen3")
    real = writer.DurableFile.finish
    writer.DurableFile.finish = lambda file: real(file) if harness.RANK == 0 else 1 / 0
    try:
        saver = CheckpointSaver(live.accelerator, folder, each_rank_writes="on", **SHORT)
        with pytest.raises(RankError if harness.RANK == 0 else ZeroDivisionError):
            saver.save(live.model, folder / "saved")
    finally:
        writer.DurableFile.finish = real
    dist.barrier()
    assert not any(folder.iterdir()), list(folder.iterdir())


def case(name: str, folder: Path) -> None:
    if "/" not in name:
        harness.NAMED[name](folder)
        return
    if name.startswith("full_disk"):
        _, wrapper, model, rank, each = name.split("/")
        full_disk(wrapper, model, int(rank), each, folder)
        return
    wrapper, model, *dtype = name.split("/")
    same_files(wrapper, model, folder, **({"dtype": dtype[0]} if dtype else {}))


if __name__ == "__main__":
    if "DS_ACCELERATOR" in os.environ:
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    sys.setswitchinterval(0.001)
    harness.run(case)
