"""Tensors as the engines hold them on any of many ranks, without a process for each."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ft_ckpt.distributed.sharding import Block, Holding, _cut, replicated, runs
from ft_ckpt.distributed.wrappers import Source
from ft_ckpt.model.entries import Entry, Part
from ft_ckpt.saving.files import PartPlan, plan_part

WAYS = ("ddp", "fsdp1", "fsdp2", "zero3")


def planned(
    values: Mapping[str, Tensor],
    way: str,
    world: int,
    rank: int,
    dtype: torch.dtype | None = None,
    shard: int = 1 << 60,
) -> PartPlan:
    """The files of a model with these parameters as `rank` of `world` plans them; stored as `dtype`."""
    held = (
        flat(values, world, rank)
        if way == "fsdp1"
        else {name: _held(values[name], way, world, rank) for name in values}
    )
    entries = [_entry(name, value, held[name], dtype) for name, value in values.items()]
    return plan_part(Part("model", "", "model", None, tuple(entries)), shard)


def flat(values: Mapping[str, Tensor], world: int, rank: int) -> dict[str, Holding]:
    """All of them in one FSDP1 flat parameter, padded to equal shards."""
    shard = max(1, -(-sum(value.numel() for value in values.values()) // world))
    buffer = _shard(torch.cat([value.reshape(-1) for value in values.values()]), shard, rank)
    found, first = {}, 0
    for name, value in values.items():
        found[name] = runs(buffer, value.numel(), first, shard, range(world), rank)
        first += value.numel()
    return found


def _held(value: Tensor, way: str, world: int, rank: int) -> Holding:
    if way == "ddp" or (way == "fsdp2" and not value.dim()):
        return replicated(value)
    if way == "zero3":  # each parameter by itself, flattened and padded
        shard = -(-value.numel() // world)
        return runs(_shard(value.reshape(-1), shard, rank), value.numel(), 0, shard, range(world), rank)
    shape = tuple(value.shape)

    def block(at: int) -> Block | None:
        return _cut(shape, ((0, at, world),))

    mine = block(rank)
    local = value[mine.offsets[0] : mine.offsets[0] + mine.sizes[0]] if mine is not None else value[:0]
    return Holding(shape, local, tuple(range(world)), block, moves=True, mine=mine)


def _shard(value: Tensor, shard: int, rank: int) -> Tensor:
    part = value[rank * shard : (rank + 1) * shard]
    return part if part.numel() == shard else torch.cat([part, part.new_zeros(shard - part.numel())])


def _entry(name: str, value: Tensor, holding: Holding, dtype: torch.dtype | None) -> Entry:
    live = nn.Parameter(value, requires_grad=False)
    source = Source(name, name, tuple(value.shape), value.dtype, True, live, id(live), "plain", holding)
    return Entry(name, source.shape, dtype or value.dtype, value.dtype, source)


def llama_1b() -> dict[str, Tensor]:
    """The parameters of Llama-3.2-1B, without memory."""
    hidden, inner, kv = 2048, 8192, 512
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128256, hidden), "model.norm.weight": (hidden,)}
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
    return {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
