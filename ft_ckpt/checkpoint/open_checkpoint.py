"""Holds all files of one checkpoint open, so that readers see one save, even if it is replaced or deleted meanwhile.

A checkpoint may be replaced or deleted between any two files that are opened by their paths. So every file is opened
first and the manifest compared again when the last one is open: if it is no longer the one that was read, all is opened
anew. Readers of any library find the files in a folder of links to them.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.checkpoint.catalog import read_manifest, why_no_checkpoint
from ft_ckpt.checkpoint.checks import checkpoint_problems, misleading_files
from ft_ckpt.checkpoint.leases import hold_lease
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest
from ft_ckpt.errors import CheckpointError, CorruptError, NotACheckpointError, damaged_input
from ft_ckpt.storage.local_disk import open_regular
from ft_ckpt.storage.local_store import LocalStore

_DESCRIPTORS = Path("/proc/self/fd")


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose files are open; read them in `folder`, and name `path` to people."""

    path: Path  # where it was found
    folder: Path  # links to its open files, under their paths in the checkpoint
    manifest: Manifest
    identity: str  # digest of the manifest's text: equal for all ranks that have opened the same checkpoint

    def find_problems(self, deep: bool) -> tuple[str, ...]:
        """What is wrong with the open files, as `catalog.verify` finds it, and with what lies beside them."""
        where = "not of this checkpoint, and readers would take it for its weights; move it away"
        beside = (f"{name}: {where}" for name in misleading_files(LocalStore(self.path), self.manifest))
        return (*checkpoint_problems(LocalStore(self.folder), self.manifest, deep=deep), *beside)


@contextmanager
def open_checkpoint(path: str | os.PathLike[str]) -> Iterator[OpenCheckpoint]:
    """The checkpoint at `path`, its files open while the block runs, and leased so that nothing deletes them.

    A file that is missing has no link in `folder`. Raises NotACheckpointError or ManifestError as
    `catalog.read_manifest` does, CorruptError when a file cannot be opened or is no file, or where open files have no
    paths (outside Linux) and the checkpoint was replaced meanwhile.
    """
    path = Path(path).absolute()
    with hold_lease(path), ExitStack() as stack:
        while (held := _open_all(path, stack)) is None:  # replaced meanwhile
            stack.close()
        try:
            yield held
        except CheckpointError as error:
            error.args = tuple(_with_found_path(arg, held) for arg in error.args)
            raise


@contextmanager
def hold_open(path: Path) -> Iterator[Path]:
    """The path at which to read the file or folder `path` while the block runs.

    If it is a checkpoint of ours, or lies in one, that is held open, and what comes out is in its folder of links. A
    file that the checkpoint does not list is read where it is; so is whatever is no checkpoint of ours.

    Raises what `open_checkpoint` does.
    """
    here = path.absolute()
    root = next((folder for folder in [here, *here.parents][:4] if (folder / MANIFEST_NAME).is_file()), None)
    if root is None:
        yield path
        return
    with open_checkpoint(root) as held:
        place = held.folder / here.relative_to(root)
        yield place if place.exists() else path


def _open_all(path: Path, stack: ExitStack) -> OpenCheckpoint | None:
    """Open everything; None when another checkpoint has taken the place meanwhile."""
    marker = _open_or_none(path / MANIFEST_NAME, stack)
    if marker is None:
        raise NotACheckpointError(why_no_checkpoint(path))
    manifest = read_manifest(path)
    opened = {file.path: _open_or_none(path / file.path, stack) for file in manifest.files}
    if not _is_in_place(path, marker):
        return None
    text = os.pread(marker, os.fstat(marker).st_size, 0)
    if not _DESCRIPTORS.is_dir():
        stack.callback(_refuse_replaced, path, marker)
    folder = _link_folder(path, {MANIFEST_NAME: marker, **opened}, stack) if _DESCRIPTORS.is_dir() else path
    return OpenCheckpoint(path, folder, manifest, hashlib.blake2b(text, digest_size=16).hexdigest())


def _open_or_none(file: Path, stack: ExitStack) -> int | None:
    """A descriptor of the file, closed with the stack; None when there is none."""
    with damaged_input(file):
        try:
            return stack.enter_context(open_regular(file)).fileno()
        except (FileNotFoundError, NotADirectoryError):
            return None


def _is_in_place(path: Path, marker: int) -> bool:
    """Whether the manifest that is open is still the checkpoint's: an overwrite takes it away before anything else."""
    try:
        return os.path.samestat((path / MANIFEST_NAME).stat(), os.fstat(marker))
    except OSError:
        return False


def _link_folder(path: Path, opened: dict[str, int | None], stack: ExitStack) -> Path:
    """A folder, called as the checkpoint is, whose files are the open ones."""
    top = stack.enter_context(tempfile.TemporaryDirectory(prefix="ft_ckpt-open-"))
    folder = Path(top, path.name or "checkpoint")
    for name, descriptor in opened.items():
        if descriptor is not None:
            link = folder / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
    return folder


def _refuse_replaced(path: Path, marker: int) -> None:
    if not _is_in_place(path, marker):
        raise CorruptError(f"{path}: replaced while it was read; read it again")


def _with_found_path(text: object, held: OpenCheckpoint) -> object:
    return text.replace(str(held.folder), str(held.path)) if isinstance(text, str) else text
