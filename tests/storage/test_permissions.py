"""Who may read what is written: nobody who could not read what it is made of, at no moment; and the umask holds."""

import errno
import itertools
import os
import random
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import models
import pytest
import torch
from buckets import in_bucket
from faults import save_with_state
from seeds import chosen_seed

import ft_ckpt
from ft_ckpt import CheckpointSaver, Keep
from ft_ckpt.checkpoint.guards import hold_lease, pin
from ft_ckpt.checkpoint.prune import prune_run
from ft_ckpt.cli import run_command
from ft_ckpt.errors import NameTakenError
from ft_ckpt.storage import local_disk
from ft_ckpt.storage.local_store import LocalStore

TEAM, OTHER = 60_010, 60_020
FILE_MODES, FOLDER_MODES = (0o600, 0o640, 0o644, 0o400), (0o700, 0o750, 0o2750, 0o755)
UMASKS = (0o077, 0o027, 0o022, 0o002)
# Everybody that can be told apart by classes of permissions, but the owner: by the groups they are in.
PEOPLE = [frozenset(some) for count in range(4) for some in itertools.combinations((os.getegid(), TEAM, OTHER), count)]
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to any group")


def may(groups: frozenset[int], path: Path, bit: int) -> bool:
    found = path.stat()
    return bool(found.st_mode >> (3 if found.st_gid in groups else 0) & bit)


def readers(file: Path, top: Path) -> set[frozenset[int]]:
    """Who may read `file` of those who may enter the folder around `top`."""
    folders = [folder for folder in file.parents if folder.is_relative_to(top)]
    return {one for one in PEOPLE if may(one, file, 4) and all(may(one, folder, 1) for folder in folders)}


def files_in(path: Path) -> list[Path]:
    return [each for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file()]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@dataclass
