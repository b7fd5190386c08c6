"""Saves that are killed, interrupted, refused or read meanwhile: the old or the new checkpoint is
whole, always.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from faults import Disk, World, in_child, try_worlds
from small_checkpoints import contents, make_checkpoint, save

from ft_ckpt import processes
from ft_ckpt.checkpoint.catalog import latest
from ft_ckpt.checkpoint.checks import verify
from ft_ckpt.checkpoint.commit import (
    LocalStaging,
    check_target,
    open_staging,
    place_files,
    recover_target,
    uncommit,
)
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, read_manifest
from ft_ckpt.errors import CorruptError, ManifestError, NoSpaceError, TargetError
from ft_ckpt.storage import local_disk, permission_bits
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.places import open_place, scratch_file

INDEX = "model.safetensors.index.json"
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and other users need root")


@pytest.fixture(autouse=True)
def no_power_cut(monkeypatch, tmp_path):
    """Nothing here pulls the plug: spare the disk.

    Some tests change the working directory: put it back.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_disk, "fsync", lambda handle: None)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def add_foreign(target):
    """What users and other tools keep in a checkpoint folder; no save may lose it."""
    (target / "logs" / "run").mkdir(parents=True)
    (target / "logs" / "run" / "events.txt").write_text("loss 1.0")
    (target / "notes.txt").write_text("the good one")
    (target / "best").symlink_to("notes.txt")


def fresh(target):
    pass


def empty(target):
    target.mkdir()


def foreign(target):
    make_checkpoint(target, step=1, shards=3)  # no manifest: another tool's save
    add_foreign(target)


def committed(target):
    save(target, step=1, shards=3, parts=("", "value"))
    add_foreign(target)


def overwrite(target):
    save(target, step=2, shards=2, parts=("", "policy"))


def overwrite_from_inside(target):
    os.chdir(target)
    overwrite(target)


CASES = {
    "rename": (fresh, overwrite),
    "rename over empty": (empty, overwrite),
    "pour": (foreign, overwrite),
    "exchange": (committed, overwrite),
    "sideline": (committed, overwrite_from_inside),
}
in_every_case = pytest.mark.parametrize(("prepare", "act"), CASES.values(), ids=CASES)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """For each way to prepare: what is in the target before, and what after a save that nothing
    disturbs.
    """

    def outcome(prepare):
        target = tmp_path_factory.mktemp("outcome") / "checkpoint"
        prepare(target)
        before = contents(target)
        overwrite(target)
        return before, contents(target)

    return {prepare: outcome(prepare) for prepare, _ in CASES.values()}


def check_settled(target, outcomes, prepare):
    """Whole, old or new, with everything foreign, and nothing left over beside or inside."""
    before, after = outcomes[prepare]
    found = contents(target)
    assert found in (before, after)
    assert list(target.parent.rglob(".*")) == []
    newest = latest(target.parent)
    expected = 2 if found == after else 1 if MANIFEST_NAME in before else None
    assert (read_manifest(open_place(newest)).step if newest else None) == expected
    assert newest is None or verify(newest).ok


def check_recovery(tmp_path, outcomes, prepare, act, faults):
    """A save that `faults` disturb at any call leaves the old or the new checkpoint; its recovery
    leaves nothing.
    """

    def trial(world):
        target = tmp_path / world.name / "checkpoint"
        target.parent.mkdir()
        prepare(target)
        world.run(act, target)
        os.chdir(tmp_path)
        recover_target(target)
        check_settled(target, outcomes, prepare)
        assert world.is_met or contents(target) == outcomes[prepare][1]

    assert try_worlds(trial, faults).calls >= 10


@pytest.mark.sample("rename over empty")
@in_every_case
def test_killed_at_every_call(tmp_path, outcomes, prepare, act):
    """Killed mid-save, the newest folder is half-written."""
    check_recovery(tmp_path, outcomes, prepare, act, Disk("killed"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "every"),
    [
        *(("pour", 2), ("exchange", 1), ("sideline", 5)),
        *(pytest.param(case, 1, marks=pytest.mark.slow) for case in ("pour", "sideline")),
    ],
)
def test_killed_and_its_recovery_stopped(tmp_path, outcomes, case, every):
    """The machine that died once dies again while it cleans up, at every call of either."""
    prepare, act = CASES[case]
    seen = []

    def killed(world):
        crashed = tmp_path / world.name
        crashed.mkdir()
        prepare(crashed / "checkpoint")
        world.run(act, crashed / "checkpoint")
        state = {
            re.sub(r"-\d+-[0-9a-f]{8}", "", path): content
            for path, content in contents(crashed).items()
        }
        if state not in seen:
            seen.append(state)
            if len(seen) % every == 0:
                trial = partial(recovery_stopped, crashed)
                try_worlds(trial, Disk("Ctrl-C"), may_be_idle=True)

    def recovery_stopped(crashed, world):
        target = tmp_path / "again" / "checkpoint"
        shutil.copytree(crashed, target.parent, symlinks=True)
        world.run(recover_target, target)
        recover_target(target)
        check_settled(target, outcomes, prepare)
        shutil.rmtree(target.parent)

    try_worlds(killed, Disk("killed"))
    assert len(seen) > every


