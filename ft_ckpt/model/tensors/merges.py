"""Parses the argument `merged` of a save, which chooses the adapters to merge."""

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ft_ckpt.errors import ConfigError

Merged = bool | str | Iterable[str] | Mapping[str, float]


@dataclass(frozen=True)
class MergeChoice:
    """Adapters to merge. If `adapters` is empty, these are the active ones.

    If `weights` is not empty, each adapter is multiplied by its weight.
    """

    adapters: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()


def merge_choice(
    merged: Merged, excluded: Mapping[str, Any] = MappingProxyType({})
) -> MergeChoice | None:
    """Parse the argument `merged`. Return None if no adapter is merged.

    `merged` is True for the active adapters, False for none, names of adapters, or names with
    weights. `excluded` has other arguments of the save, by name, which must be None or False in a
    merge. Raises ConfigError if one of them is given, for repeated names, for weights that are not
    finite, and for any other value of `merged`.
    """
    contradicting = []
    for name, value in excluded.items():
        if value is not None and value is not False:
            contradicting.append(name)

    if merged is not False and contradicting:
        raise ConfigError(
            f"merged={merged!r} and {', '.join(contradicting)}: a merged model is the whole model "
            "without adapters; leave one of them out"
        )

    if isinstance(merged, bool):
        return MergeChoice() if merged else None
    names: tuple[Any, ...] = ()
    if isinstance(merged, str):
        names = (merged,)
    elif isinstance(merged, Iterable):
        names = tuple(merged)

    weights: tuple[float, ...] = ()
    has_weights = True
    if isinstance(merged, Mapping):
        weights = tuple(finite_numbers(merged.values()))
        has_weights = len(weights) == len(names)

    are_names = all(isinstance(name, str) for name in names)
    is_repeated = len({str(name) for name in names}) < len(names)
    if not names or not are_names or is_repeated or not has_weights:
        raise ConfigError(
            f"merged={merged!r}: expected True, names of adapters, each once, or "
            "a weight for each name"
        )

    return MergeChoice(names, weights)


def finite_numbers(values: Any) -> list[float]:
    """Return the values as floats, or an empty list if they are not finite numbers in an order.

    A string, a mapping and a set are not.
    """
    if isinstance(values, (str, bytes, bytearray, Mapping, Set)):
        return []
    numbers = []
    try:
        for value in values:
            numbers.append(math.nan if isinstance(value, (str, bytes)) else float(value))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # A tensor of several elements raises the RuntimeError.
        return []
    return numbers if all(map(math.isfinite, numbers)) else []
