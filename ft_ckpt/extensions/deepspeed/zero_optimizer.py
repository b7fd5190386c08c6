"""Captures and restores the state of DeepSpeed's ZeRO optimizers by parameter name.

This works for the stages 1 to 3.

ZeRO trains flat float32 buffers, the masters; see `zero` for their layouts. Each rank has a buffer
or several, with elements of many parameters. The captured state has the shape of each parameter,
and does not depend on which elements a rank has. So it can be restored on any number of ranks, in
another stage, and in an optimizer without ZeRO.
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
    """The groups of the inner optimizer, with the model's parameters instead of flat buffers.

    `TorchOptimizers` reads it like an optimizer.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Any, Any]
    # A state dict has no entries but groups and state.
    state_dict = torch.optim.Optimizer.state_dict


class ZeroOptimizers(TorchOptimizers):
    """The optimizers that DeepSpeed partitions."""

    uses_model_gradients = False

    def recognizes(self, optimizer: Any) -> bool:
        # Names are compared, because importing DeepSpeed is slow.
        return any(
            kind.__name__ == "ZeROOptimizer" and kind.__module__.startswith("deepspeed.")
            for kind in type(optimizer).__mro__
        )

    def hooked_optimizer(self, optimizer: Any) -> tuple[Any, list[Tensor]]:
        """Return the torch optimizer inside ZeRO's, and the tensors that its step changes.

        These are the masters and the weights. They change only after the optimizer has begun to
        step. Before the step, gradients are prepared. After it, weights are made from the masters
        and sent to other ranks. Returns (None, []) if captured tensors may also change at other
        times.
        """
        changed_tensors = changed_with_steps(optimizer)
        if changed_tensors is None:
            return None, []
        return optimizer.optimizer, changed_tensors

    def describe(self, optimizer: Any, sources: Mapping[str, Source]) -> Description:
        """Describe the state as `OptimizerKind.describe` does, with "masters" and "scaler" as well.

        "masters" is {name: dtype}, and "scaler" has the numbers of the loss scaler. Masters with
        the dtype of the weights have the same values and are left out. The result is the same on
        every rank. May be called before the first step.
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
        """Return tensors as `OptimizerKind.state_tensors` does.

        Masters are named "parameter/master".
        """
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
        """Set the masters to the live, rounded weights. Not collective.

        This is also needed if weights are restored without the optimizer's state, because the old
        masters would overwrite them at the next step, or in `after_restore`.
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
        """Set the described state, which may be of another number of ranks. Not collective.

        The weights must be restored before, because masters that the description lacks are set to
        them. Sources are filled `later`, except those of numbers and of tensors whose dtype is
        converted. Raises LoadError for parameters, groups or state on one side only, and for step
        counts that differ within a partition.
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

        All ranks must call this method. Under stages 1 and 2, each rank makes its part of the live
        weights from its masters, and sends it to the others. Under stage 3, each rank makes its
        shards, and small parameters that every rank keeps whole are gathered again.
        """
        if hasattr(optimizer, "update_lp_params"):
            optimizer.update_lp_params()
        elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
            for number in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
            optimizer.checkpoint_event_prologue()  # releases gathered parameters
            # Gathers the parameters that stay whole between steps.
            optimizer.checkpoint_event_epilogue()

    def is_accumulating(self, optimizer: Any) -> bool:
        if hasattr(optimizer, "fp32_groups_has_gradients"):
            return any(any(group) for group in optimizer.fp32_groups_has_gradients)
        if hasattr(optimizer, "fp16_groups"):
            # Stage 3 increases its count only at the next forward pass.
            return bool(optimizer.micro_step_id > 0 or optimizer._epilogue_ran_this_backward)
        return bool(optimizer.micro_step_id >= 0)

    def unsaveable_state(self, optimizer: Any) -> list[str]:
        """Return the reasons why the state of the inner optimizer cannot be saved.

        Settings of ZeRO are refused by `describe`.
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
    """Set the settings of the inner optimizer's groups as described."""
    unflattened = _unflatten_groups(optimizer, partitions)
    names = names_of_groups(unflattened.param_groups, sources)
    pairs, _ = match_groups(unflattened.param_groups, names, description, sources)
    set_groups(pairs)
    groups = optimizer.optimizer.param_groups
    for group, restored in zip(groups, unflattened.param_groups, strict=True):
        group.update({key: value for key, value in restored.items() if key != "params"})


def _link_states(optimizer: Any, partitions: list[Partition]) -> None:
    """Let DeepSpeed's functions that return a parameter's full state read the restored state.

    If some partitions have no state, DeepSpeed links the functions after the next step.
    """
    if not hasattr(optimizer, "_hp_optimizer_states_linked"):
        return
    optimizer._hp_optimizer_states_linked = False
    if all(optimizer.optimizer.state.get(partition.master) for partition in partitions):
        optimizer._lazy_init_hp_params_optimizer_state()