def overwrite_killed_at_its_manifest(target):
    """Pour a new checkpoint over the one in `target`, and die when all of it is in place but its
    manifest.
    """
    manifests, real = [], local_disk.move

    def move(name, *args, **more):
        if name == MANIFEST_NAME:
            manifests.append(name)
            if len(manifests) == 2:  # the first is the old one, on its way to the sideline
                os.kill(os.getpid(), signal.SIGKILL)
        real(name, *args, **more)

    local_disk.move = move
    overwrite_from_inside(target)


def test_a_recovery_that_is_stopped_anywhere_shows_nothing_torn(tmp_path):
    """The files of the old checkpoint come back before its manifest, which readers trust."""
    crashed = tmp_path / "crashed" / "checkpoint"
    save(crashed, step=1, shards=3)
    in_child(lambda: overwrite_killed_at_its_manifest(crashed))
    assert not (crashed / MANIFEST_NAME).exists()

    def trial(world):
        target = tmp_path / world.name / "checkpoint"
        shutil.copytree(crashed.parent, target.parent)
        world.run(recover_target, target)
        assert not (target / MANIFEST_NAME).exists() or verify(target).ok
        recover_target(target)
        assert verify(target).ok
        assert read_manifest(open_place(target)).step == 1

    assert try_worlds(trial, Disk("Ctrl-C")).calls >= 10


def failing_after(patch, name, error, *, nth=1, only=lambda *args: True):
    """Let the `nth` call of `disk`'s function `name` fail; the list of calls that were failed."""
    real, calls, failed = getattr(local_disk, name), [], []

    def run(*args, **more):
        if only(*args):
            calls.append(args)
            if len(calls) == nth:
                failed.append(args)
                raise error
        return real(*args, **more)

    patch.setattr(local_disk, name, run)
    return failed


@pytest.mark.parametrize("prepare", [committed, foreign, fresh])
def test_what_is_in_place_but_may_be_lost_is_said_and_the_old_one_kept(
    tmp_path, monkeypatch, outcomes, prepare
):
    """The sync after the point of no return fails: a power cut may still undo it, so nothing old is
    deleted.
    """
    target = tmp_path / "checkpoint"
    prepare(target)
    before = contents(target)

    def is_around(handle):
        place = Path(f"/proc/self/fd/{handle}").readlink()
        done = (target / MANIFEST_NAME).exists() and read_manifest(open_place(target)).step == 2
        return done and place in (tmp_path, target)

    with monkeypatch.context() as patch:
        failed = failing_after(patch, "fsync", OSError(errno.EIO, "I/O error"), only=is_around)
        staging = open_staging(target)
        manifest = make_checkpoint(staging.stage, step=2, shards=2, parts=("", "policy"))
        with pytest.raises(
            TargetError, match=r"checkpoint is in place, but might not survive.*save again"
        ) as caught:
            staging.commit(manifest)
        staging.discard()
    assert (len(failed), caught.value.errno) == (1, errno.EIO)
    assert (verify(target).ok, read_manifest(open_place(target)).step) == (True, 2)
    kept = [path for path in tmp_path.rglob(".*ft_ckpt-*") if path.is_dir()]
    if prepare is committed:
        assert contents(kept[0]) == before
        assert kept[0].name in str(caught.value)
    elif prepare is foreign:
        (aside,) = target.glob(".ft_ckpt-old-*")
        assert contents(aside).items() <= before.items()
    overwrite(target)
    check_settled(target, outcomes, prepare)


