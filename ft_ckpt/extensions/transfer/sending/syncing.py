"""Copies the checkpoints of a run that another place lacks, newest first.

An interrupted sync thus has copied the newest ones. The run may write while it is copied.
"""

from dataclasses import dataclass, field, replace

from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.catalog import CheckpointInfo, Listing, list_checkpoints
from ft_ckpt.checkpoint.commit import recover_staging_at
from ft_ckpt.checkpoint.manifest import why_no_checkpoint
from ft_ckpt.errors import CheckpointError, ConfigError, NameTakenError, NotACheckpointError
from ft_ckpt.extensions.transfer.copies import (
    CopyReport,
    Relation,
    SyncReport,
    copy_open,
    is_there,
    relation_of,
)
from ft_ckpt.extensions.transfer.endpoints import PlaceLike, copy_endpoint_of
from ft_ckpt.runs.folder import PruneReport, recover_all, remove_checkpoints
from ft_ckpt.storage.local import make_like
from ft_ckpt.storage.places import Place, location_name, open_place


def copy(source: PlaceLike, destination: PlaceLike, *, overwrite: bool = False) -> CopyReport:
    """Copy the committed checkpoint `source` to `destination`.

    Source and destination are paths or URLs, also of different buckets. The name of the source is
    appended to a destination that ends in a slash. All digests are compared on the way, the
    manifest is written last. Files of 1 MiB or more that one of the newest checkpoints in the
    destination's folder has are not sent again: they are hard-linked and read there, or copied by
    the service. A signature is copied, see `sign`; pins and leases are not. A failed copy leaves no
    checkpoint; the next one starts from the beginning. If the same checkpoint is there already,
    nothing changes.

    From a bucket of the Hub ("hf://buckets/user/name/folder") a checkpoint is copied to a disk
    only. Into one, the files are sent in one batch, and then the manifest; with `overwrite`, there
    is no checkpoint meanwhile.

    Raises NotACheckpointError when nothing is committed at `source`, CorruptError when its files
    differ from its manifest, NameTakenError when something else is at `destination` and `overwrite`
    is False, TargetError or NoSpaceError when it cannot be written.
    """
    origin = copy_endpoint_of(source).at(source)
    goal = copy_endpoint_of(destination).at(destination).goal_for(origin.basename)
    return origin.copy_to(goal, overwrite=overwrite)


@dataclass
class _SyncPlan:
    """Checkpoints to copy, strip and delete."""

    copy: list[CheckpointInfo] = field(default_factory=list)
    present: list[CheckpointInfo] = field(default_factory=list)
    strip: list[str] = field(default_factory=list)
    drop: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def sync(
    source: PlaceLike,
    destination: PlaceLike,
    *,
    delete: bool = False,
    dry_run: bool = False,
) -> SyncReport:
    """Copy the checkpoints of the run `source` that `destination` lacks, newest first.

    Source and destination are paths or URLs. Each checkpoint is copied as by `copy`: compared by
    digest, visible when it is complete; files that another checkpoint there has are not sent again.
    A checkpoint that its run has saved again under the same name is replaced. A checkpoint of
    another run is never replaced and is reported as a problem. The run may go on: checkpoints are
    leased while they are copied.

    Nothing is deleted unless `delete` is True. Then checkpoints of the same runs, and training
    states, that the source no longer has are deleted at the destination, too. Weights that a script
    saved into the folder of the run stay, and so do pinned checkpoints and those in use. Nothing is
    deleted if there was any problem.

    Raises NotACheckpointError when `source` has no checkpoints, ConfigError when it is a
    checkpoint, UnreadableError when either cannot be listed. Failures of single checkpoints are
    among the report's `problems`.
    """
    start, goal = open_place(source), open_place(destination)
    listed = list_checkpoints(start)
    _refuse_no_run(start, listed)
    plan = _plan_sync(listed, list_checkpoints(goal), goal, delete=delete)
    report = SyncReport(
        missing=tuple(info.name for info in plan.copy),
        present=tuple(info.name for info in plan.present),
        copied=(),
        dropped=tuple(plan.drop),
        stripped=tuple(plan.strip),
        kept={},
        problems=tuple(plan.problems),
    )
    if dry_run:
        return report
    make_like(goal.folder, start.folder)
    copied = _copy_missing(plan, goal)
    _settle_present(plan, goal)
    removed = PruneReport()
    if delete and not plan.problems:
        drop = [_place_in(goal, name).location for name in plan.drop]
        strip = [_place_in(goal, name).location for name in plan.strip]
        removed = remove_checkpoints(goal, drop, strip)
    return replace(
        report,
        copied=tuple(copied),
        dropped=tuple(map(location_name, removed.dropped)),
        stripped=tuple(map(location_name, removed.stripped)),
        kept={location_name(path): reasons for path, reasons in removed.kept.items()},
        problems=(*plan.problems, *removed.problems),
    )


