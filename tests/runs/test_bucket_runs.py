"""Runs in a bucket: saved and resumed exactly, on ranks that share no disk."""

import importlib.util
import os

import pytest
import torch
import torch.distributed as dist
from exact_runs import exact, live_model, same, saver_of, train
from on_ranks import RANK, WORLD, on_ranks
from shared_shards import PARTS, layers, local_parts
from training import begin, go_on, whole
from wrappers import truth

import ft_ckpt
from ft_ckpt.errors import CheckpointError
from ft_ckpt.extensions.buckets import uploads
from ft_ckpt.ranks.moving import broadcast
from ft_ckpt.storage.places import open_place

pytest.importorskip("obstore")

RUN = "s3://bucket/run"
pytestmark = pytest.mark.usefixtures("s3")


@pytest.mark.sample("fsdp2-lora")
@pytest.mark.parametrize(
    ("wrapper", "model"), [("ddp", "llama"), ("fsdp2", "llama"), ("fsdp2", "lora")]
)
@on_ranks(2)
def test_two_ranks(wrapper, model):
    exact(wrapper, model, RUN)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@on_ranks(4)
def test_four_ranks(wrapper):
    exact(wrapper, "llama", RUN)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra"
)
@pytest.mark.parametrize("wrapper", ["zero1", "zero3"])
@on_ranks(2, group_seconds=None, env={"DS_ACCELERATOR": "cpu"}, timeout=280)
def test_under_zero(wrapper):
    exact(wrapper, "llama", RUN)


@pytest.mark.slow
@on_ranks(2)
def test_a_rank_that_does_not_see_the_bucket():
    """Rank 1 has invalid keys: rank 0 reads for it, and writes alone."""
    if RANK:
        os.environ["AWS_ACCESS_KEY_ID"] = "WRONG"
    live = live_model("fsdp2", "llama")
    with saver_of(live, RUN, store_options=QUICK) as saver:
        train(live, saver, 0, 2)
        saver.save_state()
        before = truth(live)
    fresh = live_model("fsdp2", "llama", seed=1)
    with saver_of(fresh, RUN, store_options=QUICK) as saver:
        progress = saver.resume("must")
        assert any("rank(s) 1 do not see" in note for note in progress.report.notes), (
            progress.report
        )
        same(before, truth(fresh))


QUICK = {"retry_config": {"max_retries": 0}}


@on_ranks(2)
def test_small_ranges_are_read_by_rank_0_for_all():
    """Small ranges are read by rank 0 for all: few requests, and the same tensors."""
    live = live_model("fsdp2", "wide")
    with saver_of(live, RUN) as saver:
        train(live, saver, 0, 2)
        saver.save_state()
        before = truth(live)
    counts = {}
    for way in ("auto", "read"):
        fresh = live_model("fsdp2", "wide", seed=1)
        with saver_of(fresh, RUN, fan_out=way) as saver:
            counts[way] = saver.resume("must").report.requests
            same(before, truth(fresh))
    assert 0 < counts["auto"] < counts["read"] / 2, counts


@pytest.mark.slow
@on_ranks(2)
def test_background_saves():
    """A background save has the tensors of one moment, though training continues; each file is
    written by one rank.
    """
    live = live_model("fsdp2", "llama")
    written = []
    real = uploads.MultipartUpload.finish
    uploads.MultipartUpload.finish = lambda writing: written.append(writing.name) or real(writing)
    settings = {"max_shard_size": 200_000, "each_rank_writes": "on"}
    with saver_of(live, RUN, **settings) as saver:
        train(live, saver, 0, 2)
        before = truth(live)
        pending = saver.save_state(background=True)
        train(live, saver, 2, 2)
        report = pending.result()
        assert report.path == f"{RUN}/checkpoint-2"
        saver.wait()
        train(live, saver, 4, 1)
        now = truth(live)
        saver.save_state()
    uploads.MultipartUpload.finish = real
    assert written, "each rank has files of its own"
    everybody = [None] * WORLD
    dist.all_gather_object(everybody, sorted(set(written)))
    assert not set(everybody[0]) & set(everybody[1]), everybody
    for step, expected in ((2, before), (5, now)):
        fresh = live_model("fsdp2", "llama", seed=1)
        with saver_of(fresh, RUN) as saver:
            assert saver.resume(f"checkpoint-{step}").step == step
            same(expected, truth(fresh))


@on_ranks(2)
def test_a_save_that_fails_on_rank_0_fails_on_all():
    """A save that fails on rank 0 fails on all, and leaves the old checkpoint whole."""
    live = live_model("ddp", "llama")
    with saver_of(live, RUN) as saver:
        train(live, saver, 0, 1)
        saver.save_state()
        with pytest.raises(
            CheckpointError, match="a bucket cannot replace a checkpoint in one step"
        ):
            saver.save_state(path=f"{RUN}/checkpoint-1")
        assert ft_ckpt.verify(f"{RUN}/checkpoint-1").ok


@pytest.mark.slow
@on_ranks(2)
def test_by_mode_by_name_and_by_url():
    """Resume by mode, by name and by URL."""
    live = live_model("ddp", "llama")
    with saver_of(live, RUN) as saver:
        assert saver.resume("auto").resumed_from is None
        for step in (1, 2):
            train(live, saver, step, 1)
            saver.save_state()
    for asked, step in {"auto": 2, "must": 2, "checkpoint-1": 1, f"{RUN}/checkpoint-1": 1}.items():
        with saver_of(live_model("ddp", "llama", seed=1), RUN) as saver:
            progress = saver.resume(asked)
            assert (progress.step, progress.resumed_from) == (step, f"{RUN}/checkpoint-{step}"), (
                progress
            )
    with saver_of(live_model("ddp", "llama", seed=1), RUN) as saver:
        assert saver.resume(open_place(f"{RUN}/checkpoint-1")).step == 1


@pytest.mark.sample("background-hybrid")
@pytest.mark.parametrize("way", PARTS)
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@on_ranks(4)
def test_two_groups_of_two_ranks(way, background):
    """Shard groups without rank 0: none of their ranks knows which ranks contribute to a gather."""
    live = layers(way)
    before = local_parts(live)
    settings = {"max_shard_size": 200, "each_rank_writes": "on", "background": background}
    with saver_of(live, RUN, **settings) as saver:
        saver.step()
        saver.save_state()
    fresh = layers(way, seed=1)
    # some tensors are smaller than two such ranges, and larger than one
    broadcast.SMALL_RANGE_BYTES = 100
    with saver_of(fresh, RUN) as saver:
        saver.resume("must")
        found = local_parts(fresh)
    assert [name for name, tensor in before.items() if not torch.equal(found[name], tensor)] == []


def test_one_process(s3, tmp_path):
    """Stopped after some batches, taken up from the bucket: the losses of the run that was not
    stopped, bit for bit.
    """
    expected = whole(tmp_path / "whole")
    for stop in (4, 9):
        run = f"s3://bucket/run-{stop}"
        assert begin(run, stop) + go_on(run) == expected, stop
        assert [name for name in s3.names(f"run-{stop}/") if name.endswith("/ft_ckpt.json")]
        assert not [name for name in s3.names() if "/.ft_ckpt" in name]