@pytest.mark.parametrize("name", ["rmtree", "unlink"])
def test_what_cannot_be_cleaned_up_is_a_warning(tmp_path, monkeypatch, outcomes, name):
    """The save is done: whoever waits for it is told so, and the next one in this process clears
    the rest.
    """
    target = tmp_path / "checkpoint"
    committed(target)
    with monkeypatch.context() as patch:
        patch.setattr(
            local_disk, name, lambda *args, **more: None if name == "rmtree" else refuse()
        )
        with pytest.warns(UserWarning, match="is left for the next save to clear"):
            overwrite(target)
    assert (verify(target).ok, read_manifest(open_place(target)).step) == (True, 2)
    assert [path for path in tmp_path.iterdir() if path != target]
    overwrite(target)
    check_settled(target, outcomes, committed)


def refuse(*_args, **_more):
    raise OSError(errno.EIO, "I/O error")


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("which", ["stage", "target"])
def test_files_of_others_outlive_a_manifest_that_cannot_be_read(
    tmp_path, monkeypatch, outcomes, code, which
):
    """After the exchange: what is not known to be ours is not deleted."""
    target = tmp_path / "checkpoint"
    committed(target)
    real, exchange, swapped = os.open, local_disk.exchange_folders, []

    def failing(path, *args, **more):
        around = Path(str(path)).parent
        if (
            swapped
            and str(path).endswith(MANIFEST_NAME)
            and (around == target) == (which == "target")
        ):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        patch.setattr(
            local_disk, "exchange_folders", lambda *two: (exchange(*two), swapped.append(1))
        )
        staging = open_staging(target)
        staging.commit(make_checkpoint(staging.stage, step=2, shards=2, parts=("", "policy")))
    found = [path.name for path in tmp_path.rglob("notes.txt")]
    assert found == ["notes.txt"]
    overwrite(target)
    check_settled(target, outcomes, committed)


@pytest.mark.sample(
    "Ctrl-C-rename",
    "Ctrl-C-rename over empty",
    "EIO-rename",
    "EIO-rename over empty",
    "EIO-exchange",
)
@in_every_case
@pytest.mark.parametrize("fault", ["Ctrl-C", "EIO"])
def test_interrupted_at_every_call(tmp_path, outcomes, prepare, act, fault):
    """Ctrl-C or a failing disk in the middle: the same, in a process that lives on."""
    check_recovery(tmp_path, outcomes, prepare, act, Disk(fault))


@pytest.mark.parametrize("steps", [(None, None), (1, 2)])
def test_the_later_of_two_saves_is_the_newest_whatever_the_clock_says(tmp_path, steps):
    for name, day, step in zip(("first", "second"), (2, 1), steps, strict=True):
        staging = open_staging(tmp_path / name)
        manifest = replace(
            make_checkpoint(staging.stage), step=step, created=f"2026-01-0{day}T00:00:00+00:00"
        )
        staging.commit(manifest)
    assert latest(tmp_path) == tmp_path / "second"


def test_a_reader_always_sees_a_whole_one(tmp_path):
    """An overwrite never passes through a state in which neither the old nor the new is whole."""
    target = tmp_path / "checkpoint"
    save(target, step=0)
    writer = os.fork()
    if writer == 0:
        for step in range(1, 201):
            save(target, step=step, shards=1 + step % 3)
        os._exit(0)
    reads = 0
    while os.waitpid(writer, os.WNOHANG)[0] == 0:
        (target / MANIFEST_NAME).read_bytes()
        report = verify(target)
        assert report.ok, report.problems
        reads += 1
    assert reads > 10
    assert read_manifest(open_place(target)).step == 200


def test_everything_is_synced_and_in_order(tmp_path, monkeypatch):
    """Files and folders first, then the checkpoint's name; else a power cut tears it."""
    done = []
    monkeypatch.setattr(
        local_disk,
        "fsync",
        lambda handle: done.append(str(Path(f"/proc/self/fd/{handle}").readlink())),
    )
    move = local_disk.move
    monkeypatch.setattr(
        local_disk, "move", lambda *two, **more: (done.append(two), move(*two, **more))
    )
    target = tmp_path / "new" / "checkpoint"
    staging = open_staging(target)
    assert str(tmp_path) in done  # or the folder "new" might not outlive the power cut
    done.clear()
    manifest = make_checkpoint(staging.stage, parts=["policy"])
    staging.commit(manifest)
    placed = done.index((staging.stage, target))
    files = [str(staging.stage / file.path) for file in manifest.files]
    synced = {each for each in done[:placed] if isinstance(each, str)}
    assert {
        *files,
        str(staging.stage),
        str(staging.stage / "policy"),
        str(staging.stage / MANIFEST_NAME),
    } == synced
    assert str(target.parent) in done[placed:]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize("case", ["rename", "pour"])
