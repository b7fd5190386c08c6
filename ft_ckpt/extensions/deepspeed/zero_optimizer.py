"""The state of DeepSpeed's ZeRO optimizers (stages 1 to 3) by parameter name, and its restoration.

ZeRO trains flat float32 partitions, one or more on each rank, with runs of many parameters one
after the other. The described state has the shape of each parameter, independent of the runs that
ranks hold, so that it restores on any number of ranks, in another stage, and in a plain optimizer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.errors import LoadError, SelectionError, listing
from ft_ckpt.extensions.deepspeed.zero import Partition, Slot, changed_with_steps, zero_partitions
from ft_ckpt.formats import dtype_name, dtype_of
from ft_ckpt.formats.trees import decode_value, encode_value
from ft_ckpt.ranks.sharding import ReplicatedSharding, Source, held_source
from ft_ckpt.runs.optimizers import (
    Description,
    TorchOptimizers,
    encode_if_plain,
    match_groups,
    names_of_groups,
    parameter_of,
    refuse_missing_state,
    set_groups,
    sources_by_parameter,
)

MASTER = "master"  # key of the float32 weights that ZeRO trains beside half-precision ones
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True, eq=False)
class EngineCounters:
    """The counters of a DeepSpeed engine: steps, skipped steps, samples and micro-batches.

    Samples are those of all ranks.
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


@dataclass(frozen=True, eq=False)
class _Unflattened:
    """The inner optimizer's groups with the model's parameters, as `TorchOptimizers` reads them."""

    param_groups: list[dict[str, Any]]
    state: dict[Any, Any]
    state_dict = torch.optim.Optimizer.state_dict  # no entries but groups and state


@dataclass(frozen=True, eq=False)
class _Fills:
    """How the elements of a source are read: `now`, or `later` together with others."""

    now: Callable[[Source], Any]
    later: Callable[[Source], Any]


