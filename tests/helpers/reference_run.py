"""A small training run on any number of ranks, and the same run without ft_ckpt: its state after
each step.

The samples of a step are the same on 1, 2 and 3 ranks, and so is what they do to the model: all
ranks learn from all of them, with random numbers of rank 0. So the state after a step depends on
the run's salt and on the number of the step alone, however often the run was stopped, and on
whatever ranks it went on.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ft_ckpt import CheckpointSaver

SAMPLES, BATCH = 24, 6  # samples of a step, over all ranks
STEPS_OF_EPOCH = SAMPLES // BATCH


class Numbered(Dataset[tuple[int, Tensor]]):
    """Rows with their numbers."""

    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, Tensor]:
        return number, self.rows[number]


class Label:
    """An object of the run with a state: the number of the save that it is in."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Network(nn.Module):
    """A model with a normalisation, and a buffer that tells saves of one step apart."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.register_buffer("label", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        output: Tensor = self.layers(rows)
        return output


@dataclass(frozen=True)
class Moment:
    """The state of a run after a step; of random numbers those of rank 0."""

    step: int
    epoch: int
    batch: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    draws: tuple[Any, ...]


class Program:
    """What a training script makes: a model, its optimizer and schedule, and a loader for one of
    several ranks.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self.network = Network()
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        self.label = Label()
        data = Numbered()
        self.sampler: DistributedSampler[Any] = DistributedSampler(data, ranks, rank, seed=3)
        self.loader = DataLoader(data, BATCH // ranks, sampler=self.sampler)

    @property
    def objects(self) -> dict[str, Any]:
        """The arguments of `CheckpointSaver.register`."""
        return {
            "model": self.network,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "label": self.label,
        }

    def begin(self, salt: int) -> None:
        """The start of a fresh run."""
        torch.manual_seed(salt)
        random.seed(salt)
        np.random.seed(salt)
        with torch.no_grad():
            for parameter in self.network.parameters():
                parameter.copy_(torch.randn(parameter.shape))

    def mark(self, number: int) -> None:
        """Put the number of a save into the model and into an object of the run."""
        self.label.number = number
        self.network.get_buffer("label").fill_(number)

    def learn(self, numbers: Tensor, rows: Tensor) -> list[int]:
        """Make a step on all ranks together; the numbers of its samples on all of them, in
        order.
        """
        numbers, rows, draw = self._shared(
            numbers, rows, torch.rand(()) + random.gauss(0, 1) + np.random.randn()
        )
        order = numbers.argsort()
        loss = (self.network(rows[order]) * draw.float()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return numbers[order].tolist()

    def _shared(self, numbers: Tensor, rows: Tensor, draw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The samples of all ranks, and what rank 0 has drawn."""
        if self.ranks == 1:
            return numbers, rows, draw
        all_numbers = [torch.empty_like(numbers) for _ in range(self.ranks)]
        all_rows = [torch.empty_like(rows) for _ in range(self.ranks)]
        dist.all_gather(all_numbers, numbers)
        dist.all_gather(all_rows, rows)
        dist.broadcast(draw, 0)
        return torch.cat(all_numbers), torch.cat(all_rows), draw

    def train(self, saver: CheckpointSaver[Any]) -> Iterator[list[int]]:
        """The loop of a training script: yields the samples of each step."""
        for epoch in count(saver.progress.epoch):
            self.sampler.set_epoch(epoch)
            for numbers, rows in saver.remaining(self.loader):
                samples = self.learn(numbers, rows)
                saver.step()
                yield samples

    def moment(self, step: int, epoch: int, batch: int) -> Moment:
        """The present state, as a copy."""
        weights = {
            name: tensor.clone()
            for name, tensor in self.network.state_dict().items()
            if name != "label"
        }
        state = self.optimizer.state_dict()
        copied = {
            key: {name: value.clone() for name, value in values.items()}
            for key, values in state["state"].items()
        }
        draws = torch.get_rng_state(), random.getstate(), np.random.get_state()
        groups = [{**group, "params": list(group["params"])} for group in state["param_groups"]]
        return Moment(
            step,
            epoch,
            batch,
            weights,
            {"state": copied, "groups": groups},
            self.scheduler.state_dict().copy(),
            draws,
        )


class Reference:
    """The run with a salt as it goes without any stop, without ft_ckpt."""

    def __init__(self, salt: int) -> None:
        self.moments: list[Moment] = []
        self.samples: list[list[int]] = [[]]
        self.salt = salt
        self.states = self._states()

    def at(self, step: int) -> Moment:
        """The state after a step."""
        while len(self.moments) <= step:
            with untouched_draws():
                if self.moments:
                    set_draws(self.moments[-1].draws)
                self.moments.append(next(self.states))
        return self.moments[step]

    def samples_of(self, step: int) -> list[int]:
        """The numbers of the samples of a step."""
        self.at(step)
        return self.samples[step]

    def _states(self) -> Iterator[Moment]:
        program = Program()
        program.begin(self.salt)
        yield program.moment(0, 0, 0)
        steps = count(1)
        for epoch in count():
            program.sampler.set_epoch(epoch)
            for batch, (numbers, rows) in enumerate(program.loader, 1):
                self.samples.append(program.learn(numbers, rows))
                yield program.moment(next(steps), epoch, batch)


@contextmanager
def untouched_draws() -> Iterator[None]:
    """Leave the global random numbers as they were before the block."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        set_draws(before)


def set_draws(draws: tuple[Any, ...]) -> None:
    """Continue the global random numbers from a state."""
    torch.set_rng_state(draws[0])
    random.setstate(draws[1])
    np.random.set_state(draws[2])


def differences(found: Moment, expected: Moment, *, with_draws: bool = True) -> list[str]:
    """The names of what differs between two states."""
    names = [
        name
        for name in ("step", "scheduler")
        if not same(getattr(found, name), getattr(expected, name))
    ]
    if (found.epoch * STEPS_OF_EPOCH + found.batch) != (
        expected.epoch * STEPS_OF_EPOCH + expected.batch
    ):
        names.append(
            f"epoch {found.epoch} batch {found.batch} in place of {expected.epoch} {expected.batch}"
        )
    for name, tensor in expected.weights.items():
        if not same(found.weights.get(name), tensor):
            names.append(name)
    if not same(found.optimizer, expected.optimizer):
        names.append("optimizer")
    if with_draws and not same(found.draws, expected.draws):
        names.append("random numbers")
    return names


def same(found: Any, expected: Any) -> bool:
    """Equality of nested values, of tensors and arrays bit for bit."""
    if isinstance(expected, Tensor):
        return (
            isinstance(found, Tensor)
            and found.dtype == expected.dtype
            and torch.equal(found, expected)
        )
    if isinstance(expected, np.ndarray):
        return bool(np.array_equal(found, expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(
            same(found[name], value) for name, value in expected.items()
        )
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(
            same(*pair) for pair in zip(found, expected, strict=True)
        )
    return bool(found == expected)
