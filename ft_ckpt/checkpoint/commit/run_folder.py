"""The folder of a run, on a disk or in a bucket, in which pruning removes checkpoints."""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

from ft_ckpt.checkpoint.catalog import CheckpointInfo
from ft_ckpt.checkpoint.checks import damage_of
from ft_ckpt.checkpoint.commit.bucket_delete import (
    drop_from_bucket,
    mark_guards,
    recover_in_bucket,
    strip_in_bucket,
)
from ft_ckpt.checkpoint.commit.delete import (
    Removal,
    clear_checkpoint_drafts,
    delete_checkpoint,
    delete_state,
    deletion_guards,
    finish_deletion,
    folder_entries,
    releasable_bytes,
    unfinished_deletions,
)
from ft_ckpt.checkpoint.commit.recovery import recover_target
from ft_ckpt.checkpoint.leases import CLOCK, is_mark, may_live, store_time
from ft_ckpt.errors import CheckpointError
from ft_ckpt.messages import warn
from ft_ckpt.storage import Store, Stored
from ft_ckpt.storage.local import TRIAL, LocalStore, clear_old_drafts, folder_of, holding_lock
from ft_ckpt.storage.places import ListedStore, Place, location_name

# one removal: its location, and the function that carries it out
RemovalStep: TypeAlias = tuple[Path | str, Callable[[], Removal]]
_STAGE = re.compile(r"\.(?P<target>.+)\.ft_ckpt-stage-.+-\d+-[0-9a-f]{8}", re.DOTALL)
# store identity -> digest of the listing that was verified
_verified_listings: dict[str, bytes] = {}


@dataclass(frozen=True)
class LocalRun:
    """The folder of a run on a disk, with renames and locks; see `delete` and `commit`."""

    root: Path

    def snapshot(self) -> Place:
        return Place(LocalStore(self.root))

    @contextlib.contextmanager
    def exclusive_sweep(self) -> Iterator[bool]:
        """Lock the folder against a second pruning, which could bring a checkpoint back.

        Yield False if another pruning is running. On file systems without folder locks, such as
        NFS, only one process may prune.
        """
        with holding_lock(self.root.resolve(strict=True)) as is_locked:
            yield is_locked is not False

    def unfinished(self) -> list[RemovalStep]:
        """Return a step for each folder whose deletion was interrupted.

        Old drafts in the folders of checkpoints are deleted first.
        """
        clear_checkpoint_drafts(self.root)
        return [(path, partial(finish_deletion, path)) for path in unfinished_deletions(self.root)]

    def drop(self, location: Path | str) -> Removal:
        return delete_checkpoint(Path(location))

    def strip(self, location: Path | str) -> Removal:
        return delete_state(Path(location))

    def is_valid(self, info: CheckpointInfo) -> bool:
        return not damage_of(info.place)

    def guards(self, checkpoint: Store) -> tuple[str, ...]:
        return deletion_guards(folder_of(checkpoint))

    def releasable(self, checkpoint: Store, names: Iterable[str]) -> int:
        return releasable_bytes(folder_of(checkpoint), names)

    def recover(self) -> tuple[str, ...]:
        """Undo or finish interrupted saves to the folder and to the folders in it.

        The folder of the run comes first, because the folders below it may be in its stage.
        """
        clear_old_drafts(self.root)
        names = set()
        for path in folder_entries(self.root):
            match = _STAGE.fullmatch(path.name)
            if match is not None:
                names.add(match["target"])
        lines = [*recover_target(self.root)]
        for name in sorted(names):
            lines += recover_target(self.root / name)
        return tuple(lines)


@dataclass
class BucketRun:
    """The folder of a run in a bucket, see `bucket_delete` and `marks`.

    Each decision is made from one listing.
    """

    root: Store
    now: float = 0.0  # lower bound of the time by the store's clock

    def snapshot(self) -> Place:
        return Place(ListedStore(self.root, self._list_all()))

    def exclusive_sweep(self) -> AbstractContextManager[bool]:
        """Yield True without a lock, because each removal gives way to other sweeps."""
        return contextlib.nullcontext(True)

    def unfinished(self) -> list[RemovalStep]:
        """Return a step for each folder with marks, whose processes may be dead.

        Stale clock and trial objects are deleted first.
        """
        self.now = store_time(self.root)
        objects = self._list_all()
        self._delete_stale(objects.values())
        marked = set()
        for path in objects:
            folder, _, name = path.partition("/")
            if is_mark(name) and not folder.startswith("."):
                marked.add(folder)

        listed = ListedStore(self.root, objects)
        steps: list[RemovalStep] = []
        for folder in sorted(marked):
            store = self.root.within(folder)
            steps.append(
                (store.url, partial(self._recover_folder, store, listed.within(folder).listed))
            )

        return steps

    def drop(self, location: Path | str) -> Removal:
        return drop_from_bucket(self.root.within(location_name(location)))

    def strip(self, location: Path | str) -> Removal:
        return strip_in_bucket(self.root.within(location_name(location)))

    def is_valid(self, info: CheckpointInfo) -> bool:
        """Check whether the checkpoint is valid.

        A checkpoint that was verified stays valid while its objects keep their versions.
        """
        objects = [stored for stored in info.store.list() if not is_mark(stored.name)]
        versions = hashlib.blake2b(repr(objects).encode(), digest_size=16).digest()
        if _verified_listings.get(info.store.identity) != versions:
            if damage_of(info.place):
                return False
            _verified_listings[info.store.identity] = versions
        return True

    def guards(self, checkpoint: Store) -> tuple[str, ...]:
        objects = {stored.name: stored for stored in checkpoint.list()}
        return mark_guards(checkpoint, objects, self.now)

    def releasable(self, checkpoint: Store, names: Iterable[str]) -> int:
        size_bytes = 0
        for name in names:
            stored = checkpoint.stat(name)
            if stored is not None:
                size_bytes += stored.size_bytes
        return size_bytes

    def recover(self) -> tuple[str, ...]:
        """Delete the leftovers of dead saves, and finish removals.

        A failure is a warning, because leftovers block no save.
        """
        lines = []
        try:
            for location, step in self.unfinished():
                removal = step()
                name = location_name(location)
                if removal.dropped:
                    lines.append(f"{name}: finished its removal")
                elif removal.freed_bytes:
                    lines.append(f"{name}: removed what was left of a save")
        except CheckpointError as error:
            warn(f"{self.root.url}: leftovers of dead saves were not removed ({error})")
        return tuple(lines)

    def _list_all(self) -> dict[str, Stored]:
        objects = {stored.name: stored for stored in self.root.list()}
        self.now = max([self.now, *(stored.modified for stored in objects.values())])
        return objects

    def _delete_stale(self, objects: Iterable[Stored]) -> None:
        passing = [stored for stored in objects if stored.name.startswith((CLOCK, TRIAL))]
        spent = [stored.name for stored in passing if not may_live(self.root, stored, self.now)]
        if spent:
            self.root.delete(spent)

    def _recover_folder(self, store: Store, listed: Mapping[str, Stored]) -> Removal:
        return recover_in_bucket(store, listed, self.now) or Removal(store.url)


RunFolder: TypeAlias = LocalRun | BucketRun  # checkpoints in it are named by their location


def open_run_folder(root: Place) -> RunFolder:
    """Return the folder of a run at `root`."""
    store = root.folder
    return BucketRun(store) if store.local_folder is None else LocalRun(store.local_folder)
