"""The folder of a run, as those who keep and delete its checkpoints see it: on a disk, or in a bucket."""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from ft_ckpt.checkpoint import recovery
from ft_ckpt.checkpoint.bucket_removal import (
    drop_from_bucket,
    mark_guards,
    settle_in_bucket,
    strip_in_bucket,
)
from ft_ckpt.checkpoint.catalog import CheckpointInfo, damage_of
from ft_ckpt.checkpoint.delete import (
    Removal,
    delete_checkpoint,
    delete_state,
    deletion_guards,
    finish_deletion,
    folder_entries,
    releasable_bytes,
    unfinished_deletions,
)
from ft_ckpt.checkpoint.marks import CLOCK, PROBE, is_mark, may_live, store_time
from ft_ckpt.errors import CheckpointError
from ft_ckpt.messages import warn
from ft_ckpt.storage import owners
from ft_ckpt.storage.listed_store import ListedStore
from ft_ckpt.storage.local_store import LocalStore, folder_of
from ft_ckpt.storage.place import Place, location_name
from ft_ckpt.storage.store import Store, Stored

Step = tuple[Path | str, Callable[[], Removal]]  # one removal: where, and what does it
_STAGE = re.compile(r"\.(?P<target>.+)\.ft_ckpt-stage-.+-\d+-[0-9a-f]{8}", re.DOTALL)
_PROVED: dict[str, bytes] = {}  # the checkpoints in buckets that were found valid, as they were listed


class RunFolder(Protocol):
    """What keeping and deleting checkpoints asks of the folder of a run. Checkpoints are named by their location."""

    def look(self) -> Place:
        """The folder to list and read the checkpoints in, as it is now."""
        ...

    def sole_sweep(self) -> AbstractContextManager[bool]:
        """Keep other sweeps off while the block runs; False when one is at work."""
        ...

    def unfinished(self) -> list[Step]:
        """What others have begun to delete, and what has to be done about it."""
        ...

    def drop(self, location: Path | str) -> Removal:
        """Delete a checkpoint, unless something guards it; raises as `delete.delete_checkpoint` does."""
        ...

    def strip(self, location: Path | str) -> Removal:
        """Delete the training state of a checkpoint, unless something guards it; raises likewise."""
        ...

    def is_valid(self, info: CheckpointInfo) -> bool:
        """Whether it passes `verify(deep=False)`; raises what `damage_of` does."""
        ...

    def guards(self, checkpoint: Store) -> tuple[str, ...]:
        """The reasons, read from its folder, why a checkpoint that was listed must not be deleted now."""
        ...

    def releasable(self, checkpoint: Store, names: Iterable[str]) -> int:
        """Bytes that deleting these files of a checkpoint frees."""
        ...

    def recover(self) -> tuple[str, ...]:
        """Undo or finish the saves whose process died; a line for each."""
        ...


def open_run_folder(root: Place) -> RunFolder:
    """The folder of a run at `root`."""
    store = root.folder
    return LocalRun(store.folder) if isinstance(store, LocalStore) else BucketRun(store)


@dataclass(frozen=True)
class LocalRun:
    """A folder of a disk: renames and locks, see `delete` and `recovery`."""

    root: Path

    def look(self) -> Place:
        """The folder itself."""
        return Place(LocalStore(self.root))

    @contextlib.contextmanager
    def sole_sweep(self) -> Iterator[bool]:
        """Lock the folder against a second pruning, which could bring a checkpoint back."""
        with owners.holding_lock(self.root.resolve(strict=True)) as mine:
            yield mine is not False  # without locks on folders, such as NFS, there must be one that prunes

    def unfinished(self) -> list[Step]:
        """Tombstones."""
        return [(path, partial(finish_deletion, path)) for path in unfinished_deletions(self.root)]

    def drop(self, location: Path | str) -> Removal:
        """See `delete`."""
        return delete_checkpoint(Path(location))

    def strip(self, location: Path | str) -> Removal:
        """See `delete`."""
        return delete_state(Path(location))

    def is_valid(self, info: CheckpointInfo) -> bool:
        """Ask the catalog."""
        return not damage_of(info.place)

    def guards(self, checkpoint: Store) -> tuple[str, ...]:
        """Pins, leases, and stages beside it."""
        return deletion_guards(folder_of(checkpoint))

    def releasable(self, checkpoint: Store, names: Iterable[str]) -> int:
        """Those of files with no other name."""
        return releasable_bytes(folder_of(checkpoint), names)

    def recover(self) -> tuple[str, ...]:
        """Settle stages and sidelines; the run's own folder comes first, as what is below it may be in a stage."""
        named = (_STAGE.fullmatch(path.name) for path in folder_entries(self.root))
        targets = sorted({match["target"] for match in named if match})
        return tuple(
            line
            for target in (self.root, *(self.root / name for name in targets))
            for line in recovery.recover_target(target)
        )


