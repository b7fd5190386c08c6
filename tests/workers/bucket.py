"""A run whose checkpoints are in a bucket, on ranks that share nothing else.

A case is "exact/wrapper/model", or a function here; environment variables point to the bucket.
"""

import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import harness  # first: it arms the stack dump
import pytest
import torch
import torch.distributed as dist
from replicas import layers, parts_held
from resume import exact, live_model, same, saver_of, train
from wrappers import truth

import ft_ckpt
from ft_ckpt.distributed import fill
from ft_ckpt.errors import CheckpointError
from ft_ckpt.storage import object_store
from ft_ckpt.storage.place import open_place

BUCKET = "s3://bucket"


@harness.named
def unseen(run: str) -> None:
    """Rank 1 has invalid keys: rank 0 reads for it, and writes alone."""
    if harness.RANK:
        os.environ["AWS_ACCESS_KEY_ID"] = "WRONG"
    live = live_model("fsdp2", "llama")
    with saver_of(live, run, store_options=QUICK) as saver:
        train(live, saver, 0, 2)
        saver.save_state()
        before = truth(live)
    fresh = live_model("fsdp2", "llama", seed=1)
    with saver_of(fresh, run, store_options=QUICK) as saver:
        progress = saver.resume("must")
        assert any("rank(s) 1 do not see" in note for note in progress.report.notes), progress.report
        same(before, truth(fresh))


QUICK = {"retry_config": {"max_retries": 0}}


@harness.named
def requests(run: str) -> None:
    """Small ranges are read by rank 0 for all: few requests, and the same tensors."""
    live = live_model("fsdp2", "wide")
    with saver_of(live, run) as saver:
        train(live, saver, 0, 2)
        saver.save_state()
        before = truth(live)
    counts = {}
    for way in ("auto", "read"):
        fresh = live_model("fsdp2", "wide", seed=1)
        with saver_of(fresh, run, fan_out=way) as saver:
            counts[way] = saver.resume("must").report.requests
            same(before, truth(fresh))
    assert 0 < counts["auto"] < counts["read"] / 2, counts


@harness.named
def background(run: str) -> None:
    """A background save has the tensors of one moment, though training continues; each file is written by one rank."""
    live = live_model("fsdp2", "llama")
    written = []
    real = object_store.RemoteWriting.finish
    object_store.RemoteWriting.finish = lambda writing: written.append(writing.name) or real(writing)
    settings = {"max_shard_size": 200_000, "each_rank_writes": "on"}
    with saver_of(live, run, **settings) as saver:
        train(live, saver, 0, 2)
        before = truth(live)
        pending = saver.save_state(background=True)
        train(live, saver, 2, 2)
        report = pending.result()
        assert report.path == f"{run}/checkpoint-2"
        saver.wait()
        train(live, saver, 4, 1)
        now = truth(live)
        saver.save_state()
    object_store.RemoteWriting.finish = real
    assert written, "each rank has files of its own"
    everybody = [None] * harness.WORLD
    dist.all_gather_object(everybody, sorted(set(written)))
    assert not set(everybody[0]) & set(everybody[1]), everybody
    for step, expected in ((2, before), (5, now)):
        fresh = live_model("fsdp2", "llama", seed=1)
        with saver_of(fresh, run) as saver:
            assert saver.resume(f"checkpoint-{step}").step == step
            same(expected, truth(fresh))


@harness.named
def failing(run: str) -> None:
    """A save that fails on rank 0 fails on all, and leaves the old checkpoint whole."""
    live = live_model("ddp", "llama")
    with saver_of(live, run) as saver:
        train(live, saver, 0, 1)
        saver.save_state()
        with pytest.raises(CheckpointError, match="a bucket cannot replace a checkpoint in one step"):
            saver.save_state(path=f"{run}/checkpoint-1")
        assert ft_ckpt.verify(f"{run}/checkpoint-1").ok


@harness.named
def modes(run: str) -> None:
    """Resume by mode, by name and by URL."""
    live = live_model("ddp", "llama")
    with saver_of(live, run) as saver:
        assert saver.resume("auto").resumed_from is None
        for step in (1, 2):
            train(live, saver, step, 1)
            saver.save_state()
    for asked, step in {"auto": 2, "must": 2, "checkpoint-1": 1, f"{run}/checkpoint-1": 1}.items():
        with saver_of(live_model("ddp", "llama", seed=1), run) as saver:
            progress = saver.resume(asked)
            assert (progress.step, progress.resumed_from) == (step, f"{run}/checkpoint-{step}"), progress
    with saver_of(live_model("ddp", "llama", seed=1), run) as saver:
        assert saver.resume(open_place(f"{run}/checkpoint-1")).step == 1


def parts(way: str, when: str, run: str) -> None:
    """Shard groups without rank 0: none of their ranks knows which ranks contribute to a gather."""
    live = layers(way)
    before = parts_held(live)
    settings = {"max_shard_size": 200, "each_rank_writes": "on", "background": when == "background"}
    with saver_of(live, run, **settings) as saver:
        saver.step()
        saver.save_state()
    fresh = layers(way, seed=1)
    fill.SMALL_RANGE_BYTES = 100  # some tensors are smaller than two such ranges, and larger than one
    with saver_of(fresh, run) as saver:
        saver.resume("must")
        found = parts_held(fresh)
    assert [name for name, tensor in before.items() if not torch.equal(found[name], tensor)] == []


def case(name: str, folder: Path) -> None:
    run = f"{BUCKET}/{name}"
    if "/" in name:
        kind, *which = name.split("/")
        {"exact": exact, "parts": parts}[kind](*which, run)
    else:
        harness.NAMED[name](run)
    assert not [each for each in folder.rglob("*") if each.is_file() and each.suffix != ".jsonl"], "nothing on a disk"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if not any("/zero" in name for name in sys.argv):
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    harness.run(case)
