"""Deletes one checkpoint, or its training state.

A checkpoint is deleted by first renaming its manifest to a tombstone. With this step the folder
stops being a checkpoint, and the files to delete stay on record. Then pins and leases are checked
once more. If there is one, the manifest is renamed back. Files that the manifest never listed stay.
Deleting only the training state works the same way, with a new manifest without the state. After an
interruption the files in the folder determine the remaining work:

    a tombstone, no manifest    delete the files of the tombstone, then the tombstone, then the
                                folder if it is empty
    a tombstone, a manifest     delete the files that the tombstone lists and the manifest does not,
                                then the tombstone
"""

import contextlib
import dataclasses
import json
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.checkpoint.checks import SIGNATURE_NAME
from ft_ckpt.checkpoint.leases import TOMBSTONE, lease_reasons, pin_reason
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    Manifest,
    manifest_from_json,
    manifest_to_json,
    read_manifest,
)
from ft_ckpt.errors import CheckpointError, CorruptError, damaged_input, listing, shown
from ft_ckpt.storage import (
    PREFIX,
    Store,
    is_inside,
    list_names,
    local_disk,
    permission_bits,
    read_text,
    walk_tree,
)
from ft_ckpt.storage.local import LocalStore, clear_old_drafts
from ft_ckpt.storage.places import Place

# the kind of parts that have a training state
STATE = "state"
_NOTE = "the training state was removed when it was no longer to be kept"
# Names of the folders of a save begin so, see `commit`.
_STAGE, _OLD_FOLDER = f"{PREFIX}stage-", f"{PREFIX}old-"


@dataclass(frozen=True)
class Removal:
    """The outcome of deleting a checkpoint or its training state.

    Attributes:
        path: the location of the checkpoint.
        why: the reasons why nothing was deleted.
        dropped: whether the checkpoint was deleted.
        stripped: whether only the training state was deleted.
        freed_bytes: the bytes that the deleted files took.
        left: files that stay in the folder, because no manifest listed them.
    """

    path: Path | str
    why: tuple[str, ...] = ()
    dropped: bool = False
    stripped: bool = False
    freed_bytes: int = 0
    left: tuple[Path | str, ...] = ()


def delete_checkpoint(path: Path) -> Removal:
    """Delete the checkpoint `path`, unless a pin, a lease or a save guards it.

    Raises OSError or CorruptError; `finish_deletion` then completes the work.
    """
    why = _deletion_obstacles(path)
    if why:
        return Removal(path, why=why)
    with contextlib.suppress(FileNotFoundError):  # deleted by another process
        local_disk.move(path / MANIFEST_NAME, path / TOMBSTONE)
        local_disk.sync_path(path)
        return finish_deletion(path)
    return Removal(path)


def delete_state(path: Path) -> Removal:
    """Delete the training state of `path`, unless a pin, a lease or a save guards the checkpoint.

    Raises what `delete_checkpoint` raises.
    """
    why = _deletion_obstacles(path)
    if why:
        return Removal(path, why=why)
    store = LocalStore(path, max_mode=permission_bits(path / MANIFEST_NAME))
    manifest = read_manifest(Place(store))
    store.write(TOMBSTONE, store.read(MANIFEST_NAME))
    store.write(MANIFEST_NAME, manifest_to_json(without_state(manifest)).encode())
    return finish_deletion(path)


def set_aside(path: Path, manifest: Manifest) -> Path | None:
    """Rename the damaged checkpoint `path` to a hidden name, which is not listed.

    Return the new path, or None while the checkpoint is being read or saved to, or if it is no
    longer the checkpoint of `manifest`. Raises OSError.
    """
    if lease_reasons(path) or _is_being_saved(path):
        return None
    aside = path.with_name(f".{path.name}.damaged-{secrets.token_hex(4)}")
    local_disk.move(path, aside)
    if _manifest_or_none(aside / MANIFEST_NAME) != manifest:  # replaced by a save at that moment
        local_disk.move(aside, path)
        return None
    local_disk.sync_path(path.parent)
    return aside


