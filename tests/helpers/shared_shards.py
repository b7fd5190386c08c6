"""Models whose shards are on two or more of four ranks each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from wrappers import Live, adam


class Layers(nn.Module):
    """Two layers whose parameters have distinct shapes; one has fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 1)


def grid() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def hybrid(model: nn.Module) -> nn.Module:
    settings: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
    strategy = ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(
        model, sharding_strategy=strategy, device_mesh=grid(), **settings
    )


def placed(model: nn.Module) -> nn.Module:
    """Distribute parameters: shards with replicas, replicas on all ranks, shards of two meshes."""
    mesh = grid()
    layouts = {
        "first.weight": (mesh, [Replicate(), Shard(1)]),
        "first.bias": (mesh["shard"], [Shard(0)]),
        "last.weight": (mesh, [Replicate(), Replicate()]),
        "last.bias": (mesh["shard"], [Replicate()]),
    }
    for name, (mesh_of_it, placements) in layouts.items():
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        whole = getattr(module, key).detach()
        setattr(module, key, nn.Parameter(distribute_tensor(whole, mesh_of_it, placements)))
    return model


PARTS: dict[str, Callable[[Any], Any]] = {
    "hsdp": lambda model: fully_shard(model, mesh=grid()),
    "hybrid": hybrid,
    "placed": placed,
}


def layers(way: str, seed: int = 0) -> Live:
    """Make a model whose shards are on two or more ranks each, and train it for two steps.

    The steps are the same on all ranks.
    """
    torch.manual_seed(seed)
    model = PARTS[way](Layers())
    live = Live(model, adam(model))
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.5
        live.optimizer.step()
    live.optimizer.zero_grad()
    return live


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_parts(live: Live) -> dict[str, torch.Tensor]:
    """Copy this rank's shards of weights and moments."""
    tensors = {}
    for name, parameter in live.model.named_parameters():
        tensors[name] = local(parameter.detach()).clone()
        for kind, moment in live.optimizer.state[parameter].items():
            tensors[f"{name}/{kind}"] = local(moment).clone()
    return tensors
