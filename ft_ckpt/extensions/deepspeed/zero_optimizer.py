"""The state of DeepSpeed's ZeRO optimizers (stages 1 to 3) by parameter name, and its restoration.

ZeRO trains flat float32 partitions, one or more on each rank, with runs of many parameters one
after the other. The functions are those of `optimizers`: the described state has the shape of each
parameter, independent of the runs that ranks hold, so that it restores on any number of ranks, in
another stage, and in a plain optimizer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.errors import LoadError, SelectionError, listing
from ft_ckpt.extensions.deepspeed.zero import Partition, Slot, changed_with_steps, zero_partitions
from ft_ckpt.formats import decode_value, dtype_name, dtype_of, encode_value
from ft_ckpt.ranks import ReplicatedSharding, Source, held_source
from ft_ckpt.runs import (
    Description,
    encode_if_plain,
    match_groups,
    optimizers,
    set_groups,
    unwrap_optimizer,
)

_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True, eq=False)
class EngineCounters:
    """The counters of a DeepSpeed engine: steps, skipped steps, samples of all ranks,
    micro-batches.
    """

    engine: Any

    def state_dict(self) -> dict[str, int]:
        counts = {name: int(getattr(self.engine, name)) for name in _COUNTERS}
        return {**counts, "accumulation": int(self.engine.gradient_accumulation_steps())}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for name in _COUNTERS:
            setattr(self.engine, name, state[name])
        # micro-batches are recounted if the number per step has changed
        steps, rest = divmod(state["micro_steps"], state["accumulation"])
        self.engine.micro_steps = steps * self.engine.gradient_accumulation_steps() + rest


def scaler_numbers(optimizer: Any) -> dict[str, Any]:
    """The variables of the dynamic loss scaler, DeepSpeed's or torch's; empty without one."""
    scaler, torch_scaler = (
        getattr(optimizer, "loss_scaler", None),
        optimizer.torch_autocast_gradscaler,
    )
    if torch_scaler is not None:
        return {key: encode_value(value) for key, value in torch_scaler.state_dict().items()}
    return (
        {key: encode_value(getattr(scaler, key)) for key in _SCALER}
        if getattr(scaler, "dynamic", False)
        else {}
    )


def restore_scaler(optimizer: Any, stored: Mapping[str, Any]) -> None:
    """Restore the `scaler_numbers` of a loss scaler of the same kind; ignore those of another
    kind.
    """
    values = {key: decode_value(value) for key, value in stored.items()}
    # else the precision or the scaler has changed
    if set(values) == set(scaler_numbers(optimizer)):
        if optimizer.torch_autocast_gradscaler is not None:
            optimizer.torch_autocast_gradscaler.load_state_dict(values)
            return
        for key, value in values.items():
            setattr(optimizer.loss_scaler, key, value)


MASTER = "master"  # key of the float32 weights that ZeRO trains beside half-precision ones

_Fills = tuple[Callable[[Source], Any], Callable[[Source], Any]]  # now; later, by the caller


@dataclass(frozen=True, eq=False)
class _Unflattened:
    """The inner optimizer's groups with the model's parameters in them, as `optimizers` expects
    them.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Any, Any]
    state_dict = torch.optim.Optimizer.state_dict  # no further entries beside groups and state


def is_zero(optimizer: Any) -> bool:
    """Whether `optimizer`, inside Accelerate's wrapper or not, is one that DeepSpeed partitions.

    Imports nothing.
    """
    kinds = type(unwrap_optimizer(optimizer)).__mro__
    return any(
        kind.__name__ == "ZeROOptimizer" and kind.__module__.startswith("deepspeed.")
        for kind in kinds
    )


def hooked_optimizer(optimizer: Any) -> tuple[Any, list[Tensor]]:
    """The torch optimizer inside ZeRO's, and the masters and weights that change only after it has
    begun to step.

    Gradients are prepared before the step; weights are made from the masters and sent to other
    ranks after it. (None, []) if captured tensors change at other moments too.
    """
    optimizer = unwrap_optimizer(optimizer)
    changed = changed_with_steps(optimizer)
    return (None, []) if changed is None else (optimizer.optimizer, changed)


