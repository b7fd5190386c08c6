"""What a save has to work out before a byte moves, for a model that FSDP2 cuts over very many ranks.

One process stands for one of them, with a process group that only says how many there are; every rank works all of it
out by itself, so the time of one is the time of all.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

from ft_ckpt import SaverConfig
from ft_ckpt.distributed.ranks import Ranks
from ft_ckpt.saving import write_shards
from ft_ckpt.saving.plan import make_plan, request_of
from ft_ckpt.saving.planned_save import look_at_model
from ft_ckpt.storage.digests import cut_chunks
from scripts.bench.common import Row, Setting, as_child, in_child, medians, seconds
from scripts.bench.models import config_of

RANKS = 1024
TITLE = f"planning a full save of a model cut over {RANKS:,} ranks"


def measure(setting: Setting, size_bytes: int) -> list[Row]:
    """A row for the first rank and the last."""
    return [row for rank in (0, RANKS - 1) for row in in_child("planning", setting, size_bytes, rank)]


def planned(setting: Setting, size_bytes: int, rank: int) -> list[Row]:
    """In the child: one rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    model = _cut_model(size_bytes // 2)
    rows = [_plan(model, Ranks(rank, RANKS)) for _ in range(setting.rounds + 1)]
    tensors = sum(1 for _ in model.parameters())
    return [{"way": f"ours, rank {rank}", **medians(rows[1:]), "tensors": tensors}]


def _cut_model(parameters: int) -> torch.nn.Module:
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(parameters)).to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to_empty(device="cpu")


def _own_chunks(shares: list[write_shards.Share], rank: int) -> list[tuple[int, int, int]]:
    return [chunk for share in shares for cut in share.actual_cuts for chunk in cut_chunks(cut) if chunk[2] == rank]


def _plan(model: torch.nn.Module, ranks: Ranks) -> Row:
    config, row = SaverConfig(), {}
    given = {"tokenizer": None, "adapter_only": False, "step": None, "metrics": {}}
    request, chosen, shares, own = request_of(config, model, Path("target"), **given), [], [], []
    row["choose_seconds"] = seconds(lambda: chosen.append(make_plan(request, look_at_model(model), ranks, config)[0]))
    row["shares_seconds"] = seconds(lambda: shares.extend(write_shards.divide_files(chosen[0].plans, ranks.size)))
    row["own_seconds"] = seconds(lambda: own.extend(_own_chunks(shares, ranks.rank)))
    return {"seconds": sum(row.values()), **row, "pieces": len(own)}


if __name__ == "__main__":
    as_child("planning", planned)
