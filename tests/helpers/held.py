"""Tensors as each engine shards them on any of many ranks, without a process per rank."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

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

Held = tuple[Sharding, Tensor | None]
WAYS = ("ddp", "fsdp1", "fsdp2", "zero3")


def planned(
    values: Mapping[str, Tensor],
    way: str,
    world: int,
    rank: int,
    dtype: torch.dtype | None = None,
    shard: int = 1 << 60,
) -> PartPlan:
    """The files of a model with these parameters as `rank` of `world` plans them; stored as
    `dtype`.
    """
    held = (
        flat(values, world, rank)
        if way == "fsdp1"
        else {name: _held(values[name], way, world, rank) for name in values}
    )
    entries = [_entry(name, value, held[name], dtype) for name, value in values.items()]
    return plan_part(Part("model", "", "model", None, tuple(entries)), shard)


def flat(values: Mapping[str, Tensor], world: int, rank: int) -> dict[str, Held]:
    """All of them in one FSDP1 flat parameter, padded to equal shards."""
    shard = max(1, -(-sum(value.numel() for value in values.values()) // world))
    buffer = _shard(torch.cat([value.reshape(-1) for value in values.values()]), shard, rank)
    found, first = {}, 0
    for name, value in values.items():
        found[name] = _run(
            buffer, FlatSharding(value.numel(), first, shard, tuple(range(world))), rank
        )
        first += value.numel()
    return found


def _held(value: Tensor, way: str, world: int, rank: int) -> Held:
    shape, ranks = tuple(value.shape), tuple(range(world))
    if way == "ddp" or (way == "fsdp2" and not value.dim()):
        return ReplicatedSharding(shape), value
    if way == "zero3":  # each parameter by itself, flattened and padded
        shard = -(-value.numel() // world)
        return _run(
            _shard(value.reshape(-1), shard, rank),
            FlatSharding(value.numel(), 0, shard, ranks),
            rank,
        )
    sharding = MeshSharding(shape, _line_of(world), (0,))
    for mine in sharding.local_boxes(rank):
        return sharding, value[mine.offsets[0] : mine.offsets[0] + mine.sizes[0]]
    return sharding, value[:0]


@cache
def _line_of(world: int) -> Mesh:
    return Mesh((world,), tuple(range(world)))


def _run(buffer: Tensor, sharding: FlatSharding, rank: int) -> Held:
    span = sharding.range_in_shard(rank)
    return sharding, None if span is None else buffer[slice(*span)]


def _shard(value: Tensor, shard: int, rank: int) -> Tensor:
    part = value[rank * shard : (rank + 1) * shard]
    return (
        part if part.numel() == shard else torch.cat([part, part.new_zeros(shard - part.numel())])
    )


def _entry(name: str, value: Tensor, held: Held, dtype: torch.dtype | None) -> Entry:
    live = nn.Parameter(value, requires_grad=False)
    source = Source(
        id(live), name, name, tuple(value.shape), value.dtype, True, True, "plain", held[0]
    )
    source = replace(source, live=live).holding(held[1])
    return Entry(name, source.shape, dtype or value.dtype, value.dtype, source)


def llama_1b() -> dict[str, Tensor]:
    """The parameters of Llama-3.2-1B on the meta device."""
    hidden, inner, kv = 2048, 8192, 512
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (128256, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(16):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (kv, hidden),
                "self_attn.v_proj": (kv, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
            }.items()
        }
    return {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, shape in shapes.items()
    }
