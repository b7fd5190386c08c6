"""Several loaders in one run: each has its own passes, and its own place in a checkpoint."""

import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ft_ckpt import CheckpointSaver, Every
from ft_ckpt.errors import LoadError

QUIET = {"on_difference": "ignore"}


def loader(first, count):
    return DataLoader(TensorDataset(torch.arange(first, first + count)), batch_size=2, shuffle=True)


def saver_of(folder, **settings):
    saver = CheckpointSaver(None, folder, **QUIET, **settings)
    saver.register(model=nn.Linear(1, 1))
    return saver


def seen(batches, count=None):
    return [batch[0].tolist() for batch in itertools.islice(batches, count)]


def test_each_loader_has_passes_of_its_own(tmp_path):
    """The second loop gave nothing, or never ended: passes of the first loader were counted."""
    saver, one, other = saver_of(tmp_path), loader(0, 4), loader(100, 6)
    assert len(seen(saver.remaining(one, epochs=2))) == 4
    assert len(seen(saver.remaining(other, epochs=3), 99)) == 9
    assert len(seen(saver.remaining(one, epochs=3))) == 2
    assert saver.progress.epoch == 3  # of the loader that came first


def curriculum(saver, loaders, stop=None, skip_done=False):
    done = []
    for number, (each, epochs) in enumerate(zip(loaders, (2, 1), strict=True)):
        if skip_done and number == 0 and saver.progress.epoch >= epochs:
            continue
        for batch in saver.remaining(each, epochs=epochs):
            done.append(batch[0].tolist())
            saver.step()
            if len(done) == stop:
                return done
    return done


@pytest.mark.parametrize("skip_done", [False, True])
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6])
def test_a_curriculum_goes_on_where_it_was(tmp_path, stop, skip_done):
    torch.manual_seed(0)
    expected = curriculum(saver_of(tmp_path / "whole"), [loader(0, 4), loader(100, 6)])
    torch.manual_seed(0)
    saver = saver_of(tmp_path)
    begun = curriculum(saver, [loader(0, 4), loader(100, 6)], stop)
    saver.save_state()
    torch.manual_seed(99)
    again = saver_of(tmp_path)
    again.resume("must")
    assert (
        begun + curriculum(again, [loader(0, 4), loader(100, 6)], skip_done=skip_done) == expected
    )


def test_the_end_of_each_pass_is_saved(tmp_path):
    saver = saver_of(tmp_path, every=Every(epochs=1, signals=()))
    curriculum(saver, [loader(0, 4), loader(100, 6)])
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-7",
    ]


@pytest.mark.parametrize(("epochs", "saved"), [(1, {3, 6, 9, 12}), (2, {6, 12})])
def test_two_loaders_side_by_side_are_one_pass(tmp_path, epochs, saved):
    saver, one, other = (
        saver_of(tmp_path, every=Every(epochs=epochs, signals=())),
        loader(0, 6),
        loader(9, 6),
    )
    for _ in range(4):
        for _pair in zip(saver.remaining(one), saver.remaining(other), strict=False):
            saver.step()
    assert {int(path.name.rpartition("-")[2]) for path in tmp_path.glob("checkpoint-*")} == saved


def test_a_loader_that_no_checkpoint_had_is_told_of(tmp_path):
    saver = saver_of(tmp_path)
    curriculum(saver, [loader(0, 4), loader(100, 6)], 5)
    saver.save_state()
    again = saver_of(tmp_path)
    again.resume("must")
    with pytest.warns(
        UserWarning, match="TensorDataset with 8 samples: no loader of the checkpoint had such data"
    ):
        seen(again.remaining(loader(0, 8)), 1)


def test_a_plain_loader_of_other_data_is_told_of(tmp_path):
    """In order, the data that was added or cut off began with the same indices: nothing was
    said.
    """

    def plain(count):
        return DataLoader(TensorDataset(torch.arange(count)), batch_size=2)

    saver = saver_of(tmp_path)
    seen(saver.remaining(plain(8)), 2)
    saver.save_state()
    for count in (12, 6):
        for how in ("warn", "raise", "ignore", None):
            again = CheckpointSaver(None, tmp_path, on_difference=how or "raise")
            again.resume("must", model=nn.Linear(1, 1))
            read = partial(seen, again.remaining(plain(count if how else 8)), 1)
            match = (
                f"TensorDataset with {count} samples, was TensorDataset with 8 when it was saved"
            )
            if how == "raise":
                with pytest.raises(LoadError, match=match):
                    read()
                continue
            with pytest.warns(UserWarning, match=match) if how == "warn" else nullcontext():
                assert read() == [[4, 5]]
