"""Saves in the background on several ranks: the files that a save at that moment makes, and errors told on all."""

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
from wrappers import WRAPPERS, Live

from ft_ckpt import CheckpointSaver, SaveReport, regions, saving, snapshot, verify
from ft_ckpt.errors import CheckpointError, NoSpaceError
from ft_ckpt.pending import PendingSave

SHORT = {"enter_timeout_seconds": 60, "on_difference": "ignore", "io_threads": 2, "background": True}


def begun(wrapper: str, folder: Path, **settings: Any) -> tuple[Live, CheckpointSaver]:
    torch.compiler.set_stance("force_eager")
    live = WRAPPERS[wrapper](models.build("qwen3"))
    live.step(models.batch(seed=harness.RANK))
    saver = CheckpointSaver(live.accelerator, folder, **{**SHORT, **settings})
    saver.register(model=live.model, optimizer=live.optimizer)
    return live, saver


def same_moment(wrapper: str, folder: Path) -> None:
    """What is saved while two more steps are made is what was there before them."""
    live, saver = begun(wrapper, folder)
    real = snapshot._copy
    snapshot._copy = lambda *given: (time.sleep(0.1), real(*given))[1]
    try:
        with saver:
            for number in "12":  # the second by the plan of the first
                saver.save_state(path=folder / f"now-{number}", adapter_only=False, background=False)
                handle = saver.save_state(path=folder / f"later-{number}", adapter_only=False)
                for seed in (5, 6):
                    live.step(models.batch(seed=seed + harness.RANK))
                    saver.step()
                assert isinstance(handle, PendingSave)
                handle.result(60)
            assert ("run" in saver._pending.kept._last) == (not wrapper.startswith(("fsdp1", "zero")))
            saver.save(live.model, folder / "after")
    finally:
        snapshot._copy = real
    dist.barrier()
    if harness.RANK:
        return
    assert verify(folder / "after").ok
    for number in "12":
        now, later = folder / f"now-{number}", folder / f"later-{number}"
        assert verify(later).ok
        files = sorted(path.relative_to(now) for path in now.rglob("*.safetensors"))
        assert len(files) == 2
        for file in files:
            assert (now / file).read_bytes() == (later / file).read_bytes(), file
    assert (folder / "after" / files[0]).read_bytes() != (folder / "now-2" / files[0]).read_bytes()


def gathered(folder: Path) -> None:
    """Where tensors must come to rank 0, they do before save() returns."""
    live, saver = begun("fsdp2", folder, each_rank_writes="off")
    with saver:
        assert isinstance(saver.save(live.model, folder / "saved"), SaveReport)
        assert isinstance(saver.save(live.model, folder / "h5", format="h5"), SaveReport)
    assert verify(folder / "saved").ok


def not_shared(folder: Path) -> None:
    """Rank 1 does not see rank 0's files."""
    live, saver = begun("fsdp2", folder)
    real = Path.is_file
    Path.is_file = lambda path: not (harness.RANK and path.name.startswith(saving._PROBE)) and real(path)
    try:
        with saver:
            assert isinstance(saver.save(live.model, folder / "saved"), SaveReport)
    finally:
        Path.is_file = real
    assert verify(folder / "saved").ok
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["saved"]


def broken() -> Any:
    """Rank 1 cannot write."""
    real = regions.write_all

    def full(path: Path, *rest: Any) -> None:
        if harness.RANK == 1:
            raise NoSpaceError(f"{path}: no space")
        real(path, *rest)

    regions.write_all = full
    return real


def one_rank_fails(folder: Path) -> None:
    live, saver = begun("fsdp2", folder)
    real = broken()
    try:
        handle = saver.save(live.model, folder / "saved")
        with pytest.raises(CheckpointError):
            handle.result(50)
    finally:
        regions.write_all = real
    with pytest.raises(NoSpaceError if harness.RANK else CheckpointError, match="no space"):
        saver.save(live.model, folder / "saved")
    dist.barrier()
    assert not any(folder.iterdir()), list(folder.iterdir())
    saver.save(live.model, folder / "saved")
    saver.close()
    assert verify(folder / "saved").ok


def told_at_the_next_step(folder: Path) -> None:
    """All ranks raise at the same step, though they know of it at different times."""
    live, saver = begun("fsdp2", folder)
    real = broken()
    try:
        saver.save(live.model, folder / "saved")
        with pytest.raises(CheckpointError, match="no space"):  # noqa: PT012 - one of the steps
            for _ in range(5000):
                time.sleep(0.001 * (1 + harness.RANK))
                saver.step()
    finally:
        regions.write_all = real
    told: list[Any] = [None] * harness.WORLD
    dist.all_gather_object(told, saver.progress.step)
    assert len(set(told)) == 1, told
    saver.close()


def case(name: str, folder: Path) -> None:
    globals()[name](folder) if name in globals() else same_moment(name, folder)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    sys.setswitchinterval(0.001)
    harness.run(case)
