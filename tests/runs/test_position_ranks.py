"""Ranks that read data together: interrupted and resumed, and resumed by another number of
ranks.
"""

import json
import re
import sys
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from data_loops import Numbers, Stream, differing, resumed, saved, scramble, uninterrupted
from on_ranks import RANK, WORLD, call_on_ranks, on_ranks
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import ft_ckpt
from ft_ckpt.runs.data import DataPosition, rng

COUNT, BATCH, SPLIT = 48, 2, 4
# batches: in the middle of one of twice as many ranks, at its end, at the last
STOPS = {1: (3, 4, 24), 2: (1, 2, 12)}


def shuffled(count, kind=DataLoader, noise="", **settings):
    return kind(Numbers(noise, count), BATCH, shuffle=True, **settings)


def prepared(loader, **settings):
    return Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(**settings)
    ).prepare_data_loader(loader)


def distributed(count):
    data = Numbers("", count)
    return DataLoader(data, BATCH, sampler=DistributedSampler(data, WORLD, RANK, seed=3))


LOADERS = {
    "default": lambda count: prepared(shuffled(count)),
    "augmented": lambda count: prepared(shuffled(count, noise="global")),
    "seedable": lambda count: prepared(shuffled(count), use_seedable_sampler=True),
    "workers": lambda count: prepared(shuffled(count, num_workers=2, persistent_workers=True)),
    "split": lambda count: prepared(
        DataLoader(Numbers("", count), SPLIT, shuffle=True), split_batches=True
    ),
    "dispatched": lambda count: prepared(shuffled(count, noise="global"), dispatch_batches=True),
    "stateful": lambda count: prepared(
        shuffled(count, StatefulDataLoader), use_stateful_dataloader=True, use_seedable_sampler=True
    ),
    "stream": lambda count: prepared(DataLoader(Stream("", count), BATCH)),
    "sharded stream": lambda count: prepared(
        DataLoader(Stream("", count), BATCH), dispatch_batches=False
    ),
    "distributed": distributed,
}


TOGETHER = (
    "default",
    "seedable",
    "split",
    "dispatched",
    "stateful",
    "stream",
    "sharded stream",
    "distributed",
)


@pytest.mark.sample("default", "sharded stream")
@pytest.mark.parametrize("name", [*TOGETHER, "augmented", "workers"])
@on_ranks(2, timeout=300)
def test_ranks_that_read_together(name):
    """13 samples: the last batches are filled up from the first."""

    def make():
        return LOADERS[name](13)

    steps, states = uninterrupted(make, RANK, size=WORLD)
    few = name == "workers"
    assert (
        differing(
            make, steps, states, (0, 2, 4, 6) if few else range(len(states)), rank=RANK, size=WORLD
        )
        == []
    )


def together(batch, name):
    """The samples of all ranks' batches in the order of the data."""
    mine = [int(row[0]) for row in batch]
    if WORLD == 1:
        return mine
    ranks = [[] for _ in range(WORLD)]
    dist.all_gather_object(ranks, mine)
    # DistributedSampler deals them out
    in_turn = zip(*ranks, strict=True) if name == "distributed" else ranks
    return [index for row in in_turn for index in row]


def order(feed, name, after_step=lambda step: None):
    """The samples of each remaining pass."""
    passes = []
    while feed.epoch < 3:
        if name == "distributed":
            feed.loader.sampler.set_epoch(feed.epoch)
        passes.append([])
        for step, batch in enumerate(feed.batches(), 1):
            torch.nn.functional.dropout(torch.ones(8))
            passes[-1] += together(batch, name)
            after_step(step)
    return passes


def stops(name, ranks):
    return STOPS[2 if name == "split" else ranks]  # its batches are of all ranks


def save(folder, name):
    scramble(1)
    loader = LOADERS[name](COUNT)
    scramble(1 + RANK)
    feed = DataPosition(loader, RANK, WORLD)

    def keep(step):
        if feed.epoch == 1 and step in stops(name, WORLD) and RANK == 0:
            ft_ckpt.save(saved(feed), folder / f"{name}-{WORLD}-{step}.h5")

    passes = order(feed, name, keep)
    if RANK == 0:
        (folder / f"{name}-{WORLD}.json").write_text(json.dumps(passes))


