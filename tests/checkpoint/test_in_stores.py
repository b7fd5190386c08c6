"""Checkpoints that lie in other stores than a folder, and in stores that fail."""

import os
from dataclasses import replace

import pytest
from faults import make_checkpoint, save
from faulty_stores import CountingStore, RefusingStore, TornStore, Wrapped

from ft_ckpt.checkpoint.catalog import load_manifest, verify
from ft_ckpt.checkpoint.checks import checkpoint_problems, small_problems
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.checkpoint.staging import ObjectStaging, open_object_staging, open_staging
from ft_ckpt.errors import (
    CorruptError,
    ManifestError,
    NameTakenError,
    NotACheckpointError,
    TargetError,
    UnreadableError,
)
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.open_store import open_store

SHARD = "policy/model-00001-of-00002.safetensors"


@pytest.fixture
def local(tmp_path):
    save(tmp_path / "checkpoint", shards=2, parts=("", "policy"))
    return LocalStore(tmp_path / "checkpoint")


@pytest.fixture
def remote(local):
    """The same checkpoint in a bucket, below a prefix."""
    pytest.importorskip("obstore")
    bucket = open_store("memory:///").within("runs/sft/checkpoint")
    for each in local.list():
        bucket.write(each.name, local.read(each.name))
    return bucket


def problems(store, deep=True):
    return list(checkpoint_problems(store, load_manifest(store), deep=deep))


def test_a_checkpoint_in_a_bucket_is_read_and_verified_like_one_in_a_folder(local, remote):
    assert load_manifest(remote) == load_manifest(local)
    assert problems(remote) == problems(local) == []
    for store in (local, remote):
        content = store.read(SHARD)
        store.write(SHARD, content[:-1] + b"!")
        store.write("model.safetensors", content)
        store.delete(["config.json"])
    assert problems(remote) == problems(local)
    assert len(problems(remote)) == 3


def test_a_large_object_is_digested_range_by_range(local, remote, monkeypatch):
    from ft_ckpt.storage import digests

    monkeypatch.setattr(digests, "_AHEAD_BYTES", 64)
    assert problems(remote) == problems(local) == []


def test_a_look_at_a_bucket_is_few_requests(remote):
    """One listing of each folder, and one read of each small file: never a request for a file's size alone."""
    counting = CountingStore(remote)
    manifest = load_manifest(counting)
    assert problems(counting, deep=False) == []
    calls = [name for name, _ in counting.calls]
    assert calls.count("list_folder") == 2 * 2, "the folders of the files, and those of the parts"
    assert calls.count("stat") == 0
    assert calls.count("open") <= 2 + 3 * len(manifest.files)


def test_stores_that_fail_are_said_and_never_taken_for_empty(local):
    with pytest.raises(UnreadableError, match="refused"):
        load_manifest(RefusingStore(local, ["open"], MANIFEST_NAME))
    with pytest.raises(ManifestError, match="cut short"):
        load_manifest(TornStore(local, MANIFEST_NAME))
    with pytest.raises(UnreadableError, match="refused"):
        problems(RefusingStore(local, ["list_folder"]))
    assert problems(TornStore(local, SHARD))[0].startswith(f"{SHARD}: not a readable safetensors file")
    manifest = load_manifest(local)
    assert f"{SHARD}: missing (" in small_problems(RefusingStore(local, ["open"], "policy"), manifest, 1 << 20)[1]
    with pytest.raises(NotACheckpointError, match=r"no ft_ckpt\.json in it"):
        load_manifest(LocalStore(local.folder / "policy"))


def test_a_staging_becomes_the_checkpoint_or_nothing(tmp_path):
    target = tmp_path / "run" / "checkpoint-1"
    staging = open_staging(target)
    manifest = make_checkpoint(staging.stage)
    assert not target.exists()
    staging.commit(manifest)
    staging.discard()
    assert verify(target).ok
    staging = open_staging(tmp_path / "run" / "checkpoint-2")
    staging.store.write("config.json", b"{}")
    staging.discard()
    assert os.listdir(tmp_path / "run") == ["checkpoint-1"]  # noqa: PTH208 - hidden ones, too


def test_objects_become_a_checkpoint_by_their_manifest_alone(local):
    pytest.importorskip("obstore")
    run = open_store("memory:///").within("run")
    manifest, content = load_manifest(local), {each.name: local.read(each.name) for each in local.list()}
    del content[MANIFEST_NAME]
    staging = open_object_staging(run, "checkpoint-1")
    for name in content:
        staging.store.write(name, content[name])
    with pytest.raises(NotACheckpointError):
        load_manifest(staging.store)
    with pytest.raises(TargetError, match="of a save that is under way, or was broken off"):
        open_object_staging(run, "checkpoint-1")
    staging.store.write("left.over", b"")
    with pytest.raises(CorruptError, match=r"left\.over: not in the store as the manifest has them"):
        staging.commit(manifest)
    staging.store.delete(["left.over"])
    staging.commit(manifest)
    staging.discard()
    assert load_manifest(staging.store) == manifest
    assert problems(staging.store) == []
    with pytest.raises(NameTakenError, match="a checkpoint is there"):
        open_object_staging(run, "checkpoint-1")
    with pytest.raises(NameTakenError):
        staging.commit(replace(manifest, notes=("of another save",)))
    assert load_manifest(staging.store) == manifest


def test_objects_that_are_discarded_are_gone(local):
    pytest.importorskip("obstore")
    run = open_store("memory:///").within("run")
    staging = open_object_staging(run, "checkpoint-1")
    staging.store.write("policy/config.json", b"{}")
    staging.discard()
    assert run.list() == []


class _LosesAnswers(Wrapped):
    """Writes what is to be new, and says that it was there."""

    def write(self, name, data, *, create_only=False):
        self.inner.write(name, data, create_only=create_only)
        if create_only:
            raise NameTakenError(f"{name}: is there already")


def test_a_commit_whose_answer_was_lost_is_read_back(local):
    pytest.importorskip("obstore")
    run = open_store("memory:///").within("run")
    store, manifest = run.within("checkpoint-1"), load_manifest(local)
    for file in manifest.files:
        store.write(file.path, local.read(file.path))
    ObjectStaging(_LosesAnswers(store), run).commit(manifest)
    assert load_manifest(store) == manifest
