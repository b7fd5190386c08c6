"""Describes, reads and restores the state that ZeRO's inner optimizer has for one partition.

A partition is a flat buffer with elements of several parameters; see `zero`. The elements of one
parameter are its run. The state has other buffers with the same layout, such as Adam's momentum,
and numbers, such as the step. A buffer is described for each parameter, with the shape of the
parameter. A number is the same for all parameters of a partition.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.errors import LoadError, SelectionError, listing
from ft_ckpt.extensions.deepspeed.zero import Partition, Slot
from ft_ckpt.formats import dtype_name, dtype_of
from ft_ckpt.formats.trees import decode_value
from ft_ckpt.ranks.sharding import ReplicatedSharding, Source, held_source
from ft_ckpt.runs.optimizers import Description, encode_if_plain, parameter_of

# The key of the float32 weights from which ZeRO makes the half-precision weights.
MASTER = "master"


@dataclass(frozen=True, eq=False)
class Fills:
    """Two functions that read the elements of a source: `now`, or `later` together with others."""

    now: Callable[[Source], Any]
    later: Callable[[Source], Any]


def describe_state(inner: Any, partitions: list[Partition]) -> dict[str, dict[str, Any]]:
    """Return the entries of the state, by name of the parameter and key.

    Raises SelectionError for values that cannot be stored.
    """
    state: dict[str, dict[str, Any]] = {}
    problems = []
    for partition in partitions:
        for key, value in inner.state.get(partition.master, {}).items():
            for slot in partition.slots:
                entry = _state_entry(value, partition.master, slot.owner)
                if entry is None:
                    problems.append(f"{slot.owner.name}: {key}: {_kind_of(value)}")
                state.setdefault(slot.owner.name, {})[key] = entry

    if problems:
        raise SelectionError(
            f"{type(inner).__name__}: {listing(problems)}: cannot be saved, so a run could not be "
            "resumed exactly; use an optimizer whose state is numbers and tensors like the "
            "parameters, or save without its state"
        )

    return state


def describe_masters(partitions: list[Partition]) -> dict[str, str]:
    """Return the dtype of the master of each parameter that has another dtype."""
    masters: dict[str, str] = {}
    for partition in partitions:
        for slot in partition.slots:
            if partition.master.dtype != slot.owner.dtype:
                masters[slot.owner.name] = dtype_name(partition.master.dtype)
    return masters


def _state_entry(value: Any, master: Tensor, owner: Source) -> Any:
    """Return the entry of a value, or None for a value that cannot be stored.

    An entry has the shape, dtype and device of a tensor, or {"value": ...} for a plain value. The
    shape of a buffer with the layout of the partition is that of the parameter.
    """
    if not isinstance(value, Tensor):
        return encode_if_plain(value)
    if _is_like_partition(value, master):
        return {"shape": list(owner.shape), "dtype": dtype_name(value.dtype), "host": False}
    if value.numel() != 1:
        return None
    is_on_host = value.device.type == "cpu" and parameter_of(owner).device.type != "cpu"
    return {"shape": list(value.shape), "dtype": dtype_name(value.dtype), "host": is_on_host}


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"shape {list(value.shape)}, not cut like the parameters"
    return type(value).__name__


def _is_like_partition(value: Any, master: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == master.shape


def state_sources(
    inner: Any, partition: Partition, description: Description
) -> tuple[dict[str, Source], list[str]]:
    """Return the sources of the described state of a partition, by "parameter/key".

    Also returns the names of state that is described, but that the inner optimizer lacks.
    """
    buffers = {**inner.state.get(partition.master, {}), MASTER: partition.master}
    sources: dict[str, Source] = {}
    missing: list[str] = []
    for slot in partition.slots:
        name = slot.owner.name
        entries = description["state"].get(name, {})
        keys = [key for key, entry in entries.items() if "dtype" in entry]
        if name in description["masters"]:
            keys.append(MASTER)
        for key in keys:
            buffer = buffers.get(key)
            if buffer is None:
                missing.append(f"{name}: {key}")
            elif _is_like_partition(buffer, partition.master):
                sources[f"{name}/{key}"] = _run_source(slot, key, buffer)
            else:
                sources[f"{name}/{key}"] = _whole_source(slot, key, buffer)

    return sources, missing


def _run_source(slot: Slot, key: str, buffer: Tensor) -> Source:
    """Return the source of a parameter's run in a buffer with the layout of the partition."""
    owner = slot.owner
    name = f"{owner.name}/{key}"
    source = held_source(
        name, owner.raw_name, owner.shape, "zero", slot.sharding, buffer.dtype, buffer
    )
    return source.holding(slot.local_run(buffer))


def _whole_source(slot: Slot, key: str, tensor: Tensor) -> Source:
    """Return the source of a tensor of which every rank has all elements, such as a step count."""
    owner = slot.owner
    name = f"{owner.name}/{key}"
    shape = tuple(tensor.shape)
    sharding = ReplicatedSharding(shape)
    source = held_source(name, owner.raw_name, shape, "plain", sharding, tensor.dtype, tensor)
    return source.holding(tensor.detach())


