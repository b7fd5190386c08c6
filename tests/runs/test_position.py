"""Where a run is in its data: a run resumed at any step sees the batches and random numbers it
would have seen.
"""

from collections.abc import Iterator
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import GradientState
from data_loops import (
    SAMPLES,
    Counted,
    Make,
    Numbers,
    Stream,
    differing,
    resumed,
    saved,
    scramble,
    train,
    uninterrupted,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import ft_ckpt
from ft_ckpt.errors import CorruptError, LoadError
from ft_ckpt.runs.data import DataPosition, rng
from ft_ckpt.runs.data.cuts import skipping_items


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def prepared(loader: Any, **settings: Any) -> Any:
    return Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(**settings)
    ).prepare_data_loader(loader)


def hugging(shuffle: bool = False) -> Any:
    data = datasets.Dataset.from_dict({"x": list(range(SAMPLES))}).to_iterable_dataset(num_shards=2)
    return data.shuffle(seed=3, buffer_size=4) if shuffle else data


def bucketed() -> BatchSampler:
    return BatchSampler(RandomSampler(range(SAMPLES), generator=seeded()), 3, drop_last=False)


LOADERS: dict[str, Make] = {
    "in order": lambda: DataLoader(Numbers(), 4),
    "drop_last": lambda: DataLoader(Numbers(), 4, drop_last=True),
    "shuffled": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "shuffled by a generator": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=seeded()),
    "with replacement": lambda: DataLoader(
        Numbers(count=70),
        16,
        sampler=RandomSampler(range(70), replacement=True, generator=seeded()),
    ),
    "weighted": lambda: DataLoader(
        Numbers(), 4, sampler=WeightedRandomSampler([1.0 + i for i in range(11)], 11)
    ),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=bucketed()),
    "one by one": lambda: DataLoader(Numbers(), batch_size=None, shuffle=True),
    "sampler of batches": lambda: DataLoader(
        Numbers("own"), batch_size=None, sampler=range(SAMPLES)
    ),
    "augmented": lambda: DataLoader(Numbers("global"), 4, shuffle=True),
    "augmented by its own": lambda: DataLoader(Numbers("own"), 4, shuffle=True),
    "stream": lambda: DataLoader(Stream(), 4),
    "augmented stream": lambda: DataLoader(Stream("global"), 4),
    "stream augmented by its own": lambda: DataLoader(Stream("own"), 4),
    "list": lambda: [torch.tensor([float(i)]) for i in range(4)],
    "datasets": lambda: DataLoader(
        datasets.Dataset.from_dict({"x": list(range(SAMPLES))}), 4, shuffle=True
    ),
    "datasets stream": lambda: DataLoader(hugging(), 4),
    "datasets shuffled stream": lambda: DataLoader(hugging(shuffle=True), 4),
    "stateful": lambda: StatefulDataLoader(Numbers("global"), 4, shuffle=True),
    "stateful by a generator": lambda: StatefulDataLoader(
        Numbers(), 4, shuffle=True, generator=seeded()
    ),
    "stateful stream": lambda: StatefulDataLoader(Stream("global"), 4),
    "stateful counted stream": lambda: StatefulDataLoader(
        Counted(lambda position: position, noise="global"), 4
    ),
    "stateful datasets stream": lambda: StatefulDataLoader(hugging(), 4),
    "stateful datasets shuffled stream": lambda: StatefulDataLoader(hugging(shuffle=True), 4),
    "prepared": lambda: prepared(DataLoader(Numbers(), 4, shuffle=True)),
    "prepared augmented": lambda: prepared(DataLoader(Numbers("global"), 4, shuffle=True)),
    "prepared augmented by its own": lambda: prepared(DataLoader(Numbers("own"), 4, shuffle=True)),
    "prepared seedable": lambda: prepared(
        DataLoader(Numbers(), 4, shuffle=True), use_seedable_sampler=True
    ),
    "prepared, read on rank 0": lambda: prepared(
        DataLoader(Numbers("global"), 4, shuffle=True), dispatch_batches=True
    ),
    "prepared stream": lambda: prepared(DataLoader(Stream("global"), 4)),
    "prepared sharded stream": lambda: prepared(
        DataLoader(Stream("global"), 4), dispatch_batches=False
    ),
    "prepared datasets stream": lambda: prepared(
        DataLoader(hugging(shuffle=True), 4), dispatch_batches=False
    ),
    "prepared stateful": lambda: prepared(
        DataLoader(Numbers("global"), 4, shuffle=True),
        use_stateful_dataloader=True,
        use_seedable_sampler=True,
    ),
    "prepared stateful, unseeded": lambda: prepared(
        StatefulDataLoader(Numbers(), 4, shuffle=True), use_stateful_dataloader=True
    ),
    "prepared stateful datasets stream": lambda: prepared(
        DataLoader(hugging(), 4), use_stateful_dataloader=True, dispatch_batches=False
    ),
    "prepared counted stream": lambda: prepared(
        DataLoader(Counted(noise="global"), 4), use_stateful_dataloader=True, dispatch_batches=False
    ),
}
WITH_WORKERS: dict[str, Make] = {
    "shuffled": lambda: DataLoader(Numbers(), 4, shuffle=True, num_workers=2),
    "kept": lambda: DataLoader(Numbers(), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), 4, num_workers=2),
    "datasets stream": lambda: DataLoader(hugging(shuffle=True), 4, num_workers=2),
    "stateful": lambda: StatefulDataLoader(Numbers(), 4, shuffle=True, num_workers=2),
    "stateful stream": lambda: StatefulDataLoader(Stream(), 4, num_workers=2),
    "prepared": lambda: prepared(DataLoader(Numbers(), 4, shuffle=True, num_workers=2)),
    "prepared, kept": lambda: prepared(
        DataLoader(Numbers(), 4, shuffle=True, num_workers=2, persistent_workers=True),
        use_seedable_sampler=True,
    ),
    "prepared stream": lambda: prepared(DataLoader(Stream(), 4, num_workers=2)),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", LOADERS)
