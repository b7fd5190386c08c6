"""Who may read what is written: no class of users that could not read its source, at no moment; and
the umask holds.
"""

import errno
import os
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import models
import pytest
import torch
from buckets import in_bucket
from small_checkpoints import save_with_state

import ft_ckpt
from ft_ckpt import CheckpointSaver, Keep
from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.leases import pin
from ft_ckpt.cli import run_command
from ft_ckpt.errors import NameTakenError
from ft_ckpt.runs.folder import prune_run
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import open_place

GROUP, OTHERS = 0o010, 0o001  # the bit with which this class of users enters a folder
# of files, of folders
SOURCES = [(0o600, 0o755), (0o644, 0o700), (0o640, 0o755), (0o644, 0o750), (0o400, 0o755)]
REPLACED = {"nothing": None, "open": (0o666, 0o777), "private": (0o600, 0o700)}
MARKS = (".ft_ckpt-lease", ".ft_ckpt-pin")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def files_in(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def set_modes(top: Path, file_mode: int, folder_mode: int) -> None:
    for path in [top, *top.rglob("*")]:
        path.chmod(folder_mode if path.is_dir() else file_mode)


def readers(file: Path, top: Path) -> set[int]:
    """The classes of users that may read `file`, of those that may enter the folder around
    `top`.
    """
    folders = [folder for folder in file.parents if folder.is_relative_to(top)]
    classes = set()
    for users in (GROUP, OTHERS):
        if mode(file) & users << 2 and all(mode(folder) & users for folder in folders):
            classes.add(users)
    return classes


@contextmanager
def never_read_by_others_than(allowed: set[int], out: Path) -> Iterator[None]:
    """Look at every file that is being made in `out`, at each call that changes the disk, and at
    the end.
    """
    before = {file.stat().st_ino for file in files_in(out)}
    new_files = set()

    def look(call: str) -> None:
        for file in files_in(out):
            with suppress(FileNotFoundError):  # another thread gives it its name
                is_new = file.stat().st_size and file.stat().st_ino not in before
                if is_new and not file.name.startswith(MARKS):
                    new_files.add(file)
                    assert readers(file, out) <= allowed, (
                        f"{file.relative_to(out)} at {call}: {mode(file):o}"
                    )

    def looking(call: str, real: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **options: object) -> object:
            result = real(*arguments, **options)
            look(call)
            return result

        return run

    calls = [(local_disk, name) for name in ("move", "chmod", "fsync", "unlink", "mkdir")] + [
        (os, "pwrite")
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module, name in calls:
            patch.setattr(module, name, looking(name, getattr(module, name)))
        yield
    look("the end")
    assert new_files


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    room = tmp_path_factory.mktemp("originals")
    for step in (1, 2):
        save_with_state(room / "run" / f"checkpoint-{step}", step)
    with CheckpointSaver() as saver:
        saver.save(models.llama(), room / "full")
        adapted = models.lora(ft_ckpt.load_model(room / "full"))
        saver.save(adapted, room / "adapter", adapter_only=True)
    (room / "file").mkdir()
    ft_ckpt.convert(room / "full", room / "file" / "model.h5", progress=False)
    return {name: room / name for name in ("run", "full", "adapter", "file")}


def convert_to(ending: str, kind: str | None = None) -> Callable[[Path, Path], object]:
    def convert(source: Path, out: Path) -> object:
        return ft_ckpt.convert(
            source / "full", f"{out}{ending}", format=kind, overwrite=True, progress=False
        )

    return convert


COMMANDS: dict[str, Callable[[Path, Path], object]] = {
    "copy": lambda source, out: ft_ckpt.copy(source / "run" / "checkpoint-1", out, overwrite=True),
    "sync": lambda source, out: ft_ckpt.sync(source / "run", out.parent),
    "average": lambda source, out: ft_ckpt.average(
        [source / "full"] * 2, out, overwrite=True, progress=False
    ),
    "merge": lambda source, out: ft_ckpt.merge(
        source / "adapter", out, base=source / "full", overwrite=True, progress=False
    ),
    "report": lambda source, out: run_command(["report", str(source / "run"), "-o", f"{out}.html"]),
    "convert to a folder": convert_to(""),
    "convert to a folder of HDF5": convert_to("", "h5"),
    "convert to HDF5": convert_to(".h5"),
    "convert to torch": convert_to(".pt"),
    "convert to safetensors": convert_to(".safetensors"),
    "convert a file": lambda source, out: ft_ckpt.convert(
        source / "file" / "model.h5", f"{out}.pt", progress=False
    ),
}


@pytest.mark.parametrize("replaced", REPLACED)
@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_is_opened(tmp_path, originals, command, replaced):
    """Private files, or files in private folders, whatever is at the place of the result."""
    for number, (file_mode, folder_mode) in enumerate(SOURCES):
        source, out = tmp_path / f"{number}-source", tmp_path / f"{number}-out"
        for name, original in originals.items():
            shutil.copytree(original, source / name)
            set_modes(source / name, file_mode, folder_mode)
        out.mkdir()
        if (modes := REPLACED[replaced]) is not None:
            shutil.copytree(originals["full"], out / "checkpoint-1")
            for ending in (".h5", ".pt", ".safetensors", ".html"):
                (out / f"checkpoint-1{ending}").touch()
            set_modes(out, *modes)
            out.chmod(0o755)
        allowed = readers(source / "full" / "ft_ckpt.json", source / "full")
        with never_read_by_others_than(allowed, out):
            COMMANDS[command](source, out / "checkpoint-1")


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_result_has_the_mode_of_its_source_without_that_of_the_umask(tmp_path, originals, umask):
    shutil.copytree(originals["full"], tmp_path / "source")
    set_modes(tmp_path / "source", 0o640, 0o750)
    before = os.umask(umask)
    try:
        ft_ckpt.copy(tmp_path / "source", tmp_path / "copied")
        ft_ckpt.convert(tmp_path / "source", tmp_path / "converted", progress=False)
        ft_ckpt.pull(in_bucket(originals["run"] / "checkpoint-1"), tmp_path / "pulled")
    finally:
        os.umask(before)
    for result, file_mode, folder_mode in (
        ("copied", 0o640, 0o750),
        ("converted", 0o640, 0o750),
        ("pulled", 0o666, 0o777),
    ):
        for path in [tmp_path / result, *(tmp_path / result).rglob("*")]:
            assert mode(path) == (folder_mode if path.is_dir() else file_mode) & ~umask, path


@pytest.mark.parametrize(("file_mode", "folder_mode"), SOURCES)
def test_what_is_saved_over_keeps_its_mode(tmp_path, originals, file_mode, folder_mode):
    """While it is written, too."""
    out = tmp_path / "out"
    out.mkdir()
    target, files = (
        out / "saved",
        [out / f"file{ending}" for ending in (".h5", ".pt", ".safetensors")],
    )
    shutil.copytree(originals["full"], target)
    for file in files:
        ft_ckpt.save({"a": torch.ones(3)}, file)
        file.chmod(file_mode)
    set_modes(target, file_mode, folder_mode)
    with (
        never_read_by_others_than(
            readers(target / "ft_ckpt.json", target) | readers(files[0], out), out
        ),
        CheckpointSaver() as saver,
    ):
        saver.save(models.llama(), target, step=2)
        for file in files:
            ft_ckpt.save({"a": torch.zeros(3)}, file)
    assert {mode(path) for path in [*files_in(target), *files]} == {file_mode}
    assert mode(target) == folder_mode


def test_a_tombstone_is_as_private_as_the_manifest(tmp_path, originals):
    shutil.copytree(originals["run"], tmp_path / "run")
    pin(open_place(tmp_path / "run" / "checkpoint-2"), "mine")
    set_modes(tmp_path / "run", 0o600, 0o755)
    with (
        never_read_by_others_than(set(), tmp_path / "run"),
        open_checkpoint(open_place(tmp_path / "run" / "checkpoint-2")),
    ):
        prune_run(open_place(tmp_path / "run"), Keep(last=3, state=Keep(last=1)))
    assert mode(tmp_path / "run" / "checkpoint-1" / "ft_ckpt.json") == 0o600


# Mounts without permissions of their own


_SLOW = (pytest.param(code, marks=pytest.mark.slow) for code in (errno.EOPNOTSUPP, errno.ENOSYS))


@pytest.fixture(params=[errno.EPERM, *_SLOW], ids=errno.errorcode.get)
def without_modes(request, tmp_path, monkeypatch):
    """A folder on a mount that refuses chmod, chown and links, as vfat and some of FUSE and CIFS
    do.
    """
    real = {name: getattr(os, name) for name in ("chmod", "chown", "link")}
    room = tmp_path / "mount"
    room.mkdir()

    def refusing(name: str) -> Callable[..., None]:
        def call(*given, **more):
            if Path(os.fsdecode(given[-1 if name == "link" else 0])).is_relative_to(room):
                raise OSError(request.param, os.strerror(request.param))
            return real[name](*given, **more)

        return call

    for name in real:
        monkeypatch.setattr(os, name, refusing(name))
    monkeypatch.setattr(local_disk, "chmod", os.chmod)
    return room


def test_a_mount_without_permissions_takes_everything(without_modes, originals, tmp_path):
    room, before = without_modes, os.umask(0o022)
    try:
        with CheckpointSaver(format="dual") as saver:
            for step in (1, 2):
                for ending in (".h5", ".pt", ".safetensors"):
                    ft_ckpt.save({"a": torch.full((3,), float(step))}, room / f"file{ending}")
                saver.save(models.llama(), room / "run" / "saved", step=step)
                os.umask(0o077)  # the second time all would get other permissions
        assert float(ft_ckpt.load(room / "file.pt")["a"][0]) == 2
        for _ in range(2):
            ft_ckpt.copy(originals["run"] / "checkpoint-1", room / "run" / "copied", overwrite=True)
            ft_ckpt.convert(originals["full"], room / "run" / "converted", progress=False)
            pin(open_place(room / "run" / "saved"), "mine")
        assert not ft_ckpt.sync(originals["run"], room / "run").problems
        LocalStore(room).write("claimed", b"one", create_only=True)
        with pytest.raises(NameTakenError):
            LocalStore(room).write("claimed", b"two", create_only=True)
        assert {
            name: ft_ckpt.verify(room / "run" / name).ok
            for name in ("saved", "copied", "converted")
        } == {"saved": True, "copied": True, "converted": True}
        assert not prune_run(open_place(room / "run"), Keep(last=1)).problems
    finally:
        os.umask(before)


def test_what_a_mount_opens_is_told_once(tmp_path, monkeypatch):
    """Where files have the permissions of their mount."""
    monkeypatch.setattr(local_disk, "_devices_without_modes", set())
    file = tmp_path / "x.h5"
    ft_ckpt.save({"a": torch.ones(2)}, file)
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, flags, mode=0o777, **more: opened(real, path, flags, more)
    )
    file.chmod(0o600)
    with pytest.warns(
        UserWarning, match="keeps no permissions, so others may read files closed to them"
    ):
        ft_ckpt.convert(file, tmp_path / "one.pt", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ft_ckpt.convert(file, tmp_path / "two.pt", progress=False)


def opened(real, path, flags, more):
    """Open a file as on a mount whose files are all for everybody."""
    before = os.umask(0)
    try:
        return real(path, flags, 0o755, **more)
    finally:
        os.umask(before)
