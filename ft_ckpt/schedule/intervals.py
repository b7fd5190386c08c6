"""Computes the optimal time between two saves and what it costs, and parses durations."""

import math
import re
from datetime import timedelta

from ft_ckpt.errors import ConfigError

_UNITS = {
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86400),
}
# number and unit
_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*")


def optimal_interval(save_seconds: float, mtbf_seconds: float, order: str = "daly") -> float:
    """Return the interval between two saves, in seconds, with the smallest expected loss of time.

    The interval is from the end of a save to the start of the next. C is the time of a save, and M
    the mean time between failures:

        order     interval
        "young"   sqrt(2 C M), the first-order result
        "daly"    with higher orders, which matter if C is not far below M; M if C >= 2 M

    Raises ConfigError if a time is not above 0, and for another `order`.
    """
    if not (save_seconds > 0 and mtbf_seconds > 0):
        raise ConfigError(
            f"save time {save_seconds} s, time between failures {mtbf_seconds} s: both must be "
            "above 0"
        )

    if order not in ("daly", "young"):
        raise ConfigError(f"order={order!r}: expected daly or young")
    young = math.sqrt(2 * save_seconds * mtbf_seconds)
    if order == "young" or math.isinf(young):
        return young
    if save_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = save_seconds / (2 * mtbf_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def bounded_interval(save_seconds: float, max_overhead: float) -> float:
    """Return the shortest interval in seconds at which saves cost at most `max_overhead`.

    `max_overhead` is a fraction of the time, in (0, 1].
    """
    return save_seconds * (1 - max_overhead) / max_overhead


def expected_overhead(
    interval_seconds: float, save_seconds: float, mtbf_seconds: float, restart_seconds: float = 0.0
) -> float:
    """Return the time of saves, repeated work and restarts, as a multiple of useful time.

    The result is exact if failures come at a constant rate, also during saves and restarts. It is
    infinite if the run would in practice never reach the next checkpoint. `mtbf_seconds` may be
    infinite.
    """
    if math.isinf(mtbf_seconds):
        return save_seconds / interval_seconds
    try:
        expected_failures = math.expm1((interval_seconds + save_seconds) / mtbf_seconds)
        seconds_per_failure = mtbf_seconds * math.exp(restart_seconds / mtbf_seconds)
    except OverflowError:
        return math.inf
    return seconds_per_failure * expected_failures / interval_seconds - 1


def parse_seconds(duration: float | timedelta | str) -> float:
    """Convert a number, a timedelta, or text such as "90s", "45min", "24h" and "7d" to seconds.

    Raises ConfigError for any other value, and for a duration that is not above 0.
    """
    seconds = math.nan
    if isinstance(duration, timedelta):
        seconds = duration.total_seconds()
    elif isinstance(duration, str):
        match = _DURATION.fullmatch(duration.lower())
        if match is not None and match[2] in _UNITS:
            seconds = float(match[1]) * _UNITS[match[2]]
    elif isinstance(duration, (int, float)) and not isinstance(duration, bool):
        seconds = float(duration)

    if seconds > 0:
        return seconds
    raise ConfigError(
        f"{duration!r} is not a duration; write seconds as a number, or text such as '90s', "
        "'24h', '7d'"
    )