@dataclass
class BucketRun:
    """The prefix of a bucket, see `bucket_removal` and `marks`; all is told by one listing of it."""

    root: Store
    now: float = 0.0  # by the clock of the store, as far as it is known: at least this

    def look(self) -> Place:
        """The objects as they are listed now."""
        return Place(ListedStore(self.root, self._list_all()))

    def sole_sweep(self) -> AbstractContextManager[bool]:
        """Nothing: each removal gives way to another's."""
        return contextlib.nullcontext(True)

    def unfinished(self) -> list[Step]:
        """All folders with marks: some may be of processes that are dead."""
        self.now = store_time(self.root)
        listed = self._list_all()
        passing = [each for each in listed.values() if each.name.startswith((CLOCK, PROBE))]
        if spent := [each.name for each in passing if not may_live(self.root, each, self.now)]:
            self.root.delete(spent)
        marked = {name.partition("/")[0] for name in listed if is_mark(name.partition("/")[2])}
        return [self._settling(name, listed) for name in sorted(marked) if not name.startswith(".")]

    def drop(self, location: Path | str) -> Removal:
        """See `bucket_removal`."""
        return drop_from_bucket(self._folder(location))

    def strip(self, location: Path | str) -> Removal:
        """See `bucket_removal`."""
        return strip_in_bucket(self._folder(location))

    def is_valid(self, info: CheckpointInfo) -> bool:
        """Ask the catalog; once found valid, a checkpoint is so while its objects have the versions that were seen."""
        objects = [each for each in info.store.list() if not is_mark(each.name)]
        seen = hashlib.blake2b(repr(objects).encode(), digest_size=16).digest()
        if _PROVED.get(info.store.identity) != seen:
            if damage_of(info.place):
                return False
            _PROVED[info.store.identity] = seen
        return True

    def guards(self, checkpoint: Store) -> tuple[str, ...]:
        """Marks."""
        return mark_guards(checkpoint, {each.name: each for each in checkpoint.list()}, self.now)

    def releasable(self, checkpoint: Store, names: Iterable[str]) -> int:
        """All: an object has one name."""
        return sum(found.size_bytes for name in names if (found := checkpoint.stat(name)) is not None)

    def recover(self) -> tuple[str, ...]:
        """Delete what is left of saves, and finish removals. Failures are warned of: nothing there is in the way."""
        done = []
        try:
            for location, step in self.unfinished():
                removal = step()
                if removal.freed_bytes or removal.dropped:
                    what = "finished its removal" if removal.dropped else "removed what was left of a save"
                    done.append(f"{location_name(location)}: {what}")
        except CheckpointError as error:
            warn(f"{self.root.url}: what dead saves may have left there stays for now ({error})", stacklevel=3)
        return tuple(done)

    def _list_all(self) -> dict[str, Stored]:
        found = {each.name: each for each in self.root.list()}
        self.now = max([self.now, *(each.modified for each in found.values())])
        return found

    def _settling(self, name: str, listed: Mapping[str, Stored]) -> Step:
        store, inside = self.root.within(name), ListedStore(self.root, listed).within(name).listed
        return store.url, lambda: settle_in_bucket(store, inside, self.now) or Removal(store.url)

    def _folder(self, location: Path | str) -> Store:
        return self.root.within(location_name(location))
