"""Tensors as each engine shards them on any of many ranks, without a process per rank."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ft_ckpt.model.tensors import Entry, Part
from ft_ckpt.ranks.sharding import (
    FlatSharding,
    Mesh,
    MeshSharding,
    ReplicatedSharding,
    Sharding,
    Source,
)
from ft_ckpt.saving.planning import PartPlan, plan_part

LocalPart = tuple[Sharding, Tensor | None]  # the elements of this rank; None without any
WAYS = ("ddp", "fsdp1", "fsdp2", "zero3")


def planned(
    values: Mapping[str, Tensor],
    way: str,
    world: int,
    rank: int,
    dtype: torch.dtype | None = None,
    shard: int = 1 << 60,
) -> PartPlan:
    """Plan the files of a model with these parameters as `rank` of `world` does.

    `dtype` is that of the stored tensors, `shard` the largest size of a file in bytes.
    """
    if way == "fsdp1":
        parts = flat(values, world, rank)
    else:
        parts = {name: _local_part(values[name], way, world, rank) for name in values}
    entries = [_entry(name, value, parts[name], dtype) for name, value in values.items()]
    return plan_part(Part("model", "", "model", None, tuple(entries)), shard)


def flat(values: Mapping[str, Tensor], world: int, rank: int) -> dict[str, LocalPart]:
    """Put all parameters into one flat parameter of FSDP1, padded to equal shards."""
    ranks, size = tuple(range(world)), sum(value.numel() for value in values.values())
    shard = max(1, -(-size // world))
    buffer = _shard(torch.cat([value.reshape(-1) for value in values.values()]), shard, rank)
    parts, first = {}, 0
    for name, value in values.items():
        parts[name] = _run(buffer, FlatSharding(value.numel(), first, shard, ranks), rank)
        first += value.numel()
    return parts


def _local_part(value: Tensor, way: str, world: int, rank: int) -> LocalPart:
    shape, ranks = tuple(value.shape), tuple(range(world))
    if way == "ddp" or (way == "fsdp2" and not value.dim()):
        return ReplicatedSharding(shape), value
    if way == "zero3":  # each parameter by itself, flattened and padded
        shard = -(-value.numel() // world)
        buffer = _shard(value.reshape(-1), shard, rank)
        return _run(buffer, FlatSharding(value.numel(), 0, shard, ranks), rank)
    sharding = MeshSharding(shape, _line_of(world), (0,))
    for box in sharding.local_boxes(rank):
        return sharding, value[box.offsets[0] : box.offsets[0] + box.sizes[0]]
    return sharding, value[:0]


@cache
def _line_of(world: int) -> Mesh:
    return Mesh((world,), tuple(range(world)))


def _run(buffer: Tensor, sharding: FlatSharding, rank: int) -> LocalPart:
    span = sharding.range_in_shard(rank)
    return sharding, None if span is None else buffer[slice(*span)]


def _shard(value: Tensor, shard: int, rank: int) -> Tensor:
    part = value[rank * shard : (rank + 1) * shard]
    return torch.cat([part, part.new_zeros(shard - part.numel())])


def _entry(name: str, value: Tensor, part: LocalPart, dtype: torch.dtype | None) -> Entry:
    sharding, local = part
    live, shape = nn.Parameter(value, requires_grad=False), tuple(value.shape)
    source = Source(id(live), name, name, shape, value.dtype, True, True, "plain", sharding)
    source = replace(source, live=live).holding(local)
    return Entry(name, shape, dtype or value.dtype, value.dtype, source)


def llama_1b() -> dict[str, Tensor]:
    """Make the parameters of Llama-3.2-1B on the meta device."""
    hidden, inner, kv = 2048, 8192, 512
    layer_shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (128256, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(16):
        for name, shape in layer_shapes.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    return {name: torch.empty(shape, **options) for name, shape in shapes.items()}
