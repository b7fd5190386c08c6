"""The plan of the stored tensors: parts (loadable folders) and their entries."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ft_ckpt.formats import dtype_name
from ft_ckpt.ranks.sharding import Source

MODEL_FILE = "model"


@dataclass(frozen=True, eq=False)
class Group:
    """Stored tensors that are computed together from full sources, such as fused experts."""

    sources: tuple[Source, ...]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]  # by canonical name -> by stored name


class Entry(NamedTuple):
    """One stored tensor: streamed from a source, in any dtype, or computed by a group."""

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
    """Return the entry of a tensor that is stored unchanged under the given name."""
    return Entry(name, source.shape, source.dtype, source.dtype, source)


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a checkpoint.

    That is the whole model, a submodel, a plain module, an adapter or the state of a run.
    """

    name: str
    path: str  # folder relative to the checkpoint, "" for the checkpoint itself
    kind: str  # "model" | "module" | "adapter" | "state"
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
