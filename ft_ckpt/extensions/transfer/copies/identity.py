"""Compares copies of a checkpoint by their manifests."""

from contextlib import suppress
from enum import Enum, auto

from ft_ckpt.checkpoint.commit import without_state
from ft_ckpt.checkpoint.manifest import Manifest, content_identity, load_manifest
from ft_ckpt.errors import ManifestError, NameTakenError
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.places import Place


def content_key(file: FileRecord) -> tuple[str, int]:
    return file.digest, file.size_bytes


def is_same_copy(stored: Manifest | None, manifest: Manifest) -> bool:
    """Check whether two manifests are of copies of one checkpoint."""
    return stored is not None and content_identity(stored) == content_identity(manifest)


class Relation(Enum):
    """What the checkpoint of a name at the destination is to that of the source."""

    ABSENT = auto()  # there is none
    SAME = auto()  # a copy
    WITH_STATE = auto()  # a copy that still has the training state, which the source has deleted
    WITHOUT_STATE = auto()  # a copy without the training state
    OLDER = auto()  # an older save of the same run
    NEWER = auto()  # a newer save of the same run
    OTHER = auto()  # of another run, or at the same time


def relation_of(stored: Manifest | None, manifest: Manifest) -> Relation:
    """Tell what the checkpoint with the manifest `stored` is to that with `manifest`."""
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
    """Read the manifest of the checkpoint at `place`; return None if none is readable."""
    with suppress(ManifestError):
        return load_manifest(place.folder)
    return None


def is_there(goal: Place, manifest: Manifest) -> bool:
    """Check whether the checkpoint of this manifest is at `goal`, with all files at their sizes."""
    if not is_same_copy(manifest_at(goal), manifest):
        return False
    sizes = {stored.name: stored.size_bytes for stored in goal.folder.list()}
    return all(sizes.get(file.path) == file.size_bytes for file in manifest.files)


def refuse_occupied(goal: Place) -> None:
    """Raise NameTakenError if a file, a checkpoint or a folder with content is at `goal`."""
    if goal.is_object or manifest_at(goal) is not None:
        raise NameTakenError(
            f"{goal}: exists already; choose another place, or overwrite=True (--force)"
        )
    if not goal.is_local:
        return
    listed = goal.folder.list_folder()
    if listed.folders or listed.objects:
        raise NameTakenError(
            f"{goal}: not empty; choose another place, or overwrite=True (--force)"
        )
