"""Checkpoints as torch.distributed.checkpoint writes them, beside the true weights.

A case is "fsdp2/llama"; its folder gets `saved/` and `truth.safetensors`.
"""

from pathlib import Path

import harness  # first: it arms the stack dump
import models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from wrappers import WRAPPERS


def case(name: str, folder: Path) -> None:
    wrapper, model = name.split("/")
    live = WRAPPERS[wrapper](models.build(model))
    # Tensor parallelism needs one batch: unsharded tensors would differ between the ranks otherwise.
    live.step(models.batch(seed=0 if wrapper == "tensor_parallel" else harness.RANK))
    inner = live.model
    weights = get_model_state_dict(inner)
    state = {"model": weights, "optimizer": get_optimizer_state_dict(inner, live.optimizer), "step": 7}
    dcp.save(state, checkpoint_id=folder / "saved")
    whole = {f"model.{key}": one.full_tensor() if isinstance(one, DTensor) else one for key, one in weights.items()}
    write(whole, folder)


def write(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    if harness.RANK == 0:
        own = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
        save_file(own, folder / "truth.safetensors")
    dist.barrier()


dist.init_process_group("gloo")
harness.run(case)
dist.destroy_process_group()
