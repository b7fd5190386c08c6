"""Time our file formats beside their peers, in one run: durable saves, first tensor, whole loads, conversion.

    python scripts/bench/formats.py --size 2.5GB --rounds 5
    python scripts/bench/formats.py --json

A state dict with the shapes of Llama-3.2-1B (scaled to --size) in bf16. Every save ends with its file synced, peers'
too, but for one row that says so. Loads use each tensor once, and read every cache line of it; "cold" means after the
file was dropped from the page cache, "warm" from that cache, which each loader filled by its own cold load. Where the
disk sets the limit, that is measured in the same rounds: blocks of 8 MiB past the page cache by four threads (two to
read), and nothing else done to them. The peers take turns with ours within each round. Quote the ratios: absolute times
are the machine's, and a virtual disk's rate changes from minute to minute.
"""

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import h5py
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor

import ft_ckpt
from ft_ckpt.blocks import BLOCK_BYTES, new_block
from ft_ckpt.config import parse_size

State = Mapping[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="2.5GB", help="bytes of the state dict")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds, after one that is not")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        state = make_state(parse_size(args.size))
        results = {
            "save, synced": rounds(saves(state, folder), args.rounds),
            "load, every byte touched, cold": rounds(loads(folder), args.rounds, drop=folder),
            "load, every byte touched, warm": rounds(loads(folder), args.rounds),
            "open and first of 200 tensors": rounds(first_tensors(200, folder), args.rounds),
            "open and first of 20,000 tensors": rounds(first_tensors(20_000, folder), args.rounds),
            "convert, source not in the cache": rounds(conversions(folder), args.rounds, drop=folder),
        }
    finally:
        shutil.rmtree(folder)
    size = size_of(state)
    print(json.dumps({"bytes": size, **results}, indent=2)) if args.json else show(results, size)


