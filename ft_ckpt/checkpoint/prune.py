"""Deletes the checkpoints of a run that its rules do not keep; an interrupted deletion is finished by the next call."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from ft_ckpt.checkpoint import catalog
from ft_ckpt.checkpoint.delete import STATE, Removal, manifest_files, without_state
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.checkpoint.run_folder import RunFolder, open_run_folder
from ft_ckpt.errors import CheckpointError, UnreadableError
from ft_ckpt.messages import LOG, warn
from ft_ckpt.retention import HeldCheckpoint, Keep, PrunePlan, newest_valid, plan_pruning
from ft_ckpt.storage.place import Place, location_name, open_place
from ft_ckpt.storage.store import Store


@dataclass(frozen=True)
class PruneReport:
    """The outcome of pruning, or of its dry run: `kept` with the reasons; failures are tried again next time."""

    kept: Mapping[Path | str, tuple[str, ...]] = field(default_factory=dict)
    dropped: tuple[Path | str, ...] = ()
    stripped: tuple[Path | str, ...] = ()  # kept without their training state
    freed_bytes: int = 0
    left: tuple[Path | str, ...] = ()  # files of others in the folders of dropped checkpoints, which stay
    problems: tuple[str, ...] = ()


def survey_run(
    root: str | os.PathLike[str] | Place, protect: Iterable[str | os.PathLike[str] | Place] = ()
) -> list[HeldCheckpoint]:
    """The checkpoints in the folder `root` of a run, oldest first; links and `root` itself are left out.

    Guarded are those in `protect`, pinned or leased ones, those that a link in `root` leads to, and those that a save
    is about to replace. Raises UnreadableError when a manifest, or `root`, cannot be read just now: rules that see only
    some of them could let the wrong ones go.
    """
    return _survey(open_run_folder(open_place(root)), protect)


def prune_run(
    root: str | os.PathLike[str] | Place,
    keep: Keep,
    *,
    run_id: str | None = None,
    protect: Iterable[str | os.PathLike[str] | Place] = (),
    dry_run: bool = False,
) -> PruneReport:
    """Delete the checkpoints in `root` that `keep` does not ask for (see `retention.plan_pruning`).

    With `run_id` other runs' checkpoints stay, without it each run is judged by itself; exports, averages and folders
    without our manifest always stay. What the disk refuses is in the report's `problems` and nothing is raised for it;
    so is another sweep of the same folder, which is not waited for.
    """
    return _run_plan(open_place(root), lambda run: plan_pruning(_survey(run, protect), keep, run_id), dry_run=dry_run)


def prune_after_save(
    root: Path | Place | None,
    keep: Keep | None,
    run_id: str,
    protect: tuple[Path | Place, ...],
    newest_path: Path | Place | None = None,
) -> None:
    """Prune a run after a save; failures are warned of and never end the run."""
    if root is None or keep is None:
        return
    try:
        saved = () if newest_path is None else (newest_path,)
        problems = prune_run(root, keep, run_id=run_id, protect=(*saved, *protect)).problems
    except Exception as error:  # noqa: BLE001 - the checkpoint is safe, and the next sweep tries again
        problems = (str(error),)
    for problem in problems:
        warn(f"{root}: an old checkpoint was not deleted: {problem}", stacklevel=4)


def make_room(
    root: str | os.PathLike[str] | Place,
    keep: Keep,
    step: int | None,
    *,
    run_id: str | None = None,
    protect: Iterable[str | os.PathLike[str] | Place] = (),
) -> PruneReport:
    """Delete, ahead of the save of `step`, the checkpoints that `keep` would not ask for after it.

    The newest valid ones of today stay nevertheless: the new one is not there yet. Reports as `prune_run` does.
    """

    def as_if_saved(run: RunFolder) -> PrunePlan:
        held = _survey(run, protect)
        vital = newest_valid(each for each in held if run_id is None or each.run_id == run_id)
        if not vital:
            return plan_pruning(held, keep, run_id)
        held = [_with_guard(each, vital.get(each.path)) for each in held]
        now = datetime.now(timezone.utc).timestamp()
        number = 1 + max((each.number for each in held), default=0)
        coming = HeldCheckpoint(path="\0", step=step, created=now, has_state=True, run_id=run_id, number=number)
        planned = plan_pruning([*held, coming], keep, run_id)
        kept = {path: why for path, why in planned.keep.items() if path != coming.path}
        return dataclasses.replace(planned, keep=kept)

    return _run_plan(open_place(root), as_if_saved)


def remove_checkpoints(root: Place, drop: Iterable[Path | str], strip: Iterable[Path | str]) -> PruneReport:
    """Delete the checkpoints `drop` of the run in `root`, and the training states of `strip`, unless something guards
    them. Removals that were interrupted are finished first. Reports as `prune_run` does.
    """
    return _run_plan(root, lambda _: PrunePlan({}, tuple(drop), tuple(strip)))


def recover_all(root: str | os.PathLike[str] | Place) -> tuple[str, ...]:
    """Undo or finish the saves into `root` whose process died (see `recovery`, `bucket_removal`); a line for each.

    For the one who writes there, before it does: nobody else may be saving into `root`. Raises TargetError.
    """
    return open_run_folder(open_place(root)).recover()


def _survey(run: RunFolder, protect: Iterable[str | os.PathLike[str] | Place]) -> list[HeldCheckpoint]:
    root = run.look()
    links = {each.identity: each.name for each in root.folder.list_folder().folders if each.is_link}
    asked = {open_place(path).folder.identity for path in protect}
    listed = catalog.list_checkpoints(root)
    listed.require_readable()
    found = (info for info in listed.found if info.store != root.folder and info.name not in links.values())
    return [held for info in found if (held := _held_checkpoint(run, info, links, asked)) is not None]


def _held_checkpoint(
    run: RunFolder, info: catalog.CheckpointInfo, links: Mapping[str, str], asked: set[str]
) -> HeldCheckpoint | None:
    manifest, store = info.manifest, info.store
    real = store.identity
    try:
        valid = run.is_valid(info)
    except UnreadableError:
        raise  # not known to be invalid
    except CheckpointError:
        if store.stat(MANIFEST_NAME) is None:  # deleted since it was discovered
            return None
        valid = False
    why = [f"linked from {links[real]}"] if real in links else []
    why += ["protected by the caller"] if real in asked else []
    kinds = {part.kind for part in manifest.parts}
    return HeldCheckpoint(
        path=info.path,
        step=manifest.step,
        created=_created_seconds(store, manifest.created),
        number=manifest.number or 0,
        metrics=manifest.metrics,
        guards=(*why, *run.guards(store)),
        valid=valid,
        has_state=STATE in kinds,
        has_weights=kinds != {STATE},
        run_id=None if manifest.export else manifest.run_id,
        is_export=manifest.export,
    )


def _with_guard(each: HeldCheckpoint, why: str | None) -> HeldCheckpoint:
    return each if why is None else dataclasses.replace(each, guards=(*each.guards, why))


def _created_seconds(store: Store, created: str) -> float:
    """Unix time of an ISO 8601 text, UTC where it names no zone; of the manifest's last change when it is none."""
    try:
        then = datetime.fromisoformat(created.replace("Z", "+00:00"))
        return (then.astimezone(timezone.utc) if then.tzinfo else then.replace(tzinfo=timezone.utc)).timestamp()
    except (OverflowError, ValueError):
        found = store.stat(MANIFEST_NAME)
        return 0.0 if found is None else found.modified


