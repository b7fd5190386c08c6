"""Deleting old checkpoints: what goes, what never does, and sweeps that are killed, refused or
raced.
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from contract_sweep import SweepContract, run_of_four
from faults import Disk, World, try_worlds
from small_checkpoints import contents, make_checkpoint, manifest_of, save, save_of, save_with_state

from ft_ckpt import Keep
from ft_ckpt.checkpoint.catalog import discover
from ft_ckpt.checkpoint.checks import verify
from ft_ckpt.checkpoint.commit import open_staging, without_state
from ft_ckpt.checkpoint.leases import TOMBSTONE, hold_lease, lease_reasons, pin, unpin
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, PartRecord, read_manifest
from ft_ckpt.errors import NotACheckpointError
from ft_ckpt.runs.folder import PruneReport, prune_run, recover_all, survey_run
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.digests import read_record
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import open_place

READER = """
import sys
from pathlib import Path
from ft_ckpt.checkpoint.checks.verification import verify
from ft_ckpt import open_place
from ft_ckpt.checkpoint.leases.reader_leases import hold_lease
with hold_lease(open_place(sys.argv[1])):
    assert verify(sys.argv[1]).ok
    print("reading", flush=True)
    while sys.stdin.readline():
        assert verify(sys.argv[1]).ok
        print("read", flush=True)
"""


@pytest.fixture(autouse=True)
def no_power_cut(monkeypatch):
    monkeypatch.setattr(local_disk, "fsync", lambda handle: None)


@pytest.fixture
def run(tmp_path):
    """Five checkpoints with a state, and what else lies about in a run's folder."""
    for step in (8, 9, 10, 11, 12):
        save_with_state(tmp_path / f"checkpoint-{step}", step, metrics={"loss": abs(10 - step)})
    (tmp_path / "checkpoint-keep-me").mkdir()
    (tmp_path / "checkpoint-keep-me" / "notes.txt").write_text("mine")
    make_checkpoint(tmp_path / "checkpoint-7", step=7)  # of another tool: no manifest
    (tmp_path / "checkpoint-8" / "logs").mkdir()
    (tmp_path / "checkpoint-8" / "logs" / "events.txt").write_text("loss 1.0")
    return tmp_path


def steps(root):
    return [info.manifest.step for info in discover(open_place(root))]


def stateful(root):
    return [held.step for held in survey_run(open_place(root)) if held.has_state]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# What goes, what stays


class TestOnADisk(SweepContract):
    @pytest.fixture
    def run(self, tmp_path):
        run_of_four(tmp_path)
        return open_place(tmp_path)


def test_nothing_behind_a_link_is_opened(run, tmp_path_factory):
    """A link may lead to a pipe, on which an open waits, or to what cannot be read now."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    os.mkfifo(elsewhere / MANIFEST_NAME)
    (run / "behind-pipe").symlink_to(elsewhere)
    unreadable = tmp_path_factory.mktemp("unreadable")
    (unreadable / MANIFEST_NAME).mkdir()
    (run / "behind-folder").symlink_to(unreadable)
    opened, real = [], os.open

    def watch(path, *args, **options):
        opened.append(os.path.realpath(path))
        return real(path, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", watch)
        for dry_run in (True, False):
            assert prune_run(open_place(run), Keep(last=1), dry_run=dry_run).problems == ()
    assert steps(run) == [12]
    assert not [
        path
        for path in opened
        if Path(path).is_relative_to(elsewhere) or Path(path).is_relative_to(unreadable)
    ]


def test_a_state_of_several_files_verifies(run):
    assert [verify(info.path).problems for info in discover(open_place(run))] == [()] * 5
    manifest = read_manifest(open_place(run / "checkpoint-8"))
    assert [part.kind for part in without_state(manifest).parts] == ["model"]


def test_pins_and_links_stay(run):
    pin(open_place(run / "checkpoint-8"))
    (run / "best").symlink_to("checkpoint-9")
    report = prune_run(
        open_place(run),
        Keep(last=1, state=Keep(last=1)),
        protect=[open_place(os.path.relpath(run / "checkpoint-10"))],
    )
    assert (steps(run), stateful(run)) == ([8, 9, 10, 12], [8, 9, 10, 12])
    assert [why[0].partition(" by ")[0] for why in report.kept.values()] == [
        *("pinned", "linked from best", "protected", "newest valid"),
    ]
    unpin(open_place(run / "checkpoint-8"))
    (run / "best").unlink()
    prune_run(open_place(run), Keep(last=1))
    assert steps(run) == [12]


def test_links_are_not_followed(run, tmp_path_factory):
    """What a link in the run leads to is not the run's: neither deleted nor its newest."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "checkpoint-99"
    save(elsewhere, step=99)
    (run / "checkpoint-99").symlink_to(elsewhere)
    assert list(prune_run(open_place(run), Keep(last=1)).kept) == [run / "checkpoint-12"]
    assert verify(run / "checkpoint-99").ok


