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
    """Two layers whose parameters have distinct shapes, one of them with fewer rows than there are
    ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 1)


def grid() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def hybrid(model: nn.Module) -> nn.Module:
    settings: dict[str, Any] = {
        "device_mesh": grid(),
        "use_orig_params": True,
        "device_id": torch.device("cpu"),
    }
    return FullyShardedDataParallel(
        model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, **settings
    )


def placed(model: nn.Module) -> nn.Module:
    """Shards with replicas in one mesh, replicas on all ranks, and shards of unrelated meshes."""
    mesh = grid()
    layouts = {
        "first.weight": (mesh, [Replicate(), Shard(1)]),
        "first.bias": (mesh["shard"], [Shard(0)]),
        "last.weight": (mesh, [Replicate(), Replicate()]),
        "last.bias": (mesh["shard"], [Replicate()]),
    }
    for name, (where, placements) in layouts.items():
        module, key = model.get_submodule(name.split(".")[0]), name.split(".")[1]
        whole = getattr(module, key).detach()
        setattr(module, key, nn.Parameter(distribute_tensor(whole, where, placements)))
    return model


PARTS: dict[str, Callable[[Any], Any]] = {
    "hsdp": lambda model: fully_shard(model, mesh=grid()),
    "hybrid": hybrid,
    "placed": placed,
}


def layers(way: str, seed: int = 0) -> Live:
    """A model whose shards are on two or more ranks each, after two steps that are the same on
    all.
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


def parts_held(live: Live) -> dict[str, torch.Tensor]:
    """This rank's shards of weights and moments."""
    tensors = {}
    for name, parameter in live.model.named_parameters():
        tensors[name] = local(parameter.detach()).clone()
        tensors |= {
            f"{name}/{k}": local(v).clone() for k, v in live.optimizer.state[parameter].items()
        }
    return tensors