def _refuse_no_run(start: Place, listed: Listing) -> None:
    if any(info.store.identity == start.folder.identity for info in listed.checkpoints):
        raise ConfigError(
            f"{start}: a checkpoint, expected the folder of a run; `ft-ckpt cp` copies one"
        )
    if not (listed.checkpoints or listed.damaged or listed.unreadable):
        raise NotACheckpointError(why_no_checkpoint(start))


def _plan_sync(source: Listing, destination: Listing, goal: Place, *, delete: bool) -> _SyncPlan:
    """Compare two listings."""
    plan = _SyncPlan()
    unusable = [*source.damaged.values(), *source.unreadable.values()]
    plan.problems += [f"{error}; not copied" for error in unusable]
    names = {info.name for info in source.checkpoints}
    stored = {info.name: info for info in destination.checkpoints}
    unread = {location_name(path): error for path, error in destination.unreadable.items()}
    plan.problems += [f"{error}; not replaced" for name, error in unread.items() if name in names]
    for info in reversed(source.checkpoints):
        if info.name not in unread:
            _plan_one(plan, info, stored.get(info.name), goal, delete=delete)
    if delete:
        # An export may lie in any folder, so only other checkpoints with a run id show which runs
        # are stored here.
        runs = {info.manifest.run_id for info in source.checkpoints if not info.manifest.export} - {
            None
        }
        extra = [info for info in destination.checkpoints if info.name not in names]
        for info in extra:
            if not info.manifest.export and info.manifest.run_id in runs:
                plan.drop.append(info.name)
    return plan


def _plan_one(
    plan: _SyncPlan,
    info: CheckpointInfo,
    stored: CheckpointInfo | None,
    goal: Place,
    *,
    delete: bool,
) -> None:
    """Plan one checkpoint of the source.

    `stored` is the checkpoint of its name at the destination.
    """
    relation = relation_of(None if stored is None else stored.manifest, info.manifest)
    if stored is None or relation is Relation.OLDER:
        plan.copy.append(info)
    elif relation is Relation.SAME:
        is_whole = is_there(_place_in(goal, info.name), info.manifest)
        (plan.present if is_whole else plan.copy).append(info)
    elif relation is Relation.WITH_STATE:
        plan.present.append(info)
        if delete:
            plan.strip.append(info.name)
    else:
        plan.problems.append(
            f"{stored.path}: another checkpoint than {info.path} (run {stored.manifest.run_id}, "
            f"saved {stored.manifest.created}); not replaced, give another destination"
        )


def _copy_missing(plan: _SyncPlan, goal: Place) -> list[CopyReport]:
    """Copy the missing checkpoints and add problems to the plan.

    Stops at an I/O error, skips a damaged checkpoint.
    """
    reports = []
    for info in plan.copy:
        outcome = _copy_or_error(info, _place_in(goal, info.name))
        if isinstance(outcome, CopyReport):
            reports.append(outcome)
        elif not isinstance(outcome, NotACheckpointError):  # otherwise its run has deleted it
            plan.problems.append(f"{info.path}: not copied: {outcome}")
            if isinstance(outcome, OSError) and not isinstance(outcome, NameTakenError):
                break
    return reports


def _copy_or_error(info: CheckpointInfo, goal: Place) -> CopyReport | Exception:
    try:
        with open_checkpoint(info.place) as checkpoint:
            return copy_open(checkpoint, goal, checkpoint.manifest, overwrite=True)
    except (CheckpointError, OSError) as error:
        return error


def _settle_present(plan: _SyncPlan, goal: Place) -> None:
    """Delete leftovers of an earlier sync that was killed after its last commit."""
    if not goal.is_local:
        recover_all(goal)  # from one listing
        return
    for info in plan.present:
        recover_staging_at(_place_in(goal, info.name))


def _place_in(goal: Place, name: str) -> Place:
    return Place(goal.folder, name)
