"""Opens a session for the trainer, which requests and collects the files of its writers.

`session_files` describes the files of a session. The stage is the staging folder of a save.
"""

import json
import re
import time
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ft_ckpt.checkpoint import text_identity
from ft_ckpt.checkpoint.leases import ExclusiveLease, mark_holder, read_mark, stale_seconds
from ft_ckpt.checkpoint.manifest import Manifest, load_manifest, manifest_text, parse_manifest
from ft_ckpt.errors import CheckpointError, NameTakenError, TargetError, WriterError, listing
from ft_ckpt.extensions.rl.writers.session_files import (
    HANDED,
    PARTS,
    SESSION,
    HandedIn,
    LastCheckpoint,
    Session,
    check_writer_names,
    files_by_writer,
    handed_folder,
    is_open,
    is_same_content,
    mark_of,
    pauses,
    read_session,
    sessions_of,
)
from ft_ckpt.messages import LOG
from ft_ckpt.processes import is_gone, process_facts
from ft_ckpt.schema import FieldError, as_record
from ft_ckpt.storage import Store, is_inside, read_text
from ft_ckpt.storage.digests import FileRecord, read_record
from ft_ckpt.storage.local import LocalStore
from ft_ckpt.storage.places import Place, copy_object

# The fields of a mark that identify a process.
_PROCESS_KEYS = ("host", "machine", "namespace", "pid", "started")


@dataclass(eq=False, kw_only=True)
class _SessionLease(ExclusiveLease):
    """The lease of an open session. Its mark is session.json, so it contains the session."""

    session: Session

    @property
    def content(self) -> dict[str, Any]:
        return asdict(self.session)


