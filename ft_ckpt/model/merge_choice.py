"""Which adapters are merged. What merges them needs PEFT, which takes seconds to import; asking for it does not."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ft_ckpt.errors import ConfigError

Merged = bool | str | Iterable[str] | Mapping[str, float]


@dataclass(frozen=True)
class MergeChoice:
    """Which adapters are merged: those that are active, or `adapters`; each times its weight where there are any."""

    adapters: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()


def merge_choice(merged: Merged) -> MergeChoice | None:
    """The adapters that `merged` names: True for those that are active, False for none, a mapping with weights.

    Raises ConfigError for names that come twice and weights that are no numbers.
    """
    if isinstance(merged, bool):
        return MergeChoice() if merged else None
    weights = tuple(float(one) for one in merged.values()) if isinstance(merged, Mapping) else ()
    names = (merged,) if isinstance(merged, str) else tuple(merged)
    if not names or len(set(names)) < len(names) or not all(map(math.isfinite, weights)):
        raise ConfigError(f"merged={merged!r}: expected True, names of adapters, each once, or a weight for each name")
    return MergeChoice(names, weights)