class ZeroOptimizers(TorchOptimizers):
    """The optimizers that DeepSpeed partitions."""

    uses_model_gradients = False

    def recognizes(self, optimizer: Any) -> bool:
        # by name: DeepSpeed is not imported for it
        return any(
            kind.__name__ == "ZeROOptimizer" and kind.__module__.startswith("deepspeed.")
            for kind in type(optimizer).__mro__
        )

    def hooked_optimizer(self, optimizer: Any) -> tuple[Any, list[Tensor]]:
        """The torch optimizer inside ZeRO's, and the masters and weights that its step changes.

        They change only after it has begun to step: gradients are prepared before the step; weights
        are made from the masters and sent to other ranks after it. (None, []) if captured tensors
        change at other moments too.
        """
        changed = changed_with_steps(optimizer)
        return (None, []) if changed is None else (optimizer.optimizer, changed)

    def describe(self, optimizer: Any, sources: Mapping[str, Source]) -> Description:
        """Describe the state as `OptimizerKind.describe` does, with "masters" and "scaler".

        "masters" is {name: dtype}, "scaler" the loss scaler's numbers. The result is the same on
        every rank. Masters with the dtype of the weights are the weights and are left out. Can be
        called before the first step.
        """
        partitions = _partitions_of(optimizer, sources)
        groups = super().describe(_unflatten_groups(optimizer, partitions), sources)
        masters: dict[str, str] = {}
        for partition in partitions:
            for slot in partition.slots:
                if partition.master.dtype != slot.owner.dtype:
                    masters[slot.owner.name] = dtype_name(partition.master.dtype)
        return {
            **groups,
            "class": type(optimizer.optimizer).__name__,
            "state": _describe_state(optimizer.optimizer, partitions),
            "masters": masters,
            "scaler": scaler_numbers(optimizer),
        }

    def state_tensors(
        self, optimizer: Any, description: Description, sources: Mapping[str, Source]
    ) -> dict[str, Source]:
        """As `OptimizerKind.state_tensors`, masters as "parameter/master"."""
        tensors: dict[str, Source] = {}
        missing: list[str] = []
        for partition in _partitions_of(optimizer, sources):
            inner_state = optimizer.optimizer.state.get(partition.master, {})
            buffers = {**inner_state, MASTER: partition.master}
            for slot in partition.slots:
                name = slot.owner.name
                entries = description["state"].get(name, {})
                keys = [key for key, entry in entries.items() if "dtype" in entry]
                missing += [f"{name}: {key}" for key in keys if key not in buffers]
                if name in description["masters"]:
                    keys.append(MASTER)
                for key in keys:
                    if key in buffers:
                        buffer = buffers[key]
                        is_flat = _is_like_partition(buffer, partition.master)
                        source = _run_source if is_flat else _whole_source
                        tensors[f"{name}/{key}"] = source(slot, key, buffer)
        refuse_missing_state(optimizer, missing)
        return tensors

    def check(
        self, optimizer: Any, description: Description, sources: Mapping[str, Source]
    ) -> None:
        partitions = _partitions_of(optimizer, sources)
        super().check(_unflatten_groups(optimizer, partitions), description, sources)

    def before_restore(self, optimizer: Any) -> None:
        """Make the masters from the live, rounded weights. Not collective.

        Also needed for weights restored without optimizer state: the masters would overwrite them
        at the next step, or in `after_restore`.
        """
        optimizer.refresh_fp32_params()

    def restore(
        self,
        optimizer: Any,
        description: Description,
        sources: Mapping[str, Source],
        fill: Callable[[Source], Any],
        later: Callable[[Source], Any] | None = None,
    ) -> tuple[str, ...]:
        """Set the described state, saved on any number of ranks. Not collective.

        The weights must be restored already: masters that the description lacks are made from them.
        All sources but those of numbers and of converted tensors can be filled `later`. Raises
        LoadError for parameters, groups or state on one side only, and for step counts that differ
        within a partition.
        """
        self.before_restore(optimizer)
        partitions = _partitions_of(optimizer, sources)
        fills = _Fills(fill, later or fill)
        _restore_groups(optimizer, partitions, description, sources)
        masters = description.get("masters", {})
        for partition in partitions:
            for slot in partition.slots:
                if slot.owner.name in masters:
                    dtype = dtype_of(masters[slot.owner.name])
                    _read_run(slot, MASTER, dtype, partition.master, fills)
        for partition in partitions:
            _restore_state(optimizer.optimizer, partition, description["state"], fills)
        _link_states(optimizer, partitions)
        restore_scaler(optimizer, description.get("scaler", {}))
        names: set[str] = set()
        for partition in partitions:
            names.update(slot.owner.name for slot in partition.slots)
        missing = names - set(description["state"])
        if missing and description["state"]:
            return (f"{len(missing)} parameter(s) had no state when saved",)
        return ()

    def after_restore(self, optimizer: Any) -> None:
        """Make all copies of the weights equal to the restored masters and shards. Collective.

        Under stages 1 and 2 each rank makes its part of the live weights from its masters and sends
        it to the others; under stage 3 it makes its shards, and small parameters that every rank
        keeps whole are gathered again.
        """
        if hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
        elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
            for number in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
            optimizer.checkpoint_event_prologue()  # releases gathered parameters
            optimizer.checkpoint_event_epilogue()  # gathers those that stay whole between steps

    def is_accumulating(self, optimizer: Any) -> bool:
        if hasattr(optimizer, "fp32_groups_has_gradients"):
            return any(any(group) for group in optimizer.fp32_groups_has_gradients)
        if hasattr(optimizer, "fp16_groups"):  # stage 3 counts on at the next forward only
            return bool(optimizer.micro_step_id > 0 or optimizer._epilogue_ran_this_backward)
        return bool(optimizer.micro_step_id >= 0)

    def unsaveable_state(self, optimizer: Any) -> list[str]:
        """The reasons are those of the inner optimizer.

        Settings of ZeRO are refused by `describe`.
        """
        if isinstance(optimizer, _Unflattened):
            return super().unsaveable_state(optimizer)
        return []


def scaler_numbers(optimizer: Any) -> dict[str, Any]:
    """The variables of the dynamic loss scaler, DeepSpeed's or torch's; empty without one."""
    torch_scaler = optimizer.torch_autocast_gradscaler
    if torch_scaler is not None:
        return {key: encode_value(value) for key, value in torch_scaler.state_dict().items()}
    scaler = getattr(optimizer, "loss_scaler", None)
    if not getattr(scaler, "dynamic", False):
        return {}
    return {key: encode_value(getattr(scaler, key)) for key in _SCALER}


def restore_scaler(optimizer: Any, stored: Mapping[str, Any]) -> None:
    """Restore the `scaler_numbers` of a loss scaler of the same kind.

    Ignore those of another kind.
    """
    values = {key: decode_value(value) for key, value in stored.items()}
    if set(values) != set(scaler_numbers(optimizer)):
        return  # the precision or the scaler has changed
    if optimizer.torch_autocast_gradscaler is not None:
        optimizer.torch_autocast_gradscaler.load_state_dict(values)
        return
    for key, value in values.items():
        setattr(optimizer.loss_scaler, key, value)


def _partitions_of(optimizer: Any, sources: Mapping[str, Source]) -> list[Partition]:
    return zero_partitions(optimizer, sources_by_parameter(sources))


def _unflatten_groups(optimizer: Any, partitions: list[Partition]) -> _Unflattened:
    groups = [{**group, "params": []} for group in optimizer.optimizer.param_groups]
    for partition in partitions:
        by_id: dict[int, Any] = {}
        for slot in partition.slots:
            parameter = parameter_of(slot.owner)
            by_id[id(parameter)] = parameter
        groups[partition.group]["params"] += by_id.values()
    return _Unflattened(groups, {})


