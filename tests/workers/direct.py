"""Every rank writes its own bytes: the files are those that rank 0 alone would have written."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import models
import pytest
import torch
import torch.distributed as dist
from wrappers import WRAPPERS, Live

from ft_ckpt import CheckpointSaver, regions, saving, verify
from ft_ckpt.catalog import read_manifest
from ft_ckpt.errors import CheckpointError, NoSpaceError, RankError

SHORT = {"enter_timeout_seconds": 60, "on_difference": "ignore", "io_threads": 2}


def live_model(wrapper: str, model: str) -> Live:
    torch.compiler.set_stance("force_eager")
    live = WRAPPERS[wrapper](models.build(model))
    live.step(models.batch(seed=harness.RANK))
    return live


def same_files(wrapper: str, model: str, folder: Path, **settings: Any) -> None:
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
        assert records["model.safetensors"].cuts, records
        assert records["model.safetensors"].digest.startswith("xxh3-128-of-ranks:")
        assert not list(every.rglob(".ft_ckpt-probe*"))
    flipped(folder / "all" / "model.safetensors")
    assert not verify(folder / "all").ok


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def not_shared(folder: Path) -> None:
    """Rank 1 does not see rank 0's files: rank 0 writes everything."""
    live = live_model("fsdp2", "qwen3")
    saver = CheckpointSaver(live.accelerator, folder, each_rank_writes="on", **SHORT)
    with hidden(saving._PROBE) if harness.RANK else nullcontext():
        saver.save(live.model, folder / "saved")
    assert verify(folder / "saved").ok
    assert not any(file.cuts for file in read_manifest(folder / "saved").files)


@contextmanager
def hidden(name: str) -> Iterator[None]:
    real = Path.is_file
    Path.is_file = lambda path: not path.name.startswith(name) and real(path)
    try:
        yield
    finally:
        Path.is_file = real


def full_disk(folder: Path) -> None:
    """One rank's disk fills up: nothing is committed, and every rank says so."""
    live = live_model("fsdp2", "qwen3")
    real = regions.write_all

    def full(path: Path, *rest: Any) -> None:
        if harness.RANK == 1:
            raise NoSpaceError(f"{path}: no space")
        real(path, *rest)

    regions.write_all = full
    try:
        saver = CheckpointSaver(live.accelerator, folder, each_rank_writes="on", **SHORT)
        with pytest.raises(NoSpaceError if harness.RANK else CheckpointError):
            saver.save(live.model, folder / "saved")
    finally:
        regions.write_all = real
    dist.barrier()
    assert not any(folder.iterdir()), list(folder.iterdir())
    saver.save(live.model, folder / "saved")
    assert verify(folder / "saved").ok


def broken_rank(folder: Path) -> None:
    live = live_model("ddp", "qwen3")
    real = regions._Regions.finish
    regions._Regions.finish = lambda file: real(file) if harness.RANK == 0 else 1 / 0
    try:
        saver = CheckpointSaver(live.accelerator, folder, each_rank_writes="on", **SHORT)
        with pytest.raises(RankError if harness.RANK == 0 else ZeroDivisionError):
            saver.save(live.model, folder / "saved")
    finally:
        regions._Regions.finish = real
    dist.barrier()
    assert not any(folder.iterdir()), list(folder.iterdir())


def case(name: str, folder: Path) -> None:
    if "/" not in name:
        globals()[name](folder)
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