def test_modes_follow_the_umask(tmp_path, umask, case):
    """Saved files that other users cannot read (mode 0600)."""
    target, before = tmp_path / "runs" / "checkpoint", os.umask(umask)
    try:
        CASES[case][0](target)
        staging = open_staging(target)
        manifest = make_checkpoint(staging.stage, parts=["policy"])
        for path in staging.stage.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        staging.commit(manifest)
    finally:
        os.umask(before)
    assert permission_bits(target) == permission_bits(target / "policy") == 0o777 & ~umask
    assert {permission_bits(target / name) for name in (MANIFEST_NAME, "policy/config.json")} == {
        0o666 & ~umask
    }


def test_an_overwritten_folder_keeps_its_mode(tmp_path):
    save(tmp_path / "checkpoint", step=1)
    (tmp_path / "checkpoint").chmod(0o2770)
    save(tmp_path / "checkpoint", step=2)
    assert permission_bits(tmp_path / "checkpoint") == 0o2770


def test_nobody_else_enters_an_unfinished_save(tmp_path):
    umask = os.umask(0)
    try:
        staging = open_staging(tmp_path / "checkpoint")
    finally:
        os.umask(umask)
    assert staging.stage.stat().st_mode & 0o777 == 0o700
    staging.discard()


def test_what_was_for_the_owner_alone_stays_so(tmp_path):
    target = tmp_path / "checkpoint"
    save(target, step=1, parts=("", "policy"))
    for path in target.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    save(target, step=2, shards=2, parts=("", "policy", "value"))
    modes = {permission_bits(path) for path in target.rglob("*")}
    assert modes == {0o600, 0o700}


@pytest.mark.parametrize("act", [overwrite, overwrite_from_inside])
def test_each_file_keeps_its_mode(tmp_path, act):
    target = tmp_path / "checkpoint"
    save(target, step=1, shards=2, parts=("", "policy"))
    wanted = {
        "config.json": 0o640,
        "policy": 0o2750,
        "policy/config.json": 0o604,
        MANIFEST_NAME: 0o444,
    }
    for name, mode in wanted.items():
        (target / name).chmod(mode)
    act(target)
    assert {name: permission_bits(target / name) for name in wanted} == wanted


def test_foreign_folders_are_moved_not_copied(tmp_path):
    """A logger that has the folder open goes on writing into it."""
    target = tmp_path / "checkpoint"
    committed(target)
    before = (target / "logs").stat().st_ino
    overwrite(target)
    assert (target / "logs").stat().st_ino == before


@pytest.mark.parametrize("prepare", [foreign, committed])
@pytest.mark.parametrize("shards", [1, 2])
def test_no_stale_shard_survives(tmp_path, prepare, shards):
    """Old shards and a stale index mix with the new weights."""
    prepare(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "pytorch_model-00001-of-00009.bin").write_text("stale")
    (tmp_path / "checkpoint" / "optimizer.bin").write_text("not weights")
    manifest = save(tmp_path / "checkpoint", step=2, shards=shards)
    weights = {name for name in contents(tmp_path / "checkpoint") if "model" in name}
    assert weights == {file.path for file in manifest.files if "model" in file.path}
    assert (tmp_path / "checkpoint" / "optimizer.bin").exists()
    assert verify(tmp_path / "checkpoint").ok


def test_an_adapter_saved_into_the_folder_of_its_base_leaves_the_base(tmp_path):
    make_checkpoint(tmp_path / "base", step=1)
    save(tmp_path / "base", step=2, kind="adapter")
    assert (tmp_path / "base" / "model.safetensors").exists()
    assert verify(tmp_path / "base").ok


def test_a_model_is_not_left_with_the_adapter_of_another_save(tmp_path):
    """from_pretrained would put the adapter that adapter_config.json describes on the new model,
    unasked.
    """
    make_checkpoint(tmp_path / "out", step=1, kind="adapter")
    save(tmp_path / "out", step=2)
    assert not (tmp_path / "out" / "adapter_config.json").exists()


def test_through_a_link(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "out").symlink_to("big")
    for step in (1, 2):
        save(tmp_path / "out", step=step)
        assert (tmp_path / "out").is_symlink()
        assert read_manifest(open_place(tmp_path / "big")).step == step
    assert names(tmp_path) == ["big", "out"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTTY, errno.ENOSYS])
