"""Holds all files of one checkpoint open, so that readers see one save, even if it is replaced or deleted meanwhile.

A checkpoint may be replaced or deleted between any two files that are opened by their paths. So every file is opened
first and the manifest compared again when the last one is open: if it is no longer the one that was read, all is opened
anew. Readers of any library find the files in a folder of links to them. A bucket is listed instead: each object is
read in the version listed, or not at all.
"""

import hashlib
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from ft_ckpt.checkpoint.catalog import load_manifest, manifest_text, parse_manifest, why_no_checkpoint
from ft_ckpt.checkpoint.checks import checkpoint_problems, misleading_files, replaced_problems
from ft_ckpt.checkpoint.guards import hold_lease, is_mark, settled_list
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    ManifestError,
    NotACheckpointError,
    damaged_input,
    explained,
    listing,
)
from ft_ckpt.messages import printable
from ft_ckpt.storage.digests import FileRecord, digest_of_open
from ft_ckpt.storage.frozen_view import ListedStore
from ft_ckpt.storage.kept_store import KeptStore, keeping_digest
from ft_ckpt.storage.local_disk import open_regular
from ft_ckpt.storage.local_store import LocalStore, folder_of, temporary_store
from ft_ckpt.storage.place import Place, open_place
from ft_ckpt.storage.proofs import FileProof, SourceFolder, SourceProof, proving
from ft_ckpt.storage.store import Store

