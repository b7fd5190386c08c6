"""A small training run on any number of ranks, and the states of the same run without ft_ckpt.

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
    """The objects of a training script: model, optimizer, schedule, and a loader for one rank."""

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
        """Start a fresh run."""
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
        """Make a step on all ranks together; return the numbers of all its samples, in order."""
        draw = torch.rand(()) + random.gauss(0, 1) + np.random.randn()
        numbers, rows, draw = self._shared(numbers, rows, draw)
        order = numbers.argsort()
        loss = (self.network(rows[order]) * draw.float()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return numbers[order].tolist()

    def _shared(self, numbers: Tensor, rows: Tensor, draw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gather the samples of all ranks, and what rank 0 has drawn. Collective."""
        if self.ranks == 1:
            return numbers, rows, draw
        all_numbers = [torch.empty_like(numbers) for _ in range(self.ranks)]
        all_rows = [torch.empty_like(rows) for _ in range(self.ranks)]
        dist.all_gather(all_numbers, numbers)
        dist.all_gather(all_rows, rows)
        dist.broadcast(draw, 0)
        return torch.cat(all_numbers), torch.cat(all_rows), draw

    def train(self, saver: CheckpointSaver[Any]) -> Iterator[list[int]]:
        """Train as a script does; yield the samples of each step."""
        for epoch in count(saver.progress.epoch):
            self.sampler.set_epoch(epoch)
            for numbers, rows in saver.remaining(self.loader):
                samples = self.learn(numbers, rows)
                saver.step()
                yield samples

    def moment(self, step: int, epoch: int, batch: int) -> Moment:
        """Copy the present state."""
        weights = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
        del weights["label"]
        state = self.optimizer.state_dict()
        moments = {}
        for key, values in state["state"].items():
            moments[key] = {name: value.clone() for name, value in values.items()}
        groups = [{**group, "params": list(group["params"])} for group in state["param_groups"]]
        optimizer = {"state": moments, "groups": groups}
        scheduler = self.scheduler.state_dict().copy()
        draws = torch.get_rng_state(), random.getstate(), np.random.get_state()
        return Moment(step, epoch, batch, weights, optimizer, scheduler, draws)


class Reference:
    """The run with a salt, without any stop and without ft_ckpt."""

    def __init__(self, salt: int) -> None:
        self.moments: list[Moment] = []
        self.samples: list[list[int]] = [[]]
        self.salt = salt
        self.states = self._states()

    def at(self, step: int) -> Moment:
        """Return the state after a step."""
        while len(self.moments) <= step:
            with untouched_draws():
                if self.moments:
                    set_draws(self.moments[-1].draws)
                self.moments.append(next(self.states))
        return self.moments[step]

    def samples_of(self, step: int) -> list[int]:
        """Return the numbers of the samples of a step."""
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


def differences(actual: Moment, expected: Moment, *, with_draws: bool = True) -> list[str]:
    """Name the differences between two states."""
    names = []
    for name in ("step", "scheduler", "optimizer"):
        if not same(getattr(actual, name), getattr(expected, name)):
            names.append(name)
    # the end of an epoch is the start of the next
    steps = actual.epoch * STEPS_OF_EPOCH + actual.batch
    if steps != expected.epoch * STEPS_OF_EPOCH + expected.batch:
        position, right = (actual.epoch, actual.batch), (expected.epoch, expected.batch)
        names.append(f"epoch and batch {position} in place of {right}")
    for name, tensor in expected.weights.items():
        if not same(actual.weights.get(name), tensor):
            names.append(name)
    if with_draws and not same(actual.draws, expected.draws):
        names.append("random numbers")
    return names


def same(actual: Any, expected: Any) -> bool:
    """Compare nested values, tensors and arrays bit for bit."""
    if isinstance(expected, Tensor):
        is_alike = isinstance(actual, Tensor) and actual.dtype == expected.dtype
        return is_alike and torch.equal(actual, expected)
    if isinstance(expected, np.ndarray):
        return bool(np.array_equal(actual, expected))
    if isinstance(expected, dict):
        if actual.keys() != expected.keys():
            return False
        return all(same(actual[name], value) for name, value in expected.items())
    if isinstance(expected, (list, tuple)):
        if len(actual) != len(expected):
            return False
        return all(same(*pair) for pair in zip(actual, expected, strict=True))
    return bool(actual == expected)
