"""Copies a checkpoint, or all checkpoints of a run that another folder or bucket lacks.

The newest are copied first, so that an interrupted sync has copied the newest. The run may save
while it is copied.
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

    Source and destination are paths or URLs, also of different buckets. If the destination ends in
    a slash, the name of the source is appended to it. All digests are compared while files are
    copied, and the manifest is written last. Files of 1 MiB or more are not sent again if one of
    the newest checkpoints in the destination's folder has them. They are hard-linked and read
    there, or copied by the service. A signature is copied; see `sign`. Pins and leases are not
    copied. A failed copy leaves no checkpoint, and the next one starts from the beginning. If the
    same checkpoint is there already, nothing changes.

    From a bucket of the Hub ("hf://buckets/user/name/folder") a checkpoint can be copied only to a
    disk. Into such a bucket, the files are sent in one batch, and then the manifest. With
    `overwrite`, there is no checkpoint in between.

    Raises NotACheckpointError if nothing is committed at `source`, and CorruptError if its files
    differ from its manifest. Raises NameTakenError if something else is at `destination` and
    `overwrite` is False, and TargetError or NoSpaceError if it cannot be written.
    """
    source_endpoint = copy_endpoint_of(source).at(source)
    given_endpoint = copy_endpoint_of(destination).at(destination)
    target_endpoint = given_endpoint.target_for(source_endpoint.basename)
    return source_endpoint.copy_to(target_endpoint, overwrite=overwrite)


@dataclass
class _SyncPlan:
    """What a sync does with each checkpoint.

    Attributes:
        copy: The checkpoints to copy, newest first.
        present: The checkpoints that the destination has.
        strip: The names of checkpoints whose training state is to be deleted.
        drop: The names of checkpoints to delete.
        problems: Why checkpoints cannot be copied.
    """

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
    run = open_place(source)
    target = open_place(destination)
    listed = list_checkpoints(run)
    _refuse_no_run(run, listed)
    plan = _plan_sync(listed, list_checkpoints(target), target, delete=delete)
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
    make_like(target.folder, run.folder)
    copied = _copy_missing(plan, target)
    _delete_leftovers(plan, target)
    removed = PruneReport()
    if delete and not plan.problems:
        drop = [_place_in(target, name).location for name in plan.drop]
        strip = [_place_in(target, name).location for name in plan.strip]
        removed = remove_checkpoints(target, drop, strip)

    return replace(
        report,
        copied=tuple(copied),
        dropped=tuple(map(location_name, removed.dropped)),
        stripped=tuple(map(location_name, removed.stripped)),
        kept={location_name(path): reasons for path, reasons in removed.kept.items()},
        problems=(*plan.problems, *removed.problems),
    )


def _refuse_no_run(run: Place, listed: Listing) -> None:
    """Raise an error if `run` is a checkpoint, or has none in it."""
    if any(info.store.identity == run.folder.identity for info in listed.checkpoints):
        raise ConfigError(
            f"{run}: a checkpoint, expected the folder of a run; `ft-ckpt cp` copies one"
        )
    if not (listed.checkpoints or listed.damaged or listed.unreadable):
        raise NotACheckpointError(why_no_checkpoint(run))


def _plan_sync(source: Listing, destination: Listing, target: Place, *, delete: bool) -> _SyncPlan:
    """Compare the checkpoints of the source with those of the destination, which is `target`."""
    plan = _SyncPlan()
    unusable = [*source.damaged.values(), *source.unreadable.values()]
    plan.problems += [f"{error}; not copied" for error in unusable]
    names = {info.name for info in source.checkpoints}
    stored = {info.name: info for info in destination.checkpoints}
    unread = {location_name(path): error for path, error in destination.unreadable.items()}
    plan.problems += [f"{error}; not replaced" for name, error in unread.items() if name in names]
    for info in reversed(source.checkpoints):
        if info.name not in unread:
            _plan_one(plan, info, stored.get(info.name), target, delete=delete)

    if delete:
        # An export may lie in any folder, so only other checkpoints with a run id show which runs
        # are stored here.
        run_ids = set()
        for info in source.checkpoints:
            if not info.manifest.export and info.manifest.run_id is not None:
                run_ids.add(info.manifest.run_id)
        extra = [info for info in destination.checkpoints if info.name not in names]
        for info in extra:
            if not info.manifest.export and info.manifest.run_id in run_ids:
                plan.drop.append(info.name)

    return plan


def _plan_one(
    plan: _SyncPlan,
    info: CheckpointInfo,
    stored: CheckpointInfo | None,
    target: Place,
    *,
    delete: bool,
) -> None:
    """Add one checkpoint of the source to the plan.

    `stored` is the checkpoint of the same name at the destination, if there is one.
    """
    stored_manifest = None if stored is None else stored.manifest
    relation = relation_of(stored_manifest, info.manifest)
    if stored is None or relation is Relation.OLDER:
        plan.copy.append(info)
    elif relation is Relation.SAME:
        if is_there(_place_in(target, info.name), info.manifest):
            plan.present.append(info)
        else:
            plan.copy.append(info)
    elif relation is Relation.WITH_STATE:
        plan.present.append(info)
        if delete:
            plan.strip.append(info.name)
    else:
        plan.problems.append(
            f"{stored.path}: another checkpoint than {info.path} (run {stored.manifest.run_id}, "
            f"saved {stored.manifest.created}); not replaced, give another destination"
        )


def _copy_missing(plan: _SyncPlan, target: Place) -> list[CopyReport]:
    """Copy the missing checkpoints, and add problems to the plan.

    A damaged checkpoint is skipped. An I/O error ends the copying.
    """
    reports = []
    for info in plan.copy:
        outcome = _copy_or_error(info, _place_in(target, info.name))
        if isinstance(outcome, CopyReport):
            reports.append(outcome)
        elif not isinstance(outcome, NotACheckpointError):
            # It is no problem if the run has deleted the checkpoint since it was listed.
            plan.problems.append(f"{info.path}: not copied: {outcome}")
            if isinstance(outcome, OSError) and not isinstance(outcome, NameTakenError):
                break
    return reports


def _copy_or_error(info: CheckpointInfo, target: Place) -> CopyReport | Exception:
    try:
        with open_checkpoint(info.place) as checkpoint:
            return copy_open(checkpoint, target, checkpoint.manifest, overwrite=True)
    except (CheckpointError, OSError) as error:
        return error


def _delete_leftovers(plan: _SyncPlan, target: Place) -> None:
    """Delete the staging files of an earlier sync that was killed after its last commit."""
    if not target.is_local:
        recover_all(target)  # one listing of the bucket finds all
        return
    for info in plan.present:
        recover_staging_at(_place_in(target, info.name))


def _place_in(folder: Place, name: str) -> Place:
    return Place(folder.folder, name)
