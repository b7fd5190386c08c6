"""Saves a run: on schedule, at the end, and when the script requests it."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from ft_ckpt.checkpoint.manifest import CARD_NAME, load_manifest
from ft_ckpt.config import SaverConfig
from ft_ckpt.errors import CheckpointError, ConfigError, LeaseTakenError, TargetError, listing
from ft_ckpt.messages import warn
from ft_ckpt.model.parts import is_adapter_run
from ft_ckpt.ranks import Ranks, current_ranks, try_action
from ft_ckpt.runs.folder import (
    RunPlaces,
    prune_after_save,
    refuse_replacing,
    room_maker,
)
from ft_ckpt.runs.items import model_sources
from ft_ckpt.runs.loop import TrainingRun, exit_code
from ft_ckpt.runs.optimizers import differing_optimizer_settings
from ft_ckpt.runs.saves.directory_lease import DirectoryLease
from ft_ckpt.runs.saves.extension_parts import UploadTerms
from ft_ckpt.runs.saves.follow_up import FollowUp, FollowUps
from ft_ckpt.runs.saves.invited_writers import InvitedWriters
from ft_ckpt.runs.saves.resumed_publish import publish_resumed
from ft_ckpt.saving import SaveRunner, as_in_training, library_versions, report_differences
from ft_ckpt.saving.planning import (
    PendingSave,
    SaveReport,
    SaveRequest,
    describe_differences,
    difference_note,
    request_of,
)
from ft_ckpt.schedule import History, LoggedSave, after_commit, append_save
from ft_ckpt.storage.places import Place

Result = TypeVar("Result")
# how long a process that exits on a signal waits for uploads
MAX_EXIT_SECONDS = 600.0
# saves after which a run without any metrics gets a warning
_SAVES_WITHOUT_METRIC = 3


@dataclass(eq=False)
class RunSaves:
    """The saves of one run by one saver. Call its methods on every rank.

    Attributes:
        run: The run.
        pending: Runs the saves, at most one of them in the background.
        places: The folders of the run.
        tokenizer: The tokenizer that checkpoints get, or None.
        is_rehearsal: Whether `ft-ckpt check-resume` runs the script.
        follow_ups: What follows a commit.
        is_closed: Whether saves are refused.
        last_saved: The last checkpoint that this process has saved. Known on rank 0 only.
        last_files: The files of `last_saved` if it is on a disk.
    """

    run: TrainingRun
    pending: SaveRunner
    places: RunPlaces
    tokenizer: Any
    is_rehearsal: bool
    follow_ups: FollowUps
    is_closed: bool = False
    last_saved: Place | None = None
    last_files: frozenset[str] = frozenset()
    writers: InvitedWriters = field(default_factory=InvitedWriters)
    lease: DirectoryLease = field(init=False)

    def __post_init__(self) -> None:
        self.lease = DirectoryLease(self.places.directory)

    def close(self) -> None:
        """Refuse later saves."""
        self.is_closed = True

    def take_lease(self) -> None:
        """Take the lease of the run's directory, see `DirectoryLease.take`.

        Collective: call it on every rank.
        """
        if not self.is_rehearsal and not self.is_closed:
            self.lease.take(self.run.config)

    def save_if_due(self, metrics: dict[str, float]) -> SaveReport | PendingSave | None:
        """Save if the schedule asks for it.

        Returns the report, or None if no save was due or a failed save was a warning. After a save
        on a signal the process exits (SystemExit).
        """
        if self.pending.has_ended(self._current_ranks()):
            self._warn_on_failure(self.pending.wait_for_save)
        every = self.run.config.every
        metrics = self.run.agree_on_metrics(metrics, self._current_ranks())
        reason = self.run.reason_to_save(metrics, self._current_ranks())
        if reason is None:
            return None
        run_ends = reason == "deadline" or reason.startswith("SIG") or self.is_rehearsal
        config = replace(self.run.config, background=self.run.config.background and not run_ends)
        report = self._warn_on_failure(lambda: self.save(reason, config, None, metrics))
        if reason.startswith("SIG"):
            self.close()
            self.run.close()
            self.pending.close()
            try_action(lambda: self._finish_uploads(MAX_EXIT_SECONDS))
            chosen_code = None if every is None else every.exit_code
            raise SystemExit(exit_code(reason, chosen_code))

        return report

    def read_until_signal(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and save the run if a signal has ended the workers that read them.

        Schedulers send a signal to all processes of a job, also to the workers of data loaders. A
        run on one rank is then saved as it was after the last step, and the process exits
        (SystemExit). On several ranks the error is raised.
        """
        try:
            yield from batches
        except RuntimeError:
            if self.run.poll.is_signalled and self._current_ranks().size == 1:
                self.save_if_due({})
            raise

    @as_in_training
    def save_last(self) -> None:
        """Save the last step if the run has a schedule and the step was not saved yet."""
        if self.run.config.every is None or self.places.target is None or self.is_rehearsal:
            return
        if self.run.has_begun and self.run.step > self.run.history.saved_step:
            config = replace(self.run.config, background=False)
            metrics = self.run.agree_on_metrics(self.run.last_metrics, self._current_ranks())
            self._warn_on_failure(lambda: self.save("end", config, None, metrics))
        self.run.metrics.warn_of_absent(1)

    def wait_for_pending(self) -> None:
        """Wait for the save in the background.

        Rank 0 also waits for what follows the commit. Meanwhile the other ranks wait for rank 0
        when they next exchange something with it.
        """
        with self._current_ranks().working():
            self.pending.wait_for_save()

    def save(
        self,
        reason: str | None,
        config: SaverConfig,
        target: Place | None,
        metrics: dict[str, float],
        adapter_only: bool | None = None,
        extra_files: Mapping[str, str | bytes] | None = None,
    ) -> SaveReport | PendingSave:
        """Save the state of the run, then delete the checkpoints that `keep` does not select.

        `reason` is that of the schedule; None for a save that the script requests. `target` is the
        folder; None is that of the step in the run's directory.

        The history of the run (its saves, measurements and best metrics) is stored in the
        checkpoint, so it records the save before the commit. If the save fails, the history is as
        before, except that the schedule waits for the next interval.
        """
        self.wait_for_pending()
        run = self.run
        history = run.history
        begun_at = time.monotonic()
        run.note_saved(reason, metrics)
        entry = LoggedSave(run.step, time.time(), reason, metrics)
        run.history = replace(run.history, saves=append_save(history.saves, entry))
        if self.follow_ups.publisher is not None:
            run.published = self.follow_ups.publisher.version or run.published
        try:
            self.take_lease()

            # The writers are asked first, so that they prepare their files during the capture.
            self.writers.ask(run.step, self._current_ranks())
            captured = run.capture_state(self._current_ranks(), library_versions())
            differing = differing_optimizer_settings(captured.document)
            if differing:
                text = describe_differences(differing)
                report_differences(text, f"step {run.step}", self._current_ranks(), config)

            attribute = config.attribute
            adapters = is_adapter_run(run.model, model_sources(captured.sources), attribute)
            adapters = run.base.is_left_out(
                run.model, adapters, adapter_only, self._current_ranks()
            )
            follow_up = self.follow_up_of_save(prunes=True)

            def make_request() -> SaveRequest:
                self._warn_of_lost_files()
                notes = run.objects.notes_on_weights(run.model) + run.objects.notes_on_averages()
                if differing:
                    notes.append(difference_note(differing))
                protect = self._protected_paths()
                return request_of(
                    config,
                    run.model,
                    self.target_folder(target, run.step, has_state=True),
                    adapter_only=adapters,
                    attribute=attribute,
                    tokenizer=self.tokenizer,
                    step=run.step,
                    metrics=metrics,
                    run_state=captured.state_to_save(),
                    run_id=run.run_id,
                    extra_files=extra_files or {},
                    notes=tuple(notes),
                    make_room=room_maker(config.keep, run.step, run.run_id, protect),
                    collect=self.writers.collector(run.step),
                    check_lease=self.lease.check,
                    follow_up=follow_up,
                )

            report = self.pending.save(make_request, config)
        except BaseException:
            run.history = history
            run.note_saved(reason, {})  # so that the next try comes an interval later
            raise

        run.metrics.warn_of_absent(_SAVES_WITHOUT_METRIC)
        cost_seconds = time.monotonic() - begun_at
        entry = replace(entry, stall_seconds=cost_seconds)
        if isinstance(report, PendingSave):
            # The cost and the outcome of a save in the background are known when it has ended.
            self.pending.on_end = partial(self._note_outcome, history)
        else:
            run.history = history
            run.note_saved(reason, metrics, cost_seconds)
            entry = replace(entry, seconds=report.seconds, size_bytes=report.bytes)

        run.history = replace(run.history, saves=append_save(history.saves, entry))
        return report

    def _note_outcome(
        self, before: History, report: SaveReport | None, waited_seconds: float
    ) -> None:
        """Record the outcome of a save in the background in the history of the run.

        `before` is the history before that save. `report` is None if the save has failed.
        """
        run = self.run
        if report is None:
            run.history = replace(run.history, best=before.best, saves=before.saves)
        else:
            run.history = after_commit(run.history, report.seconds, report.bytes, waited_seconds)

    def target_folder(self, target: Place | None, step: int | None, *, has_state: bool) -> Place:
        """Return the folder to save to: `target`, or that of the step in the run's directory.

        `has_state` says whether the checkpoint will have a training state. Raises ConfigError if
        there is no folder to save to. Raises TargetError if the folder must not be replaced.
        """
        if self.is_closed:
            raise CheckpointError("this saver is closed; make a new one to save again")
        is_of_run = target is None
        if target is None:
            if self.places.target is None or step is None:
                raise ConfigError(
                    "save() without a path needs the saver's directory and a step; "
                    "give it a path, or both"
                )
            name = self.run.config.name_template.format(
                step=step, epoch=self.run.feeds.epochs_ended
            )
            target = Place(self.places.target.folder, name)

        if self._current_ranks().is_main:
            # A rehearsal runs one script several times in one folder on purpose, so its runs may
            # replace the checkpoints of each other.
            own_ids = None
            if is_of_run and has_state and not self.is_rehearsal:
                own_ids = self.run.own_ids
            refuse_replacing(target, has_state, own_ids)
            if is_of_run:
                self.lease.check()

        return target.absolute

    def follow_up_of_save(
        self,
        *,
        prunes: bool = False,
        push_to: str | Place | None = None,
        base_id: str | None = None,
    ) -> FollowUp:
        """Return what follows a save that begins now. `prunes` for a save of the run's state."""
        is_main = self._current_ranks().is_main
        prune = None
        if prunes:
            directory = self.places.target if is_main else None
            prune = partial(
                prune_after_save,
                directory,
                self.run.config.keep,
                self.run.run_id,
                self._protected_paths(),
            )

        return self.follow_ups.of_save(
            is_main,
            prune=prune,
            upload_terms=self._upload_terms(),
            push_to=push_to,
            base_id=base_id,
            publishes=prunes,
            on_committed=self._note_committed if is_main and prunes else None,
        )

    def invite(
        self, writers: Mapping[str, bool], allow: Iterable[str], timeout_seconds: float
    ) -> str:
        """Open a session for `writers`, and return its token.

        The value of each writer says whether it is optional. Raises as `CheckpointSaver.invite`
        does.
        """
        directory = self.places.directory
        if directory is None or self.places.upload_folder is not None:
            raise ConfigError(
                "invite(): writers hand in their files in the directory of the run; give the saver "
                "one, without staging"
            )
        start = self.last_saved or self.run.resumed_from
        ranks = self._current_ranks()
        return self.writers.invite(directory, writers, start, allow, timeout_seconds, ranks)

    def reopen_session(self) -> None:
        """Open a new session of the invited writers after a resume, because they resume too."""
        self.last_saved = None
        if self.writers.is_invited:
            names = self.writers.is_optional
            self.invite(names, names, self.writers.timeout_seconds)

    def _warn_of_lost_files(self) -> None:
        """Warn if someone has deleted files of the last checkpoint, but not all of it."""
        if self.last_saved is None or not self.last_files:
            return
        folder = self.last_saved.folder
        lost: list[str] = []

        # After an error nothing counts as lost: the checkpoint was pruned or replaced, or the disk
        # does not answer, which fails the save itself.
        with suppress(CheckpointError):
            missing = self.last_files - {stored.name for stored in folder.list()}
            if missing:
                listed = {file.path for file in load_manifest(folder).files}
                lost = sorted((missing & listed) - {CARD_NAME})

        self.last_files = frozenset()  # so that a second try of the save does not warn again
        if lost:
            warn(
                f"{self.last_saved}: {listing(lost, ', ')}: deleted after the save, so that it "
                "cannot be resumed; keep the files that ft_ckpt.json lists",
            )

    def _note_committed(self, report: SaveReport) -> None:
        """Remember the committed checkpoint and its files, and tell the writers of it."""
        self.last_saved = report.place.absolute
        folder = self.last_saved.folder
        self.last_files = frozenset()
        if folder.local_folder is not None:
            with suppress(CheckpointError):  # without the list, lost files give no warning
                self.last_files = frozenset(stored.name for stored in folder.list())
        if self.places.directory is not None:
            self.writers.note_committed(self.last_saved, report.path)

    def upload_leftovers(self) -> None:
        """Upload checkpoints that earlier processes have left in the staging folder."""
        if self.follow_ups.uploads is not None and self._current_ranks().is_main:
            self.follow_ups.uploads.begin_round(self._upload_terms())

    def publish_resumed(self) -> None:
        """Publish to servers after a resume as the setting `publish` says, and wait for it."""
        publisher = self.follow_ups.publisher
        if publisher is not None:
            publish_resumed(self.run, publisher, self.places.folders, self._current_ranks())

    def end_follow_ups(self, *, wait: bool) -> None:
        """Wait for uploads, pushes and publishes, or only warn of those that have not ended yet.

        Those go on until the process ends. Raises TargetError on all ranks for checkpoints that
        were not uploaded, unless on_failure="warn".
        """
        try:
            if wait:
                self._finish_uploads()
            elif self.follow_ups.uploads is not None:
                self.follow_ups.uploads.warn_of_left()
        finally:
            self.follow_ups.end(wait=wait)

    def _finish_uploads(self, seconds: float | None = None) -> None:
        """Wait on all ranks for the uploads of rank 0.

        If they have not ended after `seconds`, this warns.
        """
        uploads = self.follow_ups.uploads
        ranks = self._current_ranks()
        if uploads is None:
            return

        def finish_on_leader() -> str:
            return uploads.finish(seconds) if ranks.is_main else ""

        unfinished, error = ranks.attempt(finish_on_leader)
        if unfinished and seconds is None and self.run.config.on_failure == "raise":
            error = TargetError(unfinished)
        elif unfinished:
            warn(unfinished)

        ranks.agree("the uploads of close()", error=error)

    def _upload_terms(self) -> UploadTerms:
        return UploadTerms(
            self.run.run_id, self.run.own_ids, self.run.config.keep, self._protected_paths()
        )

    def _warn_on_failure(self, action: Callable[[], Result]) -> Result | None:
        """Call `action`. With on_failure="warn" its errors are warnings, and None is returned.

        A lease that another process has taken is always an error.
        """
        try:
            return action()
        except CheckpointError as error:
            if self.run.config.on_failure == "raise" or isinstance(error, LeaseTakenError):
                raise
            warn(
                f"step {self.run.step}: the save failed, training goes on: {error}",
            )
            return None

    def _protected_paths(self) -> tuple[Place, ...]:
        """Return the copies of the checkpoint that the run was resumed from, which rules keep."""
        if self.run.resumed_from is None:
            return ()
        return self.places.copies_of(self.run.resumed_from)

    def _current_ranks(self) -> Ranks:
        return current_ranks(self.run.config.enter_timeout_seconds)
