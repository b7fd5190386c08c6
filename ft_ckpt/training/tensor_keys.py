"""Tensors by key: descriptions without tensors, and those who have the tensors when they are needed."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from torch import Tensor

from ft_ckpt.distributed.inventory import Inventory
from ft_ckpt.distributed.tensor_info import Source, TensorInfo
from ft_ckpt.distributed.wrappers import memory_parts
from ft_ckpt.errors import SelectionError

_FIELDS = tuple(field.name for field in fields(TensorInfo))


class HeldTensors:
    """Tensors of one moment by key: copies of a snapshot, or those of a state dict."""

    def __init__(self, held: Mapping[int, Tensor | None]) -> None:
        self._held = held

    def local(self, key: int) -> Tensor | None:
        """This rank's elements; None for none."""
        return self._held.get(key)

    def memories(self, keys: Collection[int]) -> dict[int, Tensor]:
        """Those of the keys that are here."""
        return {key: tensor for key in keys if (tensor := self._held.get(key)) is not None}

    def full(self, key: int) -> Tensor:
        """Raise SelectionError: only a live tensor can be gathered by its engine."""
        raise SelectionError(f"tensor {key}: held on this rank, and to be gathered by its engine; please report it")


def sources_in(inventory: Inventory, item: str = "", allow_meta: bool = False) -> dict[str, Source]:
    """The tensors of a noted model with their descriptions, by canonical name. Raises what `Inventory.infos` does."""
    return {name: with_tensor(info, inventory) for name, info in inventory.infos(item, allow_meta).items()}


def with_tensor(info: TensorInfo, inventory: Inventory) -> Source:
    """A description together with its tensor."""
    if isinstance(info, Source):
        return info
    key = info.key
    live: Any = inventory.live(key) if key >= 0 else None
    known = {name: getattr(info, name) for name in _FIELDS}
    return Source(**known, live=live, local=inventory.local(key), gather_full=partial(inventory.full, key))


class KeyedFacts:
    """Takes tensors out of descriptions: they are found by key in `inventory`, or in `given` where these are others."""

    def __init__(self, inventory: Inventory, is_given: bool = False) -> None:
        """`is_given`: keys stay what they are, for the tensors are not the live ones."""
        self._inventory, self._is_given = inventory, is_given
        self._absent = 0  # tensors of other ranks

    def without_tensor(self, source: TensorInfo) -> TensorInfo:
        """The description alone, under the key of its tensor."""
        if not isinstance(source, Source):
            return source
        key = source.key if self._is_given else self._key_of(source)
        return TensorInfo(key, *(getattr(source, name) for name in _FIELDS[1:]))

    def _key_of(self, source: Source) -> int:
        if source.live is None:
            self._absent += 1
            return -self._absent
        (known,) = self._inventory.known_keys([source.live])
        if known is not None and known == source.key:  # of a model
            return known
        if isinstance(source.live, Tensor) and _is_whole(source):
            return self._inventory.keys_of([source.live])[0]
        return self._inventory.note_run(source.live, source.local)


def _is_whole(source: Source) -> bool:
    """Whether what this rank has of the source is what it has of its tensor, not a run in a buffer."""
    local, (part,) = source.local, memory_parts([source.live])
    if local is None or part is None:
        return False
    return local.shape == part.shape and local.data_ptr() == part.data_ptr()
