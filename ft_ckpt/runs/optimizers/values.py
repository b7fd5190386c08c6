"""Encodes the values of an optimizer's groups and state as JSON.

A setting of a group is one of:

- `{"value": JSON}`: a plain value.
- `{"text": ..., "device": ...}`: a value with tensors or numpy numbers in it. The text has their
  bytes.
- `{"tensor": dtype, "value": number}`: a tensor of one element, of unknown shape. ft_ckpt 0.3 and
  earlier wrote it.

An entry of a parameter's state is one of:

- `{"value": JSON}`: a plain value.
- `{"shape": ..., "dtype": ..., "host": ...}`: a tensor, which is stored apart. "host" says whether
  it is in host memory although its parameter is not. "stride" is there if the order of the elements
  in memory is not that of a new tensor. It is restored, because it decides on the last bits of
  later products.
- `{"tree": ..., "leaves": [...]}`: a container with tensors in it, such as a list of
  preconditioners. Each leaf is the entry of a tensor.
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
# classes of the tensors that a container may have
LEAVES = frozenset({*PLAIN, DTensor})
# largest size of all tensors in one JSON text
_MAX_PACKED_BYTES = 1 << 20


def encode_if_plain(value: Any) -> Entry | None:
    """Return {"value": JSON} for a plain value, None for any other value."""
    try:
        return {"value": encode_value(value)}
    except SelectionError:
        return None


def pack(value: Any, name: str) -> Entry:
    """Encode a value together with the bytes of its tensors, as {"text": ..., "device": ...}.

    Raises SelectionError for objects that cannot be encoded, for tensors on several kinds of
    devices, and for more than a MiB of tensors. The error begins with `name`.
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
    """Decode a result of `pack`.

    Its tensors are put on `device`, or by default on the kind of device that they were on. Raises
    CorruptError for a damaged text.
    """
    value = load_object(packed["text"])
    target = torch.device(packed["device"] if device is None else device)
    return tree_map_only(Tensor, lambda tensor: tensor.to(target), value)


def encode_setting(key: str, value: Any) -> Entry:
    """Encode the setting `key` of a group. Raises SelectionError as `pack` does."""
    plain = encode_if_plain(value)
    return pack(value, key) if plain is None else plain


def decode_setting(stored: Mapping[str, Any], device: Any = None) -> Any:
    """Decode a setting. Its tensors are put on `device`, with the default of `unpack`.

    Raises CorruptError and LoadError.
    """
    if "text" in stored:
        return unpack(stored, device)
    value = decode_value(stored["value"])
    if "tensor" not in stored:
        return value
    return torch.tensor(value, dtype=dtype_of(stored["tensor"]), device="cpu")


def set_setting(group: dict[str, Any], key: str, stored: Mapping[str, Any]) -> None:
    """Set the setting `key` of the group to its stored value.

    If it is a tensor of the same shape and dtype, the live tensor is filled and not replaced,
    because CUDA graphs refer to it.
    """
    live = group.get(key)
    if "tensor" in stored and isinstance(live, Tensor):
        live.fill_(decode_value(stored["value"]))
        return

    parameter = next(iter(group["params"]), None)
    was_on_host = stored.get("device", "cpu") == "cpu"
    device = "cpu" if was_on_host or parameter is None else parameter.device
    value = decode_setting(stored, device)
    if isinstance(value, Tensor) and isinstance(live, Tensor):
        if (value.shape, value.dtype) == (live.shape, live.dtype):
            live.copy_(value)
            return
        value = value.to(live.device)

    group[key] = value


def flatten_container(key: str, value: Any) -> tuple[Node, list[Leaf], list[str]]:
    """Split the container `key` in a parameter's state into its nodes and its tensors.

    The third result names what in the container cannot be stored, with the path to it.
    """
    node, leaves, refused = try_flatten(value, NAMES, key, LEAVES)
    arrays = [f"{key}: a numpy array of {leaf.dtype}" for leaf in leaves if leaf.is_array]
    return node, leaves, [*refused, *arrays]


def tensors_of_value(value: Any) -> list[Tensor]:
    """Return the tensors of a value in a parameter's state, in the order of `tensors_of_entry`."""
    if isinstance(value, Tensor):
        return [value]
    _, leaves, _ = flatten_container("", value)
    return [leaf.data for leaf in leaves]


def tensors_of_entry(key: str, entry: Entry) -> list[tuple[str, Entry]]:
    """Return the tensors of the entry `key`, each as its name and its own entry.

    A tensor is named `key`. The tensors of a container are named `key`/0, `key`/1 and so on.
    """
    if "dtype" in entry:
        return [(key, entry)]
    owner = {"rank": entry["rank"]} if "rank" in entry else {}
    leaves = enumerate(entry.get("leaves", ()))
    return [(f"{key}/{number}", {**leaf, **owner}) for number, leaf in leaves]


def is_dense(shape: Sequence[int], stride: Sequence[int] | None) -> bool:
    """Check whether a tensor with this stride has no gaps and no overlaps in memory."""
    if stride is None:
        return True
    if len(stride) != len(shape) or not all(type(step) is int and step >= 0 for step in stride):
        return False
    tensor = torch.empty_strided(shape, stride, device="meta")
    # `empty_like` keeps the stride of such tensors alone.
    return torch.empty_like(tensor).stride() == tuple(stride)


def build_value(entry: Entry, leaves: Sequence[Tensor]) -> Any:
    """Return the value of an entry that is a tensor or a container, with `leaves` as its tensors.

    Raises CorruptError for an invalid tree.
    """
    if "dtype" in entry:
        return leaves[0]
    node = decode_node(entry["tree"])
    return unflatten(node, leaves.__getitem__, lambda index: leaves[index].numpy())
