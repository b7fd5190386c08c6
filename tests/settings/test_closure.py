"""`checkpoint_closure`: at which calls the function runs, and what it may rely on."""

import gc
from functools import partial
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from on_ranks import RANK, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from ft_ckpt import CheckpointSaver, Every, checkpoint_closure, latest
from ft_ckpt.errors import CheckpointError, ConfigError, RankError, RanksDisagreeError


@pytest.fixture(autouse=True)
def no_savers_of_other_tests(monkeypatch):
    """A closure looks for the open saver of its process; tests before may have left some open."""
    gc.collect()
    monkeypatch.setattr("ft_ckpt.saver._OPEN", WeakSet())


@pytest.fixture
def model():
    return nn.Linear(2, 2)


def saver_of(model, folder, **settings):
    saver = CheckpointSaver(directory=folder / "run", **settings)
    saver.register(model=model)
    return saver


def ran(function, count, before=lambda: None):
    """The numbers of the calls, from 1, that were not skipped."""
    found = []
    for call in range(1, count + 1):
        before()
        if function(call) is not None:
            found.append(call)
    return found


# At which calls


def test_at_checkpoint_steps_and_at_the_last_one():
    seen = []

    @checkpoint_closure(every=Every(steps=3), total_steps=8)
    def save(call, *, scale=1):
        """Saves."""
        seen.append(call * scale)
        return "saved"

    assert ran(save, 10) == [3, 6, 8, 9]
    assert seen == [3, 6, 8, 9]
    assert (save.__name__, save.__doc__) == ("save", "Saves.")


def test_a_last_step_that_is_a_checkpoint_step_comes_once():
    assert ran(checkpoint_closure(every=Every(steps=2), total_steps=4)(str), 5) == [2, 4]
    assert ran(checkpoint_closure(total_steps=4)(str), 5) == [4]


def test_clocks_count_too():
    assert ran(checkpoint_closure(every=Every(minutes=1e-9))(str), 2) == [1, 2]
    assert ran(checkpoint_closure(every=Every(minutes=60), total_steps=3)(str), 3) == [3]
    assert ran(checkpoint_closure(every=Every(deadline=0.0), total_steps=3)(str), 3) == [3]


def test_methods():
    class Trainer:
        @checkpoint_closure(every=Every(steps=2))
        def save(self, call):
            return self, call

    assert checkpoint_closure(every=Every(steps=1))(partial(str, 5))() == "5", (
        "anything that can be called"
    )
    trainer = Trainer()
    assert [trainer.save(1), trainer.save(2)] == [None, (trainer, 2)]


# The saver's steps, epochs and settings


def test_the_open_saver_counts_the_steps(model, tmp_path):
    save = checkpoint_closure(every=Every(steps=10), total_steps=35)(str)
    with saver_of(model, tmp_path) as saver:
        steps = iter(range(5, 100, 5))
        assert ran(save, 8, before=lambda: saver.step(step=next(steps))) == [2, 4, 6, 7, 8]
    assert ran(save, 20) == [], "its saver is closed, and no step is done"


def test_the_saver_says_how_often_unless_told(model, tmp_path):
    with saver_of(model, tmp_path, every=Every(steps=2)) as saver:
        usual, rare = checkpoint_closure(str), checkpoint_closure(every=Every(steps=3))(str)
        found = [
            (saver.step() is not None, usual(1) is not None, rare(1) is not None) for _ in range(4)
        ]
    assert found == [
        (False, False, False),
        (True, True, False),
        (False, False, True),
        (True, True, False),
    ]


def test_a_resumed_run_goes_on_counting(model, tmp_path):
    with saver_of(model, tmp_path) as saver:
        saver.step(step=6)
        saver.save_state()
    save = checkpoint_closure(every=Every(steps=4))(str)
    with saver_of(model, tmp_path) as saver:
        assert saver.resume().step == 6
        assert ran(save, 6, before=saver.step) == [2, 6], "at 8 and 12"
        saver.resume()
        assert ran(save, 2, before=saver.step) == [2], "again at 8"


def test_a_saver_that_is_never_stepped_only_saves(model, tmp_path):
    with CheckpointSaver(directory=tmp_path) as saver:

        @checkpoint_closure(every=Every(steps=2))
        def save(call):
            return saver.save(model, step=call)

        assert ran(save, 5) == [2, 4]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
    ]


def test_a_saver_made_in_passing_does_not_disturb(model, tmp_path):
    @checkpoint_closure(every=Every(steps=2))
    def save(call):
        return CheckpointSaver().save(model, tmp_path / str(call))

    assert ran(save, 6) == [2, 4, 6]


@pytest.mark.parametrize(("epochs", "expected"), [(None, [4]), (1, [4, 5]), (2, [4, 8, 10])])
def test_the_end_of_the_data_is_the_last_step(model, tmp_path, epochs, expected):
    """Passes of five batches; a loop over one pass does not say whether it is the last."""
    save, found = checkpoint_closure(every=Every(steps=4))(str), []
    with saver_of(model, tmp_path) as saver:
        for _ in saver.remaining(DataLoader(torch.arange(10), batch_size=2), epochs):
            saver.step()
            if save("") is not None:
                found.append(saver.progress.step)
    assert found == expected


def test_epochs(model, tmp_path):
    save, found = checkpoint_closure(every=Every(epochs=2))(str), []
    with saver_of(model, tmp_path) as saver:
        for _ in saver.remaining(DataLoader(torch.arange(6), batch_size=2), 5):
            saver.step()
            if save("") is not None:
                found.append(saver.progress.step)
    assert found == [6, 12, 15]


