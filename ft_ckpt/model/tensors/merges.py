"""The adapters that a save merges, as its argument `merged` chooses them."""

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ft_ckpt.errors import ConfigError

Merged = bool | str | Iterable[str] | Mapping[str, float]  # the argument of a save


@dataclass(frozen=True)
class MergeChoice:
    """The adapters to merge: `adapters`, or the active ones if empty.

    Each multiplied by its weight, if given.
    """

    adapters: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()


def merge_choice(
    merged: Merged, excluded: Mapping[str, Any] = MappingProxyType({})
) -> MergeChoice | None:
    """Parse the argument `merged`: True, False, names of adapters, or names with weights.

    True stands for the active adapters, False for none. `excluded` has the arguments that a merge
    excludes, by name. Raises ConfigError for anything else, repeated names, weights that are not
    finite, and for an excluded argument that is neither None nor False.
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
    """Return the values as floats.

    Empty unless they are finite numbers in an order: no string, mapping or set.
    """
    if isinstance(values, (str, bytes, bytearray, Mapping, Set)):
        return []
    numbers = []
    try:
        for value in values:
            numbers.append(math.nan if isinstance(value, (str, bytes)) else float(value))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        # the last from a tensor of several elements
        return []
    return numbers if all(map(math.isfinite, numbers)) else []
