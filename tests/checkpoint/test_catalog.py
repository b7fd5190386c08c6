"""What a checkpoint folder is worth: found, refused, or named with everything that is wrong."""

import errno
import json
import os
import random
import re
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from seeds import chosen_seed
from small_checkpoints import contents, make_checkpoint, rewrite_manifest, save, save_of, signed

from ft_ckpt import Keep
from ft_ckpt.checkpoint.catalog import discover, latest
from ft_ckpt.checkpoint.checks import problems, verify
from ft_ckpt.checkpoint.commit import open_staging
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_NAME,
    check_paths,
    manifest_from_json,
    manifest_to_json,
    read_manifest,
)
from ft_ckpt.errors import ManifestError, NotACheckpointError, UnreadableError
from ft_ckpt.formats.safetensors import read_header
from ft_ckpt.runs.folder import prune_run
from ft_ckpt.storage.digests import FileRecord, read_record
from ft_ckpt.storage.io import open_local_file
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import open_place


@pytest.fixture
def checkpoint(tmp_path):
    """A committed checkpoint of two parts with two shards each."""
    save(tmp_path / "checkpoint-1", step=1, shards=2, parts=("", "policy"))
    return tmp_path / "checkpoint-1"


def steps(root):
    return [info.manifest.step for info in discover(open_place(root))]


def test_whole(checkpoint):
    report = verify(checkpoint)
    manifest = read_manifest(open_place(checkpoint))
    assert report.ok
    assert report.problems == ()
    assert (report.path, report.files) == (checkpoint, 8)
    assert report.bytes == sum((checkpoint / file.path).stat().st_size for file in manifest.files)


def test_manifest_comes_back_equal(tmp_path):
    manifest = save(tmp_path / "checkpoint", shards=2)
    assert (
        read_manifest(open_place(tmp_path / "checkpoint"))
        == manifest
        == manifest_from_json(manifest_to_json(manifest))
    )


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
    (checkpoint / SHARD).write_bytes(
        (checkpoint / SHARD).read_bytes().replace(b"[2, 3]", b"[3, 2]")
    )


def appended_to(checkpoint):
    with (checkpoint / SHARD).open("ab") as shard:
        shard.write(b"more")


def broken_header(checkpoint):
    content = (checkpoint / SHARD).read_bytes()
    (checkpoint / SHARD).write_bytes(b"\xff" * 8 + content[8:])


def stale_index(checkpoint):
    index = checkpoint / "policy" / INDEX
    index.write_text(index.read_text().replace("00001-of", "00002-of"))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (cut_short, f"{SHARD}: truncated: 100 bytes, but the manifest lists 215"),
        (appended_to, f"{SHARD}: overwritten: 219 bytes, but the manifest lists 215"),
        (drop_a_shard, f"{SHARD}: missing"),
        (swap_for_a_folder, f"{SHARD}: not a file"),
        (stale_weights, "model.safetensors: not of this checkpoint"),
        (stale_adapter, "policy/adapter_config.json: not of this checkpoint"),
        (other_tensor, f"{SHARD}: tensors missing: layers.0.weight"),
        (other_tensor, f"{SHARD}: tensors that the manifest does not list: layers.9.weight"),
        (
            other_shape,
            (
                f"{SHARD}: layers.0.weight is float32 [3, 2] at bytes 167 to 191, "
                "expected float32 [2, 3]"
            ),
        ),
        (broken_header, f"{SHARD}: not a readable safetensors file"),
        (
            stale_index,
            (
                "policy/model.safetensors.index.json: maps these tensors to other files than the "
                "manifest: layers.0"
            ),
        ),
    ],
)
def test_found_without_reading_every_byte(checkpoint, spoil, problem):
    """Truncated copies, dropped shards, stale indexes and weights load silently."""
    spoil(checkpoint)
    report = verify(checkpoint, deep=False)
    assert not report.ok
    assert any(found.startswith(problem) for found in report.problems), report.problems
    with pytest.warns(UserWarning, match="not valid"):
        assert latest(checkpoint.parent) is None


