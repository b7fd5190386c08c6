"""Real FSDP2 and ZeRO-3 holdings of a few ranks of a thousand: a process group that pretends takes one process."""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from held import planned
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ft_ckpt.distributed.sharding import zero3_holding
from ft_ckpt.distributed.wrappers import sources

WORLD = 1024


def facts(holding):
    local = None if holding.local is None or not holding.local.numel() else tuple(holding.local.shape)
    blocks = [holding.block(rank) for rank in (0, 1, 2, 511, 512, 1022, 1023)]
    return holding.view, tuple(rank for rank in holding.owners if holding.block(rank)), blocks, local, holding.moves


def compare(rank):
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(7, 2001), nn.LayerNorm(5), nn.Embedding(1030, 3), nn.Linear(1, 1024), nn.Linear(0, 3)
        )
    values = {name: torch.zeros(value.shape) for name, value in model.named_parameters()}
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    real = {name: source.holding for name, source in sources(model.to_empty(device="cpu")).items()}
    told = {entry.name: entry.source.holding for entry in planned(values, "fsdp2", WORLD, rank).part.entries}
    for name in values:
        assert facts(told[name]) == facts(real[name]), (rank, name, facts(told[name]), facts(real[name]))
    told = {entry.name: entry.source.holding for entry in planned(values, "zero3", WORLD, rank).part.entries}
    for name, value in values.items():
        shard = torch.zeros(-(-value.numel() // WORLD))  # as DeepSpeed pads and cuts
        parameter = SimpleNamespace(ds_tensor=shard, ds_process_group=dist.group.WORLD)
        holding = zero3_holding(parameter, tuple(value.shape))
        assert facts(told[name]) == facts(holding), (rank, name, facts(told[name]), facts(holding))


if __name__ == "__main__":
    for rank in (0, 1, 511, 1023):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        compare(rank)
        dist.destroy_process_group()
    sys.stdout.write("the same")
