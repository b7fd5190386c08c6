"""Checkpoints as other tools write them: DeepSpeed's own and torch.distributed.checkpoint's, beside the true weights.

A case is "zero2/partly_frozen", "zero3_bf16/lora" or "fsdp2/llama"; its folder gets `saved/` and `truth.safetensors`.
"""

import os
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from wrappers import WRAPPERS, named_tensors


def case(name: str, folder: Path) -> None:
    wrapper, model = name.split("/")
    if wrapper.startswith("zero"):
        with_deepspeed(models.build(model), int(wrapper[4]), wrapper.endswith("bf16"), folder)
    else:
        with_torch(wrapper, models.build(model), folder)


def with_torch(wrapper: str, model: nn.Module, folder: Path) -> None:
    live = WRAPPERS[wrapper](model)
    # Tensor parallelism needs one batch: unsharded tensors would differ between the ranks otherwise.
    live.step(models.batch(seed=0 if wrapper == "tensor_parallel" else harness.RANK))
    inner = live.model
    weights = get_model_state_dict(inner)
    state = {"model": weights, "optimizer": get_optimizer_state_dict(inner, live.optimizer), "step": 7}
    dcp.save(state, checkpoint_id=folder / "saved")
    whole = {f"model.{key}": one.full_tensor() if isinstance(one, DTensor) else one for key, one in weights.items()}
    write(whole, folder)


def with_deepspeed(model: nn.Module, stage: int, half: bool, folder: Path) -> None:
    import deepspeed

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[::2], "lr": 0.01}, {"params": trained[1::2], "lr": 0.02}]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "sub_group_size": 2000},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": half},
    }
    optimizer = torch.optim.AdamW(groups, eps=1e-3, foreach=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    loss = engine(**models.batch(seed=harness.RANK)).loss
    engine.backward(loss)
    engine.step()
    engine.save_checkpoint(folder / "saved", client_state={"step": 1, "place": Path("here")})
    write({name: master(tensor) for name, tensor in named_tensors(engine)}, folder)


def master(tensor: torch.Tensor) -> torch.Tensor:
    """The float32 master of a trained tensor; any other tensor as it is."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    if tensor.requires_grad:
        return safe_get_full_fp32_param(tensor).detach().clone()
    if not hasattr(tensor, "ds_id"):
        return tensor.detach().clone()
    with deepspeed.zero.GatheredParameters([tensor]):
        return tensor.detach().clone()


def write(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    if harness.RANK == 0:
        own = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
        save_file(own, folder / "truth.safetensors")
    dist.barrier()


os.environ["DS_ACCELERATOR"] = "cpu"
dist.init_process_group("gloo")
harness.run(case)
dist.destroy_process_group()