def test_without_exchange(tmp_path, monkeypatch, code):
    """File systems and kernels that cannot exchange get the same result."""

    def refuse(*_paths):
        raise OSError(code, os.strerror(code))

    committed(tmp_path / "checkpoint")
    monkeypatch.setattr(local_disk, "exchange_folders", refuse)
    overwrite(tmp_path / "checkpoint")
    assert read_manifest(open_place(tmp_path / "checkpoint")).step == 2
    assert (tmp_path / "checkpoint" / "notes.txt").exists()
    assert not [name for name in contents(tmp_path) if "ft_ckpt-" in name]


def test_the_working_directory_stays_usable(tmp_path, monkeypatch):
    save(tmp_path / "checkpoint", step=1)
    monkeypatch.chdir(tmp_path / "checkpoint")
    save(tmp_path / "checkpoint", step=2)
    assert json.loads(Path("config.json").read_text()) == {"step": 2}


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "none", place]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a small disk")
    yield place
    subprocess.run(["umount", place], check=True)


def fill(folder):
    with (folder / "ballast").open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass


@pytest.mark.parametrize("prepare", [fresh, committed])
def test_disk_full_keeps_the_old_one(small_disk, prepare):
    """A full disk destroys the previous checkpoint."""
    target = small_disk / "run" / "checkpoint"
    target.parent.mkdir()
    prepare(target)
    before = contents(target)
    staging = open_staging(target)
    manifest = make_checkpoint(staging.stage, step=2)
    with pytest.raises(OSError, match="space"):
        fill(small_disk)
    with pytest.raises(NoSpaceError, match="no room") as caught:
        staging.commit(manifest)
    assert caught.value.errno == errno.ENOSPC
    assert contents(target) == before
    assert names(target.parent) == (["checkpoint"] if before else [])


