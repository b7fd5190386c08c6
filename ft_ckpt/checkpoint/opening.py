"""Opens one checkpoint, so that readers see one save even if it is replaced meanwhile.

On a disk a reader has a descriptor of the folder (see `open_folder`) and a lease. An overwrite
moves the old checkpoint aside. It is deleted when the last lease ends, so no save waits for a
reader. A checkpoint in a bucket is listed once, and each object is read in the listed version or
not at all.
"""

import hashlib
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ft_ckpt.checkpoint.checks import (
    are_transient,
    checkpoint_problems,
    distinct_files,
    replaced_problems,
)
from ft_ckpt.checkpoint.commit import recover_target, without_state
from ft_ckpt.checkpoint.leases import hold_lease, is_mark, list_after_removals
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    manifest_text,
    manifest_version,
    misleading_files,
    misleading_problem,
    parse_manifest,
    why_no_checkpoint,
    with_current_cards,
)
from ft_ckpt.checkpoint.open_folder import OpenFolder, OpenManifest, open_folder, open_manifest
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    NoSpaceError,
    NotACheckpointError,
    Problem,
    UnreadableError,
    damaged_input,
    listing,
)
from ft_ckpt.storage import Store
from ft_ckpt.storage.digests import digest_problems
from ft_ckpt.storage.local import LocalStore, folder_of, temporary_store
from ft_ckpt.storage.places import ListedStore, Place

# A bucket is listed again as long as saves replace the checkpoint, but not more often.
_MAX_LISTINGS = 10
_REPLACED = "replaced while it was read"


@dataclass(frozen=True)
class OpenCheckpoint:
    """An open checkpoint: its files are read in `store`, which shows `place` in messages."""

    # the place at which the checkpoint was opened
    place: Place
    # the files, by their paths in the checkpoint
    store: Store
    # The records of model cards in it are those of the cards as they are now.
    manifest: Manifest
    # digest of the manifest's text, equal on all ranks that have opened the same checkpoint
    identity: str
    # closes the resources of the checkpoint
    stack: ExitStack | None = field(default=None, compare=False, repr=False)

    @property
    def requests(self) -> int:
        """The number of range requests, 0 for a checkpoint on a disk."""
        return self.store.requests.count if isinstance(self.store, ListedStore) else 0

    @property
    def is_local(self) -> bool:
        """Whether the files are on a disk of this machine."""
        return self.store.local_folder is not None

    @property
    def location(self) -> Path | str:
        return self.place.location

    @property
    def path(self) -> Path:
        return folder_of(self.place.folder)

    @property
    def folder(self) -> Path:
        """A path at which libraries find the files, even after the checkpoint was replaced."""
        return folder_of(self.store)

    def find_problems(self, deep: bool, left_out: Collection[str] = ()) -> tuple[Problem, ...]:
        """Return the problems of the files, as `verify` reports them.

        The digests of small files are compared, and with `deep` the digests of all files except
        `left_out`.
        """
        if deep:
            paths = [file.path for file in self.manifest.files if file.path not in left_out]
            self.fetch_files(paths)
        problems = tuple(
            checkpoint_problems(self.store, self.manifest, deep=deep, left_out=left_out)
        )
        if not isinstance(self.store, OpenFolder):
            return problems  # a listing of a bucket contains the unlisted files of the folder
        if problems and self._is_replaced():
            return (Problem(_REPLACED, is_transient=True),)
        whole_folder = LocalStore(self.store.folder, shown=self.store.shown)
        names = misleading_files(whole_folder, self.manifest)
        return (*problems, *map(misleading_problem, names))

    def fetch_files(self, paths: Collection[str]) -> None:
        """Download files of a checkpoint in a bucket once, into a temporary folder.

        The files are compared and read in that folder. If the disk has no space for all of them,
        they stay in the bucket, and are downloaded once to compare and once to read them.
        """
        if isinstance(self.store, ListedStore) and self.stack is not None:
            with suppress(NoSpaceError):
                folder = self.stack.enter_context(temporary_store())
                self.store.fetch(paths, replace(folder, syncs=False, direct_bytes=None))

    def refuse_damaged(self, paths: Collection[str] | None = None) -> None:
        """Compare the digests of the files `paths`, or of all files, before they are used.

        Raises CorruptError naming the damaged files; UnreadableError if these may be whole but
        cannot be read now, or if another save has replaced the checkpoint.
        """
        files = [file for file in self.manifest.files if paths is None or file.path in paths]
        self.fetch_files([file.path for file in files])
        problems = digest_problems(self.store, distinct_files(self.store, files))
        if not problems:
            return
        if self._is_replaced():
            raise UnreadableError(f"{self.location}: {_REPLACED}; read it again")
        text = listing([f"{self.location}: {problem}" for problem in problems])
        if are_transient(problems):
            raise UnreadableError(f"{text}; try again")
        raise CorruptError(f"{text}; use another checkpoint")

    def _is_replaced(self) -> bool:
        """Check whether the place on a disk now has the manifest of another save, or none.

        The texts are compared, not the inode numbers, because some clients of network file systems
        number paths, not files.
        """
        if not self.is_local:
            return False
        try:
            text = manifest_text(self.place.folder)
        except CheckpointError as error:
            return isinstance(error, NotACheckpointError)
        return text_identity(text.encode()) != self.identity


