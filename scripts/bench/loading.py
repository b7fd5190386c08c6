"""Time loading a model, cold and warm, beside its peers and the disk's own rate, in one run.

    python scripts/bench/loading.py --sizes 1GB 2.5GB --rounds 5
    python scripts/bench/loading.py --json

Every way ends with each page of each tensor touched: a file that is only mapped has not been loaded. "Cold" drops the
files from the page cache before; "warm" reads them before. All take turns within each round. `resume` puts weights and
optimizer back into tensors that are there; its rate counts their bytes too. Quote the ratios: times are the machine's.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers
from full_save import make_model, sync
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

import ft_ckpt
from ft_ckpt.blocks import ALIGNMENT, new_block, read_ahead, read_into
from ft_ckpt.config import parse_size
from ft_ckpt.engines import sources
from ft_ckpt.fill import fill_all
from ft_ckpt.formats import dual
from ft_ckpt.formats.raw import RawFile

LIMIT = "O_DIRECT read"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["10MB", "100MB", "1GB", "2.5GB"], help="bytes of weights, bf16")
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
        for result in results:
            show(result)


def measure(size_bytes: int, rounds: int, place: Path | None) -> dict[str, object]:
    """Median seconds of each way to load a model of about `size_bytes`, cold and warm."""
    folder = Path(tempfile.mkdtemp(dir=place))
    try:
        model = make_model(size_bytes)
        weights = write(model, folder)
        size = weights.stat().st_size
        ways = {**ours(folder, weights, model), **peers(folder, weights)}
        times: dict[str, dict[str, list[float]]] = {"cold": {name: [] for name in ways}, "warm": {n: [] for n in ways}}
        for turn in range(rounds + 1):
            for state, found in times.items():
                for name, way in ways.items():
                    prepare(folder, state)
                    begun = time.perf_counter()
                    touch(way())
                    if turn:
                        found[name].append(time.perf_counter() - begun)
    finally:
        shutil.rmtree(folder)
    medians = {state: {n: statistics.median(v) for n, v in found.items()} for state, found in times.items()}
    return {"bytes": size, **medians}


def write(model: torch.nn.Module, folder: Path) -> Path:
    """The model in every form that is loaded; the weight file of ours."""
    ft_ckpt.CheckpointSaver().save(model, folder / "ours")
    model.save_pretrained(folder / "theirs", max_shard_size="1TB")
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    torch.save(state, folder / "model.pt")
    save_file(state, folder / "model.safetensors")
    for written in (folder / "ours", folder / "theirs", folder):  # what is not on the disk stays in the page cache
        sync(written)
    return folder / "ours" / "model.safetensors"


def ours(folder: Path, weights: Path, model: torch.nn.Module) -> dict[str, Callable[[], object]]:
    """What is ours, and the limit."""
    found = sources(model)
    once = {source.identity: source for source in reversed(found.values())}
    room = new_block(weights.stat().st_size + -weights.stat().st_size % ALIGNMENT)

    def limit() -> None:
        file = RawFile(weights)
        read_into(memoryview(room), file, file.size_bytes, direct="on")

    def refill() -> None:
        file = dual.open_file(weights)
        fill_all((source, file, source.name) for source in once.values() if source.name in file.specs)

    def ahead() -> None:
        file = dual.open_file(weights)
        for _ in read_ahead((file.runs(name)[0] for name in file.specs), 4):
            pass

    return {
        LIMIT: limit,
        "load_model": lambda: ft_ckpt.load_model(folder / "ours"),
        "load_model, mapped": lambda: ft_ckpt.load_model(folder / "ours", mapped=True),
        "resume: fill a live model": refill,
        "read ahead, dropped": ahead,
    }


def peers(folder: Path, weights: Path) -> dict[str, Callable[[], object]]:
    """The others that are installed."""
    found: dict[str, Callable[[], object]] = {
        "safetensors load_file": lambda: load_file(weights),
        "torch.load": lambda: torch.load(folder / "model.pt"),
        "torch.load, mmap": lambda: torch.load(folder / "model.pt", mmap=True),
        "from_pretrained": lambda: transformers.AutoModelForCausalLM.from_pretrained(folder / "theirs", dtype="auto"),
    }
    if importlib.util.find_spec("runai_model_streamer"):
        found["runai-model-streamer"] = lambda: stream(weights)
    if importlib.util.find_spec("fastsafetensors"):
        found["fastsafetensors"] = lambda: fast(weights)
    return found


def stream(weights: Path) -> dict[str, torch.Tensor]:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(weights))
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}  # its buffer is its own


def fast(weights: Path) -> dict[str, torch.Tensor]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
    loader.add_filenames({0: [str(weights)]})
    buffers = loader.copy_files_to_device()
    return {name: buffers.get_tensor(name).clone() for name in buffers.key_to_rank_lidx}


def prepare(folder: Path, state: str) -> None:
    """All files out of the page cache, or in it."""
    for file in folder.rglob("*"):
        if not file.is_file():
            continue
        with file.open("rb", buffering=0) as handle:
            if state == "cold":
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while handle.read(1 << 24):
                    pass


def touch(loaded: object) -> None:
    """Read a byte of every page."""
    tensors: Iterable[torch.Tensor] = ()
    if isinstance(loaded, torch.nn.Module):
        tensors = loaded.parameters()
    elif isinstance(loaded, dict):
        tensors = loaded.values()
    for tensor in tensors:
        tensor.detach().reshape(-1).view(torch.uint8)[::4096].sum()


def show(result: dict[str, object]) -> None:
    """The figures of one size as a table."""
    size, cold, warm = result["bytes"], result["cold"], result["warm"]
    table = Table(title=f"loading {size / 1e6:,.0f} MB, median seconds")
    for title in ("way", "cold", "of the limit", "warm", "against load_file"):
        table.add_column(title, justify="left" if title == "way" else "right")
    for name, seconds in cold.items():
        against = warm[name] / warm["safetensors load_file"]
        table.add_row(name, f"{seconds:.3f}", f"{cold[LIMIT] / seconds:.2f}", f"{warm[name]:.3f}", f"x{against:.2f}")
    Console().print(table, f"limit {size / cold[LIMIT] / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
