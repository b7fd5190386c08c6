"""Runs that are resumed on other numbers of ranks, with other batch sizes, any number of times: no
sample is left out.

Ranks are simulated in one process: each has its own loader and random numbers. What is given again
is what was said to be, and what samplers fill up their last batches with.
"""

import copy
import importlib.metadata
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from data_loops import Counted, Numbers, Stream, scramble
from seeds import chosen_seed
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from ft_ckpt.runs.data import DataPosition

SEED = chosen_seed()
PASSES = 2
_AGAIN = re.compile(r"(\d+)[^;]*given again")


@dataclass(frozen=True)
class Plan:
    """What stays the same over all resumes of a run."""

    kind: str
    count: int  # samples
    shuffle: bool = True
    drop_last: bool = False
    even: bool = True
    split: bool = False
    flat: bool = False  # batches have one row, as those of collators that pack

    @property
    def data(self) -> Numbers:
        return Numbers(count=self.count)


@dataclass(frozen=True)
class Stage:
    """From one resume to the next."""

    ranks: int
    batch: int
    steps: int


class Uneven(Sampler[list[int]]):
    """Batches of one to three samples, in an order of its own."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.epoch = count, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def whole(self) -> Iterator[list[int]]:
        draws = random.Random(f"{self.seed} {self.epoch}")
        left = draws.sample(range(self.count), self.count)
        while left:
            size = draws.randint(1, 3)
            yield left[:size]
            left = left[size:]

    def __iter__(self) -> Iterator[list[int]]:
        return self.whole()


class Grouped(Sampler[list[int]]):
    """Keeps even and odd samples apart: batches are no runs of what its sampler gives."""

    def __init__(self, sampler: Sampler[int], size: int) -> None:
        self.sampler, self.size = sampler, size

    def __iter__(self) -> Iterator[list[int]]:
        groups: tuple[list[int], list[int]] = ([], [])
        for index in self.sampler:
            group = groups[index % 2]
            group.append(index)
            if len(group) == self.size:
                yield group[:]
                group.clear()
        yield from (group for group in groups if group)


def flatten(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples).reshape(1, -1)


def collate(plan: Plan) -> dict[str, Any]:
    return {"collate_fn": flatten} if plan.flat else {}


def dealt(plan: Plan, stage: Stage, rank: int) -> DistributedSampler[Any]:
    return DistributedSampler(
        plan.data, stage.ranks, rank, shuffle=plan.shuffle, seed=3, drop_last=plan.drop_last
    )


def distributed(plan: Plan, stage: Stage, rank: int, kind: Any = DataLoader) -> Any:
    return kind(
        plan.data,
        stage.batch,
        sampler=dealt(plan, stage, rank),
        drop_last=plan.drop_last,
        **collate(plan),
    )


def batch_sampler(plan: Plan, stage: Stage, rank: int) -> Any:
    batches = BatchSampler(dealt(plan, stage, rank), stage.batch, plan.drop_last)
    return DataLoader(plan.data, batch_sampler=batches, **collate(plan))


def one_by_one(plan: Plan, stage: Stage, rank: int) -> Any:
    return DataLoader(plan.data, batch_size=None, sampler=dealt(plan, stage, rank))


def prepared(loader: Any, plan: Plan, stage: Stage, rank: int, **settings: Any) -> Any:
    split = {"split_batches": plan.split, "even_batches": plan.even, "put_on_device": False}
    return prepare_data_loader(
        loader, num_processes=stage.ranks, process_index=rank, rng_types=[], **split, **settings
    )


def for_all(plan: Plan, stage: Stage) -> int:
    return stage.batch * stage.ranks if plan.split else stage.batch


def accelerated(plan: Plan, stage: Stage, rank: int) -> Any:
    order = {"shuffle": plan.shuffle, "drop_last": plan.drop_last}
    loader = DataLoader(plan.data, for_all(plan, stage), **order, **collate(plan))
    return prepared(loader, plan, stage, rank, use_seedable_sampler=plan.shuffle, data_seed=5)


def by_generator(
    plan: Plan, stage: Stage, rank: int, kind: Any = DataLoader, **settings: Any
) -> Any:
    sampler = RandomSampler(range(plan.count), generator=torch.Generator().manual_seed(5))
    loader = kind(plan.data, for_all(plan, stage), sampler=sampler, drop_last=plan.drop_last)
    return prepared(loader, plan, stage, rank, **settings)


def stateful(plan: Plan, stage: Stage, rank: int) -> Any:
    return by_generator(plan, stage, rank, StatefulDataLoader, use_stateful_dataloader=True)


def uneven(plan: Plan, stage: Stage, rank: int) -> Any:
    loader = DataLoader(plan.data, batch_sampler=Uneven(plan.count, 3), **collate(plan))
    return prepared(loader, plan, stage, rank)


def grouped(plan: Plan, stage: Stage, rank: int) -> Any:
    sampler = RandomSampler(range(plan.count), generator=torch.Generator().manual_seed(5))
    return prepared(
        DataLoader(plan.data, batch_sampler=Grouped(sampler, stage.batch)), plan, stage, rank
    )


def stream(plan: Plan, stage: Stage, rank: int, make: Any = Stream, **settings: Any) -> Any:
    loader = DataLoader(
        make(count=plan.count), for_all(plan, stage), drop_last=plan.drop_last, **collate(plan)
    )
    return prepared(loader, plan, stage, rank, **settings)


def counted(plan: Plan, stage: Stage, rank: int) -> Any:
    return stream(plan, stage, rank, Counted, use_stateful_dataloader=True)


KINDS: dict[str, Callable[[Plan, Stage, int], Any]] = {
    "distributed": distributed,
    "torchdata": lambda plan, stage, rank: distributed(plan, stage, rank, StatefulDataLoader),
    "batch sampler": batch_sampler,
    "one by one": one_by_one,
    "accelerate": accelerated,
    "generator": by_generator,
    "stateful": stateful,
    "uneven": uneven,
    "grouped": grouped,
    "stream": stream,
    "counted stream": counted,
}
OPTIONS: dict[str, tuple[str, ...]] = {  # what a kind can be besides shuffled
    "distributed": ("drop_last", "flat"),
    "torchdata": ("drop_last",),
    "batch sampler": ("drop_last", "flat"),
    "accelerate": ("drop_last", "uneven", "split", "flat"),
    "generator": ("drop_last", "split"),
    "stateful": ("drop_last", "split"),
    "stream": ("drop_last", "split"),
    "counted stream": ("drop_last",),
}


def drawn(kind: str, draws: random.Random) -> tuple[Plan, list[Stage]]:
    """A run of this kind, and its resumes."""
    chosen = {
        name: name in OPTIONS.get(kind, ()) and draws.random() < 0.3
        for name in ("drop_last", "split", "flat")
    }
    even = kind not in ("uneven", "grouped") and not (
        "uneven" in OPTIONS.get(kind, ()) and draws.random() < 0.3
    )
    plan = Plan(kind, draws.randint(1, 48), draws.random() < 0.7, even=even, **chosen)
    fixed = kind in ("uneven", "grouped", "one by one") or draws.random() < 0.5
    batch = draws.randint(1, 4)
    stages = [
        Stage(draws.randint(1, 4), batch if fixed else draws.randint(1, 4), draws.randint(0, 9))
        for _ in range(draws.randint(2, 6))
    ]
    return plan, [*stages[:-1], Stage(stages[-1].ranks, stages[-1].batch, 10**6)]


class SimulatedRank:
    """One rank of a script: its loader, its position, and the random numbers that are its own while
    it runs.
    """

    def __init__(self, plan: Plan, stage: Stage, rank: int, states: list[Any] | None) -> None:
        scramble(100 + rank)
        self.loader = KINDS[plan.kind](plan, stage, rank)
        self.feed, self.notes = DataPosition(self.loader, rank, stage.ranks), []
        if states is not None:
            state = states[rank if len(states) == stage.ranks else 0]
            self.notes = self.feed.load_state_dict(copy.deepcopy(state))
        self.random, self.steps, self.is_done = random_state(), self.passes(), False
        self.rows = 0  # of its batches

    def passes(self) -> Iterator[tuple[int, list[int]]]:
        while (epoch := self.feed.epoch) < PASSES:
            for sampler in samplers_of(self.loader):
                if isinstance(sampler, (DistributedSampler, Uneven)):
                    sampler.set_epoch(epoch)
            for batch in self.feed.batches():
                yield epoch, [int(index) for index in batch.reshape(-1, 2)[:, 0]]
            yield epoch, []

    def step(self) -> tuple[int, list[int]] | None:
        """The pass and the samples of the next batch; None at the end of a pass, and of the run."""
        restore(self.random)
        found = next(self.steps, None)
        self.random, self.is_done = random_state(), found is None
        self.rows += len(found[1]) if found is not None else 0
        return found if found is not None and found[1] else None


def together(ranks: list[SimulatedRank]) -> Iterator[list[tuple[int, list[int]]]]:
    """What ranks are given at each step; at the end of a pass they wait for each other: some have
    fewer batches.
    """
    while at_work := [rank for rank in ranks if not rank.is_done]:
        epoch = min(rank.feed.epoch for rank in at_work)
        going = [rank for rank in at_work if rank.feed.epoch == epoch]
        if found := [one for rank in going if (one := rank.step()) is not None]:
            yield found


def samplers_of(loader: Any) -> Iterator[Any]:
    for name in ("sampler", "batch_sampler"):
        if (inside := getattr(loader, name, None)) is not None:
            yield inside
            yield from samplers_of(inside)


def random_state() -> Any:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def restore(state: Any) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def problems_of(plan: Plan, stages: list[Stage]) -> list[str]:
    """What is wrong with what a run of these stages was trained on."""
    given: list[Counter[int]] = [Counter() for _ in range(PASSES)]
    again, last, states, problems = Counter[int](), [0] * PASSES, None, list[str]()
    counted = 0  # samples, those given again once
    for stage in stages:
        ranks = [SimulatedRank(plan, stage, rank, states) for rank in range(stage.ranks)]
        first = ranks[0]
        anew = sum(int(found) for note in first.notes for found in _AGAIN.findall(note))
        again[first.feed.epoch] += anew
        # where the last batch does not reach all ranks, some are at the end of a pass, and others
        # have ended it
        told = [[note for note in rank.notes if "after its end" not in note] for rank in ranks]
        problems += ["ranks differ"] if any(notes != told[0] for notes in told) else []
        for found in islice(together(ranks), stage.steps):
            problems += (
                ["ranks are in other passes"] if len({epoch for epoch, _ in found}) > 1 else []
            )
            last[found[0][0]] = sum(len(batch) for _, batch in found)
            for epoch, batch in found:
                given[epoch].update(batch)
        states = [copy.deepcopy(rank.feed.state_dict()) for rank in ranks]
        counted += first.rows * stage.ranks - anew
        # else the first dimension is not that of samples
        is_counted = not plan.flat and plan.kind != "one by one"
        if is_counted and first.feed.samples != counted:
            problems.append(
                f"{first.feed.samples} samples counted after {stage}, expected {counted}"
            )
    for epoch, counts in enumerate(given):
        left, twice = plan.count - len(counts), counts.total() - len(counts)
        full = max(stage.ranks * stage.batch for stage in stages)
        if left and not (plan.drop_last and left < full):
            problems.append(
                f"pass {epoch}: never trained: {sorted({*range(plan.count)} - {*counts})}"
            )
        least = 0 if plan.drop_last else again[epoch]  # the end may be dropped
        if not least <= twice <= again[epoch] + max(last[epoch] - 1, 0):
            problems.append(
                f"pass {epoch}: {twice} given twice, {again[epoch]} of them announced, "
                f"{last[epoch]} at the end"
            )
    return problems


def trial(kind: str, number: int) -> list[str]:
    plan, stages = drawn(kind, random.Random(f"{SEED} {kind} {number}"))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            found = problems_of(plan, stages)
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
    found += [f"warned: {one.message}" for one in heard if "other samples" in str(one.message)]
    return [f"{kind} {number}: {plan} {stages}: {line}" for line in found]


@pytest.fixture(autouse=True, scope="module")
def quick_metadata() -> Iterator[None]:
    """Accelerate asks for versions of libraries whenever it prepares a loader, which takes most of
    the time.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("version", "metadata"):
            patch.setattr(importlib.metadata, name, cache(getattr(importlib.metadata, name)))
        yield


