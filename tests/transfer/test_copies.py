"""Copies of checkpoints between folders and buckets: whole, or not at all."""

import os
import shutil
from dataclasses import replace
from functools import partial

import pytest
from broken_lines import broken_line
from buckets import new_bucket
from faults import Disk, Requests, try_worlds
from small_checkpoints import contents, make_checkpoint, save_with_state

from ft_ckpt import copy, verify
from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.commit import open_staging
from ft_ckpt.checkpoint.leases import pin
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, load_manifest
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    NameTakenError,
    NoSpaceError,
    NotACheckpointError,
)
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.digests import Cut, FileRecord, RunningDigest, joined_digest
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, open_place

FROZEN = "frozen.bin"
FROZEN_BYTES = 9 << 20  # more than one block, and above what is sent in one call


@pytest.fixture
def run(tmp_path):
    """A run's folder with two checkpoints that share a large file."""
    for step in (1, 2):
        save_large(tmp_path / "run" / f"checkpoint-{step}", step)
    return tmp_path / "run"


def save_large(target, step, fill=b"f"):
    staging = open_staging(target)
    (staging.stage / "notes").mkdir()
    (staging.stage / FROZEN).write_bytes(fill * FROZEN_BYTES)
    (staging.stage / "notes" / "own.bin").write_bytes(bytes([step]) * (2 << 20))
    staging.commit(replace(make_checkpoint(staging.stage, step=step), run_id="r"))


def places(tmp_path):
    """Where copies go: a folder, a bucket, and another bucket; in each the place of a run."""
    return [
        Place(LocalStore(tmp_path / "there" / "sft")),
        Place(new_bucket()),
        Place(new_bucket("x")),
    ]


def files_of(place):
    """All objects of a checkpoint but the manifest, with hidden ones."""
    store = place.folder
    return {each.name: store.read(each.name) for each in store.list() if each.name != MANIFEST_NAME}


def test_a_checkpoint_goes_round_all_kinds_of_places(run, tmp_path):
    before = Place(LocalStore(run), "checkpoint-1")
    expected = files_of(before)
    pin(open_place(run / "checkpoint-1"))
    with open_checkpoint(open_place(run / "checkpoint-1")):
        for folder in places(tmp_path):
            goal = Place(folder.folder, "checkpoint-1")
            report = copy(before, goal)
            assert (report.path, report.source) == (goal.location, before.location)
            assert (report.is_new, report.sent_bytes, report.reused) == (True, report.bytes, ())
            assert files_of(goal) == expected, "without pins and leases"
            assert verify(goal).ok
            before = goal
    again = copy(run / "checkpoint-1", before)
    assert (again.is_new, again.sent_bytes) == (False, 0)


def test_files_that_the_destination_has_are_not_sent(run, tmp_path):
    for folder in places(tmp_path):
        copy(run / "checkpoint-1", Place(folder.folder, "checkpoint-1"))
        report = copy(run / "checkpoint-2", Place(folder.folder, "checkpoint-2"))
        assert report.reused == (FROZEN,)
        assert report.sent_bytes == report.bytes - FROZEN_BYTES
        assert verify(Place(folder.folder, "checkpoint-2")).ok
        records = {
            file.path: file for file in load_manifest(folder.folder.within("checkpoint-2")).files
        }
        assert [path for path, file in records.items() if file.linked] == [FROZEN]
    there = tmp_path / "there" / "sft"
    assert (there / "checkpoint-1" / FROZEN).samefile(there / "checkpoint-2" / FROZEN)


def test_objects_of_one_service_are_copied_by_it(run):
    bucket = new_bucket("first/run")
    there = Place(bucket, "checkpoint-1")
    copy(run / "checkpoint-1", there)
    goal = Place(bucket.parent.parent.within("second"), "checkpoint-1")
    report = copy(there, goal)
    assert (report.is_new, report.sent_bytes, report.reused) == (True, 0, ())
    assert files_of(goal) == files_of(there)
    assert verify(goal).ok


def test_what_changed_since_its_checkpoint_is_sent_anew(run, tmp_path):
    there = tmp_path / "there"
    copy(run / "checkpoint-1", there / "checkpoint-1")
    (there / "checkpoint-1" / FROZEN).write_bytes(b"x" * FROZEN_BYTES)
    assert copy(run / "checkpoint-2", there / "checkpoint-2").reused == ()
    assert verify(there / "checkpoint-2").ok
    shutil.rmtree(there / "checkpoint-1")
    flip_unseen(there / "checkpoint-2" / FROZEN)
    assert copy(run / "checkpoint-1", there / "checkpoint-1").reused == ()
    assert verify(there / "checkpoint-1").ok
    assert not verify(there / "checkpoint-2").ok
    bucket = new_bucket()
    copy(run / "checkpoint-1", Place(bucket, "checkpoint-1"))
    bucket.delete([f"checkpoint-1/{FROZEN}"])
    assert copy(run / "checkpoint-2", Place(bucket, "checkpoint-2")).reused == ()


def flip_unseen(file):
    """Change a byte as a disk does, which leaves the time as it was."""
    before, content = file.stat(), bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", [FROZEN, "config.json"])