def finish_deletion(path: Path) -> Removal:
    """Complete the deletion that the tombstone in `path` describes; the call may be repeated."""
    if _name_before_removal(path):
        return _remove_folder(path)
    why = deletion_guards(path)
    if why:
        return Removal(path, why=why if _restore_manifest(path) else ())
    committed = (path / MANIFEST_NAME).exists()
    store = LocalStore(path)

    # the signature covers the old manifest
    to_delete = {SIGNATURE_NAME, *manifest_files(store, TOMBSTONE)}
    if committed:
        to_delete -= manifest_files(store, MANIFEST_NAME)
    freed = releasable_bytes(path, to_delete)
    local_disk.delete_files(to_delete, path)
    local_disk.remove_empty_folders(to_delete, path)
    if not committed:
        return dataclasses.replace(_close_folder(path), freed_bytes=freed)
    _unlink_if_there(path / TOMBSTONE)
    local_disk.sync_path(path)
    return Removal(path, stripped=True, freed_bytes=freed)


def unfinished_deletions(root: Path) -> list[Path]:
    """Return the folders in `root` that need `finish_deletion`.

    These have a tombstone, or were emptied and renamed for deletion.
    """
    unfinished = []
    for path in folder_entries(root):
        if path.is_symlink():
            continue
        if _name_before_removal(path) or (path / TOMBSTONE).is_file():
            unfinished.append(path)
    return unfinished


def clear_checkpoint_drafts(root: Path) -> None:
    """Delete the old drafts in the checkpoints of `root`.

    Their writers were killed: a sweep that took a training state away, or whoever wrote a pin, a
    metric or a signature.
    """
    for path in folder_entries(root):
        # a checkpoint that cannot be read now is an error of the survey
        with contextlib.suppress(CheckpointError, OSError):
            if not path.is_symlink() and (path / MANIFEST_NAME).is_file():
                clear_old_drafts(path)


def deletion_guards(path: Path) -> tuple[str, ...]:
    """Return the reasons why the checkpoint `path` must not be deleted now.

    The reasons are pins, leases and saves in the folder of the checkpoint and in its parent.
    """
    reasons = []
    pinned = pin_reason(Place(LocalStore(path)))
    if pinned:
        reasons.append(pinned)
    reasons += lease_reasons(path)
    if _is_being_saved(path):
        reasons.append("a save to it is not finished")
    return tuple(reasons)


def without_state(manifest: Manifest) -> Manifest:
    """Return the manifest of the same checkpoint without its training state."""
    inside = tuple(f"{part.path}/" for part in manifest.parts if part.kind == STATE)
    return dataclasses.replace(
        manifest,
        parts=tuple(part for part in manifest.parts if part.kind != STATE),
        files=tuple(file for file in manifest.files if not file.path.startswith(inside)),
        notes=(*manifest.notes, _NOTE),
    )


def manifest_files(store: Store, name: str) -> frozenset[str]:
    """Return the files that a manifest or tombstone lists; newer formats are accepted.

    Raises OSError or CorruptError.
    """
    where = store.where(name)
    try:
        text = read_text(store, name, MANIFEST_LIMIT_BYTES)
        paths = frozenset(str(file["path"]) for file in json.loads(text)["files"])
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptError(
            f"{where}: not a manifest ({shown(error)}); delete the folder by hand"
        ) from error

    unsafe = sorted(path for path in paths if not is_inside(path))
    if unsafe:
        raise CorruptError(
            f"{where}: {listing(unsafe)}: outside of the folder; delete the folder by hand"
        )

    return paths


def releasable_bytes(path: Path, names: Iterable[str]) -> int:
    """Return the bytes that deleting these files of `path` frees.

    Hard links count once, and files that are linked elsewhere do not count.
    """
    stats = local_disk.file_stats(names, path)
    deleted_links = Counter((stat.st_dev, stat.st_ino) for stat in stats)
    files = {(stat.st_dev, stat.st_ino): stat for stat in stats}
    freed = 0
    for key, stat in files.items():
        if stat.st_nlink <= deleted_links[key]:
            freed += stat.st_size
    return freed