@pytest.mark.parametrize("deep", [True, False])
def test_bit_rot_is_found_by_the_digest(checkpoint, deep):
    """No content hash, so a flipped bit loads silently. Small files are hashed at every look."""
    flip_a_bit(checkpoint)
    (problem,) = verify(checkpoint, deep=deep).problems
    assert problem.startswith(f"{SHARD}: digest xxh3-128:")


def test_the_parts_of_two_ranks_have_the_digest_of_every_version(checkpoint):
    """Checkpoints of earlier versions have it: rank 0 wrote bytes 0 to 4, 8 and 9, rank 1 those
    between.
    """
    digest = "xxh3-128-of-ranks:845849d8ce53c9e282ab653b8b30b5ae"
    cut = {"start": 2, "stop": 8, "chunk": 3, "lead": 3, "owner": 0}
    record = {
        "path": "bytes",
        "size_bytes": 10,
        "digest": digest,
        "cuts": [list(cut.values())],
        "ranks": 2,
    }
    rewrite_manifest(checkpoint, lambda manifest: manifest["files"].append(record))
    (checkpoint / "bytes").write_bytes(bytes(range(3, 13)))
    assert verify(checkpoint).problems == ()
    (checkpoint / "bytes").write_bytes(bytes(range(4, 14)))
    assert [problem.partition(":")[0] for problem in verify(checkpoint).problems] == ["bytes"]


def test_large_files_are_hashed_when_it_is_asked_for(checkpoint, monkeypatch):
    monkeypatch.setattr(problems, "SMALL_BYTES", (checkpoint / SHARD).stat().st_size)
    flip_a_bit(checkpoint)
    assert verify(checkpoint, deep=False).ok
    assert not verify(checkpoint).ok


def test_every_problem_is_reported(checkpoint):
    drop_a_shard(checkpoint)
    stale_adapter(checkpoint)
    (checkpoint / "config.json").write_text("")
    assert len(verify(checkpoint).problems) == 3


def test_shards_without_an_index(checkpoint):
    (checkpoint / INDEX).unlink()
    rewrite_manifest(
        checkpoint,
        lambda document: document.update(
            files=[f for f in document["files"] if f["path"] != INDEX]
        ),
    )
    assert verify(checkpoint).problems == (
        "./: 2 shards without an index; readers of sharded weights need one",
    )


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
    """Auto-resume picks the half-written newest folder and fails."""
    for step in (1, 2):
        save(tmp_path / f"checkpoint-{step}", step=step)
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
    with pytest.warns(
        UserWarning, match="checkpoint-2: not valid, using an older checkpoint: model.safetensors"
    ):
        assert latest(tmp_path) == tmp_path / "checkpoint-1"


def test_foreign_folders_are_no_checkpoints(tmp_path):
    """ "latest" is the largest number, whatever is in the folder."""
    save(tmp_path / "checkpoint-1", step=1)
    (tmp_path / "checkpoint-20").mkdir()
    make_checkpoint(tmp_path / "checkpoint-30", step=30)
    shutil.copytree(
        tmp_path / "checkpoint-1", tmp_path / ".checkpoint-40.ft_ckpt-stage-host-1-00000000"
    )
    (tmp_path / "checkpoint-50").mkdir()
    (tmp_path / "checkpoint-50" / MANIFEST_NAME).write_bytes(b"\xff{")
    (tmp_path / "checkpoint-60").write_text("a file")
    (tmp_path / "latest").symlink_to("checkpoint-1")
    with pytest.warns(UserWarning, match="checkpoint-50: left out"):
        assert [info.path.name for info in discover(open_place(tmp_path))] == ["checkpoint-1"]
    with pytest.warns(UserWarning, match="checkpoint-50: left out"):
        assert latest(tmp_path) == tmp_path / "checkpoint-1"


