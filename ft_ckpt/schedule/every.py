"""Defines and checks `Every`, the settings that say when to save."""

import math
import os
import sys
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from typing_extensions import Self

from ft_ckpt.errors import Rule, check_settings, is_number, refuse_unknown_fields
from ft_ckpt.schedule.intervals import parse_seconds

# signals that ask a process to end
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGXCPU")
# environment variable in which Slurm gives the end of a job, as unix seconds
DEADLINE_VARIABLE = "SLURM_JOB_END_TIME"


@dataclass(frozen=True, kw_only=True)
class Every:
    """When to save: whenever one of these is due.

    `Every()` alone saves on signals and before the end of a Slurm job.

    Raises ConfigError, with every problem at once, for invalid values.
    """

    steps: int | None = None
    """At each multiple of this many steps."""
    epochs: int | None = None
    """At the end of each multiple of this many epochs."""
    minutes: float | None = None
    """This long after the last save ended."""
    best: tuple[str, str] | None = None
    """Name of a metric and "min" or "max": whenever it is better than at all earlier saves."""
    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGINT")
    """On one of these: save at the end of the step, then exit; a second signal ends the process at
    once.
    """
    exit_code: int | None = None
    """Exit code after a save on a signal; None is 128 plus the signal's number, as in a shell."""
    deadline: float | datetime | str | None = "auto"
    """Before this time: unix seconds, a datetime, ISO 8601 text (local without offset); "auto": end
    of a Slurm job.
    """
    deadline_margin_minutes: float | None = None
    """Time before the deadline; None is three saves and two steps as measured, at least 1 minute (5
    if unmeasured).
    """
    mtbf: float | timedelta | str | None = None
    """Mean time between failures of the run, in seconds or as "24h": saves at the interval with the
    smallest loss.
    """
    max_overhead: float = 0.05
    """Largest fraction of the time that saves for `mtbf` may take, in (0, 1]; other reasons are not
    limited.
    """

    def __new__(cls, *values: Any, **settings: Any) -> Self:
        refuse_unknown_fields(cls, values, settings)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_settings(self, _RULES)

    @classmethod
    def optimal(
        cls, mtbf: float | timedelta | str, max_overhead: float = 0.05, **settings: Any
    ) -> "Every":
        """Save at the interval with the smallest loss for failures every `mtbf` on average.

        The run measures its saves and corrects the interval.
        """
        return cls(mtbf=mtbf, max_overhead=max_overhead, **settings)

    def deadline_unix(self) -> float | None:
        """Return the deadline in unix seconds; None if there is none."""
        if self.deadline == "auto":
            end = os.environ.get(DEADLINE_VARIABLE, "")
            return float(end) if end.isdecimal() else None
        return _unix_seconds(self.deadline)


def _unix_seconds(when: float | datetime | str | None) -> float | None:
    if isinstance(when, str):
        # Python 3.10 does not know the letter Z for UTC.
        when = datetime.fromisoformat(when.replace("Z", "+00:00"))
    return when.timestamp() if isinstance(when, datetime) else when


def _is_duration(value: Any) -> bool:
    return value is None or parse_seconds(value) > 0


def _is_best(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, (tuple, list)) and len(value) == 2 and value[1] in ("min", "max")


def _are_signals(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(name in SIGNALS for name in value)


def _is_deadline(value: Any) -> bool:
    return value in (None, "auto") or is_number(_unix_seconds(value), 0, sys.float_info.max)


def _number_rule(
    field: str,
    words: str,
    minimum: float,
    maximum: float = math.inf,
    *,
    whole: bool = False,
    optional: bool = True,
) -> Rule:
    """Return the rule that a field is a number in [minimum, maximum], or None if `optional`."""

    def is_valid(value: Any) -> bool:
        if value is None:
            return optional
        return is_number(value, minimum, maximum, whole=whole)

    return field, is_valid, words


_ABOVE_ZERO = math.ulp(0.0)  # the smallest number above 0
_RULES: tuple[Rule, ...] = (
    _number_rule("steps", "a whole number above 0", 1, whole=True),
    _number_rule("epochs", "a whole number above 0", 1, whole=True),
    _number_rule("minutes", "a number above 0", _ABOVE_ZERO),
    _number_rule("exit_code", "0 to 255", 0, 255, whole=True),
    _number_rule("deadline_margin_minutes", "0 or more", 0),
    _number_rule("max_overhead", "a number above 0, at most 1", _ABOVE_ZERO, 1, optional=False),
    ("best", _is_best, 'the name of a metric and "min" or "max"'),
    ("signals", _are_signals, f"a tuple of {', '.join(SIGNALS)}"),
    ("deadline", _is_deadline, '"auto", unix seconds, a datetime or ISO 8601 text'),
    ("mtbf", _is_duration, "a duration: seconds, or text such as '90s', '24h', '7d'"),
)
