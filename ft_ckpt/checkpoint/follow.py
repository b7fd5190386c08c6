"""Follows a run: visits each new checkpoint, until a signal or an idle time."""

import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ft_ckpt.checkpoint.catalog import CheckpointInfo, list_checkpoints
from ft_ckpt.errors import CheckpointError
from ft_ckpt.storage.place import Place

POLL_SECONDS = 2.0
_MOST_FAILURES = 2  # of one checkpoint

Key = tuple[str, str]  # name and time of a save


@dataclass(eq=False)
class Follower(ABC):
    """Calls `visit` with the checkpoints of a run that are not settled yet."""

    run: Place
    on_trouble: Callable[[str], object]
    settled: set[Key] = field(default_factory=set, init=False)  # done, skipped or obsolete: not visited again
    errors: dict[Key, CheckpointError] = field(default_factory=dict, init=False)  # of checkpoints that are not done
    outages: set[str] = field(default_factory=set, init=False)  # reported errors that may pass, since the last success
    stop: threading.Event = field(default_factory=threading.Event, init=False)  # set by a signal
    _seen: set[Key] = field(default_factory=set, init=False)
    _skipped: set[str] = field(default_factory=set, init=False)  # reported reasons of skipped checkpoints
    _failures: dict[Key, int] = field(default_factory=dict, init=False)

    @abstractmethod
    def visit(self, waiting: Sequence[CheckpointInfo], infos: Sequence[CheckpointInfo]) -> None:
        """Process `waiting`, those of `infos` that are not settled; both oldest first."""

    def follow(self, idle_seconds: float | None, poll_seconds: float) -> None:
        """Visit the checkpoints until SIGINT or SIGTERM, or `idle_seconds` without a new checkpoint.

        A visit in progress is finished first. After `idle_seconds`, raises the newest of `errors`.
        """
        quiet_since = time.monotonic()
        with _stop_on_signal(self.stop):
            while not self.stop.is_set():
                looked = time.monotonic()  # a checkpoint may be committed after the listing, during a long visit
                if self._look():
                    quiet_since = time.monotonic()
                elif idle_seconds is not None and looked - quiet_since >= idle_seconds:
                    if self.errors:
                        raise list(self.errors.values())[-1]
                    break
                self.stop.wait(poll_seconds)

    def retry(self, info: CheckpointInfo, error: CheckpointError, *, counts: bool) -> None:
        """Report an error that may pass; skip the checkpoint at the second one that `counts`."""
        self._note_error(info, error)
        failures = self._failures[key_of(info)] = self._failures.get(key_of(info), 0) + counts
        if failures >= _MOST_FAILURES:
            self.skip(info, error)
        else:
            self.report_once(f"{error}; trying again", self.outages)

    def skip(self, info: CheckpointInfo, error: CheckpointError) -> None:
        self.settled.add(key_of(info))
        self._note_error(info, error)
        self.report_once(f"{info.path}: skipped: {error}", self._skipped)

    def _look(self) -> bool:
        """Visit the checkpoints that are not settled; returns whether one is new."""
        try:
            listed = list_checkpoints(self.run)
        except CheckpointError as error:
            self.report_once(f"{error}; trying again", self.outages)
            return False
        for path, problem in listed.damaged.items():
            self.report_once(f"{path}: skipped: {problem}", self._skipped)
        infos = [info for info in listed.found if not info.manifest.made_from]
        new = {key_of(info) for info in infos} - self._seen
        self._seen |= new
        if waiting := [info for info in infos if key_of(info) not in self.settled]:
            self.visit(waiting, infos)
        return bool(new)

    def _note_error(self, info: CheckpointInfo, error: CheckpointError) -> None:
        self.errors.pop(key_of(info), None)
        self.errors[key_of(info)] = error  # the newest is the last

    def report_once(self, text: str, reported: set[str]) -> None:
        """Report `text` unless it is in `reported`, and put it there."""
        if text not in reported:
            reported.add(text)
            self.on_trouble(text)


def key_of(info: CheckpointInfo) -> Key:
    """Identifies a save of the run."""
    return info.name, info.manifest.created


@contextmanager
def _stop_on_signal(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set `stop`; a second signal acts as it did before. Only in the main thread."""
    before = dict[int, Any]()

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(*_: object) -> None:
        stop.set()
        put_back()

    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        put_back()
