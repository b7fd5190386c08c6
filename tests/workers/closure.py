"""Checkpoint closures on several ranks."""

from datetime import timedelta
from pathlib import Path

import harness  # first: it arms the stack dump
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ft_ckpt import CheckpointSaver, Every, latest
from ft_ckpt.closure import checkpoint_closure
from ft_ckpt.errors import RankError, RanksDisagreeError


def sharded(folder: Path) -> None:
    """Inside a closure, FSDP2 parameters are sharded again, though an evaluation left those of the root unsharded."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    @checkpoint_closure(every=Every(steps=2), total_steps=3)
    def look() -> bool:
        saver.save(model, step=saver.progress.step)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        seen.append(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))["1.weight"])
        return True

    with CheckpointSaver(directory=folder) as saver:
        saver.register(model=model, optimizer=optimizer)
        found = []
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(1, 4))
            assert not isinstance(model[1].weight, DTensor), "nothing to put back"
            saver.step()
            found.append(look())
    assert found == [None, True, True]
    assert latest(folder).name == "checkpoint-3"
    assert not torch.equal(seen[0], seen[1])


def clocks(_folder: Path) -> None:
    """Clocks of ranks differ: rank 0's decides."""
    every = Every(minutes=1e-9 if harness.RANK == 0 else 1e9)
    function = checkpoint_closure(every=every)(str)
    assert [function(call) for call in range(2)] == ["0", "1"]


def error(_folder: Path) -> None:
    @checkpoint_closure(every=Every(steps=2))
    def function(call: int) -> int:
        if harness.RANK == 1 and call == 2:
            raise KeyError("full")
        return call

    assert function(1) is None
    expected = (
        (RankError, r"function\(\) failed on rank 1: KeyError: 'full'") if harness.RANK == 0 else (KeyError, "full")
    )
    with pytest.raises(expected[0], match=expected[1]):
        function(2)
    assert [function(3), function(4)] == [None, 4]


def alone(folder: Path) -> None:
    """A call under `if rank == 0` is an error that says so, not a wait without end."""
    ran = []
    with CheckpointSaver(directory=folder, enter_timeout_seconds=2) as saver:
        function = checkpoint_closure(every=Every(steps=1, deadline=None), saver=saver)(ran.append)
        if harness.RANK == 0:
            with pytest.raises(RanksDisagreeError, match=r"rank\(s\) 1 did not enter"):
                function(1)
    dist.barrier()
    assert ran == []


def case(name: str, folder: Path) -> None:
    {"sharded": sharded, "clocks": clocks, "error": error, "alone": alone}[name](folder)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    harness.run(case)
