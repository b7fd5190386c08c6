"""Uploads of the checkpoints in an upload folder in the background, after each save."""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.catalog import CheckpointInfo, list_checkpoints
from ft_ckpt.checkpoint.checks import verify
from ft_ckpt.checkpoint.commit import set_aside
from ft_ckpt.checkpoint.manifest import Manifest, content_identity, load_manifest
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    NameTakenError,
    NotACheckpointError,
    TargetError,
    UnreadableError,
    listing,
)
from ft_ckpt.extensions.transfer.copies import PushReport, Relation, copy_open, relation_of
from ft_ckpt.extensions.transfer.endpoints import push_report
from ft_ckpt.extensions.transfer.sending.pushing import PendingPush
from ft_ckpt.jobs import JobQueue
from ft_ckpt.messages import LOG, warn
from ft_ckpt.retention import Keep
from ft_ckpt.runs.folder import prune_after_save
from ft_ckpt.runs.saves import UploadTerms
from ft_ckpt.storage.local import folder_of
from ft_ckpt.storage.places import Place, location_name

_MAX_EXIT_SECONDS = 600.0  # a process that exits waits this long for uploads
_CANCEL_SECONDS = 10.0  # wait so long for a cancelled upload to end
# the bucket has a later save, or this one with or without its training state
_SUPERSEDING = {Relation.NEWER, Relation.WITH_STATE, Relation.WITHOUT_STATE}


@dataclass
class _Round:
    """One pass over the upload folder, newest checkpoint first.

    Checkpoints are identified by content digest.
    """

    terms: UploadTerms
    seen: set[str] = field(default_factory=set)
    uploaded: set[str] = field(default_factory=set)  # now, or before
    problems: dict[str, Exception] = field(default_factory=dict)  # by name
    # by name, of checkpoints that were set aside
    damaged: dict[str, Exception] = field(default_factory=dict)
    ended_by: Exception | None = None  # an error that uploads of other checkpoints would raise, too