@dataclass(eq=False)
class OpenSession:
    """The session that this process keeps open. The process is the trainer's first rank."""

    run: Place
    session: Session
    timeout_seconds: float
    sessions: Store = field(init=False)
    _asked_at: float = 0.0
    _lease: "_SessionLease | None" = None

    def __post_init__(self) -> None:
        self.sessions = sessions_of(self.run.folder)

    def open(self) -> None:
        """Write session.json, and renew it until the session is closed.

        Raises TargetError while another process has a session open.
        """
        mark = read_mark(self.sessions, SESSION)
        process = process_facts()
        is_of_process = all(mark.get(key) == process[key] for key in _PROCESS_KEYS)
        if mark and not is_of_process and is_open(self.sessions):
            raise self._taken()
        self._delete_below("")  # the files of earlier sessions
        self._lease = _SessionLease(
            self.sessions, SESSION, self.session.token, session=self.session
        )
        try:
            self._lease.put(create_only=True)
        except NameTakenError:
            raise self._taken() from None

        self._lease.begin()

    def ask(self, step: int) -> None:
        """Request the state of all writers at `step`.

        Raises WriterError if another process has opened a session of the run.
        """
        stored = read_session(self.sessions)
        if stored is not None and stored.token != self.session.token:
            raise WriterError(f"step {step}: {self._taken()}")
        self._asked_at = time.monotonic()
        self._write(replace(self.session, asked=step))

    def collect(self, step: int, stage: Store) -> tuple[list[FileRecord], list[str]]:
        """Wait for the files of all writers for `step`, and copy them into `stage`.

        Returns their records, and notes for the report of the save. May be repeated with another
        stage.

        Raises WriterError naming all required writers that have ended, failed, or handed in nothing
        `timeout_seconds` after `ask`. For optional writers a note says so. Raises TargetError if
        `stage` cannot be written.
        """
        records: list[FileRecord] = []
        notes: list[str] = []
        waiting = list(self.session.writers)
        pause = pauses(self.sessions)
        while waiting:
            problems = self._absences(waiting)

            # Files are listed after processes are checked, because a writer may hand in and end in
            # between.
            ready = self._ready(step)
            for name in [name for name in waiting if name in ready]:
                problems.pop(name, None)
                waiting.remove(name)
                new_records, problem = self._take(step, name, stage)
                records += new_records
                if problem:
                    problems[name] = problem

            self._refuse_required(step, problems)
            notes += [f"writer {name}: left out: {reason}" for name, reason in problems.items()]
            waiting = [name for name in waiting if name not in problems]
            if waiting:
                time.sleep(next(pause))

        return records, notes

    def _absences(self, waiting: Sequence[str]) -> dict[str, str]:
        """Return, by name, why writers have ended, or have not handed in anything in time."""
        is_late = time.monotonic() > self._asked_at + self.timeout_seconds
        reasons = {}
        for name in waiting:
            reason = self._why_ended(name)
            if not reason and is_late:
                reason = self._why_late(name)
            if reason:
                reasons[name] = reason
        return reasons

    def _refuse_required(self, step: int, problems: Mapping[str, str]) -> None:
        """Raise WriterError for problems of writers that are not optional."""
        required = [name for name in problems if name not in self.session.optional]
        if required:
            reasons = [f"writer {name}: {problems[name]}" for name in required]
            raise WriterError(f"step {step}: {listing(reasons)}; nothing was committed")

    @property
    def token(self) -> str:
        """The token of the session, which distinguishes it from others of the run."""
        return self.session.token

    def note_committed(self, checkpoint: Place) -> None:
        """Record that `checkpoint` is the last one, from which processes that join must continue.

        Files that were handed in for earlier steps are deleted. Those of the step of `checkpoint`
        stay, because its save may be repeated.
        """
        last, _ = _last_checkpoint(self.run, checkpoint)
        asked = self.session.asked
        is_answered = asked == last.step
        self._write(replace(self.session, last=last, asked=None if is_answered else asked))
        for folder in self.sessions.within(self.session.token).list_folder().folders:
            is_step = folder.name.isdecimal()
            if is_step and last.step is not None and int(folder.name) < last.step:
                self._delete_below(f"{self.session.token}/{folder.name}")

    def close(self) -> None:
        """Close the session. Its writers then end as well."""
        if self._lease is not None:
            self._lease.stop()
        with suppress(CheckpointError):
            stored = read_session(self.sessions)
            if stored is not None and stored.token == self.session.token:
                self._delete_below("")

    def _taken(self) -> TargetError:
        holder = mark_holder(self.sessions, SESSION)
        minutes = stale_seconds(self.sessions) / 60
        return TargetError(
            f"{self.sessions.where(SESSION)}: {holder} trains this run, or was killed less than "
            f"{minutes:.0f} minutes ago on another machine; end it, or use another folder"
        )

    def _write(self, session: Session) -> None:
        assert self._lease is not None, "the session is open"
        self.session = self._lease.session = session
        self._lease.put()

    def _delete_below(self, folder: str) -> None:
        if self.sessions.local_folder is not None:
            # On a disk this also deletes temporary files and folders of killed writers.
            LocalStore(self.sessions.local_folder / folder).delete_all()
        else:
            self.sessions.delete([stored.name for stored in self.sessions.list(folder)])

    def _ready(self, step: int) -> set[str]:
        """Return the names of the writers that have handed in their files for `step`."""
        below = self.sessions.within(f"{self.session.token}/{step}")
        if below.local_folder is not None:
            names = [folder.name for folder in below.list_folder().folders]
            return {name for name in names if below.stat(f"{name}/{HANDED}") is not None}
        ready = set()
        for stored in below.list():
            name, _, path = stored.name.partition("/")
            if path == HANDED:
                ready.add(name)
        return ready

    def _why_ended(self, name: str) -> str:
        """Return that the process of a writer has ended, or "" if it has not as far as known."""
        if self.sessions.local_folder is None:
            return ""
        mark = read_mark(self.sessions, mark_of(self.session, name))
        if mark and is_gone(mark):
            return f"its process {mark.get('pid')} on {mark.get('host')} has ended; start it again"
        return ""

    def _why_late(self, name: str) -> str:
        """Return that a writer has not joined, or has handed in nothing, before the timeout."""
        mark = mark_of(self.session, name)
        if self.sessions.stat(mark) is None:
            return f"has not joined within {self.timeout_seconds:g} s; start it, or invite others"
        holder = mark_holder(self.sessions, mark)
        return (
            f"{holder} handed in nothing within {self.timeout_seconds:g} s; "
            "check that process, or give invite() a larger timeout_seconds"
        )

    def _checkpoint_with(self, file: FileRecord, last: str) -> Store:
        """Return the folder of the checkpoint `last`, which has `file`.

        If it was deleted, the folder of the newest checkpoint is returned if it has the same file.
        """
        checkpoint = LastCheckpoint(last, "", None).place(self.run).folder
        if checkpoint.stat(file.path) is None and self.session.last is not None:
            newest = self.session.last.place(self.run).folder
            for record in load_manifest(newest).files:
                if record.path == file.path and is_same_content(record, file):
                    return newest
        return checkpoint

    def _take(self, step: int, name: str, stage: Store) -> tuple[list[FileRecord], str]:
        """Copy the files of a writer into the stage.

        Returns their records and "", or [] and a problem for which the writer is the cause. Raises
        TargetError if the stage cannot be written.
        """
        below = self.sessions.within(handed_folder(self.session, step, name))
        try:
            handed = as_record(json.loads(read_text(below, HANDED)), HandedIn)
        except (FieldError, ValueError) as error:
            return [], f"{below.where(HANDED)}: {error}; of another version of ft_ckpt?"

        if handed.error is not None:
            return [], handed.error
        records = []
        for file in handed.files:
            if not is_inside(file.path):
                return [], f"{file.path!r}: no path of a file"
            staged_path = f"{PARTS}/{name}/{file.path}"
            try:
                if file.linked and handed.last is not None:
                    source = self._checkpoint_with(replace(file, path=staged_path), handed.last)
                    path = staged_path
                else:
                    source = below
                    path = file.path
                if not stage.copy(path, staged_path, source):
                    with closing(source.open(path)) as opened:
                        copy_object(opened, stage, staged_path)
                is_whole = _is_whole(stage, staged_path, file)
            except TargetError:
                raise  # the stage cannot be written, so the writer is not the cause
            except CheckpointError as error:
                return [], str(error)

            if not is_whole:
                return [], f"{source.where(path)}: not the bytes that were handed in"
            records.append(replace(file, path=staged_path))

        return records, ""


