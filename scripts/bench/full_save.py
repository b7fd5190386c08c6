"""Time a synchronous full save beside transformers' own, in one run, from small to large.

    python scripts/bench/full_save.py --sizes 10MB 100MB 1GB --rounds 7
    python scripts/bench/full_save.py --json

Ours is timed until everything is synced to the disk and committed; `save_pretrained` as it is (it returns with the
bytes in the page cache), and once more followed by a sync of its files. The three take turns within each round, so
that a disk whose speed drifts treats them alike. Quote the ratios: absolute times are the machine's.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from ft_ckpt import CheckpointSaver
from ft_ckpt.config import parse_size

COLUMNS = {"ours, durable": "ours", "save_pretrained": "theirs", "save_pretrained + sync": "synced"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sizes", nargs="+", default=["10MB", "100MB", "1GB", "2.5GB"], help="bytes of weights, in bf16"
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one that is not")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    results = [measure(parse_size(size), args.rounds, args.folder) for size in args.sizes]
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)


def measure(size_bytes: int, rounds: int, place: Path | None) -> dict[str, float]:
    """Median seconds of each way to save a model of about `size_bytes`, and the ratios to ours."""
    model = make_model(size_bytes)
    folder = Path(tempfile.mkdtemp(dir=place))
    ways: dict[str, Callable[[], None]] = {
        "ours": lambda: void(CheckpointSaver().save(model, folder / "ours")),
        "theirs": lambda: model.save_pretrained(folder / "theirs"),
        "synced": lambda: (model.save_pretrained(folder / "synced"), sync(folder / "synced"))[0],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for turn in range(rounds + 1):
            for name, way in ways.items():
                shutil.rmtree(folder / name, ignore_errors=True)
                os.sync()  # nobody pays for what another left in the page cache
                begun = time.perf_counter()
                way()
                if turn:
                    times[name].append(time.perf_counter() - begun)
    finally:
        shutil.rmtree(folder)
    medians = {name: statistics.median(values) for name, values in times.items()}
    written = sum(parameter.nbytes for parameter in model.parameters())
    ratios = {f"{name}_over_ours": medians[name] / medians["ours"] for name in ("theirs", "synced")}
    return {"bytes": written, **medians, **ratios, "ours_gb_per_second": written / medians["ours"] / 1e9}


def make_model(size_bytes: int) -> LlamaForCausalLM:
    """A Llama with random bf16 weights of about `size_bytes`; from 2 GB on with the shapes of Llama-3.2-1B."""
    shape = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    if size_bytes < 2_000_000_000:
        width = 256 if size_bytes < 50_000_000 else 1024
        layer = 2 * (4 * width * width + 3 * width * 4 * width)
        depth = max(1, round((size_bytes - 2 * 4096 * width) / layer))
        shape = {"vocab_size": 4096, "hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": depth}
    config = LlamaConfig(**shape, num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.tie_weights()
    return model


def sync(folder: Path) -> None:
    """What it takes for the files in `folder` to survive a power cut."""
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def void(_: object) -> None:
    """Drop a result."""


def show(results: list[dict[str, float]]) -> None:
    """The figures as a table."""
    table = Table(title="full save, median seconds (ratio to ours)")
    table.add_column("weights", justify="right")
    for title in (*COLUMNS, "ours, GB/s"):
        table.add_column(title, justify="right")
    for row in results:
        cells = [
            f"{row['ours']:.3f}",
            *(f"{row[name]:.3f} (x{row[f'{name}_over_ours']:.1f})" for name in ("theirs", "synced")),
        ]
        table.add_row(f"{row['bytes'] / 1e6:,.0f} MB", *cells, f"{row['ours_gb_per_second']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
