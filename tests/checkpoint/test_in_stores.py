"""Checkpoints that lie in other stores than a folder, and in stores that fail."""

import os
from dataclasses import replace

import pytest
from buckets import in_bucket, new_bucket
from faulty_stores import TornStore, Watch, Wrapped, refusing
from http_server import Fault
from s3_server import FAST
from small_checkpoints import make_checkpoint, rewrite_manifest, save

from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.catalog import best, discover, latest, list_checkpoints, run_checkpoints
from ft_ckpt.checkpoint.checks import checkpoint_problems, verify
from ft_ckpt.checkpoint.checks.problems import file_problems
from ft_ckpt.checkpoint.commit import open_object_staging, open_staging, put_manifest
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, load_manifest, read_manifest
from ft_ckpt.errors import (
    CorruptError,
    ManifestError,
    NameTakenError,
    NotACheckpointError,
    TargetError,
    UnreadableError,
)
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place

SHARD = "policy/model-00001-of-00002.safetensors"


@pytest.fixture
def local(tmp_path):
    save(tmp_path / "checkpoint", shards=2, parts=("", "policy"))
    return LocalStore(tmp_path / "checkpoint")


@pytest.fixture
def remote(local):
    """The same checkpoint in a bucket, below a prefix."""
    pytest.importorskip("obstore")
    bucket = new_bucket("runs/sft/checkpoint")
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


@pytest.fixture
def run(tmp_path):
    """The URL of a run of three checkpoints in a bucket, the best of them the second."""
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        save(tmp_path / "run" / f"checkpoint-{step}", step=step)
        rewrite_manifest(
            tmp_path / "run" / f"checkpoint-{step}",
            lambda found, loss=loss: found["metrics"].update(loss=loss),
        )
    return str(in_bucket(tmp_path / "run"))


def test_a_run_in_a_bucket_is_listed_and_its_checkpoints_are_named_by_their_urls(run):
    assert [(info.path, info.name) for info in discover(open_place(run))] == [
        (f"{run}/checkpoint-{step}", f"checkpoint-{step}") for step in (1, 2, 3)
    ]
    assert (latest(run), best(run, ("loss", "min"))) == (
        f"{run}/checkpoint-3",
        f"{run}/checkpoint-2",
    )
    assert read_manifest(open_place(f"{run}/checkpoint-2")).metrics == {"loss": 1.0}
    assert [info.name for info in discover(open_place(f"{run}/checkpoint-2"))] == ["checkpoint-2"]
    assert (
        run_checkpoints(open_place(f"{run}/checkpoint-2")),
        discover(open_place(f"{run}/absent")),
        latest(f"{run}/absent"),
    ) == (
        [],
        [],
        None,
    )


def test_what_is_damaged_in_a_bucket_is_named_by_its_url(run):
    newest = open_place(f"{run}/checkpoint-3").folder
    newest.delete(["model.safetensors"])
    with pytest.warns(
        UserWarning,
        match=rf"{run}/checkpoint-3: not valid, using an older .*model\.safetensors: missing",
    ):
        assert latest(run) == f"{run}/checkpoint-2"
    newest.write(MANIFEST_NAME, b"{}")
    assert list(list_checkpoints(open_place(run)).damaged) == [f"{run}/checkpoint-3"]


def test_a_look_at_a_bucket_is_few_requests(remote):
    """One listing of each folder, and one read of each small file: never a request for a file's
    size alone.
    """
    watch = Watch()
    manifest = load_manifest(watch.store(remote))
    assert problems(watch.store(remote), deep=False) == []
    calls = watch.calls
    assert calls.count("list_folder") == 2 * 2, "the folders of the files, and those of the parts"
    assert calls.count("stat") == 0
    assert calls.count("open") <= 2 + 3 * len(manifest.files)


def test_stores_that_fail_are_said_and_never_taken_for_empty(local):
    with pytest.raises(UnreadableError, match="refused"):
        load_manifest(Watch(refusing(["open"], MANIFEST_NAME)).store(local))
    with pytest.raises(ManifestError, match="cut short"):
        load_manifest(TornStore(local, MANIFEST_NAME))
    with pytest.raises(UnreadableError, match="refused"):
        problems(Watch(refusing(["list_folder"])).store(local))
    assert problems(TornStore(local, SHARD))[0].text.startswith(
        f"{SHARD}: not a readable safetensors file"
    )
    (shard,) = (record for record in load_manifest(local).files if record.path == SHARD)
    (refused,) = file_problems(Watch(refusing(["open"], "policy")).store(local), shard)
    assert refused.text.startswith(f"{SHARD}: cannot be read (")
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


def fill(staging, local):
    """Write the files of a checkpoint; its manifest comes out."""
    manifest = load_manifest(local)
    for file in manifest.files:
        staging.store.write(file.path, local.read(file.path))
    return manifest


def committed(store):
    """The manifest in a bucket as it was given."""
    manifest = load_manifest(store)
    assert {file.path: file.etag for file in manifest.files}.items() <= {
        e.name: e.etag for e in store.list()
    }.items()
    assert manifest.token
    return replace(
        manifest, token=None, files=tuple(replace(file, etag=None) for file in manifest.files)
    )


