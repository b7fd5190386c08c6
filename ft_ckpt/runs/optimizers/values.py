"""The values of an optimizer's groups and state as JSON.

A setting of a group is one of:

- `{"value": JSON}`: plain.
- `{"text": ..., "device": ...}`: with tensors in it, or numbers of numpy; the text has their bytes.
- `{"tensor": dtype, "value": number}`: a tensor of one element, of unknown shape, in checkpoints up
  to 0.3.

An entry of a parameter's state is one of:

- `{"value": JSON}`: plain.
- `{"shape": ..., "dtype": ..., "host": ...}`: a tensor, which is stored as one; with "stride" if
  its elements are in another order in memory than those of a new one: the order decides on the last
  bits of later products.
- `{"tree": ..., "leaves": [...]}`: a container with tensors in it, such as a list of
  preconditioners. A leaf is an entry of a tensor.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ft_ckpt.errors import SelectionError, listing
from ft_ckpt.formats import dtype_of
from ft_ckpt.formats.safetensors import NAMES
from ft_ckpt.formats.trees import (
    PLAIN,
    Leaf,
    Node,
    decode_node,
    decode_value,
    dump_object,
    encode_value,
    load_object,
    try_flatten,
    unflatten,
)

Entry = dict[str, Any]
LEAVES = frozenset({*PLAIN, DTensor})  # tensor classes in a container
_MAX_PACKED_BYTES = 1 << 20  # of the tensors in one JSON text


def encode_if_plain(value: Any) -> Entry | None:
    """Return {"value": JSON} of a simple value, None for other values."""
    try:
        return {"value": encode_value(value)}
    except SelectionError:
        return None


def pack(value: Any, name: str) -> Entry:
    """Encode a value with the bytes of its tensors, as {"text", "device"}.

    Raises SelectionError, beginning with `name`, for other objects, tensors on several kinds of
    devices, and more than a MiB of tensors.
    """
    _, leaves, refused = try_flatten(value, NAMES, name)
    if refused:
        raise SelectionError(listing(refused))
    devices = sorted({leaf.data.device.type for leaf in leaves if not leaf.is_array})
    size = sum(leaf.data.nbytes for leaf in leaves)
    if size > _MAX_PACKED_BYTES or len(devices) > 1:
        raise SelectionError(
            f"{name}: {size:,} bytes of tensors on {' and '.join(devices)}, expected "
            f"{_MAX_PACKED_BYTES:,} at most, on one kind of device"
        )
    return {"text": dump_object(value, name), "device": devices[0] if devices else "cpu"}


def unpack(packed: Mapping[str, str], device: Any = None) -> Any:
    """Decode what `pack` has encoded.

    Tensors come to `device`, or by default to the kind of device that they were on. Raises
    CorruptError for a damaged text.
    """
    value = load_object(packed["text"])
    target = torch.device(packed["device"] if device is None else device)
    return tree_map_only(Tensor, lambda tensor: tensor.to(target), value)


def encode_setting(key: str, value: Any) -> Entry:
    """Encode the setting `key` of a group. Raises SelectionError as `pack` does."""
    return encode_if_plain(value) or pack(value, key)


def decode_setting(stored: Mapping[str, Any], device: Any = None) -> Any:
    """Decode a setting, with its tensors on `device`, by default as `unpack` has them.

    Raises CorruptError, LoadError.
    """
    if "text" in stored:
        return unpack(stored, device)
    value = decode_value(stored["value"])
    if "tensor" not in stored:
        return value
    return torch.tensor(value, dtype=dtype_of(stored["tensor"]), device="cpu")


def set_setting(group: dict[str, Any], key: str, stored: Mapping[str, Any]) -> None:
    """Give the group its stored setting.

    A tensor of the same shape and dtype is filled: CUDA graphs refer to it.
    """
    live = group.get(key)
    if "tensor" in stored and isinstance(live, Tensor):
        live.fill_(decode_value(stored["value"]))
        return
    parameter = next(iter(group["params"]), None)
    was_on_host = stored.get("device", "cpu") == "cpu"
    value = decode_setting(stored, "cpu" if was_on_host or parameter is None else parameter.device)
    if isinstance(value, Tensor) and isinstance(live, Tensor):
        if (value.shape, value.dtype) == (live.shape, live.dtype):
            live.copy_(value)
            return
        value = value.to(live.device)
    group[key] = value


def flatten_container(key: str, value: Any) -> tuple[Node, list[Leaf], list[str]]:
    """Flatten a container `key` in a parameter's state into its nodes and its tensors.

    The third result names, by path, what in the container cannot be stored.
    """
    node, leaves, refused = try_flatten(value, NAMES, key, LEAVES)
    arrays = [f"{key}: a numpy array of {leaf.dtype}" for leaf in leaves if leaf.is_array]
    return node, leaves, [*refused, *arrays]


def tensors_of_value(value: Any) -> list[Tensor]:
    """Return the tensors of a value of a parameter's state, in the order of `tensors_of_entry`."""
    if isinstance(value, Tensor):
        return [value]
    _, leaves, _ = flatten_container("", value)
    return [leaf.data for leaf in leaves]


def tensors_of_entry(key: str, entry: Entry) -> list[tuple[str, Entry]]:
    """Return the stored tensors of an entry `key`: names below the parameter, and entries."""
    if "dtype" in entry:
        return [(key, entry)]
    owner = {"rank": entry["rank"]} if "rank" in entry else {}
    leaves = enumerate(entry.get("leaves", ()))
    return [(f"{key}/{number}", {**leaf, **owner}) for number, leaf in leaves]


def is_dense(shape: Sequence[int], stride: Sequence[int] | None) -> bool:
    """Check whether a tensor with this stride fills its memory, without overlapping elements."""
    if stride is None:
        return True
    if len(stride) != len(shape) or not all(type(step) is int and step >= 0 for step in stride):
        return False
    tensor = torch.empty_strided(shape, stride, device="meta")
    return torch.empty_like(tensor).stride() == tuple(stride)  # a new one keeps the order only then


def build_value(entry: Entry, leaves: Sequence[Tensor]) -> Any:
    """Build the value of an entry that is not plain, with these tensors in it.

    Raises CorruptError for an invalid tree.
    """
    if "dtype" in entry:
        return leaves[0]
    node = decode_node(entry["tree"])
    return unflatten(node, leaves.__getitem__, lambda index: leaves[index].numpy())
