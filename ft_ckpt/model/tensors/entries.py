"""Defines the plan of the tensors that a save stores.

A part is what a library loads from one folder: a model, an adapter, a plain module, or the state of
a run. An entry is one stored tensor of a part. A `Source` is a tensor of the live model, which can
be sharded over the ranks.
"""

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
    """Stored tensors that are computed together from unsharded sources, such as fused experts.

    `convert` gets the unsharded tensors by the names of `sources`, and returns the stored tensors
    by their stored names.
    """

    sources: tuple[Source, ...]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]


class Entry(NamedTuple):
    """One stored tensor. It is either copied from `source`, or computed by `group`.

    `dtype` is that of the stored tensor. `memory_dtype` is that of the tensor before it is cast.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory_dtype: torch.dtype
    source: Source | None = None
    group: Group | None = None

    @property
    def sources(self) -> tuple[Source, ...]:
        """Tensors of the live model that it is made from."""
        if self.group is not None:
            return self.group.sources
        return () if self.source is None else (self.source,)


def unchanged_entry(name: str, source: Source) -> Entry:
    """Return the entry of a tensor that is stored unchanged under `name`."""
    return Entry(name, source.shape, source.dtype, source.dtype, source)


@dataclass(frozen=True, eq=False)
class Part:
    """One part of a checkpoint.

    Attributes:
        name: its name, which the user can give to a load.
        path: its folder, relative to the checkpoint. "" is the folder of the checkpoint itself.
        kind: "model", "module", "adapter" or "state".
        module: the nn.Module, without wrappers.
        entries: its stored tensors.
        file: name of its weight files, without ending and shard number.
        ties: names of each tied tensor. The first name is the stored one.
        adapter: name of the adapter, for an adapter.
        active: True for an active adapter.
        base_is_stored: True for an adapter whose base is a part of the same checkpoint.
        diverged_ties: pairs of tensors that the class declares tied, but that are two tensors in
            memory. The save compares their values.
        base: frozen tensors of an adapter's base, by their names in the base.
        tensors: all tensors of a transformers model. Tied ones are under each of their names.
        notes: texts for the report of the save.
        omitted: tensors that are left out, because the class or PEFT recreates them.
        extra: the text of EXTRA_FILE, or None.
        metadata: texts for the headers of its weight files.
    """

    name: str
    path: str
    kind: str
    module: Any
    entries: tuple[Entry, ...]
    file: str = MODEL_FILE
    ties: tuple[tuple[str, ...], ...] = ()
    adapter: str | None = None
    active: bool = False
    base_is_stored: bool = False
    diverged_ties: tuple[tuple[Source, Source], ...] = ()
    base: Mapping[str, Source] = field(default_factory=dict)
    tensors: Mapping[str, Source] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    omitted: tuple[Source, ...] = ()
    extra: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def casts(self) -> dict[str, int]:
        """Number of tensors of each cast, such as {"float32->bfloat16": 12}."""
        casts: Counter[str] = Counter()
        for entry in self.entries:
            if entry.dtype != entry.memory_dtype:
                casts[f"{dtype_name(entry.memory_dtype)}->{dtype_name(entry.dtype)}"] += 1
        return dict(casts)

    @property
    def main_dtype(self) -> str:
        """Stored dtype of most floating-point elements, "float32" if there are none.

        The config of the part gets it.
        """
        elements: Counter[str] = Counter()
        for entry in self.entries:
            if entry.dtype.is_floating_point:
                elements[dtype_name(entry.dtype)] += max(1, torch.Size(entry.shape).numel())
        return elements.most_common(1)[0][0] if elements else "float32"