def folder_entries(folder: Path) -> list[Path]:
    """Return the entries of `folder`, sorted; none if there is no such folder.

    Raises UnreadableError if the folder cannot be read now.
    """
    with damaged_input(folder):
        return [folder / name for name in list_names(folder)]


def _deletion_obstacles(path: Path) -> tuple[str, ...]:
    """Return the reasons why `path` cannot be deleted now.

    An unfinished deletion is a reason, because it needs its tombstone.
    """
    reasons = deletion_guards(path)
    if (path / TOMBSTONE).exists():
        return (*reasons, "an earlier removal is not finished")
    return reasons


def _is_being_saved(path: Path) -> bool:
    if any(entry.name.startswith((_STAGE, _OLD_FOLDER)) for entry in folder_entries(path)):
        return True
    stage_beside = f".{path.name}{_STAGE}"
    return any(entry.name.startswith(stage_beside) for entry in folder_entries(path.parent))


def _restore_manifest(path: Path) -> bool:
    """Undo the deletion of `path`, which turned out to be guarded.

    Return False if the checkpoint is damaged or was replaced.
    """
    deleted = _manifest_or_none(path / TOMBSTONE)
    current = _manifest_or_none(path / MANIFEST_NAME)
    if deleted is None or _is_being_saved(path):
        return False
    if current is not None and current.created != deleted.created:
        return False
    if not all((path / file.path).is_file() for file in deleted.files):
        return False
    local_disk.move(path / TOMBSTONE, path / MANIFEST_NAME)
    local_disk.sync_path(path)
    return True


def _close_folder(path: Path) -> Removal:
    """Delete the marks of a checkpoint whose files are deleted, and its folder if it is empty."""
    if not _other_files(path):
        # renamed first, so that no empty folder has the checkpoint's name
        renamed = path.with_name(f".{path.name}{TOMBSTONE}")
        local_disk.move(path, renamed)
        return _remove_folder(renamed)
    _unlink_if_there(path / TOMBSTONE)
    local_disk.sync_path(path)
    entries = sorted(walk_tree(path))
    unlisted = [entry for entry in entries if entry.is_symlink() or not entry.is_dir()]
    return Removal(path, dropped=True, left=tuple(unlisted))


def _remove_folder(renamed: Path) -> Removal:
    path = renamed.with_name(_name_before_removal(renamed))
    if _other_files(renamed):  # a file was added at that moment
        local_disk.move(renamed, path)
        return _close_folder(path)
    _unlink_if_there(renamed / TOMBSTONE)
    with contextlib.suppress(OSError):  # a file was added since: the next sweep continues
        renamed.rmdir()
    local_disk.sync_path(path.parent)
    return Removal(path, dropped=True)


def _other_files(path: Path) -> list[Path]:
    """Return the entries of a deleted checkpoint's folder, after deleting its marks."""
    other_files = []
    for entry in folder_entries(path):
        if entry.name == TOMBSTONE:
            continue
        if entry.name.startswith(PREFIX) and not entry.is_dir():
            _unlink_if_there(entry)
        else:
            other_files.append(entry)
    return other_files


def _unlink_if_there(file: Path) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        local_disk.unlink(file)


def _name_before_removal(path: Path) -> str:
    """Return the original name of a folder that `_close_folder` has renamed, else ""."""
    name = path.name
    if name.startswith(".") and name.endswith(TOMBSTONE) and path.is_dir():
        return name[1 : -len(TOMBSTONE)]
    return ""


def _manifest_or_none(file: Path) -> Manifest | None:
    try:
        text = read_text(LocalStore(file.parent), file.name, MANIFEST_LIMIT_BYTES)
        return manifest_from_json(text, str(file))
    except (CheckpointError, OSError):
        return None
