"""Saves under FSDP2 on two ranks, of all weights and of an adapter: time and memory of rank 0."""

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from ft_ckpt import CheckpointSaver
from scripts.bench.common import (
    ACCELERATOR,
    Row,
    Setting,
    as_child,
    bytes_of,
    in_child,
    medians,
    peak_bytes,
    seconds,
    sync_tree,
)
from scripts.bench.models import make_model

TITLE = "a full save under FSDP2, 2 ranks, float32"
ADAPTER_TITLE = "an adapter-only save under FSDP2, 2 ranks, LoRA of rank 8"
RANKS = 2
Save = Callable[[Path], Any]


def measure(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure each way to save all weights, of `size_bytes`."""
    return in_child("ranks", setting, size_bytes, False, ranks=RANKS)


def measure_adapter(setting: Setting, size_bytes: int) -> list[Row]:
    """Measure each way to save the adapter of a model of `size_bytes`."""
    return in_child("ranks", setting, size_bytes, True, ranks=RANKS)


def measure_on_rank(setting: Setting, size_bytes: int, adapter_only: bool) -> list[Row]:
    """Measure all ways, on each rank."""
    model = make_model(size_bytes // 4, torch.float32)
    tensor_bytes = sum(p.nbytes for p in model.parameters())
    if adapter_only:
        config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
        tensor_bytes = sum(p.nbytes for name, p in model.named_parameters() if "lora_" in name)
    accelerator = make_accelerator()
    # not a model alone
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    ways = (_adapter_ways if adapter_only else _full_ways)(accelerator, prepared)
    rows = _in_turns(ways, setting)
    accelerator.end_training()
    return [row | {"tensor_bytes": tensor_bytes} for row in rows]


def make_accelerator() -> Accelerator:
    """Make an Accelerator that shards models with FSDP2, on the CPU as well."""
    PartialState(cpu=ACCELERATOR is None)
    # it drops the plugin otherwise
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=False,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    return Accelerator(fsdp_plugin=plugin)


def _full_ways(accelerator: Accelerator, model: nn.Module) -> dict[str, Save]:
    sharing = CheckpointSaver(accelerator, each_rank_writes="on")
    gathering = CheckpointSaver(accelerator, each_rank_writes="off")
    return {
        "ours": lambda path: sharing.save(model, path),
        "ours, gather": lambda path: gathering.save(model, path),
        "get_state_dict + save_pretrained": partial(_gathered, accelerator, model),
        "torch DCP + consolidation": partial(_consolidated, model),
    }


def _adapter_ways(accelerator: Accelerator, model: nn.Module) -> dict[str, Save]:
    saver = CheckpointSaver(accelerator)
    return {
        "ours": lambda path: saver.save(model, path, adapter_only=True),
        "get_state_dict + save_pretrained": partial(_gathered, accelerator, model),
    }


def _gathered(accelerator: Accelerator, model: nn.Module, path: Path) -> None:
    """Gather all tensors on rank 0, which writes them, or their adapter: as Accelerate's guide."""
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(path, state_dict=state)
        sync_tree(path)


def _consolidated(model: nn.Module, path: Path) -> None:
    """Write each rank's shards as safetensors, and then one file of them."""
    state = get_model_state_dict(model)
    state.pop("lm_head.weight", None)
    options = {"save_distributed": True, "enable_consolidation": True}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(path), **options))
    if dist.get_rank() == 0:
        sync_tree(path)


def _in_turns(ways: Mapping[str, Save], setting: Setting) -> list[Row]:
    rows_by_way: dict[str, list[Row]] = {name: [] for name in ways}
    for _ in range(setting.rounds + 1):
        for name, save in ways.items():
            rows_by_way[name].append(_save(setting.folder / "target", save))
    result = []
    for name, rows in rows_by_way.items():
        peak = max(row["peak_bytes"] for row in rows)
        result.append({"way": name, **medians(rows[1:]), "peak_bytes": peak})
    return result


def _save(target: Path, save: Save) -> Row:
    """Save once, and delete the result; all ranks begin and end together."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    durations: list[float] = []

    def save_on_all() -> None:
        save(target)
        dist.barrier()

    peak = peak_bytes(lambda: durations.append(seconds(save_on_all)))
    row = {"seconds": durations[0], "peak_bytes": peak}
    if dist.get_rank() == 0:
        row["disk_bytes"] = bytes_of(target)
        shutil.rmtree(target)
    dist.barrier()
    return row


if __name__ == "__main__":
    as_child("ranks", measure_on_rank)
