"""How ranks fail together: each case is a fault on one rank, and its required effect on every rank."""

import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import harness  # first: it arms the stack dump
import models
import pytest
import torch
import torch.distributed as dist
from hub_server import serving_hub, using_hub
from torch import nn
from tuning import buckets_of
from wrappers import fsdp2

import ft_ckpt.storage.writer
from ft_ckpt import CheckpointSaver, errors, latest, verify
from ft_ckpt.checkpoint.catalog import read_manifest
from ft_ckpt.checkpoint.session import ROOM
from ft_ckpt.distributed.ranks import current_ranks

BUCKET = 1 << 16  # the smallest: the wide model takes some hundred of them


def saver(**settings: Any) -> CheckpointSaver:
    return CheckpointSaver(**{"enter_timeout_seconds": 30, **settings})


def raised(kind: type[Exception], action: Any, *said: str) -> None:
    """`action()` must raise `kind`, saying all of `said`."""
    with pytest.raises(kind) as caught:
        action()
    missing = [text for text in said if text not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@harness.named
def nothing_in(folder: Path) -> None:
    dist.barrier()  # rank 0 may still be clearing up when the others have raised
    found = list(folder.iterdir())
    dist.barrier()  # and its next save already under way when they look
    assert not found


@contextlib.contextmanager
def failing_writer(action: Any) -> Iterator[None]:
    """On rank 0, `action()` runs before the tenth write of a save."""
    original, calls = ft_ckpt.storage.writer.DurableFile.put_region, []

    def put_region(self: Any, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 10 and harness.RANK == 0:
            action()
        original(self, *args)

    ft_ckpt.storage.writer.DurableFile.put_region = put_region
    try:
        yield
    finally:
        ft_ckpt.storage.writer.DurableFile.put_region = original
    assert harness.RANK or len(calls) >= 10, f"only {len(calls)} writes: the fault was never there"


def broken_disk() -> None:
    raise OSError(5, "the disk has gone")


@harness.named
def different_arguments(folder: Path) -> None:
    model = models.build("llama")
    raised(errors.RanksDisagreeError, lambda: saver().save(model, folder / "a", step=harness.RANK), "step", "rank(s) 1")
    other = folder / f"rank{harness.RANK}"
    raised(errors.RanksDisagreeError, lambda: saver().save(model, other), "path", "rank(s) 1")
    parts = models.build("policy_and_value")
    attribute = ("policy", "value_head")[harness.RANK]
    raised(errors.RanksDisagreeError, lambda: saver().save(parts, folder / "b", attribute=attribute), "rank(s) 0 alone")
    nothing_in(folder)


@harness.named
def what_follows_a_save(folder: Path) -> None:
    """Only rank 0 calls functions of the script and pushes; the others continue."""
    for background in (False, True):
        seen: list[Any] = []
        with serving_hub() as hub, using_hub(hub), saver(on_saved=seen.append, background=background) as made:
            target = folder / f"background-{background}"
            answer = made.save(fsdp2(models.build("llama")), target, push_to_hub="user/model")
            report = answer.result() if background else answer
        assert [each.path for each in seen] == [target] * (harness.RANK == 0)
        assert (report.push is not None) == (harness.RANK == 0)
        assert ("user/model" in hub.repositories) == (harness.RANK == 0)
        assert harness.RANK or report.push.result().is_new
        dist.barrier()


@harness.named
def error_on_one_rank(folder: Path) -> None:
    """The rank that erred raises its own error, the others name it."""
    model = models.build("policy_and_value")
    attribute = ("policy", "critic")[harness.RANK]
    kind = (errors.RankError, errors.UnknownAttributeError)[harness.RANK]
    raised(kind, lambda: saver().save(model, folder / "out", attribute=attribute), "critic")
    nothing_in(folder)


@harness.named
def writers_taken_over(folder: Path) -> None:
    """Rank 0 alone asks the writers for their parts: if it cannot, the others must not wait for it."""
    model = models.build("partly_frozen")
    made = saver(directory=folder)
    made.register(model=model, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    made.invite("replay")
    file = folder / ROOM / "session.json"
    if harness.RANK == 0:
        file.write_text(json.dumps({**json.loads(file.read_text()), "token": "of another trainer"}))
    dist.barrier()
    made.step(step=1)
    begun = time.monotonic()
    raised((errors.WriterError, errors.RankError)[harness.RANK], made.save_state, "trains this run")
    assert time.monotonic() - begun < 10
    assert not list(folder.glob("checkpoint-*"))


@harness.named
def writer_raises(folder: Path) -> None:
    """Rank 0 fails while rank 1 sends: rank 1 must stop sending, and the previous checkpoint must stay whole."""
    for name, model in {"replicated": models.build("wide"), "sharded": fsdp2(models.build("wide"))}.items():
        root = folder / name
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


def fails_to_write(model: nn.Module, root: Path, step: int) -> None:
    kind = (OSError, errors.RankError)[harness.RANK]
    with failing_writer(broken_disk):
        raised(kind, lambda: saver(directory=root).save(model, step=step), "the disk has gone")


@harness.named
def one_writer(folder: Path) -> None:
    """Only rank 0 opens files for writing, and puts them in place."""
    opened: set[str] = set()

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, os.PathLike)) and str(folder) in str(args[0]):
            writes = (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            opened.update([Path(args[0]).name] if writes else [])
        if event == "os.rename" and str(folder) in str(args[1]):
            opened.add(Path(args[1]).name)

    sys.addaudithook(watch)
    for name, model in {"replicated": models.build("llama"), "sharded": fsdp2(models.build("lora"))}.items():
        saver(tokenizer=models.tokenizer()).save(model, folder / name, adapter_only=False)
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, sorted(opened))
    wanted = {"model.safetensors", "config.json", "adapter_model.safetensors", "tokenizer_config.json"}
    assert wanted <= set(everybody[0]), everybody
    assert not everybody[1], everybody[1]


@harness.named
def overwriting(folder: Path) -> None:
    """A hundred saves over one another, with the ranks out of step: each one is whole when `save` returns."""
    model, dice = nn.Linear(5, 3), random.Random(harness.RANK)
    keeper = saver()
    for step in range(100):
        with torch.no_grad():
            model.weight.fill_(step)
        time.sleep(dice.random() * 0.005)
        keeper.save(model, folder / "only", step=step)
        assert read_manifest(folder / "only").step == step
    assert verify(folder / "only").ok
    assert [path.name for path in folder.iterdir()] == ["only"]


@harness.named
def nothing_piles_up(folder: Path) -> None:
    """Each rank deletes its keys from the store, those of a gather with many buckets included."""
    live, keeper, keys = fsdp2(models.build("wide")), saver(each_rank_writes="off"), []
    for step in range(6):
        keeper.save(live.model, folder / "only", step=step)
        dist.barrier()
        keys.append(current_ranks().store.num_keys())
        dist.barrier()
    assert max(keys[1:]) - min(keys[1:]) <= 4, keys
    with pytest.raises((errors.RankError, errors.SelectionError)):
        keeper.save(live.model, folder / "only", attribute="nothing" if harness.RANK else None)
    dist.barrier()
    keeper.save(live.model, folder / "only", step=step)
    dist.barrier()
    assert current_ranks().store.num_keys() <= keys[-1] + 6
    dist.barrier()


@harness.named
def large_answers(folder: Path) -> None:
    """Messages of ranks may be larger than one value of the store, and are deleted from it as well."""
    ranks, keys = current_ranks(), []
    for _ in range(4):
        told = {"text": "ä" * (3 << 20), "rank": harness.RANK}  # six characters each in JSON
        agreed = ranks.agree("large answers", told, decide=list)
        for answers in (agreed.result, agreed.values or agreed.result):
            assert [answer["rank"] for answer in answers] == [0, 1]
            assert all(answer["text"] == told["text"] for answer in answers)
        ranks.agree("a small one")
        dist.barrier()
        keys.append(ranks.store.num_keys())
        dist.barrier()
    assert max(keys[1:]) == min(keys[1:]), keys


@harness.named
def slow_writer(folder: Path) -> None:
    """The disk stalls for longer than the timeout of the process group."""
    for name, model in {"replicated": models.build("wide"), "sharded": fsdp2(models.build("wide"))}.items():
        with failing_writer(lambda: time.sleep(6)):
            saver().save(model, folder / name)
        assert verify(folder / name).ok
        dist.barrier()  # the group is still good


@harness.named
def only_rank_0(folder: Path) -> None:
    _only(0, folder)


@harness.named
def only_rank_1(folder: Path) -> None:
    _only(1, folder)


def _only(rank: int, folder: Path) -> None:
    if rank == harness.RANK:
        eager = saver(enter_timeout_seconds=2)
        model = models.build("llama")
        raised(errors.RanksDisagreeError, lambda: eager.save(model, folder / "out"), f"rank(s) {1 - rank} did not")
        assert not list(folder.iterdir())
    else:
        time.sleep(3)


def case(name: str, folder: Path) -> None:
    harness.NAMED[name](folder)


if __name__ == "__main__":
    seconds = 3 if "slow_writer" in sys.argv else 60
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    with buckets_of(BUCKET):
        harness.run(case)
