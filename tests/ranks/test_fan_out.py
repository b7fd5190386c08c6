"""Resume with fan_out="broadcast": rank 0 reads the replicated tensors, and all ranks learn of an
error.
"""

from dataclasses import replace
from functools import wraps

import pytest
from exact_runs import live_model, optimizer_state, same, saver_of, train
from on_ranks import RANK, on_ranks
from tuning import buckets_of
from wrappers import truth

from ft_ckpt.errors import LoadError, RankError
from ft_ckpt.ranks.moving import broadcast
from ft_ckpt.runs.items import RunObjects
from ft_ckpt.runs.resume import restore_run
from ft_ckpt.runs.state import Restored
from ft_ckpt.storage.io import prefetch as reading

BUCKET = 1 << 16  # the minimum: many buckets even for a tiny model


def left(wrapper, model, folder):
    """A run of two steps with a checkpoint in `folder`."""
    live = live_model(wrapper, model)
    with saver_of(live, folder) as saver:
        train(live, saver, 0, 2)
        saver.save_state()
    return live


def rank_0_reads(test):
    """Run a test on two ranks, with many buckets; functions of `broadcast` that it replaces are put
    back.
    """

    @on_ranks(2)
    @buckets_of(BUCKET)
    @wraps(test)
    def with_small_buckets(**arguments):
        try:
            test(**arguments)
        finally:
            broadcast.read_ahead = reading.read_ahead

    return with_small_buckets


@pytest.mark.parametrize(
    ("wrapper", "model"),
    [("ddp", "llama"), ("ddp", "mixtral"), ("fsdp1", "llama"), ("fsdp2", "qwen3")],
)
@rank_0_reads
def test_the_same_as_all_ranks_read(tmp_path, wrapper, model):
    live = left(wrapper, model, tmp_path)
    tensors, moments = truth(live), optimizer_state(live)
    asked = []
    count_common(asked)
    fresh = live_model(wrapper, model, seed=1)
    with saver_of(fresh, tmp_path, fan_out="broadcast") as saver:
        progress = saver.resume("must")
        assert (progress.step, progress.report.problems) == (2, ()), progress
        same(tensors, truth(fresh))
        same(moments, optimizer_state(fresh))
        train(fresh, saver, 2, 1)
    if wrapper == "ddp":
        assert bool(asked) is (RANK == 0), f"{len(asked)} tensors were read on this rank"


def count_common(asked):
    """Note the tensors this process reads from here on."""

    def noted(runs, *options):
        runs = list(runs)
        asked.extend(run.name for run in runs)
        return reading.read_ahead(runs, *options)

    broadcast.read_ahead = noted


def resuming(folder):
    live = live_model("ddp", "llama", seed=1)
    return saver_of(live, folder, fan_out="broadcast")


@rank_0_reads
def test_rank_0_fails_while_it_reads_for_all(tmp_path):
    """Every rank reports it, at once."""
    left("ddp", "llama", tmp_path)

    def broken(runs, *options):
        for number, part in enumerate(reading.read_ahead(runs, *options)):
            if number == 7 and RANK == 0:
                raise OSError(5, "the disk is gone")
            yield part

    broadcast.read_ahead = broken
    with resuming(tmp_path) as saver:
        items = saver.resume("must", allow=True).report.items
    weights = next(item for item in items if item.name == "weights")
    assert weights.status == "failed"
    assert "the disk is gone" in weights.detail


check_all = broadcast.check_all


def check_elsewhere(wanted):
    return check_all([replace(tensor, name="nowhere") for tensor in wanted])


def divide_by_zero(*_):
    return 1 / 0


def nothing_fits(*_):
    return Restored("weights", "failed", "not of this model")


# what fails on rank 1 -> the function that it is in, its replacement, the errors of both ranks
ONE_FAILS = {
    "it reads nothing": (
        *(RunObjects, "items_in_saved_order", divide_by_zero),
        *((RankError, "rank 1.*division by zero"), (ZeroDivisionError, "division by zero")),
    ),
    "a tensor is not there": (
        *(broadcast, "check_all", check_elsewhere),
        *((LoadError, "nowhere: not in the"), (LoadError, "nowhere: not in the")),
    ),
    "it has no memory": (
        *(broadcast, "wire_device", divide_by_zero),
        *((LoadError, "division by zero"), (LoadError, "division by zero")),
    ),
    "nothing fits": (
        *(restore_run, "restore_weights", nothing_fits),
        *((LoadError, "weights: failed"), (LoadError, "weights: failed")),
    ),
}


@pytest.mark.parametrize("what", ONE_FAILS)
@rank_0_reads
def test_the_others_do_not_wait_for_one_that_fails(tmp_path, what):
    module, name, replacement, *errors = ONE_FAILS[what]
    left("ddp", "llama", tmp_path)
    error, words = errors[RANK]
    with pytest.MonkeyPatch.context() as patch, resuming(tmp_path) as saver:
        if RANK == 1:
            patch.setattr(module, name, replacement)
        with pytest.raises(error, match=words):
            saver.resume("must")
    with resuming(tmp_path) as saver:
        assert saver.resume("must").step == 2
