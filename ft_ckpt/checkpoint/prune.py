"""Deletes from a run what its rules do not ask for; stopped anywhere, the next sweep finishes."""

import contextlib
import dataclasses
import fcntl
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from ft_ckpt.checkpoint import catalog, recovery
from ft_ckpt.checkpoint.delete import (
    STATE,
    Removal,
    drop,
    entries,
    guards,
    listed,
    settle,
    size_of,
    strip,
    unfinished,
    without_state,
)
from ft_ckpt.checkpoint.manifest import MANIFEST_NAME
from ft_ckpt.errors import CheckpointError, UnreadableError, listing
from ft_ckpt.retention import Held, Keep, Plan, newest, plan

_LOG = logging.getLogger("ft_ckpt")
_STAGE = re.compile(r"\.(?P<target>.+)\.ft_ckpt-stage-.+-\d+-[0-9a-f]{8}", re.DOTALL)


@dataclass(frozen=True)
class SweepReport:
    """What a sweep did, or a dry run would: `kept` with the reasons; what failed is left for the next one."""

    kept: Mapping[Path, tuple[str, ...]] = field(default_factory=dict)
    dropped: tuple[Path, ...] = ()
    stripped: tuple[Path, ...] = ()  # kept without their training state
    freed_bytes: int = 0
    left: tuple[Path, ...] = ()  # files of others in the folders of dropped checkpoints, which stay
    problems: tuple[str, ...] = ()


def survey(root: str | os.PathLike[str], protect: Iterable[str | os.PathLike[str]] = ()) -> list[Held]:
    """The checkpoints that stand in the folder `root` of a run, oldest first; a link is none, nor is `root` itself.

    Guarded are those in `protect`, pinned or leased ones, those that a link in `root` leads to, and those that a save
    is about to replace. Raises UnreadableError when a manifest, or `root`, cannot be read just now: rules that see only
    some of them could let the wrong ones go.
    """
    root = Path(root)
    links = {os.path.realpath(path): path.name for path in entries(root) if path.is_symlink()}
    asked = {os.path.realpath(path) for path in protect}
    listed = catalog.look(root)
    if listed.unreadable:
        raise UnreadableError(listing([str(error) for error in listed.unreadable.values()]))
    found = (info for info in listed.found if info.path != root and not info.path.is_symlink())
    return [held for info in found if (held := _held(info, links, asked)) is not None]


def sweep(
    root: str | os.PathLike[str],
    keep: Keep,
    *,
    run_id: str | None = None,
    protect: Iterable[str | os.PathLike[str]] = (),
    dry_run: bool = False,
) -> SweepReport:
    """Delete from the folder `root` what `keep` does not ask for (see `retain.plan`), and what earlier sweeps left.

    With `run_id` other runs' checkpoints stay; folders without our manifest always do. What the disk refuses is in the
    report's `problems` and nothing is raised for it; so is another sweep of the same folder, which is not waited for.
    """
    return _swept(Path(root), lambda: plan(survey(root, protect), keep, run_id), dry_run=dry_run)


def tidy(root: Path | None, keep: Keep | None, run_id: str, protect: tuple[Path, ...], newest_path: Path) -> None:
    """Delete what need not be kept, once a new checkpoint is there; trouble with it is warned of, and ends no run."""
    if root is None or keep is None:
        return
    try:
        problems = sweep(root, keep, run_id=run_id, protect=(newest_path, *protect)).problems
    except Exception as error:  # noqa: BLE001 - the checkpoint is safe, and the next sweep tries again
        problems = (str(error),)
    for problem in problems:
        warnings.warn(f"{root}: an old checkpoint was not deleted: {problem}", stacklevel=4)


def make_room(
    root: str | os.PathLike[str],
    keep: Keep,
    step: int | None,
    *,
    run_id: str | None = None,
    protect: Iterable[str | os.PathLike[str]] = (),
) -> SweepReport:
    """Delete ahead of its save what `keep` would not ask for once there is a checkpoint of `step`.

    The newest valid ones of today stay nevertheless: the new one is not there yet. Reports as `sweep` does.
    """

    def as_if_saved() -> Plan:
        held = survey(root, protect)
        vital = newest(each for each in held if run_id is None or each.run_id == run_id)
        if not vital:
            return plan(held, keep, run_id)
        held = [_guarded(each, vital.get(each.path)) for each in held]
        now = datetime.now(timezone.utc).timestamp()
        number = 1 + max((each.number for each in held), default=0)
        coming = Held(path=Path(root, "\0"), step=step, created=now, has_state=True, run_id=run_id, number=number)
        planned = plan([*held, coming], keep, run_id)
        kept = {path: why for path, why in planned.keep.items() if path != coming.path}
        return dataclasses.replace(planned, keep=kept)

    return _swept(Path(root), as_if_saved)