def load(folder, name, before):
    passes = json.loads((folder / f"{name}-{before}.json").read_text())
    for stop in stops(name, before):
        state = ft_ckpt.load(folder / f"{name}-{before}-{stop}.h5")
        scramble(1000 + RANK)
        feed, states = DataPosition(LOADERS[name](COUNT), RANK, WORLD), []
        notes = feed.load_state_dict(state["feed"])
        seen = stop * BATCH * before if name != "split" else stop * 4
        if "stream" in name:
            seen -= seen % (BATCH * WORLD)  # what is read in order begins with a whole batch

        def keep(step, feed=feed, states=states):
            states += [saved(feed)] if feed.epoch == 1 and step <= 3 else []

        rest, later = order(feed, name, keep)
        where = (name, before, stop, notes)
        assert goes_on(passes[1], passes[1][:seen] + rest), where
        assert sorted(later) == sorted(passes[2]), where
        # Where a sampler has no generator of its own, its next order comes from what all else has
        # drawn.
        if name != "dispatched" and (before > 1 or name not in ("default", "split")):
            assert later == passes[2], where
        for again in states:
            rest_again, later_again = order(
                resumed(DataPosition(LOADERS[name](COUNT), RANK, WORLD), again), name
            )
            assert rest[len(rest) - len(rest_again) :] == rest_again, where
            assert later_again == later, where


def go(folder, steps, batch):
    """One stage of runs that are resumed by other numbers of ranks, with other batches."""
    with patch.multiple(sys.modules[__name__], BATCH=batch, SPLIT=batch * WORLD):
        for name in TOGETHER:
            go_on(folder, name, steps)


def go_on(folder, name, steps):
    scramble(1)
    loader, state = LOADERS[name](36), folder / f"{name}.h5"
    scramble(1 + RANK)
    feed, record = DataPosition(loader, RANK, WORLD), folder / f"{name}.json"
    told = (
        json.loads(record.read_text())
        if record.exists()
        else {"given": [[], []], "again": [0, 0], "last": [0, 0]}
    )
    if state.exists():
        found = ft_ckpt.load(state)
        notes = feed.load_state_dict(found["feed"])
        rng.restore_generators(found["rng"])
        told["again"][feed.epoch] += sum(
            int(n) for note in notes for n in re.findall("([0-9]+)[^;]*given again", note)
        )
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


def goes_on(whole, found):
    """True if `found` is `whole`, followed only by the samples that fill up the last batches of all
    ranks.
    """
    return found[: len(whole)] == whole and len(found) < len(whole) + BATCH * WORLD


MOVED = [(1, 2, name) for name in TOGETHER] + [(2, 1, name) for name in TOGETHER]
MOVED += [
    (2, 4, name) for name in ("default", "seedable", "dispatched", "sharded stream", "distributed")
]


@pytest.mark.sample("1-2-default", "1-2-sharded stream", "2-1-default", "2-1-sharded stream")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("before", "after", "name"), MOVED)
def test_another_number_of_ranks(tmp_path, before, after, name):
    """Cannot resume on another number of GPUs."""
    call_on_ranks(before, save, tmp_path, name, timeout=300)
    call_on_ranks(after, load, tmp_path, name, before, timeout=300)


# ranks, steps, batch size
STAGES = ((2, 4, 2), (1, 3, 2), (3, 2, 2), (2, 2, 3), (4, 1, 1), (1, 2, 3), (2, 99, 2))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_sample_is_trained_on_whatever_the_number_of_ranks(tmp_path) -> None:
    """As tests/runs/test_changing_ranks.py, in processes that read together."""
    for ranks, steps, batch in STAGES:
        call_on_ranks(ranks, go, tmp_path, steps, batch, timeout=300)
    for name in TOGETHER:
        told = json.loads((tmp_path / f"{name}.json").read_text())
        for given, again, last in zip(told["given"], told["again"], told["last"], strict=True):
            assert {*given} == {*range(36)}, (name, given)
            assert again <= len(given) - 36 <= again + last - 1, (name, given, again)
