"""Follows a run: its checkpoints, each when it is committed."""

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

CheckpointKey = tuple[str, str]  # name and time of a save


def follow(
    run: str | Path | Place,
    *,
    idle_seconds: float | None = None,
    poll_seconds: float = FOLLOW_SECONDS,
    stop: threading.Event | None = None,
    on_problem: Callable[[CheckpointError], object] = lambda error: warn(str(error), stacklevel=4),
) -> Iterator[CheckpointInfo]:
    """The checkpoints of `run`, a folder or URL that may not exist yet: those that are there, then
    each new one.

    They come oldest first, each once, and once more if it was saved again; those that were made
    from others (merged, averaged) do not come. While the body of the loop runs, the checkpoint is
    leased: no rule deletes it. The loop ends after `idle_seconds` without a new checkpoint (None:
    never), and when `stop` is set.

    `on_problem` gets the error of a checkpoint that is damaged (as by `verify(deep=False)`), which
    is skipped, and an UnreadableError of what cannot be read now, which is tried again; each text
    once.
    """
    reported: set[str] = set()

    def report(error: CheckpointError) -> None:
        if str(error) not in reported:
            reported.add(str(error))
            on_problem(error)

    done: set[CheckpointKey] = set()
    stop = stop or threading.Event()
    for infos in looks(open_place(run).absolute, idle_seconds, poll_seconds, stop, report):
        for info in infos:
            if stop.is_set():
                return
            if key_of(info) in done:
                continue
            with ExitStack() as lease:
                try:
                    _enter_whole(lease, info)
                except UnreadableError as error:
                    report(error)
                    continue
                except CheckpointError as error:
                    done.add(key_of(info))
                    if not isinstance(error, NotACheckpointError):  # deleted since the look
                        report(error)
                    continue
                done.add(key_of(info))
                yield info


def looks(
    run: Place,
    idle_seconds: float | None,
    poll_seconds: float,
    stop: threading.Event,
    on_problem: Callable[[CheckpointError], object],
) -> Iterator[list[CheckpointInfo]]:
    """The checkpoints of `run` at each look, oldest first; ends as `follow` does."""
    seen: set[CheckpointKey] = set()
    pause_seconds = poll_seconds if idle_seconds is None else min(poll_seconds, idle_seconds)
    quiet_since = time.monotonic()
    while not stop.is_set():
        # a checkpoint may be committed after the look, while the caller works
        looked = time.monotonic()
        infos = _infos_in(run, on_problem)
        new = {key_of(info) for info in infos} - seen
        seen |= new
        yield infos
        if new:
            quiet_since = time.monotonic()
        elif idle_seconds is not None and looked - quiet_since >= idle_seconds:
            return
        stop.wait(pause_seconds)


def key_of(info: CheckpointInfo) -> CheckpointKey:
    """Identifies a save of the run."""
    return info.name, info.manifest.created


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set; a second signal acts as it did before.

    Only in the main thread.
    """
    stop = threading.Event()
    before = dict[int, Any]()

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(*_: object) -> None:
        stop.set()
        put_back()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    try:
        yield stop
    finally:
        put_back()


def _infos_in(run: Place, on_problem: Callable[[CheckpointError], object]) -> list[CheckpointInfo]:
    try:
        listed = list_checkpoints(run)
    except CheckpointError as error:
        on_problem(error)
        return []
    for damage in listed.damaged.values():
        on_problem(damage)
    return [info for info in listed.found if not info.manifest.made_from]


def _enter_whole(lease: ExitStack, info: CheckpointInfo) -> None:
    """Lease the checkpoint. Raises CorruptError if its files are missing or truncated."""
    opened = lease.enter_context(open_checkpoint(info.place))
    problems = opened.find_problems(deep=False)
    if problems:
        lease.close()
        raise CorruptError(f"{info.path}: {listing(problems)}")
