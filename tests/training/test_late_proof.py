"""Digests of tensor files are compared while a run is resumed: each byte is read once, and nothing damaged stays."""

import os
from collections import Counter
from pathlib import Path

import models
import pytest
import torch
from launch import run_cases, selected

from ft_ckpt import CheckpointSaver
from ft_ckpt.errors import CheckpointError, CorruptError, LoadError, UnreadableError
from ft_ckpt.training import resume

FORMATS = ["safetensors", "h5", "dual"]
TWO_RANKS = [
    "damaged/ddp/llama",
    "damaged/fsdp2/llama",
    "damaged/fsdp1/lora",
    "seen/ddp/llama",
    "unread/ddp/llama",
    "unread/fsdp2/llama",
    "counted/fsdp2/wide",
    "counted/fsdp1/wide",
]


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
    moments = {f"{n}/{key}": value.clone() for n, one in state.items() for key, value in one.items()}
    return {name: tensor.clone() for name, tensor in model.state_dict().items()} | moments


def is_same(expected, found):
    return expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("format_name", FORMATS)
def test_every_byte_is_read_once(tmp_path, monkeypatch, format_name):
    def begin_large(folder):
        model = torch.nn.Sequential(torch.nn.Linear(700, 700), torch.nn.Linear(700, 1))
        saver = CheckpointSaver(None, folder, format=format_name)
        saver.register(model=model, optimizer=torch.optim.AdamW(model.parameters()))
        return model, saver

    model, saver = begin_large(tmp_path)
    model(torch.ones(1, 700)).sum().backward()
    saver._run.registered["optimizer"].step()
    path = saver.save_state(path=tmp_path / "checkpoint-1").path
    fresh, saver = begin_large(tmp_path)
    read = Counter()
    real = os.preadv

    def counted(descriptor, buffers, offset, *flags):
        count = real(descriptor, buffers, offset, *flags)
        read[os.fstat(descriptor).st_ino] += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    saver.resume("must")
    assert is_same(model.state_dict(), fresh.state_dict())
    sizes = {file.stat().st_ino: file.stat().st_size for file in path.rglob("*") if file.stat().st_size > 1_000_000}
    assert len(sizes) == 2
    for number, size_bytes in sizes.items():
        assert size_bytes <= read[number] < 1.1 * size_bytes


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
    with pytest.warns(UserWarning, match=rf"checkpoint-2: .*{path.name}: .*its bytes have changed; damaged, trying an"):
        progress = saver.resume()
    assert (progress.resumed_from.name, progress.report.problems) == ("checkpoint-1", ())
    assert is_same(expected, tensors_of(model, optimizer))
    assert len(saver._run.registered["listener"].heard) == 1, "an object was given something of a damaged checkpoint"
    train(model, optimizer, saver, 1)
    assert saver.save_state().path == tmp_path / "checkpoint-2"


def test_a_disk_that_cannot_be_read_on(tmp_path, monkeypatch):
    expected = two_checkpoints(tmp_path)[0]
    bad = (tmp_path / "checkpoint-2" / "model.safetensors").stat()
    real = os.preadv

    def broken(descriptor, buffers, offset, *flags):
        if os.fstat(descriptor).st_ino == bad.st_ino and offset + sum(map(len, buffers)) > bad.st_size // 2:
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", broken)
    model, optimizer, saver = begin(tmp_path)
    with pytest.raises(UnreadableError, match=r"model.safetensors: .*Input/output error.*whole one is .*checkpoint-1"):
        saver.resume()
    assert saver.resume("checkpoint-1").resumed_from.name == "checkpoint-1"
    assert is_same(expected, tensors_of(model, optimizer))


def test_a_file_that_has_grown_since_it_was_opened(tmp_path, monkeypatch):
    expected, real = two_checkpoints(tmp_path)[0], resume.restore_weights
    path = tmp_path / "checkpoint-2" / "model.safetensors"
    content = path.read_bytes()

    def grown(*given):
        path.write_bytes(content + b"more")
        return real(*given)

    monkeypatch.setattr(resume, "restore_weights", grown)
    model, optimizer, saver = begin(tmp_path)
    with pytest.warns(UserWarning, match=r"model.safetensors: .*overwritten: .*trying an older one"):
        assert saver.resume().resumed_from.name == "checkpoint-1"
    assert is_same(expected, tensors_of(model, optimizer))


def test_nothing_is_trained_or_saved_that_is_half_restored(tmp_path):
    two_checkpoints(tmp_path)
    flip(tmp_path / "checkpoint-2" / "model.safetensors", -1)
    model, optimizer, saver = begin(tmp_path)
    with pytest.raises(CorruptError, match=r"newest whole one is .*checkpoint-1; the model was partly overwritten"):
        saver.resume("must")
    refused = (
        lambda: train(model, optimizer, saver, 1),
        lambda: saver.save_state(),
        lambda: saver.save(model, tmp_path / "weights"),
        lambda: next(saver.remaining([1, 2])),
    )
    for action in refused:
        with pytest.raises(LoadError, match=r"the last resume.. failed after it had overwritten parts of the model"):
            action()
    assert saver.resume("checkpoint-1").step == 1
    train(model, optimizer, saver, 1)
    saver.save(model, tmp_path / "weights")


