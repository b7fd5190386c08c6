"""The folder of an open checkpoint on a disk, read through one descriptor.

`/proc/self/fd/N/model.safetensors` stays the old file after a save has exchanged the folder or
moved it aside, for libraries that read by path too. Where a save cannot exchange folders it moves
single files, the manifest first. So the manifest is compared after each file is opened, and when
the checkpoint is closed.
"""

import os
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import MissingError, UnreadableError, damaged_input
from ft_ckpt.storage import FolderListing, Readable, Stored, regular_descriptor
from ft_ckpt.storage.local import LocalStore

_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True)
class OpenFolder(LocalStore):
    """One folder of an open checkpoint, as a store of its listed files only."""

    manifest_file: "OpenManifest | None" = None  # compared after each file is opened
    files: frozenset[str] = frozenset()  # listed files, by their paths in the checkpoint
    inside: str = ""  # path of this folder in the checkpoint, with a slash at its end

    def within(self, folder: str) -> "OpenFolder":
        below = super().within(folder)
        assert isinstance(below, OpenFolder)
        return replace(below, inside=f"{self.inside}{folder}/")

    def open(self, name: str) -> Readable:
        """Open a listed file. Raises UnreadableError if the checkpoint was replaced."""
        if not self._is_listed(name):
            raise MissingError(f"{self.where(name)}: no such file")
        try:
            file = super().open(name)
        except MissingError:
            self._refuse_replaced()
            raise
        self._refuse_replaced()
        return file

    def list(self, prefix: str = "") -> list[Stored]:
        return [stored for stored in super().list(prefix) if self._is_listed(stored.name)]

    def list_folder(self, prefix: str = "") -> FolderListing:
        listing = super().list_folder(prefix)
        start = f"{self.inside}{prefix}/" if prefix else self.inside
        first_steps = set()
        for path in self.files:
            if path.startswith(start):
                first_steps.add(path.removeprefix(start).partition("/")[0])
        folders = tuple(folder for folder in listing.folders if folder.name in first_steps)
        objects = tuple(stored for stored in listing.objects if self._is_listed(stored.name))
        return FolderListing(listing.exists, folders, objects)

    def stat(self, name: str) -> Stored | None:
        return super().stat(name) if self._is_listed(name) else None

    def _is_listed(self, name: str) -> bool:
        return f"{self.inside}{name}" in self.files

    def _refuse_replaced(self) -> None:
        if self.manifest_file is not None:
            self.manifest_file.refuse_replaced()


@dataclass(frozen=True)
class OpenManifest:
    """The manifest of an open checkpoint: a descriptor, and the path at which it was opened."""

    descriptor: int
    path: Path
    shown: Path  # path of the checkpoint in messages

    def is_at(self, path: Path) -> bool:
        """Check whether the file at `path` is this manifest."""
        with damaged_input(self.shown):
            try:
                return os.path.samestat(path.stat(), os.fstat(self.descriptor))
            except (FileNotFoundError, NotADirectoryError):
                return False

    def refuse_replaced(self) -> None:
        """Raise UnreadableError if the checkpoint was replaced or deleted."""
        if not self.is_at(self.path):
            raise UnreadableError(f"{self.shown}: replaced while it was read; read it again")


def open_folder(path: Path, stack: ExitStack) -> Path:
    """Return a path that stays the folder at `path` until the stack closes.

    Return `path` itself on a system without /proc.
    """
    if not _DESCRIPTORS.is_dir():
        return path
    with damaged_input(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return _DESCRIPTORS / str(descriptor)


def open_manifest(folder: Path, shown: Path, stack: ExitStack) -> OpenManifest | None:
    """Open the manifest in `folder` until the stack closes; return None without a manifest.

    `shown` is the path of the checkpoint in messages.
    """
    with damaged_input(shown / MANIFEST_NAME):
        try:
            descriptor = regular_descriptor(folder / MANIFEST_NAME)
        except (FileNotFoundError, NotADirectoryError):
            return None
    stack.callback(os.close, descriptor)
    return OpenManifest(descriptor, folder / MANIFEST_NAME, shown)