def restore_masters(partition: Partition, masters: Mapping[str, str], fills: Fills) -> None:
    """Read the masters of a partition. `masters` has their stored dtypes by parameter name."""
    for slot in partition.slots:
        if slot.owner.name in masters:
            dtype = dtype_of(masters[slot.owner.name])
            _read_run(slot, MASTER, dtype, partition.master, fills)


def restore_partition_state(
    inner: Any, partition: Partition, stored: Mapping[str, dict[str, Any]], fills: Fills
) -> None:
    """Restore the state of a partition from the entries `stored`, by parameter name.

    If no parameter of it has state, the live state is removed. Raises LoadError if the stored state
    does not fit the live one.
    """
    entries_of_slots: dict[Slot, dict[str, Any]] = {}
    for slot in partition.slots:
        entries = stored.get(slot.owner.name)
        if entries:
            entries_of_slots[slot] = entries

    if not entries_of_slots:
        inner.state.pop(partition.master, None)
        return

    if not inner.state.get(partition.master):
        _init_inner_state(inner, partition)
    state = inner.state[partition.master]
    flat_keys = [key for key, value in state.items() if _is_like_partition(value, partition.master)]
    _refuse_other_state(state, flat_keys, entries_of_slots)
    for key, value in list(state.items()):
        if key not in flat_keys:
            state[key] = _restored_number(key, value, entries_of_slots, fills.now)
            continue
        value.zero_()  # zero is the state of parameters that had none
        for slot, entries in entries_of_slots.items():
            _read_run(slot, key, dtype_of(entries[key]["dtype"]), value, fills)


def _refuse_other_state(
    state: Mapping[str, Any],
    flat_keys: list[str],
    entries_of_slots: Mapping[Slot, Mapping[str, Any]],
) -> None:
    """Raise LoadError for entries with other keys or shapes than the live state."""
    problems = []
    for slot, entries in entries_of_slots.items():
        shape = list(slot.owner.shape)
        has_same_keys = set(entries) == set(state)
        if has_same_keys and all(entries[key].get("shape") == shape for key in flat_keys):
            continue
        problems.append(
            f"{slot.owner.name}: {', '.join(sorted(entries))} in the checkpoint, "
            f"{', '.join(sorted(state))} in this run"
        )

    if problems:
        raise LoadError(
            f"{listing(problems)}; resume with the optimizer class and options of the saved run"
        )


def _init_inner_state(inner: Any, partition: Partition) -> None:
    """Create the inner optimizer's state by a step with zero gradients and learning rate zero.

    The weights, gradients and groups are the same afterwards.
    """
    master = partition.master
    weights = master.detach().clone()
    gradient = master.grad
    groups = inner.param_groups
    group = {**groups[partition.group], "params": [master]}
    if "lr" in group:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    try:
        master.grad = torch.zeros_like(master)
        inner.param_groups = [group]
        inner.step()
    finally:
        master.grad = gradient
        inner.param_groups = groups

    master.data.copy_(weights)


def _restored_number(
    key: str,
    live: Any,
    entries_of_slots: Mapping[Slot, dict[str, Any]],
    fill: Callable[[Source], Any],
) -> Any:
    """Return a number that all parameters of a partition share, such as the step.

    It has the type of `live`. Raises LoadError if the stored numbers differ.
    """
    numbers: dict[str, Any] = {}
    for slot, entries in entries_of_slots.items():
        numbers[slot.owner.name] = _stored_number(slot, key, entries[key], fill)
    first, value = next(iter(numbers.items()))
    for name, number in numbers.items():
        if number != value:
            raise LoadError(
                f"{key} is {value} for {first} and {number} for {name}: ZeRO has one for all "
                "parameters of a group; resume without ZeRO, or without the optimizer's state"
            )
    if isinstance(live, Tensor):
        return live.fill_(value)
    return int(value) if type(live) is int else value


def _stored_number(slot: Slot, key: str, entry: Any, fill: Callable[[Source], Any]) -> Any:
    if "dtype" not in entry:
        return decode_value(entry["value"])
    tensor = torch.zeros(entry["shape"], dtype=dtype_of(entry["dtype"]), device="cpu")
    source = _whole_source(slot, key, tensor)
    fill(source)
    return source.live.item()


def _read_run(slot: Slot, key: str, dtype: torch.dtype, into: Tensor, fills: Fills) -> None:
    """Read this rank's run of a tensor into the flat buffer `into`.

    The tensor is stored as `dtype`, and is converted if the buffer has another dtype.
    """
    source = _run_source(slot, key, into)
    if source.local is None or dtype == into.dtype:
        fills.later(replace(source, dtype=dtype))
        return
    stored = torch.empty(source.local.shape, dtype=dtype, device="cpu")
    fills.now(replace(source, dtype=dtype).holding(stored))
    source.local.copy_(stored)
