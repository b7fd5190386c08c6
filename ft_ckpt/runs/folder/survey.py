"""The checkpoints of a run with what the rules of retention ask of them."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from ft_ckpt.checkpoint.catalog import CheckpointInfo, list_checkpoints
from ft_ckpt.checkpoint.commit import STATE, RunFolder, open_run_folder
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, parse_time
from ft_ckpt.errors import CheckpointError, UnreadableError
from ft_ckpt.retention import (
    HeldCheckpoint,
)
from ft_ckpt.storage import Store
from ft_ckpt.storage.places import Place


def survey_run(root: Place, protect: Iterable[Place] = ()) -> list[HeldCheckpoint]:
    """Return the checkpoints in the folder `root` of a run, oldest first.

    Links and `root` itself are left out. Guarded are the checkpoints in `protect`, pinned or leased
    ones, targets of links in `root`, and those that a save is about to replace. Raises
    UnreadableError when a manifest, or `root`, cannot be read now: rules applied to some of the
    checkpoints could delete the wrong ones.
    """
    return survey(open_run_folder(root), protect)


def survey(run: RunFolder, protect: Iterable[Place]) -> list[HeldCheckpoint]:
    root = run.snapshot()
    links = {
        folder.identity: folder.name
        for folder in root.folder.list_folder().folders
        if folder.is_link
    }
    protected = {place.folder.identity for place in protect}
    listed = list_checkpoints(root, links=False)
    listed.require_readable()
    checkpoints = []
    for info in listed.checkpoints:
        if info.store != root.folder:
            checkpoint = _held_checkpoint(run, info, links, protected)
            if checkpoint is not None:
                checkpoints.append(checkpoint)
    return checkpoints


def _held_checkpoint(
    run: RunFolder, info: CheckpointInfo, links: Mapping[str, str], protected: set[str]
) -> HeldCheckpoint | None:
    """Return the checkpoint with its guards, or None if it was deleted meanwhile.

    `links` maps the identity of a store to the name of a link to it.
    """
    manifest, store, path = info.manifest, info.store, info.path
    try:
        valid = run.is_valid(info)
    except UnreadableError:
        raise  # unreadable now is not invalid
    except CheckpointError:
        if store.stat(MANIFEST_NAME) is None:  # deleted since it was listed
            return None
        valid = False
    guards = []
    if store.identity in links:
        guards.append(f"linked from {links[store.identity]}")
    if store.identity in protected:
        guards.append("protected by the caller")
    kinds = {part.kind for part in manifest.parts}
    return HeldCheckpoint(
        path=path,
        step=manifest.step,
        created=_created_seconds(store, manifest.created),
        number=manifest.number or 0,
        metrics=info.metrics,
        guards=(*guards, *run.guards(store)),
        valid=valid,
        has_state=STATE in kinds,
        has_weights=kinds != {STATE},
        run_id=None if manifest.export else manifest.run_id,
        is_export=manifest.export,
        base=_base_of(path, manifest.delta.get("base")),
    )


def _base_of(path: Path | str, name: str | None) -> Path | str | None:
    """Return the location of the checkpoint `name` in the folder of the one at `path`."""
    if not name:
        return None
    return path.with_name(name) if isinstance(path, Path) else f"{path.rpartition('/')[0]}/{name}"


def _created_seconds(store: Store, created: str) -> float:
    """Return the unix time of `created`, or of the manifest's last change if it is invalid."""
    time = parse_time(created)
    if time is not None:
        return time.timestamp()
    stored = store.stat(MANIFEST_NAME)
    return 0.0 if stored is None else stored.modified
