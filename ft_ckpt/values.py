"""Checks and converts values that users pass: sizes, metrics, steps, names and dtypes."""

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ft_ckpt.errors import ConfigError, is_number, listing

_SHORT_DTYPES = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?\s*")


def metrics_as_floats(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Convert the values of `metrics` to floats. None becomes {}.

    A value is a number, or a tensor or array of one element. Raises ConfigError naming all values
    that are not one real number, and if `metrics` is not a mapping.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics={metrics!r:.80}: expected a name and a number for each, "
            f"such as {{'loss': 0.5}}"
        )

    numbers: dict[str, float] = {}
    problems = []
    for name, value in metrics.items():
        number = _as_float(value)
        if number is None:
            problems.append(f"{name} is {_value_kind(value)}")
        else:
            numbers[name] = number

    for name in metrics:
        if not isinstance(name, str):
            problems.append(f"the name {name!r} is not a string")

    if problems:
        raise ConfigError(
            f"metrics: {listing(problems)}; expected a name and one real number for each"
        )

    return numbers


def optional_step(step: Any) -> int | None:
    """Return `step` as an int, or None if it is None. Raises ConfigError for anything else."""
    return None if step is None else whole_step(step)


def whole_step(step: Any) -> int:
    """Return `step` as an int. Raises ConfigError if it is not an integer from 0 on."""
    if not is_number(step, 0, whole=True):
        raise ConfigError(f"step={step!r:.80}: expected a non-negative integer")
    return int(step)


def as_names(names: Any, what: str) -> tuple[str, ...]:
    """Return the names in an argument, which is one name or an iterable of them.

    `what` names the argument in errors. Raises ConfigError for anything else.
    """
    if isinstance(names, str):
        return (names,)
    items = tuple(names) if isinstance(names, Iterable) else (names,)
    if not all(isinstance(name, str) for name in items):
        raise ConfigError(f"{what}: {names!r:.80}: expected names in a list")
    return items


def parse_size(size: int | str) -> int:
    """Return a size in bytes.

    `size` is an int, or a string such as "500MB" (500 * 1000**2) or "500MiB" (500 * 1024**2).
    Raises ConfigError for anything else.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    match = _SIZE.fullmatch(str(size).upper())
    if match is None or (match[3] and not match[2]):
        raise ConfigError(
            f"{size!r} is not a size; write bytes as a number, or a string such as '5GB' or '5GiB'"
        )
    base = 1024 if match[3] else 1000
    power = " KMGT".index(match[2] or " ")
    return int(float(match[1]) * base**power)


def is_size(value: Any) -> bool:
    """Check whether `parse_size` returns at least one byte for the value."""
    with suppress(ConfigError):
        return parse_size(value) > 0
    return False


def human_size(size_bytes: float) -> str:
    """Format a number of bytes in decimal units, such as "1.5 GB"."""
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    power = min(4, (len(str(int(size_bytes))) - 1) // 3)
    return f"{size_bytes / 1000**power:.1f} {'KMGT'[power - 1]}B"


def canonical_dtype(dtype: Any) -> Any:
    """Return torch's name of a dtype, such as "bfloat16".

    `dtype` is a torch.dtype, its name or a short name such as "bf16". Anything else is returned
    unchanged.
    """
    name = dtype
    if type(dtype).__name__ == "dtype":
        name = str(dtype)
    if not isinstance(name, str):
        return name
    name = name.removeprefix("torch.")
    return _SHORT_DTYPES.get(name, name)


def _as_float(value: Any) -> float | None:
    """Convert `value` to a float. Returns None if it is not one real number."""
    shape = getattr(value, "shape", ())
    if isinstance(value, (str, bytes, bytearray)) or math.prod(shape) != 1:
        return None
    try:
        return float(value.item() if shape else value)
    except (TypeError, ValueError, OverflowError):
        return None


def _value_kind(value: Any) -> str:
    """Return the class of a value in words, with the shape of a tensor or array."""
    name = f"a {type(value).__name__}"
    shape = getattr(value, "shape", None)
    return f"{name} of shape {list(shape)}" if shape else name
