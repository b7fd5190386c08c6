"""Where a run begins: which checkpoint `resume` takes, whose others are beside it, and which may be replaced."""

import logging
import os
import uuid
import warnings
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint.catalog import CheckpointInfo, discover, read_manifest
from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from ft_ckpt.errors import ConfigError, CorruptError, ManifestError, NotACheckpointError, TargetError, listing
from ft_ckpt.storage.local_disk import local_path
from ft_ckpt.storage.local_store import LocalStore
from ft_ckpt.training.accelerate_folder import find_accelerate_folder, is_foreign, open_accelerate_folder
from ft_ckpt.training.state_files import ResumePoint, open_resume_point

MODES = ("auto", "must", "never")
_LOG = logging.getLogger("ft_ckpt")
_AUTO = ("latest", "newest", "last", "True", "true")


def parse_mode(checkpoint: Any) -> str:
    """What `resume` was asked for, as one of MODES or the name or path of a checkpoint. Raises ConfigError."""
    if checkpoint is None or checkpoint is True or checkpoint in _AUTO:
        if checkpoint is not None:
            _LOG.info("resume(%r) is resume('auto'): the newest checkpoint, or a fresh start", checkpoint)
        return "auto"
    if checkpoint is False:
        return "never"
    if isinstance(checkpoint, (str, Path)) and str(checkpoint):
        return str(checkpoint)
    raise ConfigError(
        f"resume({checkpoint!r}): expected {', '.join(map(repr, MODES))}, a checkpoint's name or its path"
    )


def open_chosen(
    directory: Path | None, infos: Sequence[CheckpointInfo], mode: str, deep: bool, stack: ExitStack
) -> ResumePoint | None:
    """The checkpoint to resume from, open until the stack ends; None to start afresh. `infos` are the `directory`'s.

    What was compared with its manifest are the open files that are then read.

    `mode`: "never"; "auto", the newest that is whole and resumable, if any; "must", the newest, or an error; else a
    checkpoint's name in `directory` or its path. `deep` compares the digests of all its files. Raises
    NotACheckpointError when there is none, CorruptError naming its damaged files and the newest whole one.
    """
    if mode == "never":
        return None
    foreign = None if mode in MODES else find_accelerate_folder(_path_by_name(directory, mode))
    if foreign is not None:
        return open_accelerate_folder(foreign, stack)
    candidates = resumable(reversed(infos)) if mode in MODES else [_checkpoint_by_name(directory, infos, mode)]
    for number, info in enumerate(candidates):
        point, problems = _open_whole(info.path, deep, stack)
        if point is not None:
            return point
        if mode != "auto":
            older = next((one.path for one in candidates[number + 1 :] if _open_whole(one.path, deep, stack)[0]), None)
            advice = f"the newest whole one is {older}" if older else "there is no older one that is whole"
            raise CorruptError(f"{info.path}: {listing(list(problems))}; {advice}")
        warnings.warn(f"{info.path}: damaged, trying an older one: {listing(list(problems))}", stacklevel=2)
    if mode == "must":
        raise NotACheckpointError(f"{directory}: no checkpoint with training state in it; use resume('auto') to begin")
    return None


def resumable(infos: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
    """Those of `infos` that runs can be resumed from."""
    return [info for info in infos if has_training_state(info.manifest)]


def _checkpoint_by_name(directory: Path | None, infos: Sequence[CheckpointInfo], name: str) -> CheckpointInfo:
    """The checkpoint asked for by its name in `directory`, or by its path."""
    named = _path_by_name(directory, name)
    if not _folder_exists(named):
        there = [info.path.name for info in infos]
        raise NotACheckpointError(
            f"{named}: is not there; {directory} has {listing(there, ', ') or 'none'}. Expected 'auto', 'must', "
            "'never', the name of one of these, or a path"
        )
    manifest = read_manifest(named)
    if not has_training_state(manifest):
        raise NotACheckpointError(f"{named}: holds weights and no training state; ft_ckpt.load_model reads them")
    return CheckpointInfo(named, manifest)


def _path_by_name(directory: Path | None, name: str) -> Path:
    """The run's own checkpoint of that name; what has a separator in it, or is none of the run's, is a path."""
    own = None if directory is None or os.sep in name else directory / name
    return own if own is not None and (_folder_exists(own) or not _folder_exists(Path(name))) else local_path(name)


def _folder_exists(folder: Path) -> bool:
    return LocalStore(folder).list_folder().exists


def _open_whole(path: Path, deep: bool, stack: ExitStack) -> tuple[ResumePoint | None, tuple[str, ...]]:
    """The checkpoint at `path`, open until the stack ends; or None, and what is wrong with it."""
    with ExitStack() as trial:
        try:
            held = trial.enter_context(open_checkpoint(path))
            found = held.find_problems(deep)
            if not found:
                point = open_resume_point(held, trial)
                stack.push(trial.pop_all())
                return point, ()
        except (ManifestError, CorruptError, OSError) as error:
            return None, (str(error),)
    return None, found


def has_training_state(manifest: Manifest) -> bool:
    """Whether the checkpoint has training state."""
    return any(part.kind == "state" for part in manifest.parts)


def branch_run_id(
    mode: str, chosen: OpenCheckpoint, directory: Path | None, infos: Sequence[CheckpointInfo]
) -> str | None:
    """A name for the run that goes on from `chosen`, if it was asked for by name and its run has got further.

    `infos` are the checkpoints in `directory`.
    """
    if mode in MODES:
        return None
    beside, manifest = chosen.path.parent, chosen.manifest
    if is_foreign(manifest):
        return uuid.uuid4().hex
    all_beside = infos if directory is not None and beside == directory.absolute() else discover(beside)
    steps = [one.manifest.step or 0 for one in resumable(all_beside) if one.manifest.run_id == manifest.run_id]
    return uuid.uuid4().hex if any(step > (manifest.step or 0) for step in steps) else None


def warn_of_others(directory: Path, infos: Sequence[CheckpointInfo], mode: str) -> None:
    """Say that a folder with checkpoints `infos` holds more runs than the one that goes on, or any beside a new one."""
    newest: dict[str | None, str] = {}
    for info in resumable(infos):
        newest[info.manifest.run_id] = info.path.name
    runs = [f"{str(run_id)[:6]} (to {name})" for run_id, name in newest.items()]
    if mode == "never" and runs:
        warnings.warn(
            f"{directory}: holds another run, {listing(runs, ', ')}; its checkpoints are not replaced: use another "
            "directory, or delete them",
            stacklevel=4,
        )
    elif mode in MODES and len(runs) > 1:
        warnings.warn(
            f"{directory}: holds {len(runs)} runs, oldest first {listing(runs, ', ')}; the newest goes on. Use a "
            "directory for each",
            stacklevel=4,
        )


def refuse_replacing(target: Path, has_state: bool, own_ids: Collection[str] | None) -> None:
    """Raise TargetError when a checkpoint is there that one with or without state must not replace.

    One with state is not replaced by one without; with `own_ids`, the names of a run, none of another run is.
    """
    try:
        manifest = read_manifest(target)
    except (ManifestError, OSError):
        return  # nothing is committed there, or nothing that could be read
    if has_training_state(manifest) and not has_state:
        raise TargetError(
            f"{target}: holds training state, which a save of weights alone would delete; save to another path"
        )
    if own_ids is not None and manifest.run_id is not None and manifest.run_id not in own_ids:
        raise TargetError(
            f"{target}: of another run, {manifest.run_id[:6]}, which got to this step before; use another directory, "
            "resume that run, or delete its checkpoints"
        )
