"""A small run: a model with dropout, shuffled data, a schedule; trained, saved, and resumed."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ft_ckpt import CheckpointSaver

SAMPLES, EPOCHS = 12, 3
QUIET: dict[str, Any] = {"on_difference": "ignore"}


class Stream(IterableDataset[torch.Tensor]):
    """The same rows in the same order at every pass."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, workers = (info.id, info.num_workers) if info else (0, 1)
        yield from rows()[first::workers]


class Noisy(Dataset[torch.Tensor]):
    """Rows with noise that is drawn where they are read."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return rows()[index] + torch.randn(3)


@dataclass(eq=False)
class Trained:
    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    scheduler: Any
    loader: Any


def rows() -> torch.Tensor:
    return torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(3))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


def prepared(
    accumulate: int = 1,
    workers: int = 0,
    stream: bool = False,
    noisy: bool = False,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Trained:
    """Make a fresh run, as in a new process; the global generators are left in another state."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    # one object for all accelerators of a process
    accelerator.gradient_state._set_sync_gradients(True)
    model = wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    if stream:
        loader = DataLoader(Stream(), 2, num_workers=workers)
    else:
        data: Any = Noisy() if noisy else TensorDataset(rows())
        loader = DataLoader(data, 2, shuffle=True, num_workers=workers)
    run = Trained(accelerator, *accelerator.prepare(model, optimizer, scheduler, loader))
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(77)
    return run


def train(
    run: Trained, saver: CheckpointSaver, batches: int | None = None, first_seed: int | None = 5
) -> list[Any]:
    """Train for `batches` steps, or for all epochs.

    Returns the first number and the loss of each batch, and after each epoch its number and a
    random one.
    """
    steps: list[Any] = []
    progress = saver.progress
    if first_seed is not None and progress.resumed_from is None:
        torch.manual_seed(first_seed)
    replay = True if isinstance(run.loader.dataset, Noisy) else None
    for epoch in range(progress.epoch, EPOCHS):
        for batch in saver.remaining(run.loader, replay=replay):
            inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
            steps.append(learn(run, inputs))
            saver.step({"loss": steps[-1][1]})
            if len(steps) == batches:
                return steps
        steps.append((epoch, float(torch.rand(())) + random.random() + float(np.random.rand())))
    return steps


def learn(run: Trained, inputs: torch.Tensor) -> tuple[float, float]:
    """Make a step; return the first number of the batch, and the loss."""
    with run.accelerator.accumulate(run.model):
        loss = run.model(inputs).square().mean()
        run.accelerator.backward(loss)
        run.optimizer.step()
        run.scheduler.step()
        run.optimizer.zero_grad()
    return float(inputs[0, 0]), float(loss.detach())


def whole(folder: Path, **settings: Any) -> list[Any]:
    """Train a run without interruption."""
    run = prepared(**settings)
    with CheckpointSaver(run.accelerator, folder, **QUIET) as saver:
        return train(run, saver)


def begin(folder: Path, batches: int, **settings: Any) -> list[Any]:
    """Train the first `batches`, and save a checkpoint."""
    run = prepared(**settings)
    with CheckpointSaver(run.accelerator, folder, **QUIET) as saver:
        steps = train(run, saver, batches)
        saver.save_state()
        return steps


def go_on(folder: Path, batches: int | None = None, **settings: Any) -> list[Any]:
    """Resume from the newest checkpoint; with `batches`, train that many and save again."""
    run = prepared(**settings)
    with CheckpointSaver(run.accelerator, folder, **QUIET) as saver:
        saver.resume("must")
        steps = train(run, saver, batches)
        if batches is not None:
            saver.save_state()
        return steps