def test_file_size_limit_keeps_the_old_one(tmp_path):
    """The same under RLIMIT_FSIZE, met while the manifest is written."""
    resource = pytest.importorskip("resource")
    committed(tmp_path / "checkpoint")
    before = contents(tmp_path)

    def limited():
        staging = open_staging(tmp_path / "checkpoint")
        manifest = make_checkpoint(staging.stage, step=2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        staging.commit(manifest)

    assert in_child(limited).startswith("NoSpaceError: ")
    assert contents(tmp_path) == before


def test_too_little_room_is_found_first(tmp_path):
    """No size check before hours of writing."""
    check_target(tmp_path / "new" / "checkpoint", 1000)
    with pytest.raises(
        NoSpaceError, match="bytes free on its device, expected at least 1,000,000,000,000,000,000"
    ):
        check_target(tmp_path / "new" / "checkpoint", 10**18)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("prepare", [empty, foreign, committed])
def test_target_is_a_mount_point(small_disk, prepare):
    """A volume mounted at the target cannot be renamed; the stage and the sideline are inside
    it.
    """
    if prepare is not empty:
        shutil.copytree(
            _prepared(small_disk.parent, prepare), small_disk, dirs_exist_ok=True, symlinks=True
        )
    overwrite(small_disk)
    assert verify(small_disk).ok
    assert read_manifest(open_place(small_disk)).step == 2
    assert prepare is empty or (small_disk / "notes.txt").exists()
    assert not [name for name in names(small_disk) if name.startswith(".")]


def _prepared(folder, prepare):
    prepare(folder / "prepared")
    return folder / "prepared"


@pytest.mark.parametrize("inside", ["", "logs"])
def test_mounted_from_the_same_disk(tmp_path, inside):
    """A bind mount at the target or in it: the device number does not tell."""
    target = tmp_path / "my checkpoint"
    committed(target)
    (tmp_path / "volume").mkdir()
    bind = ["mount", "--bind", tmp_path / "volume", target / inside]
    if os.geteuid() != 0 or subprocess.run(bind, check=False, capture_output=True).returncode != 0:
        pytest.skip("cannot bind")
    try:
        overwrite(target)
        assert read_manifest(open_place(target)).step == 2
        assert contents(tmp_path / "volume").keys() == (
            set() if inside else contents(target).keys()
        )
    finally:
        subprocess.run(["umount", target / inside], check=True)


def test_read_only_disk(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(TargetError, match="not writable"):
        open_staging(small_disk / "run" / "checkpoint")


@root_only
def test_parent_that_is_not_ours(tmp_path):
    """Only the target folder was made for us: everything happens inside it."""
    home = Path(tempfile.mkdtemp())
    home.chmod(0o755)
    target = home / "checkpoint"
    target.mkdir()
    target.chmod(0o777)

    def as_nobody():
        os.setuid(65534)
        save(target, step=1)
        save(target, step=2)
        check_target(home / "other", 0)

    said = in_child(as_nobody)
    found = verify(target).ok, read_manifest(open_place(target)).step, names(home)
    shutil.rmtree(home)
    assert found == (True, 2, ["checkpoint"])
    assert said.startswith("TargetError: ")
    assert "not writable by this process" in said


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_target_is_a_file(tmp_path, below):
    (tmp_path / "out").write_text("a file")
    for refuse in (open_staging, lambda path: check_target(path, 0)):
        with pytest.raises(TargetError, match="out: a file, expected a folder"):
            refuse(tmp_path / "out" / below)


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(TargetError, match="a: "):
        open_staging(tmp_path / "a")


@pytest.mark.parametrize("obstacle", ["config.json/mine.txt", "policy"])
@pytest.mark.parametrize("prepare", [fresh, committed])
def test_nothing_in_the_way_is_deleted(tmp_path, prepare, obstacle):
    target = tmp_path / "checkpoint"
    prepare(target)
    (target / "config.json").unlink(missing_ok=True)
    (target / obstacle).parent.mkdir(parents=True, exist_ok=True)
    (target / obstacle).write_text("mine")
    before = contents(tmp_path)
    staging = open_staging(target)
    manifest = make_checkpoint(staging.stage, step=2, parts=("", "policy"))
    with pytest.raises(TargetError, match="move it away"):
        staging.commit(manifest)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("path", ["/etc/passwd", "../outside", "a/../../b", "a//b", "..\\b", ""])
def test_paths_that_lead_outside_are_refused(tmp_path, path):
    save(tmp_path / "checkpoint", step=1)
    staging = open_staging(tmp_path / "checkpoint")
    manifest = make_checkpoint(staging.stage, step=2)
    manifest = replace(manifest, files=(*manifest.files, FileRecord(path, 1, "")))
    with pytest.raises(ManifestError, match="must be relative"):
        staging.commit(manifest)
    assert read_manifest(open_place(tmp_path / "checkpoint")).step == 1


@pytest.mark.parametrize("act", [overwrite, overwrite_from_inside])
def test_a_forged_old_manifest_moves_nothing_outside(tmp_path, act):
    (tmp_path / "precious").write_text("mine")
    save(tmp_path / "checkpoint", step=1)
    old = (tmp_path / "checkpoint" / MANIFEST_NAME).read_text()
    (tmp_path / "checkpoint" / MANIFEST_NAME).write_text(
        old.replace('"config.json"', '"../precious"')
    )
    act(tmp_path / "checkpoint")
    assert (tmp_path / "precious").read_text() == "mine"
    assert verify(tmp_path / "checkpoint").ok


def _drop(stage):
    (stage / "config.json").unlink()


def _cut(stage):
    os.truncate(stage / "model.safetensors", 20)


def _add(stage):
    (stage / "extra.bin").write_text("?")


def _link(stage):
    (stage / "link").symlink_to("/etc/passwd")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_drop, "config.json: not in the stage"),
        (_cut, "model.safetensors: 20 bytes in the stage, [0-9]+ in the manifest"),
        (_add, "extra.bin: not in the manifest"),
        (_link, "link: a symbolic link"),
    ],
)
def test_a_stage_that_is_not_what_was_described(tmp_path, spoil, message):
    committed(tmp_path / "checkpoint")
    before = contents(tmp_path)
    staging = open_staging(tmp_path / "checkpoint")
    manifest = make_checkpoint(staging.stage, step=2)
    spoil(staging.stage)
    with pytest.raises(CorruptError, match=message):
        staging.commit(manifest)
    assert contents(tmp_path) == before


def test_recover_leaves_the_living_alone(tmp_path):
    """One process cleans up what another is still writing."""
    target = tmp_path / "checkpoint"
    ours = open_staging(target).stage
    theirs = tmp_path / f".checkpoint.ft_ckpt-stage-elsewhere-1-{'0' * 8}"
    neighbour = tmp_path / f".checkpoint-2.ft_ckpt-stage-elsewhere-1-{'0' * 8}"
    theirs.mkdir()
    neighbour.mkdir()
    os.utime(neighbour, (0, 0))
    other = in_child(lambda: recover_target(target))
    assert other == ""
    assert recover_target(target) == ()
    assert ours.is_dir()
    os.utime(theirs, (0, 0))
    assert recover_target(target) == (f"{theirs.name}: removed what was left of a save",)
    assert neighbour.is_dir()