def test_nothing_runs_within_gradient_accumulation(tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer = accelerator.prepare(
        nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters())
    )
    save, found = checkpoint_closure(every=Every(steps=2))(str), []
    with CheckpointSaver(accelerator, tmp_path) as saver:
        for batch in range(1, 13):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                saver.step()
                if save("") is not None:
                    found.append((batch, saver.progress.step))
    assert found == [(6, 2), (12, 4)]


# What goes wrong


def test_an_error_is_raised_and_the_next_try_is_an_interval_later():
    @checkpoint_closure(every=Every(steps=2))
    def save(call):
        if call == 2:
            raise KeyError("full")
        return call

    assert save(1) is None
    with pytest.raises(KeyError, match="full"):
        save(2)
    assert [save(3), save(4)] == [None, 4]


def test_one_inside_another_is_refused_whether_it_is_due_or_not():
    inner = checkpoint_closure(every=Every(steps=100))(str)

    @checkpoint_closure(every=Every(steps=1))
    def outer(function):
        return function("")

    for function in (inner, outer):
        with pytest.raises(CheckpointError, match=r"called inside outer\(\)"):
            outer(function)
    assert inner("") is None, "the loop may call it again"


def test_several_open_savers(model, tmp_path):
    save = checkpoint_closure(every=Every(steps=1))(str)
    with saver_of(model, tmp_path) as one, saver_of(model, tmp_path) as other:
        with pytest.raises(ConfigError, match=r"save_it\(\): 2 savers are open.*saver=saver"):
            checkpoint_closure(every=Every(steps=1))(_named("save_it"))()
        one.step(step=4)
        assert save("") == "", "one of them counts the steps"
        other.step(step=7)
        with pytest.raises(ConfigError, match="2 savers"):
            save("")
        told = checkpoint_closure(every=Every(steps=7), saver=other)(str)
        assert told("") == ""


def test_called_before_the_savers_step(model, tmp_path):
    save = checkpoint_closure(every=Every(steps=2), total_steps=9)(str)
    with saver_of(model, tmp_path) as saver:
        save("")
        saver.step()
        with pytest.raises(ConfigError, match=r"call it after saver\.step"):
            save("")


def test_what_nothing_can_decide():
    with pytest.raises(ConfigError, match="no schedule"):
        checkpoint_closure(str)("")
    with pytest.raises(ConfigError, match="no saver knows the epochs"):
        checkpoint_closure(every=Every(epochs=1))(str)("")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": "often"}, "every=.often.: expected Every"),
        ({"every": Every(best=("loss", "min"))}, "calls have no metrics"),
        ({"total_steps": 0}, "total_steps=0: expected a whole number above 0"),
        ({"every": "1", "total_steps": 1.5}, "every='1'.*total_steps=1.5"),
    ],
)
def test_settings_that_cannot_work(settings, words):
    with pytest.raises(ConfigError, match=words):
        checkpoint_closure(**settings)
    with pytest.raises(ConfigError, match="100: expected a function"):
        checkpoint_closure(100)


def _named(name):
    def function():
        return name

    function.__name__ = name
    return function


@on_ranks(2)
def test_parameters_of_fsdp2_are_sharded_again_inside(tmp_path):
    """Inside a closure, FSDP2 parameters are sharded again, though an evaluation left those of the
    root unsharded.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    @checkpoint_closure(every=Every(steps=2), total_steps=3)
    def look():
        saver.save(model, step=saver.progress.step)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        seen.append(
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))["1.weight"]
        )
        return True

    with CheckpointSaver(directory=tmp_path) as saver:
        saver.register(model=model, optimizer=optimizer)
        found = []
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(1, 4))
            assert not isinstance(model[1].weight, DTensor), "nothing to put back"
            saver.step()
            found.append(look())
    assert found == [None, True, True]
    assert latest(tmp_path).name == "checkpoint-3"
    assert not torch.equal(seen[0], seen[1])


@on_ranks(2)
def test_the_clock_of_rank_0_decides():
    """Clocks of ranks differ: rank 0's decides."""
    every = Every(minutes=1e-9 if RANK == 0 else 1e9)
    function = checkpoint_closure(every=every)(str)
    assert [function(call) for call in range(2)] == ["0", "1"]


@on_ranks(2)
def test_an_error_on_one_rank_is_raised_on_all():
    @checkpoint_closure(every=Every(steps=2))
    def function(call):
        if RANK == 1 and call == 2:
            raise KeyError("full")
        return call

    assert function(1) is None
    expected = (
        (RankError, r"function\(\) failed on rank 1: KeyError: 'full'")
        if RANK == 0
        else (KeyError, "full")
    )
    with pytest.raises(expected[0], match=expected[1]):
        function(2)
    assert [function(3), function(4)] == [None, 4]


@on_ranks(2, alone=True)
def test_a_call_on_rank_0_alone_is_an_error(tmp_path):
    """A call under `if rank == 0` is an error that says so, not a wait without end."""
    ran = []
    with CheckpointSaver(directory=tmp_path, enter_timeout_seconds=2) as saver:
        function = checkpoint_closure(every=Every(steps=1, deadline=None), saver=saver)(ran.append)
        if RANK == 0:
            with pytest.raises(RanksDisagreeError, match=r"rank\(s\) 1 did not enter"):
                function(1)
    dist.barrier()
    assert ran == []
