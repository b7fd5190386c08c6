"""Ranks that read data together: interrupted and resumed, and resumed by another number of ranks.

Cases: "same/NAME"; "save/NAME" writes the states of a run's checkpoints, and the order of its samples, to the folder
STATES; "load/NAME/RANKS" continues from the states of RANKS ranks; "go/NAME/STEPS/BATCH" continues from the previous
launch, for so many steps with batches of that size, and writes the samples to NAME.json.
"""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from feeding import Numbers, Stream, differing, resumed, saved, scramble, uninterrupted
from harness import RANK, WORLD, run
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import ft_ckpt
from ft_ckpt.training import rng
from ft_ckpt.training.data_position import DataPosition

COUNT, BATCH, SPLIT = 48, 2, 4
STOPS = {1: (3, 4, 24), 2: (1, 2, 12)}  # batches: in the middle of one of twice as many ranks, at its end, at the last
STATES = Path(os.environ["STATES"])


def prepared(loader: Any, **settings: Any) -> Any:
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings)).prepare_data_loader(loader)


def shuffled(count: int, kind: Callable[..., Any] = DataLoader, noise: str = "", **settings: Any) -> Any:
    return kind(Numbers(noise, count), BATCH, shuffle=True, **settings)


def distributed(count: int) -> DataLoader:
    data = Numbers("", count)
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, WORLD, RANK, seed=3))


LOADERS: dict[str, Callable[[int], Any]] = {
    "default": lambda count: prepared(shuffled(count)),
    "augmented": lambda count: prepared(shuffled(count, noise="global")),
    "seedable": lambda count: prepared(shuffled(count), use_seedable_sampler=True),
    "workers": lambda count: prepared(shuffled(count, num_workers=2, persistent_workers=True)),
    "split": lambda count: prepared(DataLoader(Numbers("", count), SPLIT, shuffle=True), split_batches=True),
    "dispatched": lambda count: prepared(shuffled(count, noise="global"), dispatch_batches=True),
    "stateful": lambda count: prepared(
        shuffled(count, StatefulDataLoader), use_stateful_dataloader=True, use_seedable_sampler=True
    ),
    "stream": lambda count: prepared(DataLoader(Stream("", count), BATCH)),
    "sharded stream": lambda count: prepared(DataLoader(Stream("", count), BATCH), dispatch_batches=False),
    "distributed": distributed,
}


def same(name: str) -> None:
    """13 samples: the last batches are filled up from the first."""

    def make() -> Any:
        return LOADERS[name](13)

    steps, states = uninterrupted(make, RANK, size=WORLD)
    few = name == "workers"
    assert differing(make, steps, states, (0, 2, 4, 6) if few else range(len(states)), rank=RANK, size=WORLD) == []


def together(batch: torch.Tensor, name: str) -> list[int]:
    """The samples of all ranks' batches in the order of the data."""
    mine = [int(row[0]) for row in batch]
    if WORLD == 1:
        return mine
    ranks: list[list[int]] = [[] for _ in range(WORLD)]
    dist.all_gather_object(ranks, mine)
    in_turn = zip(*ranks, strict=True) if name == "distributed" else ranks  # DistributedSampler deals them out
    return [index for row in in_turn for index in row]


def order(feed: DataPosition, name: str, after_step: Callable[[int], None] = lambda step: None) -> list[list[int]]:
    """The samples of each remaining pass."""
    passes: list[list[int]] = []
    while feed.epoch < 3:
        if name == "distributed":
            feed.loader.sampler.set_epoch(feed.epoch)
        passes.append([])
        for step, batch in enumerate(feed.batches(), 1):
            torch.nn.functional.dropout(torch.ones(8))
            passes[-1] += together(batch, name)
            after_step(step)
    return passes


def stops(name: str, ranks: int) -> tuple[int, ...]:
    return STOPS[2 if name == "split" else ranks]  # its batches are of all ranks


