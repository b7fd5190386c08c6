"""Compares copies of a checkpoint by their manifests."""

from contextlib import suppress
from enum import Enum, auto

from ft_ckpt.checkpoint.commit import without_state
from ft_ckpt.checkpoint.manifest import Manifest, content_identity, load_manifest
from ft_ckpt.errors import ManifestError, NameTakenError
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.places import Place


def content_key(file: FileRecord) -> tuple[str, int]:
    """Return a value that is equal for files with the same bytes."""
    return file.digest, file.size_bytes


def is_same_copy(stored: Manifest | None, manifest: Manifest) -> bool:
    """Check whether two manifests are of copies of one checkpoint."""
    return stored is not None and content_identity(stored) == content_identity(manifest)


class Relation(Enum):
    """How the checkpoint at the destination relates to the source's checkpoint of the same name.

    Attributes:
        ABSENT: The destination has none.
        SAME: It is a copy.
        WITH_STATE: It is a copy with the training state, which the source has deleted.
        WITHOUT_STATE: It is a copy without the training state.
        OLDER: It is an older save of the same run.
        NEWER: It is a newer save of the same run.
        OTHER: It is of another run, or was saved at the same time.
    """

    ABSENT = auto()
    SAME = auto()
    WITH_STATE = auto()
    WITHOUT_STATE = auto()
    OLDER = auto()
    NEWER = auto()
    OTHER = auto()


def relation_of(stored: Manifest | None, manifest: Manifest) -> Relation:
    """Return how the checkpoint with the manifest `stored` relates to that with `manifest`."""
    if stored is None:
        return Relation.ABSENT
    if is_same_copy(stored, manifest):
        return Relation.SAME
    if is_same_copy(without_state(stored), manifest):
        return Relation.WITH_STATE
    if is_same_copy(stored, without_state(manifest)):
        return Relation.WITHOUT_STATE
    if stored.run_id is not None and stored.run_id == manifest.run_id:
        if stored.created < manifest.created:
            return Relation.OLDER
        if stored.created > manifest.created:
            return Relation.NEWER

    return Relation.OTHER


def manifest_at(place: Place) -> Manifest | None:
    """Read the manifest of the checkpoint at `place`. Returns None if none is readable."""
    with suppress(ManifestError):
        return load_manifest(place.folder)
    return None


def is_there(place: Place, manifest: Manifest) -> bool:
    """Check whether the checkpoint of this manifest is at `place`, with the sizes of all files."""
    if not is_same_copy(manifest_at(place), manifest):
        return False
    sizes = {stored.name: stored.size_bytes for stored in place.folder.list()}
    return all(sizes.get(file.path) == file.size_bytes for file in manifest.files)


def refuse_occupied(place: Place) -> None:
    """Raise NameTakenError if a file, a checkpoint or a folder with content is at `place`."""
    if place.is_object or manifest_at(place) is not None:
        raise NameTakenError(
            f"{place}: exists already; choose another place, or overwrite=True (--force)"
        )
    if not place.is_local:
        return
    listed = place.folder.list_folder()
    if listed.folders or listed.objects:
        raise NameTakenError(
            f"{place}: not empty; choose another place, or overwrite=True (--force)"
        )
