"""A file of very many tiny tensors: a save, a read of one of them, a read of all.

The cost is that of a tensor, not of a byte.
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
    """Measure each way; "seconds" are those of the save, the reads are from the page cache."""
    state = {}
    for index in range(size_bytes // 256):
        state[f"layer.{index}.weight"] = torch.full((64,), float(index))
    ways = {}
    for name, (suffix, *functions) in WAYS.items():
        ways[name] = partial(_save_and_read, setting.folder / f"many{suffix}", state, *functions)
    sizes = {"tensor_bytes": size_of(state), "tensors": len(state)}
    return [row | sizes for row in in_turns(ways, setting)]


def _save_and_read(
    path: Path,
    state: State,
    save: Callable[[State, Path], Any],
    read_one: Callable[[Path], Tensor],
    read_all: Callable[[Path], State],
) -> Row:
    save_seconds = seconds(lambda: save(state, path))
    if save is not ft_ckpt.save:  # which syncs
        save_seconds += seconds(lambda: sync_tree(path))
    row = {"seconds": save_seconds, "disk_bytes": path.stat().st_size}
    row["first_seconds"] = seconds(lambda: touch({ONE: read_one(path)}))
    row["load_seconds"] = seconds(lambda: touch(read_all(path)))
    path.unlink()
    os.sync()
    return row


def _one_from_safetensors(path: Path) -> Tensor:
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
    "safetensors": (".safetensors", save_file, _one_from_safetensors, load_file),
    "torch.save": (".pt", torch.save, lambda path: torch.load(path)[ONE], torch.load),
    "h5py": (".h5", _with_h5py, _one_from_h5, _all_from_h5),
}