def save(name: str) -> None:
    scramble(1)
    loader = LOADERS[name](COUNT)
    scramble(1 + RANK)
    feed = DataPosition(loader, RANK, WORLD)

    def keep(step: int) -> None:
        if feed.epoch == 1 and step in stops(name, WORLD) and RANK == 0:
            ft_ckpt.save(saved(feed), STATES / f"{name}-{WORLD}-{step}.h5")

    passes = order(feed, name, keep)
    if RANK == 0:
        (STATES / f"{name}-{WORLD}.json").write_text(json.dumps(passes))


def load(name: str, before: int) -> None:
    passes = json.loads((STATES / f"{name}-{before}.json").read_text())
    for stop in stops(name, before):
        state = ft_ckpt.load(STATES / f"{name}-{before}-{stop}.h5")
        scramble(1000 + RANK)
        feed, states = DataPosition(LOADERS[name](COUNT), RANK, WORLD), []
        notes = feed.load_state_dict(state["feed"])
        seen = stop * BATCH * before if name != "split" else stop * 4
        if "stream" in name:
            seen -= seen % (BATCH * WORLD)  # what is read in order begins with a whole batch

        def keep(step: int, feed: DataPosition = feed, states: list[Any] = states) -> None:
            states += [saved(feed)] if feed.epoch == 1 and step <= 3 else []

        rest, later = order(feed, name, keep)
        where = (name, before, stop, notes)
        assert goes_on(passes[1], passes[1][:seen] + rest), where
        assert sorted(later) == sorted(passes[2]), where
        # Where a sampler has no generator of its own, its next order comes from what all else has drawn.
        if name != "dispatched" and (before > 1 or name not in ("default", "split")):
            assert later == passes[2], where
        for again in states:
            rest_again, later_again = order(resumed(DataPosition(LOADERS[name](COUNT), RANK, WORLD), again), name)
            assert rest[len(rest) - len(rest_again) :] == rest_again, where
            assert later_again == later, where


def go(name: str, steps: int, batch: int) -> None:
    """One stage of a run that is resumed by other numbers of ranks, with other batches."""
    global BATCH, SPLIT
    BATCH, SPLIT = batch, batch * WORLD
    scramble(1)
    loader, state = LOADERS[name](36), STATES / f"{name}.h5"
    scramble(1 + RANK)
    feed, record = DataPosition(loader, RANK, WORLD), STATES / f"{name}.json"
    told = json.loads(record.read_text()) if record.exists() else {"given": [[], []], "again": [0, 0], "last": [0, 0]}
    if state.exists():
        found = ft_ckpt.load(state)
        notes = feed.load_state_dict(found["feed"])
        rng.restore_generators(found["rng"])
        told["again"][feed.epoch] += sum(int(n) for note in notes for n in re.findall("([0-9]+)[^;]*given again", note))
    dist.is_initialized() and dist.barrier()  # all have read what rank 0 is about to replace
    while feed.epoch < 2 and steps:
        epoch = feed.epoch
        if name == "distributed":
            loader.sampler.set_epoch(epoch)
        for batch_here in feed.batches():
            given = together(batch_here, name)
            told["given"][epoch] += given
            told["last"][epoch] = len(given)
            steps -= 1
            if not steps:
                break
    if RANK == 0:
        ft_ckpt.save(saved(feed), state)
        record.write_text(json.dumps(told))


def goes_on(whole: list[int], found: list[int]) -> bool:
    """True if `found` is `whole`, followed only by the samples that fill up the last batches of all ranks."""
    return found[: len(whole)] == whole and len(found) < len(whole) + BATCH * WORLD


def case(name: str, folder: Path) -> None:
    kind, loader, *before = name.split("/")
    if kind == "load":
        load(loader, int(before[0]))
    elif kind == "go":
        go(loader, int(before[0]), int(before[1]))
    else:
        {"same": same, "save": save}[kind](loader)


assert Accelerator(cpu=True).num_processes == WORLD
run(case)
if dist.is_initialized():
    dist.destroy_process_group()