@contextmanager
def open_checkpoint(place: Place, *, is_private: bool = False) -> Iterator[OpenCheckpoint]:
    """Open the checkpoint at `place`, with a lease against deletion while the block runs.

    The digests are not compared: call `find_problems` or `refuse_damaged` before the files are
    used. With `is_private` no other process writes to the place, and the checkpoint may be deleted
    before the block ends. Raises NotACheckpointError or ManifestError as `load_manifest` does;
    UnreadableError if an object is not the committed one, or if the checkpoint was replaced while
    it was open (where folders cannot be exchanged, without a lease, and without /proc). Reading a
    missing file raises MissingError.
    """
    store = place.folder
    with ExitStack() as stack:
        if store.local_folder is None:
            yield _open_listed(store, stack)
            return
        path = store.local_folder.absolute()
        checkpoint = _open_local(path, stack)
        while checkpoint is None:  # replaced meanwhile
            stack.close()
            checkpoint = _open_local(path, stack)
        yield checkpoint
        if is_private or not isinstance(checkpoint.store, OpenFolder):
            return
        if checkpoint.store.manifest_file is not None:
            checkpoint.store.manifest_file.refuse_replaced()  # libraries have read by path


@contextmanager
def hold_open(place: Place, *, compares: bool = True) -> Iterator[Place]:
    """Yield the place from which to read the file or folder `place`.

    If a checkpoint of ft_ckpt is or contains `place`, the checkpoint is opened, and the result is
    in its open files. With `compares`, the digests of the file, or of all files in the folder
    except training state, are compared first. A file that no checkpoint lists is read in place.
    Raises what `open_checkpoint` raises, and CorruptError for damaged files.
    """
    around = checkpoint_around(place)
    if around is None:
        yield place
        return
    root, name = around
    with open_checkpoint(Place(root)) as checkpoint:
        inside = Place(checkpoint.store, name)
        if compares:
            checkpoint.refuse_damaged(files_in(checkpoint.manifest, name))
        yield inside if inside.exists else place


def checkpoint_around(place: Place) -> tuple[Store, str] | None:
    """Return the checkpoint of ft_ckpt that is or contains `place`, and the name of `place` in it.

    Return None if there is no such checkpoint.
    """
    for store, name in place.folders_around():
        if store.stat(MANIFEST_NAME) is not None:
            return store, name
    return None


def files_in(manifest: Manifest, name: str) -> set[str]:
    """Return the file `name`, or the files in the folder `name` except training state.

    If the folder has training state alone, return all of it.
    """
    start = f"{name}/" if name else ""
    inside = {file.path for file in manifest.files if f"{file.path}/".startswith(start)}
    without_training_state = {file.path for file in without_state(manifest).files}
    return inside & without_training_state or inside


def text_identity(text: bytes) -> str:
    """Return the identity of the checkpoint whose manifest has this text."""
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _open_listed(store: Store, stack: ExitStack) -> OpenCheckpoint:
    """Open the checkpoint in a bucket, with a listing that no save has changed meanwhile.

    The checkpoint is leased until the stack is closed.
    """
    before = manifest_version(store)
    lease = stack.enter_context(hold_lease(Place(store))) if before else None
    for _ in range(_MAX_LISTINGS):
        objects = {}
        for stored in list_after_removals(store, lease):
            if not is_mark(stored.name):
                objects[stored.name] = stored
        listed = ListedStore(store, objects)
        after = manifest_version(store)
        if before == manifest_version(listed) == after:
            return _checkpoint_of_listing(store, listed, stack)
        before = after
    raise UnreadableError(f"{store.url}: {_REPLACED}; read it again")


def _checkpoint_of_listing(store: Store, listed: ListedStore, stack: ExitStack) -> OpenCheckpoint:
    text = manifest_text(listed)
    manifest = parse_manifest(text, store.where(MANIFEST_NAME))
    manifest, _ = with_current_cards(listed, manifest, listed.listed)
    problems = replaced_problems(listed, manifest, listed.listed)
    if problems:
        raise CorruptError(
            f"{store.url}: {listing(problems)}; overwritten after it was committed, use "
            "another checkpoint"
        )
    return OpenCheckpoint(Place(store), listed, manifest, text_identity(text.encode()), stack)


def _open_local(path: Path, stack: ExitStack) -> OpenCheckpoint | None:
    """Open and lease the checkpoint until the stack closes; return None if it was replaced."""
    place = Place(LocalStore(path))
    with damaged_input(path):  # a mount may refuse to say what it is
        is_folder = path.is_dir()
    if not is_folder:
        raise NotACheckpointError(why_no_checkpoint(place))
    folder = open_folder(path, stack)
    manifest_file = open_manifest(folder, path, stack)
    if manifest_file is None:
        raise NotACheckpointError(why_no_checkpoint(place))
    stack.callback(_delete_if_aside, path, manifest_file)
    stack.enter_context(hold_lease(Place(LocalStore(folder))))

    # a save that replaces it from now on sees the lease
    if not manifest_file.is_at(path / MANIFEST_NAME):
        return None
    text = manifest_text(LocalStore(folder, shown=path))
    manifest = parse_manifest(text, place.store.where(MANIFEST_NAME))
    files = frozenset({MANIFEST_NAME, *(file.path for file in manifest.files)})
    store = OpenFolder(folder, shown=path, manifest_file=manifest_file, files=files)
    manifest, _ = with_current_cards(store, manifest)
    return OpenCheckpoint(place, store, manifest, text_identity(text.encode()))


def _delete_if_aside(path: Path, manifest_file: OpenManifest) -> None:
    """Delete the checkpoint if a save has moved it aside, unless another reader has a lease."""
    with suppress(CheckpointError, OSError):  # the next save tries again
        if not manifest_file.is_at(path / MANIFEST_NAME):
            recover_target(path, by_reader=True)
