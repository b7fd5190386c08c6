"""Models with extra entries in their state dict, under wrappers: saved and resumed; and tensors of some ranks only."""

import os
from pathlib import Path

import harness  # first: it arms the stack dump
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from wrappers import WRAPPERS, truth

from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import RanksDisagreeError

QUIET = {"enter_timeout_seconds": 60, "on_difference": "ignore"}
NAMES = ["task:en", "a/b", "größe 1", "weights", "rank-0"]


class Scaled(nn.Linear):
    """A layer with extra state that differs by rank."""

    def __init__(self, amax: float) -> None:
        super().__init__(6, 6)
        self.amax = torch.full((3,), amax)

    def get_extra_state(self):
        return self.amax

    def set_extra_state(self, state) -> None:
        self.amax = state.clone()


class Model(nn.Module):
    """Layers with unusual names, a tie, a buffer, and a name that the model lists in its own way."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in NAMES})
        self.scaled, self.count = Scaled(value + harness.RANK), torch.tensor(value)
        self.layers["tied"] = nn.Linear(6, 6)
        self.layers["tied"].weight = self.layers["task:en"].weight
        self.register_buffer("mean", torch.full((5,), value))
        torch.manual_seed(int(value))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand(parameter.shape))

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = self.count.clone()

    def _load_from_state_dict(self, state, prefix, *rest) -> None:
        self.count = state.pop(f"{prefix}count", self.count).clone()
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return sum(layer(inputs).square().mean() for layer in (*self.layers.values(), self.scaled))


def wrapped(wrapper: str, value: float) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = Model(value)
    if wrapper == "zero3":
        return WRAPPERS["zero3"](model).model
    if wrapper == "fsdp2":
        return fully_shard(model)
    if wrapper == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    return nn.parallel.DistributedDataParallel(model)


def inside(model: nn.Module) -> Model:
    return model if isinstance(model, Model) else model.module


def whole(wrapper: str, folder: Path) -> None:
    """Files have every entry of the bare model's state dict; a resume gives each rank its own values."""
    model, again = wrapped(wrapper, 3), wrapped(wrapper, 8)
    CheckpointSaver(**QUIET).save(model, folder / "full")
    files = load_file(folder / "full" / "model.safetensors")
    bare = Model(3).state_dict()
    bare["scaled._extra_state"] = torch.full((3,), 3.0)  # rank 0's
    assert files.keys() == bare.keys() - {"layers.tied.weight"}, files.keys() ^ bare.keys()
    assert all(torch.equal(files[name], bare[name]) for name in files)
    CheckpointSaver(**QUIET).save_state(model, folder / "state")
    CheckpointSaver(**QUIET).resume(folder / "state", model=again)
    before, after = truth_of(model), truth_of(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert inside(again).count.item() == 3
    assert inside(again).scaled.amax.tolist() == [3.0 + harness.RANK] * 3


def truth_of(model: nn.Module) -> dict[str, torch.Tensor]:
    from wrappers import Live

    return truth(Live(model, None))


def lonely(save: str, folder: Path) -> None:
    """As under pipeline parallelism: tensors of one rank alone are refused by name."""
    model = nn.ModuleDict({"both": nn.Linear(2, 2), f"layer {harness.RANK}": nn.Linear(2, 2)})
    with pytest.raises(RanksDisagreeError, match=r"layer 1.weight, layer 1.bias on rank\(s\) 1 alone"):
        getattr(CheckpointSaver(**QUIET), save)(model, folder / "out")


def case(name: str, folder: Path) -> None:
    action, what = name.split("/")
    {"whole": whole, "lonely": lonely}[action](what, folder)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    harness.run(case)
    dist.destroy_process_group()
