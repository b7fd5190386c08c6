"""Commands that are killed at a call that changes the disk, or at a request to a bucket, and run
again.

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

THERE = "there"  # target folder, or prefix in the bucket
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
        """Kill the command in one world, with a reader beside it; the old or the new is whole, the
        next call works.
        """
        with self._fresh_folder() as root:
            wrong: list[str] = []
            if world.fault != "killed before":
                world.meanwhile = lambda: wrong.extend(self._read_beside(root))
            ended = self._disturbed(world, root)
            if ended.status == 0:  # undisturbed, or with fewer calls
                self.after = self.after or self._files(root)
                return
            assert ended.status == -signal.SIGKILL, ended
            wrong += self._check_death(root)
            assert wrong == []

    def _disturbed(self, world: World, root: Path) -> Ended:
        action: Callable[..., Ended] = partial(world.run, self.act)
        # the fake kills the process, and not the preloaded layer
        if isinstance(world.calls, Server):
            action = partial(world.run, partial(self.preloaded.run, self.act, begun=world.begin))
        return action(root, *self._arguments(root))

    # One trial

    @contextmanager
    def _fresh_folder(self) -> Iterator[Path]:
        """The folder of a trial; folder and bucket are reset to their content before the
        command.
        """
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
        there = f"s3://{BUCKET}/{THERE}" if self.to_bucket else str(root / THERE)
        return [self.command, step, there, {**self.s3.environment(), **self.environment}]

    def _run(self, root: Path, *, step: int = 1) -> None:
        """Run the command to its end."""
        ended = self.preloaded.run(self.act, root, *self._arguments(root, step))
        assert ended.status == 0, ended

    def _check_death(self, root: Path) -> list[str]:
        """Problems after a kill, and after the next call."""
        wrong = self._half_done(root)
        try:
            self._run(root)
        except AssertionError as error:
            if not self._is_refused_as_done(str(error), root):
                wrong.append(f"the next call: {error}")
        found = self._files(root)
        come_by_later(root)
        for unit in {
            name.rpartition("/")[0]
            for name in found
            if name.startswith(IN_BUCKET) and "/.ft_ckpt-lease-" in name
        }:
            # as the next save or sweep there does
            recover_all(open_place(str(self._location(unit, root)).rpartition("/")[0]))
        wrong += [
            f"left or lost: {name}" for name in sorted(self._files(root).keys() ^ self.after.keys())
        ]
        wrong += [f"not the new: {name}" for name in sorted(self._differing(found, self.after))]
        return wrong + [f"afterwards {each}" for each in self._damaged(root)]

    def _is_refused_as_done(self, said: str, root: Path) -> bool:
        """Without overwrite, a bucket refuses the next call if the killed one had committed."""
        is_new = not self._differing(self._files(root), self.after) and "NameTakenError" in said
        return self.to_bucket and is_new and "overwrite" not in self.command

    def _half_done(self, root: Path) -> list[str]:
        """Problems after a kill: checkpoints that are damaged, or neither old nor new, and lost
        foreign files.
        """
        found = self._files(root)
        wrong = [f"at the death {each}" for each in self._damaged(root)]
        for unit in sorted({*checkpoints_in(self.before), *checkpoints_in(self.after)}):
            versions = [self._checkpoint(files, unit) for files in (found, self.before, self.after)]
            if versions[0] not in versions[1:] and not self._may_be_absent(unit, versions):
                wrong.append(f"at the death neither the old nor the new: {unit}")
        wrong += [
            f"at the death lost: {name}" for name in self._foreign() if not _is_kept(found, name)
        ]
        return wrong

    def _may_be_absent(self, unit: str, versions: list[Files | None]) -> bool:
        """A bucket cannot replace a checkpoint in one step: the old one is deleted first."""
        return unit.startswith(IN_BUCKET) and versions[0] is None

    def _foreign(self) -> list[str]:
        return [
            name for name in self.before if name.rpartition("/")[2] in ("notes.txt", "mine.txt")
        ]

    def _damaged(self, root: Path) -> list[str]:
        found = {
            unit: verify(self._location(unit, root)) for unit in checkpoints_in(self._files(root))
        }
        return [
            f"damaged: {unit}: {report.problems}" for unit, report in found.items() if not report.ok
        ]

    def _read_beside(self, root: Path) -> list[str]:
        """Problems that a reader sees while the process is stopped."""
        wrong = []
        for unit in sorted({*checkpoints_in(self.before), *checkpoints_in(self.after)}):
            old, new = (self._checkpoint(files, unit) for files in (self.before, self.after))
            if old == new and old is not None and not unit.startswith(IN_BUCKET):
                continue
            try:
                with (
                    patch.object(marks, "_PATIENCE_SECONDS", 0.0),
                    open_checkpoint(open_place(self._location(unit, root))) as held,
                ):
                    seen: Files | None = {
                        file.path: held.store.read(file.path) for file in held.manifest.files
                    }
            except NotACheckpointError:
                seen = None
            except CheckpointError as error:
                if "being deleted" not in str(error):
                    wrong.append(f"a reader of {unit}: {error}")
                continue
            if not any(
                _agree(self.command, seen, each) for each in (old, new)
            ) and not self._may_be_absent(unit, [seen]):
                wrong.append(f"a reader sees neither the old nor the new: {unit}")
        return wrong

    # Contents

    def _files(self, root: Path) -> dict[str, bytes]:
        """All files, objects and empty folders, hidden ones too, but not the folder of temporary
        files itself.
        """
        found = {name: content for name, content in contents(root).items() if name != "tmp"}
        found = {
            name: content
            for name, content in found.items()
            if not (root / name).is_dir() or _is_empty(root / name)
        }
        objects = self.s3.buckets[BUCKET].items()
        return found | {f"{IN_BUCKET}{name}": each.content for name, each in objects}

    def _location(self, unit: str, root: Path) -> str | Path:
        return (
            f"s3://{BUCKET}/{unit.removeprefix(IN_BUCKET)}"
            if unit.startswith(IN_BUCKET)
            else root / unit
        )

    def _checkpoint(self, files: Files, unit: str) -> Files | None:
        """The files of a checkpoint without manifest, `.ft_ckpt-*` and foreign files; None if it
        has no manifest.
        """
        if f"{unit}/{MANIFEST_NAME}" not in files:
            return None
        inside = {
            name.removeprefix(f"{unit}/"): files[name]
            for name in files
            if name.startswith(f"{unit}/")
        }
        names = [
            name
            for name in inside
            if not name.startswith((".ft_ckpt-", "notes.txt", MANIFEST_NAME)) and inside[name]
        ]
        return {name: b"" if self._varies else inside[name] for name in names}

    @property
    def _varies(self) -> bool:
        """True if each call writes different bytes."""
        return "library" in self.command

    def _differing(self, files: Files, expected: Files) -> set[str]:
        """Names of files whose bytes differ from the expected ones, except files that contain
        times.
        """
        names = (name for name in files.keys() & expected.keys() if files[name] != expected[name])
        names = (name for name in names if not name.endswith((MANIFEST_NAME, "README.md")))
        return {name for name in names if not (self._varies and "/out/" in name)}


def checkpoints_in(files: Files) -> list[str]:
    """The folders of committed checkpoints that are not hidden."""
    found = [
        name.removesuffix(f"/{MANIFEST_NAME}")
        for name in files
        if name.endswith(f"/{MANIFEST_NAME}")
    ]
    return [
        name for name in found if not any(step.startswith((".", "tmp")) for step in name.split("/"))
    ]


def come_by_later(root: Path) -> None:
    """Have the next reader remove leases and temporary folders of killed processes, as after ten
    minutes.
    """
    for lease in root.rglob(".ft_ckpt-lease-*"):
        os.utime(lease, (0, 0))
        with open_checkpoint(open_place(lease.parent)):
            pass
    for kind in ("open", "copy"):
        with temporary_store(root / "tmp", f"ft_ckpt-{kind}-"):
            pass


def _agree(command: str, seen: Files | None, expected: Files | None) -> bool:
    if seen is None or expected is None or "library" not in command:
        return seen == expected
    return seen.keys() == expected.keys()


def _is_kept(files: Files, name: str) -> bool:
    """True if a foreign file is there: at worst in a hidden folder, until the next call."""
    return any(other.rpartition("/")[2] == name.rpartition("/")[2] for other in files)


def _is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())