def test_damage_is_found_on_the_way_and_nothing_appears(run, tmp_path, name):
    file = run / "checkpoint-1" / name
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    for folder in places(tmp_path):
        with pytest.raises(CorruptError, match=f"{name}: digest"):
            copy(run / "checkpoint-1", Place(folder.folder, "checkpoint-1"))
        assert folder.folder.list() == []
    file.write_bytes(content[:-1])
    with pytest.raises(CorruptError, match=f"{name}: .* bytes, but the manifest lists"):
        copy(run / "checkpoint-1", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_is_at_the_destination_is_replaced_only_if_that_is_asked_for(run, tmp_path):
    with pytest.raises(NameTakenError, match="overwrite"):
        copy(run / "checkpoint-1", run / "checkpoint-2")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(NameTakenError, match="not empty"):
        copy(run / "checkpoint-1", tmp_path / "notes")
    copy(run / "checkpoint-1", f"{tmp_path / 'notes'}/")
    assert verify(tmp_path / "notes" / "checkpoint-1").ok
    assert copy(run / "checkpoint-1", run / "checkpoint-2", overwrite=True).is_new
    assert files_of(open_place(run / "checkpoint-2")) == files_of(open_place(run / "checkpoint-1"))
    with pytest.raises(NotACheckpointError):
        copy(tmp_path / "notes", tmp_path / "other")


def test_a_damaged_copy_is_made_whole(run, tmp_path):
    copy(run / "checkpoint-1", tmp_path / "copy")
    (tmp_path / "copy" / FROZEN).write_bytes(b"cut short")
    assert copy(run / "checkpoint-1", tmp_path / "copy").is_new
    assert verify(tmp_path / "copy").ok


def test_a_full_disk_is_said_before_anything_is_sent(run, tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: FROZEN_BYTES)
    with pytest.raises(NoSpaceError, match="free, expected at least"):
        copy(run / "checkpoint-1", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    monkeypatch.undo()
    copy(run / "checkpoint-1", tmp_path / "there" / "checkpoint-1")
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: FROZEN_BYTES)
    assert copy(run / "checkpoint-2", tmp_path / "there" / "checkpoint-2").reused == (FROZEN,)


def test_numbers_of_checkpoints_without_steps_stay(tmp_path):
    """They order a run's checkpoints, whichever is copied first."""
    for name in ("one", "two"):
        staging = open_staging(tmp_path / "run" / name)
        staging.commit(replace(make_checkpoint(staging.stage), step=None, run_id="r"))
    for name in ("two", "one"):
        copy(tmp_path / "run" / name, tmp_path / "copy" / name)
    numbers = [
        load_manifest(LocalStore(tmp_path / "copy" / name)).number for name in ("one", "two")
    ]
    assert numbers == [1, 2]


def test_a_digest_of_what_several_ranks_wrote_is_taken_in_pieces(tmp_path):
    content, cuts = os.urandom(1000), (Cut(100, 700, 150, 50, 1),)
    whole = RunningDigest(1000, cuts, 6)
    pieces = RunningDigest(1000, cuts, 6)
    whole.update(memoryview(content))
    for start in range(0, 1000, 7):
        pieces.update(memoryview(content[start : start + 7]))
    assert whole.text() == pieces.text()
    assert whole.text().startswith(joined_digest([])[:10])
    assert FileRecord("a", 1000, whole.text(), cuts, 6).digest != RunningDigest(1000).text()


# Faults


@pytest.fixture
def small(tmp_path):
    save_with_state(tmp_path / "small", 3)
    return tmp_path / "small"


@pytest.mark.sample("up-answer lost")
@pytest.mark.parametrize(
    "fault", [{}, {"acts_first": True}, {"for_good": True}], ids=["refused", "answer lost", "gone"]
)
@pytest.mark.parametrize("way", ["up", "down", "across"])
def test_a_failed_request_leaves_nothing_and_the_next_copy_completes(small, tmp_path, way, fault):
    """At every request that a copy makes."""
    for at in range(1, 1000):
        start, end = Place(new_bucket(), "from"), Place(new_bucket(), "to")
        if way != "up":
            copy(small, start)
        source = small if way == "up" else start
        goal = tmp_path / f"down-{at}" if way == "down" else end
        with broken_line(at, **fault) as line:
            failed = None
            try:
                copy(source, goal)
            except CheckpointError as error:
                failed = error
        if not line.is_broken:
            assert at > 5
            return
        folder = open_place(goal).folder
        if failed is not None:
            assert folder.stat(MANIFEST_NAME) is None or verify(goal).ok
            assert load_manifest(open_place(source).folder)
            copy(source, goal)
        assert verify(goal).ok
    raise AssertionError("endless")


def test_a_copy_that_is_killed_leaves_nothing_and_the_next_completes(small, tmp_path, monkeypatch):
    monkeypatch.setattr(local_disk, "fsync", lambda _: None)
    expected = contents(small)

    def trial(world):
        goal = tmp_path / world.name
        world.run(copy, small, goal)
        if (goal / MANIFEST_NAME).exists():
            assert verify(goal).ok
        copy(small, goal)
        assert contents(goal).keys() == expected.keys()
        assert verify(goal).ok

    assert try_worlds(trial, Disk("killed"), every=3).calls > 5
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_an_overwrite_in_a_bucket_that_stops_at_any_request_is_finished_by_the_next(small, run):
    """Stopped while it deletes the old one, it once left files that no later copy could replace."""

    def trial(world):
        bucket = new_bucket()
        goal = Place(bucket, "checkpoint-1")
        copy(run / "checkpoint-1", goal)
        world.run(
            partial(copy, overwrite=True), small, Place(world.watch.store(bucket), "checkpoint-1")
        )
        assert copy(small, goal, overwrite=True).bytes
        assert verify(goal).ok
        assert files_of(goal) == files_of(Place(LocalStore(small)))

    assert try_worlds(trial, Requests("stopped"), every=3).calls > 20