def test_a_root_that_is_a_checkpoint_itself(checkpoint):
    assert latest(checkpoint) == checkpoint


def test_nothing_there(tmp_path):
    assert discover(open_place(tmp_path / "absent")) == []
    assert latest(tmp_path) is None


def test_a_newer_manifest_is_refused(checkpoint):
    """A reader must not guess at what a newer ft_ckpt meant."""
    rewrite_manifest(checkpoint, lambda document: document.update(format_version=99))
    with pytest.raises(
        ManifestError, match="manifest format 99, this ft_ckpt reads up to 1; upgrade ft_ckpt"
    ):
        verify(checkpoint)
    with pytest.warns(UserWarning, match="checkpoint-1: left out: .*manifest format 99"):
        assert steps(checkpoint.parent) == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"format_version": 1}', '{"format_version": 1, "files": [1]}']
)
def test_a_damaged_manifest_is_refused(checkpoint, text):
    (checkpoint / MANIFEST_NAME).write_text(text)
    with pytest.raises(ManifestError, match="the checkpoint is damaged"):
        read_manifest(open_place(checkpoint))
    with pytest.warns(UserWarning, match="checkpoint-1: left out: .*the checkpoint is damaged"):
        assert latest(checkpoint.parent) is None


@pytest.mark.parametrize("seed", [chosen_seed()])
def test_a_manifest_vouches_for_itself(checkpoint, seed):
    """A flip in "step" would make it a checkpoint without one, which every rule sorts below all
    others.
    """
    file, chances = checkpoint / MANIFEST_NAME, random.Random(seed)
    whole = file.read_bytes()
    places = [8 * at + bit for at in range(len(whole)) for bit in range(8)]
    names = [
        8 * (whole.index(name) + at)
        for name in (b'"step"', b'"digest"', b'"world"', b'"files"')
        for at in (1, 2)
    ]
    for place in [*names, *chances.sample(places, 300)]:
        flipped = bytearray(whole)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        with pytest.raises(ManifestError):
            verify(checkpoint)
    file.write_bytes(whole)
    assert verify(checkpoint).ok


def test_the_manifest_of_an_older_version_is_read(checkpoint):
    """ft_ckpt 0.1.0 wrote no digest and no number; a field of a later version without a digest has
    lost it.
    """
    document = json.loads((checkpoint / MANIFEST_NAME).read_text())
    for later in ("digest", "number", "rankings", "export"):
        del document[later]
    (checkpoint / MANIFEST_NAME).write_text(json.dumps(document))
    assert verify(checkpoint).ok
    (checkpoint / MANIFEST_NAME).write_text(json.dumps({**document, "aigest": "xxh3-128:0"}))
    with pytest.raises(ManifestError, match="aigest: unknown, and no digest"):
        verify(checkpoint)


def test_fields_of_a_later_version_are_dropped(checkpoint):
    def add(document):
        document["later"] = document["files"][0]["later"] = document["parts"][0]["later"] = [1]

    before = read_manifest(open_place(checkpoint))
    rewrite_manifest(checkpoint, add)
    assert read_manifest(open_place(checkpoint)) == before


def deep(document):
    document["world"] = {}
    del document["digest"]
    return signed(json.dumps(document, indent=1)).replace(
        "{}", '{"a":' * 100_000 + "1" + "}" * 100_000
    )


def odd(*steps, value):
    """A change of one value of a manifest, by the way to it."""

    def change(document):
        for step in steps[:-1]:
            document = document[step]
        document[steps[-1]] = value

    return change


