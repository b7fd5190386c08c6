"""Hands in the state of a process for each checkpoint of a run that another process trains.

`session_files` describes the session that a `Writer` joins.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.leases import ExclusiveLease, mark_holder, may_live, read_mark, store_time
from ft_ckpt.checkpoint.manifest import load_manifest
from ft_ckpt.errors import (
    CheckpointError,
    ConfigError,
    NameTakenError,
    TargetError,
    WriterError,
    is_number,
    listing,
)
from ft_ckpt.extensions.rl.writers.parts import (
    Files,
    Part,
    copy_files,
    is_committed,
    load_states,
    store_file,
)
from ft_ckpt.extensions.rl.writers.session_files import (
    HANDED,
    PARTS,
    SESSION,
    STATE_FILE,
    HandedIn,
    Session,
    check_writer_names,
    default_rule,
    files_by_writer,
    handed_folder,
    handed_to_json,
    is_open,
    mark_of,
    pauses,
    read_session,
    sessions_of,
)
from ft_ckpt.extensions.tools import save
from ft_ckpt.messages import warn
from ft_ckpt.processes import is_gone
from ft_ckpt.storage import is_inside
from ft_ckpt.storage.digests import FileRecord, read_record
from ft_ckpt.storage.local import make_like
from ft_ckpt.storage.places import Place, open_place
from ft_ckpt.values import whole_step

# Divides parts among writers: (names of parts, names of writers) -> parts by writer.
Rule = Callable[[Sequence[str], Sequence[str]], Mapping[str, Sequence[str]]]
# How often a writer checks that the trainer's process is alive.
_LIVE_SECONDS = 2.0


class Writer:
    """Hands in the state of this process as a part of a trainer's checkpoints.

    The trainer is another process, which commits the checkpoints. `run`: the directory of its
    `CheckpointSaver`, as this machine sees it, or its URL. `name`: a name that the trainer invites
    by `CheckpointSaver.invite`. `index`: the number of this writer if `name` is that of a group.
    The constructor waits up to `timeout_seconds` for a session of the trainer, or for the session
    with the token `session`.

    The state in a checkpoint is what a function of `provide` returns when the trainer asks for it,
    or what `put` hands in for the step. `resume` returns the state in the checkpoint from which the
    trainer continues. The session is over when the trainer ends or resumes. Then `ended` is True,
    and a new `Writer` can join the next session.

    Raises ConfigError for an invalid name, index or timeout. Raises WriterError if the name is not
    invited, if another living process has it, or if there is no session in time.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | Place,
        name: str,
        *,
        index: int | None = None,
        session: str | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        check_writer_names([name])
        if index is not None and not is_number(index, 0, whole=True):
            raise ConfigError(
                f"index={index!r:.80}: expected the number of the writer in its group, from 0 on"
            )

        if not is_number(timeout_seconds, 0):
            raise ConfigError(
                f"timeout_seconds={timeout_seconds!r:.80}: expected seconds from 0 on"
            )

        self.run = open_place(run).absolute
        self.name = name if index is None else f"{name}-{index}"
        self._group = None if index is None else name
        self._sessions = sessions_of(self.run.folder)
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._session = self._await_session(session, timeout_seconds)
        self._lease = self._join()
        self._provided: tuple[Callable[[], Any] | None, Callable[[], Files] | None] | None = None
        self._handed: set[int] = set()
        self._reason = ""
        self._thread = threading.Thread(
            target=self._watch, name=f"ft_ckpt-writer-{self.name}", daemon=True
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the session is over.

        A session is over when the trainer has ended or opened another session, or `close` was
        called.
        """
        return self._over.is_set()

    @property
    def asked(self) -> int | None:
        """The step whose state the trainer waits for.

        None if the trainer does not wait, or if this writer has handed in the step.
        """
        step = self._session.asked
        if self.ended or step in self._handed:
            return None
        return step

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until the session is over. Returns whether it is."""
        return self._over.wait(timeout)

    def provide(
        self, state: Callable[[], Any] | None = None, *, files: Callable[[], Files] | None = None
    ) -> None:
        """Let a thread call these functions whenever the trainer asks, and hand in their results.

        The functions return what `put` takes. They run in another thread, so they must lock what
        other threads change. If one raises, the trainer's save fails with its error.
        """
        if state is None and files is None:
            raise ConfigError("provide(): expected a function for the state, or for files, or both")
        self._provided = (state, files)

    def put(self, step: int, state: Any = None, *, files: Files | None = None) -> None:
        """Hand in the state of this process at `step`, before or after the trainer asks for it.

        `state`: any nesting that `ft_ckpt.save` takes. `files`: files or bytes by their path in the
        part of this writer. A file that the last checkpoint has with the same bytes is not stored
        again.

        Raises ConfigError unless `step` is a whole number from 0 on and `files` a mapping. Raises
        WriterError if the session is over, or if the step was handed in or committed before. For a
        state that cannot be stored it raises what `ft_ckpt.save` raises.
        """
        step = whole_step(step)
        if files is not None and not isinstance(files, Mapping):
            raise ConfigError(
                f"files={files!r:.80}: expected files or bytes by their path in the part"
            )

        with self._lock:
            self._refuse_over()
            self._session = self._current() or self._session
            last = self._session.last
            is_committed = last is not None and last.step is not None and step <= last.step
            if step in self._handed or is_committed:
                outcome = "handed in" if step in self._handed else "committed"
                raise WriterError(
                    f"step {step}: {outcome} before by the run; hand in each step once, in order"
                )
            self._hand_in(step, state, files or {})

    def resume(
        self, folder: str | os.PathLike[str] | None = None, *, rule: Rule = default_rule
    ) -> Part | None:
        """Return this writer's part of the checkpoint from which the trainer resumed.

        If the trainer has saved since, it is the last checkpoint that it saved. Returns None if
        there is no checkpoint. Files of the part are copied into `folder`/NAME. All digests are
        compared.

        In a group, `rule` divides the parts of the checkpoint among the invited writers. It is
        called with the names of the parts and of the writers, and returns the parts by writer. By
        default each writer gets its own part, and the parts of absent writers are dealt out in
        turn.

        Raises WriterError if the checkpoint is not that of the session, or if the part has files
        and `folder` is None. For damaged files it raises what `ft_ckpt.load` raises.
        """
        self._refuse_over()
        self._session = self._current() or self._session
        last = self._session.last
        if last is None:
            return None
        with open_checkpoint(last.place(self.run)) as checkpoint:
            if checkpoint.identity != last.identity:
                raise WriterError(
                    f"{checkpoint.location}: another checkpoint than the one that the "
                    "trainer continues from"
                )

            parts = files_by_writer(checkpoint.manifest)
            paths: dict[str, list[str]] = {}
            stored_paths: set[str] = set()
            has_files = False
            for name in self._assigned_parts(list(parts), rule):
                paths[name] = [file.path for file in parts[name]]
                stored_paths.update(f"{PARTS}/{name}/{path}" for path in paths[name])
                if any(path != STATE_FILE for path in paths[name]):
                    has_files = True

            checkpoint.refuse_damaged(stored_paths)
            states = load_states(checkpoint, paths)
            if has_files and folder is None:
                raise WriterError(
                    f"{checkpoint.location}: the part of {self.name} has files; give "
                    "resume() a folder for them"
                )

            files = copy_files(checkpoint, paths, Path(str(folder)))
            return Part(checkpoint.location, checkpoint.manifest.step, states, files)

    def close(self) -> None:
        """Leave the session.

        The trainer's next save fails unless the writer is optional or joins again.
        """
        self._end("closed")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._lease.release()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await_session(self, token: str | None, timeout_seconds: float) -> Session:
        """Wait for an open session, and return it. Raises WriterError after the timeout."""
        deadline = time.monotonic() + timeout_seconds
        pause = pauses(self._sessions)
        while True:
            session = read_session(self._sessions)
            if session is not None and token in (None, session.token) and is_open(self._sessions):
                if self.name not in session.writers:
                    raise WriterError(
                        f"{self.run}: writer {self.name} is not invited, "
                        f"{listing(session.writers, ', ')} are; invite it, or "
                        "choose another name"
                    )
                return session

            if time.monotonic() > deadline:
                raise WriterError(
                    f"{self._sessions.where(SESSION)}: no trainer has invited writers "
                    f"within {timeout_seconds:g} s; call CheckpointSaver.invite "
                    "there, and give both the same folder"
                )

            time.sleep(next(pause))

    def _join(self) -> ExclusiveLease:
        """Create the mark of this writer. Raises WriterError if a living process has it."""
        mark = mark_of(self._session, self.name)
        lease = ExclusiveLease(self._sessions, mark)
        try:
            lease.put(create_only=True)
        except NameTakenError:
            stored = self._sessions.stat(mark)
            if stored is not None and may_live(self._sessions, stored, store_time(self._sessions)):
                raise WriterError(
                    f"{self.run}: writer {self.name} is {mark_holder(self._sessions, mark)}; use "
                    "another name"
                ) from None
            lease.put()

        lease.begin()
        return lease

    def _assigned_parts(self, parts: Sequence[str], rule: Rule) -> list[str]:
        """Return the names of the parts that this writer gets from a checkpoint."""
        if self._group is None:
            return [self.name] if self.name in parts else []
        numbered: list[tuple[int, str]] = []
        for part in parts:
            group, _, number = part.rpartition("-")
            if group == self._group and number.isdecimal():
                numbered.append((int(number), part))
        parts_of_group = [part for _, part in sorted(numbered)]
        assigned = rule(parts_of_group, self._session.group(self._group))
        return list(assigned.get(self.name, ()))

    def _current(self) -> Session | None:
        """Read session.json. Returns None if it cannot be read at the moment.

        If the session is over, this writer is ended, and WriterError is raised.
        """
        session = read_session(self._sessions)
        if session is not None and session.token == self._session.token:
            return session
        if session is not None or self._sessions.stat(SESSION) is None:
            # A trainer that resumes has no session for a moment, so here an end looks like a new
            # start.
            self._end("the trainer has ended or begun again")
            self._refuse_over()
        return None

    def _end(self, reason: str) -> None:
        with self._lock:
            if not self._over.is_set():
                self._reason = reason
                self._over.set()
        self._lease.stop()

    def _refuse_over(self) -> None:
        if self._over.is_set():
            raise WriterError(
                f"{self.run}: writer {self.name}: the session is over ({self._reason}); open a new "
                "Writer, and resume()"
            )

    def _watch(self) -> None:
        """Poll the session, and hand in what `provide` provides when the trainer asks."""
        pause = pauses(self._sessions)
        version = ""  # the version of session.json that was read last
        checked_at = time.monotonic()
        while not self._over.wait(next(pause)):
            now = time.monotonic()
            try:
                if now > checked_at + _LIVE_SECONDS:
                    checked_at = now
                    if is_gone(read_mark(self._sessions, SESSION)):
                        self._end("the trainer's process has ended")
                        return
                stored = self._sessions.stat(SESSION)
                if stored is None or stored.version != version:
                    self._session = self._current() or self._session
                    version = "" if stored is None else stored.version
                step = self.asked
                if step is not None and self._provided is not None:
                    pause = pauses(self._sessions)
                    self._hand_in_provided(step, *self._provided)
            except WriterError:
                return
            except (CheckpointError, OSError) as error:  # the next poll may succeed
                warn(f"{self.run}: writer {self.name}: {error}")

    def _hand_in_provided(
        self, step: int, state: Callable[[], Any] | None, files: Callable[[], Files] | None
    ) -> None:
        """Call the provided functions, and hand in their results, or the error of one."""
        with self._lock:
            if step in self._handed:
                return
            try:
                provided_state = None if state is None else state()
                provided_files = {} if files is None else files()
                self._hand_in(step, provided_state, provided_files)
            except Exception as error:  # noqa: BLE001 - the trainer raises it
                if isinstance(error, TargetError):
                    reason = "its files were not written:"
                else:
                    reason = "its state or files function raised"
                handed = HandedIn(error=f"{reason} {type(error).__name__}: {error}")
                store = self._sessions.within(handed_folder(self._session, step, self.name))
                store.write(HANDED, handed_to_json(handed))
                self._handed.add(step)
                warn(f"step {step}: writer {self.name} handed in nothing: {error!r}")

    def _hand_in(self, step: int, state: Any, files: Files) -> None:
        """Write the files for `step`, and their list last.

        Raises WriterError without a state and files, and for paths that are reserved or outside.
        """
        if state is None and not files:
            raise WriterError(
                f"step {step}: writer {self.name} has neither a state nor files to hand in"
            )

        reserved = (STATE_FILE, HANDED)
        wrong = [repr(path) for path in files if not is_inside(path) or path in reserved]
        if wrong:
            raise WriterError(
                f"step {step}: {listing(wrong, ', ')}: no path for a file of a "
                "part; use another name"
            )

        store = self._sessions.within(handed_folder(self._session, step, self.name))
        make_like(store, self.run.folder)
        store = store.unsynced  # no sync to disk, because the trainer's commit makes files durable
        committed = self._in_last_checkpoint()
        records = []
        if state is not None:
            save(state, Place(store, STATE_FILE))
            record = read_record(store, STATE_FILE)
            if is_committed(record, committed):
                store.delete([STATE_FILE])
                record = replace(record, linked=True)
            records.append(record)

        for path, source in files.items():
            records.append(store_file(store, path, source, committed))
        last = self._session.last
        handed = HandedIn(tuple(records), None if last is None else last.path)
        store.write(HANDED, handed_to_json(handed))
        self._handed.add(step)

    def _in_last_checkpoint(self) -> dict[str, FileRecord]:
        """Return this writer's files in the last checkpoint, by path, or {} if it was deleted."""
        last = self._session.last
        if last is None:
            return {}
        with suppress(CheckpointError):
            manifest = load_manifest(last.place(self.run).folder)
            return {file.path: file for file in files_by_writer(manifest).get(self.name, ())}
        return {}
