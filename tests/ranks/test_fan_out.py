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
from ft_ckpt.ranks import broadcast
from ft_ckpt.runs.resume import match_run, restore_run
from ft_ckpt.runs.state import Restored
from ft_ckpt.storage import prefetch as reading

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


@rank_0_reads
def test_rank_0_fails_while_it_reads_for_all(tmp_path):
    """Rank 0 fails in the middle of reading: every rank reports it, at once."""
    left("ddp", "llama", tmp_path)
    if RANK == 0:
        real = reading.read_ahead

        def broken(runs, *options):
            for number, part in enumerate(real(runs, *options)):
                if number == 7:
                    raise OSError(5, "the disk is gone")
                yield part

        broadcast.read_ahead = broken
    fresh = live_model("ddp", "llama", seed=1)
    with saver_of(fresh, tmp_path, fan_out="broadcast") as saver:
        progress = saver.resume("must", allow=True)
        first = {item.name: item for item in progress.report.items}["weights"]
        assert first.status == "failed"
        assert "the disk is gone" in first.detail, first


@rank_0_reads
def test_tensors_of_one_rank_do_not_fit(tmp_path):
    """One rank's tensors do not fit: the others do not wait for it in a broadcast."""
    left("ddp", "llama", tmp_path)
    fresh = live_model("ddp", "llama", seed=1)
    real = broadcast.check_all
    if RANK == 1:
        broadcast.check_all = lambda wanted: real([replace(one, name="nowhere") for one in wanted])
    with (
        saver_of(fresh, tmp_path, fan_out="broadcast") as saver,
        pytest.raises(LoadError, match="nowhere: not in the"),
    ):
        saver.resume("must")
    broadcast.check_all = real


@rank_0_reads
def test_one_rank_fails_before_it_reads(tmp_path):
    """One rank fails before it reads anything: the others learn of it before their timeout."""
    left("ddp", "llama", tmp_path)
    fresh = live_model("ddp", "llama", seed=1)
    real = match_run.items_in_saved_order
    if RANK == 1:
        match_run.items_in_saved_order = lambda *_: 1 / 0
    kind, words = (
        (RankError, "rank 1.*division by zero") if RANK == 0 else (ZeroDivisionError, "division")
    )
    with saver_of(fresh, tmp_path, fan_out="broadcast") as saver, pytest.raises(kind, match=words):
        saver.resume("must")
    match_run.items_in_saved_order = real
    goes_on(fresh, tmp_path)


@rank_0_reads
def test_one_rank_has_no_memory_for_its_bucket(tmp_path):
    """One rank has no memory for its bucket: nobody enters the broadcast."""
    left("ddp", "llama", tmp_path)
    fresh = live_model("ddp", "llama", seed=1)
    real = broadcast.wire_device
    broadcast.wire_device = lambda: real() if RANK == 0 else 1 / 0
    with (
        saver_of(fresh, tmp_path, fan_out="broadcast") as saver,
        pytest.raises(LoadError, match="division by zero"),
    ):
        saver.resume("must")
    broadcast.wire_device = real
    goes_on(fresh, tmp_path)


@rank_0_reads
def test_one_rank_does_not_take_part_in_the_reading(tmp_path):
    """One rank finds that nothing fits and does not take part in the reading: the others notice."""
    left("ddp", "llama", tmp_path)
    fresh = live_model("ddp", "llama", seed=1)
    real = restore_run.restore_weights
    if RANK == 1:
        restore_run.restore_weights = lambda *_: Restored("weights", "failed", "not of this model")
    with (
        saver_of(fresh, tmp_path, fan_out="broadcast") as saver,
        pytest.raises(LoadError, match="weights: failed"),
    ):
        saver.resume("must")
    restore_run.restore_weights = real
    goes_on(fresh, tmp_path)


def goes_on(live, folder):
    """Check that the ranks are in step again."""
    with saver_of(live, folder, fan_out="broadcast") as saver:
        assert saver.resume("must").step == 2
