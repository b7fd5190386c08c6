"""The log of a run's saves, which its checkpoints store."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ft_ckpt.errors import LoadError
from ft_ckpt.schema import as_record

_MAX_LOGGED = 500  # saves; beyond it, every second one of the older half is dropped


@dataclass(frozen=True)
class LoggedSave:
    """One save of a run's state.

    `stall_seconds` is None until the call returns; of a save in the background it includes the wait
    of optimizers only after the commit. `seconds` and `size_bytes` are None until the commit, all
    of them after a resume from this save.
    """

    step: int
    saved_at: float  # unix seconds, of the call
    reason: str | None  # of the schedule; None if the script asked for it
    metrics: Mapping[str, float] = field(default_factory=dict)
    stall_seconds: float | None = None  # time that training waited
    seconds: float | None = None  # until the commit
    size_bytes: int | None = None  # of all files


def append_save(log: Sequence[LoggedSave], entry: LoggedSave) -> tuple[LoggedSave, ...]:
    """Return the log with one more entry; a long log is thinned out at its older end."""
    entries = [save for save in log if save.step != entry.step]
    entries.append(entry)
    if len(entries) <= _MAX_LOGGED:
        return tuple(entries)
    half = len(entries) // 2
    return (*entries[:half:2], *entries[half:])


def finish_last(
    log: Sequence[LoggedSave], seconds: float, size_bytes: int, waited_seconds: float
) -> tuple[LoggedSave, ...]:
    """Return the log after the commit of the last save.

    It was in the background, and optimizers have waited for it.
    """
    if not log:
        return ()
    last = log[-1]
    stall = None if last.stall_seconds is None else last.stall_seconds + waited_seconds
    last = replace(last, seconds=seconds, size_bytes=size_bytes, stall_seconds=stall)
    return (*log[:-1], last)


def log_to_json(log: Sequence[LoggedSave]) -> list[dict[str, Any]]:
    """Return the log as JSON values; metrics that are not finite are text."""
    entries = []
    for save in log:
        metrics = {
            name: value if math.isfinite(value) else str(value)
            for name, value in save.metrics.items()
        }
        entries.append({**vars(save), "metrics": metrics})
    return entries


def log_from_json(document: Any) -> tuple[LoggedSave, ...]:
    """Read the log from the result of `log_to_json`. Raises LoadError for another document."""
    try:
        stored = as_record(document, tuple[_StoredSave, ...])
        return tuple(save.logged() for save in stored)
    except ValueError as error:
        raise LoadError(
            f"saves: {error} in the log of saves; the file was not written by ft_ckpt or was "
            "changed since"
        ) from error


@dataclass(frozen=True)
class _StoredSave:
    """One save in a JSON document: metrics that are not finite are text."""

    step: int
    saved_at: float
    reason: str | None
    metrics: Mapping[str, float | str]
    stall_seconds: float | None
    seconds: float | None
    size_bytes: int | None

    def logged(self) -> LoggedSave:
        metrics = {name: float(value) for name, value in self.metrics.items()}
        return LoggedSave(**{**vars(self), "metrics": metrics})