_DESCRIPTORS = Path("/proc/self/fd")
_MOST_LOOKS = 10  # at a bucket that is written over all the time


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint whose files are open; read them in `store`, and name `origin` to people."""

    origin: Store  # where it was found
    store: Store  # its open files, under their paths in the checkpoint
    manifest: Manifest
    identity: str  # digest of the manifest's text: equal for all ranks that have opened the same checkpoint

    @property
    def requests(self) -> int:
        """How often ranges of its files were asked for, where they are in a bucket."""
        return self.store.asked.count if isinstance(self.store, ListedStore) else 0

    @property
    def location(self) -> Path | str:
        """Where it was found, as people are given it."""
        return Place(self.origin).location

    @property
    def path(self) -> Path:
        """Where it was found, on this machine."""
        return folder_of(self.origin)

    @property
    def folder(self) -> Path:
        """On this machine, the folder with links to its open files."""
        return folder_of(self.store)

    @cached_property
    def tensor_files(self) -> frozenset[str]:
        """The paths of the files that hold tensors."""
        return frozenset(tensor.file for part in self.manifest.parts for tensor in part.tensors)

    def late_proofs(self) -> list[FileProof]:
        """The comparisons of the files of tensors with their digests, for whoever reads these files."""
        files = (file for file in self.manifest.files if file.path in self.tensor_files)
        return [FileProof(file, partial(self.store.open, file.path), range(file.ranks)) for file in files]

    def find_problems(
        self, deep: bool, keep: Iterable[str] = (), own: bool = False, late: Collection[str] = ()
    ) -> tuple[str, ...]:
        """What is wrong with the open files, as `catalog.verify` finds it, and with what lies beside them.

        The files `late` are not compared with their digests yet, see `late_proofs`.
        Of the files `keep`, large ones in the page cache are then used where they were digested; with `own`, those that
        are not in it are read into memory of our own, where there is plenty, and used there.
        """
        kept = self.store if deep and isinstance(self.store, KeptStore) else None
        digest = digest_of_open if kept is None else keeping_digest(kept, frozenset(keep), own)
        found = tuple(checkpoint_problems(self.store, self.manifest, deep=deep, digest=digest, late=late))
        if not isinstance(self.origin, LocalStore):
            return found  # the listing has what lies beside its files
        where = "not of this checkpoint, and readers would take it for its weights; move it away"
        beside = (f"{name}: {where}" for name in misleading_files(self.origin, self.manifest))
        return (*found, *beside)

    def let_go(self) -> None:
        """Free the memory of files that `find_problems` kept: they are read by their paths."""
        if isinstance(self.store, KeptStore):
            self.store.kept.clear()


@contextmanager
def open_checkpoint(place: str | os.PathLike[str] | Place, *, compares: bool = True) -> Iterator[OpenCheckpoint]:
    """The checkpoint at `place`, its files open while the block runs, and leased so that nothing deletes it.

    What is read in its `store` is compared with the digests in its manifest, see `proofs`: small files when they
    are opened, all others by each commit and at the end of the block. Without `compares` that is left to the caller.

    A file that is missing is not in its `store`. Raises NotACheckpointError or ManifestError as `load_manifest` does,
    CorruptError when a file that was read is damaged, an object is not the one that was committed, a file cannot be
    opened or is no file, or where open files have no paths (outside Linux) and the checkpoint was replaced meanwhile.
    """
    store = open_place(place).folder
    if not isinstance(store, LocalStore):
        with ExitStack() as stack, _proved(_open_listed(store, stack), compares) as listed:
            yield listed
        return
    path = store.folder.absolute()
    with hold_lease(path), ExitStack() as stack:
        while (held := _open_local(path, stack)) is None:  # replaced meanwhile
            stack.close()
        try:
            with _proved(held, compares) as proved:
                yield proved
        except CheckpointError as error:
            error.args = tuple(_with_found_path(arg, held) for arg in error.args)
            raise


@contextmanager
def _proved(held: OpenCheckpoint, compares: bool) -> Iterator[OpenCheckpoint]:
    """The open checkpoint, whose files are compared while they are read, if it `compares`."""
    store = held.store
    if not (compares and isinstance(store, (SourceFolder, ListedStore))):
        yield held
        return
    proof = SourceProof(store, held.manifest.files)
    with proving(proof):
        yield replace(held, store=replace(store, proof=proof))


def checkpoint_around(place: Place) -> tuple[Store, str] | None:
    """The checkpoint of ours that `place` is, or lies in, and its name there; None when it lies in none."""
    around = place.folders_around()
    return next(((store, name) for store, name in around if store.stat(MANIFEST_NAME) is not None), None)


@contextmanager
def hold_open(path: str | os.PathLike[str] | Place, *, compares: bool = True) -> Iterator[Place]:
    """Where to read the file or folder `path` while the block runs.

    If it is a checkpoint of ours, or lies in one, that is held open, and what comes out is among its open files, which
    are compared as `open_checkpoint` says. A file that the checkpoint does not list is read where it is; so is whatever
    is no checkpoint of ours.

    Raises what `open_checkpoint` does.
    """
    place = open_place(path)
    found = checkpoint_around(place)
    if found is None:
        yield place
        return
    root, name = found
    with open_checkpoint(Place(root), compares=compares) as held:
        inside = Place(held.store, name)
        yield inside if inside.exists else place


def _open_listed(store: Store, stack: ExitStack) -> OpenCheckpoint:
    """The checkpoint in a bucket, as it is listed when none is taking its place; leased until the stack is closed."""
    before = _manifest_state(store)
    lease = stack.enter_context(hold_lease(Place(store))) if before else None
    for _ in range(_MOST_LOOKS):
        found = settled_list(store, lease)
        listed = ListedStore(store, {each.name: each for each in found if not is_mark(each.name)})
        seen, after = _manifest_state(listed), _manifest_state(store)
        if before == seen == after:
            text = manifest_text(listed)
            manifest = parse_manifest(text, store.where(MANIFEST_NAME))
            if problems := replaced_problems(listed, manifest, listed.listed):
                told = listing(problems)
                raise CorruptError(f"{store.url}: {told}; written over after it was committed, use another one")
            return OpenCheckpoint(store, listed, manifest, _text_identity(text.encode()))
        before = after
    raise CorruptError(f"{store.url}: replaced while it was read; read it again")


def _open_local(path: Path, stack: ExitStack) -> OpenCheckpoint | None:
    """Open everything; None when another checkpoint has taken the place meanwhile."""
    marker = _open_or_none(path / MANIFEST_NAME, stack)
    if marker is None:
        raise NotACheckpointError(why_no_checkpoint(LocalStore(path)))
    store = LocalStore(path)
    text = manifest_text(store)
    manifest = parse_manifest(text, store.where(MANIFEST_NAME))
    opened = {file.path: _open_or_none(path / file.path, stack) for file in manifest.files}
    if not _is_in_place(path, marker):
        return None
    if not _DESCRIPTORS.is_dir():
        stack.callback(_refuse_replaced, path, marker)
    folder = _link_folder(path, {MANIFEST_NAME: marker, **opened}, stack) if _DESCRIPTORS.is_dir() else path
    opened_store = KeptStore(folder)
    stack.callback(opened_store.kept.clear)
    return OpenCheckpoint(store, opened_store, manifest, _text_identity(text.encode()))


def _manifest_state(store: Store) -> str | None:
    found = store.stat(MANIFEST_NAME)
    return None if found is None else found.version


def _text_identity(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _open_or_none(file: Path, stack: ExitStack) -> int | None:
    """A descriptor of the file, closed with the stack; None when there is none."""
    with damaged_input(file):
        try:
            return stack.enter_context(open_regular(file)).fileno()
        except (FileNotFoundError, NotADirectoryError):
            return None


def _is_in_place(path: Path, marker: int) -> bool:
    """Whether the manifest that is open is still the checkpoint's: an overwrite takes it away before anything else."""
    with damaged_input(path):
        try:
            return os.path.samestat((path / MANIFEST_NAME).stat(), os.fstat(marker))
        except (FileNotFoundError, NotADirectoryError):
            return False