@pytest.mark.parametrize("kind", ["distributed", "torchdata", "batch sampler"])
def test_samples_given_again_at_several_changes(kind: str) -> None:
    """A sample that is given again counts once, for the next change as well."""
    stages = [Stage(2, 2, 4), Stage(1, 2, 3), Stage(3, 2, 2), Stage(2, 2, 10**6)]
    assert problems_of(Plan(kind, 36), stages) == []


def test_a_last_batch_that_does_not_reach_all_ranks() -> None:
    """Accelerate splits it without filling it up; its `len` counts it for all ranks."""
    plan = Plan("accelerate", 12, even=False, split=True)
    assert problems_of(plan, [Stage(1, 2, 6), Stage(3, 2, 0), Stage(4, 2, 10**6)]) == []


@pytest.mark.parametrize(("count", "split", "stages"), [(19, False, (4, 1)), (43, True, (2, 5))])
def test_ranks_at_the_end_of_a_pass_that_is_cut_into_smaller_batches(
    count: int, split: bool, stages: tuple[int, int]
) -> None:
    """Some ranks have had their last batch; of the rest in smaller batches they get some, too."""
    plan, (batch, steps) = Plan("accelerate", count, even=False, split=split), stages
    assert problems_of(plan, [Stage(4, batch, steps), Stage(4, 1, 10**6)]) == []


