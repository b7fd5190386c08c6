"""Weights and objects that are written to buckets: what is there is what a disk would have, or
nothing is.
"""

from contextlib import closing

import models
import pytest
import torch
from buckets import in_bucket, new_bucket

import ft_ckpt
from ft_ckpt import CheckpointSaver
from ft_ckpt.checkpoint.manifest import read_manifest
from ft_ckpt.cli import run_command
from ft_ckpt.errors import ConfigError, CorruptError, NameTakenError, SelectionError
from ft_ckpt.extensions.tools.converting import conversion as converting, open_source
from ft_ckpt.storage.places import open_place

STATE = {"w": torch.arange(300_000.0).view(3, -1), "n": [1, "two"]}


@pytest.fixture
def bucket():
    """The URL of an empty folder."""
    return new_bucket().url


@pytest.fixture
def saved(tmp_path):
    CheckpointSaver(max_shard_size="2MB", tokenizer=models.tokenizer()).save(
        models.build("wide"), tmp_path / "saved"
    )
    return tmp_path / "saved"


def contents(place):
    store = ft_ckpt.open_place(place).folder
    return {
        each.name: store.read(each.name) for each in store.list() if each.name != "ft_ckpt.json"
    }


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("x.h5", {}),
        ("x.h5", {"compression": "gzip"}),
        ("x.safetensors", {}),
        ("x.pt", {}),
        ("x", {"format": "dual"}),
    ],
    ids=str,
)
def test_an_object_is_saved_as_the_file_is(bucket, tmp_path, name, more):
    state = STATE if name != "x.safetensors" else {"w": STATE["w"]}
    ft_ckpt.save(state, f"{bucket}/{name}", **more)
    ft_ckpt.save(state, tmp_path / name, **more)
    store = ft_ckpt.open_place(bucket).folder
    assert [each.name for each in store.list()] == [name]
    assert name == "x.pt" or store.read(name) == (tmp_path / name).read_bytes()
    found = ft_ckpt.load(f"{bucket}/{name}", "cpu")
    assert torch.equal(found["w"], state["w"])


def test_a_save_that_fails_leaves_the_object_that_was_there(bucket):
    ft_ckpt.save(STATE, f"{bucket}/x.h5")
    with pytest.raises(SelectionError):
        ft_ckpt.save({"w": object()}, f"{bucket}/x.h5")
    assert ft_ckpt.load(f"{bucket}/x.h5", "cpu")["n"] == [1, "two"]
    with pytest.raises(ConfigError, match="a whole bucket"):
        ft_ckpt.save(STATE, "memory://whole", "h5")


@pytest.mark.parametrize("form", ["safetensors", "h5"])
def test_a_folder_is_converted_into_a_bucket(bucket, saved, tmp_path, form):
    far = ft_ckpt.convert(
        in_bucket(saved), f"{bucket}/out", format=form, verify=True, progress=False
    )
    ft_ckpt.convert(saved, tmp_path / "out", format=form, verify=True, progress=False)
    assert (far.path, far.format) == (f"{bucket}/out", form)
    near, there = contents(tmp_path / "out"), contents(f"{bucket}/out")
    assert near == there
    assert ft_ckpt.verify(f"{bucket}/out").ok
    assert read_manifest(open_place(f"{bucket}/out")).notes == ("converted from saved",)
    with pytest.raises(NameTakenError, match="exists already, and a bucket cannot"):
        ft_ckpt.convert(saved, f"{bucket}/out", format=form, progress=False)
    ft_ckpt.convert(
        saved, f"{bucket}/out", dtype="float16", format=form, overwrite=True, progress=False
    )
    assert ft_ckpt.verify(f"{bucket}/out").ok


def test_a_file_is_converted_into_a_bucket(bucket, saved, tmp_path):
    ft_ckpt.convert(saved, f"{bucket}/x.h5", verify=True, progress=False)
    ft_ckpt.convert(saved, tmp_path / "x.h5", progress=False)
    assert contents(bucket) == {"x.h5": (tmp_path / "x.h5").read_bytes()}


def test_a_copy_that_differs_is_taken_back(bucket, saved, monkeypatch):
    def differ(*_):
        raise CorruptError("differs")

    monkeypatch.setattr(converting, "check_copy", differ)
    for name in ("x.h5", "out"):
        with pytest.raises(CorruptError, match="differs"):
            ft_ckpt.convert(saved, f"{bucket}/{name}", verify=True, progress=False)
    assert contents(bucket) == {}


def test_averages_of_a_run_in_its_bucket(bucket, tmp_path):
    saver = CheckpointSaver(None, tmp_path / "run")
    model = torch.nn.Linear(2, 2)
    saver.register(model=model)
    for value in (1.0, 3.0):
        torch.nn.init.constant_(model.weight, value)
        saver.step()
        saver.save_state()
    run = in_bucket(tmp_path / "run")
    report = ft_ckpt.average([str(run)], f"{run}/averaged", last=2, progress=False)
    assert report.path == f"{run}/averaged"
    assert ft_ckpt.load_model(report.path, into=torch.nn.Linear(2, 2)).weight.unique().tolist() == [
        2.0
    ]
    assert ft_ckpt.latest(run) == f"{run}/checkpoint-2"
    assert read_manifest(open_place(report.path)).made_from == ("checkpoint-1", "checkpoint-2")


def test_commands_write_to_buckets(bucket, saved, capsys):
    source = in_bucket(saved)
    run_command(["convert", str(source), f"{bucket}/x.safetensors"])
    run_command(["average", str(source), str(source), f"{bucket}/mean"])
    said = capsys.readouterr().out
    assert f"{source} -> {bucket}/x.safetensors (safetensors): " in said
    with (
        closing(open_source(open_place(f"{bucket}/x.safetensors"))) as one,
        closing(open_source(open_place(f"{bucket}/mean"))) as other,
    ):
        assert one.specs.keys() == other.specs.keys()


def test_an_adapter_in_a_bucket_is_merged_into_a_base_in_one(bucket, tmp_path):
    base = models.build("llama")
    CheckpointSaver().save(base, tmp_path / "base")
    adapted = models.trained(models.lora(models.build("llama")), 1)
    CheckpointSaver().save(adapted, tmp_path / "adapter", adapter_only=True)
    near = ft_ckpt.merge(
        tmp_path / "adapter", tmp_path / "near", base=tmp_path / "base", progress=False
    )
    far = ft_ckpt.merge(
        in_bucket(tmp_path / "adapter"),
        f"{bucket}/far",
        base=str(in_bucket(tmp_path / "base")),
        progress=False,
    )
    assert near.tensors == far.tensors
    one, other = ft_ckpt.load_model(tmp_path / "near"), ft_ckpt.load_model(far.path)
    assert all(
        torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items()
    )
