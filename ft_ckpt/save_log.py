"""The log of a run's saves: kept with the run's state, so it outlives the checkpoints that are deleted. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ft_ckpt.errors import LoadError

_MOST = 500  # entries: at more, every second one of the older half goes


@dataclass(frozen=True)
class LoggedSave:
    """One save of a run's state. Its times are None while it is on its way, and where the run went on from it."""

    step: int
    saved_at: float  # unix seconds, when it was asked for
    reason: str | None  # of the schedule; None for the script's own
    metrics: Mapping[str, float] = field(default_factory=dict)
    stall_seconds: float | None = None  # for which the call kept training waiting
    seconds: float | None = None  # until the commit
    size_bytes: int | None = None  # of all files


def append_save(log: Sequence[LoggedSave], entry: LoggedSave) -> tuple[LoggedSave, ...]:
    """The log with one more entry; a long one is thinned out at its older end."""
    log = (*(each for each in log if each.step != entry.step), entry)
    if len(log) <= _MOST:
        return log
    half = len(log) // 2
    return (*log[:half:2], *log[half:])


def finish_last(log: Sequence[LoggedSave], seconds: float, size_bytes: int) -> tuple[LoggedSave, ...]:
    """The log once the last save, in the background, is committed."""
    return (*log[:-1], *(replace(each, seconds=seconds, size_bytes=size_bytes) for each in log[-1:]))


def log_to_json(log: Sequence[LoggedSave]) -> list[dict[str, Any]]:
    """The log as JSON values; metrics that are not finite are text."""
    return [{**vars(each), "metrics": {name: _as_json(value) for name, value in each.metrics.items()}} for each in log]


def log_from_json(document: Any) -> tuple[LoggedSave, ...]:
    """What `log_to_json` gave. Raises LoadError when it did not give that."""
    try:
        return tuple(_entry_from_json(each) for each in document)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise LoadError(
            f"saves: {error!r} in the log of saves; the file was not written by ft_ckpt or was changed since"
        ) from error


def _entry_from_json(entry: Mapping[str, Any]) -> LoggedSave:
    known = {each.name: entry[each.name] for each in fields(LoggedSave)}
    known["metrics"] = {str(name): float(value) for name, value in known["metrics"].items()}
    for name, kind in (("step", int), ("saved_at", float)):
        known[name] = kind(known[name])
    for name, kind in (("stall_seconds", float), ("seconds", float), ("size_bytes", int)):
        known[name] = None if known[name] is None else kind(known[name])
    return LoggedSave(**known)


def _as_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
