"""The scales of charts: their ends and ticks."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

_MIN_LOG_RATIO = 100  # between the largest and the smallest of at least five values
_MAX_VALUE = 1e300


@dataclass(frozen=True)
class Axis:
    """A scale with its ticks, linear or logarithmic."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def share(self, value: float) -> float:
        """Return the place of `value` between both ends, from 0 to 1."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low) if high > low else 0.5


def is_drawable(value: float) -> bool:
    """Check whether the value has a place on a scale: sums of several such values are finite."""
    return abs(value) <= _MAX_VALUE


def value_axis(values: Iterable[float], *, from_zero: bool = False, whole: bool = False) -> Axis:
    """Return a scale: linear, or logarithmic if `values` are positive and differ a hundredfold.

    With `from_zero` the scale is linear and begins at 0. With `whole` it has no ticks between whole
    numbers.
    """
    numbers = sorted(filter(is_drawable, values)) or [0.0]
    low, high = (0.0 if from_zero else numbers[0]), numbers[-1]
    is_spread = low > 0 and high / low >= _MIN_LOG_RATIO
    if is_spread and len(numbers) >= 5 and not whole:
        return _log_axis(low, high)
    if low == high:
        margin = 1.0 if whole else abs(low) * 0.1 or 1.0
        return Axis(low - margin if not from_zero else low, high + margin, (high,))
    step = _round_step((high - low) / 4)
    if whole:
        step = max(1.0, _round_step((high - low) / 5))
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = tuple(number * step for number in range(first, last + 1))
    if whole:  # steps: the curve takes the whole width
        return Axis(low, high, tuple(tick for tick in ticks if low <= tick <= high))
    return Axis(ticks[0], ticks[-1], ticks)


def _log_axis(low: float, high: float) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = math.ceil((last - first) / 5)
    ticks = tuple(10.0**power for power in range(first, last + 1, stride))
    return Axis(10.0**first, 10.0**last, ticks, is_log=True)


def _round_step(step: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is at least `step`."""
    if step < 1e-300:  # a power of ten below it is 0
        return 1e-300
    power = 10.0 ** math.floor(math.log10(step))
    candidates = [digit * power for digit in (1, 2, 5, 10)]
    return next(candidate for candidate in candidates if candidate >= step * (1 - 1e-9))


_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TIME_STEPS = [1, 2, 5, 10, 30]
_TIME_STEPS += [_MINUTE * count for count in (1, 2, 5, 10, 30)]
_TIME_STEPS += [_HOUR * count for count in (1, 2, 3, 6, 12)]
_TIME_STEPS += [_DAY * count for count in (1, 2, 5)]


def _time_step(seconds: float) -> int:
    """Return the smallest step that divides a span into at most four parts."""
    for step in _TIME_STEPS:
        if seconds / step <= 4:
            return step
    return math.ceil(seconds / 4 / _DAY) * _DAY


def _time_pattern(step: int) -> str:
    if step >= _DAY:
        return "%d %b"
    return "%H:%M" if step >= _MINUTE else "%H:%M:%S"


def time_axis(moments: Sequence[float]) -> tuple[Axis, Callable[[float], str]]:
    """Return the scale for unix times, and the text of a tick in UTC."""
    low, high = min(moments), max(moments)
    if low == high:
        low, high = low - 1, high + 1
    step = _time_step(high - low)
    pattern = _time_pattern(step)
    first = math.ceil(low / step) * step
    ticks = tuple(float(tick) for tick in range(first, int(high) + 1, step))

    def tick_text(moment: float) -> str:
        return datetime.fromtimestamp(moment, timezone.utc).strftime(pattern)

    return Axis(low, high, ticks), tick_text
