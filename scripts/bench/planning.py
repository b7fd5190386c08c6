"""The planning of a save, before a byte moves, for models that FSDP2 shards over very many ranks.

One process acts as one of the ranks, in a fake process group. Every rank makes the whole plan by
itself, so the time of one is the time of all. Messages between ranks through the store are counted
by `tests/ranks/test_crowd.py`.
"""

import gc
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import LlamaForCausalLM

from ft_ckpt import SaverConfig
from ft_ckpt.ranks import Ranks
from ft_ckpt.saving.agree import _describe_save
from ft_ckpt.saving.planning import FileWrites, divide_files, plan_save, request_of
from ft_ckpt.saving.stage import StagedSave
from ft_ckpt.storage.digests import chunk_of_rank
from scripts.bench.common import Row, Setting, as_child, in_child, medians, seconds
from scripts.bench.models import config_of

T = TypeVar("T")
RANKS = 1024
TITLE = f"planning a full save of a model cut over {RANKS:,} ranks, and of one of very many tensors"
# small tensors: at most so many, and one for so many bytes of the given size
_MANY, _BYTES_OF_ONE = 100_000, 25_000


def measure(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure the first rank and the last, with each model."""
    rows = []
    for kind in ("llama", "many"):
        for rank in (0, RANKS - 1):
            rows += in_child("planning", setting, size_bytes, kind, rank)
    return rows


def measure_in_child(setting: Setting, size_bytes: int, kind: str, rank: int) -> list[Row]:
    """Measure one rank, in the child."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    if kind == "llama":
        model = _cut_llama(size_bytes // 2)
    else:
        model = _cut_layers(min(_MANY, size_bytes // _BYTES_OF_ONE), rank)
    rows = [_plan(model, Ranks(rank, RANKS)) for _ in range(setting.rounds + 1)]
    facts = {
        "tensors": sum(1 for _ in model.parameters()),
        "peak_bytes": _peak_bytes(model, Ranks(rank, RANKS)),
    }
    return [{"way": f"ours, {kind}, rank {rank}", **medians(rows[1:]), **facts}]


def _cut_llama(parameters: int) -> nn.Module:
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(parameters)).to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to_empty(device="cpu")


def _cut_layers(count: int, rank: int) -> nn.Module:
    """Make `count` weights of a few shapes, sharded as FSDP2 does; it would take minutes itself."""
    mesh = init_device_mesh("cpu", (RANKS,))
    shapes = [(64, 64), (64, 16), (128, 64), (64, 128), (2048, 2)]
    model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(count))
    for number, layer in enumerate(model):
        rows, columns = shapes[number % len(shapes)]
        step = -(-rows // RANKS)
        local = torch.zeros(max(0, min(step, rows - rank * step)), columns)
        layout = {"shape": (rows, columns), "stride": (columns, 1)}
        cut = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, **layout)
        layer.weight = nn.Parameter(cut)
    return model


def _plan(model: nn.Module, ranks: Ranks) -> Row:
    config = SaverConfig()
    arguments = {"tokenizer": None, "adapter_only": False, "step": None, "metrics": {}}
    request = request_of(config, model, Path("target"), **arguments)
    gc.collect()
    plan, choose_seconds = _result_and_seconds(lambda: plan_save(request, ranks, config))
    _, say_seconds = _result_and_seconds(lambda: _describe_save(plan, StagedSave(), {}))
    shares, shares_seconds = _result_and_seconds(lambda: divide_files(plan.plans, ranks.size))
    pieces, own_seconds = _result_and_seconds(lambda: _count_pieces(shares, ranks.rank))
    return {
        "seconds": choose_seconds + say_seconds + shares_seconds + own_seconds,
        "choose_seconds": choose_seconds,
        "say_seconds": say_seconds,
        "shares_seconds": shares_seconds,
        "own_seconds": own_seconds,
        "pieces": pieces,
    }


def _result_and_seconds(action: Callable[[], T]) -> tuple[T, float]:
    results: list[T] = []
    duration = seconds(lambda: results.append(action()))
    return results[0], duration


def _count_pieces(shares: list[FileWrites], rank: int) -> int:
    """Count the byte ranges that the rank writes."""
    count = 0
    for share in shares:
        for cut in share.all_cuts:
            count += chunk_of_rank(cut, rank) is not None
    return count


def _peak_bytes(model: nn.Module, ranks: Ranks) -> int:
    """Measure the peak memory of one plan, its result included."""
    tracemalloc.start()
    _plan(model, ranks)
    return tracemalloc.get_traced_memory()[1]


if __name__ == "__main__":
    as_child("planning", measure_in_child)
