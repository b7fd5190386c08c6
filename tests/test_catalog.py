"""What a checkpoint folder is worth: found, refused, or named with everything that is wrong."""

import json
import os
import shutil
from dataclasses import replace

import pytest
from faults import make_checkpoint, save

from ft_ckpt import catalog
from ft_ckpt.catalog import check_paths, check_small_files, discover, latest, read_manifest, verify
from ft_ckpt.digests import digest_of
from ft_ckpt.errors import CorruptError, ManifestError, NotACheckpointError
from ft_ckpt.headers import read_header
from ft_ckpt.manifest import MANIFEST_NAME, FileRecord, from_json, to_json


@pytest.fixture
def checkpoint(tmp_path):
    """A committed checkpoint of two parts with two shards each."""
    save(tmp_path / "checkpoint-1", step=1, shards=2, parts=("", "policy"))
    return tmp_path / "checkpoint-1"


def steps(root):
    return [info.manifest.step for info in discover(root)]


def rewrite(checkpoint, change):
    """Replace the manifest by what `change` makes of its JSON."""
    document = json.loads((checkpoint / MANIFEST_NAME).read_text())
    change(document)
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(document))


def test_whole(checkpoint):
    report = verify(checkpoint)
    manifest = read_manifest(checkpoint)
    assert report.ok
    assert report.problems == ()
    assert (report.path, report.files) == (checkpoint, 8)
    assert report.bytes == sum((checkpoint / file.path).stat().st_size for file in manifest.files)


def test_manifest_comes_back_equal(tmp_path):
    manifest = save(tmp_path / "checkpoint", shards=2)
    assert read_manifest(tmp_path / "checkpoint") == manifest == from_json(to_json(manifest))


SHARD, INDEX = "model-00001-of-00002.safetensors", "model.safetensors.index.json"


def flip_a_bit(checkpoint):
    content = bytearray((checkpoint / SHARD).read_bytes())
    content[-1] ^= 1
    (checkpoint / SHARD).write_bytes(content)


def cut_short(checkpoint):
    os.truncate(checkpoint / SHARD, 100)


def drop_a_shard(checkpoint):
    (checkpoint / SHARD).unlink()


def swap_for_a_folder(checkpoint):
    (checkpoint / SHARD).unlink()
    (checkpoint / SHARD).mkdir()


def stale_weights(checkpoint):
    shutil.copy(checkpoint / SHARD, checkpoint / "model.safetensors")


def stale_adapter(checkpoint):
    (checkpoint / "policy" / "adapter_config.json").write_text("{}")


def other_tensor(checkpoint):
    content = (checkpoint / SHARD).read_bytes()
    (checkpoint / SHARD).write_bytes(content.replace(b"layers.0.weight", b"layers.9.weight"))


def other_shape(checkpoint):
    (checkpoint / SHARD).write_bytes((checkpoint / SHARD).read_bytes().replace(b"[2, 3]", b"[3, 2]"))


def broken_header(checkpoint):
    content = (checkpoint / SHARD).read_bytes()
    (checkpoint / SHARD).write_bytes(b"\xff" * 8 + content[8:])


def stale_index(checkpoint):
    index = checkpoint / "policy" / INDEX
    index.write_text(index.read_text().replace("00001-of", "00002-of"))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (cut_short, f"{SHARD}: 100 bytes, expected 215: cut short or overwritten"),
        (drop_a_shard, f"{SHARD}: missing"),
        (swap_for_a_folder, f"{SHARD}: not a file"),
        (stale_weights, "model.safetensors: not of this checkpoint"),
        (stale_adapter, "policy/adapter_config.json: not of this checkpoint"),
        (other_tensor, f"{SHARD}: tensors missing: layers.0.weight"),
        (other_tensor, f"{SHARD}: tensors that the manifest does not list: layers.9.weight"),
        (other_shape, f"{SHARD}: layers.0.weight is float32 [3, 2] at bytes 167 to 191, expected float32 [2, 3]"),
        (broken_header, f"{SHARD}: not a readable safetensors file"),
        (stale_index, "policy/model.safetensors.index.json: sends these tensors elsewhere than the manifest: layers.0"),
    ],
)
def test_found_without_reading_every_byte(checkpoint, spoil, problem):
    """Pain 26: truncated copies, dropped shards, stale indexes and weights load silently."""
    spoil(checkpoint)
    report = verify(checkpoint, deep=False)
    assert not report.ok
    assert any(found.startswith(problem) for found in report.problems), report.problems
    with pytest.warns(UserWarning, match="not valid"):
        assert latest(checkpoint.parent) is None


