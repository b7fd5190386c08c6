"""A file of very many tiny tensors: saving it, reading one of them, reading all.

The cost is per tensor, not byte.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import ft_ckpt
from scripts.bench.common import Row, Setting, in_turns, seconds, size_of, sync_tree, touch

TITLE = "very many tensors of 64 numbers: save until durable, open and read one, read all"
ONE = "layer.1000.weight"
State = dict[str, Tensor]


def measure(setting: Setting, size_bytes: int) -> list[Row]:
    """A row for each way; "seconds" are those of the save, the reads are from the page cache."""
    state = {
        f"layer.{index}.weight": torch.full((64,), float(index))
        for index in range(size_bytes // 256)
    }
    ways = {}
    for name, (suffix, *functions) in WAYS.items():
        ways[name] = partial(_one, setting.folder / f"many{suffix}", state, *functions)
    return [
        row | {"tensor_bytes": size_of(state), "tensors": len(state)}
        for row in in_turns(ways, setting)
    ]


def _one(
    path: Path,
    state: State,
    save: Callable[[State, Path], Any],
    read_one: Callable[[Path], Tensor],
    read_all: Callable[[Path], State],
) -> Row:
    saved = seconds(lambda: save(state, path)) + (
        0 if save is ft_ckpt.save else seconds(lambda: sync_tree(path))
    )
    row = {"seconds": saved, "disk_bytes": path.stat().st_size}
    row["first_seconds"] = seconds(lambda: touch({ONE: read_one(path)}))
    row["load_seconds"] = seconds(lambda: touch(read_all(path)))
    path.unlink()
    os.sync()
    return row


def _opened(path: Path) -> Tensor:
    with safe_open(path, "pt") as file:
        tensor: Tensor = file.get_tensor(ONE)
        return tensor


def _with_h5py(state: State, path: Path) -> None:
    with h5py.File(path, "w") as file:
        for name, tensor in state.items():
            file.create_dataset(name, data=tensor.numpy())


def _one_from_h5(path: Path) -> Tensor:
    with h5py.File(path) as file:
        return torch.from_numpy(file[ONE][()])


def _all_from_h5(path: Path) -> State:
    with h5py.File(path) as file:
        return {name: torch.from_numpy(file[name][()]) for name in file}


_OURS = (ft_ckpt.save, lambda path: ft_ckpt.load(path)[ONE], ft_ckpt.load)
WAYS: dict[str, tuple[Any, ...]] = {
    "ours": (".ours.safetensors", *_OURS),
    "ours, h5": (".ours.h5", *_OURS),
    "safetensors": (".safetensors", save_file, _opened, load_file),
    "torch.save": (".pt", torch.save, lambda path: torch.load(path)[ONE], torch.load),
    "h5py": (".h5", _with_h5py, _one_from_h5, _all_from_h5),
}
