"""Undoes or finishes saves to a disk that were interrupted, from the files that they left.

A save fills a stage, a hidden folder. Where folders cannot be exchanged, the save moves the old
checkpoint into an old folder, a hidden folder in the target, see `commit`. Stage and old folder
have the owner of the save in their names. Every step may be repeated.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ft_ckpt.checkpoint.checks import SIGNATURE_NAME
from ft_ckpt.checkpoint.leases import LEASE, lease_reasons
from ft_ckpt.checkpoint.manifest import (
    MANIFEST_LIMIT_BYTES,
    MANIFEST_NAME,
    Manifest,
    is_misleading,
    read_manifest,
)
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    ManifestError,
    UnreadableError,
    damaged_input,
    explained,
)
from ft_ckpt.messages import warn
from ft_ckpt.processes import OWNER
from ft_ckpt.storage import (
    ABANDONED_SECONDS,
    is_folder,
    is_inside,
    list_names,
    local_disk,
    read_text,
    real_path,
)
from ft_ckpt.storage.local import LocalStore, claim_leftover
from ft_ckpt.storage.places import Place

_LEFTOVER = re.compile(
    rf"\.(?:(?P<target>.+)\.)?ft_ckpt-(?P<what>stage|old)-(?P<owner>{OWNER})", re.DOTALL
)


@dataclass(frozen=True)
class LeftoverName:
    """The parts of the name of a stage or an old folder."""

    target: str | None  # the name of the target next to the stage; None inside the target
    is_old_folder: bool
    owner: str  # see `processes.new_owner`


def parse_leftover(name: str) -> LeftoverName | None:
    """Split the name of a stage or an old folder; return None for any other name."""
    match = _LEFTOVER.fullmatch(name)
    if match is None:
        return None
    return LeftoverName(match["target"], match["what"] == "old", match["owner"])


@dataclass(frozen=True)
class _Leftover:
    """The leftover of an interrupted save in a folder: its stage, or its old folder alone."""

    stage: Path
    target: Path
    folder: Path  # the stage or the old folder
    name: LeftoverName


def recover_target(target: Path, *, by_reader: bool = False) -> tuple[str, ...]:
    """Undo or finish interrupted saves to `target`; return a line for each.

    A leftover stays while its owner lives, see `locks`. If its owner is on another machine, a
    leftover that was being put in place is recovered at once, and an unsealed stage after a day, so
    `target` must have no other writer. With `by_reader` it may have one, and all leftovers of other
    machines are recovered after a day. Leftovers of saves next to `target` are recovered too, once
    their owners have ended. A leftover that cannot be recovered is a warning. Raises TargetError or
    UnreadableError if the previous checkpoint could not be restored.
    """
    with explained(target):
        target = real_path(target)
        lines = []
        leftovers = [*_find_leftovers(target, target), *_find_leftovers(target.parent, None)]
        for leftover in leftovers:
            is_sealed = (leftover.folder / MANIFEST_NAME).exists()
            is_in_place = leftover.name.is_old_folder or is_sealed
            is_of_target = leftover.target == target
            is_interrupted = is_in_place and is_of_target and not by_reader
            max_seconds = 0.0 if is_interrupted else ABANDONED_SECONDS
            line = _recover_leftover(leftover, max_seconds)
            if line:
                lines.append(line)
        return tuple(lines)


def recover_or_warn(stage: Path, target: Path, manifest: Manifest | None = None) -> None:
    """Call `recover_stage`, with a warning for an error, because the next save tries again."""
    try:
        recover_stage(stage, target, manifest)
    except (CheckpointError, OSError) as error:
        _warn_left(stage, target, error)


def recover_stage(stage: Path, target: Path, manifest: Manifest | None = None) -> str:
    """Undo or finish one save from the state of its folders, see `commit`; return a line about it.

    `manifest` is the manifest of the target, if it is known. The old checkpoint is deleted last,
    when its replacement is durable and no reader has a lease on it. The call may be repeated.
    """
    old_folder = old_folder_of(stage, target)
    line = f"{stage.name}: removed what was left of a save"
    if is_folder(old_folder):
        line = f"{target}: removed what a finished overwrite had put aside"
        if not (target / MANIFEST_NAME).exists():
            _undo_move(stage, target, old_folder)
            line = f"{target}: undid an unfinished overwrite"
        local_disk.sync_path(target)
        only_old = local_disk.movable_pieces(old_folder, target, set())
        local_disk.remove_empty_folders(only_old, target)
        _delete_committed(old_folder)

    if is_folder(stage):
        local_disk.sync_path(stage.parent)
        _carry_foreign_files(stage, target, manifest)
        if lease_reasons(stage):
            return f"{stage.name}: kept, it is being read"
        _delete_committed(stage)

    return line


def old_folder_of(stage: Path, target: Path) -> Path:
    """Return the hidden folder in `target` for the old checkpoint while the new one is moved in."""
    name = parse_leftover(stage.name)
    return target / f".ft_ckpt-old-{name.owner if name else stage.name}"


def uncommit(path: Path) -> None:
    """Delete the manifest of `path`, durably, so that the folder stops being a checkpoint.

    Deleting the other files may then be interrupted.
    """
    local_disk.delete_files([MANIFEST_NAME], path)


def listed_files(folder: Path) -> frozenset[str] | None:
    """Return the files of the checkpoint in `folder`, or None without a checkpoint.

    Newer manifest formats are accepted. Raises UnreadableError if the manifest cannot be read now.
    """
    try:
        text = read_text(LocalStore(folder), MANIFEST_NAME, MANIFEST_LIMIT_BYTES)
        paths = frozenset(file["path"] for file in json.loads(text)["files"])
    except UnreadableError:
        raise
    except (CorruptError, FileNotFoundError, KeyError, RecursionError, TypeError, ValueError):
        return None
    return paths if all(is_inside(path) for path in paths) else None


def _delete_committed(folder: Path) -> None:
    uncommit(folder)
    local_disk.delete_folder(folder)


def _undo_move(stage: Path, target: Path, old_folder: Path) -> None:
    new = listed_files(stage) or frozenset()
    moved = [path for path in new if not os.path.lexists(stage / path)]
    local_disk.move_files(moved, target, stage)
    local_disk.remove_empty_folders(new, target)
    old = local_disk.movable_pieces(old_folder, target, {MANIFEST_NAME})
    local_disk.move_files(old, old_folder, target)
    # the manifest last: before this the old checkpoint is not whole
    local_disk.move_files([MANIFEST_NAME], old_folder, target)


def _carry_foreign_files(stage: Path, target: Path, manifest: Manifest | None) -> None:
    """Move unlisted files of the old checkpoint into the new one, after an exchange.

    No file of the new checkpoint is replaced. Raises UnreadableError if a manifest cannot be read
    now; the stage must then stay as it is.
    """
    old = listed_files(stage)
    if old is None:
        return
    try:
        manifest = manifest or read_manifest(Place(LocalStore(target)))
    except UnreadableError:
        raise
    except ManifestError:
        return

    listed = {MANIFEST_NAME, SIGNATURE_NAME, *old, *(file.path for file in manifest.files)}
    pieces = local_disk.movable_pieces(stage, target, listed)
    foreign = [path for path in pieces if not path.startswith(LEASE)]
    foreign = [path for path in foreign if not is_misleading(path, manifest)]
    local_disk.move_files(foreign, stage, target, replace=False)


def _find_leftovers(folder: Path, target: Path | None) -> list[_Leftover]:
    """Return the leftovers of interrupted saves in `folder`, one for each save.

    If `target` is not None, return the leftovers of saves to it alone.
    """
    leftovers: dict[str, _Leftover] = {}
    entries: list[tuple[Path, LeftoverName]] = []
    with damaged_input(folder):
        for entry_name in list_names(folder):
            entry, parsed_name = folder / entry_name, parse_leftover(entry_name)
            if parsed_name is not None and is_folder(entry):
                entries.append((entry, parsed_name))

    for entry, name in entries:
        save_target = folder / name.target if name.target else folder
        if target is not None and save_target != target:
            continue
        if not name.is_old_folder:
            leftovers[name.owner] = _Leftover(entry, save_target, entry, name)
        elif name.owner not in leftovers:
            stage = save_target.with_name(f".{save_target.name}.ft_ckpt-stage-{name.owner}")
            leftovers[name.owner] = _Leftover(stage, save_target, entry, name)

    return [leftovers[owner] for owner in sorted(leftovers)]


def _recover_leftover(leftover: _Leftover, max_seconds: float) -> str | None:
    """Undo or finish one interrupted save.

    Return a line about the save, or None if its owner may be alive.
    """
    stage, target = leftover.stage, leftover.target
    try:
        with claim_leftover(leftover.folder, leftover.name.owner, max_seconds) as is_abandoned:
            return recover_stage(stage, target) if is_abandoned else None
    except (CheckpointError, OSError) as error:
        if not (target / MANIFEST_NAME).exists():
            raise  # the old checkpoint is still in the old folder
        _warn_left(stage, target, error)
        return None


def _warn_left(stage: Path, target: Path, error: Exception) -> None:
    warn(f"{target}: {stage.name} is left for the next save to clear ({error})")
