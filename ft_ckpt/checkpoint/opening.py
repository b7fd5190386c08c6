"""Opens one checkpoint, so that readers see one save even if it is replaced meanwhile.

On a disk a reader has a descriptor of the folder, see `open_folder`, and a lease: what an overwrite
moves aside is deleted when no lease is left, and no save waits for a reader. A bucket is listed:
each object is read in the listed version, or not at all.
"""

import hashlib
import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ft_ckpt.checkpoint.catalog import load_manifest, manifest_text, parse_manifest
from ft_ckpt.checkpoint.checks import (
    are_transient,
    checkpoint_problems,
    distinct_files,
    misleading_files,
    misleading_problem,
    replaced_problems,
    with_current_cards,
)
from ft_ckpt.checkpoint.commit import recover_target
from ft_ckpt.checkpoint.contents import why_no_checkpoint
from ft_ckpt.checkpoint.delete import without_state
from ft_ckpt.checkpoint.guards import hold_lease, is_mark, settled_list
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, Manifest
from ft_ckpt.checkpoint.open_folder import OpenFolder, OpenManifest, open_folder, open_manifest
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    ManifestError,
    NoSpaceError,
    NotACheckpointError,
    Problem,
    UnreadableError,
    listing,
)
from ft_ckpt.storage import (
    FileRecord,
    ListedStore,
    LocalStore,
    Place,
    Store,
    digest_problems,
    folder_of,
    open_place,
    temporary_store,
)

_MOST_TRIES = 10  # to list a checkpoint that is being replaced


@dataclass(frozen=True)
class OpenCheckpoint:
    """An open checkpoint: its files are read in `store`, which shows `place` in messages."""

    place: Place  # at which it was opened, and beside which other checkpoints are
    store: Store  # its files, by their paths in the checkpoint
    manifest: Manifest  # with the records of the model cards as they are now
    # digest of the manifest's text: equal for all ranks that have opened the same checkpoint
    identity: str
    stack: ExitStack | None = field(default=None, compare=False, repr=False)  # closes with it

    @property
    def requests(self) -> int:
        """The number of range requests, if it is in a bucket."""
        return self.store.asked.count if isinstance(self.store, ListedStore) else 0

    @property
    def is_local(self) -> bool:
        """Whether its files are on a disk of this machine."""
        return self.store.local_folder is not None

    @property
    def location(self) -> Path | str:
        return self.place.location

    @property
    def path(self) -> Path:
        return folder_of(self.place.folder)

    @property
    def folder(self) -> Path:
        """A path at which libraries find its files, the same ones after the checkpoint was
        replaced.
        """
        return folder_of(self.store)

    def find_problems(self, deep: bool, left_out: Collection[str] = ()) -> tuple[Problem, ...]:
        """The problems of the open files, as `catalog.verify` reports them, and of files beside
        them.

        `deep`: the digests of all files but `left_out` are compared, not those of small files
        alone.
        """
        if deep:
            self.fetch_files(
                [file.path for file in self.manifest.files if file.path not in left_out]
            )
        found = tuple(checkpoint_problems(self.store, self.manifest, deep=deep, left_out=left_out))
        if not isinstance(self.store, OpenFolder):
            return found  # the listing contains the files beside it
        whole_folder = LocalStore(self.store.folder, shown=self.store.shown)
        names = misleading_files(whole_folder, self.manifest)
        return (*found, *map(misleading_problem, names))

    def fetch_files(self, paths: Collection[str]) -> None:
        """Download files of a checkpoint in a bucket once, into a temporary folder; they are
        compared and read there.

        Without room for all of them they stay in the bucket, and comparing and reading are a
        download each.
        """
        if isinstance(self.store, ListedStore) and self.stack is not None:
            with suppress(NoSpaceError):
                room = self.stack.enter_context(temporary_store())
                self.store.fetch(paths, replace(room, syncs=False, direct_bytes=None))

    def refuse_damaged(self, paths: Collection[str] | None = None) -> None:
        """Compare the digests of the files `paths` (None: of all), before anything of them is used.

        Raises CorruptError naming the damaged ones, UnreadableError if all of them may be whole.
        """
        files = [file for file in self.manifest.files if paths is None or file.path in paths]
        self.fetch_files([file.path for file in files])
        problems = digest_problems(self.store, distinct_files(self.store, files))
        if not problems:
            return
        text = listing([f"{self.location}: {problem}" for problem in problems])
        if are_transient(problems):
            raise UnreadableError(f"{text}; try again")
        raise CorruptError(f"{text}; use another checkpoint")


@contextmanager
def open_checkpoint(place: str | os.PathLike[str] | Place) -> Iterator[OpenCheckpoint]:
    """The checkpoint at `place`, open and with a lease against deletion while the block runs.

    Its digests are compared by `find_problems` or `refuse_damaged`, which callers use before
    anything of its files.

    A missing file raises MissingError when it is read. Raises NotACheckpointError or ManifestError
    as `load_manifest`; CorruptError when an object is not the committed one, or (where folders
    cannot be exchanged, without a lease, and without /proc) the checkpoint was replaced meanwhile.
    """
    store = open_place(place).folder
    if store.local_folder is None:
        with ExitStack() as stack:
            yield _open_listed(store, stack)
        return
    path = store.local_folder.absolute()
    with ExitStack() as stack:
        while (held := _open_local(path, stack)) is None:  # replaced meanwhile
            stack.close()
        yield held
        if isinstance(held.store, OpenFolder) and held.store.marker is not None:
            held.store.marker.refuse_replaced()  # libraries have read by path


