"""The plan of the stored tensors: parts (loadable folders) and their entries; the adapters to
merge.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ft_ckpt.errors import ConfigError
from ft_ckpt.formats import dtype_name
from ft_ckpt.ranks.sharding import Source

MODEL_FILE = "model"

Merged = bool | str | Iterable[str] | Mapping[str, float]  # the argument of a save


@dataclass(frozen=True, eq=False)
class Group:
    """Stored tensors that are computed together from full sources, such as experts kept fused in
    memory.
    """

    sources: tuple[Source, ...]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]  # by canonical name -> by stored name


class Entry(NamedTuple):
    """One stored tensor: streamed from a source, possibly in another dtype, or computed by a
    group.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # in the file
    memory_dtype: torch.dtype
    source: Source | None = None
    group: Group | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        if self.group is not None:
            return self.group.sources
        return () if self.source is None else (self.source,)


def unchanged_entry(name: str, source: Source) -> Entry:
    """The entry of a tensor that is stored unchanged under the given name."""
    return Entry(name, source.shape, source.dtype, source.dtype, source)


@dataclass(frozen=True, eq=False)
class Part:
    """One loadable part in a folder: the whole model, a submodel, a plain module or an adapter."""

    name: str
    path: str  # folder relative to the checkpoint, "" for the checkpoint itself
    kind: str  # "model" | "module" | "adapter"
    module: Any  # the nn.Module, unwrapped
    entries: tuple[Entry, ...]
    file: str = MODEL_FILE
    ties: tuple[tuple[str, ...], ...] = ()
    adapter: str | None = None
    active: bool = False
    beside: bool = False  # an adapter whose current base is in the same checkpoint
    # declared tied, but two tensors in memory: compared at the save
    doubtful: tuple[tuple[Source, Source], ...] = ()
    # frozen tensors of an adapter's base, by base name
    base: Mapping[str, Source] = field(default_factory=dict)
    # of a transformers model, tied ones under each name
    tensors: Mapping[str, Source] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    omitted: tuple[Source, ...] = ()  # left out on purpose: recreated by the class or PEFT
    extra: str | None = None  # the text of EXTRA_FILE, if there is any
    metadata: Mapping[str, str] = field(default_factory=dict)  # for the headers of its weight files

    @property
    def casts(self) -> dict[str, int]:
        """All casts, widening ones included, as {"float32->bfloat16": number of tensors}."""
        casts: Counter[str] = Counter()
        for entry in self.entries:
            if entry.dtype != entry.memory_dtype:
                casts[f"{dtype_name(entry.memory_dtype)}->{dtype_name(entry.dtype)}"] += 1
        return dict(casts)

    @property
    def main_dtype(self) -> str:
        """The stored dtype of most floating-point elements, for the config.

        "float32" if there are none.
        """
        elements: Counter[str] = Counter()
        for entry in self.entries:
            if entry.dtype.is_floating_point:
                elements[dtype_name(entry.dtype)] += max(1, torch.Size(entry.shape).numel())
        return elements.most_common(1)[0][0] if elements else "float32"


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
    """The choice for the argument `merged`: True for the active adapters, False for none, names, or
    names with weights.

    `excluded`: the arguments that a merge excludes, by name. Raises ConfigError for anything else,
    repeated names, weights that are not finite, and for an excluded argument that is neither None
    nor False.
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
    """The values as floats.

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