class RunUploads:
    """The uploads of one run, on rank 0."""

    def __init__(self, upload_folder: Place, bucket: Place, give_way: Callable[[], object]) -> None:
        self.upload_folder, self.bucket = upload_folder, bucket
        self.give_way = give_way  # called first in each thread
        # held while checkpoints of the upload folder are deleted
        self.deletion_lock = threading.Lock()
        self.problems: dict[str, Exception] = {}  # of the last round
        self._queue = JobQueue(self._end_with_process)
        self._change = threading.Lock()
        self._waiting: list[PendingPush] = []
        self._terms: UploadTerms | None = None
        self._uploaded: set[str] = set()  # by any round
        self._is_queued = False  # a round that has not begun will find new checkpoints
        self._has_text = False  # `finish` has reported the rest since the last request
        self._is_over = threading.Event()

    def covers(self, checkpoint: Place) -> bool:
        """Check whether a checkpoint lies in the upload folder."""
        return checkpoint.beside.identity == self.upload_folder.folder.identity

    def begin_upload(self, checkpoint: Place, terms: UploadTerms) -> PendingPush:
        """Queue the upload of a checkpoint of the upload folder.

        The handle raises NotACheckpointError if `terms.keep` deletes the checkpoint before it is
        uploaded.
        """
        url = self._place_in_bucket(checkpoint.basename).folder.url
        push = PendingPush(path=checkpoint.location, future=Future(), url=url)
        with self._change:
            self._waiting = [*_unfinished(self._waiting), push]
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

        After `seconds` the current upload is cancelled. Returns a description of the checkpoints
        that are not uploaded, "" if there are none.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            self._wait_until(deadline)
            if self.problems and self._terms is not None and not self._is_over.is_set():
                self.begin_round(self._terms)
                self._wait_until(deadline)
        except BaseException:  # an interrupt: do not wait at exit either
            self._is_over.set()
            self.warn_of_left()
            raise
        self._has_text = True
        return self._describe_rest()

    def warn_of_left(self) -> None:
        """Warn of checkpoints that are not uploaded, unless `finish` has reported them."""
        rest = "" if self._has_text else self._describe_rest()
        if rest:
            warn(rest)

    def _place_in_bucket(self, name: str) -> Place:
        return Place(self.bucket.folder, name)

    def _describe_rest(self) -> str:
        waiting = [location_name(push.path) for push in _unfinished(self._waiting)]
        if not waiting and not self.problems and self._queue.join(0):
            return ""
        text = _describe_problems(self.problems)
        if not text:
            text = f"{listing(waiting, ', ') or 'something'}: not uploaded yet"
        return (
            f"{self.bucket}: {text}; kept in {self.upload_folder}, from where the next start "
            "uploads it"
        )

    def _wait_until(self, deadline: float | None) -> None:
        """Wait for the thread until `deadline`, then cancel its upload."""
        if not self._queue.join(0):
            LOG.info("waiting until all of %s is uploaded to %s", self.upload_folder, self.bucket)
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._queue.join(seconds):
            self._is_over.set()
            self._queue.join(_CANCEL_SECONDS)

    def _end_with_process(self) -> None:
        if self._is_over.is_set() or self._queue.join(0):
            return
        rest = self.finish(_MAX_EXIT_SECONDS)
        if rest:
            warn(rest)

    def _do_round(self) -> None:
        self.give_way()
        with self._change:
            waiting = _unfinished(self._waiting)
            self._is_queued, terms = False, self._terms
        if terms is None:
            return
        current = _Round(terms)
        try:
            self._stop_if_over()
            for path, error in list_checkpoints(self.upload_folder).unreadable.items():
                current.problems[location_name(path)] = error
            self._upload_all(current)
        except Exception as error:  # noqa: BLE001 - raised from the handles
            current.ended_by = error
        self._uploaded |= current.uploaded
        self.problems = self._problems_after(current)
        try:
            if self.problems and not self._is_over.is_set():
                text = _describe_problems(self.problems)
                warn(
                    f"{self.bucket}: {text}; kept in {self.upload_folder}, and tried "
                    "again with the next save",
                )
        finally:
            _fail_rest(waiting, current)

    def _upload_all(self, current: _Round) -> None:
        """Upload the newest checkpoint first; a save may add one meanwhile."""
        while current.ended_by is None:
            infos = self._listed_without(current.seen)
            if not infos:
                return
            self._upload_one(infos[0], current)

    def _problems_after(self, current: _Round) -> dict[str, Exception]:
        """Return the reasons why checkpoints are not in the bucket, by name, newest first."""
        ended_by = current.ended_by
        if ended_by is None:
            return current.problems
        with suppress(CheckpointError, OSError):
            missing = self._listed_without(self._uploaded)
            return {info.name: current.problems.get(info.name, ended_by) for info in missing}
        return {self.upload_folder.basename: ended_by}

    def _listed_without(self, identities: Collection[str]) -> list[CheckpointInfo]:
        """List the upload folder, newest first, without checkpoints of these content digests."""
        infos = reversed(list_checkpoints(self.upload_folder).checkpoints)
        return [info for info in infos if content_identity(info.manifest) not in identities]

    def _upload_one(self, info: CheckpointInfo, current: _Round) -> None:
        """Upload a checkpoint if the bucket lacks it, and prune both sides."""
        identity = content_identity(info.manifest)
        current.seen.add(identity)
        terms = current.terms
        try:
            report = self._upload_missing(info, self._place_in_bucket(info.name), terms)
        except NotACheckpointError:  # deleted by retention meanwhile
            return
        except (CheckpointError, OSError) as error:
            self._note_failure(info, error, current)
            return
        current.uploaded.add(identity)
        if report is not None:
            self._finish_handles(info, report)
            if report.is_new:
                prune_after_save(self.bucket, terms.keep, terms.run_id, terms.protect)
        with self.deletion_lock:
            missing = tuple(other.place for other in self._listed_without(current.uploaded))
            prune_after_save(self.upload_folder, Keep(last=1), terms.run_id, missing)

    def _note_failure(self, info: CheckpointInfo, error: Exception, current: _Round) -> None:
        if isinstance(error, CorruptError) and self._set_aside(info, error):
            current.damaged[info.name] = error
            return
        current.problems[info.name] = error
        if isinstance(error, OSError) and not isinstance(error, NameTakenError):
            current.ended_by = error

    def _set_aside(self, info: CheckpointInfo, error: CorruptError) -> bool:
        """Rename a damaged checkpoint to a hidden name; return False if it is intact or in use."""
        with suppress(CheckpointError, OSError):
            if isinstance(error, UnreadableError) or verify(info.place).ok:
                return False
            with self.deletion_lock:
                aside = set_aside(folder_of(info.store), info.manifest)
            if aside is not None:
                text = (
                    f"{info.path}: damaged and not uploaded ({error}); set aside as "
                    f"{aside}, delete it by hand"
                )
                warn(text)
                return True
        return False

    def _upload_missing(
        self, info: CheckpointInfo, goal: Place, terms: UploadTerms
    ) -> PushReport | None:
        """Upload a checkpoint, and return the report.

        Returns None if the bucket has a later save, or this save with or without its training
        state.
        """
        manifest, stored = info.manifest, _manifest_in(goal)
        relation = relation_of(stored, manifest)
        if relation in _SUPERSEDING:
            return None
        if stored is not None and relation is Relation.OTHER:
            if stored.run_id is None or stored.run_id not in {manifest.run_id, *terms.own_ids}:
                raise NameTakenError(
                    f"{goal}: belongs to another run, {str(stored.run_id)[:6]}; not replaced, use "
                    "another directory for this run"
                )
            # left by a run that this one was resumed from
            if stored.run_id != manifest.run_id and manifest.run_id != terms.run_id:
                return None
        with open_checkpoint(info.place) as checkpoint:
            report = copy_open(
                checkpoint,
                goal,
                checkpoint.manifest,
                overwrite=stored is not None,
                shown=False,
                check_abort=self._stop_if_over,
            )
            return push_report(checkpoint, report)

    def _stop_if_over(self) -> None:
        if self._is_over.is_set():
            raise TargetError(f"{self.bucket}: broken off, as the process ends")

    def _finish_handles(self, info: CheckpointInfo, report: PushReport) -> None:
        for push in _unfinished(self._waiting):
            if location_name(push.path) == info.name:
                push.future.set_result(report)


def _unfinished(pushes: Collection[PendingPush]) -> list[PendingPush]:
    return [push for push in pushes if not push.done]


def _fail_rest(waiting: Collection[PendingPush], current: _Round) -> None:
    """Fail the handles that waited when the round began and were not uploaded."""
    errors = {**current.problems, **current.damaged}
    for push in _unfinished(waiting):
        deleted = NotACheckpointError(
            f"{push.path}: deleted here, as `keep` says, before it was uploaded"
        )
        error = errors.get(location_name(push.path))
        push.future.set_exception(error or current.ended_by or deleted)


def _describe_problems(problems: Mapping[str, Exception]) -> str:
    names: dict[str, list[str]] = {}  # by the text of the error
    for name, error in problems.items():
        names.setdefault(str(error), []).append(name)
    return listing([f"{listing(names[text], ', ')}: not uploaded: {text}" for text in names])


def _manifest_in(goal: Place) -> Manifest | None:
    try:
        return load_manifest(goal.folder)
    except NotACheckpointError:
        return None
