"""Deletes the checkpoints of a run that its rules do not keep, and makes room on a full disk."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from ft_ckpt.checkpoint.catalog import list_checkpoints
from ft_ckpt.checkpoint.commit import (
    Removal,
    RunFolder,
    manifest_files,
    open_run_folder,
    without_state,
)
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import CheckpointError, ConfigError
from ft_ckpt.messages import LOG, warn
from ft_ckpt.retention import (
    HeldCheckpoint,
    Keep,
    PrunePlan,
    check_metrics,
    newest_valid,
    plan_pruning,
)
from ft_ckpt.runs.folder.survey import survey
from ft_ckpt.storage.places import Place, location_name


@dataclass(frozen=True)
class PruneReport:
    """The outcome of pruning, or of its dry run.

    Attributes:
        kept: The checkpoints that were kept, each with the reasons.
        dropped: The checkpoints that were deleted.
        stripped: The checkpoints that were kept without their training state.
        freed_bytes: The bytes of the deleted files.
        left: Files in the folders of deleted checkpoints that their manifests do not list. They
            stay.
        problems: A line for each failed deletion. The next sweep tries again.
    """

    kept: Mapping[Path | str, tuple[str, ...]] = field(default_factory=dict)
    dropped: tuple[Path | str, ...] = ()
    stripped: tuple[Path | str, ...] = ()
    freed_bytes: int = 0
    left: tuple[Path | str, ...] = ()
    problems: tuple[str, ...] = ()


def prune_run(
    root: Place,
    keep: Keep,
    *,
    run_id: str | None = None,
    protect: Iterable[Place] = (),
    dry_run: bool = False,
    strict: bool = False,
) -> PruneReport:
    """Delete the checkpoints in `root` that `keep` does not select (see `retention.plan_pruning`).

    With `run_id` the checkpoints of other runs stay. Without it the rules apply to each run
    separately. Exports, averages and folders without a manifest always stay. Checkpoints in
    `protect` stay too.

    Failed deletions are in `problems` of the report and are not raised. If another process sweeps
    the folder now, nothing is deleted, and `problems` says so. With `strict`, raises ConfigError
    for a metric of `keep` that no checkpoint has.
    """

    def make_plan(run: RunFolder) -> PrunePlan:
        checkpoints = survey(run, protect)
        if strict:
            check_metrics(checkpoints, keep, run_id)
        return plan_pruning(checkpoints, keep, run_id)

    return _run_plan(root, make_plan, dry_run=dry_run)


def prune_after_save(
    root: Place | None,
    keep: Keep | None,
    run_id: str,
    protect: tuple[Place, ...],
    newest: Place | None = None,
) -> None:
    """Prune a run after a save. Failures are warnings, because they must not end the run."""
    if root is None or keep is None:
        return
    try:
        saved = () if newest is None else (newest,)
        problems = prune_run(root, keep, run_id=run_id, protect=(*saved, *protect)).problems
    except Exception as error:  # noqa: BLE001 - the checkpoint is safe, and the next sweep tries again
        problems = (str(error),)
    for problem in problems:
        warn(f"{root}: an old checkpoint was not deleted: {problem}")


def room_maker(
    keep: Keep | None, step: int | None, run_id: str | None, protect: Iterable[Place] = ()
) -> Callable[[Place], PruneReport] | None:
    """Return a function of a run's folder that makes room for a save of `step`, see `make_room`.

    Returns None without rules, because nothing may be deleted then.
    """
    if keep is None:
        return None
    return partial(make_room, keep=keep, step=step, run_id=run_id, protect=protect)


def make_room(
    root: Place,
    keep: Keep,
    step: int | None,
    *,
    run_id: str | None = None,
    protect: Iterable[Place] = (),
) -> PruneReport:
    """Delete the checkpoints that `keep` will not select once `step` is saved.

    The newest valid ones stay, because the new checkpoint is not committed yet. Reports as
    `prune_run` does.
    """

    def make_plan(run: RunFolder) -> PrunePlan:
        return _plan_as_if_saved(survey(run, protect), keep, step, run_id)

    return _run_plan(root, make_plan)


def _plan_as_if_saved(
    checkpoints: Sequence[HeldCheckpoint], keep: Keep, step: int | None, run_id: str | None
) -> PrunePlan:
    """Return the plan that would be made after a save of `step`.

    The newest valid checkpoints get a guard, which is a reason to keep them whatever the rules say.
    """
    run_checkpoints = list(checkpoints)
    if run_id is not None:
        run_checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.run_id == run_id]
    newest_reasons = newest_valid(run_checkpoints)
    if not newest_reasons:
        return plan_pruning(checkpoints, keep, run_id)
    guarded = []
    for checkpoint in checkpoints:
        guards = checkpoint.guards
        if checkpoint.path in newest_reasons:
            guards = (*guards, newest_reasons[checkpoint.path])
        guarded.append(dataclasses.replace(checkpoint, guards=guards))

    next_number = 1 + max((checkpoint.number for checkpoint in checkpoints), default=0)
    coming = HeldCheckpoint(
        path="\0",  # a path that no checkpoint has
        step=step,
        created=datetime.now(timezone.utc).timestamp(),
        has_state=True,
        run_id=run_id,
        number=next_number,
    )
    plan = plan_pruning([*guarded, coming], keep, run_id)
    kept = dict(plan.keep)
    kept.pop(coming.path, None)
    return dataclasses.replace(plan, keep=kept)


def remove_checkpoints(
    root: Place, drop: Iterable[Path | str], strip: Iterable[Path | str]
) -> PruneReport:
    """Delete the checkpoints `drop` in the folder `root`, and the training states of `strip`.

    Guarded checkpoints (pinned, in use) stay. Interrupted deletions are finished first. Reports as
    `prune_run` does.
    """
    return _run_plan(root, lambda _: PrunePlan({}, tuple(drop), tuple(strip)))


def recover_all(root: Place) -> tuple[str, ...]:
    """Undo or finish the saves into `root` whose process has died (see `commit`, `bucket_delete`).

    Returns a line for each. Only the process that is about to save there may call this: no other
    process must be saving into `root`. Raises TargetError.
    """
    return open_run_folder(root).recover()


def _run_plan(
    root: Place, make_plan: Callable[[RunFolder], PrunePlan], *, dry_run: bool = False
) -> PruneReport:
    """Make a plan and delete by it, and return the report. `make_plan` may raise ConfigError."""
    run = open_run_folder(root)
    try:
        if dry_run:
            return _dry_report(run, make_plan(run))
        with run.exclusive_sweep() as is_alone:
            if not is_alone:
                problem = f"{root}: another sweep is at work there; nothing was deleted"
                return PruneReport(problems=(problem,))
            outcomes = [_try_step(path, step) for path, step in run.unfinished()]
            plan = make_plan(run)
            outcomes += [_try_step(path, partial(run.drop, path)) for path in plan.drop]
            outcomes += [_try_step(path, partial(run.strip, path)) for path in plan.strip]
    except ConfigError:
        raise
    except (CheckpointError, OSError) as error:
        problem = f"{root}: cannot be listed ({error}); no further checkpoint was deleted"
        return PruneReport(problems=(problem,))

    report = _prune_report(plan, outcomes)
    for path in report.dropped:
        LOG.info("deleted %s", location_name(path))
    for path in report.stripped:
        LOG.info("deleted the training state of %s", location_name(path))
    return report


def _try_step(path: Path | str, step: Callable[[], Removal]) -> Removal | str:
    """Call `step`, which deletes from the checkpoint `path`. Returns its result, or a problem."""
    try:
        return step()
    except (CheckpointError, OSError) as error:
        return f"{path}: not deleted completely ({error}); the next sweep continues"


def _prune_report(plan: PrunePlan, outcomes: list[Removal | str]) -> PruneReport:
    removals = [outcome for outcome in outcomes if isinstance(outcome, Removal)]
    kept = dict(plan.keep)
    unlisted: list[Path | str] = []
    for removal in removals:
        if removal.why:
            kept[removal.path] = removal.why
        unlisted += removal.left

    return PruneReport(
        kept=kept,
        dropped=tuple(removal.path for removal in removals if removal.dropped),
        stripped=tuple(removal.path for removal in removals if removal.stripped),
        freed_bytes=sum(removal.freed_bytes for removal in removals),
        left=tuple(unlisted),
        problems=tuple(outcome for outcome in outcomes if isinstance(outcome, str)),
    )


def _dry_report(run: RunFolder, plan: PrunePlan) -> PruneReport:
    """Return the report that the plan would give. Deletes nothing."""
    listed = list_checkpoints(run.snapshot(), links=False).checkpoints
    infos = {info.path: info for info in listed}
    freed_bytes = 0
    for path in plan.drop:
        if path in infos:
            store = infos[path].store
            freed_bytes += run.releasable(store, manifest_files(store, MANIFEST_NAME))

    for path in plan.strip:
        if path in infos:
            manifest = infos[path].manifest
            kept = {file.path for file in without_state(manifest).files}
            files = {file.path for file in manifest.files}
            freed_bytes += run.releasable(infos[path].store, files - kept)

    return PruneReport(plan.keep, plan.drop, plan.strip, freed_bytes)