def test_resumed_after_any_batch_a_run_goes_on_exactly(name) -> None:
    """Data order or position wrong after resume."""
    make = LOADERS[name]
    steps, states = uninterrupted(make)
    scramble(1)
    loader = make()
    scramble(1)
    assert train(DataPosition(loader)) == steps  # looking at the position changes nothing
    assert steps[0] != steps[len(steps) // 3]
    assert differing(make, steps, states, range(len(states))) == []


@pytest.mark.sample(6)
@pytest.mark.parametrize("firsts", [(2, 3), pytest.param((1, 5), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LOADERS)
def test_resumed_twice(name, firsts) -> None:
    """The second resume restarts the stream."""
    make = LOADERS[name]
    steps, states = uninterrupted(make)
    for first in {min(first, len(steps)) for first in firsts}:
        feed, again = resumed(DataPosition(make()), states[first]), []
        again.append(saved(feed))  # at once, before any batch
        train(feed, lambda step, feed=feed, again=again: again.append(saved(feed)))
        stops = {0, 1, 2, min(3, len(steps) - first)} & set(range(len(again)))
        assert differing(make, steps[first:], again, sorted(stops)) == []


@pytest.mark.sample("kept")
@pytest.mark.parametrize("name", WITH_WORKERS)
def test_with_workers(name) -> None:
    make = WITH_WORKERS[name]
    steps, states = uninterrupted(make)
    assert differing(make, steps, states, (0, 1, 2, 3, 4, 8)) == []


@pytest.mark.sample("Numbers")
@pytest.mark.parametrize("make", [Numbers, Stream])
def test_augmentation_inside_workers_is_exact_when_batches_are_replayed(make) -> None:
    def loader() -> Any:
        options = {"shuffle": True} if make is Numbers else {}
        return DataLoader(make("global"), 2, num_workers=2, **options)

    steps, states = uninterrupted(loader, replay=True)
    assert differing(loader, steps, states, (1, 3, 6, 7), replay=True) == []


def test_a_shuffle_buffer_may_be_filled_anew_instead() -> None:
    make = LOADERS["stateful datasets shuffled stream"]
    steps, states = uninterrupted(make, replay=False)
    rest = train(resumed(DataPosition(make(), replay=False), states[1]))
    found, wanted = ([step.batch for step in run] for run in (rest, steps[1:]))
    assert found[0] != wanted[0]
    assert found[-3:] == wanted[-3:]  # the next passes are whole again


def test_epochs_that_the_script_sets() -> None:
    def make() -> DataLoader:
        return DataLoader(Numbers(), 4, sampler=DistributedSampler(Numbers(), 2, 1, seed=7))

    scramble(1)
    feed, states = DataPosition(make(), 1, 2), []
    steps = train(
        feed, lambda step: states.append(saved(feed)), set_epoch=feed.loader.sampler.set_epoch
    )
    for stop, state in enumerate(states, 1):
        again = resumed(DataPosition(make(), 1, 2), state)
        assert train(again, set_epoch=again.loader.sampler.set_epoch) == steps[stop:]


def test_gradient_accumulation_is_told_the_end_of_the_data() -> None:
    """Accelerate steps the optimizer at the end of the data, and cuts what was filled up off
    gathered metrics.
    """

    def look() -> tuple[bool, int]:
        return GradientState().end_of_dataloader, GradientState().remainder

    make = LOADERS["prepared"]
    scramble(1)
    feed, states = DataPosition(make()), []
    steps = train(feed, lambda step: states.append(saved(feed)), look)
    assert [step.batch[1] for step in steps] == [(False, 3), (False, 3), (True, 3)] * 3
    for stop, state in enumerate(states, 1):
        again = resumed(DataPosition(make()), state)
        assert train(again, look=look) == steps[stop:]
        assert again.loader.iteration == 3


@pytest.mark.sample("h5")
@pytest.mark.parametrize("suffix", ["h5", "safetensors"])
def test_position_goes_through_a_file_that_is_gone_when_the_data_is_asked_for(
    tmp_path, suffix
) -> None:
    make, path = LOADERS["prepared counted stream"], tmp_path / f"position.{suffix}"
    steps, states = uninterrupted(make)
    for stop in (0, 2, 3, 5):
        ft_ckpt.save(states[stop], path)
        feed = resumed(DataPosition(make()), ft_ckpt.load(path))
        path.unlink()
        assert train(feed) == steps[stop:]


def test_what_is_skipped_is_not_read() -> None:
    """Skipping takes a day."""
    read = []

    class Watched(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            read.append(index)
            return super().__getitem__(index)

    scramble(1)
    feed = DataPosition(DataLoader(Watched(count=1000), 10))
    for _ in zip(range(50), feed.batches(), strict=False):
        state = saved(feed)
    read.clear()
    next(resumed(DataPosition(DataLoader(Watched(count=1000), 10)), state).batches())
    assert read == list(range(490, 510))
    feed = DataPosition(StatefulDataLoader(Counted(count=1000), 10))
    for _ in zip(range(50), feed.batches(), strict=False):
        state = saved(feed)
    counted = Counted(count=1000)
    next(resumed(DataPosition(StatefulDataLoader(counted, 10)), state).batches())
    assert counted.read == 10


def test_a_sampler_that_leaves_batches_out_passes_for_the_one_it_is() -> None:
    """Accelerate asks whether a loader's sampler is a batch sampler, and for its size."""
    sampler = BatchSampler(range(SAMPLES), 4, drop_last=False)
    loader = DataLoader(Numbers(), batch_size=None, sampler=sampler)
    with skipping_items(loader, 1, 1):
        assert isinstance(loader.sampler, BatchSampler)
        assert (len(loader), loader.sampler.batch_size) == (3, 4)
        assert [list(loader.sampler) for _ in range(2)] == [
            [[0, 1, 2, 3], [8, 9, 10]],
            list(sampler),
        ]
    assert loader.sampler is sampler


def test_a_loop_left_by_break() -> None:
    scramble(1)
    feed = DataPosition(DataLoader(Numbers(), 4))
    for _ in feed.batches():
        break
    assert (feed.epoch, feed.batch) == (0, 1)
    rest = list(resumed(DataPosition(DataLoader(Numbers(), 4)), saved(feed)).batches())
    assert [len(batch) for batch in rest] == [4, 3]
    assert len(list(feed.batches())) == 3  # here, a new pass
    assert (feed.epoch, feed.batch, feed.samples) == (2, 0, 4 + SAMPLES)


def test_the_end_of_a_pass_is_known_where_it_can_be() -> None:
    def ends(loader: Any) -> list[bool | None]:
        feed = DataPosition(loader)
        return [feed.at_end, *(feed.at_end for _ in feed.batches()), feed.at_end]

    assert ends(DataLoader(Numbers(), 4)) == [False, False, False, True, False]
    assert ends(DataLoader(Stream(), 4)) == [False, None, None, None, False]
    assert ends(prepared(DataLoader(Stream(), 4))) == [False, False, False, True, False]


class Turning(Sampler[int]):
    """A sampler that counts passes in its own way."""

    def __init__(self, count: int = SAMPLES) -> None:
        self.count, self.turns = count, 0

    def __iter__(self) -> Iterator[int]:
        self.turns += 1
        return iter([(index + self.turns) % self.count for index in range(self.count)])

    def __len__(self) -> int:
        return self.count


OTHERS: dict[str, tuple[Make, Make]] = {
    "an order of its own": 2 * (lambda: DataLoader(Numbers(), 2, sampler=Turning()),),
    "the same in a batch sampler": 2
    * (lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(Turning(), 2, True)),),
    "prepared": 2 * (lambda: prepared(DataLoader(Numbers(), 2, sampler=Turning())),),
    "kept workers": 2
    * (
        lambda: DataLoader(Numbers(), 2, sampler=Turning(), num_workers=1, persistent_workers=True),
    ),
    "more data": (
        lambda: DataLoader(Numbers(), 2, shuffle=True),
        lambda: DataLoader(Numbers(count=12), 2, shuffle=True),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_samples_that_are_not_those_of_the_run_are_told_of(name) -> None:
    make, other = OTHERS[name]
    feed = DataPosition(make())
    list(feed.batches())
    rest = feed.batches()
    states = [(next(rest), saved(feed))[1] for _ in range(3)]
    with pytest.raises(
        LoadError,
        match=r"the sampler yields other samples than in the 3 batch.*same data and batch size",
    ):
        next(resumed(DataPosition(other(), on_difference="raise"), states[2]).batches())
    with pytest.warns(UserWarning, match="the sampler yields other samples"):
        next(resumed(DataPosition(other()), states[2]).batches())
    next(resumed(DataPosition(other(), on_difference="ignore"), states[2]).batches())


def test_a_position_that_was_not_used_keeps_the_order_to_be_proved() -> None:
    feed = DataPosition(DataLoader(Numbers(), 2))
    next(feed.batches())
    again = saved(resumed(DataPosition(DataLoader(Numbers(), 2)), saved(feed)))
    other = DataLoader(Numbers(), 2, sampler=range(SAMPLES - 1, -1, -1))
    with pytest.warns(UserWarning, match="the sampler yields other samples"):
        next(resumed(DataPosition(other), again).batches())


@pytest.mark.sample("in order", "stateful counted stream")
@pytest.mark.parametrize("kind", ["in order", "stateful counted stream", "prepared counted stream"])
def test_another_batch_size_goes_on_after_the_samples_that_were_seen(kind) -> None:
    feed = DataPosition(LOADERS[kind]())
    next(feed.batches())
    state, loader = feed.state_dict(), LOADERS[kind]()
    if "stateful" in kind:
        loader = StatefulDataLoader(Counted(), 3)
    elif "prepared" in kind:
        loader = prepared(
            DataLoader(Counted(), 3), use_stateful_dataloader=True, dispatch_batches=False
        )
    else:
        loader = DataLoader(Numbers(), 3)
    again = DataPosition(loader)
    (note,) = again.load_state_dict(state)
    assert note.startswith(
        "batches of 4 before, of 3 now: 1 ranks had seen 4 samples of this pass, 1 go on "
    )
    first = 3 if "1 of them are given again" in note else 4
    assert [int(row[0]) for batch in again.batches() for row in batch] == list(
        range(first, SAMPLES)
    )
    assert first == (3 if "prepared" in kind else 4)
    with pytest.raises(
        LoadError, match=r"batches of 4 before, of 3 now.*resume with the same batch size"
    ):
        DataPosition(loader, on_difference="raise").load_state_dict(state)


def test_how_ranks_share_data_is_asked_for_when_they_are_others() -> None:
    def rank(sampler: Any, size: int) -> DataPosition:
        return DataPosition(DataLoader(Numbers(), 2, sampler=sampler), 0, size)

    feed = rank(range(SAMPLES), 1)
    next(feed.batches())
    (note, problem) = rank(range(SAMPLES), 2).load_state_dict(feed.state_dict())
    assert "how ranks share the data is not known" in problem
    (note, problem) = rank(DistributedSampler(Numbers(), 2, 0), 2).load_state_dict(
        feed.state_dict()
    )
    assert problem.startswith(
        "its order is DistributedSampler now, was range: some samples are left out"
    )
    feed = rank(SequentialSampler(Numbers()), 1)
    next(feed.batches())
    (note,) = rank(DistributedSampler(Numbers(), 2, 0, shuffle=False), 2).load_state_dict(
        feed.state_dict()
    )
    assert note.startswith(
        "1 ranks had seen 2 samples of this pass, 2 go on in the middle of a batch of theirs"
    )


def test_data_that_became_shorter_is_an_error() -> None:
    for make in (Numbers, Stream):
        feed = DataPosition(DataLoader(make(), 4))
        for _ in feed.batches():
            state = saved(feed)
        with pytest.raises(
            LoadError,
            match="3 batches of the pass were consumed when it was saved, now it has fewer",
        ):
            list(resumed(DataPosition(DataLoader(make(count=4), 4)), state).batches())


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(CorruptError, match="missing required field epoch"):
        DataPosition(DataLoader(Numbers(), 4)).load_state_dict({"size": 1})


@pytest.mark.parametrize("seen", range(1, 5))
def test_another_number_of_ranks_goes_on_after_the_samples_that_were_seen(seen) -> None:
    """Cannot resume on another number of GPUs."""

    def rank(index: int, size: int) -> DataPosition:
        data = Numbers(count=48)
        return DataPosition(
            DataLoader(data, 3, sampler=DistributedSampler(data, size, index, seed=3)), index, size
        )

    def order(feeds: list[DataPosition], most: int) -> tuple[list[int], dict[str, Any]]:
        samples, state = [], {}
        for _, *batches in zip(range(most), *(feed.batches() for feed in feeds), strict=False):
            # DistributedSampler deals samples out in turn.
            samples += [int(row[0]) for rows in zip(*batches, strict=True) for row in rows]
            state = feeds[0].state_dict()
        return samples, state

    whole = order([rank(0, 1)], 99)[0]
    for before, after in ((2, 1), (1, 2), (2, 4), (4, 2)):
        scramble(1)
        first, state = order([rank(index, before) for index in range(before)], seen)
        assert first == whole[: 3 * seen * before]
        feeds = [rank(index, after) for index in range(after)]
        notes = {note for feed in feeds for note in feed.load_state_dict(state)}
        assert all(
            f"{before} ranks had seen {len(first)} samples of this pass, {after} go on" in note
            for note in notes
        )
        again = len(first) % after  # given again, so that all ranks begin alike
        assert ["given again" in note for note in notes] == [bool(again)]
        assert first[: len(first) - again] + order(feeds, 99)[0] == whole


def test_resumed_on_another_number_of_ranks_and_then_again() -> None:
    def make() -> DataLoader:
        data = Numbers("own", count=36)
        return DataLoader(data, 3, sampler=DistributedSampler(data, 2, 0, seed=3))

    for stop, left in ((1, 18), (2, 17)):  # in the middle of a batch, and at its end
        scramble(1)
        alone = DataPosition(
            DataLoader(
                Numbers("own", count=36),
                3,
                sampler=DistributedSampler(Numbers(count=36), 1, 0, seed=3),
            )
        )
        for _ in zip(range(stop), alone.batches(), strict=False):
            state = saved(alone)
        feed = DataPosition(make(), 0, 2)
        feed.load_state_dict(state["feed"])
        rng.restore_generators(state["rng"])
        states = [saved(feed)]
        steps = train(feed, lambda step, feed=feed, states=states: states.append(saved(feed)))
        assert len(steps) == left
        assert differing(make, steps, states, range(8), rank=0, size=2) == []


def test_remembering_where_a_plain_loader_is_costs_nothing_at_a_step(monkeypatch) -> None:
    captures = []
    capture = rng.capture_generators
    monkeypatch.setattr(rng, "capture_generators", lambda: captures.append(1) or capture())
    assert len(list(DataPosition(DataLoader(Numbers(), 4)).batches())) == 3
    assert len(captures) == 1
