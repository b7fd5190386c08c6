"""A run is resumed on other numbers of ranks under other wrappers; weights alone go into wrapped
models.
"""

import importlib.util

import models
import pytest
import torch
import torch.distributed as dist
from exact_runs import live_model, optimizer_state, resume_run, same, save_run, saver_of
from on_ranks import RANK, call_on_ranks, on_ranks
from wrappers import truth

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import LoadError

ELASTIC = [
    ("ddp", 2, "fsdp2", 2),
    ("fsdp2", 2, "none", 1),
    ("none", 1, "fsdp1", 2),
    ("fsdp2", 2, "fsdp2", 4),
    ("fsdp1", 2, "fsdp2_tensor_parallel", 4),
    ("ddp", 2, "hsdp", 4),
]
MESHES = [
    ("mesh_tensor", 2, "none", 1),
    ("mesh_tensor_fsdp", 4, "mesh_experts", 2),
    ("mesh_experts_tensor", 4, "mesh_tensor_fsdp", 4),
    ("none", 1, "mesh_experts_hybrid", 4),
]
ZERO = {"DS_ACCELERATOR": "cpu"}


@pytest.mark.sample("ddp-gpt2")
@pytest.mark.parametrize(("wrapper", "model"), [("ddp", "gpt2"), ("fsdp2_accelerate", "llama")])
@on_ranks(2, alone=True)  # Accelerate stays with FSDP
def test_folders_of_save_state_are_resumed_under_ddp(tmp_path, wrapper, model):
    """Resume from a folder that accelerate's save_state wrote under DDP; under FSDP it is
    refused.
    """
    live = live_model("ddp", model)
    for step in range(2):
        live.step(models.batch(seed=97 * step + RANK))
    live.accelerator.save_state(str(tmp_path / "theirs"))
    dist.barrier()
    expected = truth(live), optimizer_state(live), [torch.rand(()) for _ in range(2)]
    losses = [live.step(models.batch(seed=97 * step + RANK)) for step in range(2, 4)]
    fresh = live_model(wrapper, model, seed=1)
    with saver_of(fresh, tmp_path / "run") as saver:
        if wrapper.startswith("fsdp"):
            with pytest.raises(
                LoadError, match=r"by pickles under FSDP, expected a plain model or DDP"
            ):
                saver.resume(tmp_path / "theirs")
            return
        progress = saver.resume(tmp_path / "theirs")
        assert (progress.step, progress.report.problems) == (2, ()), progress
        found = truth(fresh), optimizer_state(fresh), [torch.rand(()) for _ in range(2)]
        same(expected[0], found[0])
        same(expected[1], found[1])
        assert expected[2] == found[2]
        again = [fresh.step(models.batch(seed=97 * step + RANK)) for step in range(2, 4)]
        assert again == losses
        saver.save_state(path=tmp_path / "ours")


INTO = [
    ("ddp", "llama"),
    ("fsdp1", "llama"),
    ("fsdp1_flat", "qwen3"),
    ("fsdp2", "mixtral"),
    ("tensor_parallel", "qwen3"),
]


@pytest.mark.sample("fsdp2-mixtral")
@pytest.mark.parametrize(("wrapper", "model"), INTO)
@on_ranks(2)
def test_weights_alone_go_into_wrapped_models(tmp_path, wrapper, model):
    """`load_model(into=)` fills each rank's shards."""
    plain = models.build(model, 5)
    CheckpointSaver().save(plain, tmp_path / "out")
    live = live_model(wrapper, model, seed=1)
    live.step(models.batch(seed=1))
    assert ft_ckpt.load_model(tmp_path / "out", into=live.model) is live.model
    same({name: tensor.detach() for name, tensor in plain.state_dict().items()}, truth(live))
    live.step(models.batch(seed=2))


@pytest.mark.sample("fsdp2-2-none-1")
@pytest.mark.parametrize(("before", "ranks", "after", "more"), ELASTIC)
def test_another_number_of_ranks_under_another_wrapper(tmp_path, before, ranks, after, more):
    """A run that can only go on with as many devices as it began with."""
    call_on_ranks(ranks, save_run, before, "llama", tmp_path)
    call_on_ranks(more, resume_run, after, "llama", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "ranks", "after", "more"), MESHES)
def test_another_mesh_of_transformers(tmp_path, before, ranks, after, more):
    """Strided shards, packed experts and experts spread over ranks are read by geometry."""
    call_on_ranks(ranks, save_run, before, "experts", tmp_path, launch="meshes")
    call_on_ranks(more, resume_run, after, "experts", tmp_path, launch="meshes")


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs the deepspeed extra"
)


@pytest.mark.slow
@needs_deepspeed
def test_out_of_zero(tmp_path):
    """DeepSpeed refuses another number of ranks."""
    call_on_ranks(
        2, save_run, "zero3", "llama", tmp_path, group_seconds=None, env=ZERO, timeout=280
    )
    call_on_ranks(1, resume_run, "none", "llama", tmp_path)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("wrapper", ["zero2", "zero3"])
@on_ranks(2, group_seconds=None, env=ZERO, timeout=280)
def test_weights_alone_go_into_no_engine_of_deepspeed(tmp_path, wrapper):
    """DeepSpeed's masters would overwrite them."""
    CheckpointSaver().save(models.build("llama", 5), tmp_path / "out")
    live = live_model(wrapper, "llama", seed=1)
    with pytest.raises(
        LoadError, match=r"in an engine of DeepSpeed.*load before deepspeed\.initialize"
    ):
        ft_ckpt.load_model(tmp_path / "out", into=live.model)
