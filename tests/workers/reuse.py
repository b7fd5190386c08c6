"""Frozen files are reused by all ranks or by none."""

import sys
from datetime import timedelta
from pathlib import Path

import faults
import harness  # first: it arms the stack dump
import models
import torch
import torch.distributed as dist
from compare import assert_same_tensors, stored
from wrappers import WRAPPERS, Live, truth

from ft_ckpt import CheckpointSaver, verify
from ft_ckpt.checkpoint.catalog import read_manifest

FROZEN = "model-00001-of-00002.safetensors"


def live_model(wrapper: str) -> Live:
    torch.compiler.set_stance("force_eager")
    model = models.build("wide")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("norm.weight"))
    return WRAPPERS[wrapper](model)


def saver_of(live: Live, folder: Path, each: str) -> CheckpointSaver:
    settings = {"enter_timeout_seconds": 60, "io_threads": 2, "each_rank_writes": each}
    return CheckpointSaver(live.accelerator, folder, reuse_frozen="on", **settings)


def linked(path: Path) -> bool:
    records = {record.path: record for record in read_manifest(path).files}
    return records[FROZEN].linked


def assert_is(path: Path, live: Live) -> None:
    expected = truth(live)
    dist.barrier()
    if harness.RANK == 0:
        assert verify(path).ok, verify(path)
        found = stored(path)
        assert_same_tensors(found, {name: tensor for name, tensor in expected.items() if name in found})
        assert expected.keys() >= found.keys()
    dist.barrier()


def only_what_changed(wrapper: str, each: str, folder: Path) -> None:
    live = live_model(wrapper)
    saver = saver_of(live, folder, each)
    live.step(models.batch(seed=harness.RANK))
    saver.save(live.model, step=1)
    live.step(models.batch(seed=harness.RANK + 2))
    with faults.writes() as written:
        path = saver.save(live.model, step=2).path
    assert sum(written) < 50_000
    assert linked(path)
    assert_is(path, live)
    with torch.no_grad():
        for parameter in live.model.parameters():
            getattr(parameter, "ds_tensor", parameter).mul_(2)  # ZeRO-3's shard
    path = saver.save(live.model, step=3).path
    assert not linked(path)
    assert_is(path, live)
    if each == "on" and wrapper != "zero3":
        assert linked(saver.save(live.model, step=4, background=True).result().path)


@harness.named
def one_rank_changed(folder: Path) -> None:
    """A change that only one rank sees makes all write the file; the next save reuses it again."""
    live = live_model("fsdp2")
    saver = saver_of(live, folder, "on")
    saver.save(live.model, step=1)
    if harness.RANK == 1:
        parameter = next(p for p in live.model.parameters() if not p.requires_grad)
        with torch.no_grad():
            parameter.to_local().mul_(3)
    path = saver.save(live.model, step=2).path
    assert not linked(path)
    assert_is(path, live)
    path = saver.save(live.model, step=3).path
    assert linked(path)
    assert_is(path, live)


@harness.named
def other_writers(folder: Path) -> None:
    """Rank 0 does not compare files that all ranks wrote, nor all ranks those of rank 0: tensors would have to move."""
    live = live_model("fsdp2")
    rank_0, all_ranks = saver_of(live, folder, "off"), saver_of(live, folder, "on")
    with rank_0, all_ranks:
        assert not linked(rank_0.save(live.model, step=1).path)
        assert not linked(all_ranks.save(live.model, step=2).path)
        assert linked(all_ranks.save(live.model, step=3, background=True).result().path)
        path = rank_0.save(live.model, step=4).path
        assert linked(path)
        assert_is(path, live)


def case(name: str, folder: Path) -> None:
    if "/" not in name:
        harness.NAMED[name](folder)
        return
    wrapper, each = name.split("/")
    only_what_changed(wrapper, "on" if each == "direct" else "off", folder)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    sys.setswitchinterval(0.001)
    harness.run(case)
