"""Earlier checkpoints of a run, whose equal files a save links or copies."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.checkpoint.stored_manifest import load_manifest
from ft_ckpt.errors import ManifestError
from ft_ckpt.storage import Store
from ft_ckpt.storage.digests import FileRecord


@dataclass(frozen=True)
class EarlierCheckpoint:
    """An earlier checkpoint of the same run, with the time of its commit."""

    store: Store
    files: tuple[FileRecord, ...]
    committed: float  # unix seconds, by the clock of the store

    def link_file(self, record: FileRecord, store: Store, name: str) -> bool:
        """Copy or link a file to `name` in `store`.

        False if impossible, or if it was modified after the commit.

        Raises what the stores do.
        """
        before = self.store.stat(record.path)
        if before is None or before.size_bytes != record.size_bytes:
            return False
        if before.modified > self.committed or not store.copy(record.path, name, self.store):
            return False
        # it may have been replaced meanwhile
        if self.store.stat(record.path) == before:
            return True
        store.delete([name])
        return False


def earlier_checkpoints(beside: Store, max_count: int) -> Iterator[EarlierCheckpoint]:
    """Up to `max_count` committed checkpoints directly below a folder, newest first."""
    committed: list[tuple[float, str]] = []
    with suppress(OSError):
        for folder in beside.list_folder().folders:
            if folder.name.startswith("."):
                continue
            with suppress(OSError):
                manifest = beside.within(folder.name).stat(MANIFEST_NAME)
                if manifest is not None:
                    committed.append((manifest.modified, folder.name))
    for time, name in sorted(committed, reverse=True)[:max_count]:
        with suppress(ManifestError, OSError):  # damaged, or deleted since
            store = beside.within(name)
            yield EarlierCheckpoint(store, load_manifest(store).files, time)
