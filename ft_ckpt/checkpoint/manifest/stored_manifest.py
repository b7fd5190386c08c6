"""Reads the manifest of the checkpoint in a store."""

import re
from contextlib import closing

from ft_ckpt.checkpoint.manifest.contents import visible_folders, why_no_checkpoint
from ft_ckpt.checkpoint.manifest.manifest import (
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    Manifest,
    check_paths,
    manifest_from_json,
)
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    ManifestError,
    MissingError,
    NotACheckpointError,
    UnreadableError,
)
from ft_ckpt.storage import Store, read_range, read_text
from ft_ckpt.storage.places import Place

_HEAD_BYTES = 64 << 10  # of a manifest: contains the scalar fields


def read_manifest(place: Place) -> Manifest:
    """Read the manifest of the checkpoint at `place`.

    Raises NotACheckpointError, which says what is at `place`, if no checkpoint is committed;
    ManifestError if the manifest is damaged, from a newer ft_ckpt, or contains a path outside the
    folder; UnreadableError if it cannot be read now.
    """
    try:
        return load_manifest(place.folder)
    except NotACheckpointError:
        raise NotACheckpointError(why_no_checkpoint(place)) from None


def load_manifest(store: Store) -> Manifest:
    """Read the manifest of the checkpoint in `store`. Raises what `read_manifest` raises."""
    return parse_manifest(manifest_text(store), store.where(MANIFEST_NAME))


def manifest_text(store: Store) -> str:
    """Read the text of the manifest in `store`. Raises what `read_manifest` raises."""
    try:
        return read_text(store, MANIFEST_NAME, MANIFEST_LIMIT_BYTES)
    except MissingError as error:
        raise NotACheckpointError(
            f"{store.url}: no {MANIFEST_NAME} in it, so no save was completed there; use another "
            "folder or save again"
        ) from error
    except UnreadableError:
        raise
    except CorruptError as error:
        raise ManifestError(str(error)) from error


def parse_manifest(text: str, where: str) -> Manifest:
    """Parse a manifest and check that its paths stay inside its folder.

    Raises ManifestError, naming `where`.
    """
    manifest = manifest_from_json(text, where)
    check_paths(manifest, where)
    return manifest


def manifest_version(store: Store) -> str | None:
    """Return the version of the manifest in `store`, None without one. Raises UnreadableError."""
    stored = store.stat(MANIFEST_NAME)
    return None if stored is None else stored.version


def is_delta(place: Place) -> bool:
    """Check whether the checkpoint at `place`, if there is one, is a delta of a chain."""
    try:
        return bool(load_manifest(place.folder).delta)
    except CheckpointError:
        return False


def next_number(target: Store, beside: Store) -> int:
    """Return the number of a new checkpoint without a step: one more than the largest."""
    largest = 0
    for store in (target, beside):
        below = [store.within(folder.name) for folder in visible_folders(store.list_folder())]
        for candidate in (store, *below):
            largest = max(largest, _number_in_head(candidate))
    return 1 + largest


def _number_in_head(store: Store) -> int:
    """Read the number of a checkpoint from the start of its manifest; return 0 without one."""
    try:
        with closing(store.open(MANIFEST_NAME)) as file:
            head = read_range(file, 0, _HEAD_BYTES)
    except CorruptError:
        return 0
    match = re.search(rb'^  "number": (\d{1,18}),$', head, re.MULTILINE)
    return int(match[1]) if match else 0
