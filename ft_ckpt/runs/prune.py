"""Prunes a run: deletes the checkpoints that the rules do not keep, and makes room on a full
disk.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from ft_ckpt.checkpoint import (
    MANIFEST_NAME,
    STATE,
    CheckpointInfo,
    Removal,
    RunFolder,
    list_checkpoints,
    manifest_files,
    open_run_folder,
    parse_time,
    without_state,
)
from ft_ckpt.errors import CheckpointError, ConfigError, UnreadableError
from ft_ckpt.messages import LOG, warn
from ft_ckpt.retention import (
    HeldCheckpoint,
    Keep,
    PrunePlan,
    check_metrics,
    newest_valid,
    plan_pruning,
)
from ft_ckpt.storage import (
    Place,
    Store,
    location_name,
    open_place,
)


@dataclass(frozen=True)
class PruneReport:
    """The outcome of pruning, or of its dry run. The next sweep retries failed deletions."""

    kept: Mapping[Path | str, tuple[str, ...]] = field(default_factory=dict)  # with the reasons
    dropped: tuple[Path | str, ...] = ()
    stripped: tuple[Path | str, ...] = ()  # kept without their training state
    freed_bytes: int = 0
    # unlisted files in the folders of dropped checkpoints, which stay
    left: tuple[Path | str, ...] = ()
    problems: tuple[str, ...] = ()


def survey_run(
    root: str | os.PathLike[str] | Place, protect: Iterable[str | os.PathLike[str] | Place] = ()
) -> list[HeldCheckpoint]:
    """The checkpoints in the folder `root` of a run, oldest first; links and `root` itself are left
    out.

    Guarded: checkpoints in `protect`, pinned or leased ones, targets of links in `root`, and those
    that a save is about to replace. Raises UnreadableError when a manifest, or `root`, cannot be
    read now: rules applied to some of the checkpoints could delete the wrong ones.
    """
    return _survey(open_run_folder(open_place(root)), protect)


def prune_run(
    root: str | os.PathLike[str] | Place,
    keep: Keep,
    *,
    run_id: str | None = None,
    protect: Iterable[str | os.PathLike[str] | Place] = (),
    dry_run: bool = False,
    strict: bool = False,
) -> PruneReport:
    """Delete the checkpoints in `root` that `keep` does not ask for (see `retention.plan_pruning`).

    With `run_id` other runs' checkpoints stay; without it the rules apply to each run separately.
    Exports, averages and folders without a manifest always stay. Failed deletions are reported in
    `problems`, not raised; so is a concurrent sweep of the same folder, which is not waited for. If
    `strict`, raises ConfigError for a metric of `keep` that no checkpoint has.
    """

    def make_plan(run: RunFolder) -> PrunePlan:
        held = _survey(run, protect)
        if strict:
            check_metrics(held, keep, run_id)
        return plan_pruning(held, keep, run_id)

    return _run_plan(open_place(root), make_plan, dry_run=dry_run)


def prune_after_save(
    root: Path | Place | None,
    keep: Keep | None,
    run_id: str,
    protect: tuple[Path | Place, ...],
    newest_path: Path | Place | None = None,
) -> None:
    """Prune a run after a save; failures are warnings and never end the run."""
    if root is None or keep is None:
        return
    try:
        saved = () if newest_path is None else (newest_path,)
        problems = prune_run(root, keep, run_id=run_id, protect=(*saved, *protect)).problems
    except Exception as error:  # noqa: BLE001 - the checkpoint is safe, and the next sweep tries again
        problems = (str(error),)
    for problem in problems:
        warn(f"{root}: an old checkpoint was not deleted: {problem}", stacklevel=4)


def room_maker(
    keep: Keep | None, step: int | None, run_id: str | None, protect: Iterable[Place] = ()
) -> Callable[[Path], PruneReport] | None:
    """Deletes from a run's folder what a save of `step` may delete; None if that is nothing."""
    if keep is None:
        return None
    return partial(make_room, keep=keep, step=step, run_id=run_id, protect=protect)


def make_room(
    root: str | os.PathLike[str] | Place,
    keep: Keep,
    step: int | None,
    *,
    run_id: str | None = None,
    protect: Iterable[str | os.PathLike[str] | Place] = (),
) -> PruneReport:
    """Delete the checkpoints that `keep` will not ask for once `step` is saved.

    The newest valid ones stay, because the new one is not committed yet. Reports as `prune_run`
    does.
    """

    def as_if_saved(run: RunFolder) -> PrunePlan:
        held = _survey(run, protect)
        vital = newest_valid(each for each in held if run_id is None or each.run_id == run_id)
        if not vital:
            return plan_pruning(held, keep, run_id)
        held = [
            dataclasses.replace(each, guards=(*each.guards, vital[each.path]))
            if each.path in vital
            else each
            for each in held
        ]
        now = datetime.now(timezone.utc).timestamp()
        number = 1 + max((each.number for each in held), default=0)
        coming = HeldCheckpoint(
            path="\0", step=step, created=now, has_state=True, run_id=run_id, number=number
        )
        planned = plan_pruning([*held, coming], keep, run_id)
        kept = {path: why for path, why in planned.keep.items() if path != coming.path}
        return dataclasses.replace(planned, keep=kept)

    return _run_plan(open_place(root), as_if_saved)