@pytest.mark.parametrize("deep", [True, False])
def test_bit_rot_is_found_by_the_digest(checkpoint, deep):
    """Pain 26: no content hash, so a flipped bit loads silently. Small files are hashed at every look."""
    flip_a_bit(checkpoint)
    (problem,) = verify(checkpoint, deep=deep).problems
    assert problem.startswith(f"{SHARD}: digest xxh3-128:")


def test_large_files_are_hashed_when_it_is_asked_for(checkpoint, monkeypatch):
    monkeypatch.setattr(catalog, "SMALL_BYTES", (checkpoint / SHARD).stat().st_size)
    flip_a_bit(checkpoint)
    assert verify(checkpoint, deep=False).ok
    assert not verify(checkpoint).ok


def test_small_files_by_themselves(checkpoint):
    """What a reader asks that goes by config.json: every listed file that is small, and nothing else."""
    manifest = read_manifest(checkpoint)
    check_small_files(checkpoint, manifest)
    config = checkpoint / "policy" / "config.json"
    config.write_text(config.read_text().replace("1", "2"))
    flip_a_bit(checkpoint)
    with pytest.raises(CorruptError, match=rf"{SHARD}: digest .*policy/config.json: digest"):
        check_small_files(checkpoint, manifest)
    with pytest.raises(CorruptError, match=r": policy/config.json: digest"):
        check_small_files(checkpoint, manifest, below_bytes=50)
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(CorruptError, match=r"policy/config.json: not a file"):
        check_small_files(checkpoint, manifest)


def test_every_problem_is_reported(checkpoint):
    drop_a_shard(checkpoint)
    stale_adapter(checkpoint)
    (checkpoint / "config.json").write_text("")
    assert len(verify(checkpoint).problems) == 3


def test_shards_without_an_index(checkpoint):
    (checkpoint / INDEX).unlink()
    rewrite(checkpoint, lambda document: document.update(files=[f for f in document["files"] if f["path"] != INDEX]))
    assert verify(checkpoint).problems == ("./: 2 shards without an index; readers of sharded weights need one",)


def test_files_that_are_not_weights_are_nobodys_business(checkpoint):
    for name in ("optimizer.bin", "probe.safetensors", "notes.txt", "training_args.bin"):
        (checkpoint / name).write_text("mine")
    assert verify(checkpoint).ok


def test_oldest_first_and_the_newest_valid(tmp_path):
    for step in (10, 9, 100):
        save(tmp_path / f"checkpoint-{step}", step=step)
    assert steps(tmp_path) == [9, 10, 100]
    assert latest(tmp_path) == tmp_path / "checkpoint-100"


def test_the_newest_is_invalid(tmp_path):
    """Pain 20: auto-resume picks the half-written newest folder and fails."""
    for step in (1, 2):
        save(tmp_path / f"checkpoint-{step}", step=step)
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="checkpoint-2: not valid, using an older checkpoint: model.safetensors"):
        assert latest(tmp_path) == tmp_path / "checkpoint-1"