def test_a_stage_that_cannot_be_listed_is_not_incomplete(tmp_path, monkeypatch):
    """The server has gone: that is said, and not that files are missing."""
    target = tmp_path / "checkpoint"
    save(target, step=7)

    def gone(path):
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", str(path))

    manifest, staging = read_manifest(open_place(target)), open_staging(target)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", gone)
        with pytest.raises(TargetError, match="not connected"):
            staging.commit(manifest)
    assert verify(target).ok


def test_what_a_node_with_another_clock_has_left_is_settled(tmp_path):
    """A folder whose time is in the future, by this node's clock, holds the old checkpoint."""
    target = tmp_path / "checkpoint"
    save(target, step=7)
    sideline = target / f".ft_ckpt-old-elsewhere-1-{'0' * 8}"
    sideline.mkdir()
    for path in list(target.iterdir()):
        if path != sideline:
            path.rename(sideline / path.name)
    ahead = time.time() + 600
    os.utime(sideline, (ahead, ahead))
    assert recover_target(target) == (f"{target}: undid an unfinished overwrite",)
    assert verify(target).ok


def test_a_link_named_like_a_leftover_leads_nowhere(tmp_path):
    """What it leads to may be anybody's: nothing is taken from there, and nothing deleted."""
    save(tmp_path / "theirs" / "checkpoint", step=7)
    (tmp_path / "theirs" / "checkpoint" / "notes.txt").write_text("theirs")
    before = contents(tmp_path / "theirs")
    target = tmp_path / "run" / "checkpoint-4"
    committed(target)
    for name in (
        f".checkpoint-4.ft_ckpt-stage-{dead_owner()}",
        f"checkpoint-4/.ft_ckpt-old-{dead_owner()}",
    ):
        (tmp_path / "run" / name).symlink_to(tmp_path / "theirs" / "checkpoint")
    overwrite(target)
    overwrite_from_inside(target)
    assert contents(tmp_path / "theirs") == before
    assert (target / "notes.txt").read_text() != "theirs"


def dead_owner(machine=None):
    """An owner of this machine whose process is gone."""
    return re.sub(
        r"-[0-9a-f]{8}-\d+-",
        f"-{machine or processes.new_owner().split('-')[-3]}-999999999-",
        processes.new_owner(),
    )


@pytest.mark.parametrize("act", [overwrite, overwrite_from_inside])
def test_nothing_goes_through_a_link_in_the_target(tmp_path, act):
    """A part that was moved to another disk and linked: what is behind the link stays as it is."""
    target, elsewhere = tmp_path / "checkpoint", tmp_path / "elsewhere"
    save(target, step=1, parts=("", "policy"))
    (target / "policy").rename(elsewhere)
    (target / "policy").symlink_to(elsewhere)
    before = contents(elsewhere)
    with contextlib.suppress(TargetError):  # a link where a folder has to be
        act(target)
    os.chdir(tmp_path)
    assert contents(elsewhere) == before
    assert verify(target).ok


HOLD_A_STAGE = """
import sys, socket, time
socket.gethostname = lambda: "the-same-name"
from pathlib import Path
from ft_ckpt.checkpoint.commit import open_staging
from ft_ckpt import open_place
from ft_ckpt.storage.places import scratch_file
with scratch_file(open_place(Path(sys.argv[1]) / "one.safetensors")) as file:
    file.write_text("half")
    print(open_staging(Path(sys.argv[1]) / "checkpoint").stage, flush=True)
    time.sleep(600)
"""


def test_what_another_container_is_making_is_left_alone(tmp_path):
    """Its processes have numbers of their own, and it may have our host's name: what tells is the
    lock.
    """
    maker = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_STAGE, tmp_path], stdout=subprocess.PIPE, text=True
    )
    stage = Path(maker.stdout.readline().strip())
    # No process of ours has the number in the names: as if it were of another name space.
    moved = stage.with_name(stage.name.replace(f"-{maker.pid}-", "-999999999-"))
    stage.rename(moved)
    save(tmp_path / "checkpoint", step=1)
    with scratch_file(open_place(tmp_path / "one.safetensors")) as file:
        file.write_text("whole")
    assert moved.is_dir()
    assert len([name for name in names(tmp_path) if "ft_ckpt-file" in name]) == 1
    maker.kill()
    maker.wait()
    maker.stdout.close()
    save(tmp_path / "checkpoint", step=2)
    with scratch_file(open_place(tmp_path / "one.safetensors")) as file:
        file.write_text("whole")
    assert names(tmp_path) == ["checkpoint", "one.safetensors"]


