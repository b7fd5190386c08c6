"""Undoes or finishes interrupted saves; the same code cleans up after a commit.

    a sideline, no manifest in the target    undo: poured files back to the stage, then the sideline back
    a sideline, a manifest in the target     the new one is in place: delete the sideline
    a stage with a manifest                  carry what that manifest does not list over to the target, then delete
    a stage without                          delete

What was there before is deleted last, when what replaced it is durable, and never through a link.
"""

import json
import os
import re
from pathlib import Path

from ft_ckpt.checkpoint.catalog import read_manifest
from ft_ckpt.checkpoint.checks import is_misleading
from ft_ckpt.checkpoint.manifest import MANIFEST_LIMIT_BYTES, MANIFEST_NAME, Manifest
from ft_ckpt.errors import CheckpointError, CorruptError, ManifestError, UnreadableError, explained
from ft_ckpt.messages import warn
from ft_ckpt.storage import local_disk, owners
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.storage.paths import is_inside
from ft_ckpt.storage.placing import ABANDONED_SECONDS
from ft_ckpt.storage.store import read_text

LEFTOVER = re.compile(rf"\.(?:(?P<target>.+)\.)?ft_ckpt-(?P<what>stage|old)-(?P<owner>{owners.OWNER})", re.DOTALL)


def recover_target(target: Path) -> tuple[str, ...]:
    """Undo or finish interrupted saves to `target`; returns a line for each.

    A leftover is left alone while its owner lives, see `owners`. What another machine left is settled at once when it
    was being put in place, and an unsealed stage after a day: `target` must have no other writer. Leftovers beside it
    go too when nobody can be at work on them any more. What cannot be settled is warned of, unless it stands in the
    way of what was there before: then TargetError or UnreadableError.
    """
    with explained(target):
        target = local_disk.real_path(target)
        done = []
        for found in (*_find_leftovers(target, target), *_find_leftovers(target.parent, None)):
            _, of, entry = found
            named = LEFTOVER.fullmatch(entry.name)
            in_place = (named is not None and named["what"] == "old") or (entry / MANIFEST_NAME).exists()
            seconds = 0.0 if in_place and of == target else ABANDONED_SECONDS
            done.append(_recover_leftover(*found, seconds))
        return tuple(line for line in done if line)


def uncommit(path: Path) -> None:
    """Take the manifest out of `path`, durably: from here on it is no checkpoint, and deleting may be interrupted."""
    local_disk.delete_files([MANIFEST_NAME], path)


def settle_or_warn(stage: Path, target: Path, manifest: Manifest | None = None) -> None:
    """`settle_stage`, where nothing depends on it any more: errors are warned of, and the next save tries again."""
    try:
        settle_stage(stage, target, manifest)
    except (CheckpointError, OSError) as error:
        _warn_left(stage, target, error)


def sideline_of(stage: Path, target: Path) -> Path:
    """The hidden folder in `target` that holds the old checkpoint while the new one is moved in."""
    named = LEFTOVER.fullmatch(stage.name)
    return target / f".ft_ckpt-old-{named['owner'] if named else stage.name}"


def settle_stage(stage: Path, target: Path, manifest: Manifest | None = None) -> str:
    """Undo or finish one save from the state of stage, sideline and target, as the table on top says; repeatable.

    `manifest` is the target's where it is known. What was there before goes last, when what replaces it is durable.
    """
    sideline, done = sideline_of(stage, target), f"{stage.name}: removed what was left of a save"
    if local_disk.is_folder(sideline):
        done = f"{target}: removed what a finished overwrite had put aside"
        if not (target / MANIFEST_NAME).exists():
            _undo_pour(stage, target, sideline)
            done = f"{target}: undid an unfinished overwrite"
        local_disk.sync_path(target)
        local_disk.remove_empty_folders(
            local_disk.movable_pieces(sideline, target, set()), target
        )  # folders that only the old one had
        _delete_committed(sideline)
    if local_disk.is_folder(stage):
        local_disk.sync_path(stage.parent)
        _carry_foreign_files(stage, target, manifest)
        _delete_committed(stage)
    return done


def _delete_committed(folder: Path) -> None:
    uncommit(folder)
    local_disk.delete_folder(folder)


def _undo_pour(stage: Path, target: Path, sideline: Path) -> None:
    new = listed_files(stage) or frozenset()
    local_disk.move_files([path for path in new if not os.path.lexists(stage / path)], target, stage)
    local_disk.remove_empty_folders(new, target)
    local_disk.move_files(local_disk.movable_pieces(sideline, target, {MANIFEST_NAME}), sideline, target)
    local_disk.move_files([MANIFEST_NAME], sideline, target)  # last: only now is the old one whole


def _carry_foreign_files(stage: Path, target: Path, manifest: Manifest | None) -> None:
    """After an exchange, move files that the old checkpoint did not list into the new one, whose own files win.

    Raises UnreadableError when a manifest cannot be read just now: then the stage has to stay as it is.
    """
    old = listed_files(stage)
    if old is None:
        return
    try:
        manifest = manifest or read_manifest(target)
    except UnreadableError:
        raise
    except ManifestError:
        return
    foreign = local_disk.movable_pieces(stage, target, {MANIFEST_NAME, *old, *(file.path for file in manifest.files)})
    local_disk.move_files([path for path in foreign if not is_misleading(path, manifest)], stage, target, replace=False)


def listed_files(folder: Path) -> frozenset[str] | None:
    """The files of the checkpoint in `folder`; None when there is none. Understands newer manifests than ours too.

    Raises UnreadableError when that cannot be told just now.
    """
    try:
        files = json.loads(read_text(LocalStore(folder), MANIFEST_NAME, MANIFEST_LIMIT_BYTES))["files"]
        paths = frozenset(file["path"] for file in files)
    except UnreadableError:
        raise
    except (CorruptError, FileNotFoundError, KeyError, RecursionError, TypeError, ValueError):
        return None
    return paths if all(is_inside(path) for path in paths) else None


def _find_leftovers(folder: Path, target: Path | None) -> list[tuple[Path, Path, Path]]:
    """The interrupted saves in `folder` as (stage, target, entry); the entry is the stage, or its sideline alone.

    Only those of `target`, when it is given.
    """
    found: dict[str, tuple[Path, Path, Path]] = {}
    for entry in map(folder.joinpath, local_disk.list_names(folder)):
        named = LEFTOVER.fullmatch(entry.name)
        if named is None or not local_disk.is_folder(entry):
            continue
        of = folder / named["target"] if named["target"] else folder
        if target in (None, of):
            beside = of.with_name(f".{of.name}.ft_ckpt-stage-{named['owner']}")
            if named["what"] == "stage" or named["owner"] not in found:
                found[named["owner"]] = (entry if named["what"] == "stage" else beside, of, entry)
    return [found[owner] for owner in sorted(found)]


def _recover_leftover(stage: Path, target: Path, entry: Path, most_seconds: float) -> str | None:
    """Undo or finish one interrupted save and say so in a line; None when its owner lives, or may live."""
    named = LEFTOVER.fullmatch(entry.name)
    try:
        with owners.claim_leftover(entry, named["owner"] if named else "", most_seconds) as gone:
            return settle_stage(stage, target) if gone else None
    except (CheckpointError, OSError) as error:
        if not (target / MANIFEST_NAME).exists():
            raise  # what was there waits in the sideline
        _warn_left(stage, target, error)
        return None


def _warn_left(stage: Path, target: Path, error: Exception) -> None:
    warn(f"{target}: {stage.name} is left for the next save to clear ({error})", stacklevel=5)