def checkpoint_around(place: Place) -> tuple[Store, str] | None:
    """The checkpoint of ours that is or contains `place`, and the name of `place` in it; None if
    there is none.
    """
    around = place.folders_around()
    return next(
        ((store, name) for store, name in around if store.stat(MANIFEST_NAME) is not None), None
    )


@contextmanager
def hold_open(path: str | os.PathLike[str] | Place, *, compares: bool = True) -> Iterator[Place]:
    """Yield the place to read the file or folder `path` from.

    The checkpoint of ours that is or contains it is opened; the result is then among its open
    files. With `compares`, the digests of this file, or of all files in this folder but training
    state, are compared first. A file that the checkpoint does not list, and anything outside of
    checkpoints of ours, is read in place. Raises what `open_checkpoint` does, and CorruptError for
    damaged files.
    """
    place = open_place(path)
    found = checkpoint_around(place)
    if found is None:
        yield place
        return
    root, name = found
    with open_checkpoint(Place(root)) as held:
        inside = Place(held.store, name)
        if compares:
            held.refuse_damaged(files_in(held.manifest, name))
        yield inside if inside.exists else place


def files_in(manifest: Manifest, name: str) -> set[str]:
    """The file `name`, or the files in the folder `name` but training state; of a folder of
    training state, all.
    """
    begin = f"{name}/" if name else ""
    inside = {file.path for file in manifest.files if f"{file.path}/".startswith(begin)}
    return inside & {file.path for file in without_state(manifest).files} or inside


def _open_listed(store: Store, stack: ExitStack) -> OpenCheckpoint:
    """The checkpoint in a bucket, listed while no save is replacing it; leased until the stack is
    closed.
    """
    before = _manifest_state(store)
    lease = stack.enter_context(hold_lease(Place(store))) if before else None
    for _ in range(_MOST_TRIES):
        found = settled_list(store, lease)
        listed = ListedStore(store, {each.name: each for each in found if not is_mark(each.name)})
        seen, after = _manifest_state(listed), _manifest_state(store)
        if before == seen == after:
            text = manifest_text(listed)
            manifest = parse_manifest(text, store.where(MANIFEST_NAME))
            manifest, _ = with_current_cards(listed, manifest, listed.listed)
            if problems := replaced_problems(listed, manifest, listed.listed):
                raise CorruptError(
                    f"{store.url}: {listing(problems)}; overwritten after it was committed, use "
                    "another checkpoint"
                )
            return OpenCheckpoint(
                Place(store), listed, manifest, text_identity(text.encode()), stack
            )
        before = after
    raise CorruptError(f"{store.url}: replaced while it was read; read it again")


def _open_local(path: Path, stack: ExitStack) -> OpenCheckpoint | None:
    """Open and lease the checkpoint until the stack closes; None if it was replaced meanwhile."""
    place = Place(LocalStore(path))
    if not path.is_dir():
        raise NotACheckpointError(why_no_checkpoint(place))
    folder = open_folder(path, stack)
    marker = open_manifest(folder, path, stack)
    if marker is None:
        raise NotACheckpointError(why_no_checkpoint(place))
    stack.callback(_delete_if_aside, path, marker)
    stack.enter_context(hold_lease(Place(LocalStore(folder))))
    if not marker.is_at(path / MANIFEST_NAME):  # a save that replaces it from now on sees the lease
        return None
    text = manifest_text(LocalStore(folder, shown=path))
    manifest = parse_manifest(text, place.store.where(MANIFEST_NAME))
    files = frozenset({MANIFEST_NAME, *(file.path for file in manifest.files)})
    store = OpenFolder(folder, shown=path, marker=marker, files=files)
    manifest, _ = with_current_cards(store, manifest)
    return OpenCheckpoint(place, store, manifest, text_identity(text.encode()))


def _delete_if_aside(path: Path, marker: OpenManifest) -> None:
    """Delete what a save has moved aside while the checkpoint was read, unless another reader has a
    lease on it.
    """
    with suppress(CheckpointError, OSError):  # it is left to the next save
        if not marker.is_at(path / MANIFEST_NAME):
            recover_target(path)


def _manifest_state(store: Store) -> str | None:
    found = store.stat(MANIFEST_NAME)
    return None if found is None else found.version


def text_identity(text: bytes) -> str:
    """The identity of the checkpoint whose manifest has this text."""
    return hashlib.blake2b(text, digest_size=16).hexdigest()


@dataclass(frozen=True)
class EarlierCheckpoint:
    """An earlier checkpoint of the same run, with the time of its commit."""

    store: Store
    files: tuple[FileRecord, ...]
    sealed: float  # unix seconds, by the clock of the store


def earlier_checkpoints(beside: Store, most: int) -> Iterator[EarlierCheckpoint]:
    """Up to `most` committed checkpoints directly below a folder, newest first."""
    sealed: list[tuple[float, str]] = []
    with suppress(OSError):
        for folder in beside.list_folder().folders:
            with suppress(OSError):
                found = (
                    None
                    if folder.name.startswith(".")
                    else beside.within(folder.name).stat(MANIFEST_NAME)
                )
                sealed += [(found.modified, folder.name)] if found is not None else []
    for time, name in sorted(sealed, reverse=True)[:most]:
        with suppress(ManifestError, OSError):  # damaged, or deleted since
            store = beside.within(name)
            yield EarlierCheckpoint(store, load_manifest(store).files, time)


def take_earlier(one: EarlierCheckpoint, record: FileRecord, store: Store, name: str) -> bool:
    """Copy or link an earlier file to `name` in `store`; False if impossible, or if it was modified
    after its commit.

    Its version is compared again afterwards, in case it was replaced meanwhile. Raises what the
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