def test_the_end_of_a_pass_in_other_batches_is_its_end() -> None:
    """Some ranks have a batch less in it than others."""
    stages = [Stage(1, 3, 8), Stage(4, 4, 1), Stage(4, 1, 0), Stage(4, 4, 10**6)]
    assert problems_of(Plan("accelerate", 38, even=False), stages) == []


@pytest.mark.parametrize(
    ("plan", "stages"),
    [
        (Plan("uneven", 26), [Stage(2, 4, 5), Stage(4, 4, 2), Stage(2, 4, 0), Stage(2, 4, 6)]),
        (
            Plan("counted stream", 21, shuffle=False),
            [Stage(3, 4, 2), Stage(1, 4, 0), Stage(4, 4, 0), Stage(4, 4, 7)],
        ),
    ],
    ids=["uneven", "counted stream"],
)
def test_the_end_of_a_pass_of_unknown_length_is_saved_again(
    plan: Plan, stages: list[Stage]
) -> None:
    """Before a batch of the next pass is asked for: a position that is not advanced stays at the
    end.
    """
    assert problems_of(plan, [*stages, Stage(stages[-1].ranks, 4, 10**6)]) == []


def test_a_rank_that_gets_nothing_of_the_rest_of_a_pass() -> None:
    """Accelerate does not count a pass without a batch; the rank would have the same order in the
    next one.
    """
    stages = [Stage(1, 2, 15), Stage(2, 4, 10**6)]
    assert problems_of(Plan("accelerate", 33, even=False), stages) == []


def test_positions_of_0_2_0_after_a_change() -> None:
    """Their offset has the samples given again."""
    plan, states = Plan("distributed", 36), None
    for stage in (Stage(1, 2, 11), Stage(3, 2, 0)):
        ranks = [SimulatedRank(plan, stage, rank, states) for rank in range(stage.ranks)]
        assert len(list(islice(together(ranks), stage.steps))) == stage.steps
        states = [rank.feed.state_dict() for rank in ranks]
    assert states is not None
    assert {state["offset"] for state in states} == {21}
    now, old = ([{**state, "offset": offset} for state in states] for offset in (21, 22))
    after = Stage(2, 2, 0)
    expected, found = (
        list(together([SimulatedRank(plan, after, rank, each) for rank in (0, 1)]))
        for each in (now, old)
    )
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_trained_on(kind: str) -> None:
    assert [line for number in range(3) for line in trial(kind, number)] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_trained_on_in_many_runs(kind: str) -> None:
    assert [line for number in range(400) for line in trial(kind, number)] == []