def clear(root: str | os.PathLike[str]) -> tuple[str, ...]:
    """Settle what saves into `root` left when their process died (see `recovery.recover`); says what was done.

    For the one who writes there, before it does: nobody else may be saving into `root`. Raises TargetError.
    """
    root = Path(root)
    named = (_STAGE.fullmatch(path.name) for path in entries(root))
    targets = sorted({match["target"] for match in named if match})
    # The run's own folder too: a model saved into it is put in place by an exchange, and what is below it comes after.
    return tuple(line for target in (root, *(root / name for name in targets)) for line in recovery.recover(target))


def _held(info: catalog.CheckpointInfo, links: Mapping[str, str], asked: set[str]) -> Held | None:
    path, manifest = info.path, info.manifest
    real = os.path.realpath(path)
    try:
        valid = catalog.verify(path, deep=False).ok
    except CheckpointError:
        if not (path / MANIFEST_NAME).exists():  # deleted since it was discovered
            return None
        valid = False
    why = [f"linked from {links[real]}"] if real in links else []
    why += ["protected by the caller"] if real in asked else []
    kinds = {part.kind for part in manifest.parts}
    return Held(
        path=path,
        step=manifest.step,
        created=_seconds(path, manifest.created),
        number=manifest.number or 0,
        metrics=manifest.metrics,
        guards=(*why, *guards(path)),
        valid=valid,
        has_state=STATE in kinds,
        has_weights=kinds != {STATE},
        run_id=None if manifest.export else manifest.run_id,
    )


def _guarded(each: Held, why: str | None) -> Held:
    return each if why is None else dataclasses.replace(each, guards=(*each.guards, why))


def _seconds(path: Path, created: str) -> float:
    """Unix time of an ISO 8601 text, UTC where it names no zone; of the manifest's last change when it is none."""
    try:
        then = datetime.fromisoformat(created.replace("Z", "+00:00"))
    except ValueError:
        with contextlib.suppress(OSError):
            return (path / MANIFEST_NAME).stat().st_mtime
        return 0.0
    return (then if then.tzinfo else then.replace(tzinfo=timezone.utc)).timestamp()


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[bool]:
    """Whether this is the only sweep of `root`: one that drops and one that strips could bring a checkpoint back."""
    handle = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks on folders, such as NFS: there must be one sweeper then
            pass
        yield True
    finally:
        os.close(handle)


def _swept(root: Path, planned: Callable[[], Plan], *, dry_run: bool = False) -> SweepReport:
    try:
        if dry_run:
            return _forecast(planned())
        with _alone(root) as alone:
            if not alone:
                return SweepReport(problems=(f"{root}: another sweep is at work there; nothing was deleted",))
            done = [_tried(settle, path) for path in unfinished(root)]
            what = planned()
            done += [_tried(drop, path) for path in what.drop] + [_tried(strip, path) for path in what.strip]
    except (CheckpointError, OSError) as error:
        return SweepReport(problems=(f"{root}: cannot be looked through ({error}); nothing was deleted",))
    report = _report(what, done)
    for path in report.dropped:
        _LOG.info("deleted %s", path.name)
    for path in report.stripped:
        _LOG.info("deleted the training state of %s", path.name)
    return report


def _tried(step: Callable[[Path], Removal], path: Path) -> Removal | str:
    try:
        return step(path)
    except (CheckpointError, OSError) as error:
        return f"{path}: not deleted, or not all of it ({error}); the next sweep goes on"


def _report(what: Plan, done: list[Removal | str]) -> SweepReport:
    removals = [each for each in done if isinstance(each, Removal)]
    return SweepReport(
        kept={**what.keep, **{each.path: each.why for each in removals if each.why}},
        dropped=tuple(each.path for each in removals if each.dropped),
        stripped=tuple(each.path for each in removals if each.stripped),
        freed_bytes=sum(each.freed_bytes for each in removals),
        left=tuple(file for each in removals for file in each.left),
        problems=tuple(each for each in done if isinstance(each, str)),
    )


def _forecast(what: Plan) -> SweepReport:
    sizes = [size_of(path, listed(path / MANIFEST_NAME)) for path in what.drop]
    for path in what.strip:
        manifest = catalog.read_manifest(path)
        rest = {file.path for file in without_state(manifest).files}
        sizes.append(size_of(path, {file.path for file in manifest.files} - rest))
    return SweepReport(what.keep, what.drop, what.strip, sum(sizes))