def describe(optimizer: Any, found: Mapping[str, Source]) -> Description:
    """As `optimizers.describe`, with "masters" ({name: dtype}) and "scaler" (the loss scaler's
    numbers).

    The same on every rank. Masters with the dtype of the weights are the weights and are left out.
    Raises SelectionError naming state that cannot be saved. Can be called before the first step.
    """
    optimizer = unwrap_optimizer(optimizer)
    partitions = _partitions_of(optimizer, found)
    groups = optimizers.describe(_unflatten_groups(optimizer, partitions), found)
    masters = {
        place.owner.name: dtype_name(partition.master.dtype)
        for partition in partitions
        for place in partition.places
        if partition.master.dtype != place.owner.dtype
    }
    own = {
        "class": type(optimizer.optimizer).__name__,
        "state": _describe_zero_state(optimizer.optimizer, partitions),
    }
    return {**groups, **own, "masters": masters, "scaler": scaler_numbers(optimizer)}


def state_tensors(
    optimizer: Any, description: Description, found: Mapping[str, Source]
) -> dict[str, Source]:
    """The described tensors as sources by "parameter/key", masters as "parameter/master"; the same
    on every rank.

    Raises SelectionError naming state that this rank lacks and other ranks have.
    """
    optimizer = unwrap_optimizer(optimizer)
    sources: dict[str, Source] = {}
    missing: list[str] = []
    for partition in _partitions_of(optimizer, found):
        buffers = {**optimizer.optimizer.state.get(partition.master, {}), MASTER: partition.master}
        for place in partition.places:
            name = place.owner.name
            entries = description["state"].get(name, {})
            keys = [key for key, entry in entries.items() if "dtype" in entry]
            missing += [f"{name}: {key}" for key in keys if key not in buffers]
            for key in [*keys, *([MASTER] if name in description["masters"] else [])]:
                if key not in buffers:
                    continue
                make = _run_source if _is_cut(buffers[key], partition.master) else _whole_source
                sources[f"{name}/{key}"] = make(place, key, buffers[key])
    optimizers.refuse_missing_state(optimizer, missing)
    return sources


def check(optimizer: Any, description: Description, found: Mapping[str, Source]) -> None:
    optimizer = unwrap_optimizer(optimizer)
    optimizers.check(
        _unflatten_groups(optimizer, _partitions_of(optimizer, found)), description, found
    )


def restore(
    optimizer: Any,
    description: Description,
    found: Mapping[str, Source],
    fill: Callable[[Source], Any],
    later: Callable[[Source], Any] | None = None,
) -> tuple[str, ...]:
    """Set the described state, saved on any number of ranks. Not collective. Returns notes.

    The weights must be restored already: masters that the description lacks are made from them.
    Call `refresh_weights` when every rank has returned. `fill` reads this rank's elements of a
    source; `later`, if given, collects sources to be filled after the return: all but numbers and
    converted tensors. Raises LoadError for parameters, groups or state on one side only, and for
    step counts that differ within a partition.
    """
    adopt_weights(optimizer)
    optimizer = unwrap_optimizer(optimizer)
    partitions = _partitions_of(optimizer, found)
    hyper = _unflatten_groups(optimizer, partitions)
    set_groups(
        match_groups(hyper.param_groups, optimizers.names_of(hyper, found), description, found)[0]
    )
    for group, restored in zip(optimizer.optimizer.param_groups, hyper.param_groups, strict=True):
        group.update({key: value for key, value in restored.items() if key != "params"})
    fills, masters = (fill, later or fill), description.get("masters", {})
    for partition in partitions:
        for place in partition.places:
            if place.owner.name in masters:
                _read_run(
                    place, MASTER, dtype_of(masters[place.owner.name]), partition.master, fills
                )
    for partition in partitions:
        _restore_state(optimizer.optimizer, partition, description["state"], fills)
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        # For DeepSpeed's functions that return a parameter's full state; else it links them after
        # the next step.
        optimizer._hp_optimizer_states_linked = False
        if all(optimizer.optimizer.state.get(partition.master) for partition in partitions):
            optimizer._lazy_init_hp_params_optimizer_state()
    restore_scaler(optimizer, description.get("scaler", {}))
    names = {place.owner.name for partition in partitions for place in partition.places}
    missing = names - set(description["state"])
    return (
        (f"{len(missing)} parameter(s) had no state when saved",)
        if missing and description["state"]
        else ()
    )


