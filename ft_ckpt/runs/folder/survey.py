"""Lists the checkpoints of a run with the properties that the rules of retention use."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from ft_ckpt.checkpoint.catalog import CheckpointInfo, list_checkpoints
from ft_ckpt.checkpoint.commit import STATE, RunFolder, open_run_folder
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME, parse_time
from ft_ckpt.errors import CheckpointError, UnreadableError
from ft_ckpt.retention import HeldCheckpoint
from ft_ckpt.storage import Store
from ft_ckpt.storage.places import Place


def survey_run(root: Place, protect: Iterable[Place] = ()) -> list[HeldCheckpoint]:
    """Return the checkpoints in the folder `root` of a run, oldest first.

    Links and `root` itself are left out. These checkpoints get a guard, which is a reason to keep
    them whatever the rules say: those in `protect`, pinned ones, those with a lease, targets of
    links in `root`, and those that a save is about to replace.

    Raises UnreadableError if `root` or a manifest cannot be read now. If the rules were applied to
    the other checkpoints alone, they could select the wrong ones for deletion.
    """
    return survey(open_run_folder(root), protect)


def survey(run: RunFolder, protect: Iterable[Place]) -> list[HeldCheckpoint]:
    """Return the checkpoints as `survey_run` does, for an open folder of a run."""
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
    """Return the checkpoint with its guards; None if it was deleted meanwhile.

    `links` has the name of a link by the identity of the folder that it leads to. `protected` has
    the identities of protected folders.
    """
    manifest, store, path = info.manifest, info.store, info.path
    try:
        valid = run.is_valid(info)
    except UnreadableError:
        raise  # a checkpoint that cannot be read now may be valid
    except CheckpointError:
        if store.stat(MANIFEST_NAME) is None:  # it was deleted after it was listed
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
    """Return the location of the checkpoint `name` next to the checkpoint at `path`."""
    if not name:
        return None
    return path.with_name(name) if isinstance(path, Path) else f"{path.rpartition('/')[0]}/{name}"


def _created_seconds(store: Store, created: str) -> float:
    """Return `created` as unix seconds, or if it is invalid, when the manifest was written."""
    created_at = parse_time(created)
    if created_at is not None:
        return created_at.timestamp()
    stored = store.stat(MANIFEST_NAME)
    return 0.0 if stored is None else stored.modified
