"""Optimizers with state of unusual forms on several ranks: "OPTIMIZER/WRAPPER", or "refused/WRAPPER".

An optimizer that keeps a list of matrices of whole gradients cannot work on shards; one that does it all the same, with
matrices of each rank's own part, is refused at the first step.
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import models
import pytest
import torch
import torch.distributed as dist
import wrappers
from optimizers import SMALL, Small
from wrappers import WRAPPERS, Live, truth

from ft_ckpt import CheckpointSaver
from ft_ckpt.distributed.wrappers import is_distributed
from ft_ckpt.errors import CheckpointError

TOLD: dict[str, Any] = {"enter_timeout_seconds": 60, "on_difference": "ignore"}


class OfShards(Small):
    """A list with a matrix of this rank's own elements."""

    def update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        part: Any = gradient.to_local() if is_distributed(gradient) else gradient  # type: ignore[attr-defined]
        flat = part.flatten()[:3]
        self.state[parameter]["sides"] = [torch.outer(flat, flat)]
        return gradient


def live_model(wrapper: str, optimizer: Any, seed: int) -> Live:
    wrappers.adam = lambda model: optimizer([p for p in model.parameters() if p.requires_grad])
    return WRAPPERS[wrapper](models.build("llama", seed))


def saver_of(live: Live, folder: Path) -> CheckpointSaver:
    saver = CheckpointSaver(live.accelerator, folder, every=2, **TOLD)
    saver.register(model=live.model, optimizer=live.optimizer)
    return saver


def train(live: Live, saver: CheckpointSaver, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        losses.append(live.step(models.batch(seed=97 * step + harness.RANK)))
        saver.step()
    return losses


def exact(folder: Path, wrapper: str, optimizer: Any) -> None:
    live = live_model(wrapper, optimizer, 0)
    with saver_of(live, folder) as saver:
        train(live, saver, 0, 2)
        expected = train(live, saver, 2, 2)
    fresh = live_model(wrapper, optimizer, 1)
    with saver_of(fresh, folder) as saver:
        assert saver.resume("checkpoint-2").report.problems == ()
        assert train(fresh, saver, 2, 2) == expected
    before, after = truth(live), truth(fresh)
    assert all(torch.equal(before[name], after[name]) for name in before)


def refused(folder: Path, wrapper: str) -> None:
    """On all ranks, also where one of them has no elements of a parameter."""
    live = live_model(wrapper, OfShards, 0)
    saver = saver_of(live, folder)
    with pytest.raises(CheckpointError, match=r"sides: .*not cut like the parameter|sides: list|rank \d"):
        train(live, saver, 0, 1)


def case(name: str, folder: Path) -> None:
    optimizer, wrapper = name.split("/")
    make = SMALL.get(optimizer) or getattr(torch.optim, optimizer, None)
    refused(folder, wrapper) if make is None else exact(folder, wrapper, make)


if __name__ == "__main__":
    if not any("/zero" in name for name in sys.argv):
        dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    harness.run(case)