ODD = {
    "created: None": odd("created", value=None),
    "step: 'seven'": odd("step", value="seven"),
    "step: True": odd("step", value=True),
    "step: 9223372036854775808": odd("step", value=1 << 63),
    r"files[1].size_bytes: 'x'": odd("files", 1, "size_bytes", value="x"),
    r"files[1].path: {}": odd("files", 1, "path", value={}),
    r"parts[0].tensors[2].name: []": odd("parts", 0, "tensors", 2, "name", value=[]),
    r"parts[1].tensors[0].shape[1]: 1.5": odd("parts", 1, "tensors", 0, "shape", value=[2, 1.5]),
    r"kind 'hologram', expected one of model, adapter, module, state": odd(
        "parts", 0, "kind", value="hologram"
    ),
    r"parts: 7, expected array": odd("parts", value=7),
    r"rankings[...]: expected str": odd("rankings", value={"loss": [1]}),
    r"written by 1000000000 ranks": odd("files", 0, "ranks", value=10**9),
    r"files[0].ranks: 0, expected int >= 1": odd("files", 0, "ranks", value=0),
    r"cuts that are not in order": odd("files", 0, "cuts", value=[[9, 3, 1, 1, 0]]),
    r"cuts that are not in order, inside": odd("files", 0, "cuts", value=[[0, 90, 10, 10, 1]]),
    r"files[0].cuts[0]: 3": odd("files", 0, "cuts", value=[3]),
    r"listed more than once": lambda document: document["files"].append(document["files"][0]),
    r"parts[0].tensors[2].shape[0]: -1, expected int >= 0": odd(
        "parts", 0, "tensors", 2, "shape", value=[-1]
    ),
    "a path in a manifest must be": odd("files", 0, "path", value="\ud800"),
}


@pytest.mark.parametrize("words", ODD)
def test_an_odd_manifest_is_refused_and_stops_nothing_else(checkpoint, words):
    """Its digest is right: it was made so.

    The run's other checkpoints are found, and it can be saved over.
    """
    save(checkpoint.parent / "checkpoint-0", step=0)
    rewrite_manifest(checkpoint, ODD[words])
    with pytest.raises(ManifestError, match=re.escape(words)):
        read_manifest(open_place(checkpoint))
    with pytest.warns(UserWarning, match="checkpoint-1: left out"):
        assert latest(checkpoint.parent) == checkpoint.parent / "checkpoint-0"
    assert prune_run(open_place(checkpoint.parent), Keep(last=1)).problems == ()
    save(checkpoint, step=2)
    assert steps(checkpoint.parent) == [0, 2]


def test_a_manifest_nested_without_end(checkpoint):
    (checkpoint / MANIFEST_NAME).write_text(
        deep(json.loads((checkpoint / MANIFEST_NAME).read_text()))
    )
    with pytest.raises(ManifestError, match="nested too deeply"):
        verify(checkpoint)
    save(checkpoint, step=2)
    assert steps(checkpoint.parent) == [2]


def pipe(file):
    os.mkfifo(file)


def socket_file(file):
    with socket.socket(socket.AF_UNIX) as one:
        here = Path.cwd()
        os.chdir(file.parent)
        one.bind(file.name)
        os.chdir(here)


def endless(file):
    with file.open("wb") as stream:
        stream.truncate(1 << 40)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [pipe, socket_file, endless])
def test_what_is_no_manifest_is_not_waited_for(checkpoint, make):
    (checkpoint / MANIFEST_NAME).unlink()
    make(checkpoint / MANIFEST_NAME)
    with pytest.warns(
        UserWarning, match="left out: .*not a regular file|left out: .*expected at most 268,435,456"
    ):
        assert latest(checkpoint.parent) is None


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.EACCES])
def test_a_manifest_that_cannot_be_read_just_now_is_not_taken_for_absent(
    checkpoint, monkeypatch, code
):
    """It may be the newest and whole: an older one is not taken in silence, and nothing is deleted
    meanwhile.
    """
    save(checkpoint.parent / "checkpoint-0", step=0)
    before, real = contents(checkpoint.parent), os.open

    def failing(path, *args, **more):
        if str(path) == str(checkpoint / MANIFEST_NAME):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        with pytest.raises(UnreadableError) as caught:
            read_manifest(open_place(checkpoint))
        assert caught.value.errno == code
        with pytest.raises(
            UnreadableError, match=r"checkpoint-1.*that can be read is .*checkpoint-0"
        ):
            latest(checkpoint.parent)
        report = prune_run(open_place(checkpoint.parent), Keep(last=1))
        assert "checkpoint-1" in report.problems[0]
        assert "no further checkpoint was deleted" in report.problems[0]
    assert contents(checkpoint.parent) == before


