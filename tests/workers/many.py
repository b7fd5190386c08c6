"""Real FSDP2 and ZeRO-3 layouts of a few of a thousand ranks, by a fake process group in one
process.
"""

import sys
from types import SimpleNamespace
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from held import planned
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ft_ckpt.ranks import ModelTensors, source_of_tensor, tensor_kinds

WORLD = 1024


def facts(source):
    local = None if source.local is None or not source.local.numel() else tuple(source.local.shape)
    sharding = source.sharding
    boxes = [sharding.boxes(rank) for rank in (0, 1, 2, 511, 512, 1022, 1023)]
    owners = tuple(rank for rank in sharding.owners if sharding.boxes(rank))
    return (
        sharding.view,
        owners,
        boxes,
        sharding.local_boxes(dist.get_rank()),
        local,
        sharding.is_sharded,
    )


def compare(rank):
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Linear(7, 2001),
            nn.LayerNorm(5),
            nn.Embedding(1030, 3),
            nn.Linear(1, 1024),
            nn.Linear(0, 3),
        )
    values = {name: torch.zeros(value.shape) for name, value in model.named_parameters()}
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    real = ModelTensors(model.to_empty(device="cpu")).sources()
    told = {
        entry.name: entry.source for entry in planned(values, "fsdp2", WORLD, rank).part.entries
    }
    for name in values:
        assert facts(told[name]) == facts(real[name]), (
            rank,
            name,
            facts(told[name]),
            facts(real[name]),
        )
    zeros = []
    told = {
        entry.name: entry.source for entry in planned(values, "zero3", WORLD, rank).part.entries
    }
    for name, value in values.items():
        shard = torch.zeros(-(-value.numel() // WORLD))  # as DeepSpeed pads and cuts
        parameter = SimpleNamespace(
            ds_tensor=shard, ds_process_group=dist.group.WORLD, ds_shape=value.shape
        )
        parameter.shape, parameter.dtype, parameter.requires_grad = (0,), value.dtype, True
        source = source_of_tensor(name, name, parameter)
        assert facts(told[name]) == facts(source), (rank, name, facts(told[name]), facts(source))
        zeros.append(parameter)
    frozen = nn.Parameter(next(model.parameters()).data, requires_grad=False)
    plain = [
        torch.zeros(3, 2),
        nn.Parameter(torch.zeros(3, 2)),
        torch.zeros(3, 2).long(),
        torch.zeros(2, 3),
    ]
    compare_in_bulk([*model.parameters(), frozen, *zeros, zeros[0], *plain, *plain, frozen])


def compare_in_bulk(tensors):
    """Layouts computed once per group of similar tensors equal those of each tensor by itself."""
    found = tensor_kinds.layouts_of(tensors)
    assert found == [tensor_kinds.layout_of(tensor) for tensor in tensors]
    assert tensor_kinds.have_data(tensors) == [True] * len(tensors)
    for kind, some in tensor_kinds.by_kind(tensors):
        one = Mock(wraps=kind.layout_of)
        with patch.object(type(kind), "layout_of", one):
            assert kind.layouts_of(some * 100) == kind.layouts_of(some) * 100
        assert one.call_count <= 2 * len(some), "however many there are of a kind"


if __name__ == "__main__":
    for rank in (0, 1, 511, 1023):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        compare(rank)
        dist.destroy_process_group()
    sys.stdout.write("the same")
