"""Describes the tensors in the optimizer state of a parameter, and makes them again.

Each tensor has an entry in the description, and a source that says which elements this rank holds.
A resume makes an empty tensor from the entry, and reads the elements of the source into it.

FSDP1 and ZeRO shard a parameter as a run: consecutive elements of the flattened tensor. The owner
of a state tensor is the source of its parameter.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.formats import dtype_name, dtype_of
from ft_ckpt.formats.trees import PLAIN, encode_node
from ft_ckpt.ranks.sharding import OwnedSharding, Sharding, Source, held_source
from ft_ckpt.ranks.wrappers import is_distributed, shows_runs, source_of_tensor, state_run
from ft_ckpt.runs.optimizers.values import Entry, encode_if_plain, flatten_container, is_dense


def state_entry(key: Any, value: Any, parameter: Any, owner: Source) -> tuple[Entry, list[str]]:
    """Return the entry of the value `key` in the state of `parameter`, and its problems.

    The value can be saved if there are no problems.
    """
    if type(key) is not str:
        return {}, [f"{key!r}: a key of type {type(key).__name__}, expected str"]
    if isinstance(value, Tensor):
        problem = _tensor_problem(value, owner, parameter)
        problems = [] if problem is None else [f"{key}: {problem}"]
        return _tensor_entry(value, parameter, owner), problems

    plain = encode_if_plain(value)
    if plain is not None:
        return plain, []
    node, leaves, problems = flatten_container(key, value)
    entries: list[Entry] = []
    if not problems:
        for leaf in leaves:
            entries.append(_tensor_entry(leaf.data, parameter, owner))
            problem = _tensor_problem(leaf.data, owner, parameter)
            if problem is not None:
                problems.append(f"{key}: {problem}")

    return {"tree": encode_node(node), "leaves": entries}, problems


def entry_source(owner: Source, key: str, entry: Any, value: Any) -> Source:
    """Return the source of a state tensor. `value` has this rank's elements of it, or is None."""
    name = f"{owner.name}/{key}"
    dtype = dtype_of(entry["dtype"])
    if is_distributed(value):
        return replace(source_of_tensor(name, owner.raw_name, value), dtype=dtype, trainable=False)
    is_run = shows_runs(owner.live)
    shape = tuple(entry["shape"])
    sharding: Sharding
    if is_run and has_shape_of(entry, owner):
        engine = owner.engine
        sharding, local = state_run(owner.live, value)
    else:  # the tensor is not sharded: one rank stores it
        engine = "plain"
        is_replicated = "rank" not in entry and not is_run
        sharding = OwnedSharding(shape, entry.get("rank", 0), is_replicated)
        local = None if value is None else value.detach()

    source = held_source(name, owner.raw_name, shape, engine, sharding, dtype, value)
    return source.holding(local)


def empty_state_tensor(entry: Any, parameter: Any, owner: Source) -> Tensor:
    """Create zeros for this rank's elements of the tensor that `entry` describes."""
    dtype = dtype_of(entry["dtype"])
    device = torch.device("cpu") if entry["host"] else parameter.device
    if "stride" in entry and not is_distributed(parameter) and not shows_runs(owner.live):
        tensor = torch.empty_strided(entry["shape"], entry["stride"], dtype=dtype, device=device)
        return tensor.zero_()
    if has_shape_of(entry, owner):
        like_device = device if entry["host"] else None
        return torch.zeros_like(parameter.detach(), dtype=dtype, device=like_device)
    return torch.zeros(entry["shape"], dtype=dtype, device=device)


def has_shape_of(entry: Any, owner: Source) -> bool:
    """Check whether a state tensor has the shape of its parameter.

    A number, such as a count of steps, has not.
    """
    return bool(entry["shape"]) and tuple(entry["shape"]) == owner.shape


def _tensor_entry(value: Tensor, parameter: Any, owner: Source) -> Entry:
    """Return the entry of a tensor: "shape", "dtype", "host", and "stride" if it is unusual."""
    host = value.device.type == "cpu" and parameter.device.type != "cpu"
    is_run = shows_runs(owner.live) and value.shape == parameter.shape
    shape = list(owner.shape if is_run else value.shape)
    entry = {"shape": shape, "dtype": dtype_name(value.dtype), "host": host}
    if is_run or is_distributed(value) or is_distributed(parameter):
        return entry
    if value.is_contiguous() and parameter.is_contiguous():
        return entry
    like = parameter if value.shape == parameter.shape else torch.empty(value.shape, device="meta")
    new_stride = torch.empty_like(like, device="meta").stride()
    if value.stride() != new_stride and is_dense(shape, value.stride()):
        entry["stride"] = list(value.stride())
    return entry


def _tensor_problem(value: Tensor, source: Source, parameter: Any) -> str | None:
    """Return why a tensor in the state of `parameter` cannot be saved; None if it can."""
    if is_distributed(value):
        if value.numel() == 1 or value.shape == parameter.shape:
            return None
        return f"shape {list(value.shape)}, not that of the sharded parameter"
    if type(value) not in PLAIN or value.layout is not torch.strided or value.is_quantized:
        kind = type(value)
        return f"{kind.__module__}.{kind.__qualname__}, an unsupported tensor subclass"
    is_run = shows_runs(source.live)
    is_sharded = is_run or is_distributed(parameter)
    is_like_run = is_run and value.shape == parameter.shape
    if is_sharded and value.numel() > 1 and not is_like_run:
        return f"shape {list(value.shape)} on this rank, not cut like the parameter"
    return None