def _run_plan(root: Place, planned: Callable[[RunFolder], PrunePlan], *, dry_run: bool = False) -> PruneReport:
    run = open_run_folder(root)
    try:
        if dry_run:
            return _dry_report(run, planned(run))
        with run.sole_sweep() as alone:
            if not alone:
                return PruneReport(problems=(f"{root}: another sweep is at work there; nothing was deleted",))
            done = [_try_step(*step) for step in run.unfinished()]
            what = planned(run)
            done += [_try_step(path, partial(run.drop, path)) for path in what.drop]
            done += [_try_step(path, partial(run.strip, path)) for path in what.strip]
    except (CheckpointError, OSError) as error:
        return PruneReport(problems=(f"{root}: cannot be looked through ({error}); nothing was deleted",))
    report = _prune_report(what, done)
    for path in report.dropped:
        LOG.info("deleted %s", location_name(path))
    for path in report.stripped:
        LOG.info("deleted the training state of %s", location_name(path))
    return report


def _try_step(path: Path | str, step: Callable[[], Removal]) -> Removal | str:
    try:
        return step()
    except (CheckpointError, OSError) as error:
        return f"{path}: not deleted, or not all of it ({error}); the next sweep goes on"


def _prune_report(what: PrunePlan, done: list[Removal | str]) -> PruneReport:
    removals = [each for each in done if isinstance(each, Removal)]
    return PruneReport(
        kept={**what.keep, **{each.path: each.why for each in removals if each.why}},
        dropped=tuple(each.path for each in removals if each.dropped),
        stripped=tuple(each.path for each in removals if each.stripped),
        freed_bytes=sum(each.freed_bytes for each in removals),
        left=tuple(file for each in removals for file in each.left),
        problems=tuple(each for each in done if isinstance(each, str)),
    )


def _dry_report(run: RunFolder, what: PrunePlan) -> PruneReport:
    at = {info.path: info for info in catalog.list_checkpoints(run.look()).found}
    doomed = [at[path].store for path in what.drop if path in at]
    sizes = [run.releasable(store, manifest_files(store, MANIFEST_NAME)) for store in doomed]
    for info in (at[path] for path in what.strip if path in at):
        rest = {file.path for file in without_state(info.manifest).files}
        sizes.append(run.releasable(info.store, {file.path for file in info.manifest.files} - rest))
    return PruneReport(what.keep, what.drop, what.strip, sum(sizes))
