"""What a place can do, found out by doing it: on real file systems, mounted through FUSE where this
machine can.
"""

import errno
import json
import os
import sys
import warnings
from contextlib import contextmanager

import pytest
from buckets import new_bucket
from faulty_stores import Wrapped
from fuse_folders import mounted, needs_fuse
from small_checkpoints import save

from ft_ckpt import verify
from ft_ckpt.checkpoint.commit import check_target
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.cli import main
from ft_ckpt.errors import TargetError
from ft_ckpt.storage import Mount, local_disk, mount_of
from ft_ckpt.storage.local import LocalStore, trials, try_place


def doctor(monkeypatch, capsys, place, *options):
    """Run the command: its exit code, and what it printed."""
    monkeypatch.setattr(sys, "argv", ["ft-ckpt", "doctor", str(place), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0, capsys.readouterr().out


@contextmanager
def as_mount(monkeypatch, kind, source="x"):
    """All folders are taken for such a mount."""
    found = Mount("/mnt/x", kind, source)
    with monkeypatch.context() as patch:
        patch.setattr(trials, "mount_of", lambda _: found)
        patch.setattr(trials, "_tried_mounts", set())
        yield


def works(abilities):
    return {each.name: each.works for each in abilities}


def test_a_folder_of_this_machine_can_do_all(tmp_path, monkeypatch, capsys):
    code, out = doctor(monkeypatch, capsys, tmp_path)
    assert code == 0
    assert "saves are safe here" in out
    assert list(tmp_path.iterdir()) == []
    code, out = doctor(monkeypatch, capsys, tmp_path, "--json")
    report = json.loads(out)
    assert report["safe"]
    assert all(ability["works"] for ability in report["abilities"])
    assert mount_of(tmp_path / "not" / "there").point == report["mount"]["point"]
    assert doctor(monkeypatch, capsys, tmp_path / "nothing")[0] == 2


def test_what_a_folder_cannot_do_is_said_and_refused(tmp_path, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        code, out = doctor(patch, capsys, tmp_path)
    assert code == 0
    assert "files that do not change are written with each checkpoint" in out
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patch:
        patch.setattr(local_disk, "move", refuse)
        code, out = doctor(patch, capsys, tmp_path)
        assert code == 1
        assert "not safe: rename a file over another: Operation not permitted" in out
        with (
            as_mount(patch, "fuse"),
            pytest.raises(TargetError, match=r"cannot do what a save needs .* another path"),
        ):
            check_target(tmp_path, 0)
        check_target(tmp_path, 0)  # a file system that is known is not tried
    with as_mount(monkeypatch, "nfs4"):
        check_target(tmp_path, 0)


def test_a_mounted_bucket_is_warned_of_once_and_saved_to_with_its_manifest_last(
    tmp_path, monkeypatch
):
    moved, real = [], local_disk.move_files
    monkeypatch.setattr(
        local_disk,
        "move_files",
        lambda names, *rest: moved.append(sorted(names)) or real(names, *rest),
    )
    with as_mount(monkeypatch, "fuse.s3fs", "s3fs"):
        with pytest.warns(UserWarning, match=r"files go up later .* give its URL"):
            save(tmp_path / "checkpoint")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            save(tmp_path / "checkpoint", step=2)
    assert verify(tmp_path / "checkpoint").ok
    assert moved[-1] == [MANIFEST_NAME]
    assert "model.safetensors" in moved[-2]
    moved.clear()
    save(tmp_path / "other")
    assert moved == [], "elsewhere a folder is moved in one step"


@pytest.mark.parametrize(
    ("kind", "source", "is_bucket"),
    [
        ("fuse.s3fs", "s3fs", True),
        ("fuse.rclone", ":memory:bucket", True),
        ("fuse", "mountpoint-s3", True),
        ("fuse.gcsfuse", "bucket", True),
        ("fuse", "blobfuse2", True),
        ("fuse.sshfs", "host:/home", False),
        ("nfs4", "server:/s3fs", False),
        ("ext4", "/dev/vda", False),
    ],
)
def test_mounted_buckets_are_known(kind, source, is_bucket):
    assert Mount("/mnt", kind, source).is_bucket == is_bucket


@needs_fuse
def test_a_real_mount_that_can_rename_is_saved_to(tmp_path, monkeypatch, capsys):
    with mounted(tmp_path / "real", tmp_path / "mount") as folder:
        assert mount_of(folder / "below").kind.startswith("fuse")
        code, out = doctor(monkeypatch, capsys, folder)
        assert code == 0
        assert "exchange two folders" in out
        for step in (1, 2):
            save(folder / "checkpoint", step=step)
            assert verify(folder / "checkpoint").ok


@needs_fuse
def test_a_real_mount_that_cannot_rename_is_refused(tmp_path, monkeypatch, capsys):
    with mounted(tmp_path / "real", tmp_path / "mount", "--rename-deny") as folder:
        code, out = doctor(monkeypatch, capsys, folder)
        assert code == 1
        assert "not safe: rename a file over another" in out
        with pytest.raises(
            TargetError, match="rename a file over another: Operation not permitted"
        ):
            save(folder / "checkpoint")


def test_a_bucket_can_do_all_and_one_without_conditions_is_not_safe(monkeypatch, capsys):
    bucket = new_bucket()
    code, out = doctor(monkeypatch, capsys, bucket.url)
    assert code == 0
    assert "free: no limit" in out
    assert bucket.list() == []

    class Careless(Wrapped):
        def within(self, folder):
            return Careless(self.inner.within(folder))

        def write(self, name, data, *, create_only=False):
            self.inner.write(name, data)

    found = try_place(Careless(bucket))
    assert [each.name for each in found if not each.works] == ["creating what is new only"]
    assert "a second writer replaced the first" in next(
        each.detail for each in found if not each.works
    )


def test_trials_leave_nothing(tmp_path):
    assert all(works(try_place(LocalStore(tmp_path))).values())
    assert list(tmp_path.iterdir()) == []
