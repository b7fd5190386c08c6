"""Undoes or finishes saves to a disk that were interrupted, from the files that they left.

A save fills a stage, a hidden folder; where folders cannot be exchanged, it moves the old
checkpoint into a sideline, a hidden folder in the target, see `commit`. Both have the owner of the
save in their names. Every step may be repeated.
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
    """The parts of the name of a stage or a sideline."""

    target: str | None  # the name of the target next to the stage; None inside the target
    is_sideline: bool
    owner: str  # see `processes.new_owner`


def parse_leftover(name: str) -> LeftoverName | None:
    """The parts of the name of a stage or a sideline; None for any other name."""
    match = _LEFTOVER.fullmatch(name)
    if match is None:
        return None
    return LeftoverName(match["target"], match["what"] == "old", match["owner"])


@dataclass(frozen=True)
class _Leftover:
    """What an interrupted save has left in a folder: its stage, or its sideline alone."""

    stage: Path
    target: Path
    folder: Path  # the stage or the sideline
    name: LeftoverName


def recover_target(target: Path, *, by_reader: bool = False) -> tuple[str, ...]:
    """Undo or finish interrupted saves to `target`; returns a line for each.

    A leftover stays while its owner lives, see `locks`. Leftovers of other machines are settled at
    once if they were being put in place, unsealed stages after a day: `target` must have no other
    writer. `by_reader`: it may have one, so all of them are settled after a day. Leftovers of saves
    next to it are settled too once their owners have ended. A leftover that cannot be settled is a
    warning, or a TargetError or UnreadableError if the previous checkpoint could not be restored.
    """
    with explained(target):
        target = real_path(target)
        lines = []
        leftovers = [*_find_leftovers(target, target), *_find_leftovers(target.parent, None)]
        for leftover in leftovers:
            is_sealed = (leftover.folder / MANIFEST_NAME).exists()
            is_in_place = leftover.name.is_sideline or is_sealed
            is_of_target = leftover.target == target
            is_interrupted = is_in_place and is_of_target and not by_reader
            max_seconds = 0.0 if is_interrupted else ABANDONED_SECONDS
            line = _recover_leftover(leftover, max_seconds)
            if line:
                lines.append(line)
        return tuple(lines)


def settle_or_warn(stage: Path, target: Path, manifest: Manifest | None = None) -> None:
    """`settle_stage` with errors as warnings: the next save tries again."""
    try:
        settle_stage(stage, target, manifest)
    except (CheckpointError, OSError) as error:
        _warn_left(stage, target, error)


def settle_stage(stage: Path, target: Path, manifest: Manifest | None = None) -> str:
    """Undo or finish one save from the state of its folders, see `commit`; repeatable.

    `manifest`: the target's, if known. The old checkpoint is deleted last, when its replacement is
    durable and no reader has a lease on it.
    """
    sideline = sideline_of(stage, target)
    line = f"{stage.name}: removed what was left of a save"
    if is_folder(sideline):
        line = f"{target}: removed what a finished overwrite had put aside"
        if not (target / MANIFEST_NAME).exists():
            _undo_pour(stage, target, sideline)
            line = f"{target}: undid an unfinished overwrite"
        local_disk.sync_path(target)
        only_old = local_disk.movable_pieces(sideline, target, set())
        local_disk.remove_empty_folders(only_old, target)
        _delete_committed(sideline)
    if is_folder(stage):
        local_disk.sync_path(stage.parent)
        _carry_foreign_files(stage, target, manifest)
        if lease_reasons(stage):
            return f"{stage.name}: kept, it is being read"
        _delete_committed(stage)
    return line


def sideline_of(stage: Path, target: Path) -> Path:
    """The hidden folder in `target` that holds the old checkpoint while the new one is moved in."""
    name = parse_leftover(stage.name)
    return target / f".ft_ckpt-old-{name.owner if name else stage.name}"


def uncommit(path: Path) -> None:
    """Delete the manifest of `path`, durably: it stops being a checkpoint.

    Deleting the rest may be interrupted.
    """
    local_disk.delete_files([MANIFEST_NAME], path)


def listed_files(folder: Path) -> frozenset[str] | None:
    """The files of the checkpoint in `folder`.

    None when there is none. Accepts newer manifest formats. Raises UnreadableError when the
    manifest cannot be read now.
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


def _undo_pour(stage: Path, target: Path, sideline: Path) -> None:
    new = listed_files(stage) or frozenset()
    poured = [path for path in new if not os.path.lexists(stage / path)]
    local_disk.move_files(poured, target, stage)
    local_disk.remove_empty_folders(new, target)
    old = local_disk.movable_pieces(sideline, target, {MANIFEST_NAME})
    local_disk.move_files(old, sideline, target)
    local_disk.move_files([MANIFEST_NAME], sideline, target)  # last: only now is the old one whole


def _carry_foreign_files(stage: Path, target: Path, manifest: Manifest | None) -> None:
    """After an exchange, move unlisted files of the old checkpoint into the new one.

    Nothing is replaced there.

    Raises UnreadableError when a manifest cannot be read now: the stage must then stay as it is.
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
    """The leftovers of interrupted saves in `folder`, one for each save.

    Only those of `target`, when it is given.
    """
    leftovers: dict[str, _Leftover] = {}
    for entry_name in list_names(folder):
        name, entry = parse_leftover(entry_name), folder / entry_name
        if name is None or not is_folder(entry):
            continue
        own_target = folder / name.target if name.target else folder
        if target is not None and own_target != target:
            continue
        if not name.is_sideline:
            leftovers[name.owner] = _Leftover(entry, own_target, entry, name)
        elif name.owner not in leftovers:
            stage = own_target.with_name(f".{own_target.name}.ft_ckpt-stage-{name.owner}")
            leftovers[name.owner] = _Leftover(stage, own_target, entry, name)
    return [leftovers[owner] for owner in sorted(leftovers)]


def _recover_leftover(leftover: _Leftover, max_seconds: float) -> str | None:
    """Undo or finish one interrupted save.

    Returns a line about it, None when its owner may be alive.
    """
    stage, target = leftover.stage, leftover.target
    try:
        with claim_leftover(leftover.folder, leftover.name.owner, max_seconds) as is_abandoned:
            return settle_stage(stage, target) if is_abandoned else None
    except (CheckpointError, OSError) as error:
        if not (target / MANIFEST_NAME).exists():
            raise  # the old checkpoint is still in the sideline
        _warn_left(stage, target, error)
        return None


def _warn_left(stage: Path, target: Path, error: Exception) -> None:
    warn(f"{target}: {stage.name} is left for the next save to clear ({error})")