class Trial:
    """One command on private files: where they are, where the result goes, and who may read each."""

    room: Path
    draw: random.Random
    umask: int
    file_mode: int = 0
    folder_mode: int = 0
    group: int = 0
    mixed: bool = False  # each file and folder has permissions of its own
    found: list[str] = field(default_factory=list)
    sources: list[Path] = field(default_factory=list)

    def close(self, top: Path, *read: Path) -> None:
        """Give the files and folders of a source their permissions; of files that are `read` alone these count."""
        for path in [top, *top.rglob("*")]:
            modes = FOLDER_MODES if path.is_dir() else FILE_MODES
            plain = self.folder_mode if path.is_dir() else self.file_mode
            os.chown(path, -1, self.draw.choice((0, TEAM)) if self.mixed else self.group)
            path.chmod(self.draw.choice(modes) if self.mixed else plain)
        self.sources += read or [top]

    def everybody(self) -> set[frozenset[int]]:
        """Who may read all files of all sources."""
        tops = {each: each if each.is_dir() else each.parent for each in self.sources}
        return set.intersection(*(readers(file, top) for each, top in tops.items() for file in files_in(each)))

    def refuse(self, file: Path, allowed: set[frozenset[int]], when: str = "") -> None:
        if more := readers(file, self.room / "out") - allowed:
            self.found.append(f"{file.relative_to(self.room)}{when}: readable by {sorted(map(sorted, more))}")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at every file that is being made, whenever something is made of it."""
        allowed = self.everybody()
        before = {file.stat().st_ino for file in files_in(self.room / "out")}

        def look(name: str, real: Callable[..., object]) -> Callable[..., object]:
            def run(*given: object, **more: object) -> object:
                done = real(*given, **more)
                for file in files_in(self.room / "out"):
                    told = not file.name.startswith((".ft_ckpt-lease", ".ft_ckpt-pin", "notes"))
                    with suppress(FileNotFoundError):  # another thread gives it its name
                        if told and file.stat().st_size and file.stat().st_ino not in before:
                            self.refuse(file, allowed, f" at {name}")
                return done

            return run

        calls = [(local_disk, name) for name in ("move", "chmod", "fsync", "unlink", "mkdir")] + [(os, "pwrite")]
        with pytest.MonkeyPatch.context() as patch:
            for module, name in calls if not self.mixed else ():
                patch.setattr(module, name, look(name, getattr(module, name)))
            yield

    def judge(self, out: Path, exact: bool) -> None:
        """Compare what has come out with the sources; where nothing was in its place, the umask holds, too."""
        allowed = self.everybody()
        for file in files_in(out):
            if not file.name.startswith((".ft_ckpt", "notes")):
                self.refuse(file, allowed)
        made = [out, *out.rglob("*")] if out.is_dir() else [out]
        for path in made if exact else ():
            if mode(path) & self.umask & 0o777:
                self.found.append(f"{path.relative_to(self.room)}: {mode(path):o}, which the umask takes away")
        if exact and not self.mixed and self.group == os.getegid():
            for path in made:
                source = self.folder_mode & 0o777 if path.is_dir() else self.file_mode
                if mode(path) & 0o777 != source & ~self.umask and out.is_dir():
                    self.found.append(f"{path.relative_to(self.room)}: {mode(path):o} of {source:o}")


def taken(draw: random.Random, out: Path) -> bool:
    """Perhaps put something in the place of the result; whether nothing was there."""
    kind = draw.choice(["", "", "wider", "narrower", "team", "foreign"])
    if kind in ("wider", "narrower"):
        save_with_state(out, 7)
        for path in [out, *out.rglob("*")]:
            path.chmod((0o777, 0o666)[path.is_file()] if kind == "wider" else (0o700, 0o600)[path.is_file()])
    elif kind == "team":
        os.chown(out.parent, -1, TEAM)
        out.parent.chmod(0o2775)
    elif kind == "foreign":
        out.mkdir()
        (out / "notes.txt").write_text("mine")
        out.chmod(0o777)
    return kind == ""


# The commands


def a_run(trial: Trial, originals: dict[str, Path]) -> Path:
    shutil.copytree(originals["run"], trial.room / "run")
    return trial.room / "run"


def copied(trial: Trial, originals: dict[str, Path], out: Path) -> None:
    source = a_run(trial, originals) / "checkpoint-1"
    trial.close(source)
    fresh = taken(trial.draw, out)
    with trial.watched():
        ft_ckpt.copy(source, out, overwrite=True)
    allowed = {f.relative_to(source): readers(f, source) & readers(source / "ft_ckpt.json", source)
               for f in files_in(source)}  # fmt: skip
    for file in files_in(out):
        if file.name != "notes.txt":
            trial.refuse(file, allowed[file.relative_to(out)])
    trial.judge(out, fresh) if not trial.mixed else None


def synced(trial: Trial, originals: dict[str, Path], out: Path) -> None:
    source = a_run(trial, originals)
    trial.close(source)
    with trial.watched():
        assert not ft_ckpt.sync(source, out).problems
    if not trial.mixed:
        trial.judge(out, exact=True)
        return
    for file in files_in(out):
        trial.refuse(file, readers(source / file.relative_to(out), source))


def converted(trial: Trial, originals: dict[str, Path], out: Path, *, to: str, kind: str | None = None) -> None:
    name = trial.draw.choice(["full", "full/model.safetensors", "file.h5"])
    top = trial.room / "source"
    top.mkdir()
    shutil.copytree(originals["full"], top / "full")
    shutil.copy(originals["file"], top / "file.h5")
    trial.close(top, top / name)
    fresh = taken(trial.draw, out) if not to else True
    if to and trial.draw.random() < 0.5:
        (out.parent / f"out{to}").touch()
        (out.parent / f"out{to}").chmod(trial.draw.choice([0o666, 0o600]))
        fresh = False
    with trial.watched():
        ft_ckpt.convert(top / name, f"{out}{to}", format=kind, progress=False)
    trial.judge(Path(f"{out}{to}"), fresh)


def averaged(trial: Trial, originals: dict[str, Path], out: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(originals["full"], trial.room / name)
        trial.file_mode, trial.folder_mode = trial.draw.choice(FILE_MODES), trial.draw.choice(FOLDER_MODES)
        trial.close(trial.room / name)
    taken(trial.draw, out)
    with trial.watched():
        ft_ckpt.average([trial.room / "one", trial.room / "two"], out, progress=False)
    trial.judge(out, exact=False)


def merged(trial: Trial, originals: dict[str, Path], out: Path) -> None:
    for name in ("full", "adapter"):
        shutil.copytree(originals[name], trial.room / name)
        trial.file_mode, trial.folder_mode = trial.draw.choice(FILE_MODES), trial.draw.choice(FOLDER_MODES)
        trial.close(trial.room / name)
    taken(trial.draw, out)
    with trial.watched():
        ft_ckpt.merge(trial.room / "adapter", out, base=trial.room / "full", progress=False)
    trial.judge(out, exact=False)


def saved_over(trial: Trial, originals: dict[str, Path], out: Path) -> None:
    """What is there stays as closed as it is, while it is written, too."""
    shutil.copytree(originals["full"], out)
    trial.mixed = False
    trial.close(out)
    kept = {path.relative_to(out): (mode(path), path.stat().st_gid) for path in [out, *out.rglob("*")]}
    with trial.watched(), CheckpointSaver() as saver:
        saver.save(models.llama(), out, step=2)
    found = {path.relative_to(out): (mode(path), path.stat().st_gid) for path in [out, *out.rglob("*")]}
    for path, (bits, group) in found.items():
        if (bits, group) != kept.get(path, (bits, group)):
            trial.found.append(f"{path}: {bits:o} of {group}, was {kept[path]}")


def file_saved_over(trial: Trial, _originals: dict[str, Path], out: Path) -> None:
    file = out.with_suffix(trial.draw.choice([".h5", ".pt", ".safetensors"]))
    ft_ckpt.save({"a": torch.ones(3)}, file)
    trial.mixed = False
    trial.close(file)
    was = mode(file), file.stat().st_gid
    with trial.watched():
        ft_ckpt.save({"a": torch.zeros(3)}, file)
    if (mode(file), file.stat().st_gid) != was:
        trial.found.append(f"{file.name}: {mode(file):o}, was {was[0]:o}")


def stripped(trial: Trial, originals: dict[str, Path], out: Path) -> None:
    """Tombstones list what the manifest lists; the modes of pins and leases do not count."""
    shutil.copytree(originals["run"], out)
    trial.mixed = False
    pin(out / "checkpoint-2", "mine")  # before the modes are set: it is no source of what is written
    trial.close(out)
    was = mode(out / "checkpoint-1" / "ft_ckpt.json")
    with trial.watched(), hold_lease(out / "checkpoint-2"):
        prune_run(out, Keep(last=3, state=Keep(last=1)))
    if (mode(out / "checkpoint-1" / "ft_ckpt.json")) != was:
        trial.found.append("the manifest of what was stripped is another's")


def reported(trial: Trial, originals: dict[str, Path], out: Path) -> None:
    source = a_run(trial, originals)
    trial.close(source)
    page = out.with_suffix(".html")
    with trial.watched():
        assert run_command(["report", str(source), "-o", str(page)]) == 0
    trial.judge(page, exact=False)


def pulled(trial: Trial, originals: dict[str, Path], out: Path) -> None:
    place = in_bucket(originals["run"] / "checkpoint-1")
    ft_ckpt.pull(place, out)
    for path in [out, *out.rglob("*")]:
        if mode(path) != (0o777 if path.is_dir() else 0o666) & ~trial.umask:
            trial.found.append(f"{path.relative_to(trial.room)}: {mode(path):o}")


def through_tensorflow_and_back(trial: Trial, originals: dict[str, Path], out: Path) -> None:
    source = trial.room / "full"
    shutil.copytree(originals["full"], source)
    trial.close(source)
    with trial.watched():
        ft_ckpt.convert(source, out, format="tensorflow", progress=False)
        ft_ckpt.convert(out, out.with_suffix(".h5"), progress=False)
    trial.judge(out, exact=False)
    trial.judge(out.with_suffix(".h5"), exact=False)


FAST = {
    "copy": copied,
    "sync": synced,
    "convert to a folder": partial(converted, to=""),
    "convert to h5": partial(converted, to=".h5"),
    "convert to torch": partial(converted, to=".pt"),
    "convert to safetensors": partial(converted, to=".safetensors"),
    "convert to a folder of h5": partial(converted, to="", kind="h5"),
    "average": averaged,
    "save over a checkpoint": saved_over,
    "save over a file": file_saved_over,
    "strip": stripped,
    "pull": pulled,
}
ALL = {**FAST, "merge": merged, "report": reported}
if find_spec("tensorflow") is not None:
    ALL["convert to tensorflow and back"] = through_tensorflow_and_back


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    room = tmp_path_factory.mktemp("originals")
    for step in (1, 2):
        save_with_state(room / "run" / f"checkpoint-{step}", step)
    with CheckpointSaver() as saver:
        saver.save(models.llama(), room / "full")
        adapted = models.lora(ft_ckpt.load_model(room / "full"))
        saver.save(adapted, room / "adapter", adapter_only=True)
    ft_ckpt.convert(room / "full", room / "file.h5", progress=False)
    return {name: room / name for name in ("run", "full", "adapter")} | {"file": room / "file.h5"}


def campaign(room: Path, originals: dict[str, Path], commands: dict[str, Callable[..., None]], rounds: int) -> None:
    draw, wrong, tried = random.Random(chosen_seed()), [], 0
    before = os.umask(0o022)
    try:
        for number, (name, command) in itertools.product(range(rounds), commands.items()):
            folder = room / f"{number}-{name}"
            folder.mkdir()
            (folder / "out").mkdir()
            trial = Trial(
                folder, draw, draw.choice(UMASKS), draw.choice(FILE_MODES), draw.choice(FOLDER_MODES),
                draw.choice((0, 0, TEAM)), draw.random() < 0.25,
            )  # fmt: skip
            how = f"{name}: {trial.file_mode:o} in {trial.folder_mode:o} of {trial.group}, mixed {trial.mixed}"
            os.umask(trial.umask)
            command(trial, originals, folder / "out" / "it")
            os.umask(0o022)
            tried += 1
            wrong += [f"{how}, umask {trial.umask:o}: {each}" for each in trial.found[:1]]
            shutil.rmtree(folder)
    finally:
        os.umask(before)
    print(f"{tried} trials, {len(wrong)} finds")
    assert not wrong, "\n".join(wrong)


@root_only
def test_nothing_is_opened(tmp_path, originals):
    tmp_path.chmod(0o755)
    campaign(tmp_path, originals, FAST, rounds=1)


@root_only
@pytest.mark.slow
def test_nothing_is_opened_ever(tmp_path, originals):
    tmp_path.chmod(0o755)
    campaign(tmp_path, originals, ALL, rounds=60)


# Mounts without permissions of their own


_SLOW = (pytest.param(code, marks=pytest.mark.slow) for code in (errno.EOPNOTSUPP, errno.ENOSYS))


@pytest.fixture(params=[errno.EPERM, *_SLOW], ids=errno.errorcode.get)
def without_modes(request, tmp_path, monkeypatch):
    """A folder on a mount that refuses chmod, chown and links, as vfat and some of FUSE and CIFS do."""
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
            pin(room / "run" / "saved", "mine")
        assert not ft_ckpt.sync(originals["run"], room / "run").problems
        LocalStore(room).write("claimed", b"one", create_only=True)
        with pytest.raises(NameTakenError):
            LocalStore(room).write("claimed", b"two", create_only=True)
        assert {name: ft_ckpt.verify(room / "run" / name).ok for name in ("saved", "copied", "converted")} == {
            "saved": True, "copied": True, "converted": True
        }  # fmt: skip
        assert not prune_run(room / "run", Keep(last=1)).problems
    finally:
        os.umask(before)


def test_what_a_mount_opens_is_told_once(tmp_path, monkeypatch):
    """Where files have the permissions of their mount."""
    monkeypatch.setattr(local_disk, "_without_modes", set())
    file = tmp_path / "x.h5"
    ft_ckpt.save({"a": torch.ones(2)}, file)
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, mode=0o777, **more: opened(real, path, flags, more))
    file.chmod(0o600)
    with pytest.warns(UserWarning, match="keeps no permissions, so others may read files closed to them"):
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