def adopt_weights(optimizer: Any) -> None:
    """Make the masters from the live, rounded weights. Not collective.

    Also needed for weights restored without optimizer state: the masters would overwrite them at
    the next step, or in `refresh_weights`.
    """
    unwrap_optimizer(optimizer).refresh_fp32_params()


def refresh_weights(optimizer: Any) -> None:
    """Make all copies of the weights equal to the restored masters and shards. Collective.

    Under stages 1 and 2 each rank makes its part of the live weights from its masters and sends it
    to the others; under stage 3 it makes its shards, and small parameters that every rank keeps
    whole are gathered again.
    """
    optimizer = unwrap_optimizer(optimizer)
    if hasattr(optimizer, "update_lp_params"):
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
        for number in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer.checkpoint_event_prologue()  # releases gathered parameters
        optimizer.checkpoint_event_epilogue()  # gathers those that stay whole between steps


def is_accumulating(optimizer: Any) -> bool:
    """Whether the optimizer holds gradients of an unfinished step, which are not captured."""
    optimizer = unwrap_optimizer(optimizer)
    if hasattr(optimizer, "fp32_groups_has_gradients"):
        return any(any(group) for group in optimizer.fp32_groups_has_gradients)
    if hasattr(optimizer, "fp16_groups"):  # stage 3 counts on at the next forward only
        return bool(optimizer.micro_step_id > 0 or optimizer._epilogue_ran_this_backward)
    return bool(optimizer.micro_step_id >= 0)


def _partitions_of(optimizer: Any, found: Mapping[str, Source]) -> list[Partition]:
    return zero_partitions(optimizer, optimizers.sources_by_parameter(found))


def _unflatten_groups(optimizer: Any, partitions: list[Partition]) -> _Unflattened:
    groups = [{**group, "params": []} for group in optimizer.optimizer.param_groups]
    for partition in partitions:
        parameters = (optimizers.parameter_of(place.owner) for place in partition.places)
        groups[partition.group]["params"] += {id(one): one for one in parameters}.values()
    return _Unflattened(groups, {})


def _describe_zero_state(base: Any, partitions: list[Partition]) -> dict[str, dict[str, Any]]:
    """The entries of each parameter's state."""
    state: dict[str, dict[str, Any]] = {}
    problems = []
    for partition in partitions:
        for key, value in base.state.get(partition.master, {}).items():
            for place in partition.places:
                entry = _zero_state_entry(value, partition.master, place.owner)
                if entry is None:
                    is_tensor = isinstance(value, Tensor)
                    kind = (
                        f"shape {list(value.shape)}, not cut like the parameters"
                        if is_tensor
                        else type(value).__name__
                    )
                    problems.append(f"{place.owner.name}: {key}: {kind}")
                state.setdefault(place.owner.name, {})[key] = entry
    if problems:
        raise SelectionError(
            f"{type(base).__name__}: {listing(problems)}: cannot be saved, so a run could not be "
            "resumed exactly; use an optimizer whose state is numbers and tensors like the "
            "parameters, or save without its state"
        )
    return state


