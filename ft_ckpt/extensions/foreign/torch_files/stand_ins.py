"""Finds the tensors and the stand-ins among the values that torch has read from a file.

A stand-in takes the place of an object, class or function that is not allowed, and runs nothing.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.errors import CorruptError, LoadError, listing
from ft_ckpt.formats import ITEM_BYTES, dtype_name
from ft_ckpt.formats.files import StandIn
from ft_ckpt.formats.trees import MAX_LEVELS, PLAIN


def kind_of_leaf(leaf: Any) -> str:
    """Return the type of a value in a torch file, also for stand-ins."""
    return leaf.kind if is_stand_in(leaf) else type(leaf).__name__


def is_stand_in(leaf: Any) -> bool:
    """Check whether a value takes the place of an object, a class or a function."""
    return isinstance(leaf, StandIn) or (isinstance(leaf, type) and issubclass(leaf, StandIn))


def holds_tensors(leaf: Any) -> bool:
    """Check whether a value contains tensors or storages.

    Containers are searched, and the arguments and states of stand-ins.
    """
    stack = [leaf]
    seen = set[int]()
    while stack:
        value = stack.pop()
        if isinstance(value, (Tensor, torch.TypedStorage, torch.UntypedStorage)):
            return True
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, StandIn):
            stack += [value.args, value.state]
        elif isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            stack += value

    return False


def named_leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, leaf) of nested dicts, lists and tuples, in order.

    Raises CorruptError for too many levels.
    """
    stack: list[tuple[str, Any, int]] = [("", value, 0)]
    while stack:
        name, part, level = stack.pop()
        if not isinstance(part, (dict, list, tuple)):
            yield name, part
            continue
        if level >= MAX_LEVELS:
            raise CorruptError(f"{name[:60]}: over {MAX_LEVELS} levels deep, or it contains itself")
        items = list(part.items()) if isinstance(part, dict) else list(enumerate(part))
        for key, item in reversed(items):
            stack.append((f"{name}.{key}" if name else str(key), item, level + 1))


def identity_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two names of one tensor have in common: memory, type, shape and strides."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def split_tensors(value: Any, source: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of nested dicts and lists by dotted name, and texts on other values.

    Raises LoadError when two tensors get one name, for tensors that are not plain dense data, and
    for tensors inside objects of unknown classes.
    """
    tensors: dict[str, Tensor] = {}
    repeated, unreadable, skipped = [], [], []
    for path, leaf in named_leaves(value):
        name = "tensor" if leaf is value else path
        if isinstance(leaf, Tensor):
            peculiarity = peculiarity_of(leaf)
            if peculiarity:
                unreadable.append(f"{name} ({peculiarity})")
            if name in tensors:
                repeated.append(name)
            tensors[name] = leaf
        elif holds_tensors(leaf):
            unreadable.append(f"{name} (tensors in an object of {kind_of_leaf(leaf)})")
        else:
            skipped.append(f"{name}: {kind_of_leaf(leaf)}")

    if repeated:
        raise LoadError(
            f"{source}: {listing(repeated, ', ')}: names of several tensors once nesting is "
            "written as dots"
        )

    if unreadable:
        raise LoadError(
            f"{source}: {listing(unreadable, ', ')}: expected plain dense tensors; save them so "
            "(`tensor.dequantize()` for quantized ones), or leave them out"
        )

    return tensors, skipped


def peculiarity_of(tensor: Tensor) -> str:
    """Tell why a tensor is not plain dense elements in memory; return "" if it is."""
    if type(tensor) not in PLAIN:
        return f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    if tensor.layout != torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_conj() or tensor.is_neg():
        return "lazily conjugated or negated"
    if tensor.device.type != "cpu":
        return f"without elements, on the device {tensor.device}"
    return "" if dtype_name(tensor.dtype) in ITEM_BYTES else str(tensor.dtype)
