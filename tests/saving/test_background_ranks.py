"""Background saves on several ranks: the same files as a save at that moment, and errors raised on
all ranks.
"""

import importlib.util
import threading
import time
from contextlib import nullcontext

import models
import pytest
import torch.distributed as dist
from faulty_stores import unseen_files
from on_ranks import RANK, WORLD, on_ranks
from same_bytes import late_copies, live_model, saver_of

from ft_ckpt import verify
from ft_ckpt.errors import CheckpointError, NoSpaceError
from ft_ckpt.ranks import Ranks
from ft_ckpt.saving import folder_sharing as shared_folders
from ft_ckpt.saving.planning import PendingSave
from ft_ckpt.storage.io import LocalWriting


def begun(wrapper, folder, **settings):
    live = live_model(wrapper)
    return live, saver_of(live, folder, background=True, **settings)


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra"
)


def under_zero(test):
    """Run a test on two ranks of DeepSpeed."""
    return needs_deepspeed(on_ranks(2, env={"DS_ACCELERATOR": "cpu"}, timeout=280)(test))


@pytest.mark.slow
@under_zero
def test_muon_is_copied_at_once(tmp_path):
    """Muon updates its momentum before ZeRO's inner optimizer steps, where no hook waits: all is
    copied at once.
    """
    moved = threading.Event()
    moved.set()
    with late_copies(moved) as copied:
        live, saver = begun("zero1", tmp_path)
        for group in live.optimizer.optimizer.optimizer.param_groups:
            group["use_muon"] = False
        with saver:
            assert isinstance(
                saver.save_state(path=tmp_path / "saved", adapter_only=False), PendingSave
            )
            assert not saver._pending.snapshot._hooks
    assert copied[False] > copied[True] == 0


def done_at_once(saver, live, path, **settings):
    """A save that cannot run beside training returns a PendingSave that is done."""
    handle = saver.save(live.model, path, **settings)
    assert isinstance(handle, PendingSave)
    assert handle.done
    assert handle.result() == saver.wait()
    assert handle.result().path == handle.path == path


@pytest.mark.slow
@on_ranks(2)
def test_gathered_tensors_are_gathered_before_save_returns(tmp_path):
    """Tensors that must be gathered on rank 0 are gathered before save() returns."""
    live, saver = begun("fsdp2", tmp_path, each_rank_writes="off")
    with saver:
        done_at_once(saver, live, tmp_path / "saved")
        done_at_once(saver, live, tmp_path / "h5", format="h5")
        live.step(models.batch(seed=RANK))
        saver.step()
    assert verify(tmp_path / "saved").ok


@pytest.mark.slow
@on_ranks(2)
def test_one_rank_does_not_see_the_files(tmp_path):
    """Rank 1 does not see rank 0's files."""
    live, saver = begun("fsdp2", tmp_path)
    with saver, unseen_files(shared_folders._PROBE) if RANK else nullcontext():
        done_at_once(saver, live, tmp_path / "saved")
    assert verify(tmp_path / "saved").ok
    dist.barrier()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


@on_ranks(2)
def test_ranks_synchronise_at_few_points(tmp_path):
    """Once all ranks are known to see the folder, they synchronise only at capture, plan, write and
    commit.
    """
    live, saver = begun("fsdp2", tmp_path, each_rank_writes="on")
    met = []
    real = Ranks.agree

    def counted(ranks, what, *rest, **named):
        met.append(what)
        return real(ranks, what, *rest, **named)

    Ranks.agree = counted
    try:
        with saver:
            saver.save_state(adapter_only=False)
            saver.wait()
            for background in (True, False):
                live.step(models.batch(seed=RANK))
                saver.step()
                met.clear()
                saver.save_state(adapter_only=False, background=background)
                saver.wait()
                planned = ["save() in the background"] if background else []
                expected = ["save_state()", *planned, "save()"]
                assert met == [*expected, "the commit of save()"], met
    finally:
        Ranks.agree = real


def broken():
    """Rank 1 cannot write."""
    real = LocalWriting.write

    def full(file, offset, memory):
        if RANK == 1:
            raise NoSpaceError(f"{file.path}: no space")
        real(file, offset, memory)

    LocalWriting.write = full
    return real


@pytest.mark.slow
@on_ranks(2)
def test_one_rank_cannot_write(tmp_path):
    live, saver = begun("fsdp2", tmp_path)
    real = broken()
    try:
        handle = saver.save(live.model, tmp_path / "saved")
        with pytest.raises(CheckpointError):
            handle.result(50)
    finally:
        LocalWriting.write = real
    with pytest.raises(NoSpaceError if RANK else CheckpointError, match="no space"):
        saver.save(live.model, tmp_path / "saved")
    dist.barrier()
    assert not any(tmp_path.iterdir()), list(tmp_path.iterdir())
    saver.save(live.model, tmp_path / "saved")
    saver.close()
    assert verify(tmp_path / "saved").ok


@pytest.mark.slow
@on_ranks(2)
def test_all_ranks_are_told_at_the_same_step(tmp_path):
    """All ranks raise at the same step, though they learn of the error at different times."""
    live, saver = begun("fsdp2", tmp_path)
    real = broken()
    try:
        saver.save(live.model, tmp_path / "saved")
        with pytest.raises(CheckpointError, match="no space"):  # noqa: PT012 - one of the steps
            for _ in range(5000):
                time.sleep(0.001 * (1 + RANK))
                saver.step()
    finally:
        LocalWriting.write = real
    told = [None] * WORLD
    dist.all_gather_object(told, saver.progress.step)
    assert len(set(told)) == 1, told
    saver.close()