def _describe_state(inner: Any, partitions: list[Partition]) -> dict[str, dict[str, Any]]:
    """The entries of each parameter's state."""
    state: dict[str, dict[str, Any]] = {}
    problems = []
    for partition in partitions:
        for key, value in inner.state.get(partition.master, {}).items():
            for slot in partition.slots:
                entry = _state_entry(value, partition.master, slot.owner)
                if entry is None:
                    kind = type(value).__name__
                    if isinstance(value, Tensor):
                        kind = f"shape {list(value.shape)}, not cut like the parameters"
                    problems.append(f"{slot.owner.name}: {key}: {kind}")
                state.setdefault(slot.owner.name, {})[key] = entry
    if problems:
        raise SelectionError(
            f"{type(inner).__name__}: {listing(problems)}: cannot be saved, so a run could not be "
            "resumed exactly; use an optimizer whose state is numbers and tensors like the "
            "parameters, or save without its state"
        )
    return state


def _state_entry(value: Any, master: Tensor, owner: Source) -> Any:
    """Shape, dtype and device of a tensor as for the parameter, or {"value": plain value}.

    None for other values.
    """
    if not isinstance(value, Tensor):
        return encode_if_plain(value)
    if _is_like_partition(value, master):
        return {"shape": list(owner.shape), "dtype": dtype_name(value.dtype), "host": False}
    if value.numel() != 1:
        return None
    host = value.device.type == "cpu" and parameter_of(owner).device.type != "cpu"
    return {"shape": list(value.shape), "dtype": dtype_name(value.dtype), "host": host}


def _is_like_partition(value: Any, master: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == master.shape


def _run_source(slot: Slot, key: str, buffer: Tensor) -> Source:
    """The source of a parameter's run in a buffer laid out like the partition."""
    owner = slot.owner
    name = f"{owner.name}/{key}"
    source = held_source(
        name, owner.raw_name, owner.shape, "zero", slot.sharding, buffer.dtype, buffer
    )
    return source.holding(slot.local_run(buffer))


def _whole_source(slot: Slot, key: str, tensor: Tensor) -> Source:
    """The source of a tensor that every rank has whole, such as a step count."""
    owner = slot.owner
    name = f"{owner.name}/{key}"
    shape = tuple(tensor.shape)
    sharding = ReplicatedSharding(shape)
    source = held_source(name, owner.raw_name, shape, "plain", sharding, tensor.dtype, tensor)
    return source.holding(tensor.detach())


def _restore_groups(
    optimizer: Any,
    partitions: list[Partition],
    description: Description,
    sources: Mapping[str, Source],
) -> None:
    """Set the described settings of the groups of the inner optimizer."""
    unflattened = _unflatten_groups(optimizer, partitions)
    names = names_of_groups(unflattened.param_groups, sources)
    pairs, _ = match_groups(unflattened.param_groups, names, description, sources)
    set_groups(pairs)
    groups = optimizer.optimizer.param_groups
    for group, restored in zip(groups, unflattened.param_groups, strict=True):
        group.update({key: value for key, value in restored.items() if key != "params"})


def _restore_state(
    inner: Any, partition: Partition, stored: Mapping[str, dict[str, Any]], fills: _Fills
) -> None:
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
        value.zero_()  # for parameters that had no state
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
    """Create the inner optimizer's state by a step with zero gradients and no learning rate."""
    master, groups = partition.master, inner.param_groups
    before, gradient = master.detach().clone(), master.grad
    group = {**groups[partition.group], "params": [master]}
    if "lr" in group:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    master.grad, inner.param_groups = torch.zeros_like(master), [group]
    try:
        inner.step()
    finally:
        master.grad, inner.param_groups = gradient, groups
    master.data.copy_(before)


def _link_states(optimizer: Any, partitions: list[Partition]) -> None:
    """Let DeepSpeed's functions that return a parameter's full state read the restored one.

    Without state in all partitions it links them after the next step.
    """
    if not hasattr(optimizer, "_hp_optimizer_states_linked"):
        return
    optimizer._hp_optimizer_states_linked = False
    if all(optimizer.optimizer.state.get(partition.master) for partition in partitions):
        optimizer._lazy_init_hp_params_optimizer_state()


def _restored_number(
    key: str,
    live: Any,
    entries_of_slots: Mapping[Slot, dict[str, Any]],
    fill: Callable[[Source], Any],
) -> Any:
    """The number, such as the step, that all parameters of a partition share, typed as `live`."""
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


def _read_run(slot: Slot, key: str, dtype: torch.dtype, into: Tensor, fills: _Fills) -> None:
    """Read this rank's run of a tensor stored as `dtype` into the flat buffer `into`."""
    source = _run_source(slot, key, into)
    if source.local is None or dtype == into.dtype:
        fills.later(replace(source, dtype=dtype))
        return
    stored = torch.empty(source.local.shape, dtype=dtype, device="cpu")
    fills.now(replace(source, dtype=dtype).holding(stored))
    source.local.copy_(stored)