def test_where_none_is_whole(tmp_path):
    two_checkpoints(tmp_path)
    for number in (1, 2):
        flip(tmp_path / f"checkpoint-{number}" / "model.safetensors", -1)
    _, _, saver = begin(tmp_path)
    with (
        pytest.warns(UserWarning, match="trying an older one"),
        pytest.raises(CorruptError, match=r"none of its 2 checkpoints is whole.*the model was partly overwritten"),
    ):
        saver.resume()


def test_what_a_run_has_been_trained_to_is_not_put_at_stake(tmp_path):
    two_checkpoints(tmp_path)
    model, optimizer, saver = begin(tmp_path)
    saver.resume("must")
    train(model, optimizer, saver, 1)
    before = tensors_of(model, optimizer)
    flip(tmp_path / "checkpoint-1" / "state" / "training.safetensors", -1)
    with pytest.raises(CorruptError, match="its bytes have changed") as told:
        saver.resume("checkpoint-1")
    assert "overwritten" not in str(told.value)
    assert is_same(before, tensors_of(model, optimizer))
    train(model, optimizer, saver, 1)
    assert saver.save_state().path == tmp_path / "checkpoint-4"


@pytest.fixture(scope="module")
def two(request, tmp_path_factory):
    return run_cases("resume", selected(request, TWO_RANKS), tmp_path_factory.mktemp("two"))


@pytest.mark.sample("damaged/fsdp2/llama", "unread/fsdp2/llama")
@pytest.mark.parametrize("case", TWO_RANKS)
def test_ranks_share_the_work_and_the_outcome(two, case):
    assert two[case] == ""


def lora_run(folder):
    model = models.build("lora")
    saver = CheckpointSaver(None, folder, on_difference="ignore")
    saver.register(model=model, optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    return model, saver


def frozen_of(model):
    return {name: parameter.clone() for name, parameter in model.named_parameters() if not parameter.requires_grad}


def damaged_base_beside_adapters(folder):
    """A run whose last checkpoint alone holds the base, with a bit of it flipped that no sample looks at."""
    model, saver = lora_run(folder)
    train(model, saver._run.registered["optimizer"], saver, 1)
    saver.save_state()
    train(model, saver._run.registered["optimizer"], saver, 1)
    path = saver.save_state(adapter_only=False).path
    saver.close()
    flip(path / "model.safetensors", (path / "model.safetensors").stat().st_size * 2 // 3)
    return frozen_of(model)


def test_a_base_that_the_older_checkpoint_lacks_is_not_put_at_stake(tmp_path):
    expected = damaged_base_beside_adapters(tmp_path)
    model, saver = lora_run(tmp_path)
    with pytest.warns(UserWarning, match="damaged, trying an older one"):
        assert saver.resume().resumed_from.name == "checkpoint-1"
    assert is_same(expected, frozen_of(model))


def test_what_failed_resumes_have_overwritten_is_not_left_standing(tmp_path):
    damaged_base_beside_adapters(tmp_path / "mixed")
    os.renames(tmp_path / "mixed" / "checkpoint-2", tmp_path / "alone" / "checkpoint-2")
    _, saver = lora_run(tmp_path / "mixed")
    with pytest.raises(CorruptError, match="partly overwritten"):
        saver.resume(tmp_path / "alone" / "checkpoint-2")
    with pytest.raises(LoadError, match=r"checkpoint-1: has no .*embed_tokens.*, which a failed resume has over"):
        saver.resume()
    with pytest.raises(LoadError, match=r"the last resume.. failed"):
        saver.save_state()


def test_what_may_be_absent_keeps_nothing_of_a_damaged_checkpoint(tmp_path):
    model, _, saver = begin(tmp_path, seed=0)
    saver.save_state(path=tmp_path / "checkpoint-1")
    saver.register(average=torch.optim.swa_utils.AveragedModel(model))
    saver._run.step = 2
    path = saver.save_state().path
    flip(path / "state" / "training.safetensors", -1)
    model, _, saver = begin(tmp_path)
    average = torch.optim.swa_utils.AveragedModel(model)
    before = {name: tensor.clone() for name, tensor in average.state_dict().items()}
    with pytest.warns(UserWarning, match="damaged, trying an older one"):
        progress = saver.resume(allow=["average"], average=average)
    assert progress.resumed_from.name == "checkpoint-1"
    assert is_same(before, average.state_dict())


def test_all_of_a_failure_is_told_at_once(tmp_path):
    """Two damaged files, and both are named."""
    two_checkpoints(tmp_path)
    for file in ("model.safetensors", "state/training.safetensors"):
        flip(tmp_path / "checkpoint-2" / file, -1)
    _, _, saver = begin(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)model.safetensors: digest.*training.safetensors: digest"):
        saver.resume("checkpoint-2")
