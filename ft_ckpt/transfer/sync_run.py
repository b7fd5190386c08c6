"""Brings the checkpoints of a run to another place: what is there stays, what is missing is copied, newest first.

So the checkpoint that matters most is safe first, however soon it ends; the run may go on writing meanwhile.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from ft_ckpt.checkpoint.catalog import CheckpointInfo, Listing, list_checkpoints, why_no_checkpoint
from ft_ckpt.checkpoint.delete import without_state
from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.checkpoint.open_checkpoint import open_checkpoint
from ft_ckpt.checkpoint.prune import PruneReport, recover_all, remove_checkpoints
from ft_ckpt.checkpoint.staging import settle_staging_at
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    NameTakenError,
    NotACheckpointError,
)
from ft_ckpt.storage.local_store import LocalStore, make_like
from ft_ckpt.storage.place import Place, location_name, open_place
from ft_ckpt.transfer.copies import CopyReport, content_identity, copy_open, is_there


@dataclass(frozen=True)
class SyncReport:
    """What `sync` did, or would do in a dry run; checkpoints go by their names in the folder of the run."""

    missing: tuple[str, ...]
    """Checkpoints that the destination lacked, newest first; one with a newer save of the same step is lacking."""
    present: tuple[str, ...]
    """Those that it had already."""
    copied: tuple[CopyReport, ...]
    """What became of the missing ones; none in a dry run."""
    dropped: tuple[str, ...]
    """Deleted at the destination, as they are no longer at the source."""
    stripped: tuple[str, ...]
    """Deprived of their training state at the destination, as they are at the source."""
    kept: Mapping[str, tuple[str, ...]]
    """What was to be deleted and stays, with the reasons: a pin, a lease."""
    problems: tuple[str, ...]
    """What was not copied or deleted, and why."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that were read here and written there."""
        return sum(report.sent_bytes for report in self.copied)


@dataclass
class _SyncPlan:
    """What has to be done, by the names of checkpoints."""

    copy: list[CheckpointInfo] = field(default_factory=list)
    present: list[CheckpointInfo] = field(default_factory=list)
    strip: list[str] = field(default_factory=list)
    drop: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def sync(
    source: str | os.PathLike[str] | Place,
    destination: str | os.PathLike[str] | Place,
    *,
    delete: bool = False,
    dry_run: bool = False,
) -> SyncReport:
    """Copy the checkpoints of the run `source` that `destination` lacks, newest first; both are paths or URLs.

    Each goes as `copy` says: compared by digest, visible when it is whole, and files that another checkpoint there has
    are not sent again. A checkpoint of the same run that was saved anew under its name is replaced; one of another run
    never is, and is a problem. The run may go on: what is being copied is leased.

    Nothing is deleted unless `delete` is True: then checkpoints of the same runs that are no longer at the source, and
    training states that they have no longer, go at the destination, too; weights saved beside a run's checkpoints
    stay, and so does what is pinned or in use. Nothing goes where anything else went wrong.

    Raises NotACheckpointError when `source` has no checkpoints, ConfigError when it is one, UnreadableError when one of
    both cannot be looked through. What a single checkpoint meets is among the report's `problems`.
    """
    start, goal = open_place(source), open_place(destination)
    here = list_checkpoints(start)
    _refuse_no_run(start, here)
    plan = _plan_sync(here, list_checkpoints(goal), goal, delete=delete)
    missing, present = _synced_names(plan.copy), _synced_names(plan.present)
    if dry_run:
        return SyncReport(missing, present, (), tuple(plan.drop), tuple(plan.strip), {}, tuple(plan.problems))
    make_like(goal.folder, start.folder)
    copied = _copy_missing(plan, goal)
    _settle_present(plan, goal)
    removed = PruneReport() if plan.problems or not delete else _delete_there(plan, goal)
    return SyncReport(
        missing,
        present,
        tuple(copied),
        tuple(map(location_name, removed.dropped)),
        tuple(map(location_name, removed.stripped)),
        {location_name(path): why for path, why in removed.kept.items()},
        (*plan.problems, *removed.problems),
    )


def _synced_names(infos: list[CheckpointInfo]) -> tuple[str, ...]:
    return tuple(info.name for info in infos)