def test_names_that_are_not_utf_8(tmp_path):
    """Linux names are bytes: one that is not text is written as JSON that every reader takes, and
    read back.
    """
    staging = open_staging(tmp_path / "checkpoint")
    name = os.fsdecode(b"caf\xe9.txt")
    (staging.stage / name).write_text("mine")
    staging.commit(
        replace(make_checkpoint(staging.stage), notes=(f"converted from {name}",)),
    )
    (tmp_path / "checkpoint" / MANIFEST_NAME).read_bytes().decode("utf-8")
    assert read_manifest(open_place(tmp_path / "checkpoint")).notes == (f"converted from {name}",)
    assert verify(tmp_path / "checkpoint").ok


def test_those_without_a_step_come_as_they_were_saved(tmp_path):
    """The clock went back meanwhile; the one in the folder itself counts as well."""
    for number, name in enumerate(["zeta", "alpha", "mid", "."]):
        created = f"20{50 - number}-01-01T00:00:00+00:00"
        save_of(tmp_path / name, step=None, created=created)
    assert [info.path.name for info in discover(open_place(tmp_path))] == [
        "zeta",
        "alpha",
        "mid",
        tmp_path.name,
    ]
    assert latest(tmp_path) == tmp_path
    prune_run(open_place(tmp_path), Keep(last=1))
    assert [info.path.name for info in discover(open_place(tmp_path))] == ["mid", tmp_path.name]


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../checkpoint-2/x", "a/../../x", "..", "./x", "a//x", "a\\x", ""]
)
def test_paths_that_lead_outside_are_refused(checkpoint, path):
    """A manifest from elsewhere must not make us read, hash or name files of this machine."""
    rewrite_manifest(checkpoint, lambda document: document["files"][0].update(path=path))
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
    rewrite_manifest(
        checkpoint,
        lambda document: document.update(
            files=[f for f in document["files"] if f["path"] != SHARD]
        ),
    )
    assert any(
        "is not among the listed files" in problem for problem in verify(checkpoint).problems
    )


def test_read_header(tmp_path):
    make_checkpoint(tmp_path)
    found = read_header(open_local_file(tmp_path / "model.safetensors"))
    size = (tmp_path / "model.safetensors").stat().st_size
    assert found["layers.0.weight"] == ("float32", (2, 3), size - 96, size - 72)
    assert found["layers.3.weight"] == ("float32", (2, 3), size - 24, size)


def test_digests_of_files(tmp_path):
    """Pinned: digests written by one version are compared by the next."""
    (tmp_path / "file").write_bytes(b"ft_ckpt")
    expected = FileRecord("file", 7, "xxh3-128:629ddf02ddb9572aacaa098a06609b58")
    assert read_record(LocalStore(tmp_path), "file") == expected
    with pytest.raises(FileNotFoundError):
        read_record(LocalStore(tmp_path), "absent")


def test_what_is_no_checkpoint_is_told_apart(tmp_path):
    """Three places, three answers: nothing there, a run, and weights that no save of ours
    completed.
    """
    save(tmp_path / "run" / "checkpoint-1")
    make_checkpoint(tmp_path / "foreign")
    answers = {
        "absent": "no such folder",
        "run": "which holds checkpoint-1; name one",
        "foreign": "a Hugging Face model .* without a manifest of ft_ckpt",
    }
    for name, words in answers.items():
        with pytest.raises(NotACheckpointError, match=rf"{name}: .*{words}"):
            verify(tmp_path / name)
