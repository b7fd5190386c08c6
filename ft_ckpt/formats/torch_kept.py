"""What an object has to be for a file of torch to give it back: nothing in such a file is run when it is read."""

import io
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pickle import UnpicklingError
from typing import Any

import torch

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.formats.pytree import MOST_LEVELS, PLAIN, SCALARS, quoted_key

_VALUES: tuple[type, ...] = (*SCALARS, torch.Size)
_MAPPINGS, _SEQUENCES = (dict, OrderedDict, Counter), (list, tuple, set)


def check_torch_object(obj: Any, root: str = "state", classes: Collection[type] = PLAIN) -> None:
    """Raise SelectionError, naming the places in `obj`, unless torch reads all of it back without running anything.

    `classes` are those of its tensors. What the types do not tell, such as an integer too long for torch, is tried:
    without the tensors, in memory.
    """
    outline = _Outline(frozenset(classes))
    bare = outline.bare_value(obj, root)
    if outline.refused:
        raise SelectionError(
            f"{listing(outline.refused)}. Nothing was written; convert these, leave them out, or save as HDF5. torch "
            "reads back plain containers, numbers, strings, bytes and tensors, and anything else by running code"
        )
    trial = io.BytesIO()
    torch.save(bare, trial)
    trial.seek(0)
    try:
        torch.load(trial, weights_only=True)
    except UnpicklingError as error:
        raise SelectionError(
            f"{root}: has a value that torch would not read back, such as empty bytes or an integer of over 255 "
            "bytes. Nothing was written; save it as HDF5"
        ) from error


@dataclass
class _Outline:
    """Copies an object without its tensors, and lists what is refused in it."""

    classes: frozenset[type]
    refused: list[str] = field(default_factory=list)
    known: dict[int, Any] = field(default_factory=dict)  # containers by identity: shared ones are looked at once
    above: list[int] = field(default_factory=list)

    def bare_value(self, value: Any, place: str) -> Any:
        """`value` with None, or what else it carries, for each tensor."""
        if type(value) in _VALUES:
            return value
        if isinstance(value, torch.Tensor):
            return self._bare_tensor(value, place)
        if type(value) not in (*_MAPPINGS, *_SEQUENCES):
            return self._refuse_place(place, f"{type(value).__module__}.{type(value).__qualname__}")
        if id(value) in self.above or len(self.above) >= MOST_LEVELS:
            what = "contains itself" if id(value) in self.above else f"over {MOST_LEVELS} levels deep"
            return self._refuse_place(place, what)
        if id(value) not in self.known:
            self.above.append(id(value))
            self.known[id(value)] = self._bare_container(value, place)
            self.above.pop()
        return self.known[id(value)]

    def _bare_container(self, value: Any, place: str) -> Any:
        if type(value) in _SEQUENCES:
            return type(value)(self.bare_value(each, f"{place}[{at}]") for at, each in enumerate(value))
        made = dict(self._bare_items(value, place))
        attributes = getattr(value, "__dict__", None)  # of an OrderedDict: torch gives a state dict some
        return [made, self.bare_value(dict(attributes), f"{place}.__dict__")] if attributes else made

    def _bare_items(self, value: Any, place: str) -> Iterator[tuple[Any, Any]]:
        for key, each in value.items():
            where = f"{place}[{quoted_key(key)}]"
            if type(key) in (*_VALUES, tuple):
                yield key, self.bare_value(each, where)
            else:
                self._refuse_place(where, f"a key of type {type(key).__qualname__}")

    def _bare_tensor(self, tensor: torch.Tensor, place: str) -> Any:
        if type(tensor) not in self.classes:
            kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
            return self._refuse_place(place, f"{kind}, a tensor with a meaning of its own")
        if tensor.is_quantized:
            return self._refuse_place(place, f"a tensor of {tensor.dtype}")
        own = vars(tensor) if type(tensor) in (torch.Tensor, torch.nn.Parameter) else {}
        return self.bare_value(dict(own), f"{place}.__dict__") if own else None

    def _refuse_place(self, place: str, what: str) -> None:
        self.refused.append(f"{place}: {what}")
