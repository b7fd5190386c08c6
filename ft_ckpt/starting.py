"""Where a run begins: what `resume` was asked for, whose checkpoints are in the folder, and which may be replaced."""

import logging
import uuid
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ft_ckpt.catalog import CheckpointInfo, discover, read_manifest
from ft_ckpt.errors import ConfigError, ManifestError, TargetError, listing
from ft_ckpt.manifest import Manifest
from ft_ckpt.resume import is_resumable

MODES = ("auto", "must", "never")
_LOG = logging.getLogger("ft_ckpt")
_AUTO = ("latest", "newest", "last", "True", "true")


def mode_of(checkpoint: Any) -> str:
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


def branch_of(mode: str, chosen: Path, manifest: Manifest) -> str | None:
    """A name for the run that goes on from `chosen`, if it was asked for by name and its run has got further."""
    if mode in MODES:
        return None
    fellows = [info.manifest for info in _of_runs(chosen.parent) if info.manifest.run_id == manifest.run_id]
    return uuid.uuid4().hex if any((one.step or 0) > (manifest.step or 0) for one in fellows) else None


def warn_of_others(directory: Path, mode: str) -> None:
    """Say that the folder holds more runs than the one that goes on, or any beside a fresh one."""
    newest: dict[str | None, str] = {}
    for info in _of_runs(directory):
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
    if is_resumable(manifest) and not has_state:
        raise TargetError(
            f"{target}: holds training state, which a save of weights alone would delete; save to another path"
        )
    if own_ids is not None and manifest.run_id is not None and manifest.run_id not in own_ids:
        raise TargetError(
            f"{target}: of another run, {manifest.run_id[:6]}, which got to this step before; use another directory, "
            "resume that run, or delete its checkpoints"
        )


def _of_runs(directory: Path) -> list[CheckpointInfo]:
    """The checkpoints in a folder that runs can be resumed from, oldest first."""
    return [info for info in discover(directory) if is_resumable(info.manifest)]
