"""The reader of `scripts/network_disk`: it polls a run, and loads each checkpoint that it finds.

The weights of a checkpoint are all equal to the number of its step, so that a mixture is seen.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ft_ckpt import latest, load_model
from ft_ckpt.errors import CheckpointError


def new_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


@torch.no_grad()
def fill(model: nn.Module, number: int) -> None:
    for parameter in model.parameters():
        parameter.fill_(number)


def constant_of(model: nn.Module) -> int | None:
    """The number that all weights are equal to; None if they differ."""
    values: set[float] = set()
    for parameter in model.parameters():
        values.update(parameter.detach().unique().tolist())
    return int(values.pop()) if len(values) == 1 else None


def read_while_written(run: Path, written: Path, loads: int) -> dict[str, Any]:
    """Load the newest checkpoint of `run` again and again; `written` is the run as its writer sees
    it. An error counts if the writer has not pruned that checkpoint.
    """
    model = new_model()
    problems: list[str] = []
    steps: list[int] = []
    while len(steps) < loads and len(problems) < 3:
        checkpoint = latest(run)
        if checkpoint is None:
            time.sleep(0.01)
            continue
        try:
            load_model(checkpoint, into=model)
        except CheckpointError as error:
            if (written / checkpoint.name).exists():
                problems.append(str(error))
            continue
        step = int(checkpoint.name.rpartition("-")[2])
        if constant_of(model) != step:
            problems.append(f"{checkpoint}: has weights of {constant_of(model)}")
        steps.append(step)
    return {"loads": len(steps), "checkpoints": len(set(steps)), "problems": problems}
