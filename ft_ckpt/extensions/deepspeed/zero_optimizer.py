"""The state of DeepSpeed's ZeRO optimizers (stages 1 to 3) by parameter name, and its restoration.

ZeRO trains flat float32 partitions, one or more on each rank, with runs of many parameters one
after the other. The described state has the shape of each parameter, independent of the runs that
ranks hold, so that it restores on any number of ranks, in another stage, and in a plain optimizer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ft_ckpt.extensions.deepspeed.engine_numbers import restore_scaler, scaler_numbers
from ft_ckpt.extensions.deepspeed.partition_state import (
    Fills,
    describe_masters,
    describe_state,
    restore_masters,
    restore_partition_state,
    state_sources,
)
from ft_ckpt.extensions.deepspeed.zero import Partition, changed_with_steps, zero_partitions
from ft_ckpt.ranks.sharding import Source
from ft_ckpt.runs.optimizers import (
    Description,
    TorchOptimizers,
    match_groups,
    names_of_groups,
    parameter_of,
    refuse_missing_state,
    set_groups,
    sources_by_parameter,
)


@dataclass(frozen=True, eq=False)
class _Unflattened:
    """The inner optimizer's groups with the model's parameters, as `TorchOptimizers` reads them."""

    param_groups: list[dict[str, Any]]
    state: dict[Any, Any]
    state_dict = torch.optim.Optimizer.state_dict  # no entries but groups and state


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
        """Return the torch optimizer inside ZeRO's, and the tensors that its step changes.

        These are the masters and weights. They change only after the optimizer has begun to step:
        gradients are prepared before the step; weights are made from the masters and sent to other
        ranks after it. Returns (None, []) if captured tensors change at other moments too.
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
        return {
            **groups,
            "class": type(optimizer.optimizer).__name__,
            "state": describe_state(optimizer.optimizer, partitions),
            "masters": describe_masters(partitions),
            "scaler": scaler_numbers(optimizer),
        }

    def state_tensors(
        self, optimizer: Any, description: Description, sources: Mapping[str, Source]
    ) -> dict[str, Source]:
        """Return tensors as `OptimizerKind.state_tensors` does, masters as "parameter/master"."""
        tensors: dict[str, Source] = {}
        missing: list[str] = []
        for partition in _partitions_of(optimizer, sources):
            state, absent = state_sources(optimizer.optimizer, partition, description)
            tensors.update(state)
            missing += absent
        refuse_missing_state(optimizer, missing)
        return tensors

    def check(
        self, optimizer: Any, description: Description, sources: Mapping[str, Source]
    ) -> None:
        partitions = _partitions_of(optimizer, sources)
        super().check(_unflatten_groups(optimizer, partitions), description, sources)

    def before_restore(self, optimizer: Any) -> None:
        """Make the masters from the live, rounded weights. Not collective.

        Weights restored without optimizer state need this too: the masters would overwrite them at
        the next step, or in `after_restore`.
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
        fills = Fills(fill, later or fill)
        _restore_groups(optimizer, partitions, description, sources)
        masters = description.get("masters", {})
        for partition in partitions:
            restore_masters(partition, masters, fills)
        for partition in partitions:
            restore_partition_state(optimizer.optimizer, partition, description["state"], fills)
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
        """Make all copies of the weights equal to the restored masters and shards.

        Collective: call it on every rank. Under stages 1 and 2 each rank makes its part of the live
        weights from its masters and sends it to the others; under stage 3 it makes its shards, and
        small parameters that every rank keeps whole are gathered again.
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
        """Return the reasons of the inner optimizer.

        `describe` refuses settings of ZeRO.
        """
        if isinstance(optimizer, _Unflattened):
            return super().unsaveable_state(optimizer)
        return []


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


def _link_states(optimizer: Any, partitions: list[Partition]) -> None:
    """Let DeepSpeed's functions that return a parameter's full state read the restored one.

    If some partitions have no state, the functions are linked after the next step.
    """
    if not hasattr(optimizer, "_hp_optimizer_states_linked"):
        return
    optimizer._hp_optimizer_states_linked = False
    if all(optimizer.optimizer.state.get(partition.master) for partition in partitions):
        optimizer._lazy_init_hp_params_optimizer_state()
