"""Files with one writer each, on a disk where several ranks must not write into one file."""

import threading
from contextlib import contextmanager

import models
import pytest
import torch.distributed as dist
from exact_runs import live_model
from faulty_stores import as_client
from on_ranks import RANK, on_ranks

from ft_ckpt import CheckpointSaver, latest, verify
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import open_place

MODES = ("now", "later")
SETTINGS = {"max_shard_size": 20_000, "enter_timeout_seconds": 60, "on_difference": "ignore"}


@contextmanager
def shares_of_files():
    """The files that this rank opens to write in them with others, with the thread that does."""
    shares = []
    real = LocalStore.share

    def share(store, name, size_bytes):
        if name.endswith(".safetensors"):
            is_main = threading.current_thread() is threading.main_thread()
            shares.append((name, is_main))
        return real(store, name, size_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "share", share)
        yield shares


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
@on_ranks(2)
def test_files_are_those_of_rank_0_alone(tmp_path, wrapper):
    live = live_model(wrapper, "llama")
    live.step(models.batch(seed=RANK))
    with CheckpointSaver(live.accelerator, each_rank_writes="off", **SETTINGS) as saver:
        saver.save(live.model, tmp_path / "alone")
    written = {}
    with as_client("nfs4", RANK):
        for mode in MODES:
            settings = {**SETTINGS, "each_rank_writes": "on"}
            with (
                shares_of_files() as written[mode],
                CheckpointSaver(live.accelerator, **settings) as saver,
            ):
                saver.save(live.model, tmp_path / mode, background=mode == "later")
                saver.save(live.model, tmp_path / mode, overwrite=True, background=mode == "later")
    dist.barrier()
    alone = tmp_path / "alone"
    names = sorted(path.name for path in alone.glob("*.safetensors"))
    assert len(names) > 2
    for mode in MODES:
        assert len(written[mode]) > 1, "each rank writes in each save"
        assert {is_main for _, is_main in written[mode]} == {mode == "now"}
        assert verify(tmp_path / mode).ok
        for name in names:
            assert (tmp_path / mode / name).read_bytes() == (alone / name).read_bytes()
        records = read_manifest(open_place(tmp_path / mode)).files
        assert not any(record.cuts for record in records)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "later", "now"]


@on_ranks(2)
def test_a_run_goes_on(tmp_path):
    """The first save in the background finds out that files have one writer; the second knows."""
    live = live_model("fsdp2", "llama")
    live.step(models.batch(seed=RANK))
    with as_client("cifs", RANK):
        settings = {**SETTINGS, "background": True, "each_rank_writes": "on"}
        with CheckpointSaver(live.accelerator, tmp_path, **settings) as saver:
            saver.register(model=live.model, optimizer=live.optimizer)
            for step in (1, 2):
                saver.step(step=step)
                saver.save_state()
        dist.barrier()
        assert latest(tmp_path).name.endswith("2")
        with CheckpointSaver(live.accelerator, tmp_path, **settings) as saver:
            saver.register(model=live.model, optimizer=live.optimizer)
            assert saver.resume("must").step == 2