def test_what_a_tombstone_names_behind_a_link_stays(run, tmp_path_factory):
    """An unpacked folder may bring a tombstone and a link to anywhere."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "victim.txt").write_text("mine")
    (elsewhere / "empty").mkdir()
    (run / "bad" / "sub").mkdir(parents=True)
    (run / "bad" / "d").symlink_to(elsewhere)
    (run / "bad" / "sub" / "own.txt").write_text("listed")
    named = [{"path": path} for path in ("d/victim.txt", "d/empty/x", "sub/own.txt")]
    (run / "bad" / TOMBSTONE).write_text(json.dumps({"files": named}))
    report = prune_run(open_place(run), Keep(last=5))
    assert (elsewhere / "victim.txt").read_text() == "mine"
    assert (elsewhere / "empty").is_dir()
    assert (report.left, report.problems) == ((run / "bad" / "d",), ())
    assert names(run / "bad") == ["d"]


def test_a_part_that_was_moved_away_and_linked_keeps_its_files(run, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "state"
    (run / "checkpoint-9" / "state").rename(elsewhere)
    (run / "checkpoint-9" / "state").symlink_to(elsewhere)
    before = contents(elsewhere)
    assert verify(run / "checkpoint-9").ok
    report = prune_run(open_place(run), Keep(last=1))
    assert contents(elsewhere) == before
    assert run / "checkpoint-9" / "state" in report.left
    assert steps(run) == [12]


def test_the_run_itself_is_no_checkpoint_of_it(run):
    """The final model beside its checkpoints."""
    save_of(run, step=None)
    prune_run(open_place(run), Keep(last=1))
    assert verify(run).ok
    assert steps(run) == [None, 12]


def test_another_runs_stay(run):
    """Two runs that share a folder."""
    for step in (20, 21, 22):
        save_of(run / f"theirs-{step}", step=step, run_id="theirs")
    prune_run(open_place(run), Keep(last=1), run_id="theirs")
    assert sorted(steps(run)) == [8, 9, 10, 11, 12, 22]


def test_a_file_by_two_names_is_freed_once(run):
    staging = open_staging(run / "checkpoint-1")
    make_checkpoint(staging.stage, step=1)
    os.link(staging.stage / "model.safetensors", staging.stage / "model.h5")
    staging.commit(make_manifest(staging.stage))
    size = sum((run / "checkpoint-1" / name).stat().st_size for name in ("model.h5", "config.json"))
    assert prune_run(open_place(run), Keep(last=5)).freed_bytes == size


def make_manifest(stage):
    return manifest_of(stage, [PartRecord("", "", "model", "dual", "Tiny", ())], 1)


def test_an_empty_or_absent_run(tmp_path):
    assert prune_run(open_place(tmp_path), Keep(last=1)) == PruneReport()
    assert (
        "absent: cannot be listed"
        in prune_run(open_place(tmp_path / "absent"), Keep(last=1)).problems[0]
    )


# Stopped anywhere

KEEP = Keep(last=2, state=Keep(last=1))  # drops two and strips one


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    root = tmp_path_factory.mktemp("template") / "run"
    root.mkdir()
    for step in (1, 2, 3, 4):
        save_with_state(root / f"checkpoint-{step}", step, world=1)
    (root / "checkpoint-2" / "notes.txt").write_text("mine")
    (root / "checkpoint-keep-me").mkdir()
    after = root.parent / "after"
    shutil.copytree(root, after)
    prune_run(open_place(after), KEEP)
    return root, contents(after)


def check_meanwhile(root):
    """Between two sweeps: what is listed is whole, and nothing that stays is missing."""
    assert set(steps(root)) >= {3, 4}
    assert all(verify(info.path).ok for info in discover(open_place(root)))
    assert (root / "checkpoint-2" / "notes.txt").read_text() == "mine"


def test_killed_at_every_call(tmp_path, template):
    """Killed while it deletes; nothing else is harmed, and the next sweep finishes."""

    def killed(world):
        root = shutil.copytree(template[0], tmp_path / world.name)
        world.run(prune_run, open_place(root), KEEP)
        check_meanwhile(root)
        assert prune_run(open_place(root), KEEP).problems == ()
        assert contents(root) == template[1]
        shutil.rmtree(root)

    assert try_worlds(killed, Disk("killed"), every=3).calls > 30


@pytest.mark.sample("EIO")
@pytest.mark.parametrize("fault", ["Ctrl-C", "EIO"])
def test_refused_at_every_call(tmp_path, template, fault):
    """A failing disk costs the checkpoint it fails on; the others are swept all the same, and
    nothing is raised.
    """

    def refused(world):
        root = shutil.copytree(template[0], tmp_path / world.name)
        report = world.run(prune_run, open_place(root), KEEP)
        check_meanwhile(root)
        if world.is_met and fault == "EIO":
            assert len(report.dropped) + len(report.stripped) == 2
            assert "I/O error" in report.problems[0]
        assert prune_run(open_place(root), KEEP).problems == ()
        assert contents(root) == template[1]
        shutil.rmtree(root)

    assert try_worlds(refused, Disk(fault), every=3).calls > 30


# Raced


def test_a_reader_is_waited_for(run):
    """A checkpoint that another process reads stays; once it is read, or the reader is dead, it
    goes.
    """
    readers = [start_reader(run / f"checkpoint-{step}") for step in (8, 9)]
    assert prune_run(open_place(run), Keep(last=1)).dropped == tuple(
        run / f"checkpoint-{step}" for step in (10, 11)
    )
    for reader in readers:
        reader.stdin.write("\n")
        reader.stdin.flush()
        assert reader.stdout.readline() == "read\n"
    readers[0].stdin.close()
    readers[0].wait()
    readers[1].kill()
    readers[1].wait()
    assert prune_run(open_place(run), Keep(last=1)).dropped == tuple(
        run / f"checkpoint-{step}" for step in (8, 9)
    )
    for reader in readers:
        reader.stdout.close()
    readers[1].stdin.close()
    assert readers[0].returncode == 0
    assert names(run) == ["checkpoint-12", "checkpoint-7", "checkpoint-8", "checkpoint-keep-me"]
    assert names(run / "checkpoint-8") == ["logs"]


def start_reader(checkpoint):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    reader = subprocess.Popen([sys.executable, "-c", READER, str(checkpoint)], **pipes)
    assert reader.stdout.readline() == "reading\n"
    return reader


@pytest.mark.slow
def test_readers_and_sweeps_side_by_side(tmp_path):
    """Whoever takes a lease and then finds a manifest reads what it lists, however often it is
    swept.
    """
    sweeper = os.fork()
    if sweeper == 0:
        for step in range(200):
            save(tmp_path / f"checkpoint-{step}", step=step)
            prune_run(open_place(tmp_path), Keep(last=1))
        os._exit(0)
    reads = 0
    while os.waitpid(sweeper, os.WNOHANG)[0] == 0:
        for checkpoint in tmp_path.glob("checkpoint-*"):
            with hold_lease(open_place(checkpoint)), contextlib.suppress(NotACheckpointError):
                listed = read_manifest(open_place(checkpoint)).files
                found = [read_record(LocalStore(checkpoint), file.path) for file in listed]
                assert [file.digest for file in found] == [file.digest for file in listed]
                reads += 1
    assert reads > 10
    prune_run(open_place(tmp_path), Keep(last=1))
    assert names(tmp_path) == ["checkpoint-199"]


def test_a_lease_that_another_process_checks_as_it_is_taken(run, monkeypatch):
    """The check locks it for a moment. It guards the checkpoint all the same."""
    real = fcntl.flock

    def checked_first(descriptor, operation):
        checking = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        real(checking, fcntl.LOCK_SH)
        try:
            real(descriptor, operation)
        finally:
            os.close(checking)

    with contextlib.ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(fcntl, "flock", checked_first)
            stack.enter_context(hold_lease(open_place(run / "checkpoint-9")))
        assert lease_reasons(run / "checkpoint-9")
        prune_run(open_place(run), Keep(last=1))
        assert verify(run / "checkpoint-9").ok
    prune_run(open_place(run), Keep(last=1))
    assert not (run / "checkpoint-9").exists()


@pytest.mark.parametrize("keep", [Keep(last=1), Keep(state=Keep(last=1))], ids=["drop", "strip"])
@pytest.mark.parametrize("mark", ["pin", "lease"])
def test_marked_between_the_plan_and_the_deed(run, monkeypatch, keep, mark):
    """The manifest is out of the way and only then marks are looked at: one that is there by now
    brings it back.
    """
    before = contents(run / "checkpoint-9")
    held, move = hold_lease(open_place(run / "checkpoint-9")), local_disk.move
    put = {"pin": lambda: pin(open_place(run / "checkpoint-9")), "lease": held.__enter__}[mark]
    tombstone = run / "checkpoint-9" / TOMBSTONE
    monkeypatch.setattr(
        local_disk, "move", lambda one, other: (other == tombstone and put(), move(one, other))
    )
    report = prune_run(open_place(run), keep)
    monkeypatch.undo()
    assert report.kept[run / "checkpoint-9"][0].startswith("pinned" if mark == "pin" else "in use")
    assert {
        p: c for p, c in contents(run / "checkpoint-9").items() if not p.startswith(".")
    } == before
    assert steps(run) == ([9, 12] if keep.last else [8, 9, 10, 11, 12])
    if mark == "lease":
        held.__exit__(None, None, None)
        prune_run(open_place(run), keep)
        assert stateful(run) == [12]


def test_what_is_about_to_be_replaced_stays(run):
    """A save to it is under way: neither the old nor the new is the sweep's."""
    staging = open_staging(run / "checkpoint-9")
    report = prune_run(open_place(run), Keep(last=1))
    assert report.kept[run / "checkpoint-9"] == ("a save to it is not finished",)
    staging.commit(make_checkpoint(staging.stage, step=9))
    assert verify(run / "checkpoint-9").ok


