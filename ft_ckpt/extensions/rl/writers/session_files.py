"""Defines the files through which writers hand in their state to the trainer of a run.

A writer is a process other than the trainer whose state is in each checkpoint of the run. The
trainer and its writers share a session. It consists of files in the folder of the run, on a disk or
in a bucket:

    .ft_ckpt-writers/session.json                the open session, written only by the trainer
    .ft_ckpt-writers/TOKEN/joined/NAME           the mark of the process that is the writer NAME
    .ft_ckpt-writers/TOKEN/STEP/NAME/...         the files that NAME hands in for STEP
    .ft_ckpt-writers/TOKEN/STEP/NAME/handed.json their list with digests, written last

The trainer requests a step in session.json and waits for handed.json of each writer. Then it copies
the files into the staging folder of its save, below state/writers/NAME. So they are files of one
checkpoint, which one manifest commits. Every start of the trainer, and every resume, opens a
session with a new token, so that files of an earlier session are never used.

A mark is a file that a process renews while it lives; see `leases`. The age of a mark is measured
only by the clock of the store.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from ft_ckpt.checkpoint.leases import may_live, read_mark, store_time
from ft_ckpt.checkpoint.manifest import Manifest
from ft_ckpt.errors import CheckpointError, ConfigError, listing
from ft_ckpt.processes import is_gone
from ft_ckpt.schema import FieldError, as_record
from ft_ckpt.storage import PREFIX, Store, read_text
from ft_ckpt.storage.digests import FileRecord
from ft_ckpt.storage.places import Place, open_place

SESSIONS = f"{PREFIX}writers"  # the folder of sessions in the folder of a run
SESSION = "session.json"
HANDED = "handed.json"
PARTS = "state/writers"  # the folder of all writers in a checkpoint
STATE_FILE = "state.safetensors"  # the state of a writer in its folder
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")
# The pauses between polls of a disk grow from the first to the maximum.
_FIRST_PAUSE_SECONDS = 0.005
_MAX_PAUSE_SECONDS = 0.2
_BUCKET_PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class LastCheckpoint:
    """The checkpoint from which a process that joins now must continue.

    Attributes:
        path: Its name in the folder of the run, or its location if it is elsewhere.
        identity: The digest of its manifest; see `OpenCheckpoint`.
        step: Its step.
    """

    path: str
    identity: str
    step: int | None

    def place(self, run: Place) -> Place:
        """Return the place of the checkpoint, for a process that sees the run at `run`."""
        if "/" in self.path:
            return open_place(self.path)
        return Place(run.folder, self.path)


@dataclass(frozen=True)
class Session:
    """The contents of session.json.

    Attributes:
        token: A random text that distinguishes the session from others.
        writers: The names of all writers.
        optional: The writers without which a checkpoint may be committed.
        last: The checkpoint from which the trainer continues, or which it saved last.
        asked: The step whose state the trainer requests, if it waits for one.
    """

    token: str
    writers: tuple[str, ...]
    optional: tuple[str, ...]
    last: LastCheckpoint | None
    asked: int | None = None

    def group(self, name: str) -> tuple[str, ...]:
        """Return the writers `name`-0, `name`-1, ..."""
        member = re.compile(rf"{re.escape(name)}-\d+")
        return tuple(writer for writer in self.writers if member.fullmatch(writer))


@dataclass(frozen=True)
class HandedIn:
    """The contents of handed.json: the files of one writer for one step, or an error.

    Attributes:
        files: The records of the files. A `linked` file is not handed in, because the checkpoint
            `last` has it with the same bytes.
        last: The path of that checkpoint, as in `LastCheckpoint`.
        error: The error that a function of the writer raised.
    """

    files: tuple[FileRecord, ...] = ()
    last: str | None = None
    error: str | None = None


def sessions_of(run: Store) -> Store:
    """Return the folder of the sessions of the run whose checkpoints are in `run`."""
    return run.within(SESSIONS)


def read_session(sessions: Store) -> Session | None:
    """Read session.json. Returns None if it cannot be read. The session may have ended."""
    with suppress(CheckpointError, FieldError, ValueError):
        return as_record(json.loads(read_text(sessions, SESSION)), Session)
    return None


def mark_of(session: Session, name: str) -> str:
    """Return the name of the file that is the mark of the writer `name`."""
    return f"{session.token}/joined/{name}"


def handed_folder(session: Session, step: int, name: str) -> str:
    """Return the folder of the files that the writer `name` hands in for `step`."""
    return f"{session.token}/{step}/{name}"


def is_open(sessions: Store) -> bool:
    """Check whether the process that opened the session may be alive.

    The check writes an object to read the clock of the store.
    """
    if is_gone(read_mark(sessions, SESSION)):
        return False
    mark = sessions.stat(SESSION)
    return mark is not None and may_live(sessions, mark, store_time(sessions))


def pauses(store: Store) -> Iterator[float]:
    """Yield the seconds to sleep between polls of `store`.

    They grow up to a maximum on a disk, and stay the same in a bucket.
    """
    if store.local_folder is None:
        while True:
            yield _BUCKET_PAUSE_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while True:
        yield pause
        pause = min(1.5 * pause, _MAX_PAUSE_SECONDS)


def check_writer_names(names: Iterable[str]) -> None:
    """Raise ConfigError for invalid or repeated names of writers, and if there are none."""
    names = list(names)
    wrong = [repr(name) for name in names if not isinstance(name, str) or not _NAME.fullmatch(name)]
    wrong += sorted({f"{name!r} twice" for name in names if names.count(name) > 1})
    if wrong or not names:
        raise ConfigError(
            f"writers: {listing(wrong, ', ') or 'none'}; expected names of letters, digits, '.', "
            "'_' and '-', each once"
        )


def files_by_writer(manifest: Manifest) -> dict[str, tuple[FileRecord, ...]]:
    """Return the files of each writer in a checkpoint, with paths relative to its folder."""
    parts: dict[str, tuple[FileRecord, ...]] = {}
    for file in manifest.files:
        if file.path.startswith(f"{PARTS}/"):
            name, _, path = file.path.removeprefix(f"{PARTS}/").partition("/")
            parts[name] = (*parts.get(name, ()), replace(file, path=path))
    return parts


def default_rule(parts: Sequence[str], writers: Sequence[str]) -> dict[str, list[str]]:
    """Divide the parts of a checkpoint among the writers of a group.

    A writer gets the part of its own name. The remaining parts are dealt out in turn. For example,
    with four parts and two writers, writer 0 gets parts 0 and 2, and writer 1 gets parts 1 and 3.
    """
    assigned: dict[str, list[str]] = {}
    for name in writers:
        assigned[name] = [name] if name in parts else []
    remaining = [part for part in parts if part not in assigned]
    for number, part in enumerate(remaining):
        assigned[writers[number % len(writers)]].append(part)
    return assigned


def is_same_content(record: FileRecord, other: FileRecord) -> bool:
    """Check whether two files have the same bytes, by their records."""
    return (record.size_bytes, record.digest) == (other.size_bytes, other.digest)


def handed_to_json(handed: HandedIn) -> bytes:
    """Encode the contents of handed.json."""
    return json.dumps(asdict(handed)).encode()