def test_what_is_left_of_a_neighbour_goes_too(tmp_path):
    """A run saves to another folder each time: what a failed clean-up left waits for no save to the
    same.
    """
    left = tmp_path / f".checkpoint-1.ft_ckpt-stage-{dead_owner()}"
    away = tmp_path / f".checkpoint-2.ft_ckpt-stage-{dead_owner('00000000')}"
    for stage in (left, away):
        make_checkpoint(stage, step=1)
        (stage / MANIFEST_NAME).write_text("{}")
    save(tmp_path / "checkpoint-3", step=3)
    assert names(tmp_path) == [away.name, "checkpoint-3"]


def test_the_next_save_settles_the_last_one(tmp_path):
    committed(tmp_path / "checkpoint")
    World(Disk("killed"), "killed", 20).run(overwrite_from_inside, tmp_path / "checkpoint")
    assert [name for name in contents(tmp_path) if ".ft_ckpt-" in name]
    open_staging(tmp_path / "checkpoint").discard()
    assert verify(tmp_path / "checkpoint").ok
    assert not [name for name in contents(tmp_path) if "ft_ckpt-" in name]


@pytest.mark.slow
def test_what_was_put_aside_does_not_come_back(tmp_path):
    """The process dies while it deletes the old checkpoint; then the new one is given up, too."""
    target = tmp_path / "checkpoint"

    def torn(call):
        shutil.rmtree(target, ignore_errors=True)
        committed(target)
        World(Disk("killed"), "killed", call).run(overwrite_from_inside, target)
        aside = next(target.glob(".ft_ckpt-old-*"), None)
        return (
            aside
            and latest(tmp_path)
            and read_manifest(open_place(target)).step == 2
            and not [*aside.glob("value/model*")]
        )

    assert any(torn(call) for call in range(1, 99))
    uncommit(target)
    recover_target(target)
    assert not (target / MANIFEST_NAME).exists()


def test_what_was_made_in_the_stage_and_left_there_is_not_committed(tmp_path, monkeypatch):
    """A file that was compressed in place: the folder it was made in is hidden, and would stay for
    good.
    """
    staging = open_staging(tmp_path / "checkpoint")
    with (
        monkeypatch.context() as patch,
        scratch_file(open_place(staging.stage / "model.h5")) as file,
    ):
        file.write_text("compressed")
        patch.setattr(local_disk, "rmtree", lambda folder: None)
        stage_of_file = file.parent
    stage_of_file.mkdir(exist_ok=True)
    staging.commit(make_checkpoint(staging.stage))
    assert [name for name in contents(tmp_path) if ".ft_ckpt-" in name] == []


@pytest.mark.parametrize("prepare", [fresh, empty])
def test_files_without_a_manifest_appear_together(tmp_path, prepare):
    """What a pull puts in place that is no checkpoint."""

    def place(target):
        staging = open_staging(target)
        make_checkpoint(staging.stage, shards=2)
        place_files(staging.stage, target)
        staging.discard()

    def killed(world):
        target = tmp_path / world.name / "files"
        target.parent.mkdir()
        prepare(target)
        world.run(place, target)
        found = names(target) if target.exists() else []
        assert found in (
            [],
            ["config.json", *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2)), INDEX],
        )
        recover_target(target)
        assert [name for name in names(target.parent) if name.startswith(".")] == []

    assert try_worlds(killed, Disk("killed")).calls >= 5
    os.chdir(tmp_path)
    place(Path.cwd())
    assert (tmp_path / INDEX).exists()


def test_discard(tmp_path):
    staging = open_staging(tmp_path / "checkpoint")
    make_checkpoint(staging.stage)
    staging.discard()
    staging.discard()
    assert names(tmp_path) == []
    with pytest.raises(TargetError, match="not a stage"):
        LocalStaging(tmp_path, tmp_path / "checkpoint").discard()
    assert tmp_path.is_dir()


def test_uncommit_comes_before_deleting(tmp_path):
    save(tmp_path / "checkpoint-1", step=1)
    uncommit(tmp_path / "checkpoint-1")
    uncommit(tmp_path / "checkpoint-1")
    assert latest(tmp_path) is None
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()