def _refuse_no_run(start: Place, here: Listing) -> None:
    if any(info.store.identity == start.folder.identity for info in here.found):
        raise ConfigError(f"{start}: a checkpoint, expected the folder of a run; `ft-ckpt cp` copies one")
    if not (here.found or here.damaged or here.unreadable):
        raise NotACheckpointError(why_no_checkpoint(start.folder))


def _plan_sync(here: Listing, there: Listing, goal: Place, *, delete: bool) -> _SyncPlan:
    """Compare two listings."""
    plan = _SyncPlan(problems=[f"{error}; not copied" for error in (*here.damaged.values(), *here.unreadable.values())])
    known, names = {info.name: info for info in there.found}, {info.name for info in here.found}
    unread = {location_name(path): error for path, error in there.unreadable.items()}
    plan.problems += [f"{error}; not replaced" for name, error in unread.items() if name in names]
    for info in reversed([info for info in here.found if info.name not in unread]):
        _plan_one(plan, info, known.get(info.name), goal, delete=delete)
    if delete:
        # A run's export lies wherever somebody has put it: only checkpoints of the run tell that this is its place.
        runs = {info.manifest.run_id for info in here.found if not info.manifest.export} - {None}
        extra = [info for info in there.found if info.name not in names and not info.manifest.export]
        plan.drop += [info.name for info in extra if info.manifest.run_id in runs]
    return plan


def _plan_one(
    plan: _SyncPlan, info: CheckpointInfo, found: CheckpointInfo | None, goal: Place, *, delete: bool
) -> None:
    """Decide about one checkpoint at the source; `found` is what has its name at the destination."""
    if found is None or _is_newer_save(found.manifest, info.manifest):
        plan.copy.append(info)
    elif content_identity(found.manifest) == content_identity(info.manifest):
        (plan.present if is_there(_place_in(goal, info.name), info.manifest) else plan.copy).append(info)
    elif content_identity(without_state(found.manifest)) == content_identity(info.manifest):
        plan.present.append(info)
        plan.strip += [info.name] if delete else []
    else:
        plan.problems.append(
            f"{found.path}: another checkpoint than {info.path} (run {found.manifest.run_id}, saved "
            f"{found.manifest.created}); not replaced, give another destination"
        )


def _is_newer_save(found: Manifest, manifest: Manifest) -> bool:
    """Whether the same run has saved the checkpoint anew since."""
    return manifest.run_id is not None and manifest.run_id == found.run_id and manifest.created > found.created


def _copy_missing(plan: _SyncPlan, goal: Place) -> list[CopyReport]:
    """Copy what is missing; the plan gets the problems. A place that fails ends it, one bad checkpoint does not."""
    done = []
    for info in plan.copy:
        found = _copy_or_error(info, _place_in(goal, info.name))
        if isinstance(found, CopyReport):
            done.append(found)
        elif not isinstance(found, NotACheckpointError):  # deleted by its run meanwhile
            plan.problems.append(f"{info.path}: not copied: {found}")
            if isinstance(found, OSError) and not isinstance(found, NameTakenError):
                break
    return done


def _copy_or_error(info: CheckpointInfo, goal: Place) -> CopyReport | Exception:
    try:
        with open_checkpoint(info.place, compares=False) as held:
            return copy_open(held, goal, held.manifest, overwrite=True)
    except (CheckpointError, OSError) as error:
        return error


def _settle_present(plan: _SyncPlan, goal: Place) -> None:
    """Clear what an earlier sync has left at the destination that was killed after its last commit."""
    if not isinstance(goal.store, LocalStore):
        recover_all(goal)  # from one listing
        return
    for info in plan.present:
        settle_staging_at(_place_in(goal, info.name))


def _delete_there(plan: _SyncPlan, goal: Place) -> PruneReport:
    """Delete and strip what the plan says, unless it is guarded."""
    drop, strip = ([_place_in(goal, name).location for name in names] for names in (plan.drop, plan.strip))
    return remove_checkpoints(goal, drop, strip)


def _place_in(goal: Place, name: str) -> Place:
    return Place(goal.folder, name)
