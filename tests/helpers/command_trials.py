"""Commands that are killed at a call that changes the disk, or at a request to a bucket.

At each kill, readers see the old or the new checkpoint, whole, while the process is stopped and
after its end. The next call of the same command completes the work and leaves nothing behind.
"""

import os
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from faults import Server, World
from preloaded import Ended, Preloaded
from s3_server import BUCKET, S3
from small_checkpoints import contents

from ft_ckpt import verify
from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.leases import marks
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import CheckpointError, NotACheckpointError
from ft_ckpt.runs.folder import recover_all
from ft_ckpt.storage.local import temporary_store
from ft_ckpt.storage.places import open_place

TARGET = "there"  # the folder that a command writes, or its prefix in the bucket
IN_BUCKET = "bucket:"  # prefix of the names of objects, in mappings that also have files
Files = Mapping[str, bytes]  # by path, relative to the folder of the trial


@dataclass
class CommandTrials:
    """One command and its target, run repeatedly from the same files and objects."""

    preloaded: Preloaded
    act: Callable[..., None]  # folder, command, step (0 prepares, 1 runs it), target, environment
    s3: S3
    command: str
    to_bucket: bool
    folder: Path  # for all trials
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._template = self.folder / "template"
        self._template.mkdir(parents=True)
        self._set_bucket({})
        self._run(self._template, step=0)
        self._objects = dict(self.s3.buckets[BUCKET])
        self.before = self._files(self._template)
        self.after: Files = {}

    def trial(self, world: World) -> None:
        """Kill the command in one world, while a reader opens its target.

        The old or the new checkpoint is whole, and the next call works.
        """
        with self._fresh_folder() as root:
            problems: list[str] = []
            if world.fault != "killed before":
                world.meanwhile = lambda: problems.extend(self._read_meanwhile(root))
            ended = self._disturbed(world, root)
            if ended.status == 0:  # undisturbed, or with fewer calls
                self.after = self.after or self._files(root)
                return
            assert ended.status == -signal.SIGKILL, ended
            problems += self._check_kill(root)
            assert problems == []

    def _disturbed(self, world: World, root: Path) -> Ended:
        """Run the command with the fault of the world."""
        action: Callable[..., Ended] = partial(world.run, self.act)
        # the fake kills the process, and not the preloaded layer
        if isinstance(world.calls, Server):
            action = partial(world.run, partial(self.preloaded.run, self.act, begun=world.begin))
        return action(root, *self._arguments(root))

    # One trial

    @contextmanager
    def _fresh_folder(self) -> Iterator[Path]:
        """Yield the folder of a trial: it and the bucket are as before the command."""
        root = self.folder / "trial"
        shutil.copytree(self._template, root, symlinks=True)
        self._set_bucket(self._objects)
        try:
            yield root
        finally:
            shutil.rmtree(root)

    def _set_bucket(self, objects: Mapping[str, Any]) -> None:
        self.s3.buckets[BUCKET], self.s3.uploads = dict(objects), {}

    def _arguments(self, root: Path, step: int = 1) -> list[Any]:
        target = f"s3://{BUCKET}/{TARGET}" if self.to_bucket else str(root / TARGET)
        return [self.command, step, target, {**self.s3.environment(), **self.environment}]

    def _run(self, root: Path, *, step: int = 1) -> None:
        """Run the command to its end."""
        ended = self.preloaded.run(self.act, root, *self._arguments(root, step))
        assert ended.status == 0, ended

    def _check_kill(self, root: Path) -> list[str]:
        """Return the problems after a kill, and those after the next call."""
        problems = self._half_done(root)
        try:
            self._run(root)
        except AssertionError as error:
            if not self._is_refused_as_done(str(error), root):
                problems.append(f"the next call: {error}")
        files = self._files(root)
        remove_expired(root)
        leased = set()
        for name in files:
            if name.startswith(IN_BUCKET) and "/.ft_ckpt-lease-" in name:
                leased.add(name.rpartition("/")[0])
        for checkpoint in leased:
            # as the next save or sweep there does
            recover_all(open_place(str(self._location(checkpoint, root)).rpartition("/")[0]))
        for name in sorted(self._files(root).keys() ^ self.after.keys()):
            problems.append(f"left or lost: {name}")
        for name in sorted(self._differing(files, self.after)):
            problems.append(f"not the new: {name}")
        return problems + [f"afterwards {problem}" for problem in self._damaged(root)]

    def _is_refused_as_done(self, error: str, root: Path) -> bool:
        """Check for the refusal of a bucket, without overwrite, after a kill behind the commit."""
        is_new = not self._differing(self._files(root), self.after) and "NameTakenError" in error
        return self.to_bucket and is_new and "overwrite" not in self.command

    def _half_done(self, root: Path) -> list[str]:
        """Return the problems after a kill.

        Those are checkpoints that are damaged, or neither old nor new, and lost foreign files.
        """
        files = self._files(root)
        problems = self._damaged(root)
        for checkpoint in self._all_checkpoints():
            present, old, new = (
                self._checkpoint(version, checkpoint)
                for version in (files, self.before, self.after)
            )
            if present not in (old, new) and not self._may_be_absent(checkpoint, present):
                problems.append(f"neither the old nor the new: {checkpoint}")
        for name in self.before:
            is_foreign = name.rpartition("/")[2] in ("notes.txt", "mine.txt")
            if is_foreign and not _is_kept(files, name):
                problems.append(f"lost: {name}")
        return [f"after the kill {problem}" for problem in problems]

    def _all_checkpoints(self) -> list[str]:
        return sorted({*checkpoints_in(self.before), *checkpoints_in(self.after)})

    def _may_be_absent(self, checkpoint: str, files: Files | None) -> bool:
        """Check whether a checkpoint is absent in a bucket, which deletes the old one first."""
        return checkpoint.startswith(IN_BUCKET) and files is None

    def _damaged(self, root: Path) -> list[str]:
        problems = []
        for checkpoint in checkpoints_in(self._files(root)):
            report = verify(self._location(checkpoint, root))
            if not report.ok:
                problems.append(f"damaged: {checkpoint}: {report.problems}")
        return problems

    def _read_meanwhile(self, root: Path) -> list[str]:
        """Return the problems that a reader sees while the process is stopped."""
        problems = []
        for checkpoint in self._all_checkpoints():
            old, new = (self._checkpoint(files, checkpoint) for files in (self.before, self.after))
            if old == new and old is not None and not checkpoint.startswith(IN_BUCKET):
                continue
            try:
                files = self._read_checkpoint(checkpoint, root)
            except CheckpointError as error:
                if "being deleted" not in str(error):
                    problems.append(f"a reader of {checkpoint}: {error}")
                continue
            is_whole = any(_agree(self.command, files, version) for version in (old, new))
            if not is_whole and not self._may_be_absent(checkpoint, files):
                problems.append(f"a reader sees neither the old nor the new: {checkpoint}")
        return problems

    def _read_checkpoint(self, checkpoint: str, root: Path) -> Files | None:
        """Read the files of a checkpoint without waiting for a removal; None if there is none."""
        place = open_place(self._location(checkpoint, root))
        with patch.object(marks, "_PATIENCE_SECONDS", 0.0):
            try:
                with open_checkpoint(place) as opened:
                    paths = [file.path for file in opened.manifest.files]
                    return {path: opened.store.read(path) for path in paths}
            except NotACheckpointError:
                return None

    # Contents

    def _files(self, root: Path) -> dict[str, bytes]:
        """Return all files, objects and empty folders by path, hidden ones too.

        The folder of temporary files itself is left out.
        """
        files = {}
        for name, content in contents(root).items():
            is_full_folder = (root / name).is_dir() and not _is_empty(root / name)
            if name != "tmp" and not is_full_folder:
                files[name] = content
        for name, stored in self.s3.buckets[BUCKET].items():
            files[f"{IN_BUCKET}{name}"] = stored.content
        return files

    def _location(self, checkpoint: str, root: Path) -> str | Path:
        if checkpoint.startswith(IN_BUCKET):
            return f"s3://{BUCKET}/{checkpoint.removeprefix(IN_BUCKET)}"
        return root / checkpoint

    def _checkpoint(self, files: Files, checkpoint: str) -> Files | None:
        """Return the files of a checkpoint, by path in it; None if it has no manifest.

        The manifest, `.ft_ckpt-*`, foreign files and empty ones are left out.
        """
        if f"{checkpoint}/{MANIFEST_NAME}" not in files:
            return None
        inside = {}
        for name, content in files.items():
            path = name.removeprefix(f"{checkpoint}/")
            is_listed = not path.startswith((".ft_ckpt-", "notes.txt", MANIFEST_NAME))
            if path != name and is_listed and content:
                inside[path] = b"" if self._varies else content
        return inside

    @property
    def _varies(self) -> bool:
        """True if each call writes different bytes."""
        return "library" in self.command

    def _differing(self, files: Files, expected: Files) -> set[str]:
        """Name the files whose bytes differ from the expected ones, except files with times."""
        names = set()
        for name in files.keys() & expected.keys():
            has_times = name.endswith((MANIFEST_NAME, "README.md"))
            may_differ = has_times or (self._varies and "/out/" in name)
            if files[name] != expected[name] and not may_differ:
                names.add(name)
        return names


def checkpoints_in(files: Files) -> list[str]:
    """Return the folders of committed checkpoints that are not hidden."""
    folders = []
    for name in files:
        folder = name.removesuffix(f"/{MANIFEST_NAME}")
        is_hidden = any(step.startswith((".", "tmp")) for step in folder.split("/"))
        if folder != name and not is_hidden:
            folders.append(folder)
    return folders


def remove_expired(root: Path) -> None:
    """Remove leases and temporary folders of killed processes, as a reader does in ten minutes."""
    for lease in root.rglob(".ft_ckpt-lease-*"):
        os.utime(lease, (0, 0))
        with open_checkpoint(open_place(lease.parent)):
            pass
    for kind in ("open", "copy"):
        with temporary_store(root / "tmp", f"ft_ckpt-{kind}-"):
            pass


def _agree(command: str, files: Files | None, expected: Files | None) -> bool:
    if files is None or expected is None or "library" not in command:
        return files == expected
    return files.keys() == expected.keys()


def _is_kept(files: Files, name: str) -> bool:
    """Check for a foreign file: at worst it is in a hidden folder, until the next call."""
    return any(other.rpartition("/")[2] == name.rpartition("/")[2] for other in files)


def _is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())
