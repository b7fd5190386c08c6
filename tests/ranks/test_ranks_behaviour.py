"""Two ranks, one fault: every rank raises, nobody hangs, nothing half-written is left."""

import contextlib
import json
import os
import random
import socket
import sys
import time
from pathlib import Path
from unittest.mock import patch

import models
import pytest
import torch
import torch.distributed as dist
from hub_server import serving_hub, using_hub
from on_ranks import RANK, on_ranks
from torch import nn
from tuning import buckets_of
from wrappers import fsdp2

import ft_ckpt.storage.io.writer
from ft_ckpt import CheckpointSaver, errors, latest, verify
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.ranks import current_ranks
from ft_ckpt.storage.places import open_place

BUCKET = 1 << 16  # the smallest: the wide model takes some hundred of them


def saver(**settings):
    return CheckpointSaver(**{"enter_timeout_seconds": 30, **settings})


def raised(kind, action, *said):
    """`action()` must raise `kind`, saying all of `said`."""
    with pytest.raises(kind) as caught:
        action()
    missing = [text for text in said if text not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def nothing_in(folder):
    dist.barrier()  # rank 0 may still be clearing up when the others have raised
    found = list(folder.iterdir())
    dist.barrier()  # and its next save already under way when they look
    assert not found


@contextlib.contextmanager
def failing_writer(action):
    """On rank 0, `action()` runs before the tenth write of a save."""
    original, calls = ft_ckpt.storage.io.writer.FileWriter.put_region, []

    def put_region(self, *args):
        calls.append(1)
        if len(calls) == 10 and RANK == 0:
            action()
        original(self, *args)

    ft_ckpt.storage.io.writer.FileWriter.put_region = put_region
    try:
        yield
    finally:
        ft_ckpt.storage.io.writer.FileWriter.put_region = original
    assert RANK or len(calls) >= 10, f"only {len(calls)} writes: the fault was never there"


def broken_disk():
    raise OSError(5, "the disk has gone")


@on_ranks(2, alone=True)
@buckets_of(BUCKET)
def test_an_error_names_the_node_if_there_are_several(tmp_path):
    """A disk that one client cannot reach: the message does not say on which of 64 nodes."""
    model = models.build("llama")
    with patch.object(socket, "gethostname", lambda: f"node-{RANK}"), failing_writer(broken_disk):
        raised(
            errors.TargetError if RANK == 0 else errors.RankError,
            lambda: saver().save(model, tmp_path / "out"),
            "out: cannot be written",
            "(on node-0)",
        )
    nothing_in(tmp_path)


@on_ranks(2, alone=True)
def test_the_first_error_of_a_launch_names_the_node(tmp_path):
    """Rank 0 fails before rank 1 has made its first call, and does not know its host yet."""
    model = models.build("llama")
    time.sleep(0.3 * RANK)
    with patch.object(socket, "gethostname", lambda: f"node-{RANK}"):
        raised(
            errors.SelectionError,
            lambda: saver().save(model, tmp_path / "out", attribute="absent"),
            "absent",
            f"(on node-{RANK})",
        )


@on_ranks(2)
def test_what_follows_a_save_in_the_background_may_take_long(tmp_path):
    """Rank 0 prunes or uploads for longer than ranks wait for one that is absent."""
    slow = saver(
        directory=tmp_path,
        background=True,
        enter_timeout_seconds=4,  # signs of life come each second
        on_saved=lambda report: time.sleep(8),
    )
    with slow:
        for step in (1, 2):
            slow.save(models.build("llama"), step=step)
    dist.barrier()
    assert verify(tmp_path / "checkpoint-2").ok


@on_ranks(2)
@buckets_of(BUCKET)
def test_different_arguments_are_an_error_on_every_rank(tmp_path):
    """Ranks disagree about what to save, and hang."""
    model = models.build("llama")
    raised(
        errors.RanksDisagreeError,
        lambda: saver().save(model, tmp_path / "a", step=RANK),
        "step",
        "rank(s) 1",
    )
    other = tmp_path / f"rank{RANK}"
    raised(errors.RanksDisagreeError, lambda: saver().save(model, other), "path", "rank(s) 1")
    parts = models.build("policy_and_value")
    attribute = ("policy", "value_head")[RANK]
    raised(
        errors.RanksDisagreeError,
        lambda: saver().save(parts, tmp_path / "b", attribute=attribute),
        "rank(s) 0 alone",
    )
    nothing_in(tmp_path)


@on_ranks(2)
@buckets_of(BUCKET)
def test_one_rank_pushes_and_calls_what_follows_a_save(tmp_path):
    """Only rank 0 calls functions of the script and pushes; the others continue."""
    for background in (False, True):
        seen = []
        with (
            serving_hub() as hub,
            using_hub(hub),
            saver(on_saved=seen.append, background=background) as made,
        ):
            target = tmp_path / f"background-{background}"
            answer = made.save(fsdp2(models.build("llama")), target, push_to_hub="user/model")
            report = answer.result() if background else answer
        assert [each.path for each in seen] == [target] * (RANK == 0)
        assert (report.push is not None) == (RANK == 0)
        assert ("user/model" in hub.repositories) == (RANK == 0)
        assert RANK or report.push.result().is_new
        dist.barrier()


@on_ranks(2)
@buckets_of(BUCKET)
def test_error_on_one_rank_reaches_the_others(tmp_path):
    """The rank that erred raises its own error, the others name it."""
    model = models.build("policy_and_value")
    attribute = ("policy", "critic")[RANK]
    kind = (errors.RankError, errors.UnknownAttributeError)[RANK]
    raised(kind, lambda: saver().save(model, tmp_path / "out", attribute=attribute), "critic")
    nothing_in(tmp_path)


@on_ranks(2)
@buckets_of(BUCKET)
def test_a_session_taken_over_is_an_error_on_every_rank(tmp_path):
    """Rank 0 alone asks the writers for their parts: if it cannot, the others must not wait for
    it.
    """
    model = models.build("partly_frozen")
    made = saver(directory=tmp_path)
    made.register(
        model=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
    )
    made.invite("replay")
    file = tmp_path / ".ft_ckpt-writers" / "session.json"
    if RANK == 0:
        file.write_text(json.dumps({**json.loads(file.read_text()), "token": "of another trainer"}))
    dist.barrier()
    made.step(step=1)
    begun = time.monotonic()
    raised((errors.WriterError, errors.RankError)[RANK], made.save_state, "trains this run")
    assert time.monotonic() - begun < 10
    assert not list(tmp_path.glob("checkpoint-*"))


@on_ranks(2)
@buckets_of(BUCKET)
def test_failed_write_leaves_the_older_checkpoint_and_latest(tmp_path):
    """Rank 0 fails while rank 1 sends: rank 1 must stop sending, and the previous checkpoint must
    stay whole.
    """
    for name, model in {
        "replicated": models.build("wide"),
        "sharded": fsdp2(models.build("wide")),
    }.items():
        root = tmp_path / name
        saver(directory=root).save(model, step=1)
        saver(directory=root).save(model, step=2)
        for step in (2, 3):
            fails_to_write(model, root, step)
            dist.barrier()  # rank 0 may still be clearing up when the others have raised
            assert latest(root) == root / "checkpoint-2"
            assert verify(root / "checkpoint-2").ok
            found = sorted(path.name for path in root.glob("[!.]*"))
            dist.barrier()  # and its next save already under way when they look
            assert found == ["checkpoint-1", "checkpoint-2"]
        saver(directory=root).save(model, step=3)
        assert latest(root) == root / "checkpoint-3"


def fails_to_write(model, root, step):
    kind = (OSError, errors.RankError)[RANK]
    with failing_writer(broken_disk):
        raised(kind, lambda: saver(directory=root).save(model, step=step), "the disk has gone")


@on_ranks(2)
@buckets_of(BUCKET)
def test_every_file_has_one_writer(tmp_path):
    """Only rank 0 opens files for writing, and puts them in place."""
    opened = set()

    def watch(event, args):
        if (
            event == "open"
            and isinstance(args[0], (str, os.PathLike))
            and str(tmp_path) in str(args[0])
        ):
            writes = (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            opened.update([Path(args[0]).name] if writes else [])
        if event == "os.rename" and str(tmp_path) in str(args[1]):
            opened.add(Path(args[1]).name)

    sys.addaudithook(watch)
    for name, model in {
        "replicated": models.build("llama"),
        "sharded": fsdp2(models.build("lora")),
    }.items():
        saver(tokenizer=models.tokenizer()).save(model, tmp_path / name, adapter_only=False)
    everybody = [None, None]
    dist.all_gather_object(everybody, sorted(opened))
    wanted = {
        "model.safetensors",
        "config.json",
        "adapter_model.safetensors",
        "tokenizer_config.json",
    }
    assert wanted <= set(everybody[0]), everybody
    assert not everybody[1], everybody[1]


@pytest.mark.slow
@on_ranks(2)
@buckets_of(BUCKET)
def test_a_hundred_overwriting_saves(tmp_path):
    """A hundred saves over one another, with the ranks out of step: each one is whole when `save`
    returns.
    """
    model, dice = nn.Linear(5, 3), random.Random(RANK)
    keeper = saver()
    for step in range(100):
        with torch.no_grad():
            model.weight.fill_(step)
        time.sleep(dice.random() * 0.005)
        keeper.save(model, tmp_path / "only", step=step)
        assert read_manifest(open_place(tmp_path / "only")).step == step
    assert verify(tmp_path / "only").ok
    assert [path.name for path in tmp_path.iterdir()] == ["only"]


@pytest.mark.slow
@on_ranks(2)
@buckets_of(BUCKET)
def test_the_store_of_the_launch_does_not_fill_up(tmp_path):
    """Each rank deletes its keys from the store, those of a gather with many buckets included."""
    live, keeper, keys = fsdp2(models.build("wide")), saver(each_rank_writes="off"), []
    for step in range(6):
        keeper.save(live.model, tmp_path / "only", step=step)
        dist.barrier()
        keys.append(current_ranks().store.num_keys())
        dist.barrier()
    assert max(keys[1:]) - min(keys[1:]) <= 4, keys
    with pytest.raises((errors.RankError, errors.SelectionError)):
        keeper.save(live.model, tmp_path / "only", attribute="nothing" if RANK else None)
    dist.barrier()
    keeper.save(live.model, tmp_path / "only", step=step)
    dist.barrier()
    assert current_ranks().store.num_keys() <= keys[-1] + 6
    dist.barrier()


@pytest.mark.slow
@on_ranks(2)
@buckets_of(BUCKET)
def test_answers_larger_than_a_value_of_the_store(tmp_path):
    """Messages of ranks may be larger than one value of the store, and are deleted from it as
    well.
    """
    ranks, keys = current_ranks(), []
    for _ in range(4):
        told = {"text": "ä" * (3 << 20), "rank": RANK}  # six characters each in JSON
        agreed = ranks.agree("large answers", told, decide=list)
        for answers in (agreed.result, agreed.values or agreed.result):
            assert [answer["rank"] for answer in answers] == [0, 1]
            assert all(answer["text"] == told["text"] for answer in answers)
        ranks.agree("a small one")
        dist.barrier()
        keys.append(ranks.store.num_keys())
        dist.barrier()
    assert max(keys[1:]) == min(keys[1:]), keys


@on_ranks(2, group_seconds=3)
@buckets_of(BUCKET)
def test_slow_disk_outlasts_the_group_timeout(tmp_path):
    """The disk stalls for longer than the timeout of the process group."""
    for name, model in {
        "replicated": models.build("wide"),
        "sharded": fsdp2(models.build("wide")),
    }.items():
        with failing_writer(lambda: time.sleep(6)):
            saver().save(model, tmp_path / name)
        assert verify(tmp_path / name).ok
        dist.barrier()  # the group is still good


@pytest.mark.parametrize("rank", [0, 1])
@on_ranks(2, alone=True)
def test_save_called_on_one_rank_only(tmp_path, rank):
    """`if is_main_process: save(...)` hangs until the timeout."""
    if rank == RANK:
        eager = saver(enter_timeout_seconds=2)
        model = models.build("llama")
        raised(
            errors.RanksDisagreeError,
            lambda: eager.save(model, tmp_path / "out"),
            f"rank(s) {1 - rank} did not",
        )
        assert not list(tmp_path.iterdir())
    else:
        time.sleep(3)
