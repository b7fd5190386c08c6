"""Follows a run: yields each of its checkpoints when it is committed."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ft_ckpt.checkpoint import open_checkpoint
from ft_ckpt.checkpoint.catalog import CheckpointInfo, list_checkpoints
from ft_ckpt.errors import (
    CheckpointError,
    CorruptError,
    NotACheckpointError,
    UnreadableError,
    listing,
)
from ft_ckpt.messages import warn
from ft_ckpt.storage.places import Place, open_place

FOLLOW_SECONDS = 2.0

# name and time of a save
CheckpointKey = tuple[str, str]


def follow(
    run: str | Path | Place,
    *,
    idle_seconds: float | None = None,
    poll_seconds: float = FOLLOW_SECONDS,
    stop: threading.Event | None = None,
    on_problem: Callable[[CheckpointError], object] = lambda error: warn(str(error)),
) -> Iterator[CheckpointInfo]:
    """Yield the checkpoints of `run`, then each new one when it is committed.

    `run` is a folder or URL, which need not exist yet. The oldest checkpoint comes first. Each
    comes once, and once more if it was saved again. Checkpoints that were made from others (merged,
    averaged) are left out. While the body of the loop runs, its checkpoint has a lease, so no rule
    deletes it. The loop ends after `idle_seconds` without a new checkpoint (None: it does not end),
    and when `stop` is set.

    `on_problem` is called with errors, once for each text. A checkpoint that is damaged (as by
    `verify(deep=False)`) is skipped. What cannot be read now is an UnreadableError, and is tried
    again.
    """
    reported: set[str] = set()

    def report(error: CheckpointError) -> None:
        if str(error) not in reported:
            reported.add(str(error))
            on_problem(error)

    done: set[CheckpointKey] = set()
    stop = stop or threading.Event()
    for infos in poll_checkpoints(
        open_place(run).absolute, idle_seconds, poll_seconds, stop, report
    ):
        for info in infos:
            if stop.is_set():
                return
            if key_of(info) in done:
                continue
            with ExitStack() as lease:
                problem = _lease_intact(lease, info)
                # What cannot be read now is tried again at the next poll.
                if not isinstance(problem, UnreadableError):
                    done.add(key_of(info))
                if problem is None:
                    yield info
                # A NotACheckpointError means that it was deleted after it was listed.
                elif not isinstance(problem, NotACheckpointError):
                    report(problem)


def poll_checkpoints(
    run: Place,
    idle_seconds: float | None,
    poll_seconds: float,
    stop: threading.Event,
    on_problem: Callable[[CheckpointError], object],
) -> Iterator[list[CheckpointInfo]]:
    """Yield the list of all checkpoints of `run` at each poll, oldest first.

    Ends as `follow` does.
    """
    seen: set[CheckpointKey] = set()
    pause_seconds = poll_seconds if idle_seconds is None else min(poll_seconds, idle_seconds)
    quiet_since = time.monotonic()
    while not stop.is_set():
        # Taken before the poll: a checkpoint may be committed after it, while the caller works.
        polled = time.monotonic()
        infos = _infos_in(run, on_problem)
        new = {key_of(info) for info in infos} - seen
        seen |= new
        yield infos
        if new:
            quiet_since = time.monotonic()
        elif idle_seconds is not None and polled - quiet_since >= idle_seconds:
            return
        stop.wait(pause_seconds)


def key_of(info: CheckpointInfo) -> CheckpointKey:
    """Return a key that identifies one save of the run."""
    return info.name, info.manifest.created


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set.

    A second signal acts as it did before the block. In other threads than the main one, no signal
    sets the event.
    """
    stop = threading.Event()
    previous: dict[int, Any] = {}

    def restore_handlers() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def on_signal(*_: object) -> None:
        stop.set()
        restore_handlers()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, on_signal)

    try:
        yield stop
    finally:
        restore_handlers()


def _infos_in(run: Place, on_problem: Callable[[CheckpointError], object]) -> list[CheckpointInfo]:
    try:
        listed = list_checkpoints(run)
    except CheckpointError as error:
        on_problem(error)
        return []
    for damage in listed.damaged.values():
        on_problem(damage)
    return [info for info in listed.checkpoints if not info.manifest.made_from]


def _lease_intact(lease: ExitStack, info: CheckpointInfo) -> CheckpointError | None:
    """Lease the checkpoint until `lease` closes. Returns None, or the error why it cannot.

    The error is a CorruptError if files are missing or truncated.
    """
    with ExitStack() as trial:
        try:
            checkpoint = trial.enter_context(open_checkpoint(info.place))
            problems = checkpoint.find_problems(deep=False)
        except CheckpointError as error:
            return error
        if problems:
            return CorruptError(f"{info.path}: {listing(problems)}")
        lease.push(trial.pop_all())
    return None
