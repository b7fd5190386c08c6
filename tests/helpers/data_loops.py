"""Data, and a training loop over it that draws random numbers, to be interrupted and resumed."""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ft_ckpt.runs.data import DataPosition, rng

Make = Callable[[], Any]
SAMPLES, EPOCHS = 11, 3


class Numbers(Dataset[torch.Tensor]):
    """The numbers 0, 1, 2 … with random augmentation.

    `noise` is "global" for all three global generators, "own" for one of the data set, "" for none.
    """

    def __init__(self, noise: str = "", count: int = SAMPLES) -> None:
        self.noise, self.count = noise, count
        self.own = np.random.default_rng(3)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), self.draw()], dtype=torch.float64)

    def draw(self) -> float:
        if self.noise == "global":
            return random.random() + np.random.rand() + float(torch.rand(()))
        return float(self.own.random()) if self.noise == "own" else 0.0


class Stream(Numbers, IterableDataset[torch.Tensor]):
    """The same numbers as a stream in order; each worker yields its share."""

    def __getitem__(self, index: int) -> torch.Tensor:
        raise NotImplementedError

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        for index in range(info.id if info else 0, self.count, info.num_workers if info else 1):
            yield Numbers.__getitem__(self, index)


class Counted(Stream):
    """A stream with a state dict, which resumes without reading the items before its position."""

    def __init__(self, export: Callable[[Any], Any] = dict, **settings: Any) -> None:
        super().__init__(**settings)
        # `lambda position: position`: the live object, which the caller has to copy
        self.export = export
        self.position = {"next": 0}
        self.read = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.position["next"] < self.count:
            self.position["next"] += 1
            self.read += 1
            yield Numbers.__getitem__(self, self.position["next"] - 1)
        self.position["next"] = 0

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.export(self.position)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = dict(state)


@dataclass(frozen=True)
class Step:
    """The record of a step."""

    position: tuple[int, int, int]  # epoch, batch, samples
    batch: Any
    at_end: bool | None  # of its pass over the data
    random: str  # a digest of all random state after it


def scramble(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def fingerprint() -> str:
    """Return a digest of the state of the global generators."""
    state = rng.capture_generators()
    parts = [
        state["python"]["words"].tobytes(),
        state["numpy"]["state"]["key"].tobytes(),
        state["torch"].numpy(),
    ]
    numbers = (state["python"]["gauss"], state["numpy"]["state"]["pos"], state["numpy"]["gauss"])
    return hashlib.sha256(b"".join(map(bytes, parts)) + repr(numbers).encode()).hexdigest()[:12]


def train(
    feed: DataPosition,
    after_step: Callable[[int], None] = lambda step: None,
    look: Callable[[], Any] = lambda: None,
    set_epoch: Callable[[int], None] = lambda epoch: None,
    epochs: int = EPOCHS,
) -> list[Step]:
    """Train to the end; `after_step` is called in the loop's body, where a training script saves.

    `look` is called in each step, and its result recorded.
    """
    steps = []
    while feed.epoch < epochs:
        set_epoch(feed.epoch)
        for batch in feed.batches():
            torch.nn.functional.dropout(torch.ones(8))
            random.gauss(0, 1), np.random.randn()
            position = (feed.epoch, feed.batch, feed.samples)
            steps.append(Step(position, (plain(batch), look()), feed.at_end, fingerprint()))
            after_step(len(steps))
        random.random(), torch.rand(())  # an evaluation between passes
    return steps


def plain(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {key: plain(value) for key, value in batch.items()}
    return [plain(item) for item in batch] if isinstance(batch, (list, tuple)) else batch


def saved(feed: DataPosition) -> dict[str, Any]:
    """Return the state that a checkpoint would contain."""
    return {"feed": feed.state_dict(), "rng": rng.capture_generators()}


def resumed(feed: DataPosition, state: dict[str, Any]) -> DataPosition:
    """Restore `state` into `feed` and the generators, which other code has used before."""
    scramble(1000)
    assert feed.load_state_dict(state["feed"]) == []
    assert rng.restore_generators(state["rng"]) == []
    return feed


def uninterrupted(
    make: Make, rank: int = 0, **settings: Any
) -> tuple[list[Step], list[dict[str, Any]]]:
    """Train to the end; return all steps and the states, the first of before the first step."""
    scramble(1)
    loader = make()
    scramble(1 + rank)
    feed = DataPosition(loader, rank, **settings)
    states = [saved(feed)]
    steps = train(feed, lambda step: states.append(saved(feed)))
    return steps, states


def differing(
    make: Make,
    steps: list[Step],
    states: list[dict[str, Any]],
    stops: Iterable[int],
    **settings: Any,
) -> list[int]:
    """Return the stops after which a resumed run differs from the uninterrupted one."""
    different = []
    for stop in stops:
        feed = resumed(DataPosition(make(), **settings), states[stop])
        if train(feed) != steps[stop:]:
            different.append(stop)
    return different
