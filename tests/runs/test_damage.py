"""A resume compares all files before it overwrites anything: a damaged checkpoint gives way to an
older one.
"""

import os
import warnings
from pathlib import Path

import models
import pytest
import torch
import torch.distributed as dist
from exact_runs import live_model, optimizer_state, same, saver_of, train as train_on_ranks
from on_ranks import RANK, on_ranks
from wrappers import truth

from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import CheckpointError, CorruptError, UnreadableError


class Listener:
    """An object of the user's that notes what it is given."""

    def __init__(self):
        self.heard = []

    def state_dict(self):
        return {"seen": torch.arange(5.0)}

    def load_state_dict(self, state):
        self.heard.append(state["seen"])


def begin(folder, seed=1, **settings):
    """A run that has not done a step, with an object of its own."""
    torch.manual_seed(seed)
    model = models.build("llama", seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saver = CheckpointSaver(None, folder, on_difference="ignore", **settings)
    saver.register(model=model, optimizer=optimizer, listener=Listener())
    return model, optimizer, saver


def train(model, optimizer, saver, steps):
    for step in range(steps):
        model(**models.batch(seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        saver.step()


def two_checkpoints(folder, **settings):
    """The tensors of the run, moments included, at checkpoint-1 and checkpoint-2."""
    model, optimizer, saver = begin(folder, seed=0, **settings)
    found = []
    for _ in range(2):
        train(model, optimizer, saver, 1)
        saver.save_state()
        found.append(tensors_of(model, optimizer))
    saver.close()
    return found


def tensors_of(model, optimizer):
    state = optimizer.state_dict()["state"]
    moments = {
        f"{n}/{key}": value.clone() for n, one in state.items() for key, value in one.items()
    }
    return {name: tensor.clone() for name, tensor in model.state_dict().items()} | moments


def is_same(expected, found):
    return expected.keys() == found.keys() and all(
        torch.equal(expected[name], found[name]) for name in expected
    )


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


PLACES = {"first byte of a tensor": 0.1, "middle": 0.5, "last byte": 1}


@pytest.mark.sample(4)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("file", ["model.safetensors", "state/training.safetensors"])
@pytest.mark.parametrize("compressed", [False, True])
def test_an_older_one_takes_the_place_of_a_damaged_one(tmp_path, file, place, compressed):
    settings = {"format": "h5", "compression": "gzip"} if compressed else {}
    if compressed:
        file = file.replace(".safetensors", ".h5")
    expected = two_checkpoints(tmp_path, **settings)[0]
    path = tmp_path / "checkpoint-2" / file
    if not path.exists():
        path = next((tmp_path / "checkpoint-2" / Path(file).parent).glob("training.*s*"))
    flip(path, min(int(place * path.stat().st_size), path.stat().st_size - 1))
    model, optimizer, saver = begin(tmp_path)
    with pytest.warns(
        UserWarning,
        match=rf"checkpoint-2: .*{path.name}: .*its bytes have changed; damaged, trying an",
    ):
        progress = saver.resume()
    assert (progress.resumed_from.name, progress.report.problems) == ("checkpoint-1", ())
    assert is_same(expected, tensors_of(model, optimizer))
    assert len(saver._run.objects.registered["listener"].heard) == 1, (
        "an object was given something of a damaged checkpoint"
    )
    train(model, optimizer, saver, 1)
    assert saver.save_state().path == tmp_path / "checkpoint-2"


def test_a_disk_that_cannot_be_read_on(tmp_path, monkeypatch):
    expected = two_checkpoints(tmp_path)[0]
    bad = (tmp_path / "checkpoint-2" / "model.safetensors").stat()
    real = os.preadv

    def broken(descriptor, buffers, offset, *flags):
        if (
            os.fstat(descriptor).st_ino == bad.st_ino
            and offset + sum(map(len, buffers)) > bad.st_size // 2
        ):
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", broken)
    model, optimizer, saver = begin(tmp_path)
    with pytest.raises(
        UnreadableError,
        match=r"model.safetensors: .*Input/output error.*whole one is .*checkpoint-1",
    ):
        saver.resume()
    assert saver.resume("checkpoint-1").resumed_from.name == "checkpoint-1"
    assert is_same(expected, tensors_of(model, optimizer))


def test_where_none_is_whole(tmp_path):
    two_checkpoints(tmp_path)
    for number in (1, 2):
        flip(tmp_path / f"checkpoint-{number}" / "model.safetensors", -1)
    model, optimizer, saver = begin(tmp_path)
    before = tensors_of(model, optimizer)
    with (
        pytest.warns(UserWarning, match="trying an older one"),
        pytest.raises(CorruptError, match=r"none of its 2 checkpoints is whole"),
    ):
        saver.resume()
    assert is_same(before, tensors_of(model, optimizer))


@pytest.mark.parametrize("allow", [False, True])
def test_a_damaged_checkpoint_overwrites_nothing(tmp_path, allow):
    """Neither a new run nor one that has been trained; both go on from where they are."""
    two_checkpoints(tmp_path)
    model, optimizer, saver = begin(tmp_path)
    if allow:
        saver.resume("must")
    flip(tmp_path / "checkpoint-2" / "state" / "training.safetensors", -1)
    before = tensors_of(model, optimizer)
    with pytest.raises(
        CorruptError, match=r"its bytes have changed; the newest whole one is .*checkpoint-1"
    ):
        saver.resume("must", allow=allow)
    assert is_same(before, tensors_of(model, optimizer))
    assert len(saver._run.objects.registered["listener"].heard) == int(allow)
    saver.resume("checkpoint-1")
    train(model, optimizer, saver, 1)


def test_a_large_file_is_compared_before_it_is_used(tmp_path):
    """Several steps of a mapping, of a file of 75 MB."""

    def run_of(value):
        model = torch.nn.Linear(6 << 10, 3 << 10)
        torch.nn.init.constant_(model.weight, value)
        saver = CheckpointSaver(None, tmp_path)
        saver.register(model=model)
        return model, saver

    model, saver = run_of(1.0)
    path = saver.save_state(path=tmp_path / "checkpoint-1").path
    flip(path / "model.safetensors", 40 << 20)
    fresh, saver = run_of(2.0)
    with pytest.raises(CorruptError, match=r"model\.safetensors: digest"):
        saver.resume("must")
    assert fresh.weight.eq(2.0).all()
    flip(path / "model.safetensors", 40 << 20)
    saver.resume("must")
    assert torch.equal(model.weight, fresh.weight)


@pytest.mark.sample("fsdp2-wide")
@pytest.mark.parametrize(
    ("wrapper", "model"), [("ddp", "llama"), ("fsdp2", "wide"), ("fsdp1", "lora")]
)
@on_ranks(2)
def test_ranks_share_the_work_and_the_outcome(tmp_path, wrapper, model):
    """Each file in turn is damaged, whichever rank is to compare it: all ranks take the older
    checkpoint.
    """
    live, run = live_model(wrapper, model), tmp_path / "run"
    found = []
    with saver_of(live, run, each_rank_writes="on") as saver:
        for step in range(2):
            train_on_ranks(live, saver, step, 1)
            saver.save_state()
            found.append((truth(live), optimizer_state(live)))
    files = sorted((run / "checkpoint-2").rglob("*.safetensors"))
    assert len(files) > 1, files
    for file in files:
        flip_on_rank_0(file)
        fresh = live_model(wrapper, model, seed=0 if model == "lora" else 1)
        with saver_of(fresh, run) as saver, warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            progress = saver.resume("auto")
            assert (progress.step, progress.report.problems) == (1, ()), progress
            assert RANK or any(file.name in str(one.message) for one in heard), heard
            same(found[0][0], truth(fresh))
            same(found[0][1], optimizer_state(fresh))
        flip_on_rank_0(file)
    fresh = live_model(wrapper, model, seed=0 if model == "lora" else 1)
    with saver_of(fresh, run) as saver:
        assert saver.resume("must").step == 2
        same(found[1][0], truth(fresh))


def flip_on_rank_0(file: Path) -> None:
    dist.barrier()
    if RANK == 0:
        flip(file, -1)
    dist.barrier()


def test_all_of_a_failure_is_told_at_once(tmp_path):
    """Two damaged files, and both are named."""
    two_checkpoints(tmp_path)
    for file in ("model.safetensors", "state/training.safetensors"):
        flip(tmp_path / "checkpoint-2" / file, -1)
    _, _, saver = begin(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"(?s)model.safetensors: digest.*training.safetensors: digest"
    ):
        saver.resume("checkpoint-2")
