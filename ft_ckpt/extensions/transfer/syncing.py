"""Copies the checkpoints of a run that another place lacks, newest first; uploads of staged runs.

An interrupted sync thus has copied the newest ones. The run may write while it is copied.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from ft_ckpt.checkpoint import (
    CheckpointInfo,
    Listing,
    Manifest,
    list_checkpoints,
    load_manifest,
    open_checkpoint,
    set_aside,
    settle_staging_at,
    verify,
    why_no_checkpoint,
    without_state,
)
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    CorruptError,
    NameTakenError,
    NotACheckpointError,
    TargetError,
    UnreadableError,
    listing,
)
from ft_ckpt.extensions.transfer.buckets import push_report
from ft_ckpt.extensions.transfer.copies import (
    CopyReport,
    content_identity,
    copy_open,
    is_same_copy,
    is_there,
)
from ft_ckpt.extensions.transfer.outgoing import PushReport
from ft_ckpt.extensions.transfer.pushing import PendingPush
from ft_ckpt.jobs import JobQueue
from ft_ckpt.messages import LOG, warn
from ft_ckpt.retention import Keep
from ft_ckpt.runs import PruneReport, prune_after_save, recover_all, remove_checkpoints
from ft_ckpt.storage import Place, folder_of, location_name, make_like, open_place


@dataclass(frozen=True)
class SyncReport:
    """The outcome of `sync`, or of its dry run.

    Checkpoints are named as in the folder of the run.
    """

    missing: tuple[str, ...]
    """Checkpoints that the destination lacked or had in part, or from an older save of the same
    name; newest first.
    """
    present: tuple[str, ...]
    """Checkpoints that the destination had."""
    copied: tuple[CopyReport, ...]
    """Reports of the missing ones that were copied; none in a dry run."""
    dropped: tuple[str, ...]
    """Checkpoints deleted at the destination, because the source has deleted them."""
    stripped: tuple[str, ...]
    """Checkpoints whose training state was deleted at the destination, because the source has
    deleted it.
    """
    kept: Mapping[str, tuple[str, ...]]
    """Checkpoints that were not deleted, with the reasons: a pin, a lease."""
    problems: tuple[str, ...]
    """Checkpoints that were not copied or deleted, with the reasons."""

    @property
    def sent_bytes(self) -> int:
        """Bytes read from the source and written to the destination."""
        return sum(report.sent_bytes for report in self.copied)


@dataclass
class _SyncPlan:
    """Checkpoints to copy, strip and delete."""

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
    """Copy the checkpoints of the run `source` that `destination` lacks, newest first; both are
    paths or URLs.

    Each is copied as by `copy`: compared by digest, visible when it is complete; files that another
    checkpoint there has are not sent again. A checkpoint that its run has saved again under the
    same name is replaced. A checkpoint of another run is never replaced and is reported as a
    problem. The run may go on: checkpoints are leased while they are copied.

    Nothing is deleted unless `delete` is True. Then checkpoints of the same runs, and training
    states, that the source no longer has are deleted at the destination, too; weights saved beside
    a run's checkpoints stay, and so do pinned checkpoints and those in use. Nothing is deleted if
    there was any problem.

    Raises NotACheckpointError when `source` has no checkpoints, ConfigError when it is a
    checkpoint, UnreadableError when either cannot be listed. Failures of single checkpoints are
    among the report's `problems`.
    """
    start, goal = open_place(source), open_place(destination)
    here = list_checkpoints(start)
    _refuse_no_run(start, here)
    plan = _plan_sync(here, list_checkpoints(goal), goal, delete=delete)
    missing, present = (tuple(info.name for info in infos) for infos in (plan.copy, plan.present))
    if dry_run:
        return SyncReport(
            missing, present, (), tuple(plan.drop), tuple(plan.strip), {}, tuple(plan.problems)
        )
    make_like(goal.folder, start.folder)
    copied = _copy_missing(plan, goal)
    _settle_present(plan, goal)
    removed = PruneReport()
    if delete and not plan.problems:
        drop, strip = (
            [_place_in(goal, name).location for name in names] for names in (plan.drop, plan.strip)
        )
        removed = remove_checkpoints(goal, drop, strip)
    return SyncReport(
        missing,
        present,
        tuple(copied),
        tuple(map(location_name, removed.dropped)),
        tuple(map(location_name, removed.stripped)),
        {location_name(path): why for path, why in removed.kept.items()},
        (*plan.problems, *removed.problems),
    )


def _refuse_no_run(start: Place, here: Listing) -> None:
    if any(info.store.identity == start.folder.identity for info in here.found):
        raise ConfigError(
            f"{start}: a checkpoint, expected the folder of a run; `ft-ckpt cp` copies one"
        )
    if not (here.found or here.damaged or here.unreadable):
        raise NotACheckpointError(why_no_checkpoint(start))


def _plan_sync(here: Listing, there: Listing, goal: Place, *, delete: bool) -> _SyncPlan:
    """Compare two listings."""
    plan = _SyncPlan(
        problems=[
            f"{error}; not copied" for error in (*here.damaged.values(), *here.unreadable.values())
        ]
    )
    known, names = {info.name: info for info in there.found}, {info.name for info in here.found}
    unread = {location_name(path): error for path, error in there.unreadable.items()}
    plan.problems += [f"{error}; not replaced" for name, error in unread.items() if name in names]
    for info in reversed([info for info in here.found if info.name not in unread]):
        _plan_one(plan, info, known.get(info.name), goal, delete=delete)
    if delete:
        # An export may lie in any folder, so only other checkpoints with a run id show which runs
        # are stored here.
        runs = {info.manifest.run_id for info in here.found if not info.manifest.export} - {None}
        extra = [
            info for info in there.found if info.name not in names and not info.manifest.export
        ]
        plan.drop += [info.name for info in extra if info.manifest.run_id in runs]
    return plan


def _plan_one(
    plan: _SyncPlan,
    info: CheckpointInfo,
    found: CheckpointInfo | None,
    goal: Place,
    *,
    delete: bool,
) -> None:
    """Plan one checkpoint of the source; `found` is the checkpoint of its name at the
    destination.
    """
    run_id = info.manifest.run_id
    saved_again = found is not None and run_id is not None and run_id == found.manifest.run_id
    if found is None or (saved_again and info.manifest.created > found.manifest.created):
        plan.copy.append(info)
    elif is_same_copy(found.manifest, info.manifest):
        (plan.present if is_there(_place_in(goal, info.name), info.manifest) else plan.copy).append(
            info
        )
    elif is_same_copy(without_state(found.manifest), info.manifest):
        plan.present.append(info)
        plan.strip += [info.name] if delete else []
    else:
        plan.problems.append(
            f"{found.path}: another checkpoint than {info.path} (run {found.manifest.run_id}, "
            f"saved {found.manifest.created}); not replaced, give another destination"
        )


def _copy_missing(plan: _SyncPlan, goal: Place) -> list[CopyReport]:
    """Copy the missing checkpoints and add problems to the plan.

    Stops at an I/O error, skips a damaged checkpoint.
    """
    done = []
    for info in plan.copy:
        found = _copy_or_error(info, _place_in(goal, info.name))
        if isinstance(found, CopyReport):
            done.append(found)
        elif not isinstance(found, NotACheckpointError):  # otherwise its run has deleted it
            plan.problems.append(f"{info.path}: not copied: {found}")
            if isinstance(found, OSError) and not isinstance(found, NameTakenError):
                break
    return done


def _copy_or_error(info: CheckpointInfo, goal: Place) -> CopyReport | Exception:
    try:
        with open_checkpoint(info.place) as held:
            return copy_open(held, goal, held.manifest, overwrite=True)
    except (CheckpointError, OSError) as error:
        return error


def _settle_present(plan: _SyncPlan, goal: Place) -> None:
    """Delete leftovers of an earlier sync that was killed after its last commit."""
    if not goal.is_local:
        recover_all(goal)  # from one listing
        return
    for info in plan.present:
        settle_staging_at(_place_in(goal, info.name))


def _place_in(goal: Place, name: str) -> Place:
    return Place(goal.folder, name)


LONGEST_EXIT_SECONDS = 600.0  # a process that exits waits this long for uploads
_GIVING_UP_SECONDS = 10.0  # for an upload to notice that it is cancelled


@dataclass(frozen=True)
class UploadTerms:
    """The run whose checkpoints are uploaded, and its retention rules."""

    run_id: str
    own_ids: Collection[str]  # runs whose checkpoints of the same name are replaced
    keep: Keep | None = None
    protect: tuple[Place, ...] = ()


@dataclass
class _Round:
    """One pass over the staging folder, newest checkpoint first.

    Checkpoints are identified by content digest.
    """

    terms: UploadTerms
    seen: set[str] = field(default_factory=set)
    there: set[str] = field(default_factory=set)  # in the bucket
    problems: dict[str, Exception] = field(default_factory=dict)  # by name
    # by name, of checkpoints that were set aside
    damaged: dict[str, Exception] = field(default_factory=dict)
    ended_by: Exception | None = None  # an error that would hit the other checkpoints, too


class RunUploads:
    """The uploads of one run, on rank 0."""

    def __init__(self, staging: Place, bucket: Place, give_way: Callable[[], object]) -> None:
        self.staging, self.bucket = staging, bucket
        self.give_way = give_way  # called first in each thread
        self.sweeping = threading.Lock()  # held while checkpoints of the staging folder are deleted
        self.problems: dict[str, Exception] = {}  # of the last round
        self._queue = JobQueue(self._end_with_process)
        self._change = threading.Lock()
        self._waiting: list[PendingPush] = []
        self._terms: UploadTerms | None = None
        self._known_there: set[str] = set()  # found in the bucket by any round
        self._is_queued = False  # a round that has not begun will find new checkpoints
        self._has_text = False  # remaining checkpoints were reported since the last request
        self._is_over = threading.Event()

    def takes(self, checkpoint: Place) -> bool:
        """Whether a checkpoint lies in the staging folder."""
        return checkpoint.beside.identity == self.staging.folder.identity

    def begin_upload(self, checkpoint: Place, terms: UploadTerms) -> PendingPush:
        """Queue the upload of a checkpoint of the staging folder.

        The handle raises NotACheckpointError if `terms.keep` deletes the checkpoint before it is
        uploaded.
        """
        url = _place_in(self.bucket, checkpoint.basename).folder.url
        push = PendingPush(path=checkpoint.location, future=Future(), url=url)
        with self._change:
            self._waiting = [*(each for each in self._waiting if not each.done), push]
        self.begin_round(terms)
        return push

    def begin_round(self, terms: UploadTerms) -> None:
        """Start uploading all checkpoints that the bucket lacks."""
        with self._change:
            self._terms, self._has_text = terms, False
            if self._is_queued:
                return
            self._is_queued = True
        self._queue.start("ft_ckpt-uploads", self._do_round)

    def finish(self, seconds: float | None = None) -> str:
        """Wait for all uploads, at most `seconds`, and retry failed ones once.

        Returns a description of the rest.

        After `seconds` the current upload is cancelled. The description is "" if nothing is left.
        """
        until = None if seconds is None else time.monotonic() + seconds
        try:
            self._wait_until(until)
            if self.problems and self._terms is not None and not self._is_over.is_set():
                self.begin_round(self._terms)
                self._wait_until(until)
        except BaseException:  # an interrupt: do not wait at exit either
            self._is_over.set()
            self.warn_of_left()
            raise
        self._has_text = True
        return self._describe_left()

    def warn_of_left(self) -> None:
        """Warn of checkpoints that are not uploaded, unless `finish` has reported them."""
        if not self._has_text and (left := self._describe_left()):
            warn(left, stacklevel=3)

    def _describe_left(self) -> str:
        waiting = [location_name(push.path) for push in self._waiting if not push.done]
        if not (waiting or self.problems) and self._queue.join(0):
            return ""
        text = (
            _describe_problems(self.problems)
            or f"{listing(waiting, ', ') or 'something'}: not uploaded yet"
        )
        return (
            f"{self.bucket}: {text}; kept in {self.staging}, from where the next start uploads it"
        )

    def _wait_until(self, until: float | None) -> None:
        """Wait for the thread until `until`, then cancel its upload."""
        if not self._queue.join(0):
            LOG.info("waiting until all of %s is uploaded to %s", self.staging, self.bucket)
        if not self._queue.join(None if until is None else max(0.0, until - time.monotonic())):
            self._is_over.set()
            self._queue.join(_GIVING_UP_SECONDS)

    def _end_with_process(self) -> None:
        if (
            not self._is_over.is_set()
            and not self._queue.join(0)
            and (left := self.finish(LONGEST_EXIT_SECONDS))
        ):
            warn(left, stacklevel=2)

    def _do_round(self) -> None:
        self.give_way()
        with self._change:
            asked = [push for push in self._waiting if not push.done]
            self._is_queued, terms = False, self._terms
        if terms is None:
            return
        one = _Round(terms)
        try:
            self._heed_end()
            unread = list_checkpoints(self.staging).unreadable
            one.problems.update((location_name(path), error) for path, error in unread.items())
            while one.ended_by is None and (infos := self._listed_without(one.seen)):
                self._bring_one(infos[0], one)
        except Exception as error:  # noqa: BLE001 - raised from the handles
            one.ended_by = error
        self._known_there |= one.there
        self.problems = self._problems_after(one)
        try:
            if self.problems and not self._is_over.is_set():
                text = _describe_problems(self.problems)
                warn(
                    f"{self.bucket}: {text}; kept in {self.staging}, and tried "
                    "again with the next save",
                    stacklevel=2,
                )
        finally:
            self._settle_rest(asked, one)

    def _problems_after(self, one: _Round) -> dict[str, Exception]:
        """The reasons why checkpoints are not in the bucket, by name, newest first."""
        if one.ended_by is None:
            return one.problems
        with suppress(CheckpointError, OSError):
            missing = self._listed_without(self._known_there)
            return {info.name: one.problems.get(info.name, one.ended_by) for info in missing}
        return {self.staging.basename: one.ended_by}

    def _listed_without(self, known: Collection[str]) -> list[CheckpointInfo]:
        """The checkpoints now in the staging folder, newest first, without those that are
        `known`.
        """
        infos = reversed(list_checkpoints(self.staging).found)
        return [info for info in infos if content_identity(info.manifest) not in known]

    def _bring_one(self, info: CheckpointInfo, one: _Round) -> None:
        """Upload a checkpoint if the bucket lacks it, and prune both sides."""
        identity, goal = content_identity(info.manifest), _place_in(self.bucket, info.name)
        one.seen.add(identity)
        try:
            report = self._upload_missing(info, goal, one.terms)
        except NotACheckpointError:  # deleted by retention meanwhile
            return
        except (CheckpointError, OSError) as error:
            if isinstance(error, CorruptError) and self._set_aside(info, error):
                one.damaged[info.name] = error
                return
            one.problems[info.name] = error
            is_of_this = not isinstance(error, OSError) or isinstance(error, NameTakenError)
            one.ended_by = None if is_of_this else error
            return
        one.there.add(identity)
        terms = one.terms
        if report is not None:
            self._settle(info, report)
            if report.is_new:
                prune_after_save(self.bucket, terms.keep, terms.run_id, terms.protect)
        with self.sweeping:
            rest = tuple(each.place for each in self._listed_without(one.there))
            prune_after_save(self.staging, Keep(last=1), terms.run_id, rest)

    def _set_aside(self, info: CheckpointInfo, error: CorruptError) -> bool:
        """Rename a damaged checkpoint to a hidden name. Returns False if it is whole, or in use."""
        with suppress(CheckpointError, OSError):
            if not isinstance(error, UnreadableError) and not verify(info.place).ok:
                with self.sweeping:
                    aside = set_aside(folder_of(info.store), info.manifest)
                if aside is not None:
                    text = (
                        f"{info.path}: damaged and not uploaded ({error}); set aside as "
                        f"{aside}, delete it by hand"
                    )
                    warn(text, stacklevel=2)
                    return True
        return False

    def _upload_missing(
        self, info: CheckpointInfo, goal: Place, terms: UploadTerms
    ) -> PushReport | None:
        """Upload a checkpoint; None if the bucket has a later save, or this one with or without its
        training state.
        """
        found = _manifest_in(goal)
        if found is not None and _is_superseded(found, info.manifest, terms):
            return None
        if found is not None and not _is_own_save(found, info.manifest, terms):
            raise NameTakenError(
                f"{goal}: belongs to another run, {str(found.run_id)[:6]}; not replaced, use "
                "another directory for this run"
            )
        with open_checkpoint(info.place) as held:
            report = copy_open(
                held,
                goal,
                held.manifest,
                overwrite=found is not None,
                shown=False,
                heed=self._heed_end,
            )
            return push_report(held, report)

    def _heed_end(self) -> None:
        if self._is_over.is_set():
            raise TargetError(f"{self.bucket}: broken off, as the process ends")

    def _settle(self, info: CheckpointInfo, report: PushReport) -> None:
        for push in self._waiting:
            if location_name(push.path) == info.name and not push.done:
                push.future.set_result(report)

    def _settle_rest(self, asked: list[PendingPush], one: _Round) -> None:
        """Fail the handles that waited when the round began and were not uploaded."""
        for push in asked:
            if not push.done:
                gone = NotACheckpointError(
                    f"{push.path}: deleted here, as `keep` says, before it was uploaded"
                )
                found = {**one.problems, **one.damaged}.get(location_name(push.path))
                push.future.set_exception(found or one.ended_by or gone)


def _describe_problems(problems: Mapping[str, Exception]) -> str:
    whys = dict.fromkeys(str(error) for error in problems.values())
    names = {why: [name for name, error in problems.items() if str(error) == why] for why in whys}
    return listing([f"{listing(names[why], ', ')}: not uploaded: {why}" for why in whys])


def _manifest_in(goal: Place) -> Manifest | None:
    try:
        return load_manifest(goal.folder)
    except NotACheckpointError:
        return None


def _is_own_save(found: Manifest, manifest: Manifest, terms: UploadTerms) -> bool:
    """Whether the checkpoint `found` in the bucket is of the same run, or of a run that this one
    resumed from.
    """
    return is_same_copy(found, manifest) or (
        found.run_id is not None and found.run_id in {manifest.run_id, *terms.own_ids}
    )


def _is_superseded(found: Manifest, manifest: Manifest, terms: UploadTerms) -> bool:
    """Whether the checkpoint `found` in the bucket is a later save, or this one with or without its
    training state.
    """
    if is_same_copy(found, manifest) or not _is_own_save(found, manifest, terms):
        return False
    if is_same_copy(found, without_state(manifest)) or is_same_copy(without_state(found), manifest):
        return True
    if found.run_id == manifest.run_id:  # clocks may differ: with equal times the local one wins
        return found.created > manifest.created
    return manifest.run_id != terms.run_id  # left by a run that this one was resumed from
