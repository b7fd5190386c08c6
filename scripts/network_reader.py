"""The reader of `scripts/network_disk`: it polls a run, and loads each checkpoint that is listed.

The weights of a checkpoint are all equal to the number of its step, so that a mixture is noticed.
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ft_ckpt import latest, load_model
from ft_ckpt.errors import CheckpointError, UnreadableError

KEPT = 2  # checkpoints that the writer leaves
MAX_STALE_SECONDS = 70.0  # caches of 60 s


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def new_model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))


@torch.no_grad()
def fill(model: nn.Module, number: int) -> None:
    for parameter in model.parameters():
        parameter.fill_(number)


def constant_of(model: nn.Module) -> int | None:
    """Return the number that all weights are equal to; None if they differ."""
    values: set[float] = set()
    for parameter in model.parameters():
        values.update(parameter.detach().unique().tolist())
    return int(values.pop()) if len(values) == 1 else None


def load_patiently(checkpoint: Path) -> tuple[int | None, int]:
    """Load a checkpoint; return the number of all its weights, and how many loads failed before.

    A client whose cache leads to a file that was replaced gets UnreadableError, which is raised
    only after MAX_STALE_SECONDS.
    """
    model = new_model()
    refusals = 0
    end = time.monotonic() + MAX_STALE_SECONDS
    while time.monotonic() < end:
        with suppress(UnreadableError):
            load_model(checkpoint, into=model)
            return constant_of(model), refusals
        refusals += 1
        time.sleep(0.05)
    load_model(checkpoint, into=model)
    return constant_of(model), refusals


def read_while_written(run: Path, written: Path, loads: int) -> dict[str, Any]:
    """Load the newest checkpoint of `run` again and again, and report on the loads.

    `written` is the run as its writer sees it. An error counts if the writer still keeps that
    checkpoint.
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
            present_steps = sorted(step_of(path) for path in written.glob("checkpoint-*"))
            if step_of(checkpoint) in present_steps[-KEPT:]:
                problems.append(str(error))
            continue
        step = step_of(checkpoint)
        if constant_of(model) != step:
            problems.append(f"{checkpoint}: has weights of {constant_of(model)}")
        steps.append(step)
    return {"loads": len(steps), "checkpoints": len(set(steps)), "problems": problems}
