"""Keeps the log of a run's saves, which its checkpoints store."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ft_ckpt.errors import LoadError
from ft_ckpt.schema import as_record

# A longer log loses every second save of its older half.
_MAX_LOGGED = 500


@dataclass(frozen=True)
class LoggedSave:
    """One save of a run's state.

    The last three fields are None until they are known. A checkpoint stores the log before they are
    known for itself, so after a resume they are None for the save that the run was resumed from.

    Attributes:
        step: The step that was saved.
        saved_at: When the save was called, in unix seconds.
        reason: The reason of the schedule; None if the script requested the save.
        metrics: The metrics of the checkpoint.
        stall_seconds: How long training has waited. It is known when the call returns. For a save
            in the background, the wait of optimizers for its copies is added after the commit.
        seconds: The time until the commit.
        size_bytes: The size of all files.
    """

    step: int
    saved_at: float
    reason: str | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    stall_seconds: float | None = None
    seconds: float | None = None
    size_bytes: int | None = None


def append_save(log: Sequence[LoggedSave], entry: LoggedSave) -> tuple[LoggedSave, ...]:
    """Return the log with one more entry, which replaces an entry of the same step.

    A log of more than 500 saves loses every second save of its older half.
    """
    entries = [save for save in log if save.step != entry.step]
    entries.append(entry)
    if len(entries) <= _MAX_LOGGED:
        return tuple(entries)
    half = len(entries) // 2
    return (*entries[:half:2], *entries[half:])


def finish_last(
    log: Sequence[LoggedSave], seconds: float, size_bytes: int, waited_seconds: float
) -> tuple[LoggedSave, ...]:
    """Return the log after the commit of its last save, which ran in the background.

    Optimizers have waited `waited_seconds` for its copies.
    """
    if not log:
        return ()
    last = log[-1]
    stall = None if last.stall_seconds is None else last.stall_seconds + waited_seconds
    last = replace(last, seconds=seconds, size_bytes=size_bytes, stall_seconds=stall)
    return (*log[:-1], last)


def log_to_json(log: Sequence[LoggedSave]) -> list[dict[str, Any]]:
    """Return the log as JSON values. Metrics that are not finite become text, such as "nan"."""
    entries = []
    for save in log:
        metrics = {
            name: value if math.isfinite(value) else str(value)
            for name, value in save.metrics.items()
        }
        entries.append({**vars(save), "metrics": metrics})
    return entries


def log_from_json(document: Any) -> tuple[LoggedSave, ...]:
    """Read the log from a result of `log_to_json`. Raises LoadError for any other document."""
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
