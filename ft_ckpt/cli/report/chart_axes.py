"""Chooses the ends and the ticks of the axes of charts."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

# An axis is logarithmic if there are enough values and the largest is that many times the smallest.
_MIN_LOG_RATIO = 100
_MIN_LOG_VALUES = 5
_MAX_VALUE = 1e300  # Sums of several such values do not overflow.


@dataclass(frozen=True)
class Axis:
    """A linear or logarithmic axis from `low` to `high`, with the values of its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def position_of(self, value: float) -> float:
        """Return where `value` lies on the axis: 0 at its low end, 1 at its high end."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low) if high > low else 0.5


def is_drawable(value: float) -> bool:
    """Check that the value is small enough to be drawn, and to be added to others."""
    return abs(value) <= _MAX_VALUE


def step_axis(steps: Iterable[float]) -> Axis:
    """Return the axis of training steps.

    The axis has no margins, and its ticks are whole numbers.
    """
    low, high = _range_of(steps)
    if low == high:
        return Axis(low - 1.0, high + 1.0, (high,))
    tick_step = max(1.0, _round_step((high - low) / 5))
    ticks = _ticks_around(low, high, tick_step)
    return Axis(low, high, tuple(tick for tick in ticks if low <= tick <= high))


def size_axis(sizes: Iterable[float]) -> Axis:
    """Return a linear axis that begins at 0."""
    _, high = _range_of(sizes)
    if high == 0.0:
        return Axis(0.0, 1.0, (0.0,))
    return _linear_axis(0.0, high)


def value_axis(values: Iterable[float]) -> Axis:
    """Return the axis of measured values.

    The axis is logarithmic if there are at least five values, all are positive, and the largest is
    at least 100 times the smallest. Otherwise it is linear. Both end at a tick.
    """
    numbers = [value for value in values if is_drawable(value)]
    low, high = _range_of(numbers)
    if low == high:
        margin = abs(low) * 0.1
        if margin == 0.0:
            margin = 1.0
        return Axis(low - margin, high + margin, (high,))
    is_spread = low > 0 and high / low >= _MIN_LOG_RATIO
    if is_spread and len(numbers) >= _MIN_LOG_VALUES:
        return _log_axis(low, high)
    return _linear_axis(low, high)


def _range_of(values: Iterable[float]) -> tuple[float, float]:
    """Return the smallest and the largest drawable value, or 0 and 0 if there is none."""
    numbers = [value for value in values if is_drawable(value)]
    if not numbers:
        return 0.0, 0.0
    return min(numbers), max(numbers)


def _linear_axis(low: float, high: float) -> Axis:
    ticks = _ticks_around(low, high, _round_step((high - low) / 4))
    return Axis(ticks[0], ticks[-1], ticks)


def _ticks_around(low: float, high: float, tick_step: float) -> tuple[float, ...]:
    """Return the multiples of `tick_step` that enclose the range from `low` to `high`."""
    first = math.floor(low / tick_step)
    last = math.ceil(high / tick_step)
    return tuple(number * tick_step for number in range(first, last + 1))


def _log_axis(low: float, high: float) -> Axis:
    first = math.floor(math.log10(low))
    last = math.ceil(math.log10(high))
    stride = math.ceil((last - first) / 5)
    ticks = tuple(10.0**power for power in range(first, last + 1, stride))
    return Axis(10.0**first, 10.0**last, ticks, is_log=True)


def _round_step(step: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    if step < 1e-300:  # 10.0**power would be 0
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
    """Return the smallest step of a clock that divides the span into at most four parts."""
    for step in _TIME_STEPS:
        if seconds / step <= 4:
            return step
    return math.ceil(seconds / 4 / _DAY) * _DAY


def _time_pattern(step: int) -> str:
    if step >= _DAY:
        return "%d %b"
    return "%H:%M" if step >= _MINUTE else "%H:%M:%S"


def time_axis(moments: Sequence[float]) -> tuple[Axis, Callable[[float], str]]:
    """Return the axis of Unix times, and a function that formats a tick in UTC."""
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
