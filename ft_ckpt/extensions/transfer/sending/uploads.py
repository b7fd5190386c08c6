"""Uploads the checkpoints of a run to a bucket in the background, after each save.

A run saves its checkpoints into the upload folder, which is on a disk of this machine. A round is
one pass over this folder: it uploads every checkpoint that the bucket lacks, the newest first.
Then the retention rules delete older checkpoints in the bucket and in the upload folder.
"""

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
_CANCEL_SECONDS = 10.0  # how long to wait for a cancelled upload to end
# In these cases nothing is uploaded: the bucket has a later save, or the same save with or without
# its training state.
_SUPERSEDING = {Relation.NEWER, Relation.WITH_STATE, Relation.WITHOUT_STATE}


@dataclass
class _Round:
    """The state of one pass over the upload folder.

    Attributes:
        terms: The run, and its retention rules.
        seen: The content digests of the checkpoints that the round has come to.
        uploaded: The content digests of those that the bucket has.
        problems: Errors of checkpoints that were not uploaded, by name.
        damaged: Errors of damaged checkpoints, which were renamed to a hidden name, by name.
        ended_by: The error that ended the round, because other uploads would raise it as well.
    """

    terms: UploadTerms
    seen: set[str] = field(default_factory=set)
    uploaded: set[str] = field(default_factory=set)
    problems: dict[str, Exception] = field(default_factory=dict)
    damaged: dict[str, Exception] = field(default_factory=dict)
    ended_by: Exception | None = None


class RunUploads:
    """The uploads of one run, on rank 0."""

    def __init__(self, upload_folder: Place, bucket: Place, give_way: Callable[[], object]) -> None:
        self.upload_folder = upload_folder
        self.bucket = bucket

        # Called first in each thread, so that uploads do not slow the training down.
        self.give_way = give_way

        # Held while checkpoints in the upload folder are deleted.
        self.deletion_lock = threading.Lock()

        # The problems of the last round, by name of the checkpoint.
        self.problems: dict[str, Exception] = {}
        self._queue = JobQueue(self._end_with_process)
        self._change = threading.Lock()
        self._waiting: list[PendingPush] = []
        self._terms: UploadTerms | None = None

        # The content digests of checkpoints that any round has uploaded.
        self._uploaded: set[str] = set()

        # Whether a round is queued that has not begun, and so will find new checkpoints.
        self._is_queued = False

        # Whether `finish` has described what is left since the last request.
        self._is_rest_described = False
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
            self._terms = terms
            self._is_rest_described = False
            if self._is_queued:
                return
            self._is_queued = True
        self._queue.start("ft_ckpt-uploads", self._do_round)

    def finish(self, seconds: float | None = None) -> str:
        """Wait at most `seconds` for all uploads, and retry failed ones once.

        After `seconds` the current upload is cancelled. Returns a description of the checkpoints
        that are not uploaded, or "" if there are none.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            self._wait_until(deadline)
            if self.problems and self._terms is not None and not self._is_over.is_set():
                self.begin_round(self._terms)
                self._wait_until(deadline)
        except BaseException:
            # After an interrupt, the exit of the process must not wait either.
            self._is_over.set()
            self.warn_of_left()
            raise
        self._is_rest_described = True
        return self._describe_rest()

    def warn_of_left(self) -> None:
        """Warn of checkpoints that are not uploaded, unless `finish` has reported them."""
        if self._is_rest_described:
            return
        rest = self._describe_rest()
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
            self._is_queued = False
            terms = self._terms

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
        """Upload all checkpoints, always the newest next, because a save may add one."""
        while current.ended_by is None:
            infos = self._listed_without(current.seen)
            if not infos:
                return
            self._upload_one(infos[0], current)

    def _problems_after(self, current: _Round) -> dict[str, Exception]:
        """Return the error of each checkpoint that is not in the bucket, by name, newest first."""
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
        except NotACheckpointError:  # a retention rule has deleted it since it was listed
            return
        except (CheckpointError, OSError) as error:
            self._record_failure(info, error, current)
            return

        current.uploaded.add(identity)
        if report is not None:
            self._finish_handles(info, report)
            if report.is_new:
                prune_after_save(self.bucket, terms.keep, terms.run_id, terms.protect)

        with self.deletion_lock:
            missing = tuple(other.place for other in self._listed_without(current.uploaded))
            prune_after_save(self.upload_folder, Keep(last=1), terms.run_id, missing)

    def _record_failure(self, info: CheckpointInfo, error: Exception, current: _Round) -> None:
        """Record the error of an upload. An I/O error ends the round."""
        if isinstance(error, CorruptError) and self._set_aside(info, error):
            current.damaged[info.name] = error
            return
        current.problems[info.name] = error
        if isinstance(error, OSError) and not isinstance(error, NameTakenError):
            current.ended_by = error

    def _set_aside(self, info: CheckpointInfo, error: CorruptError) -> bool:
        """Rename a damaged checkpoint to a hidden name.

        Returns whether it was renamed. It is not if it is intact or in use.
        """
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
        self, info: CheckpointInfo, target: Place, terms: UploadTerms
    ) -> PushReport | None:
        """Upload a checkpoint, and return the report.

        Returns None if the bucket has a later save, or the same save with or without its training
        state. Raises NameTakenError if it has a checkpoint of another run.
        """
        manifest = info.manifest
        stored = _manifest_in(target)
        relation = relation_of(stored, manifest)
        if relation in _SUPERSEDING:
            return None
        if stored is not None and relation is Relation.OTHER:
            if stored.run_id is None or stored.run_id not in {manifest.run_id, *terms.own_ids}:
                raise NameTakenError(
                    f"{target}: belongs to another run, {str(stored.run_id)[:6]}; not replaced, "
                    "use another directory for this run"
                )
            # This run was resumed from the run that has left the checkpoint in the upload folder.
            if stored.run_id != manifest.run_id and manifest.run_id != terms.run_id:
                return None

        with open_checkpoint(info.place) as checkpoint:
            report = copy_open(
                checkpoint,
                target,
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


def _manifest_in(place: Place) -> Manifest | None:
    """Return the manifest at `place`, or None if there is no checkpoint."""
    try:
        return load_manifest(place.folder)
    except NotACheckpointError:
        return None