def test_objects_become_a_checkpoint_by_their_manifest_alone(local):
    pytest.importorskip("obstore")
    run = new_bucket("run")
    staging = open_object_staging(run, "checkpoint-1")
    manifest = fill(staging, local)
    with pytest.raises(NotACheckpointError):
        load_manifest(staging.store)
    with pytest.raises(
        TargetError, match=r"process \d+ on .* is saving there, or was killed less than ten"
    ):
        open_object_staging(run, "checkpoint-1")
    staging.store.write("left.over", b"")
    with pytest.raises(
        CorruptError, match=r"left\.over: stored with another size or digest than was written"
    ):
        staging.commit(manifest)
    staging.store.delete(["left.over"])
    small = manifest.files[0]
    staging.store.write(small.path, b"x" * small.size_bytes)
    with pytest.raises(
        CorruptError, match=f"{small.path}: stored with another size or digest than was written"
    ):
        staging.commit(manifest)
    staging.store.write(small.path, local.read(small.path))
    staging.commit(manifest)
    staging.discard()
    assert committed(staging.store) == manifest
    assert problems(staging.store) == []
    assert sorted(file.path for file in manifest.files) == [
        each.name for each in staging.store.list() if each.name != MANIFEST_NAME
    ]
    with pytest.raises(NameTakenError, match="exists already, and a bucket cannot"):
        open_object_staging(run, "checkpoint-1")
    again = open_object_staging(run, "checkpoint-1", overwrite=True)
    assert [each.name for each in run.list()] == ["checkpoint-1/.ft_ckpt-saving"]
    fill(again, local)
    put_manifest(again.store, b"of another")
    with pytest.raises(
        NameTakenError, match="another save committed to this name at the same time"
    ):
        again.commit(replace(manifest, notes=("of a slow save",)))
    again.discard()
    assert again.store.read(MANIFEST_NAME) == b"of another", "and its files stay"
    assert len(again.store.list()) == 1 + len(manifest.files)


def test_objects_that_are_discarded_are_gone(local):
    pytest.importorskip("obstore")
    run = new_bucket("run")
    staging = open_object_staging(run, "checkpoint-1")
    staging.store.write("policy/config.json", b"{}")
    staging.discard()
    assert run.list() == []
    run.write("checkpoint-1/theirs.txt", b"")
    with pytest.raises(
        TargetError, match=r"theirs\.txt: files that belong to no checkpoint are in the way"
    ):
        open_object_staging(run, "checkpoint-1")
    assert [each.name for each in run.list()] == ["checkpoint-1/theirs.txt"]


def test_a_save_that_was_killed_is_taken_over(local, s3):
    """By its own run at once, by others when its mark is dead, and then it cannot commit any
    more.
    """
    run = open_place("s3://bucket/runs/sft").folder
    killed = open_object_staging(run, "checkpoint-1", run_id="a")
    killed.store.write("model-00009-of-00009.safetensors", b"{}")
    with pytest.raises(TargetError, match="is saving there, or was killed"):
        open_object_staging(run, "checkpoint-1", run_id="b")
    resumed = open_object_staging(run, "checkpoint-1", run_id="a")
    assert s3.names() == ["runs/sft/checkpoint-1/.ft_ckpt-saving"], "what was written is gone"
    s3.advance(601)
    stranger = open_object_staging(run, "checkpoint-1", run_id="b")
    manifest = fill(stranger, local)
    for zombie in (killed, resumed):
        zombie.mark.renew()  # as its thread does when it wakes up
        with pytest.raises(TargetError, match=r"taken over by process .*nothing was committed"):
            zombie.commit(manifest)
        zombie.discard()
    stranger.commit(manifest)
    assert committed(stranger.store) == manifest
    name = max(manifest.files, key=lambda file: file.size_bytes).path
    fresh = verify(Place(stranger.store), deep=False)
    killed.store.write(name, killed.store.read(name))
    assert fresh.ok
    with open_checkpoint(Place(stranger.store)) as held:
        assert held.store.read(name)
    content = killed.store.read(name)
    killed.store.write(name, content[:-1] + bytes([content[-1] ^ 1]))
    assert not verify(Place(stranger.store), deep=False).ok, (
        "as its version is not the one that was committed"
    )
    with (
        pytest.raises(CorruptError, match=f"{name}: digest"),
        open_checkpoint(Place(stranger.store)),
    ):
        pass


class _LosesAnswers(Wrapped):
    """Writes what is to be new, and says that it was there."""

    def write(self, name, data, *, create_only=False):
        self.inner.write(name, data, create_only=create_only)
        if create_only:
            raise NameTakenError(f"{name}: is there already")


def test_a_commit_whose_answer_was_lost_is_read_back(local, s3):
    pytest.importorskip("obstore")
    run = new_bucket("run")
    staging = open_object_staging(run, "checkpoint-1")
    manifest = fill(staging, local)
    replace(staging, store=_LosesAnswers(staging.store)).commit(manifest)
    assert committed(staging.store) == manifest
    far = open_object_staging(open_place("s3://bucket/runs", **FAST).folder, "checkpoint-1")
    fill(far, local)
    s3.faults.append(Fault("PUT .*ft_ckpt.json", cuts="after"))
    s3.faults.append(Fault("PUT .*ft_ckpt.json", status=409, code="OperationAborted"))
    far.commit(manifest)
    assert committed(far.store) == manifest