def test_two_sweeps_do_not_meet(run):
    handle = os.open(run, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    before = contents(run)
    assert "another sweep is at work" in prune_run(open_place(run), Keep(last=1)).problems[0]
    assert contents(run) == before
    os.close(handle)
    assert prune_run(open_place(run), Keep(last=1)).problems == ()


def test_one_that_disappears_is_no_error(run, monkeypatch):
    """Somebody deletes by hand while the sweep looks, or after it has."""
    monkeypatch.setattr(
        "ft_ckpt.checkpoint.commit.run_folder.deletion_guards",
        lambda path: shutil.rmtree(path.with_name("checkpoint-9"), True) or (),
    )
    assert prune_run(open_place(run), Keep(last=1)).problems == ()
    assert steps(run) == [12]


# Leftovers


def test_what_dead_saves_left_is_cleared(run):
    """Stages of processes that were killed go, those of living ones stay, and the checkpoints are
    as they were.
    """
    before = contents(run)
    staging = open_staging(run / "checkpoint-100")
    for step in (99, 9):
        World(Disk("killed"), "killed", 5).run(partial(save, step=step), run / f"checkpoint-{step}")
        assert contents(run) != before | {staging.stage.name: b""}
        assert len(recover_all(open_place(run))) == 1
        assert contents(run) == before | {staging.stage.name: b""}


def test_an_unfinished_file_goes_after_a_day(run):
    """Of a process that was killed as it took the lease of the run."""
    drafts = [run / f".ft_ckpt-{name}.draft" for name in ("old", "new")]
    for draft in drafts:
        draft.write_text("half")
    os.utime(drafts[0], (0, 0))
    recover_all(open_place(run))
    assert [draft.exists() for draft in drafts] == [False, True]


def test_the_draft_of_a_killed_sweep_goes_after_a_day(run, tmp_path_factory):
    """Of one that was killed at the rename of a tombstone or a manifest in a checkpoint."""
    keep, found = Keep(last=5, state=Keep(last=4)), 0

    def trial(world):
        nonlocal found
        folder = tmp_path_factory.mktemp("run") / "run"
        shutil.copytree(run, folder)
        world.run(prune_run, open_place(folder), keep)
        drafts = sorted(folder.glob("checkpoint-*/.ft_ckpt-*.draft"))
        found += len(drafts)
        if drafts:
            prune_run(open_place(folder), Keep(last=5))
            assert all(draft.exists() for draft in drafts), "its writer may be alive"
        for draft in drafts:
            os.utime(draft, (0, 0))
        prune_run(open_place(folder), Keep(last=5))
        assert not any(draft.exists() for draft in drafts)

    try_worlds(trial, Disk("killed"))
    assert found >= 2


def test_a_spoilt_tombstone_is_named_and_left(run):
    shutil.copytree(run / "checkpoint-8", run / "checkpoint-1")
    (run / "checkpoint-1" / MANIFEST_NAME).rename(run / "checkpoint-1" / TOMBSTONE)
    for text, said in (
        ("{", "not a manifest"),
        ('{"files": [{"path": "../x"}]}', "outside of the folder"),
    ):
        (run / "checkpoint-1" / TOMBSTONE).write_text(text)
        before = contents(run)
        assert said in prune_run(open_place(run), Keep()).problems[0]
        assert contents(run) == before


def test_a_model_saved_into_the_folder_of_its_run_loses_no_checkpoint(tmp_path):
    """As `trainer.save_model()` does: wherever the second such save is killed, the run is whole
    when it goes on.
    """

    def trial(world):
        root = tmp_path / world.name / "run"
        save_with_state(root / "checkpoint-8", 8)
        save_of(root)
        world.run(save_of, root)
        recover_all(open_place(root))
        assert verify(root).ok
        assert verify(root / "checkpoint-8").ok
        assert not list(root.parent.glob(".*"))

    try_worlds(trial, Disk("killed"))
