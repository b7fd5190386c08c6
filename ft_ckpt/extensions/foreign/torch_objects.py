"""Checks that torch reads an object back without running code."""

import io
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from pickle import UnpicklingError
from typing import Any

import torch

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.formats.trees import MAX_LEVELS, PLAIN, SCALARS, quoted_key, vars_of

_SAVED: tuple[type, ...] = (*SCALARS, torch.Size)
_MAPPINGS, _SEQUENCES = (dict, OrderedDict, Counter), (list, tuple, set)


def check_torch_object(obj: Any, root: str = "state", classes: Collection[type] = PLAIN) -> None:
    """Raise SelectionError naming the paths in `obj` of values that torch does not read back
    without running code.

    `classes` are the allowed tensor classes. Limits that types do not show, such as the length of
    integers, are tested by saving and loading the object in memory without its tensors.
    """
    outline = _Outline(frozenset(classes))
    bare = outline.bare_value(obj, root)
    if outline.refused:
        raise SelectionError(
            f"{listing(outline.refused)}. Nothing was written; convert these, leave them out, or "
            "save as HDF5. torch reads back plain containers, numbers, strings, bytes and tensors, "
            "and anything else by running code"
        )
    trial = io.BytesIO()
    torch.save(bare, trial)
    trial.seek(0)
    try:
        torch.load(trial, weights_only=True)
    except UnpicklingError as error:
        raise SelectionError(
            f"{root}: has a value that torch would not read back, such as empty bytes or an "
            "integer of over 255 bytes. Nothing was written; save it as HDF5"
        ) from error


@dataclass
class _Outline:
    """Copies an object without its tensors, and lists the values that are refused."""

    classes: frozenset[type]
    refused: list[str] = field(default_factory=list)
    # containers by identity: shared ones are visited once
    copies: dict[int, Any] = field(default_factory=dict)
    enclosing: list[int] = field(default_factory=list)  # ids of the enclosing containers

    def bare_value(self, value: Any, path: str) -> Any:
        """`value` with None, or its extra attributes, for each tensor."""
        if type(value) in _SAVED:
            return value
        if isinstance(value, torch.Tensor):
            return self._bare_tensor(value, path)
        if type(value) not in (*_MAPPINGS, *_SEQUENCES):
            return self._refuse_value(path, f"{type(value).__module__}.{type(value).__qualname__}")
        if id(value) in self.enclosing:
            return self._refuse_value(path, "contains itself")
        if len(self.enclosing) >= MAX_LEVELS:
            return self._refuse_value(path, f"over {MAX_LEVELS} levels deep")
        if id(value) not in self.copies:
            self.enclosing.append(id(value))
            self.copies[id(value)] = self._bare_container(value, path)
            self.enclosing.pop()
        return self.copies[id(value)]

    def _bare_container(self, value: Any, path: str) -> Any:
        if type(value) in _SEQUENCES:
            items = [self.bare_value(item, f"{path}[{at}]") for at, item in enumerate(value)]
            return type(value)(items)
        copy = {}
        for key, item in value.items():
            item_path = f"{path}[{quoted_key(key)}]"
            if type(key) in (*_SAVED, tuple):
                copy[key] = self.bare_value(item, item_path)
            else:
                self._refuse_value(item_path, f"a key of type {type(key).__qualname__}")
        # of an OrderedDict: torch gives a state dict some
        attributes = vars_of(value)
        if not attributes:
            return copy
        return [copy, self.bare_value(dict(attributes), f"{path}.__dict__")]

    def _bare_tensor(self, tensor: torch.Tensor, path: str) -> Any:
        if type(tensor) not in self.classes:
            kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
            return self._refuse_value(path, f"{kind}, a tensor with a meaning of its own")
        if tensor.is_quantized:
            return self._refuse_value(path, f"a tensor of {tensor.dtype}")
        attributes = vars(tensor) if type(tensor) in (torch.Tensor, torch.nn.Parameter) else {}
        if not attributes:
            return None
        return self.bare_value(dict(attributes), f"{path}.__dict__")

    def _refuse_value(self, path: str, what: str) -> None:
        self.refused.append(f"{path}: {what}")