def remove_checkpoints(
    root: Place, drop: Iterable[Path | str], strip: Iterable[Path | str]
) -> PruneReport:
    """Delete the checkpoints `drop` of the run in `root`, and the training states of `strip`,
    unless they are guarded.

    Interrupted removals are finished first. Reports as `prune_run` does.
    """
    return _run_plan(root, lambda _: PrunePlan({}, tuple(drop), tuple(strip)))


def recover_all(root: str | os.PathLike[str] | Place) -> tuple[str, ...]:
    """Undo or finish the saves into `root` whose process died (see `commit`, `bucket_delete`); a
    line for each.

    For the process that is about to save there: no other process may be saving into `root`. Raises
    TargetError.
    """
    return open_run_folder(open_place(root)).recover()


def _survey(
    run: RunFolder, protect: Iterable[str | os.PathLike[str] | Place]
) -> list[HeldCheckpoint]:
    root = run.snapshot()
    links = {each.identity: each.name for each in root.folder.list_folder().folders if each.is_link}
    protected = {open_place(path).folder.identity for path in protect}
    listed = list_checkpoints(root, links=False)
    listed.require_readable()
    infos = (info for info in listed.found if info.store != root.folder)
    return [
        held
        for info in infos
        if (held := _held_checkpoint(run, info, links, protected)) is not None
    ]


def _held_checkpoint(
    run: RunFolder, info: CheckpointInfo, links: Mapping[str, str], protected: set[str]
) -> HeldCheckpoint | None:
    """The checkpoint with its guards; `links`: link name by store identity.

    None if it was deleted meanwhile.
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
    guards = [f"linked from {links[store.identity]}"] if store.identity in links else []
    guards += ["protected by the caller"] if store.identity in protected else []
    kinds, base = {part.kind for part in manifest.parts}, manifest.delta.get("base")
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
        base=base
        and (
            path.with_name(base) if isinstance(path, Path) else f"{path.rpartition('/')[0]}/{base}"
        ),
    )


def _created_seconds(store: Store, created: str) -> float:
    """Unix time of `created`; of the manifest's last change if it is invalid."""
    if (then := parse_time(created)) is not None:
        return then.timestamp()
    found = store.stat(MANIFEST_NAME)
    return 0.0 if found is None else found.modified


def _run_plan(
    root: Place, make_plan: Callable[[RunFolder], PrunePlan], *, dry_run: bool = False
) -> PruneReport:
    run = open_run_folder(root)
    try:
        if dry_run:
            return _dry_report(run, make_plan(run))
        with run.exclusive_sweep() as alone:
            if not alone:
                return PruneReport(
                    problems=(f"{root}: another sweep is at work there; nothing was deleted",)
                )
            done = [_try_step(*step) for step in run.unfinished()]
            plan = make_plan(run)
            done += [_try_step(path, partial(run.drop, path)) for path in plan.drop]
            done += [_try_step(path, partial(run.strip, path)) for path in plan.strip]
    except ConfigError:
        raise
    except (CheckpointError, OSError) as error:
        return PruneReport(
            problems=(f"{root}: cannot be listed ({error}); no further checkpoint was deleted",)
        )
    report = _prune_report(plan, done)
    for path in report.dropped:
        LOG.info("deleted %s", location_name(path))
    for path in report.stripped:
        LOG.info("deleted the training state of %s", location_name(path))
    return report


def _try_step(path: Path | str, step: Callable[[], Removal]) -> Removal | str:
    try:
        return step()
    except (CheckpointError, OSError) as error:
        return f"{path}: not deleted completely ({error}); the next sweep continues"


def _prune_report(plan: PrunePlan, done: list[Removal | str]) -> PruneReport:
    removals = [each for each in done if isinstance(each, Removal)]
    return PruneReport(
        kept={**plan.keep, **{each.path: each.why for each in removals if each.why}},
        dropped=tuple(each.path for each in removals if each.dropped),
        stripped=tuple(each.path for each in removals if each.stripped),
        freed_bytes=sum(each.freed_bytes for each in removals),
        left=tuple(file for each in removals for file in each.left),
        problems=tuple(each for each in done if isinstance(each, str)),
    )


def _dry_report(run: RunFolder, plan: PrunePlan) -> PruneReport:
    at = {info.path: info for info in list_checkpoints(run.snapshot(), links=False).found}
    doomed = [at[path].store for path in plan.drop if path in at]
    sizes = [run.releasable(store, manifest_files(store, MANIFEST_NAME)) for store in doomed]
    for info in (at[path] for path in plan.strip if path in at):
        rest = {file.path for file in without_state(info.manifest).files}
        sizes.append(run.releasable(info.store, {file.path for file in info.manifest.files} - rest))
    return PruneReport(plan.keep, plan.drop, plan.strip, sum(sizes))