def _is_whole(stage: Store, name: str, file: FileRecord) -> bool:
    """Check whether the stage has the file `name` with the size and digest of `file`."""
    stored = stage.stat(name)
    if stored is None or stored.size_bytes != file.size_bytes:
        return False
    # The digests of objects in a bucket are compared by the commit.
    return stage.local_folder is None or read_record(stage, name).digest == file.digest


def open_session(
    run: Place,
    writers: Mapping[str, bool],
    start: Place | None,
    allow: Iterable[str],
    timeout_seconds: float,
) -> OpenSession:
    """Open a session for `writers`, whose processes continue from the checkpoint at `start`.

    `writers` has, by name, whether the writer is optional. Raises WriterError for a writer without
    a part in that checkpoint, and for a part without a writer, unless `allow` names it. Raises
    TargetError while another process has a session open.
    """
    check_writer_names(writers)
    optional = tuple(name for name, is_optional in writers.items() if is_optional)
    last: LastCheckpoint | None = None
    if start is not None:
        last, manifest = _last_checkpoint(run, start)
        _compare_with_parts(
            last, tuple(writers), set(files_by_writer(manifest)), {*allow, *optional}
        )
    session = Session(uuid.uuid4().hex, tuple(writers), optional, last)
    opened = OpenSession(run, session, timeout_seconds)
    opened.open()
    LOG.info("writers %s are invited to %s", ", ".join(writers), run)
    return opened


def _last_checkpoint(run: Place, checkpoint: Place) -> tuple[LastCheckpoint, Manifest]:
    text = manifest_text(checkpoint.folder)
    manifest = parse_manifest(text, str(checkpoint))
    is_in_run = checkpoint.beside.identity == run.folder.identity
    path = checkpoint.basename if is_in_run else str(checkpoint.absolute)
    return LastCheckpoint(path, text_identity(text.encode()), manifest.step), manifest


def _compare_with_parts(
    last: LastCheckpoint, writers: Sequence[str], parts: set[str], allowed: set[str]
) -> None:
    """Raise WriterError for writers without a part, and for parts without a writer.

    The members of a group count as one, because a group may have another number of members.
    """
    lacking = _without_group(writers, parts, allowed)
    uninvited = _without_group(sorted(parts), writers, allowed)
    problems = [f"no part of writer {name}" for name in lacking]
    problems += [f"the part of {name}, which is not invited" for name in uninvited]
    if problems:
        raise WriterError(
            f"{last.path}: holds {listing(problems, ', ')}; invite the same writers, or "
            "invite(..., allow=[names]) to go on without"
        )


def _without_group(names: Sequence[str], members: Collection[str], allowed: set[str]) -> list[str]:
    """Return the names whose group has none of `members`, unless the name or group is allowed."""
    groups = {_group_of(name) for name in members}
    missing = [name for name in names if _group_of(name) not in groups]
    return [name for name in missing if allowed.isdisjoint({name, _group_of(name)})]


def _group_of(name: str) -> str:
    """Return the name of a writer without the number of a group's member."""
    return re.sub(r"-\d+$", "", name)