def make_state(size_bytes: int) -> dict[str, Tensor]:
    """Random bf16 tensors with Llama-3.2-1B's shapes, as many layers as `size_bytes` holds."""
    hidden, wide, kept, vocabulary = 2048, 8192, 512, 128256
    if size_bytes < 1_200_000_000:
        vocabulary = 8192
    shapes = {
        "q_proj": (hidden, hidden),
        "k_proj": (kept, hidden),
        "v_proj": (kept, hidden),
        "o_proj": (hidden, hidden),
    }
    shapes |= {"gate_proj": (wide, hidden), "up_proj": (wide, hidden), "down_proj": (hidden, wide), "norm": (hidden,)}
    state = {"embed_tokens": torch.empty(vocabulary, hidden, dtype=torch.bfloat16)}
    layer = 2 * sum(int(np.prod(shape)) for shape in shapes.values())
    for index in range(max(1, (size_bytes - state["embed_tokens"].nbytes) // layer)):
        state |= {f"layers.{index}.{k}": torch.empty(shape, dtype=torch.bfloat16) for k, shape in shapes.items()}
    for tensor in state.values():
        tensor.normal_(0, 0.02)
    return state


def saves(state: State, folder: Path) -> dict[str, Callable[[], Any]]:
    """Ways to save it, each to a file of its own, synced."""
    return {
        "the disk: write": lambda: transfer(folder / "limit", os.pwrite, size_of(state)),
        "ours, HDF5": lambda: ft_ckpt.save(state, folder / "ours.h5"),
        "ours, safetensors": lambda: ft_ckpt.save(state, folder / "ours.safetensors"),
        "ours, dual": lambda: ft_ckpt.save(state, folder / "dual.h5", format="dual"),
        "safetensors.save_file": lambda: synced(folder / "peer.safetensors", lambda path: save_file(dict(state), path)),
        "h5py create_dataset": lambda: synced(folder / "peer.h5", lambda path: with_h5py(state, path)),
        "h5py create_dataset, not synced": lambda: with_h5py(state, folder / "peer.h5"),
        "torch.save": lambda: synced(folder / "peer.pt", lambda path: torch.save(dict(state), path)),
    }


def loads(folder: Path) -> dict[str, Callable[[], Any]]:
    """Ways to load what `saves` left, and read every byte once."""
    return {
        "safetensors.load_file, our file": lambda: touch(load_file(folder / "ours.safetensors").values()),
        "ours, HDF5 lazy": lambda: touch(ft_ckpt.load(folder / "ours.h5").values()),
        "ours, safetensors lazy": lambda: touch(ft_ckpt.load(folder / "ours.safetensors").values()),
        "safetensors.load_file, its own file": lambda: touch(load_file(folder / "peer.safetensors").values()),
        "torch.load(mmap=True)": lambda: touch(torch.load(folder / "peer.pt", mmap=True).values()),
    }


def first_tensors(count: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """Open a file of `count` tensors and read one."""
    state = {f"layer.{index}.weight": torch.full((64,), float(index)) for index in range(count)}
    ours, peer = folder / f"{count}.h5", folder / f"{count}.safetensors"
    ft_ckpt.save(state, ours)
    save_file(state, peer)
    name = f"layer.{count // 2}.weight"
    return {
        "ours, HDF5 lazy": lambda: touch([ft_ckpt.load(ours)[name]]),
        "safetensors.load_file": lambda: touch([load_file(peer)[name]]),
    }


def conversions(folder: Path) -> dict[str, Callable[[], Any]]:
    """There and back; what the disk needs to read and write the same bytes; and a plain copy."""
    ours, size = folder / "ours.h5", (folder / "ours.h5").stat().st_size
    return {
        "the disk: read, then write": lambda: (
            transfer(ours, os.preadv, size),
            transfer(folder / "limit", os.pwrite, size),
        ),
        "ours, HDF5 to safetensors": lambda: ft_ckpt.convert(ours, folder / "there.safetensors", progress=False),
        "ours, safetensors to HDF5": lambda: ft_ckpt.convert(
            folder / "ours.safetensors", folder / "back.h5", progress=False
        ),
        "cp and sync": lambda: synced(folder / "copy", lambda path: shutil.copyfile(ours, path)),
    }


def transfer(path: Path, call: Callable[..., int], size_bytes: int) -> None:
    """Read a file, or write one and sync it, past the page cache, as fast as the disk goes."""
    writes = call is os.pwrite
    if writes:
        path.unlink(missing_ok=True)
    file = os.open(path, os.O_DIRECT | (os.O_WRONLY | os.O_CREAT if writes else os.O_RDONLY))
    if writes:
        os.posix_fallocate(file, 0, size_bytes)
    blocks: SimpleQueue[mmap.mmap] = SimpleQueue()
    threads = 4 if writes else 2
    for _ in range(threads):
        blocks.put(new_block())

    def move(at: int) -> None:
        block = blocks.get()
        call(file, block if writes else [block], at)
        blocks.put(block)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(move, range(0, size_bytes, BLOCK_BYTES)))
    os.fsync(file)
    os.close(file)


def with_h5py(state: State, path: Path) -> None:
    """What a user of h5py writes; bf16 as its bits, since numpy has no such type."""
    with h5py.File(path, "w") as file:
        for name, tensor in state.items():
            file.create_dataset(name, data=tensor.view(torch.int16).numpy())


def synced(path: Path, write: Callable[[Path], Any]) -> None:
    """Write, then wait until the bytes are on the disk, as ours do."""
    write(path)
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def touch(tensors: Iterable[Tensor]) -> int:
    """Use each tensor once, and read of it every cache line, the same way for all."""
    return sum(int(tensor.reshape(-1).view(torch.uint8)[::64].sum()) for tensor in tensors)


def drop_cached(folder: Path) -> None:
    """Drop the folder's files from the page cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def size_of(state: State) -> int:
    """Bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def rounds(ways: Mapping[str, Callable[[], Any]], count: int, drop: Path | None = None) -> dict[str, float]:
    """Median seconds of each way; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(count + 1):
        for name, way in ways.items():
            os.sync()
            if drop is not None:
                drop_cached(drop)
            begun = time.perf_counter()
            way()
            if turn:
                times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(values) for name, values in times.items()}


def show(results: Mapping[str, Mapping[str, float]], size: int) -> None:
    """The figures as tables: each row's time against that of the first row, and against our first."""
    for title, medians in results.items():
        first, ours = next(iter(medians)), next(name for name in medians if name.startswith("ours"))
        others = list(dict.fromkeys((first, ours)))
        table = Table("", "median s", "GB/s", *(f"times {name}" for name in others), title=title)
        for name, seconds in medians.items():
            rate = "" if "first of" in title else f"{size / seconds / 1e9:.2f}"
            table.add_row(name, f"{seconds:.4f}", rate, *(f"{seconds / medians[other]:.2f}" for other in others))
        Console().print(table)


if __name__ == "__main__":
    main()
