"""Time a full save under FSDP2: every rank writing its own bytes, beside rank 0 gathering and writing all.

    torchrun --standalone --nproc_per_node 2 scripts/bench/ranks.py --size 1.2GB --rounds 5

Both end when the checkpoint is synced and committed, and take turns within each round.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich import print as show
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from ft_ckpt import CheckpointSaver
from ft_ckpt.config import parse_size

LAYER_PARAMETERS, EMBEDDINGS = 12_847_104, 32_768_000  # of the shapes below


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1.2GB", help="bytes of weights, in float32 (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one that is not")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    model = sharded(parse_size(args.size))
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    times: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(args.rounds + 1):
        for each, seconds in times.items():
            seconds.append(timed(model, Path(str(told[0])) / each, each))
    if dist.get_rank() == 0:
        shutil.rmtree(str(told[0]))
        one, every = (statistics.median(times[each][1:]) for each in ("off", "on"))
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / 1e9
        ratio = f"{one / every:.2f} times faster"
        show(f"{size:.2f} GB: rank 0 gathers {one:.2f} s, every rank writes {every:.2f} s, {ratio}")
    dist.barrier()
    dist.destroy_process_group()


def sharded(size_bytes: int) -> torch.nn.Module:
    """A Llama of about `size_bytes` in float32, cut over the ranks layer by layer."""
    layers = max(1, round((size_bytes / 4 - EMBEDDINGS) / LAYER_PARAMETERS))
    sizes = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, tie_word_embeddings=True))
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def timed(model: torch.nn.Module, path: Path, each: str) -> float:
    """Seconds of a save that all ranks begin and end together; nothing of it stays."""
    dist.barrier()
    begun = time.perf_counter()
    CheckpointSaver(each_rank_writes=each).save(model, path)
    dist.barrier()
    seconds = time.perf_counter() - begun
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    return seconds


if __name__ == "__main__":
    main()
