"""A save writes through the seam of stores alone: into a bucket as into a folder, the same
files.
"""

from dataclasses import replace

import models
import pytest
import torch
from buckets import new_bucket

from ft_ckpt import CheckpointSaver, load_model
from ft_ckpt.checkpoint.checks import checkpoint_problems
from ft_ckpt.checkpoint.commit import object_staging
from ft_ckpt.checkpoint.leases import pin, unpin
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, load_manifest
from ft_ckpt.errors import NameTakenError, NoSpaceError
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place

SETTINGS = {
    "safetensors": {},
    "shards": {"max_shard_size": "2MB"},
    "h5": {"format": "h5"},
    "dual": {"format": "dual"},
    "compressed": {"format": "h5", "compression": "gzip"},
    "background": {"background": True},
}


@pytest.fixture
def bucket():
    """The run's folder in a bucket."""
    return new_bucket().within("runs/sft")


def save_into(bucket, model, steps=(1,), **settings):
    """Save to the run's folder in the bucket, under the names of steps."""
    with CheckpointSaver(None, Place(bucket), **settings) as saver:
        for step in steps:
            saver.save(model, step=step, extra_files={"notes/one.txt": "of the caller"})
        return saver.wait()


def without_versions(manifest):
    return tuple(replace(file, etag=None) for file in manifest.files)


@pytest.mark.parametrize("way", SETTINGS)
def test_files_are_those_of_a_folder(bucket, tmp_path, way):
    model = models.build("wide")
    save_into(bucket, model, **SETTINGS[way])
    with CheckpointSaver(None, tmp_path / "run", **SETTINGS[way]) as saver:
        saver.save(model, step=1, extra_files={"notes/one.txt": "of the caller"})
    there, here = bucket.within("checkpoint-1"), LocalStore(tmp_path / "run" / "checkpoint-1")
    manifest = load_manifest(there)
    assert list(checkpoint_problems(there, manifest, deep=True)) == []
    assert (without_versions(manifest), manifest.parts) == (
        load_manifest(here).files,
        load_manifest(here).parts,
    )
    assert {file.path: file.etag for file in manifest.files} == {
        each.name: each.etag for each in there.list() if each.name != MANIFEST_NAME
    }
    assert [each.name for each in there.list()] == [each.name for each in here.list()]
    for each in here.list():
        assert each.name == MANIFEST_NAME or there.read(each.name) == here.read(each.name), (
            each.name
        )
    loaded = load_model(Place(there)).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())


def test_places_are_told_as_urls(bucket):
    with CheckpointSaver(None, bucket.url) as saver:
        pending = saver.save(models.build("wide"), step=1, background=True)
        report = saver.wait()
    assert saver.directory == bucket.url
    assert pending.path == report.path == f"{bucket.url}/checkpoint-1"
    assert report.place == Place(bucket, "checkpoint-1") or str(report.place) == report.path


def test_frozen_files_are_copied_by_the_service(bucket):
    model = models.build("wide")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "model.norm.weight")
    save_into(bucket, model, (1, 2), reuse_frozen="on")
    second = bucket.within("checkpoint-2")
    manifest = load_manifest(second)
    assert [file.path for file in manifest.files if file.linked] == [
        "model-00001-of-00002.safetensors"
    ]
    assert list(checkpoint_problems(second, manifest, deep=True)) == []
    assert {each.name for each in second.list()} == {
        MANIFEST_NAME,
        *(file.path for file in manifest.files),
    }


def test_a_save_that_fails_leaves_nothing(bucket, monkeypatch):
    model = models.build("wide")
    save_into(bucket, model)
    before = [each.name for each in bucket.list()]
    monkeypatch.setattr(
        object_staging.ObjectStaging,
        "commit",
        lambda *_: (_ for _ in ()).throw(NoSpaceError("full")),
    )
    with pytest.raises(NoSpaceError, match="full"):
        save_into(bucket, model, (2,))
    assert [each.name for each in bucket.list()] == before
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"lm_head\.weight: NaN"):
        save_into(bucket, model, (2,), nonfinite="raise")
    assert [each.name for each in bucket.list()] == before


def test_a_checkpoint_is_replaced_only_if_asked_for(bucket):
    first, second = models.build("wide"), models.build("wide", 1)
    save_into(bucket, first)
    with pytest.raises(
        NameTakenError, match=r"checkpoint-1: exists already, and a bucket cannot replace"
    ):
        save_into(bucket, second)
    there = bucket.within("checkpoint-1")
    assert torch.equal(load_model(Place(there)).lm_head.weight, first.lm_head.weight)
    pin(Place(there))
    with pytest.raises(NameTakenError, match="checkpoint-1: the checkpoint is pinned"):
        save_into(bucket, second, overwrite=True)
    assert unpin(Place(there))
    save_into(bucket, second, overwrite=True)
    assert torch.equal(load_model(Place(there)).lm_head.weight, second.lm_head.weight)
    assert list(checkpoint_problems(there, load_manifest(there), deep=True)) == []
    with CheckpointSaver(None, Place(bucket)) as saver:
        saver.save(first, step=1, overwrite=True)
        assert torch.equal(load_model(Place(there)).lm_head.weight, first.lm_head.weight)
        saver.save_state(second, Place(there), overwrite=True)
        with pytest.raises(NameTakenError, match="exists already, and a bucket cannot"):
            saver.save_state(path=Place(there))
