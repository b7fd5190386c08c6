"""Files of earlier checkpoints that a new one beside them takes over instead of writing them again.

They go by their digests, in the manifests. What was written to since its checkpoint was made is not taken.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from ft_ckpt.checkpoint.catalog import load_manifest
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import ManifestError
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.store import Store


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