def _is_cut(value: Any, master: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == master.shape


def _zero_state_entry(value: Any, master: Tensor, owner: Source) -> Any:
    """Shape, dtype and device of a tensor as for the parameter, or {"value": plain value}; None for
    other values.
    """
    if not isinstance(value, Tensor):
        return encode_if_plain(value)
    if _is_cut(value, master):
        return {"shape": list(owner.shape), "dtype": dtype_name(value.dtype), "host": False}
    if value.numel() != 1:
        return None
    host = value.device.type == "cpu" and optimizers.parameter_of(owner).device.type != "cpu"
    return {"shape": list(value.shape), "dtype": dtype_name(value.dtype), "host": host}


def _run_source(place: Slot, key: str, buffer: Tensor) -> Source:
    """The source of a parameter's run in a buffer laid out like the partition."""
    owner = place.owner
    name, run = f"{owner.name}/{key}", place.local_run(buffer)
    return held_source(
        name, owner.raw_name, owner.shape, "zero", place.sharding, buffer.dtype, buffer
    ).holding(run)


def _whole_source(place: Slot, key: str, tensor: Tensor) -> Source:
    """The source of a tensor that every rank has whole, such as a step count."""
    shape = tuple(tensor.shape)
    name, sharding = f"{place.owner.name}/{key}", ReplicatedSharding(shape)
    return held_source(
        name, place.owner.raw_name, shape, "plain", sharding, tensor.dtype, tensor
    ).holding(tensor.detach())


def _restore_state(
    base: Any, partition: Partition, stored: Mapping[str, dict[str, Any]], fills: _Fills
) -> None:
    kept = {
        place: stored[place.owner.name]
        for place in partition.places
        if stored.get(place.owner.name)
    }
    if not kept:
        base.state.pop(partition.master, None)
        return
    if not base.state.get(partition.master):
        _init_inner_state(base, partition)
    state = base.state[partition.master]
    cut = [key for key, value in state.items() if _is_cut(value, partition.master)]
    problems = [
        (
            f"{place.owner.name}: {', '.join(sorted(entries))} in the checkpoint, "
            f"{', '.join(sorted(state))} in this run"
        )
        for place, entries in kept.items()
        if set(entries) != set(state)
        or any(entries[key].get("shape") != list(place.owner.shape) for key in cut)
    ]
    if problems:
        raise LoadError(
            f"{listing(problems)}; resume with the optimizer class and options of the saved run"
        )
    for key, value in list(state.items()):
        if key not in cut:
            state[key] = _restored_number(key, value, kept, fills[0])
            continue
        value.zero_()  # for parameters that had no state
        for place, entries in kept.items():
            _read_run(place, key, dtype_of(entries[key]["dtype"]), value, fills)


def _init_inner_state(base: Any, partition: Partition) -> None:
    """Let the inner optimizer create its state by a step with zero gradients and zero learning
    rate.
    """
    master, groups = partition.master, base.param_groups
    before, gradient = master.detach().clone(), master.grad
    group = {**groups[partition.group], "params": [master]}
    if "lr" in group:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    master.grad, base.param_groups = torch.zeros_like(master), [group]
    try:
        base.step()
    finally:
        master.grad, base.param_groups = gradient, groups
    master.data.copy_(before)


def _restored_number(
    key: str, live: Any, kept: Mapping[Slot, dict[str, Any]], fill: Callable[[Source], Any]
) -> Any:
    """The number, such as the step, that all parameters of a partition share, in the type of
    `live`.
    """
    numbers = {
        place.owner.name: _stored_number(place, key, entries[key], fill)
        for place, entries in kept.items()
    }
    first, value = next(iter(numbers.items()))
    other = next((name for name, number in numbers.items() if number != value), None)
    if other is not None:
        raise LoadError(
            f"{key} is {value} for {first} and {numbers[other]} for {other}: ZeRO has one for all "
            "parameters of a group; resume without ZeRO, or without the optimizer's state"
        )
    if isinstance(live, Tensor):
        return live.fill_(value)
    return int(value) if type(live) is int else value


def _stored_number(place: Slot, key: str, entry: Any, fill: Callable[[Source], Any]) -> Any:
    if "dtype" not in entry:
        return decode_value(entry["value"])
    source = _whole_source(
        place, key, torch.zeros(entry["shape"], dtype=dtype_of(entry["dtype"]), device="cpu")
    )
    fill(source)
    return source.live.item()


def _read_run(place: Slot, key: str, dtype: torch.dtype, into: Tensor, fills: _Fills) -> None:
    """Read this rank's run of a tensor stored as `dtype` into the flat buffer `into`."""
    source = _run_source(place, key, into)
    if source.local is None or dtype == into.dtype:
        fills[1](replace(source, dtype=dtype))
        return
    read = torch.empty(source.local.shape, dtype=dtype, device="cpu")
    fills[0](replace(source, dtype=dtype).holding(read))
    source.local.copy_(read)