def test_foreign_folders_are_no_checkpoints(tmp_path):
    """Pain 20: "latest" is the largest number, whatever is in the folder."""
    save(tmp_path / "checkpoint-1", step=1)
    (tmp_path / "checkpoint-20").mkdir()
    make_checkpoint(tmp_path / "checkpoint-30", step=30)
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / ".checkpoint-40.ft_ckpt-stage-host-1-00000000")
    (tmp_path / "checkpoint-50").mkdir()
    (tmp_path / "checkpoint-50" / MANIFEST_NAME).write_bytes(b"\xff{")
    (tmp_path / "checkpoint-60").write_text("a file")
    (tmp_path / "latest").symlink_to("checkpoint-1")
    assert [info.path.name for info in discover(tmp_path)] == ["checkpoint-1"]
    assert latest(tmp_path) == tmp_path / "checkpoint-1"


def test_a_root_that_is_a_checkpoint_itself(checkpoint):
    assert latest(checkpoint) == checkpoint


def test_nothing_there(tmp_path):
    assert discover(tmp_path / "absent") == []
    assert latest(tmp_path) is None
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NotACheckpointError, match=r"no ft_ckpt.json in it, so no save was completed there"):
            verify(path)


def test_a_newer_manifest_is_refused(checkpoint):
    """A reader must not guess at what a newer ft_ckpt meant."""
    rewrite(checkpoint, lambda document: document.update(format_version=99))
    with pytest.raises(ManifestError, match="manifest format 99, this ft_ckpt reads up to 1; upgrade ft_ckpt"):
        verify(checkpoint)
    assert steps(checkpoint.parent) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format_version": 1}', '{"format_version": 1, "files": [1]}'])
def test_a_damaged_manifest_is_refused(checkpoint, text):
    (checkpoint / MANIFEST_NAME).write_text(text)
    with pytest.raises(ManifestError, match="the checkpoint is damaged"):
        read_manifest(checkpoint)
    assert latest(checkpoint.parent) is None


@pytest.mark.parametrize("path", ["/etc/passwd", "../checkpoint-2/x", "a/../../x", "..", "./x", "a//x", "a\\x", "", 7])
def test_paths_that_lead_outside_are_refused(checkpoint, path):
    """A manifest from elsewhere must not make us read, hash or name files of this machine."""
    rewrite(checkpoint, lambda document: document["files"][0].update(path=path))
    with pytest.raises(ManifestError, match="a path in a manifest must be relative"):
        verify(checkpoint)


@pytest.mark.parametrize("field", ["part", "tensor"])
def test_parts_and_tensors_stay_inside_too(tmp_path, field):
    manifest = make_checkpoint(tmp_path)
    part = manifest.parts[0]
    outside = replace(part.tensors[0], file="../x")
    part = replace(part, path="../x") if field == "part" else replace(part, tensors=(outside,))
    with pytest.raises(ManifestError, match=r"'\.\./x'"):
        check_paths(replace(manifest, parts=(part,)), "here")


def test_a_tensor_in_a_file_that_is_not_listed(checkpoint):
    rewrite(checkpoint, lambda document: document.update(files=[f for f in document["files"] if f["path"] != SHARD]))
    assert any("is not among the listed files" in problem for problem in verify(checkpoint).problems)


def test_read_header(tmp_path):
    make_checkpoint(tmp_path)
    found = read_header(tmp_path / "model.safetensors")
    size = (tmp_path / "model.safetensors").stat().st_size
    assert found["layers.0.weight"] == ("float32", (2, 3), size - 96, size - 72)
    assert found["layers.3.weight"] == ("float32", (2, 3), size - 24, size)


def test_digest_of(tmp_path):
    """Pinned: digests written by one version are compared by the next."""
    (tmp_path / "file").write_bytes(b"ft_ckpt")
    assert FileRecord("file", 7, digest_of(tmp_path / "file")).digest == "xxh3-128:629ddf02ddb9572aacaa098a06609b58"
    with pytest.raises(FileNotFoundError):
        digest_of(tmp_path / "absent")