def _link_folder(path: Path, opened: dict[str, int | None], stack: ExitStack) -> Path:
    """A folder, called as the checkpoint is, whose files are the open ones."""
    with explained(tempfile.gettempdir()):
        top = stack.enter_context(temporary_store(prefix="ft_ckpt-open-"))
        folder = top.folder / (path.name or "checkpoint")
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
    return text.replace(str(held.folder), printable(str(held.path))) if isinstance(text, str) else text


@dataclass(frozen=True)
class EarlierCheckpoint:
    """A checkpoint beside the one that is made, with the time at which it was complete."""

    store: Store
    files: tuple[FileRecord, ...]
    sealed: float  # unix seconds, by the clock of the store


def earlier_checkpoints(beside: Store, most: int) -> Iterator[EarlierCheckpoint]:
    """The newest whole checkpoints in a folder, at most so many, newest first."""
    sealed: list[tuple[float, str]] = []
    with suppress(OSError):
        for folder in beside.list_folder().folders:
            with suppress(OSError):
                found = None if folder.name.startswith(".") else beside.within(folder.name).stat(MANIFEST_NAME)
                sealed += [(found.modified, folder.name)] if found is not None else []
    for time, name in sorted(sealed, reverse=True)[:most]:
        with suppress(ManifestError, OSError):  # damaged, or deleted since
            store = beside.within(name)
            yield EarlierCheckpoint(store, load_manifest(store).files, time)


def take_earlier(one: EarlierCheckpoint, record: FileRecord, store: Store, name: str) -> bool:
    """Give the earlier file the name `name` in `store`, too; False where that cannot be, or it was written to since.

    Its version is compared again when it is there, so that nobody can put another file in its place. Raises what the
    stores do.
    """
    found = one.store.stat(record.path)
    if found is None or found.size_bytes != record.size_bytes or found.modified > one.sealed:
        return False
    if not store.copy(record.path, name, one.store):
        return False
    if one.store.stat(record.path) == found:
        return True
    store.delete([name])
    return False
